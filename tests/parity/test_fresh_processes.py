"""Twenty processes, one digest: nothing that a process chooses at its start decides a bit."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("fresh_process.py")
THREADS = [1, 2] * 10
AT_ONCE = 2
PATIENCE = 240
"""Seconds for one process; a quiet machine takes three, and compiling all kernels first one minute."""


def run_fresh(num_threads: int) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), str(num_threads)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"with {num_threads} threads:\n{done.stderr}"
    return done.stdout.strip()


def test_64_samples_have_the_same_digest_in_20_fresh_processes_with_one_and_two_threads() -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        digests = list(pool.map(run_fresh, THREADS))
    assert len(digests) == 20
    assert len(digests[0]) == 64
    assert set(digests) == {digests[0]}
