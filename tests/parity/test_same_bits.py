"""A request alone has the ids and the bits of both log-probabilities that it has in any company, under any settings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import anyio
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine import Engine, EngineConfig, RequestOutput, SamplingParams
from aengine.kernels import threads
from aengine.kernels.trial import torch_threads
from aengine.model.checkpoint import Checkpoint, load_checkpoint
from aengine.model.known import get_model
from aengine.stats import EngineStats
from aengine.testing import tiny_checkpoint, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DTYPES = ["float32", "bfloat16"]
MAX_MODEL_LEN = 64
TINY_MODEL = tiny_checkpoint(3)
QWEN3 = tiny_checkpoint(4, architectures=["Qwen3ForCausalLM"], head_dim=10)
PREFIX = tuple(range(11, 32))
PARALLEL_FROM = 4096
"""With two threads, so that also tiny models have kernels that are spread over both."""

Asked = tuple[tuple[int, ...], SamplingParams]
Bits = tuple[Any, ...]


@frozen
class Company:
    """Requests, and the circumstances in which they are served together."""

    asked: tuple[Asked, ...]
    num_early: int
    """How many are submitted before the others, which come when some tokens have been sampled."""
    num_rounds: int
    """How often they are submitted; from the second time on the prefix cache is warm."""
    spare_pages: int
    """Beyond those of the largest sample: few of them mean preemptions."""
    num_threads: int
    fields: dict[str, Any]

    def config(self, dtype: str) -> EngineConfig:
        size, largest = self.fields["page_size"], max(len(prompt) + (p.max_tokens or 0) for prompt, p in self.asked)
        num_pages = -(-largest // size) + self.spare_pages
        if self.fields["cache"] == "contiguous":
            num_pages = -(-MAX_MODEL_LEN // size) * (1 + self.spare_pages % 3)
        return EngineConfig(dtype=dtype, num_pages=num_pages, max_model_len=MAX_MODEL_LEN, **self.fields)


def bits(output: RequestOutput) -> Bits:
    """Everything in a result that is a number of the model."""
    samples = [(s.token_ids, s.logprobs, s.raw_logprobs, s.top_logprobs) for s in output.outputs]
    return samples, output.prompt_logprobs


async def serve(model: Checkpoint, config: EngineConfig, company: Company) -> tuple[list[Bits], EngineStats]:
    """Results in order of `company.asked`, round by round."""
    results: list[Bits] = []
    async with Engine(model, config) as engine:

        async def submit(asked: Sequence[Asked], place: int) -> None:
            outputs = await engine.generate_batch([prompt for prompt, _ in asked], [params for _, params in asked])
            results[place : place + len(asked)] = map(bits, outputs)

        for number in range(company.num_rounds):
            first, early = number * len(company.asked), company.num_early
            results += [()] * len(company.asked)
            goal = engine.stats().num_sampled_tokens + 2
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(submit, company.asked[:early], first)
                if early:
                    await until(lambda goal=goal: engine.stats().num_sampled_tokens >= goal)
                tasks.start_soon(submit, company.asked[early:], first + early)
        return results, engine.stats()


@functools.cache
def alone(model: Checkpoint, dtype: str, asked: Asked) -> Bits:
    """The request in an engine of its own, with one thread, pages to spare and nothing to reuse."""

    async def run() -> Bits:
        config = EngineConfig(dtype=dtype, num_pages=64, max_model_len=MAX_MODEL_LEN, prefix_caching=False)
        async with Engine(model, config) as engine:
            assert engine.stats().numerics == "invariant"
            return bits(await engine.generate(*asked))

    with torch_threads(1):
        return anyio.run(run)


def assert_same_bits(model: Checkpoint, dtype: str, company: Company) -> EngineStats:
    with torch_threads(company.num_threads), patch.object(threads, "PARALLEL_FROM", PARALLEL_FROM):
        results, stats = anyio.run(serve, model, company.config(dtype), company)
    for place, result in enumerate(results):
        assert result == alone(model, dtype, company.asked[place % len(company.asked)])
    return stats


def sampling() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        n=st.integers(1, 3),
        seed=st.integers(0, 5),
        max_tokens=st.integers(2, 10),
        temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
        top_k=st.sampled_from([0, 7]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.02]),
        repetition_penalty=st.sampled_from([1.0, 1.2]),
        frequency_penalty=st.sampled_from([0.0, 0.3]),
        logprobs=st.sampled_from([None, 2]),
        prompt_logprobs=st.sampled_from([None, 1]),
    )


def prompts(vocab_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Many begin alike, so that pages are shared."""
    tails = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=20).map(tuple)
    return st.builds(lambda length, tail: (*PREFIX[:length], *tail), st.integers(0, len(PREFIX)), tails)


@st.composite
def companies(draw: st.DrawFn, vocab_size: int = 64, max_requests: int = 5) -> Company:
    asked = draw(st.lists(st.tuples(prompts(vocab_size), sampling()), min_size=1, max_size=max_requests))
    return Company(
        asked=tuple(asked),
        num_early=draw(st.integers(0, len(asked) - 1)),
        num_rounds=draw(st.integers(1, 2)),
        spare_pages=draw(st.integers(0, 12)),
        num_threads=draw(st.sampled_from([1, 2])),
        fields={
            "page_size": draw(st.sampled_from([1, 4, 5, 16])),
            "max_num_batched_tokens": draw(st.sampled_from([3, 8, 512])),
            "max_num_seqs": draw(st.sampled_from([2, 256])),
            "prefix_caching": draw(st.booleans()),
            "cache": draw(st.sampled_from(["paged", "paged", "paged", "contiguous"])),
        },
    )


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=settings.default.max_examples // 3)
@given(company=companies())
def test_company_settings_and_threads_change_no_bit(dtype: str, company: Company) -> None:
    assert_same_bits(TINY_MODEL, dtype, company)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=settings.default.max_examples // 6)
@given(company=companies())
def test_nor_do_they_in_a_model_with_head_norms_and_an_odd_head_size(dtype: str, company: Company) -> None:
    assert_same_bits(QWEN3, dtype, company)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_preempted_and_cached_samples_have_the_bits_of_those_left_alone(dtype: str, num_threads: int) -> None:
    asked = tuple(
        ((*PREFIX[:9], number), SamplingParams(n=2, seed=number, max_tokens=20, logprobs=1)) for number in range(5)
    )
    fields = {"page_size": 4, "max_num_batched_tokens": 16, "cache": "paged"}
    stats = assert_same_bits(TINY_MODEL, dtype, Company(asked, 1, 2, 6, num_threads, fields))
    assert stats.num_preemptions > 0
    assert stats.prefix.hit_tokens > 0


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    get_model("smollm2-135m")
    return load_checkpoint("smollm2-135m")


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_changes_no_bit_of_smollm2(dtype: str, smollm2: Checkpoint) -> None:
    @settings(max_examples=max(2, settings.default.max_examples // 20))
    @given(company=companies(vocab_size=49_000, max_requests=3))
    def check(company: Company) -> None:
        assert_same_bits(smollm2, dtype, company)

    check()
