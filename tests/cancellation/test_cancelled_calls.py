"""Calls of an engine that are cancelled at each of their waits leave it as if they had never been made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from cancel_support import (
    GREEDY,
    LONG,
    PROMPT,
    WEIGHTS,
    Blow,
    Ended,
    assert_made_by,
    assert_works,
    call_under,
    new_engine,
    strikes_on,
    struck_at,
    until_idle,
)

from aengine import Engine, EngineClosedError, RequestOutput, SamplingParams
from aengine.errors import EngineDeadError, EngineError
from aengine.policy.ledger_check import check_ledger
from aengine.testing import until
from statemachines.policy import PolicyState

WAYS = [*strikes_on("asyncio"), *strikes_on("trio")]
GROUP = SamplingParams(n=3, seed=5, max_tokens=4)
Call = Callable[[Engine], Coroutine[Any, Any, object]]


async def generate(engine: Engine) -> None:
    await engine.generate(PROMPT, GROUP)


async def generate_batch(engine: Engine) -> None:
    await engine.generate_batch([PROMPT, [7, 8]], GREEDY)


async def stream(engine: Engine) -> None:
    async with engine.stream(PROMPT, GREEDY) as deltas:
        async for _ in deltas:
            await anyio.lowlevel.checkpoint()


async def stream_and_leave(engine: Engine) -> None:
    async with engine.stream(PROMPT, LONG) as deltas:
        await anext(deltas)


async def control(engine: Engine) -> None:
    """What does not wait for others."""
    await engine.reset_prefix_cache()
    await engine.resume_generation()
    await engine.abort("nobody")
    await engine.weight_checksum()


def at_every_wait(way: tuple[str, str], scenario: Callable[[Blow], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with a blow at the first wait of the call it makes, at the second, until there are no more."""
    number, has_struck = 0, True
    while has_struck:
        number += 1
        blow = Blow(number)
        anyio.run(scenario, blow, backend=way[0])
        has_struck = blow.has_struck
    print(f"{way}: {number - 1} points")
    assert number > 1


@pytest.mark.parametrize("call", [generate, generate_batch, stream, stream_and_leave, control])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_call_cancelled_at_each_wait_gives_everything_back(way: tuple[str, str], call: Call) -> None:
    async def scenario() -> None:
        number, has_struck = 0, True
        async with new_engine() as engine:
            while has_struck:
                number += 1
                blow = Blow(number)
                ended = await call_under(way[1], blow, lambda: call(engine))
                has_struck = blow.has_struck
                assert ended.error is None
                await until_idle(engine)
                assert (engine.state, engine.policy_version) == (PolicyState.SERVING, 0)
                assert_made_by(await engine.generate(PROMPT, GREEDY), 0, 0)
            await assert_works(engine, 0)
        print(f"{call.__name__}, {way}: {number - 1} points")
        assert number > 1

    anyio.run(scenario, backend=way[0])


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_pause_cancelled_at_each_wait_is_lifted(way: tuple[str, str], mode: Any) -> None:
    async def scenario() -> None:
        number, has_struck = 0, True
        async with new_engine() as engine:
            while has_struck:
                number += 1
                blow = Blow(number)
                outputs: list[RequestOutput] = []

                async def rollout(outputs: list[RequestOutput] = outputs) -> None:
                    outputs.append(await engine.generate(PROMPT, LONG))

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(rollout)
                    await until(lambda: engine.stats().num_running)
                    ended = await call_under(way[1], blow, lambda: engine.pause_generation(mode))
                    has_struck = blow.has_struck
                    assert engine.is_paused() != ended.was_cancelled
                    assert (engine.state is PolicyState.DRAINING) != ended.was_cancelled
                    await engine.resume_generation()
                assert_made_by(outputs[0], 0, 0)
                assert outputs[0].outputs[0].finish_reason == ("abort" if mode == "abort" else "length")
                await until_idle(engine)
            await assert_works(engine, 0)

    anyio.run(scenario, backend=way[0])


