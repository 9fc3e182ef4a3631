"""Field cases E, J and K: log-probabilities, validation, and what a sample may depend on."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from case_support import (
    GREEDY,
    PAGE,
    WEIGHTS,
    assert_made_by,
    both_backends,
    expected_logprobs,
    new_engine,
    same_samples,
    solo,
)

from aengine import PromptError, RequestOutput, SamplingParams, WeightUpdateError
from aengine.errors import RequestFailedError, SamplingParamsError, TokenizerMissingError
from aengine.testing import tiny_checkpoint


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@both_backends
async def test_e1_logprobs_are_taken_after_temperature_and_raw_ones_before(temperature: float) -> None:
    async with new_engine() as engine:
        output = await engine.generate([5, 6, 7], SamplingParams(temperature=temperature, max_tokens=10, seed=1))
    sample = output.outputs[0]
    expected = expected_logprobs(sample, output.prompt_token_ids, 0, temperature)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)
    assert_made_by(output, weights=0, version=0)
    assert (sample.logprobs == sample.raw_logprobs) == (temperature == 1.0)


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
@both_backends
async def test_e3_logprobs_stand_at_their_own_tokens_cold_cached_and_chunked(length: int) -> None:
    prompt = list(range(3, 3 + length))
    params = SamplingParams(temperature=1.5, max_tokens=10, seed=11)
    async with new_engine() as engine:
        runs = [await engine.generate(prompt, params) for _ in range(2)]
    async with new_engine(max_num_batched_tokens=3) as engine:
        runs.append(await engine.generate(prompt, params))
    for output in runs:
        sample = output.outputs[0]
        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.token_versions) == 10
        assert_made_by(output, weights=0, version=0)
        at_temperature = expected_logprobs(sample, prompt, 0, 1.5)
        torch.testing.assert_close(torch.tensor(sample.logprobs), at_temperature, atol=1e-4, rtol=0)
        assert same_samples(output, runs[0])
    assert [run.num_cached_tokens for run in runs] == [0, (length - 1) // PAGE * PAGE, 0]


@pytest.mark.parametrize("as_type", [list, tuple, np.array, torch.tensor])
@both_backends
async def test_e5_exact_ids_in_exact_ids_out_and_the_next_turn_hits_them(as_type: Any) -> None:
    async with new_engine() as engine:
        first = await engine.generate(as_type([1, 2, 3]), SamplingParams(max_tokens=2 * PAGE, seed=3))
        turn = [*first.prompt_token_ids, *first.outputs[0].token_ids, 9, 9]
        second = await engine.generate(as_type(turn), GREEDY)
        assert second.prompt_token_ids == tuple(turn)
        computed = 3 + 2 * PAGE - 1  # the token sampled last has no KV
        assert second.num_cached_tokens == computed // PAGE * PAGE
        assert first.outputs[0].text is None
        assert same_samples(second, await solo(turn, GREEDY))


@both_backends
async def test_j1_an_empty_prompt_is_refused_and_the_others_finish() -> None:
    async with new_engine() as engine:
        before = engine.stats()
        with pytest.raises(PromptError, match="empty"):
            await engine.generate([], GREEDY)
        with pytest.raises(PromptError, match="empty"):
            await engine.generate_batch([[1, 2], [], [3, 4]], GREEDY)
        assert engine.stats() == before
        good: list[RequestOutput] = []

        async def run(prompt: list[int]) -> None:
            good.append(await engine.generate(prompt, GREEDY))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, [1, 2])
            tasks.start_soon(run, [3, 4])
            with pytest.raises(PromptError):
                await engine.generate([], GREEDY)
        assert all(len(output.outputs[0].token_ids) == 8 for output in good)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([64], "position 0 holds token id 64; the vocabulary has ids 0 to 63"),
        ([1, -1], "position 1 holds token id -1"),
        ([1, 2.5], r"position 1 holds 2\.5"),
        ([True], "position 0 holds True"),
        ([[1, 2]], r"position 0 holds \[1, 2\]"),
        ({3, 4}, "not set"),
        (None, "not NoneType"),
        ([1] * 512, "512 tokens.*max_model_len"),
        ([1] * 257, "257 tokens.*holds 256"),
    ],
)
@both_backends
async def test_j1_a_prompt_that_cannot_be_served_is_refused_in_one_sentence(prompt: Any, message: str) -> None:
    async with new_engine() as engine:
        with pytest.raises(PromptError, match=message):
            await engine.generate(prompt, GREEDY)
        assert engine.stats().num_waiting == 0


@both_backends
async def test_j1_text_without_a_tokenizer_is_refused() -> None:
    async with new_engine() as engine:
        with pytest.raises(TokenizerMissingError):
            await engine.generate("hello", GREEDY)


@both_backends
async def test_j2_limits_of_new_tokens() -> None:
    for bad in (0, -1):
        with pytest.raises(SamplingParamsError, match="max_tokens"):
            SamplingParams(max_tokens=bad)
    async with new_engine(max_model_len=40) as engine:
        one = await engine.generate([1, 2, 3], SamplingParams(max_tokens=1, seed=0))
        assert (len(one.outputs[0].token_ids), one.outputs[0].finish_reason) == (1, "length")
        for unbounded in (None, 1000):
            out = await engine.generate([1, 2, 3], SamplingParams(max_tokens=unbounded, seed=0))
            assert (len(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (37, "length")
        assert engine.stats().pages.live == 0


@both_backends
async def test_k1_samples_of_one_seed_differ_repeat_and_do_not_depend_on_n() -> None:
    def params(n: int) -> SamplingParams:
        return SamplingParams(n=n, seed=7, max_tokens=12)

    prompt = [1, 2, 3, 4, 5, 6]
    async with new_engine() as engine:
        eight = await engine.generate(prompt, params(8))
        again = await engine.generate(prompt, params(8))
        four = await engine.generate(prompt, params(4))
        alone = await engine.generate_batch([prompt] * 8, params(1))
    assert len({sample.token_ids for sample in eight.outputs}) == 8
    assert same_samples(eight, again)
    assert four.outputs == eight.outputs[:4]
    assert all(output.outputs[0] == alone[0].outputs[0] for output in alone)
    assert alone[0].outputs[0].token_ids == eight.outputs[0].token_ids
    assert {sample.seed for sample in eight.outputs} == {7}


@both_backends
async def test_k1_a_request_without_a_seed_tells_the_seed_it_used() -> None:
    async with new_engine() as engine:
        free = await engine.generate([1, 2, 3], SamplingParams(max_tokens=12, n=2))
        other = await engine.generate([1, 2, 3], SamplingParams(max_tokens=12, n=2))
        told = await engine.generate([1, 2, 3], SamplingParams(max_tokens=12, n=2, seed=free.outputs[0].seed))
    assert same_samples(free, told)
    assert not same_samples(free, other)


@pytest.mark.parametrize(
    "fields", [{}, {"max_num_batched_tokens": 3}, {"page_size": 1}, {"page_size": 16, "num_pages": 40}]
)
@both_backends
async def test_k3_company_does_not_change_the_answer(fields: dict[str, int]) -> None:
    prompt = list(range(30, 30 + 2 * PAGE + 1))
    params = SamplingParams(max_tokens=10, seed=5, temperature=0.8)
    reference = await solo(prompt, params)
    for others in range(1, 8):
        async with new_engine(**fields) as engine:
            company = [list(range(1, 2 + 3 * i)) for i in range(others)]
            outputs = await engine.generate_batch([*company, prompt], params)
            cached = await engine.generate(prompt, params)
        assert same_samples(outputs[-1], reference)
        assert same_samples(cached, reference)


@both_backends
async def test_k4_non_finite_weights_fail_the_request_and_a_good_update_heals() -> None:
    poisoned = dict(WEIGHTS[1])
    poisoned["model.norm.weight"] = poisoned["model.norm.weight"].clone()
    poisoned["model.norm.weight"][3] = torch.nan
    async with new_engine() as engine:
        with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight: holds NaN"):
            await engine.update_weights(poisoned)
        await engine.update_weights(poisoned, check_finite=False)
        with pytest.raises(RequestFailedError, match="non-finite") as failed:
            await engine.generate([1, 2, 3], GREEDY)
        assert failed.value.outputs[0].outputs[0].token_ids == ()
        await engine.update_weights(WEIGHTS[2])
        assert_made_by(await engine.generate([1, 2, 3], GREEDY), weights=2, version=2)


@both_backends
async def test_k4_one_bad_row_of_three_leaves_the_others_alone() -> None:
    model = tiny_checkpoint(0, tie_word_embeddings=False)
    weights = {name: tensor.clone() for name, tensor in model.tensors.items()}
    weights["model.embed_tokens.weight"][13] = torch.nan
    params = SamplingParams(max_tokens=6, seed=2, temperature=0.01)
    async with new_engine(model) as engine:
        good = await engine.generate_batch([[1, 2], [3, 4]], params)
        await engine.update_weights(weights, check_finite=False)
        with pytest.raises(RequestFailedError) as failed:
            await engine.generate_batch([[1, 2], [13], [3, 4]], params)
        outputs = failed.value.outputs
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
        assert same_samples(outputs[0], good[0]) and same_samples(outputs[2], good[1])
        assert engine.stats().pages.live == 0


def test_params_of_all_kinds_are_refused_by_name() -> None:
    bad: dict[str, list[Any]] = {
        "n": [0, -1, 1.5, True, None],
        "temperature": [-0.1, float("nan"), float("inf"), "hot", None],
        "top_p": [0, 1.1, -1],
        "top_k": [-2, 1.5],
        "min_p": [-0.1, 1.1],
        "min_tokens": [-1],
        "stop_token_ids": [(-1,), ("a",), (1.5,)],
        "ignore_eos": [1, None],
        "seed": [-1, 2**64, 1.5],
    }
    for name, value in itertools.chain.from_iterable(
        zip(itertools.repeat(name), values) for name, values in bad.items()
    ):
        with pytest.raises(SamplingParamsError, match=name):
            SamplingParams(**{name: value})
    with pytest.raises(SamplingParamsError, match="min_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)
