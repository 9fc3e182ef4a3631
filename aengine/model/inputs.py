"""What one forward pass computes: rows, and where each row stands."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import Attribute, field, frozen
from numpy.typing import NDArray

__all__ = ["ForwardInputs"]


def _is_array(dtype: type[np.generic], ndim: int) -> Any:
    def check(_: ForwardInputs, attribute: Attribute[Any], value: NDArray[Any]) -> None:
        if value.dtype != dtype or value.ndim != ndim or not value.flags.c_contiguous:
            raise ValueError(
                f"{attribute.name} must be a C-contiguous {dtype.__name__} array of {ndim} dimensions, "
                f"got {value.dtype} of shape {value.shape}"
            )

    return check


@frozen(eq=False)
class ForwardInputs:
    """R rows of S sequences; the rows of one sequence are consecutive and in the order of their positions.

    Every row's key and value are written at its position before any row attends to positions 0 up to its own. So a
    prompt is as many rows as it has tokens, a decode step one row per sequence, and both may share a pass.
    `page_tables[s, i]` is the page of positions i * page_size and on; entries past the last position are not read.
    """

    token_ids: NDArray[np.int64] = field(validator=_is_array(np.int64, 1))  # [R]
    positions: NDArray[np.int64] = field(validator=_is_array(np.int64, 1))  # [R]
    sequences: NDArray[np.int64] = field(validator=_is_array(np.int64, 1))  # [R], rows of page_tables
    page_tables: NDArray[np.int32] = field(validator=_is_array(np.int32, 2))  # [S, P]

    def __attrs_post_init__(self) -> None:
        if not len(self.token_ids) == len(self.positions) == len(self.sequences):
            raise ValueError(
                f"token_ids, positions and sequences differ in length: "
                f"{len(self.token_ids)}, {len(self.positions)}, {len(self.sequences)}"
            )

    def check_bounds(self, *, max_model_len: int, num_pages: int, page_size: int) -> None:
        """Raises `ValueError` where compiled kernels, which check nothing, would leave their arrays."""
        if len(self.positions) == 0:
            return
        num_sequences, table_size = self.page_tables.shape
        longest = min(max_model_len, table_size * page_size)
        if self.positions.min() < 0 or self.positions.max() >= longest:
            raise ValueError(f"positions must be in [0, {longest}), got {self.positions.min()}..{self.positions.max()}")
        if self.sequences.min() < 0 or self.sequences.max() >= num_sequences:
            raise ValueError(
                f"sequences must be in [0, {num_sequences}), got {self.sequences.min()}..{self.sequences.max()}"
            )
        pages = self.page_tables[self.sequences, self.positions // page_size]
        if pages.min() < 0 or pages.max() >= num_pages:
            raise ValueError(f"pages must be in [0, {num_pages}), got {pages.min()}..{pages.max()}")
