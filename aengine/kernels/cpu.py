"""The compiled kernels behind torch tensors: an implementation of `Kernels` on the CPU.

Inputs are contiguous; page tables and positions are trusted, since compiled code checks no bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

from aengine.kernels.attention import attend_rows, write_rows
from aengine.kernels.formats import as_array
from aengine.kernels.interface import HeadShape, PagedRows, Rotary
from aengine.kernels.jit import RowKernel
from aengine.kernels.rows import add_norm_rows, norm_head_rows, norm_rows, silu_mul_rows
from aengine.kernels.threads import use_threads

__all__ = ["add_rms_norm", "norm_heads", "paged_attention", "rms_norm", "rotate_and_write", "silu_mul"]

P = ParamSpec("P")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = torch.empty_like(x)
    _choose(norm_rows, x.numel())(as_array(x), as_array(weight), eps, as_array(result))
    return result


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = torch.empty_like(x)
    _choose(add_norm_rows, x.numel())(as_array(residual), as_array(x), as_array(weight), eps, as_array(result))
    return result


def norm_heads(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, shape: HeadShape) -> None:
    _choose(norm_head_rows, qkv.numel())(as_array(qkv), as_array(query_weight), as_array(key_weight), eps, shape)


def rotate_and_write(qkv: Tensor, rotary: Rotary, rows: PagedRows, kv: Tensor, shape: HeadShape) -> None:
    _choose(write_rows, qkv.numel())(
        as_array(qkv),
        rotary.cosines,
        rotary.sines,
        rows.positions,
        rows.sequences,
        rows.page_tables,
        as_array(kv),
        shape,
    )


def paged_attention(qkv: Tensor, rows: PagedRows, kv: Tensor, shape: HeadShape) -> Tensor:
    result = qkv.new_empty(qkv.shape[0], shape.num_heads * shape.head_dim)
    longest_context = rows.page_tables.shape[1] * shape.page_size
    _choose(attend_rows, result.numel() * longest_context)(
        as_array(qkv), rows.positions, rows.sequences, rows.page_tables, as_array(kv), as_array(result), shape
    )
    return result


def silu_mul(gate_up: Tensor) -> Tensor:
    result = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _choose(silu_mul_rows, gate_up.numel())(as_array(gate_up), as_array(result))
    return result


def _choose(kernel: RowKernel[P], work: int) -> Callable[P, None]:
    return kernel.parallel if use_threads(work) else kernel.serial
