"""Which tokens min-p, top-k and top-p keep, for one row of logits.

Tokens are ordered by falling logit, equal ones by rising id. In that order each of the three keeps a prefix, so what is
kept is known by its last token: every larger logit, and of the equal ones those whose id is not above its own.

The prefix is found by selection over the bits of the logits (a radix select) among the tokens that may hold its end,
without sorting.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.elementary import exp_row
from aengine.kernels.jit import compiled
from aengine.kernels.simd import LANES, Floats, largest, load, load_part
from aengine.kernels.weights import Sums, sum_weights

Ids: TypeAlias = NDArray[np.int32]

__all__ = ["find_prefix"]

LOWEST = np.float32(np.finfo(np.float32).min)
SHIFTS = (21, 10, 0)
"""Digits of eleven bits; the lowest overlaps the one above by a bit."""
NUM_DIGITS = 2048
SIGN = np.uint32(0x80000000)
SLACK = 0.01
"""Far more than rounding in a logarithm, far less than matters for speed."""


@compiled
def find_prefix(
    x: Floats,
    base: int,
    size: int,
    peak: np.float32,
    scale: np.float32,
    top_k: int,
    top_p: float,
    min_p: float,
    sums: Sums,
) -> tuple[np.float32, int]:
    """Logit and id of the last token kept by min-p, then top-k, then top-p; each on what those before it left.

    `peak` is the largest of the `size` logits at `base`; `scale` is 1 / temperature. `top_k` of 0 or -1, `top_p` of 1
    and `min_p` of 0 keep all. `sums` is scratch.
    """
    floor = LOWEST if min_p == 0.0 else max(LOWEST, np.float32(peak + math.log(min_p) / scale))
    bound, has_k, mass = floor, 0 < top_k < size, 0.0
    if has_k:
        bound = max(bound, _bound_of_top_k(x, base, size, top_k))
    elif top_p < 1.0:
        mass = sum_weights(x, base, size, peak, scale, floor, size, sums)
        # All tokens below this weight add up to less than what top-p drops, so its prefix ends above.
        negligible = (1.0 - top_p) * mass / size
        bound = max(bound, np.float32(peak + (math.log(negligible) - SLACK) / scale))
    values, ids = _gather(x, base, size, bound)
    last = _last(values)
    if has_k and top_k < values.size:
        last = _end_of_prefix(values, np.ones_like(values), float(top_k))
        values, ids, last = _keep_prefix(values, ids, last)
    if top_p < 1.0:
        weights = np.empty_like(values)
        exp_row((values - peak) * scale, weights)
        last = _end_of_prefix(values, weights, top_p * (_sum(weights) if has_k else mass))
    return values[last], ids[last]


@compiled
def _bound_of_top_k(x: Floats, base: int, size: int, top_k: int) -> np.float32:
    """A logit that at least `top_k` tokens reach: the k-th largest of the maxima of groups of 16."""
    maxima = np.empty(size // LANES, np.float32)
    for group in range(maxima.size):
        maxima[group] = largest(load(x, base + group * LANES))
    if top_k > maxima.size:
        return LOWEST
    return np.float32(maxima[_end_of_prefix(maxima, np.ones_like(maxima), float(top_k))])


@compiled
def _gather(x: Floats, base: int, size: int, bound: np.float32) -> tuple[Floats, Ids]:
    """Logits of at least `bound`, and their tokens."""
    values, ids = np.empty(size, np.float32), np.empty(size, np.int32)
    count = 0
    for i in range(0, size, LANES):
        if size - i < LANES or largest(load_part(x, base + i, size - i)) >= bound:
            for token in range(i, min(i + LANES, size)):
                values[count], ids[count] = x[base + token], token
                count += x[base + token] >= bound
    return values[:count], ids[:count]


@compiled
def _last(values: Floats) -> int:
    """The place of the last token in the order."""
    last = 0
    for i in range(values.size):
        if values[i] <= values[last]:
            last = i
    return last


@compiled
def _keep_prefix(values: Floats, ids: Ids, last: int) -> tuple[Floats, Ids, int]:
    """The tokens up to `last` in the order, and the place of the last one among them."""
    cut, count, place = values[last], 0, 0
    for i in range(values.size):
        if values[i] > cut or (values[i] == cut and i <= last):
            values[count], ids[count] = values[i], ids[i]
            place = count if i == last else place
            count += 1
    return values[:count], ids[:count], place


@compiled
def _sum(weights: Floats) -> float:
    mass = 0.0
    for weight in weights:
        mass += weight
    return mass


@compiled
def _end_of_prefix(values: Floats, weights: Floats, target: float) -> int:
    """The place at which the running sum of weights, in the order, first reaches `target`; the last if it never does.

    Narrows the tokens to those that share the digit of the key in which the sum gets there, digit by digit; those left
    in the end have equal logits, and stand in the order of their ids.
    """
    alive = np.arange(values.size)
    sums = np.empty(NUM_DIGITS, np.float64)
    before = 0.0
    for shift in SHIFTS:
        sums[:] = 0.0
        for i in alive:
            sums[_digit(values[i], shift)] += weights[i]
        digit, before = _find_digit(sums, before, target)
        count = 0
        for i in alive:
            alive[count] = i
            count += _digit(values[i], shift) == digit
        alive = alive[:count]
    for i in alive:
        before += weights[i]
        if before >= target:
            return int(i)
    return int(alive[-1])


@compiled
def _find_digit(sums: Sums, before: float, target: float) -> tuple[int, float]:
    """The digit in which the sum reaches `target` (the last one in use if it never does), and the sum before it."""
    digit = -1
    for candidate in range(NUM_DIGITS - 1, -1, -1):
        if sums[candidate] > 0.0:
            if digit >= 0:
                before += sums[digit]
            digit = candidate
            if before + sums[digit] >= target:
                break
    return digit, before


@compiled
def _digit(logit: np.float32, shift: int) -> int:
    """Eleven bits, from `shift` up, of a 32-bit key that grows with the logit."""
    bits = np.float32(logit + np.float32(0)).view(np.uint32)  # the sum makes -0 a 0: they are equal
    key = np.uint32(~bits) if bits & SIGN else np.uint32(bits | SIGN)
    return int(key >> np.uint32(shift)) & (NUM_DIGITS - 1)
