"""The compiled kernels behind torch tensors: an implementation of `Kernels` for float32 on the CPU.

Inputs are contiguous; page tables and positions are trusted, since compiled code checks no bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

from aengine.kernels.attention import attend_rows, write_rows
from aengine.kernels.interface import HeadShape, PagedRows, Rotary
from aengine.kernels.jit import RowKernel
from aengine.kernels.rows import add_norm_rows, norm_head_rows, norm_rows, silu_mul_rows
from aengine.kernels.simd import Floats
from aengine.kernels.threads import use_threads

__all__ = ["add_rms_norm", "norm_heads", "paged_attention", "rms_norm", "rotate_and_write", "silu_mul"]

P = ParamSpec("P")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = torch.empty_like(x)
    _choose(norm_rows, x.numel())(_flat(x), _flat(weight), eps, _flat(result))
    return result


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = torch.empty_like(x)
    _choose(add_norm_rows, x.numel())(_flat(residual), _flat(x), _flat(weight), eps, _flat(result))
    return result


def norm_heads(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, shape: HeadShape) -> None:
    _choose(norm_head_rows, qkv.numel())(_flat(qkv), _flat(query_weight), _flat(key_weight), eps, shape)


def rotate_and_write(qkv: Tensor, rotary: Rotary, rows: PagedRows, kv: Tensor, shape: HeadShape) -> None:
    _choose(write_rows, qkv.numel())(
        _flat(qkv),
        rotary.cosines,
        rotary.sines,
        rows.positions,
        rows.sequences,
        rows.page_tables,
        _flat(kv),
        shape,
    )


def paged_attention(qkv: Tensor, rows: PagedRows, kv: Tensor, shape: HeadShape) -> Tensor:
    num_rows, size = qkv.shape[0], shape.num_heads * shape.head_dim
    result = qkv.new_empty(num_rows, size)
    longest_context = rows.page_tables.shape[1] * shape.page_size
    _choose(attend_rows, num_rows * size * longest_context)(
        qkv.view(num_rows, -1, shape.head_dim).numpy(),
        rows.positions,
        rows.sequences,
        rows.page_tables,
        _flat(kv),
        result.view(num_rows, shape.num_heads, shape.head_dim).numpy(),
        shape,
    )
    return result


def silu_mul(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[1] // 2
    result = gate_up.new_empty(gate_up.shape[0], width)
    _choose(silu_mul_rows, gate_up.numel())(_flat(gate_up), width, _flat(result))
    return result


def _choose(kernel: RowKernel[P], work: int) -> Callable[P, None]:
    return kernel.parallel if use_threads(work) else kernel.serial


def _flat(x: Tensor) -> Floats:
    flat: Floats = x.view(-1).numpy()
    return flat
