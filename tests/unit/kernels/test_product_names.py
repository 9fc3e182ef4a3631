"""Products are told apart by name in statistics and rollout files."""

from __future__ import annotations

from aengine.kernels.invariance import LinearShape


def test_a_bias_is_part_of_a_products_name() -> None:
    assert [str(LinearShape(64, 32)), str(LinearShape(64, 32, has_bias=True))] == ["64 x 32", "64 x 32 + bias"]
