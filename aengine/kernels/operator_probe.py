"""Whether the kernels of a decoder hold on this machine: right values, and bits that do not depend on company.

As `invariance.probe` does for products. Each operator is tried at the model's own sizes on random rows, against
`kernels.reference` in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels import cpu, reference
from aengine.kernels.interface import HeadShape, Kernels, Rotary
from aengine.kernels.threads import PARALLEL_FROM
from aengine.kernels.trial import (
    Compute,
    Operator,
    OperatorFinding,
    Pick,
    Trial,
    examine,
    relative_error,
    thread_counts,
    torch_threads,
)

__all__ = ["DecoderShape", "probe_operators"]

LONGEST = 1024
"""Positions of the longest context tried."""
SHORT = 64
NUM_LONG = 4
"""Most rows have contexts of up to SHORT positions, which are as good and cost less."""
FEWEST_ROWS = 130
VALUE_TOLERANCE = 1e-5
PAGED = ("rotate_and_write", "paged_attention")
"""Operators that know of positions and pages."""


@frozen
class DecoderShape:
    """What the operators' inputs look like. `max_positions` is the longest sequence; `has_head_norms` that q and k are
    normed; `dtype` the type of weights, activations and KV."""

    hidden_size: int
    intermediate_size: int
    heads: HeadShape
    eps: float
    max_positions: int
    has_head_norms: bool = False
    dtype: torch.dtype = torch.float32


def probe_operators(
    shape: DecoderShape, kernels: Kernels = cpu, strategy: str = "numba"
) -> tuple[OperatorFinding, ...]:
    """One finding for each operator that a decoder of this shape calls.

    Call it in the thread that will run the model. A second probe of the same functions in a process costs nothing.
    """
    paged = evolve(shape, max_positions=min(shape.max_positions, LONGEST))
    plain = evolve(shape, heads=shape.heads._replace(page_size=1), max_positions=1)
    return tuple(
        _find(name, getattr(kernels, name), paged if name in PAGED else plain, strategy, thread_counts())
        for name in OPERATORS
        if name != "norm_heads" or shape.has_head_norms
    )


@functools.cache
def _find(
    name: str, operator: Operator, shape: DecoderShape, strategy: str, counts: tuple[int, ...]
) -> OperatorFinding:
    row_size = min(shape.hidden_size, shape.heads.row_size, 2 * shape.intermediate_size)
    num_rows = max(FEWEST_ROWS, -(-PARALLEL_FROM // row_size))
    make, exact = OPERATORS[name], getattr(reference, name)
    with torch_threads(1):
        pool = _Pool.of(shape, num_rows, shape.dtype)
        variants = tuple(make(pool, shape.heads._replace(page_size=size)) for size in _page_sizes(name, shape.heads))
        plain = make(_Pool.of(shape, num_rows, torch.float64), shape.heads)

    def measure(pick: Pick, results: Tensor) -> float:
        return relative_error(results, plain(exact, pick))

    tolerance = max(VALUE_TOLERANCE, 2 * torch.finfo(shape.dtype).eps)
    return examine(Trial(name, strategy, operator, num_rows, variants, measure, tolerance), counts)


def _page_sizes(name: str, heads: HeadShape) -> tuple[int, ...]:
    """The engine's own, and where pages are used another one, since a replay may use another one."""
    if name not in PAGED:
        return (heads.page_size,)
    return (heads.page_size, 4 if heads.page_size == 16 else 16)


@frozen(eq=False)
class _Rows:
    """`PagedRows`."""

    positions: NDArray[np.int64]
    sequences: NDArray[np.int64]
    page_tables: NDArray[np.int32]


