"""The exponential: close to the true value, and the same bits wherever it is computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aengine.kernels.elementary import exp_row


def exp(x: NDArray[np.float32]) -> NDArray[np.float32]:
    result = np.full_like(x, np.nan)
    exp_row(x, result)
    return result


@pytest.mark.parametrize(("low", "high"), [(-87.3, 0.0), (-1.0, 1.0), (0.0, 88.3)])
def test_exp_is_within_two_units_in_the_last_place(low: float, high: float) -> None:
    x = np.linspace(low, high, 300_001).astype(np.float32)
    truth = np.exp(x.astype(np.float64))
    error = np.abs(exp(x) - truth) / np.spacing(truth.astype(np.float32))
    assert error.max() <= 1.1
    assert error.mean() < 0.3


def test_exp_is_exact_at_zero_and_vanishes_far_below() -> None:
    x = np.array([0.0, -0.0, -87.31, -1e30, -np.inf], np.float32)
    np.testing.assert_array_equal(exp(x), np.array([1, 1, 0, 0, 0], np.float32))


def test_exp_stays_finite_above_its_range_and_passes_on_what_is_not_a_number() -> None:
    result = exp(np.array([89.0, np.inf, np.nan], np.float32))
    assert np.isfinite(result[:2]).all()
    assert (result[:2] > 2e38).all()
    assert np.isnan(result[2])


@given(st.lists(st.floats(-90, 10, width=32), min_size=1, max_size=70), st.integers(0, 20))
def test_bits_of_exp_depend_neither_on_lane_nor_on_neighbours(numbers: list[float], shift: int) -> None:
    x = np.array(numbers, np.float32)
    shifted = np.concatenate([np.zeros(shift, np.float32), x])
    alone = np.concatenate([exp(x[i : i + 1]) for i in range(len(x))])
    assert exp(x).tobytes() == alone.tobytes() == exp(shifted)[shift:].tobytes()


def test_exp_can_replace_its_argument() -> None:
    x = np.linspace(-5, 5, 37).astype(np.float32)
    expected = exp(x)
    exp_row(x, x)
    np.testing.assert_array_equal(x, expected)
