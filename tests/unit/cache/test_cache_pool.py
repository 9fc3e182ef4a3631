"""Rows of the request table have one owner each."""

from __future__ import annotations

import numpy as np
import pytest

from aengine.cache.pool import ReqToTokenPool
from aengine.errors import OutOfRowsError, PageAccountingError


def test_every_row_is_taken_once() -> None:
    pool = ReqToTokenPool(3, 2)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(OutOfRowsError, match="all 3 rows"):
        pool.take()


@pytest.mark.parametrize("row", [1, -1, 2])
def test_a_row_that_is_not_taken_cannot_be_given_back(row: int) -> None:
    pool = ReqToTokenPool(2, 2)
    assert pool.take() == 0
    with pytest.raises(PageAccountingError, match=f"row {row} "):
        pool.give_back(row)
    assert pool.num_free == 1


def test_a_row_given_back_is_empty() -> None:
    pool = ReqToTokenPool(1, 3)
    row = pool.take()
    pool.write(row, 1, [7, 8])
    assert pool.gather([row, row], 3).tolist() == [[0, 7, 8], [0, 7, 8]]
    pool.give_back(row)
    assert not pool.table.any()


def test_gathered_rows_are_a_contiguous_copy() -> None:
    pool = ReqToTokenPool(2, 3)
    gathered = pool.gather([1, 0], 2)
    assert gathered.dtype == np.int32
    assert gathered.flags.c_contiguous
    gathered[:] = 5
    assert not pool.table.any()
