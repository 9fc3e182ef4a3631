"""Products: right values, the same bits for any company, and a probe that notices when they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from aengine.kernels import invariance
from aengine.kernels.invariance import FAST, LinearShape, Numerics, probe
from aengine.kernels.linear import STRATEGIES, Multiply
from aengine.kernels.trial import torch_threads

SHAPES = [LinearShape(96, 32), LinearShape(33, 20, has_bias=True), LinearShape(576, 1536)]
AVAILABLE = [name for name, strategy in STRATEGIES.items() if strategy.is_available()]
NARROW = [torch.bfloat16, torch.float16]
SHAPES_OF_ALL_TYPES = [evolve(shape, dtype=dtype) for dtype in (torch.float32, *NARROW) for shape in SHAPES]


def make_weight(shape: LinearShape) -> tuple[Tensor, Tensor | None]:
    weight = torch.randn(shape.out_features, shape.in_features).to(shape.dtype)
    return weight, torch.randn(shape.out_features).to(shape.dtype) if shape.has_bias else None


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    invariance._choose.cache_clear()
    yield
    invariance._choose.cache_clear()


@pytest.fixture
def probe_only(monkeypatch: pytest.MonkeyPatch, fresh_probe: None) -> Callable[[Multiply], Numerics]:
    """The probe's word on one way to multiply."""

    def judge(multiply: Multiply, shape: LinearShape = SHAPES[0]) -> Numerics:
        strategy = evolve(STRATEGIES["plain"], name="only", multiply=multiply)
        monkeypatch.setattr(invariance, "STRATEGIES", {"only": strategy})
        return probe([shape], ("only",))

    return judge


def works(name: str, shape: LinearShape) -> bool:
    """Whether this machine has it, also for the shape's type."""
    try:
        STRATEGIES[name].linear(*make_weight(shape))(torch.randn(2, shape.in_features).to(shape.dtype))
    except (AttributeError, RuntimeError):
        return False
    return True


def test_a_strategy_that_needs_no_special_instructions_works_in_every_type() -> None:
    for shape in SHAPES_OF_ALL_TYPES:
        assert {name for name in AVAILABLE if not works(name, shape)} <= {"onednn", "mkl"}
        assert works("widened-tiles", shape)


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in STRATEGIES for shape in SHAPES_OF_ALL_TYPES if works(name, shape)],
    ids=str,
)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 17, 40])
def test_every_strategy_multiplies_right(name: str, shape: LinearShape, num_rows: int) -> None:
    weight, bias = make_weight(shape)
    x = torch.randn(num_rows, shape.in_features).to(shape.dtype)
    product = STRATEGIES[name].linear(weight, bias)(x)
    rounding = 0.0 if shape.dtype == torch.float32 else torch.finfo(shape.dtype).eps / 2
    torch.testing.assert_close(product.double(), exact_product(x, weight, bias), atol=1e-3, rtol=rounding)
    assert product.dtype == shape.dtype
    assert product.is_contiguous()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", [name for name in AVAILABLE if name.startswith("widened-")])
def test_a_widened_product_is_the_float32_product_rounded_once(name: str, dtype: torch.dtype) -> None:
    weight, bias = make_weight(evolve(SHAPES[1], dtype=dtype))
    x = torch.randn(7, SHAPES[1].in_features).to(dtype)
    product = STRATEGIES[name].linear(weight, bias)(x)
    within = STRATEGIES[name.removeprefix("widened-")].linear(weight.float(), bias.float())
    assert torch.equal(product, within(x.float()).to(dtype))


@pytest.mark.parametrize("shape", SHAPES_OF_ALL_TYPES, ids=str)
def test_the_chosen_product_gives_a_row_the_same_bits_in_any_company(shape: LinearShape) -> None:
    numerics = probe([shape])
    assert numerics.mode == "invariant"
    linear, x = numerics.linear(*make_weight(shape)), torch.randn(75, shape.in_features).to(shape.dtype)
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


def test_each_type_of_a_shape_has_a_choice_of_its_own() -> None:
    shapes = [evolve(SHAPES[0], dtype=dtype) for dtype in (torch.float32, *NARROW)]
    numerics = probe(shapes)
    assert {choice.shape for choice in numerics.choices} == set(shapes)
    for choice in numerics.choices:
        narrow = choice.shape.dtype != torch.float32
        assert choice.strategy in (invariance.NARROW_CANDIDATES if narrow else invariance.CANDIDATES)
        assert numerics.linear(*make_weight(choice.shape)).weight.dtype == choice.shape.dtype


@pytest.mark.parametrize("shape", [LinearShape(5, 5), evolve(SHAPES[0], dtype=torch.bfloat16)], ids=str)
def test_a_shape_or_type_that_was_not_probed_is_refused(shape: LinearShape) -> None:
    with pytest.raises(KeyError):
        probe([SHAPES[0]]).linear(*make_weight(shape))


def test_a_product_that_changes_with_the_number_of_rows_is_found_out(
    probe_only: Callable[[Multiply], Numerics],
) -> None:
    numerics = probe_only(lambda x, packed, weight, bias: F.linear(x, weight, bias) + 1e-6 * (len(x) % 2))
    assert numerics.mode == "unverified"
    assert not numerics.choices[0].holds


def test_a_product_with_wrong_values_is_found_out(probe_only: Callable[[Multiply], Numerics]) -> None:
    assert probe_only(lambda x, packed, weight, bias: F.linear(x, weight, bias).mul(1.001)).mode == "unverified"


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_sums_that_are_not_float32_within_are_found_out(
    probe_only: Callable[[Multiply], Numerics], dtype: torch.dtype
) -> None:
    def multiply(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        halves = [
            STRATEGIES["widened-tiles"].multiply(x[:, half], packed.float()[:, half], weight, None)
            for half in (slice(16), slice(16, None))
        ]
        return halves[0] + halves[1]

    assert probe_only(multiply, evolve(SHAPES[0], dtype=dtype)).mode == "unverified"


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_result_that_is_not_rounded_to_the_type_is_found_out(
    probe_only: Callable[[Multiply], Numerics], dtype: torch.dtype
) -> None:
    def multiply(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return STRATEGIES["tiles"].multiply(x.float(), packed.float(), weight, bias)

    assert probe_only(multiply, evolve(SHAPES[0], dtype=dtype)).mode == "unverified"


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


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_fast_numerics_of_16_bits_take_the_plain_float32_product(dtype: torch.dtype) -> None:
    weight, x = torch.randn(40, 24).to(dtype), torch.randn(5, 24).to(dtype)
    assert torch.equal(FAST.linear(weight)(x), F.linear(x.float(), weight.float()).to(dtype))


@pytest.mark.parametrize("num_rows", [512, 513, 1100])
def test_more_rows_than_were_probed_are_multiplied_in_parts(num_rows: int) -> None:
    numerics = probe([SHAPES[0]])
    seen: list[int] = []
    linear, x = numerics.linear(*make_weight(SHAPES[0])), torch.randn(num_rows, 32)
    multiply = linear.multiply

    def watched(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(x))
        return multiply(x, packed, weight, bias)

    product = evolve(linear, multiply=watched)(x)
    assert max(seen) == 512
    assert torch.equal(product, torch.cat([linear(part) for part in x.split(100)]))


def test_several_threads_are_tried_also_where_one_is_used(probe_only: Callable[[Multiply], Numerics]) -> None:
    with torch_threads(1):
        numerics = probe_only(
            lambda x, packed, weight, bias: F.linear(x, weight) * (1 + 1e-6 * torch.get_num_threads())
        )
    assert numerics.mode == "unverified"
