"""Compiled loops over rows: rotary embedding, KV write and paged attention.

One kernel serves decode and prefill: a row attends to the positions up to its own, and nothing is shared between rows.
Scores of the whole context come first, then one maximum and one sum with position p in lane p % 16, then the values in
the order of positions. So the bits depend neither on page size, chunking, batch nor threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.elementary import exp
from aengine.kernels.interface import HeadShape
from aengine.kernels.jit import compiled, prange, row_kernel
from aengine.kernels.simd import (
    LANES,
    Floats,
    Lanes,
    fma,
    keep_first,
    largest,
    load,
    load_one,
    load_part,
    maximum,
    splat,
    store,
    store_one,
    store_part,
    total,
)

__all__ = ["attend_rows", "write_rows"]

ZERO, ONE, NOTHING = np.float32(0), np.float32(1), np.float32(-np.inf)


@compiled
def page_start(page: int, kv_head: int, shape: HeadShape) -> int:
    """Where the keys of one page and head begin in a layer; its values begin head_dim * page_size later."""
    return (page * shape.num_kv_heads + kv_head) * 2 * shape.head_dim * shape.page_size


@compiled
def rotate_head(x: Floats, start: int, cosines: Floats, sines: Floats, position: int) -> None:
    half = cosines.shape[1]
    for i in range(0, half, LANES):
        count = half - i
        cosine = load_part(cosines, position * half + i, count)
        sine = load_part(sines, position * half + i, count)
        first, second = load_part(x, start + i, count), load_part(x, start + half + i, count)
        store_part(x, start + i, first * cosine - second * sine, count)
        store_part(x, start + half + i, second * cosine + first * sine, count)


@compiled
def write_head(qkv: Floats, key: int, value: int, kv: Floats, page: int, offset: int, shape: HeadShape) -> None:
    """`page` is the page's start, `offset` the token's place in it."""
    for i in range(shape.head_dim):
        store_one(kv, page + i * shape.page_size + offset, load_one(qkv, key + i))
    values = page + (shape.page_size + offset) * shape.head_dim
    for i in range(0, shape.head_dim, LANES):
        store_part(kv, values + i, load_part(qkv, value + i, shape.head_dim - i), shape.head_dim - i)


@row_kernel
def write_rows(
    qkv: Floats,  # [R, (num_heads + 2 * num_kv_heads) * head_dim]
    cosines: Floats,  # [positions, head_dim / 2]
    sines: Floats,
    positions: NDArray[np.int64],
    sequences: NDArray[np.int64],
    page_tables: NDArray[np.int32],
    kv: Floats,
    shape: HeadShape,
) -> None:
    num_rotated = shape.num_heads + shape.num_kv_heads
    row_size = (num_rotated + shape.num_kv_heads) * shape.head_dim
    for row in prange(positions.shape[0]):
        position, start = positions[row], row * row_size
        for head in range(num_rotated):
            rotate_head(qkv, start + head * shape.head_dim, cosines, sines, position)
        page = page_tables[sequences[row], position // shape.page_size]
        keys, values = start + shape.num_heads * shape.head_dim, start + num_rotated * shape.head_dim
        for head in range(shape.num_kv_heads):
            place, skip = page_start(page, head, shape), head * shape.head_dim
            write_head(qkv, keys + skip, values + skip, kv, place, position % shape.page_size, shape)


@compiled
def dot_tile(qkv: Floats, query: int, head_dim: int, keys: Floats, start: int, stride: int) -> Lanes:
    """The query at `query` with sixteen neighbouring keys: dimension i of key j is at start + i * stride + j.

    Four chains of sums, dimension i in chain i % 4, since one alone would wait for each of its own products.
    """
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    fours = head_dim // 4 * 4
    for i in range(0, fours, 4):
        key = start + i * stride
        a = fma(splat(load_one(qkv, query + i)), load(keys, key), a)
        b = fma(splat(load_one(qkv, query + i + 1)), load(keys, key + stride), b)
        c = fma(splat(load_one(qkv, query + i + 2)), load(keys, key + 2 * stride), c)
        d = fma(splat(load_one(qkv, query + i + 3)), load(keys, key + 3 * stride), d)
    for i in range(fours, head_dim):
        a = fma(splat(load_one(qkv, query + i)), load(keys, start + i * stride), a)
    return (a + b) + (c + d)


@compiled
def gather_tile(
    kv: Floats, pages: NDArray[np.int32], kv_head: int, first: int, count: int, tile: Floats, shape: HeadShape
) -> None:
    """Copy the keys of `count` positions from `first` on to tile[head_dim, 16]; the other columns stay as they are."""
    for j in range(count):
        page = page_start(pages[(first + j) // shape.page_size], kv_head, shape)
        key = page + (first + j) % shape.page_size
        for i in range(shape.head_dim):
            store_one(tile, i * LANES + j, load_one(kv, key + i * shape.page_size))


@compiled
def score_context(
    qkv: Floats,
    query: int,
    kv: Floats,
    pages: NDArray[np.int32],
    kv_head: int,
    context: int,
    tile: Floats,
    scores: Floats,  # [query heads of the group, context rounded up to 16]
    shape: HeadShape,
) -> None:
    """Scores of all positions, for neighbouring query heads from `query` on: each key is fetched once for the group.

    Scores past the context, up to the next multiple of 16, are numbers without meaning.
    """
    scale = splat(ONE / np.sqrt(np.float32(shape.head_dim)))
    for first in range(0, context, LANES):
        if shape.page_size % LANES == 0:
            page = page_start(pages[first // shape.page_size], kv_head, shape)
            keys, start, stride = kv, page + first % shape.page_size, shape.page_size
        else:
            gather_tile(kv, pages, kv_head, first, min(LANES, context - first), tile, shape)
            keys, start, stride = tile, 0, LANES
        for head in range(scores.shape[0]):
            dots = dot_tile(qkv, query + head * shape.head_dim, shape.head_dim, keys, start, stride)
            store(scores, head * scores.shape[1] + first, dots * scale)


@compiled
def softmax_weights(scores: Floats, context: int) -> np.float32:
    """Turn scores into exp(score - largest), zero past the context; returns their sum."""
    peaks = splat(NOTHING)
    for first in range(0, context, LANES):
        peaks = maximum(peaks, keep_first(load(scores, first), context - first, splat(NOTHING)))
    peak, sums = splat(largest(peaks)), splat(ZERO)
    for first in range(0, context, LANES):
        weights = keep_first(exp(load(scores, first) - peak), context - first, splat(ZERO))
        store(scores, first, weights)
        sums = sums + weights
    mass: np.float32 = total(sums)
    return mass


@compiled
def mix_values(
    weights: Floats,
    kv: Floats,
    pages: NDArray[np.int32],
    kv_head: int,
    context: int,
    scale: np.float32,
    result: Floats,
    start: int,
    shape: HeadShape,
) -> None:
    """scale * the weighted sum of values, for one head, to result[start:]; four vectors of dimensions at a time."""
    wide = shape.head_dim // (4 * LANES) * (4 * LANES)
    for i in range(0, wide, 4 * LANES):
        a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for first in range(0, context, shape.page_size):
            page = page_start(pages[first // shape.page_size], kv_head, shape)
            value = page + shape.head_dim * shape.page_size + i
            for j in range(first, min(first + shape.page_size, context)):
                weight = splat(weights[j])
                a = fma(weight, load(kv, value), a)
                b = fma(weight, load(kv, value + LANES), b)
                c = fma(weight, load(kv, value + 2 * LANES), c)
                d = fma(weight, load(kv, value + 3 * LANES), d)
                value += shape.head_dim
        for part, mixed in enumerate((a, b, c, d)):
            store(result, start + i + part * LANES, mixed * splat(scale))
    for i in range(wide, shape.head_dim, LANES):
        mixed = splat(ZERO)
        for j in range(context):
            page = page_start(pages[j // shape.page_size], kv_head, shape)
            value = page + (shape.page_size + j % shape.page_size) * shape.head_dim + i
            mixed = fma(splat(weights[j]), load_part(kv, value, shape.head_dim - i), mixed)
        store_part(result, start + i, mixed * splat(scale), shape.head_dim - i)


@row_kernel
def attend_rows(
    qkv: Floats,  # [R, (num_heads + 2 * num_kv_heads) * head_dim], rotated
    positions: NDArray[np.int64],
    sequences: NDArray[np.int64],
    page_tables: NDArray[np.int32],
    kv: Floats,
    result: Floats,  # [R, num_heads * head_dim]
    shape: HeadShape,
) -> None:
    rows, group = positions.shape[0], shape.num_heads // shape.num_kv_heads
    head_dim, row_size = shape.head_dim, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    for item in prange(rows * shape.num_kv_heads):
        # Rows of one head are neighbours, so that pages shared by a group stay in the core's cache.
        kv_head, row = item // rows, item % rows
        context, pages = positions[row] + 1, page_tables[sequences[row]]
        scores = np.empty((group, (context + LANES - 1) // LANES * LANES), np.float32)
        tile = np.empty((1, shape.head_dim, LANES), kv.dtype)  # of the type of kv, to stand in for it
        query = row * row_size + kv_head * group * head_dim
        score_context(qkv, query, kv, pages, kv_head, context, tile, scores, shape)
        for head in range(group):
            scale = ONE / softmax_weights(scores[head], context)
            start = (row * shape.num_heads + kv_head * group + head) * head_dim
            mix_values(scores[head], kv, pages, kv_head, context, scale, result, start, shape)
