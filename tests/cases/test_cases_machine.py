"""Field cases G3 and O: releasing twice, and the state machine under exceptions, cancellation and load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from case_support import GREEDY, WEIGHTS, assert_made_by, both_backends, new_engine, until_idle, until_running

from aengine import Engine, EngineInvalidatedError, RequestOutput, SamplingParams, WeightUpdateError
from aengine.cache.allocator import Allocator
from aengine.errors import IllegalTransitionError, PageAccountingError
from aengine.testing import until
from statemachines.policy import PolicyState, Trigger

LONG = SamplingParams(temperature=0, max_tokens=240)


def test_g3_misuse_of_a_page_raises_and_changes_no_count() -> None:
    allocator = Allocator(4, lambda pages: None)
    pages = allocator.alloc(2)
    allocator.release(pages)
    for misuse in (
        lambda: allocator.release(pages),
        lambda: allocator.release([3]),
        lambda: allocator.share([pages[0]]),
        lambda: allocator.release([4]),
        lambda: allocator.share([-1]),
    ):
        with pytest.raises(PageAccountingError):
            misuse()
        assert (allocator.num_free, allocator.num_live, allocator.num_available) == (4, 0, 4)
    handed_out = allocator.alloc(4)
    assert sorted(handed_out) == [0, 1, 2, 3]


@both_backends
async def test_g3_an_abort_from_a_completion_callback_is_harmless() -> None:
    async with new_engine() as engine:
        seen: list[str] = []

        def abort(output: RequestOutput) -> None:
            engine._opened().scheduler.abort(output.request_id)
            seen.append(output.request_id)

        outputs = await engine.generate_batch([[1, 2], [3, 4]], GREEDY, on_finished=abort)
        assert sorted(seen) == sorted(output.request_id for output in outputs)
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        await until_idle(engine)


async def cancelled_by_scope(engine: Engine, went_on: list[str]) -> None:
    async with anyio.create_task_group() as tasks:

        async def update() -> None:
            await engine.update_weights(WEIGHTS[1])
            went_on.append("after the call")

        tasks.start_soon(update)
        await until_state(engine, PolicyState.DRAINING)
        tasks.cancel_scope.cancel()


async def timed_out(engine: Engine, went_on: list[str]) -> None:
    with pytest.raises(TimeoutError):
        with anyio.fail_after(0.1):
            await engine.update_weights(WEIGHTS[1])
            went_on.append("after the call")


async def until_state(engine: Engine, state: PolicyState) -> None:
    await until(lambda: engine.state is state)


@pytest.mark.parametrize("cancel", [cancelled_by_scope, timed_out])
@both_backends
async def test_o1_cancellation_and_timeouts_get_through(cancel: Callable[[Engine, list[str]], Any]) -> None:
    async with new_engine() as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, [1, 2, 3], LONG)
        await until_running(engine)
        went_on: list[str] = []
        await cancel(engine, went_on)
        assert (engine.state, engine.policy_version, went_on) == (PolicyState.SERVING, 0, [])
        tasks.cancel_scope.cancel()


async def test_o1_a_native_cancellation_gets_through() -> None:
    async with new_engine() as engine:
        request = asyncio.ensure_future(engine.generate([1, 2, 3], LONG))
        await until_running(engine)
        update = asyncio.ensure_future(engine.update_weights(WEIGHTS[1]))
        await until_state(engine, PolicyState.DRAINING)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert (engine.state, engine.policy_version) == (PolicyState.SERVING, 0)
        assert_made_by(await request, weights=0, version=0)


def explode(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("injected")


@pytest.mark.parametrize(
    ("part", "method", "mode", "fences"),
    [
        ("scheduler", "num_started", "wait", False),  # entering Draining
        ("scheduler", "abort_started", "abort", False),  # in Draining
        ("runner", "flip", "wait", False),  # in Swapping
        ("scheduler", "carry_over", "wait", True),  # on the way out of Swapping
        ("cache", "invalidate_cache", "wait", True),  # in Invalidated
    ],
)
@both_backends
async def test_o3_an_exception_inside_a_transition_ends_where_the_table_says(
    part: str, method: str, mode: Any, fences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_engine() as engine:
        await engine.generate([1, 2, 3, 4, 5], GREEDY)
        target = getattr(engine._opened(), part)
        real, calls = getattr(type(target), method), 0

        def break_once(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            return explode() if calls == 1 else real(*arguments, **options)

        monkeypatch.setattr(type(target), method, break_once)
        with pytest.raises(WeightUpdateError, match="injected") as failed:
            await engine.update_weights(WEIGHTS[1], mode=mode)
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        if fences:
            assert (engine.state, engine.policy_version) == (PolicyState.INVALIDATED, None)
            with pytest.raises(EngineInvalidatedError):
                await engine.generate([1, 2], GREEDY)
        else:
            assert (engine.state, engine.policy_version) == (PolicyState.SERVING, 0)
            assert_made_by(await engine.generate([1, 2, 3, 4, 5], GREEDY), weights=0, version=0)
        ack = await engine.update_weights(WEIGHTS[2])
        assert_made_by(await engine.generate([1, 2], GREEDY), weights=2, version=ack.policy_version)
        await until_idle(engine)


@both_backends
async def test_o3_an_illegal_trigger_names_state_and_trigger() -> None:
    async with new_engine() as engine:
        with pytest.raises(IllegalTransitionError, match="'rollback' refused in state Serving") as refused:
            engine._opened().gate.rollback("test")
        assert (refused.value.state, refused.value.trigger) == (PolicyState.SERVING, Trigger.ROLLBACK)
        await engine.generate([1], GREEDY)


@both_backends
async def test_o6_transitions_depend_on_updates_not_on_tokens_or_requests() -> None:
    async with new_engine(num_pages=128, check_integrity=False) as engine:
        seen: list[str] = []
        engine._opened().gate.on_transition(lambda record: seen.append(record.trigger.value))
        await engine.generate([1], SamplingParams(max_tokens=400, seed=0))
        await engine.generate_batch([[1, first] for first in range(60)], SamplingParams(max_tokens=5, seed=0))
        assert seen == []
        await engine.update_weights(WEIGHTS[1])
        assert seen == ["drain", "swap", "commit", "resume"]
