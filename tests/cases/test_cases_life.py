"""Field cases B, F, M, N and P: updates under load, aborts, callers that go away, faults, threads."""

from __future__ import annotations

import gc
import threading

import anyio
import pytest
import torch
from case_support import (
    GREEDY,
    MODEL,
    WEIGHTS,
    HookedRunner,
    assert_made_by,
    both_backends,
    new_engine,
    raise_at,
    same_samples,
    solo,
    until_idle,
    until_running,
)

from aengine import Engine, EngineClosedError, EngineConfig, RequestOutput, SamplingParams
from aengine.errors import QueueFullError, RequestFailedError, RequestIdInUseError
from statemachines.policy import PolicyState


@both_backends
async def test_b1_an_update_with_a_full_queue_ends() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    async with new_engine(max_num_seqs=3) as engine:
        outputs: list[RequestOutput] = []

        async def run(first: int) -> None:
            outputs.append(await engine.generate([first, 2, 3], params))

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                for first in range(8):
                    tasks.start_soon(run, first)
                await until_running(engine, 3)
                ack = await engine.update_weights(WEIGHTS[1])
                assert ack.requests_affected == 3
    assert sorted(output.outputs[0].min_policy_version or 0 for output in outputs) == [0] * 3 + [1] * 5
    for output in outputs:
        version = output.outputs[0].min_policy_version
        assert version is not None
        assert_made_by(output, weights=version, version=version)


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
    async with new_engine(max_num_seqs=1, max_num_queued_reqs=2) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, [1], params)
            await until_running(engine)
            tasks.start_soon(engine.generate, [2], params)
            tasks.start_soon(engine.generate, [3], params)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(QueueFullError):
                await engine.generate([4], params)
        await until_idle(engine)


@pytest.mark.parametrize("when", ["waiting", "prefill", "decoding"])
@both_backends
async def test_m1_a_caller_that_goes_away_frees_its_pages(when: str) -> None:
    params = SamplingParams(max_tokens=400, n=4, seed=0)
    async with new_engine(num_pages=128, max_num_seqs=4, max_num_batched_tokens=4) as engine:
        async with anyio.create_task_group() as tasks:
            if when == "waiting":
                tasks.start_soon(engine.generate, [9, 9], SamplingParams(max_tokens=400, n=4, seed=0))
                await until_running(engine, 4)
            tasks.start_soon(engine.generate, list(range(60)), params)
            wanted = {"waiting": 4, "prefill": 1, "decoding": 4}[when]
            await until_running(engine, wanted)
            tasks.cancel_scope.cancel()
        await until_idle(engine)
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
        HookedRunner(engine, raise_at(3, MemoryError("injected")))
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
async def test_o5_construction_needs_no_loop_and_both_backends_serve() -> None:
    engine = Engine(MODEL, EngineConfig(num_pages=8))
    async with engine:
        assert engine.state is PolicyState.SERVING
        assert len((await engine.generate([1, 2], GREEDY)).outputs[0].token_ids) == 8
