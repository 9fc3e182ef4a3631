"""Unnormalised probabilities of a row of logits, and their sums.

Weights are summed in float32 lanes by absolute position within blocks of fixed size, and blocks in float64 in order, so
the bits of a sum depend on nothing but the row.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.elementary import exp
from aengine.kernels.jit import compiled
from aengine.kernels.simd import (
    LANES,
    Floats,
    Lanes,
    keep_first,
    largest,
    load,
    load_part,
    maximum,
    splat,
    total,
    where_less,
)

__all__ = ["ALL", "BLOCK", "Sums", "find_peak", "num_blocks", "sum_weights", "weights_at"]

Sums: TypeAlias = NDArray[np.float64]

BLOCK = 512
ZERO = np.float32(0)
ALL = np.float32(-np.inf)
"""The cut that keeps every token."""


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


@compiled
def find_peak(x: Floats, base: int, size: int) -> tuple[np.float32, bool]:
    """The largest of the `size` logits at `base`, and whether all are finite."""
    peaks, zeros = splat(ALL), splat(ZERO)
    for i in range(0, size - LANES + 1, LANES):
        value = load(x, base + i)
        peaks = maximum(value, peaks)
        zeros = zeros + (value - value)  # not a number where value is not finite
    rest = size % LANES
    value = load_part(x, base + size - rest, rest)
    peaks = maximum(keep_first(value, rest, splat(ALL)), peaks)
    zeros = zeros + (value - value)
    return largest(peaks), total(zeros) == ZERO


@compiled
def weights_at(
    x: Floats, base: int, i: int, count: int, peak: np.float32, scale: np.float32, cut: np.float32, last: int
) -> Lanes:
    """exp((logit - peak) * scale) of 16 tokens from `i` on, and zero beyond the first `count`.

    Zero also for logits below `cut`, and for those equal to it whose token is above `last`; zero for -inf in any case.
    """
    value = load_part(x, base + i, count)
    weight = exp((value - splat(peak)) * splat(scale))
    if cut > ALL:
        tied = where_less(value, splat(cut), splat(ZERO), keep_first(weight, last + 1 - i, splat(ZERO)))
        weight = where_less(splat(cut), value, weight, tied)
    return keep_first(weight, count, splat(ZERO)) if count < LANES else weight


@compiled
def sum_weights(
    x: Floats, base: int, size: int, peak: np.float32, scale: np.float32, cut: np.float32, last: int, sums: Sums
) -> float:
    """The sum of all weights; `sums[b]` gets the sum up to the end of block b."""
    mass = 0.0
    for block in range(sums.size):
        start = block * BLOCK
        end = min(start + BLOCK, size)
        weight = splat(ZERO)
        for i in range(start, end, LANES):
            weight = weight + weights_at(x, base, i, end - i, peak, scale, cut, last)
        mass += np.float64(total(weight))
        sums[block] = mass
    return mass
