"""Counter-based randomness."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.kernels import philox
from aengine.sampling.random import derive_seed, philox4x32, uniform

LARGEST_SEED = 2**64 - 1

# From kat_vectors of Random123, "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def compiled_uniform(seed: int, index: int, position: int) -> float:
    return float(philox.uniform(np.uint64(seed), np.uint64(index), np.uint64(position)))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_is_made_of_the_first_two_words_of_philox() -> None:
    assert uniform(0, 0, 0) == (0xE169C58D6627E8D5 >> 11) * 2.0**-53


@given(seed=st.integers(0, LARGEST_SEED), index=st.integers(0, 2**32 - 1), position=st.integers(0, 2**32 - 1))
def test_compiled_and_plain_uniform_are_equal_and_in_range(seed: int, index: int, position: int) -> None:
    drawn = uniform(seed, index, position)
    assert compiled_uniform(seed, index, position) == drawn
    assert 0.0 <= drawn < 1.0


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, LARGEST_SEED])
def test_compiled_and_plain_uniform_are_equal_at_the_edges_of_the_seed(seed: int) -> None:
    assert compiled_uniform(seed, 0, 0) == uniform(seed, 0, 0)
    assert compiled_uniform(seed, 2**32 - 1, 2**32 - 1) == uniform(seed, 2**32 - 1, 2**32 - 1)


def test_seed_index_and_position_each_change_the_draw() -> None:
    draws = {uniform(*key) for key in [(7, 0, 0), (8, 0, 0), (7 + 2**32, 0, 0), (7, 1, 0), (7, 0, 1)]}
    assert len(draws) == 5


def test_draws_are_uniform_along_positions_and_along_samples() -> None:
    for draws in ([uniform(3, 0, i) for i in range(20_000)], [uniform(3, i, 0) for i in range(20_000)]):
        counts = np.histogram(draws, bins=50, range=(0, 1))[0]
        chi_square = float(((counts - 400) ** 2 / 400).sum())
        assert abs(chi_square - 49) < 4 * np.sqrt(2 * 49)


def test_derived_seeds_differ_by_engine_seed_and_by_request_and_repeat() -> None:
    seeds = [derive_seed(engine_seed, request) for engine_seed in (0, LARGEST_SEED) for request in (0, 1, "0", "1")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= LARGEST_SEED for seed in seeds)
    assert derive_seed(0, "0") == seeds[2]


def test_a_derived_seed_never_changes_between_releases() -> None:
    # First 8 bytes, little-endian, of SHA-256(bytes(8) + b"n" + b"1").
    assert derive_seed(0, 1) == 0xDD937543EB258D13
