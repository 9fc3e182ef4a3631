"""The arrays of a forward pass are checked when made, since compiled code trusts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aengine.model.inputs import ForwardInputs

GOOD = {
    "token_ids": np.array([5, 6, 7]),
    "positions": np.array([0, 1, 0]),
    "sequences": np.array([0, 0, 1]),
    "page_tables": np.zeros((2, 3), np.int32),
}


def test_well_formed_arrays_are_taken_as_they_are() -> None:
    inputs = ForwardInputs(**GOOD)
    assert inputs.page_tables is GOOD["page_tables"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.array([5, 6, 7], np.int32)}, "token_ids must be a C-contiguous int64 array"),
        ({"positions": np.arange(6)[::2]}, "positions must be a C-contiguous int64 array"),
        ({"sequences": np.zeros((3, 1), np.int64)}, "of 1 dimensions"),
        ({"page_tables": np.zeros((2, 3))}, "page_tables must be a C-contiguous int32 array of 2 dimensions"),
        ({"token_ids": np.array([5])}, "differ in length: 1, 3, 3"),
    ],
)
def test_malformed_arrays_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForwardInputs(**(GOOD | change))


def test_no_rows_are_in_bounds() -> None:
    nothing = np.zeros(0, np.int64)
    inputs = ForwardInputs(nothing, nothing, nothing, np.zeros((0, 0), np.int32))
    inputs.check_bounds(max_model_len=8, num_pages=1, page_size=4)
