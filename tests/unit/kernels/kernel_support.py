"""Random inputs for kernels, on pages filled with NaN so that anything read before it is written shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.interface import HeadShape, Kernels, Rotary


@frozen(eq=False)
class Rows:
    positions: NDArray[np.int64]
    sequences: NDArray[np.int64]
    page_tables: NDArray[np.int32]

    def pick(self, which: slice | list[int]) -> Rows:
        return evolve(self, positions=self.positions[which].copy(), sequences=self.sequences[which].copy())


@frozen(eq=False)
class Batch:
    """All rows of some sequences, from position 0 on."""

    rows: Rows
    qkv: Tensor
    rotary: Rotary
    shape: HeadShape
    num_pages: int

    def empty_kv(self) -> Tensor:
        size = 2 * self.shape.head_dim * self.shape.page_size
        return torch.full((self.num_pages, self.shape.num_kv_heads, size), torch.nan, dtype=self.qkv.dtype)

    def run(self, kernels: Kernels, kv: Tensor, which: slice | list[int] = slice(None)) -> Tensor:
        """Rotate, write and attend for some of the rows, on a copy of their QKV."""
        qkv, rows = self.qkv[which].clone(), self.rows.pick(which)
        kernels.rotate_and_write(qkv, self.rotary, rows, kv, self.shape)
        return kernels.paged_attention(qkv, rows, kv, self.shape)


def make_batch(shape: HeadShape, lengths: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Pages are dealt out at random; all else depends on seed, lengths and heads only, not on the page size."""
    numbers = np.random.default_rng(seed)
    row_size = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.from_numpy(numbers.standard_normal((sum(lengths), row_size), dtype=np.float32))
    angles = numbers.uniform(-3, 3, (max(lengths), shape.head_dim // 2))
    width = max(-(-length // shape.page_size) for length in lengths)
    page_tables = numbers.permutation(len(lengths) * width).astype(np.int32).reshape(len(lengths), width)
    rows = Rows(
        positions=np.concatenate([np.arange(length) for length in lengths]),
        sequences=np.repeat(np.arange(len(lengths)), lengths),
        page_tables=page_tables,
    )
    rotary = Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    return Batch(rows, qkv.to(dtype), rotary, shape, page_tables.size)
