"""Field cases B, F, M, N and P: updates under load, aborts, callers that go away, faults, threads."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import torch
from case_support import (
    GREEDY,
    MODEL,
    WEIGHTS,
    assert_made_by,
    both_backends,
    new_engine,
    same_samples,
    solo,
    until_idle,
    until_running,
)

from aengine import Engine, EngineClosedError, EngineConfig, RequestOutput, SamplingParams
from aengine.errors import QueueFullError, RequestFailedError, RequestIdInUseError
from aengine.loops import call_soon
from aengine.testing import FaultInjector, until
from statemachines.policy import PolicyState


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
@both_backends
async def test_b1_an_update_with_a_full_queue_ends(mode: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    async with new_engine(max_num_seqs=3) as engine:
        await engine.generate([1], SamplingParams(max_tokens=1))  # compiles the kernels
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=2)
        outputs: list[RequestOutput] = []

        async def run(first: int) -> None:
            outputs.append(await engine.generate([first, 2, 3], params))

        async def update() -> None:
            ack = await engine.update_weights(WEIGHTS[1], mode=mode)  # type: ignore[arg-type]
            assert ack.requests_affected == 3

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                for first in range(8):
                    tasks.start_soon(run, first)
                await until_running(engine, 3)
                tasks.start_soon(update)
                await until(lambda: engine.state is PolicyState.DRAINING)
                hold.release()
    started, waited = [o for o in outputs if 0 in versions(o)], [o for o in outputs if 0 not in versions(o)]
    assert (len(started), len(waited)) == (3, 5)
    for output in waited:
        assert output.outputs[0].finish_reason == "length"
        assert_made_by(output, weights=1, version=1)
    for output in started:
        assert output.outputs[0].finish_reason == ("abort" if mode == "abort" else "length")
        assert versions(output) == ({0, 1} if mode == "keep" else {0})


def versions(output: RequestOutput) -> set[int]:
    return set(output.outputs[0].token_versions)


@both_backends
async def test_b3_requests_submitted_during_the_swap_itself_are_held_for_the_new_version(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    async with new_engine(ledger=tmp_path / "ledger") as engine:
        faults = FaultInjector()
        faults.attach(engine)
        step, swap = faults.hold("forward", at=2), faults.hold("ledger sync", at=1)
        outputs: dict[int, RequestOutput] = {}

        async def run(number: int) -> None:
            outputs[number] = await engine.generate([number, 2, 3], params)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, 0)
            await until(step.reached.is_set)
            tasks.start_soon(engine.update_weights, WEIGHTS[1])
            await until(lambda: engine.state is PolicyState.DRAINING)
            for number in (1, 2, 3):
                tasks.start_soon(run, number)
            await anyio.wait_all_tasks_blocked()
            step.release()
            await until(swap.reached.is_set)
            await anyio.wait_all_tasks_blocked()
            assert engine.state is PolicyState.SWAPPING and set(outputs) == {0}
            for number in (4, 5, 6):
                tasks.start_soon(run, number)
            await anyio.wait_all_tasks_blocked()
            assert (engine.stats().num_waiting, engine.stats().num_running) == (6, 0)
            swap.release()
        assert_made_by(outputs.pop(0), weights=0, version=0)
        for output in outputs.values():
            assert_made_by(output, weights=1, version=1)
        assert len(outputs) == 6


@both_backends
async def test_b4_a_source_that_raises_half_way_changes_nothing() -> None:
    class Broken(dict[str, torch.Tensor]):
        reads = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            self.reads += 1
            if self.reads > 3:
                raise OSError("the disk went away")
            return super().__getitem__(name)

        def items(self):  # type: ignore[no-untyped-def, override]
            return ((name, self[name]) for name in self)

    async with new_engine() as engine:
        with pytest.raises(Exception, match="the disk went away"):
            await engine.update_weights(Broken(WEIGHTS[1]))
        assert (engine.policy_version, engine.state) == (0, PolicyState.SERVING)
        assert_made_by(await engine.generate([1, 2], GREEDY), weights=0, version=0)
        await engine.update_weights(WEIGHTS[2])
        assert_made_by(await engine.generate([1, 2], GREEDY), weights=2, version=1)


@both_backends
async def test_f1_an_abort_hands_back_what_exists() -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    async with new_engine(max_num_seqs=1) as engine:
        outputs: dict[str, RequestOutput] = {}

        async def run(request_id: str) -> None:
            outputs[request_id] = await engine.generate([1, 2, 3], params, request_id=request_id)

        async with anyio.create_task_group() as tasks:
            async with engine.stream([4, 5, 6], params, request_id="running") as stream:
                await until_running(engine)
                tasks.start_soon(run, "never started")
                await anyio.wait_all_tasks_blocked()
                seen = 0
                async for delta in stream:
                    seen += len(delta.token_ids)
                    if seen >= 5:
                        await engine.abort("running")
                        await engine.abort("never started")
                outputs["running"] = await stream.output()
        running, never = outputs["running"].outputs[0], outputs["never started"].outputs[0]
        assert len(running.token_ids) == len(running.logprobs) == len(running.token_versions) >= 5
        assert (running.finish_reason, never.finish_reason, never.token_ids) == ("abort", "abort", ())
        assert_made_by(outputs["running"], weights=0, version=0)
        await until_idle(engine)


@both_backends
async def test_f1_an_abort_hands_back_what_a_preempted_request_has() -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    async with new_engine(num_pages=8, prefix_caching=False) as engine:
        outputs: dict[str, RequestOutput] = {}

        async def run(request_id: str, first: int) -> None:
            outputs[request_id] = await engine.generate([first, 1, 2, 3], params, request_id=request_id)

        def abort_what_was_preempted(_: int) -> None:
            if engine.stats().num_preemptions:
                call_soon(token, lambda: engine._opened().scheduler.abort("late"))

        token = anyio.lowlevel.current_token()
        faults = FaultInjector()
        faults.attach(engine)
        faults.call("forward", abort_what_was_preempted)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "early", 4)
            await until_running(engine)
            tasks.start_soon(run, "late", 5)
        late = outputs["late"].outputs[0]
        assert (late.finish_reason, outputs["late"].num_preemptions) == ("abort", 1)
        assert 0 < len(late.token_ids) == len(late.logprobs) == len(late.token_versions) < 24
        assert_made_by(outputs["late"], weights=0, version=0)
        assert outputs["early"].outputs[0].finish_reason == "length"
        await until_idle(engine)


@both_backends
async def test_f3_an_abort_in_the_step_of_the_last_token_gives_one_outcome() -> None:
    async with new_engine() as engine:
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=8)
        async with engine.stream([1, 2], GREEDY, request_id="a") as stream:
            await until(hold.reached.is_set)
            await engine.abort("a")
            await engine.abort("a")
            before = engine.stats().num_sampled_tokens
            again = engine.stream([1, 2], GREEDY, request_id="a")
            async with again:  # the id is free although the step is still under way
                hold.release()
                aborted, whole = await stream.output(), await again.output()
        assert (aborted.outputs[0].finish_reason, len(aborted.outputs[0].token_ids)) == ("abort", 7)
        assert (whole.outputs[0].finish_reason, len(whole.outputs[0].token_ids)) == ("length", 8)
        assert engine.stats().num_sampled_tokens == before + 8
        assert [delta.finish_reason async for delta in stream][-1] == "abort"
        await until_idle(engine)


@both_backends
async def test_f3_aborting_everything_in_an_empty_engine_does_nothing() -> None:
    async with new_engine() as engine:
        await engine.pause_generation("abort")
        await engine.resume_generation()
        assert len((await engine.generate([1, 2], GREEDY)).outputs[0].token_ids) == 8


@both_backends
async def test_f3_late_repeated_and_unknown_aborts_do_nothing() -> None:
    async with new_engine() as engine:
        await engine.abort("unknown")
        first = await engine.generate([1, 2], GREEDY, request_id="a")
        await engine.abort("a")
        await engine.abort("a")
        again = await engine.generate([1, 2], GREEDY, request_id="a")
        assert same_samples(first, again)
        assert again.outputs[0].finish_reason == "length"
        await until_idle(engine)


@both_backends
async def test_a_request_id_is_refused_while_it_is_alive() -> None:
    async with new_engine() as engine:
        async with engine.stream([1, 2], SamplingParams(max_tokens=50), request_id="a"):
            with pytest.raises(RequestIdInUseError, match="'a'"):
                await engine.generate([3], GREEDY, request_id="a")
        await engine.generate([3], GREEDY, request_id="a")


@both_backends
async def test_a_full_queue_refuses_and_loses_nothing() -> None:
    params = SamplingParams(max_tokens=30, seed=0)
    async with new_engine(max_num_seqs=1, max_num_queued_reqs=2, when_queue_full="raise") as engine:
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, [1], params)
            await until(hold.reached.is_set)
            tasks.start_soon(engine.generate, [2], params)
            tasks.start_soon(engine.generate, [3], params)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(QueueFullError):
                await engine.generate([4], params)
            hold.release()
        await until_idle(engine)


@pytest.mark.parametrize("when", ["waiting", "prefill", "decoding"])
@both_backends
async def test_m1_a_caller_that_goes_away_frees_its_pages(when: str) -> None:
    params = SamplingParams(max_tokens=400, n=4, seed=0)
    async with new_engine(num_pages=128, max_num_seqs=4, max_num_batched_tokens=4) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        async with anyio.create_task_group() as tasks:
            if when == "waiting":
                tasks.start_soon(engine.generate, [9, 9], SamplingParams(max_tokens=400, n=4, seed=0))
                await until_running(engine, 4)
            tasks.start_soon(engine.generate, list(range(60)), params)
            wanted = {"waiting": 4, "prefill": 1, "decoding": 4}[when]
            await until_running(engine, wanted)
            tasks.cancel_scope.cancel()
        steps = faults.counts["forward"]
        await until_idle(engine)
        assert faults.counts["forward"] - steps <= 2
        if when == "waiting":
            assert engine.stats().prefix.query_tokens == 2, "the one that waited was never looked at"
        assert same_samples(await engine.generate([1, 2], GREEDY), await solo([1, 2], GREEDY))


@both_backends
async def test_m1_a_timeout_around_a_call_gets_through() -> None:
    async with new_engine() as engine:
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.05):
                await engine.generate([1, 2], SamplingParams(max_tokens=500, n=8))
        await until_idle(engine)


@both_backends
async def test_m2_an_abandoned_stream_is_aborted() -> None:
    params = SamplingParams(max_tokens=300, seed=0)
    async with new_engine(num_pages=256) as engine:
        async with engine.stream([1, 2], params) as stream:
            async for _ in stream:
                break
        await until_idle(engine)
        engine.stream([1, 2], params)
        gc.collect()
        assert engine.stats().num_waiting == 0
        async with engine.stream([1, 2], params) as stream:
            with anyio.move_on_after(0):
                await stream.__anext__()
            delta = await stream.__anext__()
            assert delta.token_ids == same_start(await solo([1, 2], params), len(delta.token_ids))
        await until_idle(engine)


def same_start(output: RequestOutput, count: int) -> tuple[int, ...]:
    return output.outputs[0].token_ids[:count]


async def test_m4_a_second_event_loop_is_refused_with_the_reason() -> None:
    refused: list[Exception] = []
    async with new_engine() as engine:

        def other_loop() -> None:
            try:
                anyio.run(engine.generate, [1, 2], GREEDY)
            except EngineClosedError as error:
                refused.append(error)

        await anyio.to_thread.run_sync(other_loop)
        assert "another event loop" in str(refused[0])
        assert_made_by(await engine.generate([1, 2], GREEDY), weights=0, version=0)


@both_backends
async def test_m7_idle_start_busy_stop() -> None:
    threads = threading.active_count()
    outputs: list[RequestOutput] = []
    async with new_engine(max_num_seqs=3) as engine:
        await anyio.wait_all_tasks_blocked()
        await engine.update_weights(WEIGHTS[1])
        async with anyio.create_task_group() as tasks:

            async def run(first: int) -> None:
                outputs.append(await engine.generate([first, 2, 3], SamplingParams(max_tokens=200)))

            for first in range(6):
                tasks.start_soon(run, first)
            await until_running(engine, 3)
            await engine.aclose()
            await engine.aclose()
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 6
        with pytest.raises(EngineClosedError):
            await engine.generate([1], GREEDY)
        with pytest.raises(EngineClosedError):
            await engine.update_weights(WEIGHTS[1])
    with pytest.raises(EngineClosedError):
        await engine.generate([1], GREEDY)
    with pytest.raises(EngineClosedError):
        await engine.__aenter__()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aengine")]
    assert threading.active_count() <= threads + 2  # anyio keeps idle workers of its own


@both_backends
async def test_m7_an_exception_in_the_body_comes_out_as_it_is() -> None:
    class OwnError(Exception):
        pass

    with pytest.raises(OwnError):
        async with new_engine() as engine:
            await engine.generate([1], GREEDY)
            raise OwnError


@both_backends
async def test_n1_an_error_in_a_step_fails_that_batch_alone() -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    async with new_engine(max_num_seqs=3) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        faults.fail("forward", at=3, error=MemoryError("injected"))
        with pytest.raises(RequestFailedError) as failed:
            await engine.generate_batch([[first, 2, 3] for first in range(5)], params)
        assert isinstance(failed.value.__cause__, MemoryError)
        reasons = [output.outputs[0].finish_reason for output in failed.value.outputs]
        assert reasons == ["error"] * 3 + ["length"] * 2
        for output in failed.value.outputs[3:]:
            assert_made_by(output, weights=0, version=0)
        await until_idle(engine)
        await engine.update_weights(WEIGHTS[1])
        assert_made_by(await engine.generate([1, 2], GREEDY), weights=1, version=1)


@both_backends
async def test_n1_an_error_in_a_step_with_a_prefill_leaves_nothing_to_match() -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    long = list(range(30, 54))
    async with new_engine(max_num_seqs=3, max_num_batched_tokens=8) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        faults.fail("forward", at=4, error=MemoryError("injected"))
        with pytest.raises(RequestFailedError) as failed:
            await engine.generate_batch([[1, 2, 3], [4, 5, 6], long, [7, 8], [9, 10]], params)
        reasons = [output.outputs[0].finish_reason for output in failed.value.outputs]
        assert reasons == ["error"] * 3 + ["length"] * 2
        counts = [len(output.outputs[0].token_ids) for output in failed.value.outputs]
        assert counts[2] == 0 < counts[0] < 12, "one was in prefill, two were decoding"
        await until_idle(engine)
        again = await engine.generate(long, params)
        assert again.num_cached_tokens < len(long) - 8, "no more than the steps that ended well computed"
        assert_made_by(again, weights=0, version=0)
        assert (await engine.update_weights(WEIGHTS[1])).policy_version == 1


@both_backends
async def test_p3_grad_mode_and_thread_count_of_the_caller_are_left_alone() -> None:
    async with new_engine() as engine:
        threads = torch.get_num_threads()
        weight = torch.ones(3, requires_grad=True)

        async def train() -> None:
            for _ in range(5):
                assert torch.is_grad_enabled()
                (weight * 2).sum().backward()
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            tasks.start_soon(engine.generate, [1, 2], GREEDY)
            with torch.no_grad():
                assert not torch.is_grad_enabled()
        assert weight.grad is not None and weight.grad.tolist() == [10.0] * 3
        assert not any(layer.requires_grad for layer in engine._opened().runner.storage.layers)
        assert torch.get_num_threads() == threads


@both_backends
async def test_p3_nothing_that_comes_out_keeps_a_graph_or_grows_over_200_requests() -> None:
    async with new_engine(num_pages=16, check_integrity=False) as engine:
        prompts = [[at % 60, at // 60, 3] for at in range(100)]
        sizes = []
        for _ in range(3):
            await engine.generate_batch(prompts, SamplingParams(max_tokens=1, seed=0))
            gc.collect()
            tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
            sizes.append(len(tensors))
            assert not any(tensor.requires_grad for tensor in tensors)
        assert sizes[2] <= sizes[1]


@both_backends
async def test_o5_construction_needs_no_loop_and_both_backends_serve() -> None:
    engine = Engine(MODEL, EngineConfig(num_pages=8))
    async with engine:
        assert engine.state is PolicyState.SERVING
        assert len((await engine.generate([1, 2], GREEDY)).outputs[0].token_ids) == 8
