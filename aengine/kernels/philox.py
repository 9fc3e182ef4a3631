"""Philox 4x32-10 for compiled code; `sampling.random` has the same in plain Python and says where it is from."""

from __future__ import annotations

import numpy as np

from aengine.kernels.jit import compiled

__all__ = ["uniform"]

LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
ROUNDS = 10
UNUSED_BITS = np.uint64(11)
ULP = np.float64(2.0**-53)


@compiled
def uniform(seed: np.uint64, index: np.uint64, position: np.uint64) -> np.float64:
    """As `sampling.random.uniform`. Words of 32 bits are kept in 64-bit integers."""
    c0, c1, c2, c3 = index & LOW, position & LOW, np.uint64(0), np.uint64(0)
    k0, k1 = seed & LOW, seed >> WORD
    for _ in range(ROUNDS):
        product_0, product_1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> WORD) ^ c1 ^ k0, product_1 & LOW, (product_0 >> WORD) ^ c3 ^ k1, product_0 & LOW
        k0, k1 = (k0 + WEYL_0) & LOW, (k1 + WEYL_1) & LOW
    return np.float64(((c1 << WORD) | c0) >> UNUSED_BITS) * ULP
