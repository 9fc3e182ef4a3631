"""Field case K3 in 16 bits, and what else an engine does in the types it can compute with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from case_support import GREEDY, MODEL, PAGE, WEIGHTS, new_engine, same_samples, until_idle
from transformers import LlamaConfig, LlamaForCausalLM

from aengine import Engine, EngineConfig, RequestOutput, SamplingParams, WeightUpdateError
from aengine.audit.oracle import oracle_logprobs
from aengine.errors import ConfigError
from aengine.policy.digest import digest_tensors
from aengine.testing import TINY, random_tensors

NARROW = ["bfloat16", "float16"]
PROMPT = list(range(30, 30 + 4 * PAGE + 1))
PARAMS = SamplingParams(max_tokens=20, n=2, seed=5, temperature=0.8, top_p=0.95)
COMPANY = [list(range(1, 2 + 3 * length)) for length in range(7)]

in_16_bits = pytest.mark.parametrize("dtype", NARROW)


async def alone(dtype: str, **fields: Any) -> RequestOutput:
    async with new_engine(dtype=dtype, **{"num_pages": 256, "prefix_caching": False, **fields}) as engine:
        return await engine.generate(PROMPT, PARAMS)


def in_type(weights: int, dtype: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in WEIGHTS[weights].items()}


def assert_made_in(output: RequestOutput, weights: int, dtype: str) -> None:
    """Close to what the weights in that type give in float64, as far as the roundings between operators allow."""
    for sample in output.outputs:
        expected = oracle_logprobs(
            MODEL.spec, in_type(weights, dtype), output.prompt_token_ids, sample.token_ids, dtype=torch.float64
        )
        error = (torch.tensor(sample.raw_logprobs, dtype=torch.float64) - expected).abs().mean()
        assert error < 16 * torch.finfo(getattr(torch, dtype)).eps


@in_16_bits
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_batched_tokens": 3},
        {"page_size": 1, "num_pages": 256},
        {"page_size": 16, "num_pages": 40},
        {"cache": "contiguous", "max_num_seqs": 4, "max_model_len": 64},
    ],
    ids=str,
)
async def test_k3_company_chunks_pages_and_cache_do_not_change_the_answer_in_16_bits(
    dtype: str, fields: dict[str, Any]
) -> None:
    reference = await alone(dtype)
    assert_made_in(reference, 0, dtype)
    async with new_engine(dtype=dtype, **fields) as engine:
        outputs = await engine.generate_batch([*COMPANY, PROMPT], PARAMS)
        again = await engine.generate(PROMPT, PARAMS)
    assert same_samples(outputs[-1], reference)
    assert same_samples(again, reference)
    assert bool(again.num_cached_tokens) == (fields.get("page_size") != 1 and "cache" not in fields)


@in_16_bits
async def test_k3_preemption_does_not_change_the_answer_in_16_bits(dtype: str) -> None:
    reference = await alone(dtype)
    async with new_engine(dtype=dtype, num_pages=22, prefix_caching=False) as engine:
        outputs = await engine.generate_batch([PROMPT] * 3, PARAMS)
        assert engine.stats().num_preemptions > 0
        await until_idle(engine)
    assert all(same_samples(output, reference) for output in outputs)


@in_16_bits
async def test_k3_threads_do_not_change_the_answer_in_16_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.kernels.threads.PARALLEL_FROM", 0)
    before, outputs = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            outputs.append(await alone(dtype))
    finally:
        torch.set_num_threads(before)
    assert same_samples(*outputs)


@in_16_bits
async def test_the_type_is_computed_in_and_not_only_stored(dtype: str) -> None:
    narrow, wide = await alone(dtype), await alone("float32")
    logprobs = [logprob for sample in narrow.outputs for logprob in sample.raw_logprobs]
    assert all(float(np.float32(logprob)) == logprob for logprob in logprobs), "they are float32 in any type"
    assert narrow.outputs[0].raw_logprobs[0] != wide.outputs[0].raw_logprobs[0]


@in_16_bits
@pytest.mark.parametrize("staging", ["copy", "none"])
async def test_an_update_is_cast_once_and_its_digest_is_that_of_the_type_held(dtype: str, staging: str) -> None:
    async with new_engine(dtype=dtype, staging=staging) as engine:
        assert engine.installed_policy.digest == digest_tensors(in_type(0, dtype).items())
        wide = await engine.update_weights(WEIGHTS[1])
        narrow = await engine.update_weights(in_type(2, dtype))
        assert wide.digest == digest_tensors(in_type(1, dtype).items())
        assert narrow.digest == await engine.weight_checksum() == digest_tensors(in_type(2, dtype).items())
        if staging == "copy":
            assert wide.casts == {"float32": len(WEIGHTS[1])}
            assert narrow.casts == {}
        updated = await engine.generate(PROMPT, GREEDY)
    assert_made_in(updated, 2, dtype)
    async with new_engine(dtype=dtype) as engine:
        await engine.update_weights(WEIGHTS[2])
        assert same_samples(await engine.generate(PROMPT, GREEDY), updated)


@in_16_bits
async def test_the_same_memory_holds_twice_the_pages_in_16_bits(dtype: str) -> None:
    totals = []
    for name in ("float32", dtype):
        async with new_engine(dtype=name, num_pages=None, kv_cache_memory=2**16) as engine:
            totals.append(engine.stats().pages.total)
    assert totals[1] == 2 * totals[0] > 0


@in_16_bits
async def test_fast_numerics_compute_in_16_bits_too(dtype: str) -> None:
    async with new_engine(dtype=dtype, numerics="fast") as engine:
        assert_made_in(await engine.generate(PROMPT, PARAMS), 0, dtype)


@in_16_bits
async def test_a_shared_module_is_refused_in_16_bits(dtype: str) -> None:
    module = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in TINY.items() if k != "architectures"}))
    with pytest.raises(ConfigError, match=f"dtype.*{dtype}.*shares a module's parameters"):
        async with Engine(module, EngineConfig(dtype=dtype, num_pages=8), share=True):
            pass


async def test_a_weight_too_large_for_float16_is_refused_by_an_update() -> None:
    tensors = random_tensors(MODEL.spec, 3)
    tensors["model.norm.weight"][3] = 1e5
    async with new_engine(dtype="float16") as engine:
        with pytest.raises(WeightUpdateError, match=r"model.norm.weight: holds NaN or an infinity"):
            await engine.update_weights(tensors)
        assert engine.policy_version == 0
        assert_made_in(await engine.generate(PROMPT, PARAMS), 0, "float16")


@pytest.mark.parametrize("dtype", ["float64", "half", torch.bfloat16, None])
def test_other_types_are_refused_by_the_config(dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        EngineConfig(dtype=dtype)
