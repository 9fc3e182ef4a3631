"""Counter-based randomness: a draw is a function of (seed, sample index, position) and of nothing else.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten rounds of
a keyed bijection on 128-bit counters. No state, so neither batch, order, preemption nor restart can change a draw.
`kernels.philox` is the compiled twin that the sampler uses.
"""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed", "philox4x32", "uniform"]

Words2 = tuple[int, int]
Words4 = tuple[int, int, int, int]

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox4x32(counter: Words4, key: Words2) -> Words4:
    """Four random 32-bit words for a counter of four words under a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & MASK, (product_0 >> 32) ^ c3 ^ k1, product_0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, index: int, position: int) -> float:
    """A multiple of 2**-53 in [0, 1) for the token at `position` (0 is the first new one) of sample `index`.

    The seed (below 2**64) is the key, low word first; the counter is (index, position, 0, 0), both below 2**32. Of the
    output, word 1 above word 0 make 64 bits, and the upper 53 of them the number.
    """
    low, high, _, _ = philox4x32((index & MASK, position & MASK, 0, 0), (seed & MASK, seed >> 32))
    return ((high << 32 | low) >> 11) * 2.0**-53


def derive_seed(engine_seed: int, request: int | str) -> int:
    """A seed below 2**64 for a request that gave none, from the engine's seed and the request's number or id.

    The first 8 bytes, little-endian, of SHA-256 over the engine's seed (8 bytes, little-endian), "n" for a number or
    "s" for an id, and the number in decimal or the id in UTF-8.
    """
    kind = b"s" if isinstance(request, str) else b"n"
    digest = hashlib.sha256(engine_seed.to_bytes(8, "little") + kind + str(request).encode())
    return int.from_bytes(digest.digest()[:8], "little")
