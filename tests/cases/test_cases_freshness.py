"""Field cases A, C, D: what an update does to cached KV, to weights and to labels."""

from __future__ import annotations

import threading

import anyio
import pytest
import torch
from case_support import GREEDY, PAGE, WEIGHTS, HookedRunner, assert_made_by, both_backends, new_engine, until_running

from aengine import RequestOutput, SamplingParams, WeightUpdateAck, WeightUpdateError
from aengine.errors import StaleVersionError
from aengine.outputs import KVSpan, VersionSpan
from aengine.testing import FaultInjector, until
from statemachines.policy import PolicyState


@both_backends
async def test_a1_same_prompt_right_after_an_update() -> None:
    prompt = list(range(1, 3 * PAGE + 2))
    async with new_engine() as engine:
        cold = await engine.generate(prompt, GREEDY)
        cached = await engine.generate(prompt, GREEDY)
        assert (cold.num_cached_tokens, cached.num_cached_tokens) == (0, 3 * PAGE)
        assert cached.outputs[0].token_ids == cold.outputs[0].token_ids
        assert_made_by(cached, weights=0, version=0)

        ack = await engine.update_weights(WEIGHTS[1])
        assert ack.pages_invalidated > 0
        fresh = await engine.generate(prompt, GREEDY)
        again = await engine.generate(prompt, GREEDY)
        assert (fresh.num_cached_tokens, again.num_cached_tokens) == (0, 3 * PAGE)
        assert_made_by(fresh, weights=1, version=1)
        assert_made_by(again, weights=1, version=1)


@pytest.mark.parametrize("variant", ["update", "evict"])
@both_backends
async def test_a5_a_prefix_found_before_an_update_is_not_used_after_it(variant: str) -> None:
    prefix = list(range(10, 10 + 2 * PAGE))
    async with new_engine(num_pages=8, max_num_seqs=1) as engine:
        await engine.generate([*prefix, 1], GREEDY)
        may_run = threading.Event()
        HookedRunner(engine, lambda _: may_run.wait(10))
        results: list[RequestOutput] = []

        async def run(prompt: list[int], max_tokens: int) -> None:
            results.append(await engine.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, [3] * (4 * PAGE), 3 * PAGE)  # fills the pool, so that the next request waits
            await until_running(engine)
            tasks.start_soon(run, [*prefix, 2], 4)
            if variant == "update":
                tasks.start_soon(engine.update_weights, WEIGHTS[1])
                await until(lambda: engine.state is PolicyState.DRAINING)
            may_run.set()
        waited = next(result for result in results if result.prompt_token_ids[-1] == 2)
        version = 1 if variant == "update" else 0
        assert_made_by(waited, weights=version, version=version)
        if variant == "update":
            assert waited.num_cached_tokens == 0


@both_backends
async def test_a7_nothing_is_dropped_without_an_update() -> None:
    system = list(range(20, 20 + 3 * PAGE))
    async with new_engine() as engine:
        cached = [(await engine.generate([*system, user], GREEDY)).num_cached_tokens for user in range(5)]
        assert cached == [0, 3 * PAGE, 3 * PAGE, 3 * PAGE, 3 * PAGE]
        bad = WEIGHTS[1] | {"model.norm.weight": torch.ones(7)}
        with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight"):
            await engine.update_weights(bad)
        assert engine.policy_version == 0
        sixth = await engine.generate([*system, 6], GREEDY)
        assert sixth.num_cached_tokens == 3 * PAGE
        assert_made_by(sixth, weights=0, version=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.norm.weight"), r"missing.*model\.norm\.weight"),
        (lambda w: w.update({"model.nrom.weight": w.pop("model.norm.weight")}), r"model\.nrom\.weight"),
        (lambda w: w.update({"extra.weight": torch.zeros(3)}), r"unexpected.*extra\.weight"),
        (lambda w: w.clear(), "missing"),
    ],
)
@both_backends
async def test_c1_missing_misspelled_or_extra_names_are_refused_by_name(change, named: str) -> None:  # type: ignore[no-untyped-def]
    weights = dict(WEIGHTS[1])
    change(weights)
    async with new_engine() as engine:
        with pytest.raises(WeightUpdateError, match=named):
            await engine.update_weights(weights)
        assert engine.policy_version == 0
        assert_made_by(await engine.generate([1, 2, 3], GREEDY), weights=0, version=0)


