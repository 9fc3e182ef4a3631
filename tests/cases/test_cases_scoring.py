"""Field cases E, F and K: alternatives, scores of given tokens, resumed samples, conversations and token masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import anyio.from_thread
import attrs
import numpy as np
import pytest
import torch
from case_support import MODEL, PAGE, WEIGHTS, HookedRunner, both_backends, new_engine, same_samples, solo, until_idle

from aengine import Engine, PromptError, RequestOutput, SamplingParams
from aengine.audit.oracle import oracle_logits
from aengine.conversation import Conversation
from aengine.errors import RequestFailedError, SamplingParamsError, TokenizerMissingError, TokenMaskError
from aengine.testing import until

PROMPT = list(range(5, 5 + 2 * PAGE + 1))
RICH = SamplingParams(
    temperature=0.8,
    top_k=30,
    top_p=0.95,
    repetition_penalty=1.2,
    frequency_penalty=0.2,
    presence_penalty=0.3,
    logit_bias={3: 1.5},
    min_tokens=4,
    stop_token_ids=[9],
    logprobs=3,
    seed=4,
    max_tokens=12,
)
ALL_KINDS = [SamplingParams(seed=4, max_tokens=12), SamplingParams(temperature=0, max_tokens=12), RICH]


@pytest.mark.parametrize("params", ALL_KINDS)
@both_backends
async def test_e3_a_score_has_the_bits_that_generation_recorded(params: SamplingParams) -> None:
    async with new_engine() as engine:
        output = await engine.generate(PROMPT, attrs.evolve(params, n=3))
        pairs = [(PROMPT, sample.token_ids) for sample in output.outputs]
        scores = await engine.score(pairs, params)
        await until_idle(engine)
    async with new_engine(max_num_batched_tokens=3, prefix_caching=False) as engine:
        cold = await engine.score(pairs, params)
    for sample, score, other in zip(output.outputs, scores, cold, strict=True):
        assert (score.token_ids, score.logprobs) == (sample.token_ids, sample.logprobs)
        assert (score.raw_logprobs, score.top_logprobs) == (sample.raw_logprobs, sample.top_logprobs)
        assert attrs.evolve(other, num_cached_tokens=score.num_cached_tokens) == score
        assert (score.policy_version, score.prompt_token_ids) == (0, tuple(PROMPT))
    assert [score.num_cached_tokens for score in scores] == [2 * PAGE] * 3  # and none whose logits are needed


@both_backends
async def test_e3_scores_are_those_of_the_installed_weights_and_say_of_which() -> None:
    response = [3, 60, 7, 7, 12]
    async with new_engine() as engine:
        await engine.update_weights(WEIGHTS[1])
        (score,) = await engine.score([(PROMPT, response)])
    logits = oracle_logits(MODEL.spec, WEIGHTS[1], [*PROMPT, *response[:-1]])[len(PROMPT) - 1 :]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(score.raw_logprobs), expected, atol=1e-4, rtol=0)
    assert score.logprobs == score.raw_logprobs
    assert score.policy_version == 1


@both_backends
async def test_e3_the_support_of_a_score_renormalises_the_raw_distribution() -> None:
    params = SamplingParams(top_k=7, top_p=0.9, seed=1, max_tokens=6)
    async with new_engine() as engine:
        output = await engine.generate(PROMPT, params)
        sample = output.outputs[0]
        (score,) = await engine.score([(PROMPT, sample.token_ids)], params, with_support=True)
        (whole,) = await engine.score([(PROMPT, sample.token_ids)], with_support=True)
    assert score.support is not None
    assert whole.support == (None,) * 6
    logits = oracle_logits(MODEL.spec, WEIGHTS[0], [*PROMPT, *sample.token_ids[:-1]])[len(PROMPT) - 1 :]
    for place, kept in enumerate(score.support):
        assert kept is not None
        assert 1 <= len(kept) <= 7
        assert sample.token_ids[place] in kept
        renormalised = logits[place, torch.from_numpy(kept).long()].log_softmax(-1)
        mine = renormalised[kept.tolist().index(sample.token_ids[place])]
        assert float(mine) == pytest.approx(score.logprobs[place], abs=1e-4)


@both_backends
async def test_e3_a_token_that_could_not_have_been_sampled_scores_minus_infinity() -> None:
    async with new_engine() as engine:
        (score,) = await engine.score([([1, 2], [3, 4])], SamplingParams(allowed_token_ids=[3]))
    assert score.logprobs == (0.0, -np.inf)
    assert np.isfinite(score.raw_logprobs).all()


@pytest.mark.parametrize(("prompt", "response"), [([1], []), ([1], [64]), ([], [1]), ([1] * 250, [1] * 60)])
@both_backends
async def test_e3_what_cannot_be_scored_is_refused(prompt: list[int], response: list[int]) -> None:
    async with new_engine() as engine:
        with pytest.raises(PromptError):
            await engine.score([([1, 2], [3]), (prompt, response)])
        assert engine.stats().num_waiting == 0


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@both_backends
async def test_e3_a_score_that_an_update_overtakes_is_of_one_version(kv: Any) -> None:
    response = list(range(20, 60))
    async with new_engine(max_num_batched_tokens=2) as engine:
        async with anyio.create_task_group() as tasks:
            scores: list[Any] = []

            async def score() -> None:
                scores.extend(await engine.score([(PROMPT, response)]))

            tasks.start_soon(score)
            running = engine._opened().planner._running
            await until(lambda: any(request.targets and request.targets.results for request in running.values()))
            (targets,) = (request.targets for request in running.values())
            await engine.pause_generation("keep")
            assert 0 < len(targets.results) < len(response)
            await engine.update_weights(WEIGHTS[1], mode="keep", kv=kv)
            await engine.resume_generation()
        await until_idle(engine)
    async with new_engine() as engine:
        await engine.update_weights(WEIGHTS[1])
        (fresh,) = await engine.score([(PROMPT, response)])
    assert scores[0].policy_version == 1
    assert (scores[0].logprobs, scores[0].raw_logprobs) == (fresh.logprobs, fresh.raw_logprobs)


@both_backends
async def test_e3_an_aborted_score_is_an_error_and_gives_its_pages_back() -> None:
    async with new_engine(max_num_batched_tokens=4) as engine:

        def abort(call: int) -> None:
            if call == 3:
                anyio.from_thread.run_sync(engine._opened().scheduler.abort_all, token=engine._token)

        HookedRunner(engine, abort)
        with pytest.raises(RequestFailedError, match="aborted"):
            await engine.score([(PROMPT, list(range(20, 40)))])
        await until_idle(engine)


@both_backends
async def test_e3_many_rows_of_logits_are_made_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    response = list(range(30))
    async with new_engine() as engine:
        (whole,) = await engine.score([(PROMPT, response)])
        seen = []
        decoder = engine._opened().runner.decoder
        logits = decoder.logits
        monkeypatch.setattr("aengine.runner.MAX_LOGIT_ROWS", 4)
        monkeypatch.setattr(decoder, "logits", lambda hidden: (seen.append(len(hidden)), logits(hidden))[1])
        (parts,) = await engine.score([(PROMPT, response)])
    assert seen == [4] * 7 + [2]
    assert parts.logprobs == whole.logprobs


# ---- alternatives


@both_backends
async def test_e3_alternatives_hold_the_sampled_token_with_its_own_logprob() -> None:
    async with new_engine() as engine:
        output = await engine.generate(PROMPT, SamplingParams(logprobs=4, temperature=1.5, max_tokens=10, seed=2, n=2))
        plain = await engine.generate(PROMPT, SamplingParams(temperature=1.5, max_tokens=10, seed=2, n=2))
        zero = await engine.generate(PROMPT, SamplingParams(logprobs=0, temperature=1.5, max_tokens=10, seed=2, n=2))
    assert same_samples(output, plain)
    for sample, chosen in zip(output.outputs, zero.outputs, strict=True):
        logits = oracle_logits(MODEL.spec, WEIGHTS[0], [*PROMPT, *sample.token_ids[:-1]])[len(PROMPT) - 1 :]
        expected = (logits / 1.5).log_softmax(-1)
        assert sample.top_logprobs is not None
        for place, alternatives in enumerate(sample.top_logprobs):
            token = sample.token_ids[place]
            assert dict(alternatives)[token] == sample.logprobs[place]
            assert [one for one, _ in alternatives[:4]] == expected[place].topk(4).indices.tolist()
            for one, logprob in alternatives:
                assert logprob == pytest.approx(float(expected[place, one]), abs=1e-4)
        pairs = zip(sample.token_ids, sample.logprobs, strict=True)
        assert chosen.top_logprobs == tuple((pair,) for pair in pairs)
    assert plain.outputs[0].top_logprobs is None


@pytest.mark.parametrize("length", [1, PAGE, 2 * PAGE + 1])
@both_backends
async def test_e3_prompt_logprobs_are_the_models_own_cold_cached_chunked_and_preempted(length: int) -> None:
    prompt = PROMPT[:length]
    params = SamplingParams(prompt_logprobs=2, temperature=1.5, max_tokens=6, seed=2, n=2)
    async with new_engine() as engine:
        runs = [await engine.generate(prompt, params) for _ in range(2)]
        plain = await engine.generate(prompt, attrs.evolve(params, prompt_logprobs=None))
    async with new_engine(max_num_batched_tokens=3, num_pages=6) as engine:
        company = [prompt, [1, 2, 3], [4, 5]]
        runs.append((await engine.generate_batch(company, attrs.evolve(params, n=1)))[0])
    logits = oracle_logits(MODEL.spec, WEIGHTS[0], prompt).log_softmax(-1)
    for run in runs:
        assert run.prompt_logprobs is not None
        assert run.prompt_logprobs == runs[0].prompt_logprobs
        assert (len(run.prompt_logprobs), run.prompt_logprobs[0]) == (length, None)
        assert run.outputs[0].token_ids == plain.outputs[0].token_ids
        for place, alternatives in enumerate(run.prompt_logprobs[1:], 1):
            assert alternatives is not None
            assert prompt[place] in dict(alternatives)
            for token, logprob in alternatives:
                assert logprob == pytest.approx(float(logits[place - 1, token]), abs=1e-4)
    assert [run.num_cached_tokens for run in runs] == [0, 0, 0]
    assert same_samples(runs[0], plain)
    assert plain.prompt_logprobs is None
    assert plain.num_cached_tokens == (length - 1) // PAGE * PAGE


# ---- going on


async def abort_after(engine: Engine, steps: int, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    def abort(call: int) -> None:
        if call == steps:
            anyio.from_thread.run_sync(engine._opened().scheduler.abort_all, token=engine._token)

    HookedRunner(engine, abort)
    return await engine.generate(prompt, params)


@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize("params", [attrs.evolve(params, n=3) for params in ALL_KINDS])
@both_backends
async def test_f1_a_resumed_sample_is_what_it_would_have_been(params: SamplingParams, steps: int) -> None:
    whole = await solo(PROMPT, params)
    async with new_engine() as engine:
        part = await abort_after(engine, steps, PROMPT, params)
        assert any(sample.finish_reason == "abort" for sample in part.outputs)
        resumed = await engine.resume(part)
        assert await engine.resume(resumed) is not None
    assert same_samples(resumed, whole)
    for mine, theirs in zip(resumed.outputs, whole.outputs, strict=True):
        assert (mine.finish_reason, mine.top_logprobs) == (theirs.finish_reason, theirs.top_logprobs)
        assert (mine.version_spans, mine.kv_spans) == (theirs.version_spans, theirs.kv_spans)
    assert (resumed.request_id, resumed.finished) == (part.request_id, True)


@both_backends
async def test_f1_a_sample_resumed_under_new_weights_says_so() -> None:
    params = SamplingParams(max_tokens=10, seed=3)
    async with new_engine() as engine:
        part = await abort_after(engine, 5, PROMPT, params)
        count = len(part.outputs[0].token_ids)
        await engine.update_weights(WEIGHTS[1])
        resumed = await engine.resume(part)
    sample = resumed.outputs[0]
    assert sample.token_ids[:count] == part.outputs[0].token_ids
    assert sample.token_versions == (0,) * count + (1,) * (10 - count)
    assert not sample.is_single_policy
    after = oracle_logits(MODEL.spec, WEIGHTS[1], [*PROMPT, *sample.token_ids[:-1]])[len(PROMPT) - 1 :]
    expected = after.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[count:, 0]
    torch.testing.assert_close(torch.tensor(sample.raw_logprobs[count:]), expected, atol=1e-4, rtol=0)


@both_backends
async def test_f1_what_cannot_be_resumed_is_refused_or_left_as_it_is() -> None:
    params = SamplingParams(max_tokens=8, seed=3)
    async with new_engine() as engine:
        done = await engine.generate(PROMPT, params)
        assert await engine.resume(done) == done
        part = await abort_after(engine, 7, PROMPT, params)
        with pytest.raises(PromptError, match="params"):
            await engine.resume(attrs.evolve(part, params=None))
        assert same_samples(await engine.resume(attrs.evolve(part, params=None), params), done)
        assert same_samples(await engine.resume(part, attrs.evolve(params, n=3, seed=None)), done)
        with pytest.raises(SamplingParamsError, match="temperature"):
            await engine.resume(part, attrs.evolve(params, temperature=0.5))
    async with new_engine(max_model_len=len(PROMPT) + 2) as small:
        with pytest.raises(PromptError, match="no room"):
            await small.resume(part)


@both_backends
async def test_e5_a_conversation_keeps_exact_ids_masks_and_cache_hits() -> None:
    params = SamplingParams(max_tokens=PAGE + 1, seed=5)
    conversation = Conversation.start([1, 2, 3])
    async with new_engine() as engine:
        first = await engine.generate(conversation.token_ids, params)
        conversation.add_output(first)
        conversation.add_tokens([40, 41])
        second = await engine.generate(conversation.token_ids, params)
        assert second.num_cached_tokens == (3 + PAGE) // PAGE * PAGE
        conversation.add_output(second)
    one, two = first.outputs[0], second.outputs[0]
    assert conversation.token_ids == [1, 2, 3, *one.token_ids, 40, 41, *two.token_ids]
    assert conversation.loss_mask == [False] * 3 + [True] * 5 + [False] * 2 + [True] * 5
    assert conversation.logprobs == [None] * 3 + list(one.logprobs) + [None] * 2 + list(two.logprobs)
    assert conversation.raw_logprobs == [None] * 3 + list(one.raw_logprobs) + [None] * 2 + list(two.raw_logprobs)
    assert conversation.token_versions == [None] * 3 + [0] * 5 + [None] * 2 + [0] * 5
    assert conversation.num_sampled == 10
    with pytest.raises(PromptError, match="not this conversation"):
        conversation.add_output(first)
    with pytest.raises(TokenizerMissingError):
        conversation.add_text("hello")


# ---- token masks


class Alternating:
    """Even tokens at even places of the output, odd ones at odd places; fails where it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self._fail_at = fail_at

    def start(self) -> Alternating:
        return self

    def next_mask(self, output_ids: Sequence[int]) -> Any:
        if len(output_ids) == self._fail_at:
            raise RuntimeError("the hook broke")
        return np.arange(64) % 2 == len(output_ids) % 2


