"""Draw or score one token per row of logits: one pass for the maximum, one for the sums, one block for the draw.

A row's numbers depend on that row alone.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.jit import compiled, prange, row_kernel
from aengine.kernels.philox import uniform
from aengine.kernels.simd import LANES, Floats, store
from aengine.kernels.truncate import find_prefix
from aengine.kernels.weights import ALL, BLOCK, Sums, find_peak, num_blocks, sum_weights, weights_at

__all__ = ["DRAW", "EMPTY", "GREEDY", "NON_FINITE", "OK", "ROW", "num_blocks", "sample_rows"]

Row: TypeAlias = Any

ZERO, ONE = np.float32(0), np.float32(1)
DRAW, GREEDY = -1, -2
OK, NON_FINITE, EMPTY = 0, 1, 2

ROW = np.dtype(
    [
        ("source", np.int64),  # row of the model's logits
        ("edited", np.int64),  # row of the edited logits to sample from instead, or -1
        ("scale", np.float32),  # 1 / temperature
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("index", np.uint64),
        ("position", np.uint64),
        ("token", np.int64),  # in: a token to score, DRAW or GREEDY; out: the token
        ("logprob", np.float32),
        ("raw_logprob", np.float32),
        ("status", np.int64),
        ("peak", np.float32),  # out, of the logits sampled from: the largest,
        ("log_mass", np.float64),  # the logarithm of the sum of exp((logit - peak) * scale) over what is kept,
        ("cut", np.float32),  # and the last token kept: its logit (-inf: all are)
        ("last", np.int64),  # and its id
    ],
    align=True,
)


def _sample_rows(raw: Floats, edited: Floats, size: int, rows: NDArray[np.void], sums: Sums) -> None:
    for n in prange(rows.size):
        _sample_row(raw, edited, size, rows[n], sums[n])


sample_rows = row_kernel(_sample_rows)
"""Fill `token`, `logprob`, `raw_logprob`, `status` and what follows it in each of `rows` ([N], of dtype ROW).

`raw` and `edited` are flat, `size` numbers a row; `edited` differs from the row it was made from by -inf only, or by
finite changes. `sums` [N, num_blocks(size)] is scratch.
"""


@compiled
def _sample_row(raw: Floats, edited: Floats, size: int, row: Row, sums: Sums) -> None:
    source = row.source * size
    raw_peak, is_finite = find_peak(raw, source, size)
    if not is_finite:
        row.status = NON_FINITE
        return
    x, base, peak = raw, source, raw_peak
    if row.edited >= 0:
        x, base = edited, row.edited * size
        peak, _ = find_peak(x, base, size)
    if peak == ALL:
        row.status = EMPTY
        return
    cut, last = ALL, -1
    truncated = 0 < row.top_k < size or row.top_p < 1.0 or row.min_p > 0.0
    if truncated:
        cut, last = find_prefix(x, base, size, peak, row.scale, row.top_k, row.top_p, row.min_p, sums)
    mass = sum_weights(x, base, size, peak, row.scale, cut, last, sums)
    if row.token == DRAW:
        row.token = _draw(x, base, size, peak, row.scale, cut, last, sums, uniform(row.seed, row.index, row.position))
    elif row.token == GREEDY:
        row.token = _first_at(x, base, peak)
    row.peak, row.log_mass, row.cut, row.last = peak, math.log(mass), cut, last
    row.logprob = _logprob(x[base + row.token], peak, row.scale, row.log_mass)
    if x[base + row.token] < cut or (x[base + row.token] == cut and row.token > last):
        row.logprob = ALL
    if truncated or row.edited >= 0 or row.scale != ONE:
        mass = sum_weights(raw, source, size, raw_peak, ONE, ALL, -1, sums)
    row.raw_logprob = _logprob(raw[source + row.token], raw_peak, ONE, math.log(mass))
    row.status = OK


@compiled
def _logprob(logit: np.float32, peak: np.float32, scale: np.float32, log_mass: float) -> np.float32:
    return np.float32((np.float64(logit) - np.float64(peak)) * np.float64(scale) - log_mass)


@compiled
def _draw(
    x: Floats,
    base: int,
    size: int,
    peak: np.float32,
    scale: np.float32,
    cut: np.float32,
    last: int,
    sums: Sums,
    u: float,
) -> int:
    """The first token whose running sum of weights exceeds `u` times the whole.

    Where rounding lets the sum end short of that, the last token that has a weight.
    """
    goal = u * sums[-1]
    block = np.searchsorted(sums, goal, side="right")
    if block == sums.size:  # goal was rounded up to the whole
        block = np.searchsorted(sums, sums[-1])
    running = sums[block - 1] if block > 0 else 0.0
    weights = np.empty(LANES, np.float32)
    token = -1
    end = min((block + 1) * BLOCK, size)
    for i in range(block * BLOCK, end, LANES):
        store(weights, 0, weights_at(x, base, i, end - i, peak, scale, cut, last))
        for lane in range(LANES):
            running += weights[lane]
            if weights[lane] > ZERO:
                token = i + lane
                if running > goal:
                    return token
    return token


@compiled
def _first_at(x: Floats, base: int, peak: np.float32) -> int:
    token = 0
    while x[base + token] != peak:
        token += 1
    return token
