"""Field cases M2, M6 and P1: streams that are abandoned, read slowly, or read from anywhere."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import anyio
import pytest
from case_support import GREEDY, WEIGHTS, assert_made_by, both_backends, new_engine, solo, until_idle, until_running

from aengine import Engine, EngineClosedError, RequestStream, SamplingParams
from aengine.testing import FaultInjector
from statemachines.policy import PolicyState

LONG = SamplingParams(max_tokens=300, seed=0, n=2)


async def steps_until_idle(engine: Engine, faults: FaultInjector) -> int:
    """How many forward passes it takes until all pages are given back."""
    before = faults.counts["forward"]
    await until_idle(engine)
    return faults.counts["forward"] - before


async def break_after_two(engine: Engine) -> None:
    async with engine.stream([1, 2], LONG) as stream:
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 2:
                break


async def break_and_drop(engine: Engine) -> None:
    stream = await engine.stream([1, 2], LONG).__aenter__()
    async for _ in stream:
        break
    del stream
    gc.collect()


async def drop_in_a_cycle(engine: Engine) -> None:
    """Found by the garbage collector only."""
    cycle: list[object] = [await engine.stream([1, 2], LONG).__aenter__()]
    cycle.append(cycle)
    await until_running(engine, 2)
    del cycle
    gc.collect()


async def drop_in_another_thread(engine: Engine) -> None:
    held = [await engine.stream([1, 2], LONG).__aenter__()]
    await until_running(engine, 2)
    await anyio.to_thread.run_sync(held.clear)


async def cancel_between_two_items(engine: Engine) -> None:
    async def consume() -> None:
        async with engine.stream([1, 2], LONG) as stream:
            async for _ in stream:
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await until_running(engine, 2)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


async def never_iterate(engine: Engine) -> None:
    async with engine.stream([1, 2], LONG):
        await until_running(engine, 2)


async def close_from_another_task(engine: Engine) -> None:
    async with engine.stream([1, 2], LONG) as stream, anyio.create_task_group() as tasks:
        await stream.__anext__()
        tasks.start_soon(stream.aclose)
        rest = [delta async for delta in stream]
        assert [delta.finish_reason for delta in rest[-2:]] == ["abort", "abort"]


async def wrap_in_a_generator_and_drop_it(engine: Engine) -> None:
    async def tokens() -> AsyncIterator[int]:
        async with engine.stream([1, 2], LONG) as stream:
            async for delta in stream:
                for token in delta.token_ids:
                    yield token

    generator = tokens()
    await generator.__anext__()
    await generator.aclose()  # type: ignore[attr-defined]


WAYS_TO_LEAVE: list[Callable[[Engine], object]] = [
    break_after_two,
    break_and_drop,
    drop_in_a_cycle,
    drop_in_another_thread,
    cancel_between_two_items,
    never_iterate,
    close_from_another_task,
    wrap_in_a_generator_and_drop_it,
]


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
@both_backends
async def test_m2_an_abandoned_stream_ends_its_request_within_two_steps(leave) -> None:  # type: ignore[no-untyped-def]
    async with new_engine(num_pages=256) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        await leave(engine)
        assert await steps_until_idle(engine, faults) <= 2
        assert len((await engine.generate([5, 6], GREEDY)).outputs[0].token_ids) == 8


@both_backends
async def test_m2_a_stream_that_is_never_opened_submits_nothing() -> None:
    async with new_engine() as engine:
        stream = engine.stream([1, 2], LONG, request_id="a")
        with pytest.raises(EngineClosedError, match="async with"):
            await stream.__anext__()
        await engine.generate([1], SamplingParams(max_tokens=1), request_id="a")
        assert engine.stats().num_waiting == 0


@both_backends
async def test_m2_dropping_a_stream_ends_nobody_else_who_uses_its_id_by_then() -> None:
    async with new_engine() as engine:
        old = await engine.stream([1], SamplingParams(max_tokens=1), request_id="a").__aenter__()
        await old.output()
        async with engine.stream([2], SamplingParams(max_tokens=20, seed=0), request_id="a") as new:
            await old.aclose()
            del old
            gc.collect()
            assert (await new.output()).outputs[0].finish_reason == "length"


@both_backends
async def test_m2_a_stream_dropped_when_its_loop_has_gone_is_no_trouble() -> None:
    async with new_engine() as engine:
        left.append(await engine.stream([1], LONG).__aenter__())
    await anyio.wait_all_tasks_blocked()


left: list[RequestStream] = []


def test_m2_streams_that_outlive_their_loops_are_dropped_quietly() -> None:
    left.clear()
    gc.collect()


@both_backends
async def test_m6_a_slow_reader_holds_up_nobody() -> None:
    params = SamplingParams(max_tokens=120, seed=4)
    async with new_engine(num_pages=256) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        async with engine.stream([1, 2], params) as slow, engine.stream([3, 4], params) as fast:
            async with engine.stream([5, 6], params) as other:
                eager = [[token async for d in s for token in d.token_ids] for s in (fast, other)]
            assert [len(tokens) for tokens in eager] == [120, 120]
            assert faults.counts["forward"] <= 125, "all three ran side by side"
            ack = await engine.update_weights(WEIGHTS[1])
            assert ack.policy_version == 1, "nobody waits for the reader"
            everything = await slow.__anext__()
            assert len(everything.token_ids) == 120, "nothing was lost, and nothing was kept twice"
            with pytest.raises(StopAsyncIteration):
                await slow.__anext__()
        await until_idle(engine)


@both_backends
async def test_m6_a_stream_that_nobody_reads_is_aborted_and_drained_like_any_other() -> None:
    async with new_engine(num_pages=256) as engine:
        async with engine.stream([1, 2], SamplingParams(max_tokens=300, seed=0), request_id="slow") as slow:
            await until_running(engine)
            await engine.abort("slow")
            await until_idle(engine)
            assert (await slow.output()).outputs[0].finish_reason == "abort"
        async with engine.stream([1, 2], SamplingParams(max_tokens=300, seed=0)) as slow:
            await until_running(engine)
            await engine.update_weights(WEIGHTS[1], mode="abort")
            assert engine.state is PolicyState.SERVING
            assert_made_by(await slow.output(), weights=0, version=0)


@both_backends
async def test_p1_a_stream_may_be_read_from_a_task_per_item() -> None:
    params = SamplingParams(max_tokens=12, seed=3)
    async with new_engine() as engine:
        tokens: list[int] = []
        async with engine.stream([1, 2], params) as stream:
            while len(tokens) < 12:

                async def read_one() -> None:
                    tokens.extend((await stream.__anext__()).token_ids)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(read_one)
        assert tuple(tokens) == (await solo([1, 2], params)).outputs[0].token_ids


@both_backends
async def test_p1_a_stream_may_be_handed_to_another_task_half_way() -> None:
    params = SamplingParams(max_tokens=40, seed=3)
    async with new_engine() as engine:
        tokens: list[int] = []

        async def read_rest(stream: RequestStream) -> None:
            async with aclosing(stream):  # closing falls to the task that reads last
                tokens.extend([token async for delta in stream for token in delta.token_ids])

        async with anyio.create_task_group() as tasks:
            stream = await engine.stream([1, 2], params).__aenter__()
            tokens.extend((await stream.__anext__()).token_ids)
            tasks.start_soon(read_rest, stream)
        assert tuple(tokens) == (await solo([1, 2], params)).outputs[0].token_ids
        await until_idle(engine)


@both_backends
async def test_p1_a_timeout_around_one_read_loses_nothing() -> None:
    params = SamplingParams(max_tokens=30, seed=3)
    async with new_engine() as engine:
        tokens: list[int] = []
        num_timeouts = 0
        async with engine.stream([1, 2], params) as stream:
            while len(tokens) < 30:
                with anyio.move_on_after(0) as scope:
                    tokens.extend((await stream.__anext__()).token_ids)
                num_timeouts += scope.cancelled_caught
                await anyio.sleep(0.001)
        assert tuple(tokens) == (await solo([1, 2], params)).outputs[0].token_ids
        assert num_timeouts > 0


@both_backends
async def test_several_readers_share_one_stream() -> None:
    params = SamplingParams(max_tokens=40, seed=3)
    async with new_engine() as engine:
        tokens: list[int] = []

        async with engine.stream([1, 2], params) as stream, anyio.create_task_group() as tasks:

            async def read() -> None:
                tokens.extend([token async for delta in stream for token in delta.token_ids])

            for _ in range(3):
                tasks.start_soon(read)
        assert sorted(tokens) == sorted((await solo([1, 2], params)).outputs[0].token_ids)


@both_backends
async def test_a_cumulative_stream_repeats_what_came_before() -> None:
    params = SamplingParams(max_tokens=6, seed=1, n=2)
    async with new_engine() as engine:
        async with engine.stream([1, 2], params, output_kind="cumulative") as stream:
            items = [item async for item in stream]
            whole = await stream.output()
        for sample in whole.outputs:
            own = [item for item in items if item.index == sample.index]
            assert all(item.token_ids == sample.token_ids[: len(item.token_ids)] for item in own)
            assert [len(item.token_ids) for item in own] == sorted({len(item.token_ids) for item in own})
            last = own[-1]
            assert (last.token_ids, last.logprobs, last.token_versions) == (
                sample.token_ids,
                sample.logprobs,
                sample.token_versions,
            )
            assert last.finish_reason == "length"
        with pytest.raises(ValueError, match="output_kind"):
            engine.stream([1], params, output_kind="both")  # type: ignore[arg-type]


@both_backends
async def test_a_stream_is_opened_once() -> None:
    async with new_engine() as engine:
        stream = engine.stream([1], SamplingParams(max_tokens=1))
        async with stream:
            await stream.output()
        with pytest.raises(EngineClosedError, match="once"):
            await stream.__aenter__()
