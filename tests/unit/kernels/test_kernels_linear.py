"""Products: right values, the same bits for any company, and a probe that notices when they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from kernel_support import torch_threads
from torch import Tensor

from aengine.kernels import invariance
from aengine.kernels.invariance import FAST, LinearShape, Numerics, probe
from aengine.kernels.linear import STRATEGIES, Multiply

SHAPES = [LinearShape(96, 32), LinearShape(33, 20, has_bias=True), LinearShape(576, 1536)]
AVAILABLE = [name for name, strategy in STRATEGIES.items() if strategy.is_available()]


def make_weight(shape: LinearShape) -> tuple[Tensor, Tensor | None]:
    weight = torch.randn(shape.out_features, shape.in_features)
    return weight, torch.randn(shape.out_features) if shape.has_bias else None


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    invariance._choose.cache_clear()
    yield
    invariance._choose.cache_clear()


@pytest.fixture
def probe_only(monkeypatch: pytest.MonkeyPatch, fresh_probe: None) -> Callable[[Multiply], Numerics]:
    """The probe's word on one way to multiply."""

    def judge(multiply: Multiply) -> Numerics:
        strategy = evolve(STRATEGIES["plain"], name="only", multiply=multiply)
        monkeypatch.setattr(invariance, "STRATEGIES", {"only": strategy})
        return probe([SHAPES[0]], ("only",))

    return judge


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 17, 40])
def test_every_strategy_multiplies_right(name: str, shape: LinearShape, num_rows: int) -> None:
    weight, bias = make_weight(shape)
    x = torch.randn(num_rows, shape.in_features)
    product = STRATEGIES[name].linear(weight, bias)(x)
    torch.testing.assert_close(product, F.linear(x, weight, bias), atol=1e-3, rtol=0)
    assert product.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_chosen_product_gives_a_row_the_same_bits_in_any_company(shape: LinearShape) -> None:
    numerics = probe([shape])
    assert numerics.mode == "invariant"
    linear, x = numerics.linear(*make_weight(shape)), torch.randn(75, shape.in_features)
    expected = linear(x)
    for num_threads in (1, 2):
        with torch_threads(num_threads):
            for start, count in [(0, 1), (74, 1), (3, 2), (10, 31), (5, 70)]:
                assert torch.equal(linear(x[start : start + count]), expected[start : start + count])


def test_the_probe_leaves_thread_count_and_random_numbers_alone(fresh_probe: None) -> None:
    state = torch.get_rng_state()
    with torch_threads(2):
        probe([LinearShape(48, 16)])
        assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_the_probe_reports_each_distinct_shape_once() -> None:
    numerics = probe([SHAPES[0], SHAPES[1], SHAPES[0]])
    assert [choice.shape for choice in numerics.choices] == sorted(SHAPES[:2])
    assert all(choice.strategy in invariance.CANDIDATES for choice in numerics.choices)


def test_a_shape_that_was_not_probed_is_refused() -> None:
    with pytest.raises(KeyError):
        probe([SHAPES[0]]).linear(torch.randn(5, 5))


def test_a_product_that_changes_with_the_number_of_rows_is_found_out(
    probe_only: Callable[[Multiply], Numerics],
) -> None:
    numerics = probe_only(lambda x, packed, weight, bias: F.linear(x, weight, bias) + 1e-6 * (len(x) % 2))
    assert numerics.mode == "unverified"
    assert not numerics.choices[0].holds


def test_a_product_with_wrong_values_is_found_out(probe_only: Callable[[Multiply], Numerics]) -> None:
    assert probe_only(lambda x, packed, weight, bias: F.linear(x, weight, bias).mul(1.001)).mode == "unverified"


def test_an_operator_that_raises_does_not_hold(probe_only: Callable[[Multiply], Numerics]) -> None:
    def fail(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise RuntimeError("not built for this machine")

    assert probe_only(fail).mode == "unverified"


def test_a_single_row_that_differs_is_computed_as_two(probe_only: Callable[[Multiply], Numerics]) -> None:
    def differs_alone(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = STRATEGIES["tiles"].multiply(x, packed, weight, bias)
        return product * (1 - 1e-6) if len(x) == 1 else product

    numerics = probe_only(differs_alone)
    assert numerics.mode == "invariant"
    assert not numerics.choices[0].single_row
    linear, x = numerics.linear(*make_weight(SHAPES[0])), torch.randn(9, 32)
    assert torch.equal(linear(x[4:5]), linear(x)[4:5])


def test_fast_numerics_take_the_plain_product() -> None:
    weight, x = torch.randn(40, 24), torch.randn(5, 24)
    assert torch.equal(FAST.linear(weight)(x), F.linear(x, weight))
