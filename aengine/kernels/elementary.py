"""The exponential, written out so that it has the same bits in every lane, loop and process.

Torch's and the C library's vector versions differ from their scalar ones, and the first parallel call of torch's in a
process may be inaccurate (pytorch#188792).
"""

from __future__ import annotations

import numpy as np

from aengine.kernels.jit import compiled
from aengine.kernels.simd import (
    LANES,
    Floats,
    Lanes,
    fma,
    load_part,
    power_of_two,
    splat,
    store_part,
    where_less,
)

__all__ = ["exp", "exp_row"]

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693145751953125)  # 12 bits short of a float32, so that n * LN2_HIGH is exact
LN2_LOW = np.float32(1.4286068203094172e-06)
ROUND = np.float32(1.5 * 2**23)  # adding it rounds to a whole number, which then stands in the low bits
LOWEST, HIGHEST = np.float32(-87.3), np.float32(88.3)  # the normal float32 results
ZERO, ONE = np.float32(0), np.float32(1)

# (exp(r) - 1 - r) / r**2 on |r| <= ln(2) / 2: least maximum relative error of exp, 3e-9 before rounding.
C0, C1, C2 = np.float32(0.49999994), np.float32(0.1666652), np.float32(0.041668393)
C3, C4 = np.float32(0.008368781), np.float32(0.0013814467)


@compiled
def exp(x: Lanes) -> Lanes:
    """Within 1.1 units in the last place on [-87.3, 88.3]; zero below, at most exp(88.3) above, NaN for NaN."""
    within = where_less(x, splat(LOWEST), splat(LOWEST), x)
    within = where_less(splat(HIGHEST), within, splat(HIGHEST), within)
    shifted = fma(within, splat(LOG2_E), splat(ROUND))
    n = shifted - splat(ROUND)
    r = fma(n, splat(-LN2_HIGH), within)
    r = fma(n, splat(-LN2_LOW), r)
    tail = fma(splat(C4), r, splat(C3))
    tail = fma(tail, r, splat(C2))
    tail = fma(tail, r, splat(C1))
    tail = fma(tail, r, splat(C0))
    fraction = fma(tail, r * r, r) + splat(ONE)
    return where_less(x, splat(LOWEST), splat(ZERO), fraction * power_of_two(shifted))


@compiled
def exp_row(source: Floats, result: Floats) -> None:
    """result[i] = exp(source[i]), for compiled code; both flat and equally long, and may be the same array."""
    for start in range(0, source.shape[0], LANES):
        count = source.shape[0] - start
        store_part(result, start, exp(load_part(source, start, count)), count)