@frozen(eq=False)
class _Pool:
    """Inputs for some rows, each another position of one of some sequences.

    Numbers are rounded to the type of `shape` and given as `dtype`: the same ones in any type that holds them.
    """

    shape: DecoderShape
    dtype: torch.dtype
    num_sequences: int
    positions: Tensor
    sequences: Tensor

    @classmethod
    def of(cls, shape: DecoderShape, num_rows: int, dtype: torch.dtype) -> _Pool:
        short = min(shape.max_positions, SHORT)
        num_sequences = max(2, -(-num_rows // short))
        order = torch.randperm(num_sequences * short, generator=_generator(0))[:num_rows]
        positions, sequences = order % short, order // short
        if shape.max_positions >= SHORT + NUM_LONG:
            positions[:NUM_LONG] = torch.linspace(shape.max_positions - 1, short, NUM_LONG).long()
        return cls(shape, dtype, num_sequences, positions, sequences)

    def numbers(self, seed: int, *size: int) -> Tensor:
        return torch.randn(size, generator=_generator(seed)).to(self.shape.dtype).to(self.dtype)

    def rows(self, width: int, seed: int = 1) -> Tensor:
        return self.numbers(seed, len(self.positions), width)

    def weight(self, width: int) -> Tensor:
        return self.numbers(2, width)

    def rotary(self) -> Rotary:
        angles = np.random.default_rng(3).uniform(-3, 3, (self.shape.max_positions, self.shape.heads.head_dim // 2))
        return Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    def page_tables(self, page_size: int) -> NDArray[np.int32]:
        """Pages of all sequences, dealt out at random."""
        width = -(-self.shape.max_positions // page_size)
        pages = np.random.default_rng(4).permutation(self.num_sequences * width)
        return pages.astype(np.int32).reshape(self.num_sequences, width)

    def places(self, pick: Tensor, page_tables: NDArray[np.int32]) -> _Rows:
        return _Rows(self.positions[pick].numpy(), self.sequences[pick].numpy(), page_tables)

    def written_pages(self, page_tables: NDArray[np.int32], heads: HeadShape) -> Tensor:
        """Keys and values of all positions of all sequences; which numbers those are does not depend on the pages."""
        (sequences, width), size, length = page_tables.shape, heads.page_size, self.shape.max_positions
        numbers = self.numbers(5, 2, sequences, length, heads.num_kv_heads, heads.head_dim)
        padded = torch.nn.functional.pad(numbers, (0, 0, 0, 0, 0, width * size - length))
        paged = padded.view(2, sequences, width, size, heads.num_kv_heads, heads.head_dim)
        keys, values = paged.transpose(3, 4)  # [sequences, width, heads, size, head_dim]
        content = torch.cat([keys.mT.flatten(3), values.flatten(3)], -1).flatten(0, 1)
        kv = torch.empty_like(content)
        kv[torch.from_numpy(page_tables).flatten().long()] = content
        return kv


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rms_norm(pool: _Pool, heads: HeadShape) -> Compute:
    x, weight = pool.rows(pool.shape.hidden_size), pool.weight(pool.shape.hidden_size)
    return lambda operator, pick: operator(x[pick], weight, pool.shape.eps)


def _add_rms_norm(pool: _Pool, heads: HeadShape) -> Compute:
    width = pool.shape.hidden_size
    x, delta, weight = pool.rows(width), pool.rows(width, seed=6), pool.weight(width)

    def compute(operator: Operator, pick: Pick) -> Tensor:
        residual = x[pick]
        return torch.cat([operator(residual, delta[pick], weight, pool.shape.eps), residual], -1)

    return compute


def _norm_heads(pool: _Pool, heads: HeadShape) -> Compute:
    qkv, weight = pool.rows(heads.row_size), pool.weight(heads.head_dim)

    def compute(operator: Operator, pick: Pick) -> Tensor:
        own = qkv[pick]
        operator(own, weight, weight.flip(0), pool.shape.eps, heads)
        return own

    return compute


def _rotate_and_write(pool: _Pool, heads: HeadShape) -> Compute:
    qkv, rotary, page_tables = pool.rows(heads.row_size), pool.rotary(), pool.page_tables(heads.page_size)
    kv_shape = (page_tables.size, heads.num_kv_heads, 2 * heads.head_dim * heads.page_size)

    def compute(operator: Operator, pick: Pick) -> Tensor:
        own, rows, kv = qkv[pick], pool.places(pick, page_tables), qkv.new_full(kv_shape, torch.nan)
        operator(own, rotary, rows, kv, heads)
        pages = torch.from_numpy(page_tables[rows.sequences, rows.positions // heads.page_size]).long()
        offsets = torch.from_numpy(rows.positions % heads.page_size)
        keys, values = reference.split_pages(kv, heads)
        return torch.cat([own, keys[pages, :, :, offsets].flatten(1), values[pages, :, offsets].flatten(1)], -1)

    return compute


def _paged_attention(pool: _Pool, heads: HeadShape) -> Compute:
    qkv, page_tables = pool.rows(heads.row_size), pool.page_tables(heads.page_size)
    kv = pool.written_pages(page_tables, heads)
    return lambda operator, pick: operator(qkv[pick], pool.places(pick, page_tables), kv, heads)


def _silu_mul(pool: _Pool, heads: HeadShape) -> Compute:
    gate_up = pool.rows(2 * pool.shape.intermediate_size)
    return lambda operator, pick: operator(gate_up[pick])


OPERATORS: Mapping[str, Callable[[_Pool, HeadShape], Compute]] = MappingProxyType(
    {
        "rms_norm": _rms_norm,
        "add_rms_norm": _add_rms_norm,
        "norm_heads": _norm_heads,
        "rotate_and_write": _rotate_and_write,
        "paged_attention": _paged_attention,
        "silu_mul": _silu_mul,
    }
)
"""How each operator is called on some rows of a pool; results are all that it writes for those rows."""
