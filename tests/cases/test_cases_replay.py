"""Whatever happened to a sample on its way, the audit computes it again bit for bit from its label alone."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from case_support import MODEL, PAGE, WEIGHTS, new_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_support import HeldSteps, assert_reproduced, new_replayer, records_of, sample

from aengine import RequestOutput, SamplingParams
from aengine.audit.oracle import oracle_logprobs
from aengine.audit.verdict import NotReproduced, Reproduced, Unauditable
from aengine.outputs import KVSpan, VersionSpan
from aengine.testing import tiny_checkpoint, until
from statemachines.policy import PolicyState

PROMPT = list(range(1, 3 * PAGE + 2))
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.6, "temperature": 0.8},
    "min-p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "minimum": {"min_tokens": 8, "stop_token_ids": (3, 5)},
    "bias": {"logit_bias": {7: 4.0, 9: -3.0}, "allowed_token_ids": tuple(range(20))},
    "alternatives": {"logprobs": 3, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("way", WAYS)
async def test_samples_of_every_kind_are_reproduced(way: str) -> None:
    model = tiny_checkpoint(0, eos_token_ids=(2, 11))
    params = SamplingParams(n=3, seed=5, max_tokens=24, **WAYS[way])
    async with new_engine(model) as engine:
        output = await engine.generate(PROMPT, params)
    assert_reproduced(output, replayer=new_replayer(model=model))


async def test_cached_chunked_and_preempted_samples_are_reproduced() -> None:
    params = [SamplingParams(n=2, seed=seed, max_tokens=20) for seed in range(4)]
    async with new_engine(num_pages=18, max_num_batched_tokens=7) as engine:
        outputs = await engine.generate_batch([PROMPT, PROMPT[:7], [*PROMPT, 5, 6], PROMPT], params)
        outputs += [await engine.generate(PROMPT, params[0])]
        assert engine.stats().num_preemptions > 0
        assert outputs[-1].num_cached_tokens > 0
    assert_reproduced(*outputs)


async def test_a_sample_that_fills_the_context_is_reproduced() -> None:
    async with new_engine(max_model_len=40) as engine:
        output = await engine.generate(PROMPT, SamplingParams(seed=1))
    assert len(output.outputs[0].token_ids) == 40 - len(PROMPT)
    assert_reproduced(output, replayer=new_replayer(max_sequence_len=40))


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("num_updates", [1, 2])
async def test_samples_carried_over_updates_are_reproduced(kv: str, num_updates: int) -> None:
    outputs: list[RequestOutput] = []
    async with new_engine() as engine, anyio.create_task_group() as tasks:
        steps = HeldSteps(engine)

        async def run(seed: int) -> None:
            outputs.append(await engine.generate(PROMPT[seed:], SamplingParams(n=2, seed=seed, max_tokens=24)))

        for seed in range(2):
            tasks.start_soon(run, seed)
        for number in range(1, num_updates + 1):
            await steps.update_after(6, engine, number, mode="keep", kv=kv)
        steps.allow(1000)
    assert {s.max_policy_version for output in outputs for s in output.outputs} == {num_updates}
    assert not any(s.is_single_policy for output in outputs for s in output.outputs)
    assert_reproduced(*outputs)


async def test_an_aborted_sample_that_was_resumed_under_another_version_is_reproduced() -> None:
    async with new_engine() as engine:
        outputs: list[RequestOutput] = []

        async def run() -> None:
            outputs.append(await engine.generate(PROMPT, SamplingParams(seed=3, max_tokens=20)))

        async with anyio.create_task_group() as tasks:
            steps = HeldSteps(engine)
            tasks.start_soon(run)
            await steps.update_after(6, engine, 1, mode="abort")
        steps.allow(1000)
        resumed = await engine.resume(outputs[0])
    assert not resumed.outputs[0].is_single_policy
    assert_reproduced(resumed)


async def test_a_sample_drawn_under_a_mask_is_scored_and_not_redrawn() -> None:
    class EvenTokens:
        def start(self) -> Any:
            return self

        def next_mask(self, output_ids: Any) -> Any:
            return np.arange(MODEL.spec.vocab_size) % 2 == 0

    async with new_engine() as engine:
        output = await engine.generate(PROMPT, SamplingParams(seed=1, max_tokens=9), token_mask=EvenTokens())
    (record,) = records_of(output)
    assert record.has_token_mask
    (replay,) = new_replayer().replay([record])
    assert replay.verdict == Reproduced(num_tokens=9, is_redrawn=False)
    wrong = msgspec.structs.replace(record, raw_logprobs=(*record.raw_logprobs[:-1], -1.0))
    assert isinstance(new_replayer().replay([wrong])[0].verdict, NotReproduced)


async def test_bits_do_not_depend_on_what_shares_the_pass() -> None:
    async with new_engine() as engine:
        records = []
        for seed, length in itertools.product(range(3), (1, 6, 13)):
            records += await sample(engine, PROMPT[:length], seed=seed, n=2, max_tokens=70)
    together = new_replayer().replay(records)
    alone = [new_replayer().replay([record])[0] for record in reversed(records)][::-1]
    for one, other in zip(together, alone, strict=True):
        assert one.found is not None and other.found is not None
        assert one.verdict == other.verdict == Reproduced(num_tokens=70)
        assert (one.found.raw_logprobs == other.found.raw_logprobs).all()


async def test_the_replay_agrees_with_the_oracle() -> None:
    async with new_engine() as engine:
        records = await sample(engine, PROMPT, seed=1, max_tokens=30)
    (replay,) = new_replayer().replay(records)
    assert replay.found is not None
    record = records[0]
    expected = oracle_logprobs(MODEL.spec, WEIGHTS[0], record.prompt_token_ids, record.token_ids, dtype=torch.float64)
    np.testing.assert_allclose(replay.found.raw_logprobs, expected.numpy(), atol=1e-5)


async def test_a_sample_without_tokens_has_nothing_to_reproduce() -> None:
    async with new_engine() as engine:
        (record,) = await sample(engine, PROMPT, seed=1, max_tokens=1)
    empty = msgspec.structs.replace(
        record, token_ids=(), logprobs=(), raw_logprobs=(), version_spans=(), kv_spans=(), finish_reason="abort"
    )
    (replay,) = new_replayer().replay([empty])
    assert replay.verdict == Reproduced(num_tokens=0, finish_unchecked="why it ended early")


BROKEN: dict[str, tuple[dict[str, Any], type, str]] = {
    "no prompt": ({"prompt_token_ids": ()}, Unauditable, "no prompt"),
    "a token beyond the vocabulary": ({"prompt_token_ids": (1, 64)}, Unauditable, "token id 64"),
    "a negative token": ({"token_ids": (1, 2, 3, -1)}, Unauditable, "token id -1"),
    "too long": ({"prompt_token_ids": (1,) * MODEL.spec.max_position_embeddings}, Unauditable, "at most 512"),
    "a missing number": ({"logprobs": (-1.0,)}, Unauditable, "differ in length"),
    "a seed out of range": ({"seed": 2**64}, Unauditable, "out of range"),
    "an unknown version": (
        {"version_spans": (VersionSpan(7, 0, 4),), "kv_spans": (KVSpan(7, 0, 16, 0, 4),)},
        Unauditable,
        "version 7 are not at hand",
    ),
    "a version that did not make the KV": ({"version_spans": (VersionSpan(1, 0, 4),)}, NotReproduced, "labels"),
    "no KV": ({"kv_spans": ()}, NotReproduced, "labels"),
    "another end": ({"finish_reason": "stop", "stop_reason": 3}, NotReproduced, "its end"),
    "a later end": ({"params": SamplingParams(seed=1, max_tokens=3)}, NotReproduced, "its end"),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_broken_record_gets_a_verdict_and_disturbs_no_other(how: str) -> None:
    changes, kind, words = BROKEN[how]
    async with new_engine() as engine:
        (record,) = await sample(engine, PROMPT, seed=1, max_tokens=4)
    broken = msgspec.structs.replace(record, **changes)
    replays = new_replayer().replay([record, broken, record])
    assert [type(replay.verdict) for replay in replays] == [Reproduced, kind, Reproduced]
    verdict = replays[1].verdict
    assert isinstance(verdict, NotReproduced | Unauditable)
    assert words in verdict.reason


@settings(max_examples=12, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 4, 16]),
    batched=st.sampled_from([3, 8, 64]),
    num_tokens=st.integers(60, 200),
    prefix_caching=st.booleans(),
    updates=st.lists(
        st.tuples(
            st.integers(0, 9), st.sampled_from(["wait", "abort", "keep"]), st.sampled_from(["recompute", "keep"])
        ),
        max_size=2,
    ),
    requests=st.lists(
        st.tuples(st.integers(1, len(PROMPT)), st.integers(1, 3), st.sampled_from(list(WAYS))), min_size=1, max_size=4
    ),
)
def test_whatever_happens_in_an_engine_its_labels_are_true(
    page_size: int,
    batched: int,
    num_tokens: int,
    prefix_caching: bool,
    updates: list[tuple[int, str, str]],
    requests: list[tuple[int, int, str]],
) -> None:
    outputs: list[RequestOutput] = []
    pool = {"page_size": page_size, "num_pages": num_tokens // page_size + 3, "prefix_caching": prefix_caching}

    async def main() -> None:
        async with new_engine(max_num_batched_tokens=batched, **pool) as engine, anyio.create_task_group() as tasks:
            steps = HeldSteps(engine)

            async def run(length: int, n: int, way: str) -> None:
                outputs.append(
                    await engine.generate(PROMPT[:length], SamplingParams(n=n, seed=length, max_tokens=20, **WAYS[way]))
                )

            async def update(number: int, count: int, mode: str, kv: str) -> None:
                steps.allow(count)
                await until(lambda: steps.is_held or len(outputs) == len(requests))
                options = {"mode": mode, "kv": kv} if mode == "keep" else {"mode": mode}
                tasks.start_soon(partial(engine.update_weights, WEIGHTS[number], **options))
                await until(lambda: engine.state is PolicyState.DRAINING or engine.policy_version == number)
                steps.allow(1000 if mode == "wait" else 1)
                await until(lambda: engine.policy_version == number)
                steps.hold()

            for request in requests:
                tasks.start_soon(run, *request)
            for number, (count, mode, kv) in enumerate(updates, 1):
                await update(number, count, mode, kv)
            steps.allow(100_000)

    anyio.run(main)
    assert len(outputs) == len(requests)
    for replay in new_replayer().replay([record for output in outputs for record in records_of(output)]):
        assert isinstance(replay.verdict, Reproduced), replay.verdict
