from __future__ import annotations

import gc

import anyio
import pytest

from aengine import Engine, EngineConfig, PromptError, QueueFullError, RequestOutput, SamplingParams
from aengine.errors import RequestFailedError
from aengine.testing import FaultInjector, tiny_checkpoint, until

MODEL = tiny_checkpoint()
LONG = SamplingParams(max_tokens=200, seed=0)


def new_engine(**fields: object) -> Engine:
    return Engine(MODEL, EngineConfig(**{"num_pages": 64, "page_size": 4, **fields}))  # type: ignore[arg-type]


async def until_idle(engine: Engine) -> None:
    await until(lambda: not (engine.stats().pages.live or engine.stats().num_waiting))


# ---- results as they come


async def test_results_come_in_the_order_in_which_they_end_with_their_index() -> None:
    lengths = [9, 3, 6, 1]
    params = [SamplingParams(max_tokens=length, seed=0, n=2) for length in lengths]
    async with new_engine() as engine:
        async with engine.as_completed([[i] for i in range(4)], params) as done:
            came = [(index, len(output.outputs[1].token_ids)) async for index, output in done]
        assert came == [(3, 1), (1, 3), (2, 6), (0, 9)]
        bare = [index async for index, _ in engine.as_completed([[1], [2]], params[:2])]
        assert bare == [1, 0]
        assert [pair async for pair in engine.as_completed([])] == []


async def test_leaving_closing_or_dropping_aborts_what_is_left() -> None:
    params = [SamplingParams(max_tokens=1), LONG, LONG]
    async with new_engine() as engine:
        async with engine.as_completed([[1], [2], [3]], params) as done:
            async for index, _ in done:
                assert index == 0
                break
        await until_idle(engine)
        rest = [output.outputs[0].finish_reason async for _, output in done]
        assert rest == ["abort", "abort"], "what they had can still be read"
        async for _ in engine.as_completed([[1], [2], [3]], params):
            break
        gc.collect()
        await until_idle(engine)
        never = engine.as_completed([[1]], params[:1])
        assert engine.stats().num_waiting == 0
        await never.aclose()


async def test_a_cancelled_read_loses_nothing_and_readers_share() -> None:
    params = SamplingParams(max_tokens=5, seed=0)
    async with new_engine() as engine, engine.as_completed([[i] for i in range(6)], params) as done:
        seen: list[int] = []
        while not seen:
            with anyio.move_on_after(0):
                seen.append((await done.__anext__())[0])

        async def read() -> None:
            seen.extend([index async for index, _ in done])

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(read)
        assert sorted(seen) == list(range(6))


async def test_a_failed_request_raises_in_its_turn_and_the_others_go_on() -> None:
    async with new_engine(max_num_seqs=1) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        faults.fail("forward", at=1)
        async with engine.as_completed([[1], [2]], SamplingParams(max_tokens=2, seed=0)) as done:
            with pytest.raises(RequestFailedError) as failed:
                await done.__anext__()
            assert done.request_ids.index(failed.value.request_id) == 0
            assert [index async for index, _ in done] == [1]


async def test_all_prompts_are_checked_before_any_is_submitted() -> None:
    async with new_engine() as engine:
        with pytest.raises(PromptError):
            engine.as_completed([[1], []])
        with pytest.raises(ValueError, match="zip"):
            engine.as_completed([[1], [2]], [LONG])
        assert engine.stats().num_waiting == 0


async def test_an_error_in_the_callers_hook_ends_that_batch_alone() -> None:
    def hook(_: RequestOutput) -> None:
        raise ZeroDivisionError

    async with new_engine() as engine, engine.stream([9], SamplingParams(max_tokens=30, seed=0)) as other:
        with pytest.raises(ZeroDivisionError):
            await engine.generate_batch([[1], [2]], [SamplingParams(max_tokens=1), LONG], on_finished=hook)
        assert (await other.output()).outputs[0].finish_reason == "length"
        await until_idle(engine)


# ---- backpressure


async def test_whoever_submits_to_a_full_queue_waits_in_order_and_all_are_served() -> None:
    order: list[int] = []
    async with new_engine(max_num_seqs=1, max_num_queued_reqs=2) as engine:
        most = 0

        async def run(number: int) -> None:
            nonlocal most
            await engine.generate([number], SamplingParams(max_tokens=2, seed=0))
            order.append(number)
            most = max(most, engine.stats().num_waiting)

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(run, number)
        assert order == list(range(12))
        assert 0 < most <= 2
        batch = await engine.generate_batch([[i] for i in range(9)], SamplingParams(max_tokens=1))
        assert len(batch) == 9


async def test_one_that_is_cancelled_in_line_gives_its_turn_to_the_next() -> None:
    async with new_engine(max_num_seqs=1, max_num_queued_reqs=1) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=1)
        entered: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, [1], SamplingParams(max_tokens=2))
            await until(hold.reached.is_set)
            tasks.start_soon(
                engine.generate,
                [2],
                SamplingParams(max_tokens=2),
            )
            await anyio.wait_all_tasks_blocked()
            scopes = [anyio.CancelScope() for _ in range(3)]

            async def enter(number: int) -> None:
                with scopes[number]:
                    async with engine.stream([3], SamplingParams(max_tokens=1)) as stream:
                        entered.append(number)
                        await stream.output()

            for number in range(3):
                tasks.start_soon(enter, number)
                await anyio.wait_all_tasks_blocked()
            assert entered == [], "a stream is entered when it has its place"
            scopes[0].cancel()
            await anyio.wait_all_tasks_blocked()
            hold.release()
        assert entered == [1, 2]
        await until_idle(engine)


async def test_a_full_queue_refuses_where_that_was_chosen_and_nothing_of_a_batch_stays() -> None:
    async with new_engine(max_num_seqs=1, max_num_queued_reqs=2, when_queue_full="raise") as engine:
        with pytest.raises(QueueFullError, match="max_num_queued_reqs"):
            await engine.generate_batch([[1], [2], [3]], LONG)
        await until_idle(engine)
        with pytest.raises(QueueFullError):
            async with engine.as_completed([[1], [2], [3]], LONG):
                pass
        await until_idle(engine)
        assert len(await engine.generate_batch([[1], [2]], SamplingParams(max_tokens=1))) == 2


async def test_requests_in_line_end_when_the_engine_closes_or_aborts() -> None:
    outputs: list[RequestOutput] = []
    async with new_engine(max_num_seqs=1, max_num_queued_reqs=1) as engine:

        async def run() -> None:
            outputs.append(await engine.generate([1], LONG))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            await engine.aclose()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 5


# ---- ids


async def test_an_id_the_engine_makes_up_avoids_those_of_callers() -> None:
    async with new_engine() as engine:
        async with engine.stream([1], LONG, request_id="request-2"):
            output = await engine.generate([2], SamplingParams(max_tokens=1, n=3))
            assert output.request_id != "request-2"
            async with engine.stream([1], LONG, request_id="request-2/0"), engine.stream([1], LONG, request_id="a"):
                await engine.generate([3], SamplingParams(max_tokens=1, n=2), request_id="a/0")