async def busy(engine: Engine, tasks: Any, ended: list[Ended]) -> None:
    """A request that runs, one that waits, an update that drains and a pause: all of which must be told the end."""

    async def tell(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        end = Ended()
        try:
            end.result = await call()
        except EngineError as error:
            end.error = error
        except anyio.get_cancelled_exc_class():
            end.was_cancelled = True
            raise
        finally:
            ended.append(end)

    tasks.start_soon(tell, lambda: engine.generate(PROMPT, SamplingParams(max_tokens=200)))
    await until(lambda: engine.stats().num_sampled_tokens >= 1)
    tasks.start_soon(tell, lambda: engine.update_weights(WEIGHTS[1]))
    tasks.start_soon(tell, lambda: engine.update_weights(WEIGHTS[2]))
    await until(lambda: engine.state is PolicyState.DRAINING)
    tasks.start_soon(tell, lambda: engine.generate(PROMPT, LONG))
    tasks.start_soon(tell, engine.pause_generation)
    for _ in range(3):
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_closing_that_is_cancelled_at_each_wait_closes_all_the_same(way: tuple[str, str]) -> None:
    async def scenario(blow: Blow) -> None:
        ended: list[Ended] = []
        async with new_engine(num_pages=64) as engine:
            async with anyio.create_task_group() as tasks:
                await busy(engine, tasks, ended)
                await call_under(way[1], blow, engine.aclose)
                with pytest.raises(EngineClosedError):
                    await engine.generate(PROMPT, GREEDY)
                await engine.aclose()
            assert len(ended) == 5 and not any(end.was_cancelled for end in ended)
            assert [end.result.outputs[0].finish_reason for end in ended if end.result] == ["abort", "abort"]

    at_every_wait(way, scenario)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_block_that_is_cancelled_at_each_wait_lets_go_of_everything(way: tuple[str, str], tmp_path: Path) -> None:
    """Opening, work and closing are struck alike; the ledger is closed and can be continued each time."""
    ledger = tmp_path / "ledger.jsonl"

    async def block() -> None:
        async with new_engine(ledger=ledger) as engine:
            await engine.generate(PROMPT, GREEDY)
            await engine.update_weights(WEIGHTS[1])

    async def scenario(blow: Blow) -> None:
        ended = await call_under(way[1], blow, block)
        assert ended.error is None
        async with new_engine(ledger=ledger) as engine:
            assert_made_by(await engine.generate(PROMPT, GREEDY), 0, engine.policy_version or 0)

    at_every_wait(way, scenario)
    report = check_ledger(ledger.read_bytes())
    assert not report.findings and report.is_closed


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_calls_that_are_shielded_end_in_a_block_that_is_cancelled(backend: str) -> None:
    async def scenario() -> None:
        with anyio.CancelScope() as around:
            async with new_engine() as engine:
                around.cancel()
                with anyio.CancelScope(shield=True), anyio.fail_after(20):
                    assert_made_by(await engine.generate(PROMPT, GREEDY), 0, 0)
                    assert (await engine.update_weights(WEIGHTS[1])).policy_version == 1
                    assert_made_by(await engine.generate(PROMPT, GREEDY), 1, 1)
                await anyio.sleep_forever()
        assert around.cancelled_caught

    anyio.run(scenario, backend=backend)


@pytest.mark.parametrize("loop", ["scheduler", "updater"])
def test_a_loop_that_is_cancelled_natively_at_each_wait_leaves_nobody_waiting(loop: str) -> None:
    """As when the event loop shuts down: `asyncio.run` cancels every task there is."""

    async def scenario(blow: Blow) -> None:
        ended: list[str] = []
        async with new_engine(num_pages=64) as engine:
            part: Any = getattr(engine._opened(), loop)
            own = part.run

            async def run() -> None:
                task = asyncio.current_task()
                assert task is not None
                blow.strike = task.cancel
                await struck_at(own(), blow.on_wait)

            async def tell(name: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
                try:
                    await call()
                except EngineError as error:
                    name += f": {error}"
                ended.append(name)

            part.run = run
            with anyio.fail_after(20):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(tell, "first", lambda: engine.generate(PROMPT, LONG))
                    await until(lambda: engine.stats().num_sampled_tokens or ended or blow.has_struck)
                    tasks.start_soon(tell, "update", lambda: engine.update_weights(WEIGHTS[1]))
                    tasks.start_soon(tell, "update", lambda: engine.update_weights(WEIGHTS[2]))
                    tasks.start_soon(tell, "second", lambda: engine.generate(PROMPT, GREEDY))
                    tasks.start_soon(tell, "pause", lambda: engine.pause_generation("keep"))
                    tasks.start_soon(tell, "reset", engine.reset_prefix_cache)
                    await anyio.wait_all_tasks_blocked()
                    if not blow.has_struck:
                        await engine.resume_generation()
            assert len(ended) == 6
            if blow.has_struck:
                with anyio.fail_after(20):
                    for call in (lambda: engine.generate(PROMPT), lambda: engine.update_weights(WEIGHTS[2])):
                        with pytest.raises(EngineDeadError):
                            await call()

    at_every_wait(("asyncio", "native"), scenario)
