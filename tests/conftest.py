"""What all tests share: hypothesis profiles, and no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile(
    "ci", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", parent=settings.get_profile("ci"), max_examples=3000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


LONG_LAWS = (
    "soak/",
    "parity/",
    "protocol/test_update_exhaustive.py",
    "protocol/test_cache_machine.py",
    "unit/test_plan_laws.py",
    "unit/sampling/test_sampling_statistics.py",
)
"""Tests whose lines other tests reach too; tracing them would take most of the suite's time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        if item.path.relative_to(tests).as_posix().startswith(LONG_LAWS):
            item.add_marker(pytest.mark.no_cover)
