"""The kernels in plain torch: slow, obvious, and what the compiled ones are checked against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.interface import HeadShape, PagedRows, Rotary

__all__ = ["add_rms_norm", "norm_heads", "paged_attention", "rms_norm", "rotate_and_write", "silu_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widen(weight)).to(x.dtype)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual += x
    return rms_norm(residual, weight, eps)


def norm_heads(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, shape: HeadShape) -> None:
    queries, keys, _ = split_heads(qkv, shape)
    queries.copy_(rms_norm(queries, query_weight, eps))
    keys.copy_(rms_norm(keys, key_weight, eps))


def rotate_and_write(qkv: Tensor, rotary: Rotary, rows: PagedRows, kv: Tensor, shape: HeadShape) -> None:
    queries, keys, values = split_heads(qkv, shape)
    cosines = torch.from_numpy(rotary.cosines[rows.positions])[:, None]  # [R, 1, head_dim / 2]
    sines = torch.from_numpy(rotary.sines[rows.positions])[:, None]
    for heads in (queries, keys):
        first, second = widen(heads).chunk(2, dim=-1)
        heads.copy_(torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1))
    key_pages, value_pages = split_pages(kv, shape)
    for row, (position, sequence) in enumerate(zip(rows.positions, rows.sequences, strict=True)):
        page = rows.page_tables[sequence, position // shape.page_size]
        key_pages[page, :, :, position % shape.page_size] = keys[row]
        value_pages[page, :, position % shape.page_size] = values[row]


def paged_attention(qkv: Tensor, rows: PagedRows, kv: Tensor, shape: HeadShape) -> Tensor:
    queries, _, _ = split_heads(qkv, shape)
    group = shape.num_heads // shape.num_kv_heads
    result = torch.empty_like(queries)
    for row, (position, sequence) in enumerate(zip(rows.positions, rows.sequences, strict=True)):
        keys, values = gather_context(kv, rows.page_tables[sequence].tolist(), int(position) + 1, shape)
        grouped = widen(queries[row]).view(shape.num_kv_heads, group, shape.head_dim)
        weights = F.softmax(grouped @ widen(keys) * shape.head_dim**-0.5, dim=-1)  # [kv heads, group, context]
        result[row] = (weights @ widen(values)).view(shape.num_heads, shape.head_dim)
    return result.flatten(1)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = widen(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def widen(x: Tensor) -> Tensor:
    """16-bit numbers as float32; others as they are, so that float64 is computed in float64."""
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def split_heads(qkv: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Views of [R, heads, head_dim] into the rows."""
    heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
    queries, keys, values = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    return queries, keys, values


def split_pages(kv: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor]:
    """Views of a layer: keys [pages, kv heads, head_dim, page_size], values [pages, kv heads, page_size, head_dim]."""
    keys, values = kv.chunk(2, dim=-1)
    pages, heads, _ = kv.shape
    return (
        keys.view(pages, heads, shape.head_dim, shape.page_size),
        values.view(pages, heads, shape.page_size, shape.head_dim),
    )


def gather_context(kv: Tensor, pages: list[int], context: int, shape: HeadShape) -> tuple[Tensor, Tensor]:
    """Keys [kv heads, head_dim, context] and values [kv heads, context, head_dim] of one sequence."""
    key_pages, value_pages = split_pages(kv, shape)
    used = pages[: -(-context // shape.page_size)]
    keys = torch.cat([key_pages[page] for page in used], dim=2)[:, :, :context]
    values = torch.cat([value_pages[page] for page in used], dim=1)[:, :context]
    return keys, values
