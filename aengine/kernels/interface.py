"""What a set of kernels offers, whatever device it runs on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["HeadShape", "Kernels", "PagedRows", "Rotary"]


class HeadShape(NamedTuple):
    """How a row of fused QKV splits: all query heads, then all key heads, then all value heads, each `head_dim` wide.

    A named tuple because compiled code takes it as it is.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def row_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Rotary(NamedTuple):
    """Contiguous tables [positions, head_dim / 2]; pair i of a head is its dimensions i and i + head_dim / 2."""

    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]


class PagedRows(Protocol):
    """Where each row stands. Its sequence's context is every position up to and including its own.

    All arrays are C-contiguous. `page_tables[s, i]` is the page that holds positions i * page_size and on of sequence
    s; entries past the last position in use are not read.
    """

    @property
    def positions(self) -> NDArray[np.int64]:  # [R]
        ...

    @property
    def sequences(self) -> NDArray[np.int64]:  # [R], rows of page_tables
        ...

    @property
    def page_tables(self) -> NDArray[np.int32]:  # [S, P]
        ...


class Kernels(Protocol):
    """Operators on contiguous tensors of R rows; a row's result depends on that row (and its context) alone.

    All tensors of a call are float32, bfloat16 or float16. Inside an operator numbers are float32; what it returns or
    writes in place is rounded to the tensors' type, once. Rotary tables are float32 in any case.

    `kv` is one layer of the cache, [pages, kv heads, 2 * head_dim * page_size]: for one page and head first the keys as
    [head_dim, page_size], then the values as [page_size, head_dim].
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns the norm of that sum."""
        ...

    def norm_heads(self, qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, shape: HeadShape) -> None:
        """The RMS norm of every query and key head on its own, in place."""
        ...

    def rotate_and_write(self, qkv: Tensor, rotary: Rotary, rows: PagedRows, kv: Tensor, shape: HeadShape) -> None:
        """Rotate query and key heads in place, and put every row's key and value where its position belongs."""
        ...

    def paged_attention(self, qkv: Tensor, rows: PagedRows, kv: Tensor, shape: HeadShape) -> Tensor:
        """[R, num_heads * head_dim]; all keys and values of the contexts must have been written."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[R, 2 * I] to [R, I]: silu of the first half of a row times the second."""
        ...
