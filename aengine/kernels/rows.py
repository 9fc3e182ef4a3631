"""Compiled loops over rows: norms and the gated activation. Arrays are [R, width], weights [width]."""

from __future__ import annotations

import numpy as np

from aengine.kernels.elementary import exp
from aengine.kernels.interface import HeadShape
from aengine.kernels.jit import compiled, prange, row_kernel
from aengine.kernels.simd import LANES, Floats, fma, load_part, splat, store_part, total

__all__ = ["add_norm_rows", "norm_head_rows", "norm_rows", "silu_mul_rows"]

ZERO, ONE = np.float32(0), np.float32(1)


@compiled
def inverse_rms(x: Floats, start: int, width: int, eps: float) -> np.float32:
    """1 / sqrt(mean of squares + eps) of x[start : start + width]; number i of the row is summed in lane i % 16."""
    squares = splat(ZERO)
    for i in range(0, width, LANES):
        value = load_part(x, start + i, width - i)
        squares = fma(value, value, squares)
    scale: np.float32 = ONE / np.sqrt(total(squares) / np.float32(width) + np.float32(eps))
    return scale


@compiled
def scale_row(x: Floats, start: int, scale: np.float32, weight: Floats, result: Floats) -> None:
    width = weight.shape[0]
    for i in range(0, width, LANES):
        value = load_part(x, start + i, width - i) * splat(scale) * load_part(weight, i, width - i)
        store_part(result, start + i, value, width - i)


@compiled
def norm_row(x: Floats, start: int, weight: Floats, eps: float, result: Floats) -> None:
    scale_row(x, start, inverse_rms(x, start, weight.shape[0], eps), weight, result)


@row_kernel
def norm_rows(x: Floats, weight: Floats, eps: float, result: Floats) -> None:
    width = weight.shape[0]
    for row in prange(x.shape[0]):
        norm_row(x, row * width, weight, eps, result)


@compiled
def add_row(residual: Floats, x: Floats, start: int, width: int) -> None:
    for i in range(0, width, LANES):
        value = load_part(residual, start + i, width - i) + load_part(x, start + i, width - i)
        store_part(residual, start + i, value, width - i)


@row_kernel
def add_norm_rows(residual: Floats, x: Floats, weight: Floats, eps: float, result: Floats) -> None:
    width = weight.shape[0]
    for row in prange(x.shape[0]):
        add_row(residual, x, row * width, width)
        norm_row(residual, row * width, weight, eps, result)


@row_kernel
def norm_head_rows(qkv: Floats, query_weight: Floats, key_weight: Floats, eps: float, shape: HeadShape) -> None:
    row_size = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    for row in prange(qkv.shape[0]):
        for head in range(shape.num_heads + shape.num_kv_heads):
            weight = query_weight if head < shape.num_heads else key_weight
            norm_row(qkv, row * row_size + head * shape.head_dim, weight, eps, qkv)


@row_kernel
def silu_mul_rows(gate_up: Floats, result: Floats) -> None:
    width = result.shape[1]
    for row in prange(result.shape[0]):
        gates, ups, results = row * 2 * width, row * 2 * width + width, row * width
        for i in range(0, width, LANES):
            gate, up = load_part(gate_up, gates + i, width - i), load_part(gate_up, ups + i, width - i)
            sigmoid = splat(ONE) / (splat(ONE) + exp(splat(ZERO) - gate))
            store_part(result, results + i, gate * sigmoid * up, width - i)
