"""The request-to-slot table: which pages each running task reads and writes, as the kernels see them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aengine.errors import OutOfRowsError, PageAccountingError

__all__ = ["ReqToTokenPool"]


class ReqToTokenPool:
    """One row a running task; entry i of a row is the page of positions `i * page_size` onwards.

    Entries behind a task's last page are 0 and mean nothing.
    """

    def __init__(self, max_num_seqs: int, max_pages_per_seq: int) -> None:
        self.num_rows, self.max_pages_per_seq = max_num_seqs, max_pages_per_seq
        self.table: NDArray[np.int32] = np.zeros((max_num_seqs, max_pages_per_seq), dtype=np.int32)
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._is_taken = [False] * max_num_seqs

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A row for a new task. Raises `OutOfRowsError`."""
        if not self._free:
            raise OutOfRowsError(self.num_rows)
        row = self._free.pop()
        self._is_taken[row] = True
        return row

    def give_back(self, row: int) -> None:
        if not 0 <= row < self.num_rows or not self._is_taken[row]:
            raise PageAccountingError(f"row {row} of the request table is not taken")
        self.table[row] = 0
        self._is_taken[row] = False
        self._free.append(row)

    def write(self, row: int, first: int, pages: Sequence[int]) -> None:
        """Set the entries from `first` on."""
        self.table[row, first : first + len(pages)] = pages

    def gather(self, rows: Sequence[int], width: int) -> NDArray[np.int32]:
        """A copy of these rows, `width` entries each: int32 [len(rows), width]."""
        return self.table[list(rows), :width]
