"""What an engine promises of its numbers, in its statistics, its samples and its scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from aengine import Engine, EngineConfig, SamplingParams
from aengine.kernels import cpu, invariance
from aengine.kernels.linear import STRATEGIES
from aengine.outputs import weakest
from aengine.testing import TINY, tiny_checkpoint, until

PARAMS = SamplingParams(max_tokens=3, seed=1)
OPERATORS = {"rms_norm", "add_rms_norm", "rotate_and_write", "paged_attention", "silu_mul", "sample"}


async def labels(model: Any = None, *, share: bool = False, **fields: Any) -> set[str]:
    """Everything that the engine says of its numbers, which must be one word."""
    async with Engine(
        tiny_checkpoint() if model is None else model, EngineConfig(num_pages=16, **fields), share=share
    ) as engine:
        output = await engine.generate([1, 2, 3], PARAMS)
        async with engine.stream([1, 2, 3], PARAMS) as stream:
            streamed = await stream.output()
        scored = await engine.score([([1, 2], [3, 4])])
        return {output.numerics, streamed.numerics, scored[0].numerics, engine.stats().numerics}


@pytest.fixture
def fresh_products() -> Iterator[None]:
    invariance._choose.cache_clear()
    yield
    invariance._choose.cache_clear()


@pytest.fixture
def broken_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose last bit depends on the number of rows."""
    true = cpu.silu_mul
    monkeypatch.setattr(cpu, "silu_mul", lambda gate_up: true(gate_up) * (1 + 1e-6 * (len(gate_up) % 2)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_whose_parts_all_hold_promises_the_same_bits(dtype: str) -> None:
    assert await labels(dtype=dtype) == {"invariant"}


async def test_the_chosen_strategies_are_in_the_statistics() -> None:
    async with Engine(tiny_checkpoint(), EngineConfig(num_pages=16)) as engine:
        stats = engine.stats()
    assert stats.operators == dict.fromkeys(OPERATORS, "numba")
    assert set(stats.products.values()) <= set(STRATEGIES)
    assert stats.unverified == ()


async def test_an_engine_that_was_told_to_be_fast_promises_nothing() -> None:
    assert await labels(numerics="fast") == {"fast"}


@pytest.mark.usefixtures("broken_activation")
async def test_a_kernel_that_depends_on_the_number_of_rows_makes_the_engine_say_so() -> None:
    assert await labels() == {"unverified"}
    async with Engine(tiny_checkpoint(), EngineConfig(num_pages=16)) as engine:
        (complaint,) = engine.stats().unverified
    assert complaint.startswith("silu_mul: bits change (1 rows")


@pytest.mark.usefixtures("fresh_products")
async def test_a_machine_without_a_product_that_holds_makes_the_engine_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rows(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias) * (1 + 1e-6 * (len(x) % 2))

    tiles = attrs.evolve(STRATEGIES["tiles"], multiply=by_rows)
    monkeypatch.setattr(invariance, "STRATEGIES", {"tiles": tiles})
    monkeypatch.setattr(invariance, "CANDIDATES", ("tiles",))
    assert await labels() == {"unverified"}
    async with Engine(tiny_checkpoint(), EngineConfig(num_pages=16)) as engine:
        assert "product 64 x 32: no strategy holds" in engine.stats().unverified


def module() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{name: value for name, value in TINY.items() if name != "architectures"}))


async def test_a_shared_module_is_as_good_as_the_unpacked_products_that_were_probed() -> None:
    assert await labels(module(), share=True) == {"invariant"}


@pytest.mark.usefixtures("fresh_products")
async def test_a_shared_module_whose_products_do_not_hold_is_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attrs.evolve(
        STRATEGIES["tiles"],
        multiply=lambda x, packed, weight, bias: (
            STRATEGIES["plain"].multiply(x, packed, weight, bias) * (1 + 1e-6 * (len(x) > 16))
        ),
    )
    monkeypatch.setattr(invariance, "STRATEGIES", {**STRATEGIES, "tiles": plain})
    assert await labels(module(), share=True) == {"unverified"}
    assert await labels() == {"invariant"}


async def test_a_sample_resumed_elsewhere_has_the_weaker_promise() -> None:
    long = attrs.evolve(PARAMS, max_tokens=400, ignore_eos=True)
    async with Engine(tiny_checkpoint(), EngineConfig(numerics="fast", num_pages=64)) as engine:
        async with engine.stream([1, 2, 3], long, request_id="one") as stream:
            await until(lambda: engine.stats().num_sampled_tokens >= 2)
            await engine.abort("one")
            part = await stream.output()
    assert part.outputs[0].finish_reason == "abort"
    async with Engine(tiny_checkpoint(), EngineConfig(num_pages=64)) as engine:
        whole = await engine.resume(part)
        assert engine.stats().numerics == "invariant"
    assert whole.numerics == "fast"
    assert weakest(["invariant", "unverified"]) == "unverified"