@both_backends
async def test_c2_one_bad_shape_late_in_the_list_changes_nothing() -> None:
    prompt = list(range(2 * PAGE + 1))
    names = list(WEIGHTS[1])
    bad = dict(WEIGHTS[1])
    bad[names[6]] = torch.zeros(3, 5)
    async with new_engine() as engine:
        digest = engine.installed_policy
        await engine.generate(prompt, GREEDY)
        with pytest.raises(WeightUpdateError) as refused:
            await engine.update_weights(bad)
        assert names[6] in str(refused.value) and refused.value.stage == "stage"
        assert engine.installed_policy == digest and (await engine.weight_checksum()) == digest.digest
        after = await engine.generate(prompt, GREEDY)
        assert after.num_cached_tokens == 2 * PAGE
        assert_made_by(after, weights=0, version=0)


@both_backends
async def test_c4_tied_embeddings_stay_tied() -> None:
    embedding = "model.embed_tokens.weight"
    async with new_engine() as engine:
        await engine.update_weights(WEIGHTS[1])
        assert_made_by(await engine.generate([1, 2, 3], GREEDY), weights=1, version=1)
        await engine.update_weights(WEIGHTS[2] | {"lm_head.weight": WEIGHTS[2][embedding]})
        assert_made_by(await engine.generate([1, 2, 3], GREEDY), weights=2, version=2)
        with pytest.raises(WeightUpdateError, match=r"lm_head\.weight"):
            await engine.update_weights(WEIGHTS[1] | {"lm_head.weight": WEIGHTS[2][embedding]})
        assert engine.policy_version == 2


@both_backends
async def test_d1_the_label_says_who_made_the_token() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    async with new_engine(max_num_seqs=1) as engine, engine.stream([1, 2, 3], params) as stream:
        async with anyio.create_task_group() as tasks:
            waited: list[RequestOutput] = []

            async def wait_in_line() -> None:
                waited.append(await engine.generate([4, 5, 6], params))

            tasks.start_soon(wait_in_line)
            seen = 0
            async for delta in stream:
                seen += len(delta.token_ids)
                if seen == 7:
                    tasks.start_soon(engine.update_weights, WEIGHTS[1])
        drained = await stream.output()
    assert len(drained.outputs[0].token_ids) == 20
    assert drained.outputs[0].version_spans == (VersionSpan(0, 0, 20),)
    assert drained.outputs[0].kv_spans == (KVSpan(0, 0, 3 + 19, 0, 20),)
    assert_made_by(drained, weights=0, version=0)
    assert_made_by(waited[0], weights=1, version=1)


@both_backends
async def test_d3_version_arithmetic() -> None:
    async with new_engine() as engine:
        assert engine.policy_version == 0
        assert (await engine.update_weights(WEIGHTS[1])).policy_version == 1
        with pytest.raises(WeightUpdateError):
            await engine.update_weights({})
        assert engine.policy_version == 1
        same = await engine.update_weights(WEIGHTS[1])
        assert (same.policy_version, same.previous) == (2, 1)
        for stale in (2, 1, 0, -1):
            with pytest.raises(StaleVersionError, match=str(stale)):
                await engine.update_weights(WEIGHTS[2], version=stale)
        assert (await engine.update_weights(WEIGHTS[2], version=100)).policy_version == 100
        for name in ("version", "expected_version", "train_step"):
            with pytest.raises(ValueError, match=rf"{name} = 1\.5"):
                await engine.update_weights(WEIGHTS[1], **{name: 1.5})  # type: ignore[arg-type]
        with pytest.raises(StaleVersionError, match="expected_version is 7"):
            await engine.update_weights(WEIGHTS[1], expected_version=7)
        assert (engine.policy_version, engine.state) == (100, PolicyState.SERVING)


@both_backends
async def test_d5_an_update_has_no_other_effect() -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    async with new_engine(max_num_seqs=4) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=2)
        outputs: list[RequestOutput] = []
        acks: list[WeightUpdateAck] = []

        async def run(first: int) -> None:
            outputs.append(await engine.generate([first, 1, 2], params))

        async with anyio.create_task_group() as tasks:
            for first in range(8):
                tasks.start_soon(run, first)
            await until_running(engine, 4)

            async def update() -> None:
                acks.append(await engine.update_weights(WEIGHTS[1]))

            tasks.start_soon(update)
            await until(lambda: engine.state is PolicyState.DRAINING)
            hold.release()
        ack = acks[0]
    assert ack.requests_affected == 4
    by_version = {version: [o for o in outputs if o.outputs[0].min_policy_version == version] for version in (0, 1)}
    assert [len(group) for group in by_version.values()] == [4, 4]
    for version, group in by_version.items():
        for output in group:
            assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 12
            assert_made_by(output, weights=version, version=version)
