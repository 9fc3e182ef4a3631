"""Whatever is changed in a record, in the weights or in the engine's bookkeeping, the audit finds it, and says what."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from case_support import MODEL, PAGE, WEIGHTS, new_engine
from replay_support import HeldSteps, explain, new_replayer, records_of, sample

from aengine import RequestOutput, SamplingParams
from aengine.audit.explanation import (
    EditedLogprob,
    EditedTokens,
    LaterVersion,
    NearWeights,
    NotDrawn,
    OtherParams,
    OtherSeed,
    OtherVersion,
    StalePrefix,
    TokenEdit,
    Unexplained,
)
from aengine.audit.forensics import Forensics
from aengine.audit.record import SampleRecord
from aengine.audit.verdict import NotReproduced, OtherBits, Reproduced, Unauditable
from aengine.cache import manager
from aengine.outputs import KVSpan, VersionSpan
from aengine.testing import random_tensors

PROMPT = list(range(1, 3 * PAGE + 2))
NUM_TOKENS = 24


async def one_sample(**params: Any) -> SampleRecord:
    async with new_engine() as engine:
        (record,) = await sample(engine, PROMPT, **{"seed": 40, "max_tokens": NUM_TOKENS, **params})
    return record


def changed(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def next_float32(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


def under(record: SampleRecord, version: int) -> SampleRecord:
    """The record with every label saying `version`."""
    end = len(record.prompt_token_ids) + len(record.token_ids) - 1
    tokens = len(record.token_ids)
    return msgspec.structs.replace(
        record, version_spans=(VersionSpan(version, 0, tokens),), kv_spans=(KVSpan(version, 0, end, 0, tokens),)
    )


@pytest.mark.parametrize("place", [0, 9, NUM_TOKENS - 1])
async def test_an_edited_token_is_found(place: int) -> None:
    record = await one_sample()
    drawn = record.token_ids[place]
    edited = msgspec.structs.replace(record, token_ids=changed(record.token_ids, place, (drawn + 1) % 64))
    replay, explanation = explain(edited)
    assert isinstance(replay.verdict, NotReproduced)
    assert replay.verdict.position == place
    assert explanation == EditedTokens((TokenEdit(place, (drawn + 1) % 64, drawn),))
    assert f"token {place} was {drawn}" in explanation.sentence


async def test_an_edited_token_with_its_own_log_probabilities_is_found() -> None:
    record = await one_sample()
    edited = msgspec.structs.replace(record, token_ids=changed(record.token_ids, 9, (record.token_ids[9] + 1) % 64))
    (replay,) = new_replayer().replay([edited])
    assert replay.found is not None
    forged = msgspec.structs.replace(
        edited,
        logprobs=changed(record.logprobs, 9, float(replay.found.logprobs[9])),
        raw_logprobs=changed(record.raw_logprobs, 9, float(replay.found.raw_logprobs[9])),
    )
    replay, explanation = explain(forged)
    assert isinstance(replay.verdict, NotReproduced)
    assert explanation == EditedTokens((TokenEdit(9, edited.token_ids[9], record.token_ids[9]),))


@pytest.mark.parametrize("field", ["logprobs", "raw_logprobs"])
async def test_the_last_bit_of_a_log_probability_is_found(field: str) -> None:
    record = await one_sample(temperature=0.8)
    value = getattr(record, field)[7]
    edited = msgspec.structs.replace(record, **{field: changed(getattr(record, field), 7, next_float32(value))})
    replay, explanation = explain(edited)
    assert isinstance(replay.verdict, OtherBits)
    assert (replay.verdict.position, replay.verdict.num_differing) == (7, 1)
    assert explanation == EditedLogprob(7, field, next_float32(value), value)


async def test_a_log_probability_that_is_no_float32_is_found() -> None:
    record = await one_sample()
    value = float(np.nextafter(record.logprobs[3], 0.0))
    (replay,) = new_replayer().replay([msgspec.structs.replace(record, logprobs=changed(record.logprobs, 3, value))])
    assert isinstance(replay.verdict, OtherBits)
    assert replay.verdict.position == 3


async def test_an_edited_alternative_is_found() -> None:
    record = await one_sample(logprobs=2)
    assert record.top_logprobs is not None
    (first, number), *rest = record.top_logprobs[5]
    for pair in ((first, next_float32(number)), ((first + 1) % 64, number)):
        tops = changed(record.top_logprobs, 5, (pair, *rest))
        replay, _ = explain(msgspec.structs.replace(record, top_logprobs=tops))
        assert replay.verdict == NotReproduced(position=5, reason="token 5: its top_logprobs are not what was computed")
    (replay,) = new_replayer().replay([msgspec.structs.replace(record, top_logprobs=record.top_logprobs[:-1])])
    assert isinstance(replay.verdict, NotReproduced)


@pytest.mark.parametrize(("seed", "relatives"), [(41, ()), (7000, ((40, 0), (3, 1)))])
async def test_another_seed_is_found(seed: int, relatives: tuple[tuple[int, int], ...]) -> None:
    record = await one_sample()
    replay, explanation = explain(msgspec.structs.replace(record, seed=seed), relatives)
    assert isinstance(replay.verdict, NotReproduced)
    assert "token" in replay.verdict.reason and f"seed {seed} draws" in replay.verdict.reason
    assert explanation == OtherSeed(40, 0, seed, 0)


async def test_a_seed_that_changes_nothing_contradicts_the_parameters() -> None:
    record = await one_sample(temperature=0.0)
    (replay,) = new_replayer().replay([msgspec.structs.replace(record, seed=41)])
    assert replay.verdict == NotReproduced(position=None, reason="its seed 41 is not that of its parameters, 40")


async def test_a_version_that_nothing_binds_to_weights_is_not_vouched_for() -> None:
    record = await one_sample()
    replayer = new_replayer()
    replayer.named_versions = frozenset({1, 2})
    assert replayer.replay([record])[0].verdict == Unauditable(reason="nothing names the digest of version 0")


async def test_a_seed_that_nobody_knows_is_said_to_be_wrong() -> None:
    params = SamplingParams(seed=7000, max_tokens=NUM_TOKENS)
    replay, explanation = explain(msgspec.structs.replace(await one_sample(), seed=7000, params=params))
    assert isinstance(replay.verdict, NotReproduced)
    assert isinstance(explanation, NotDrawn)
    assert explanation.num_tokens > 3


async def test_swapped_samples_of_a_group_are_found() -> None:
    async with new_engine() as engine:
        first, second = await sample(engine, PROMPT, n=2, seed=40, max_tokens=NUM_TOKENS)
    for record, index in ((first, 1), (second, 0)):
        replay, explanation = explain(msgspec.structs.replace(record, index=index))
        assert isinstance(replay.verdict, NotReproduced)
        assert explanation == OtherSeed(40, record.index, 40, index)


async def test_other_sampling_parameters_are_found() -> None:
    record = await one_sample(temperature=0.7)
    warmer = msgspec.structs.replace(record, params=SamplingParams(seed=40, max_tokens=NUM_TOKENS, temperature=0.9))
    replay, explanation = explain(warmer)
    assert isinstance(replay.verdict, NotReproduced)
    assert explanation == OtherParams(NUM_TOKENS)


async def test_another_version_number_is_found() -> None:
    replay, explanation = explain(under(await one_sample(), 1))
    assert isinstance(replay.verdict, NotReproduced)
    assert explanation == OtherVersion(0, 1)
    assert explanation.sentence == "tokens and KV are of version 0, the label says 1"


async def test_labels_that_contradict_each_other_are_looked_behind() -> None:
    record = await one_sample()
    replay, explanation = explain(msgspec.structs.replace(record, version_spans=(VersionSpan(1, 0, NUM_TOKENS),)))
    assert isinstance(replay.verdict, NotReproduced)
    assert explanation == OtherVersion(0, None)


async def test_one_changed_weight_is_found() -> None:
    record = await one_sample()
    norm = WEIGHTS[0]["model.norm.weight"].clone()
    norm[3] = next_float32(norm[3].item())
    weights = {**WEIGHTS, 0: {**WEIGHTS[0], "model.norm.weight": norm}}
    (replay,) = new_replayer(weights).replay([record])
    assert isinstance(replay.verdict, OtherBits)
    assert replay.verdict.largest_difference < 1e-5
    _, explanation = explain(record, weights=weights)
    assert isinstance(explanation, NearWeights)


async def test_weights_that_are_not_at_hand_are_not_made_up() -> None:
    record = await one_sample()
    weights = {0: random_tensors(MODEL.spec, 8), 1: random_tensors(MODEL.spec, 9)}
    replay, explanation = explain(record, weights=weights)
    assert isinstance(replay.verdict, NotReproduced)
    assert explanation == Unexplained((0, 1))


async def test_a_sample_that_went_on_under_a_version_its_label_conceals_is_found() -> None:
    for kv in ("keep", "recompute"):
        outputs: list[RequestOutput] = []
        async with new_engine() as engine, anyio.create_task_group() as tasks:
            steps = HeldSteps(engine)

            async def run(engine: Any = engine, outputs: list[RequestOutput] = outputs) -> None:
                outputs.append(await engine.generate(PROMPT, SamplingParams(seed=40, max_tokens=NUM_TOKENS)))

            tasks.start_soon(run)
            await steps.update_after(5, engine, 1, mode="keep", kv=kv)
            steps.allow(1000)
        (record,) = records_of(outputs[0])
        first = record.version_spans[0].end
        replay, explanation = explain(under(record, 0))
        assert isinstance(replay.verdict, NotReproduced)
        assert explanation == LaterVersion(first, 1, 0, kv)


def break_invalidation(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """What was indexed before an update is found after it."""
    root_identity = manager.root_identity
    monkeypatch.setattr(manager, "root_identity", lambda epoch, salt: root_identity(0, salt))
    monkeypatch.setattr(type(engine._opened().cache._strategy), "invalidate", lambda strategy, epoch: 0)


@pytest.mark.parametrize("length", [PAGE + 1, 2 * PAGE + 1, 3 * PAGE + 1, 3 * PAGE + 3])
async def test_stale_pages_are_found_with_their_version(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    prompt, params = list(range(1, length + 1)), SamplingParams(seed=40, max_tokens=NUM_TOKENS)
    async with new_engine() as engine:
        break_invalidation(monkeypatch, engine)
        await engine.generate(prompt, params)
        await engine.update_weights(WEIGHTS[1])
        await engine.update_weights(WEIGHTS[2])
        output = await engine.generate(prompt, params)
    stale = (length - 1) // PAGE * PAGE
    assert output.num_cached_tokens == stale
    (record,) = records_of(output)
    assert {span.version for span in (*record.version_spans, *record.kv_spans)} == {2}
    replay, explanation = explain(record)
    assert isinstance(replay.verdict, NotReproduced)
    assert explanation == StalePrefix(stale, 0, 2, 0)
    assert explanation.sentence == f"positions 0-{stale - 1} were computed under version 0, the label says 2"


async def test_the_same_engine_unbroken_is_proved() -> None:
    prompt, params = PROMPT, SamplingParams(seed=40, max_tokens=NUM_TOKENS)
    async with new_engine() as engine:
        await engine.generate(prompt, params)
        await engine.update_weights(WEIGHTS[1])
        (record,) = records_of(await engine.generate(prompt, params))
    replay, explanation = explain(record)
    assert isinstance(replay.verdict, Reproduced)
    assert explanation is None


async def test_stale_pages_that_a_sample_met_on_its_way_are_found() -> None:
    """As after a preemption: tokens from one on attended to a prefix that another version had left."""
    record = await one_sample()
    token, end, num_prompt = 10, 2 * PAGE, len(PROMPT)
    last = num_prompt + NUM_TOKENS - 1
    spans = (KVSpan(0, 0, num_prompt + token - 1, 0, token), KVSpan(1, 0, end, token, NUM_TOKENS))
    forged = msgspec.structs.replace(record, kv_spans=(*spans, KVSpan(0, end, last, token, NUM_TOKENS)))
    for _ in range(NUM_TOKENS):  # what such an engine would have drawn, token by token
        (replay,) = new_replayer().replay([forged])
        assert replay.found is not None
        forged = msgspec.structs.replace(
            forged,
            token_ids=tuple(replay.found.redrawn.tolist()),
            logprobs=tuple(map(float, replay.found.logprobs)),
            raw_logprobs=tuple(map(float, replay.found.raw_logprobs)),
        )
    (replay,) = new_replayer().replay([forged])
    assert isinstance(replay.verdict, Reproduced)
    replay, explanation = explain(under(forged, 0))
    assert isinstance(replay.verdict, NotReproduced)
    assert explanation == StalePrefix(end, 1, 0, token)
    assert f"for tokens from {token} on" in explanation.sentence


async def test_on_another_machine_a_wrong_version_is_still_found() -> None:
    record = under(await one_sample(), 1)
    off = tuple(value + 1e-5 for value in record.raw_logprobs)
    replayer = new_replayer()
    replayer.machine_differences = ("processor: another",)
    (replay,) = replayer.replay([msgspec.structs.replace(record, raw_logprobs=off)])
    assert isinstance(replay.verdict, NotReproduced)
    assert Forensics(replayer, (0, 1, 2)).explain(replay) == OtherVersion(0, 1)
