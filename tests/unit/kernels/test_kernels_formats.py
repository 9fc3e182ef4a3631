"""16-bit numbers: every one is read as it is, and every float32 is rounded as torch rounds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from aengine.kernels.formats import as_array
from aengine.kernels.jit import compiled
from aengine.kernels.simd import LANES, Floats, load_one, load_part, store_one, store_part

NARROW = [torch.bfloat16, torch.float16]
ALL_PATTERNS = torch.arange(2**16).to(torch.uint16)


@compiled
def copy_by_lanes(source: Floats, result: Floats) -> None:
    for start in range(0, source.shape[0], LANES):
        count = source.shape[0] - start
        store_part(result, start, load_part(source, start, count), count)


@compiled
def copy_one_by_one(source: Floats, result: Floats) -> None:
    for i in range(source.shape[0]):
        store_one(result, i, load_one(source, i))


def copied(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Read and stored by compiled code, in both its ways."""
    results = [torch.empty(len(source), dtype=dtype) for _ in range(2)]
    for copy, result in zip((copy_by_lanes, copy_one_by_one), results, strict=True):
        copy(as_array(source), as_array(result))
    assert bits(results[0]) == bits(results[1])
    return results[0]


def bits(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def assert_same_numbers(actual: Tensor, expected: Tensor) -> None:
    """The same bits, signs of zero included, and NaN where NaN is expected."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert bits(actual[~actual.isnan()]) == bits(expected[~expected.isnan()])


def awkward_numbers(dtype: torch.dtype) -> Tensor:
    """All numbers of a type, what lies halfway between neighbours and beside it, and float32 at random."""
    numbers = ALL_PATTERNS.view(dtype).float()
    finite = numbers[numbers.isfinite()].double().sort().values
    halfway = ((finite[1:] + finite[:-1]) / 2).float()
    near = [torch.nextafter(halfway, torch.tensor(bound)) for bound in (-torch.inf, torch.inf)]
    patterns = np.random.default_rng(0).integers(0, 2**32, 300_001, dtype=np.uint32)
    return torch.cat([numbers, halfway, *near, torch.from_numpy(patterns.view(np.float32))])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_all_numbers_of_a_type_are_read_right_and_survive_the_round_trip(dtype: torch.dtype) -> None:
    numbers = ALL_PATTERNS.view(dtype)
    wide = copied(numbers, torch.float32)
    assert_same_numbers(wide, numbers.float())
    assert_same_numbers(copied(wide, dtype), numbers)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_numbers_are_rounded_to_nearest_ties_to_even(dtype: torch.dtype) -> None:
    numbers = awkward_numbers(dtype)
    assert_same_numbers(copied(numbers, dtype), numbers.to(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_nan_of_any_payload_stays_one(dtype: torch.dtype) -> None:
    patterns = torch.tensor([0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32)
    nans = torch.cat([patterns, patterns | -(2**31)]).view(torch.float32)
    assert copied(nans, dtype).isnan().all()


def test_an_array_is_the_memory_of_its_tensor() -> None:
    for dtype in (torch.float32, *NARROW):
        tensor = torch.zeros(3, 5, dtype=dtype)
        as_array(tensor)[1, 2] = 7
        assert tensor.count_nonzero() == 1
        assert tensor[1, 2] != 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16], ids=str)
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"float32, bfloat16, float16, got a tensor of {dtype}"):
        as_array(torch.zeros(3, dtype=dtype))