@both_backends
async def test_a_token_mask_decides_what_may_come_next_and_raw_logprobs_stay_the_models() -> None:
    params = SamplingParams(n=3, max_tokens=9, seed=8)
    async with new_engine() as engine:
        output = await engine.generate(PROMPT, params, token_mask=Alternating())
        part = await abort_after(engine, 4, PROMPT, params)
    for sample in output.outputs:
        assert [token % 2 for token in sample.token_ids] == [place % 2 for place in range(9)]
        logits = oracle_logits(MODEL.spec, WEIGHTS[0], [*PROMPT, *sample.token_ids[:-1]])[len(PROMPT) - 1 :]
        raw = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.raw_logprobs), raw, atol=1e-4, rtol=0)
        assert all(a > b for a, b in zip(sample.logprobs, sample.raw_logprobs, strict=True))
    assert part.outputs[0].finish_reason == "abort"


@both_backends
async def test_a_token_mask_that_fails_ends_its_own_request_and_no_other() -> None:
    params = SamplingParams(max_tokens=9, seed=8)
    async with new_engine() as engine:
        results: list[RequestOutput] = []

        async def run(prompt: list[int]) -> None:
            results.append(await engine.generate(prompt, params))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, [1, 2])
            tasks.start_soon(run, [3, 4])
            with pytest.raises(RequestFailedError, match="the hook broke") as failed:
                await engine.generate(PROMPT, params, token_mask=Alternating(fail_at=3))
        assert isinstance(failed.value.__cause__, TokenMaskError)
        assert len(failed.value.outputs[0].outputs[0].token_ids) == 3
        assert [len(result.outputs[0].token_ids) for result in results] == [9, 9]
        await until_idle(engine)


@pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 3}, {"num_pages": 16}])
@both_backends
async def test_k3_company_does_not_change_a_sample_with_penalties_and_alternatives(fields: dict[str, int]) -> None:
    reference = await solo(PROMPT, RICH)
    params = [attrs.evolve(RICH, seed=seed, frequency_penalty=0.1 * seed) for seed in range(5)]
    async with new_engine(**fields) as engine:
        company = [list(range(1, 3 + 2 * place)) for place in range(5)]
        outputs = await engine.generate_batch([*company, PROMPT], [*params, RICH])
    assert same_samples(outputs[-1], reference)
    assert outputs[-1].outputs[0].top_logprobs == reference.outputs[0].top_logprobs
