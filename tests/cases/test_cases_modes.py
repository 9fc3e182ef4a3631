"""Field cases A3, A6, B3 and D1, and what else the update modes, pauses and fences promise to requests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import attrs
import pytest
import torch
from case_support import (
    GREEDY,
    MODEL,
    PAGE,
    WEIGHTS,
    HookedRunner,
    assert_made_by,
    both_backends,
    new_engine,
    same_samples,
    solo,
    until_idle,
    until_running,
)
from torch import Tensor

from aengine import CheckpointError, Engine, EngineInvalidatedError, RequestOutput, SamplingParams, WeightUpdateError
from aengine.audit.oracle import oracle_logprobs
from aengine.errors import RequestFailedError
from aengine.model.checkpoint import save_checkpoint
from aengine.outputs import KVSpan, VersionSpan
from aengine.testing import until
from statemachines.policy import PolicyState

LONG = SamplingParams(temperature=0, max_tokens=20)
MODES = ["wait", "abort", "keep"]


class Steps:
    """Lets an engine compute a given number of steps, then holds the next one up until told to go on."""

    def __init__(self, engine: Engine, free: int) -> None:
        self._free, self._go_on = free, threading.Event()
        HookedRunner(engine, self._wait)

    def _wait(self, call: int) -> None:
        if call > self._free:
            assert self._go_on.wait(20)

    def go_on(self) -> None:
        self._go_on.set()


async def started_after(engine: Engine, tokens: int, outputs: list[RequestOutput], tasks: Any, **options: Any) -> Steps:
    """A request under way that has `tokens` tokens and is held up in the step of its next one."""
    steps = Steps(engine, tokens)

    async def run() -> None:
        outputs.append(await engine.generate([1, 2, 3], LONG, **options))

    tasks.start_soon(run)
    await until_running(engine)
    await until(lambda: engine.stats().num_sampled_tokens >= tokens)
    return steps


async def start_update(engine: Engine, tasks: Any, weights: int, **options: Any) -> None:
    """An update that drains; it cannot get on until the step that is held up ends."""

    async def update() -> None:
        await engine.update_weights(WEIGHTS[weights], **options)

    tasks.start_soon(update)
    await until(lambda: engine.state is PolicyState.DRAINING)


@pytest.mark.parametrize("kind", ["update", "reset"])
@both_backends
async def test_a3_invalidation_while_pages_are_in_use_is_complete(kind: str) -> None:
    prompt = list(range(3 * PAGE + 1))
    async with new_engine() as engine:
        await engine.generate(prompt, GREEDY)
        outputs: list[RequestOutput] = []
        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 3, outputs, tasks)
            if kind == "update":
                await start_update(engine, tasks, 1)
                steps.go_on()
            else:
                dropped = await engine.reset_prefix_cache()
                steps.go_on()
                assert dropped >= 3
        version = 1 if kind == "update" else 0
        assert_made_by(outputs[0], weights=0, version=0)
        fresh = await engine.generate(prompt, GREEDY)
        assert fresh.num_cached_tokens == 0
        assert_made_by(fresh, weights=version, version=version)


@both_backends
async def test_a3_what_a_request_computes_across_a_reset_is_not_matched_afterwards() -> None:
    async with new_engine() as engine:
        outputs: list[RequestOutput] = []
        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 3, outputs, tasks)
            await engine.reset_prefix_cache()
            steps.go_on()
        tokens = [*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids]
        assert (await engine.generate(tokens, GREEDY)).num_cached_tokens == 0
        await until_idle(engine)


@both_backends
async def test_a6_an_argument_that_is_not_supported_is_refused() -> None:
    async with new_engine() as engine:
        with pytest.raises(TypeError, match="lora"):
            await engine.generate([1, 2], GREEDY, lora="a")  # type: ignore[call-arg]


@both_backends
async def test_a6_salts_do_not_share() -> None:
    prompt = list(range(2 * PAGE + 1))
    async with new_engine() as engine:
        hits = [
            (await engine.generate(prompt, GREEDY, cache_salt=salt)).num_cached_tokens
            for salt in (None, "a", "b", "a", None, "b")
        ]
    assert hits == [0, 0, 0, 2 * PAGE, 2 * PAGE, 2 * PAGE]


@pytest.mark.parametrize("mode", MODES)
@both_backends
async def test_b3_requests_submitted_during_an_update_run_under_the_new_version(mode: str) -> None:
    async with new_engine() as engine:
        first: list[RequestOutput] = []
        later: list[RequestOutput] = []
        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 3, first, tasks)
            await start_update(engine, tasks, 1, mode=mode)

            async def run() -> None:
                later.append(await engine.generate([9, 8, 7], GREEDY))

            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            steps.go_on()
        assert_made_by(later[0], weights=1, version=1)


@both_backends
async def test_d1_abort_mode_hands_back_what_exists_under_the_old_version() -> None:
    async with new_engine() as engine:
        outputs: list[RequestOutput] = []
        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 7, outputs, tasks)
            await start_update(engine, tasks, 1, mode="abort")
            steps.go_on()
        sample = outputs[0].outputs[0]
        assert (sample.finish_reason, len(sample.token_ids)) == ("abort", 7)
        assert_made_by(outputs[0], weights=0, version=0)
        assert engine.policy_version == 1
        await until_idle(engine)


@both_backends
async def test_d1_keep_mode_recomputes_kv_and_labels_each_token() -> None:
    """Seven tokens of version 0 and, from the eighth that was in the making on, thirteen under version 1."""
    async with new_engine() as engine:
        outputs: list[RequestOutput] = []
        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 7, outputs, tasks)
            await start_update(engine, tasks, 1, mode="keep")
            steps.go_on()
        sample = outputs[0].outputs[0]
        assert sample.version_spans == (VersionSpan(0, 0, 8), VersionSpan(1, 8, 20))
        assert sample.kv_spans == (KVSpan(0, 0, 10, 0, 8), KVSpan(1, 0, 22, 8, 20))
        assert (sample.min_policy_version, sample.max_policy_version, sample.is_single_policy) == (0, 1, False)
        for weights, part in ((0, slice(0, 8)), (1, slice(8, 20))):
            expected = oracle_logprobs(MODEL.spec, WEIGHTS[weights], [1, 2, 3], sample.token_ids)
            torch.testing.assert_close(torch.tensor(sample.raw_logprobs[part]), expected[part], atol=1e-4, rtol=0)
        assert outputs[0].num_preemptions == 0


@both_backends
async def test_keep_mode_with_kept_kv_says_which_positions_are_of_the_old_version() -> None:
    async with new_engine() as engine:
        outputs: list[RequestOutput] = []
        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 7, outputs, tasks)
            await start_update(engine, tasks, 1, mode="keep", kv="keep")
            steps.go_on()
        sample = outputs[0].outputs[0]
        assert sample.version_spans == (VersionSpan(0, 0, 8), VersionSpan(1, 8, 20))
        # Ten positions were computed under version 0, and all twenty tokens attended to (some of) them.
        assert sample.kv_spans == (KVSpan(0, 0, 10, 0, 20), KVSpan(1, 10, 22, 8, 20))
        recomputed = oracle_logprobs(MODEL.spec, WEIGHTS[1], [1, 2, 3], sample.token_ids)
        assert (torch.tensor(sample.raw_logprobs[8:]) - recomputed[8:]).abs().max() > 1e-2
        tokens = [1, 2, 3, *sample.token_ids]
        assert (await engine.generate(tokens, GREEDY)).num_cached_tokens == 0
        await until_idle(engine)


@both_backends
async def test_a_request_preempted_while_an_update_drains_finishes_under_the_old_version() -> None:
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    params = SamplingParams(temperature=0, max_tokens=3 * PAGE)
    async with new_engine(num_pages=9) as engine:
        outputs: list[RequestOutput] = []

        async def run() -> None:
            outputs.extend(await engine.generate_batch(prompts, params))

        async with anyio.create_task_group() as tasks:
            steps = Steps(engine, 2)
            tasks.start_soon(run)
            await until_running(engine, 3)
            await start_update(engine, tasks, 1)
            steps.go_on()
        assert engine.stats().num_preemptions > 0
        for output in outputs:
            assert_made_by(output, weights=0, version=0)


@both_backends
async def test_samples_of_a_started_group_finish_under_its_version() -> None:
    params = SamplingParams(n=6, seed=3, max_tokens=10)
    async with new_engine(max_num_seqs=2) as engine:
        outputs: list[RequestOutput] = []

        async def run() -> None:
            outputs.append(await engine.generate([1, 2, 3, 4, 5], params))

        async with anyio.create_task_group() as tasks:
            steps = Steps(engine, 2)
            tasks.start_soon(run)
            await until_running(engine, 2)
            await start_update(engine, tasks, 1)
            steps.go_on()
        assert_made_by(outputs[0], weights=0, version=0)
        assert same_samples(outputs[0], await solo([1, 2, 3, 4, 5], params))
        assert engine.policy_version == 1


@pytest.mark.parametrize(("pause", "update"), list(itertools.product(MODES, MODES)))
@both_backends
async def test_pause_update_resume_in_every_combination(pause: str, update: str) -> None:
    async with new_engine() as engine:
        first: list[RequestOutput] = []
        later: list[RequestOutput] = []

        async def run() -> None:
            later.append(await engine.generate([9, 8, 7], GREEDY))

        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 5, first, tasks)
            async with anyio.create_task_group() as pausing:
                pausing.start_soon(engine.pause_generation, pause)
                await anyio.wait_all_tasks_blocked()
                steps.go_on()
            assert engine.is_paused()
            sampled = engine.stats().num_sampled_tokens
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            ack = await engine.update_weights(WEIGHTS[1], mode=update)
            assert ack.policy_version == 1
            assert engine.is_paused()
            assert engine.state is PolicyState.DRAINING
            await anyio.wait_all_tasks_blocked()
            assert engine.stats().num_sampled_tokens == sampled
            assert not later
            await engine.resume_generation()
        assert not engine.is_paused()
        assert_made_by(later[0], weights=1, version=1)
        sample = first[0].outputs[0]
        carried = pause == "keep" and update != "abort"
        assert sample.finish_reason == ("length" if pause == "wait" or carried else "abort")
        assert sample.max_policy_version == (1 if carried else 0)
        await until_idle(engine)


@both_backends
async def test_pause_keep_and_resume_without_an_update_changes_no_number() -> None:
    async with new_engine() as engine:
        outputs: list[RequestOutput] = []
        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 5, outputs, tasks)
            async with anyio.create_task_group() as pausing:
                pausing.start_soon(engine.pause_generation, "keep")
                await anyio.wait_all_tasks_blocked()
                steps.go_on()
            assert len(outputs) == 0
            await engine.resume_generation()
        assert same_samples(outputs[0], await solo([1, 2, 3], LONG))
        assert_made_by(outputs[0], weights=0, version=0)


@both_backends
async def test_a_pause_that_is_cancelled_is_lifted() -> None:
    async with new_engine() as engine:
        outputs: list[RequestOutput] = []
        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 5, outputs, tasks)
            with anyio.move_on_after(0.01):
                await engine.pause_generation("wait")
            assert not engine.is_paused()
            assert engine.state is PolicyState.SERVING
            steps.go_on()
        assert_made_by(outputs[0], weights=0, version=0)


@both_backends
async def test_an_update_that_times_out_is_withdrawn_and_the_caller_sees_the_timeout() -> None:
    async with new_engine() as engine:
        outputs: list[RequestOutput] = []
        async with anyio.create_task_group() as tasks:
            steps = await started_after(engine, 5, outputs, tasks)
            with pytest.raises(TimeoutError):
                await engine.update_weights(WEIGHTS[1], timeout=0.05)
            assert (engine.state, engine.policy_version) == (PolicyState.SERVING, 0)
            steps.go_on()
        assert_made_by(outputs[0], weights=0, version=0)


async def tensors_that_end_early(weights: dict[str, Tensor], count: int) -> AsyncIterator[tuple[str, Tensor]]:
    for name in list(weights)[:count]:
        await anyio.lowlevel.checkpoint()
        yield name, weights[name]
    raise OSError("the trainer went away")


@both_backends
async def test_a_torn_engine_is_fenced_and_a_full_update_makes_it_whole() -> None:
    async with new_engine(staging="none") as engine:
        assert_made_by(await engine.generate([1, 2, 3], GREEDY), weights=0, version=0)
        await engine.pause_generation()
        failures: list[BaseException] = []

        async def waiting() -> None:
            with pytest.raises(RequestFailedError) as failed:
                await engine.generate([4, 5, 6], GREEDY)
            failures.append(failed.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiting)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(WeightUpdateError, match="the trainer went away"):
                await engine.update_weights(tensors_that_end_early(WEIGHTS[1], 5))
        assert isinstance(failures[0].__cause__, EngineInvalidatedError)
        assert (engine.state, engine.policy_version) == (PolicyState.INVALIDATED, None)
        with pytest.raises(EngineInvalidatedError, match="update_weights"):
            await engine.generate([1, 2, 3], GREEDY)
        with pytest.raises(EngineInvalidatedError):
            engine.installed_policy  # noqa: B018
        pages = engine.stats().pages
        assert (pages.live, pages.cached, pages.free) == (0, 0, pages.total)

        await engine.resume_generation()
        ack = await engine.update_weights(WEIGHTS[2])
        assert (ack.policy_version, ack.previous) == (1, 0)
        assert_made_by(await engine.generate([1, 2, 3], GREEDY), weights=2, version=1)


@both_backends
async def test_writing_in_place_gives_the_digest_of_staging_by_copy() -> None:
    async with new_engine() as engine:
        copied = (await engine.update_weights(WEIGHTS[1])).digest
    async with new_engine(staging="none") as engine:
        bad = WEIGHTS[1] | {"model.norm.weight": torch.ones(7)}
        with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight"):
            await engine.update_weights(bad)
        assert (engine.state, engine.policy_version) == (PolicyState.SERVING, 0)
        written = await engine.update_weights(WEIGHTS[1])
        assert written.digest == copied == await engine.weight_checksum()
        assert_made_by(await engine.generate([1, 2, 3], GREEDY), weights=1, version=1)


@both_backends
async def test_casts_are_reported() -> None:
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in WEIGHTS[1].items()}
    async with new_engine() as engine:
        ack = await engine.update_weights(halves)
        assert ack.casts == {"bfloat16": len(halves)}
        whole = {name: tensor.float() for name, tensor in halves.items()}
        assert (await engine.update_weights(whole)).digest == ack.digest


@both_backends
async def test_events_tell_the_story_of_an_update_to_every_reader() -> None:
    async with new_engine() as engine:
        readers = [engine.events(), engine.events()]
        await engine.update_weights(WEIGHTS[1])
        await engine.aclose()
        stories = [[type(event.record).__name__ async for event in reader] for reader in readers]
    assert stories[0] == stories[1]
    expected = "UpdateRecord TransitionRecord UpdateRecord TransitionRecord UpdateRecord CommitRecord TransitionRecord "
    expected += "InvalidationRecord TransitionRecord AckRecord"
    assert stories[0] == expected.split()


@both_backends
async def test_every_source_gives_the_same_version(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("weights")
    checkpoint = attrs.evolve(MODEL, tensors=WEIGHTS[1])
    save_checkpoint(checkpoint, folder)
    module = torch.nn.Module()
    for name, tensor in WEIGHTS[1].items():
        *path, leaf = name.split(".")
        owner = module
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, torch.nn.Parameter(tensor.clone()))

    async def stream() -> AsyncIterator[tuple[str, Tensor]]:
        for pair in WEIGHTS[1].items():
            yield pair

    sources: list[Any] = [WEIGHTS[1], checkpoint, module, folder, str(folder / "model.safetensors"), stream()]
    async with new_engine() as engine:
        digests = [(await engine.update_weights(source)).digest for source in sources]
        assert len(set(digests)) == 1
        assert await engine.weight_checksum() == digests[0]
        assert_made_by(await engine.generate([1, 2, 3], GREEDY), weights=1, version=len(sources))
        with pytest.raises(TypeError, match="not from int"):
            await engine.update_weights(3)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="truncated"):
            (folder / "broken.safetensors").write_bytes(b"\0" * 9)
            await engine.update_weights(folder / "broken.safetensors")
        with pytest.raises(CheckpointError):
            await engine.update_weights(folder / "absent")


@both_backends
async def test_tensors_of_other_layouts_and_threads_are_taken(tmp_path_factory: pytest.TempPathFactory) -> None:
    odd: dict[str, Tensor] = {}

    def make() -> None:
        with torch.inference_mode():
            for name, tensor in WEIGHTS[1].items():
                odd[name] = tensor.T.contiguous().T if tensor.ndim == 2 else tensor.clone()

    await anyio.to_thread.run_sync(make)
    odd["model.norm.weight"] = WEIGHTS[1]["model.norm.weight"].clone().requires_grad_()
    async with new_engine() as engine:
        same = (await engine.update_weights(WEIGHTS[1])).digest
        assert (await engine.update_weights(odd)).digest == same
        assert_made_by(await engine.generate([1, 2, 3], GREEDY), weights=1, version=2)
