"""Field cases M4, P5 and Q1: event loops, threads and synchronous programs around an engine."""

from __future__ import annotations

import _thread
import asyncio
import gc
import inspect
import os
import subprocess
import sys
import threading
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch
from case_support import GREEDY, MODEL, WEIGHTS, assert_made_by, both_backends, new_engine, same_samples, solo
from transformers import LlamaConfig, LlamaForCausalLM

from aengine import (
    BlockingEngine,
    Engine,
    EngineClosedError,
    EngineConfig,
    EventLoopRunningError,
    RequestOutput,
    SamplingParams,
)
from aengine.errors import InsideWeightUpdateError, RequestFailedError, RequestIdInUseError
from aengine.testing import TINY, FaultInjector, until
from statemachines.policy import PolicyState

CONFIG = EngineConfig(page_size=4, num_pages=64, check_integrity=True)


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aengine")]


# ---- M4: several event loops


def test_m4_an_engine_made_outside_a_loop_serves_one_loop_and_refuses_the_next() -> None:
    engine = Engine(MODEL, CONFIG)

    async def batch() -> RequestOutput:
        async with engine:
            return await engine.generate([1, 2], GREEDY)

    assert len(asyncio.run(batch()).outputs[0].token_ids) == 8
    with pytest.raises(EngineClosedError, match="make a new one"):
        asyncio.run(batch())
    assert not engine_threads()


def test_m4_an_engine_left_open_by_one_loop_refuses_the_next_at_once() -> None:
    engine = Engine(MODEL, CONFIG)

    async def first() -> None:
        await engine.__aenter__()
        await engine.generate([1, 2], GREEDY)

    async def second() -> None:
        for call in (engine.generate([1, 2], GREEDY), engine.update_weights(WEIGHTS[1]), engine.check_health()):
            with pytest.raises(EngineClosedError, match="opened in another event loop"):
                await call
        for make in (engine.stream, engine.as_completed):
            with pytest.raises(EngineClosedError, match="opened in another event loop"):
                make([1, 2], GREEDY)

    asyncio.run(first())
    asyncio.run(second())
    engine._opened().close()
    gc.collect()
    assert not engine_threads()


@both_backends
async def test_m4_a_stream_is_read_in_the_loop_that_opened_it() -> None:
    refused: list[Exception] = []
    async with new_engine() as engine:
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=1)
        async with engine.stream([1, 2], GREEDY) as stream:

            def other_loop() -> None:
                try:
                    anyio.run(stream.__anext__)
                except EngineClosedError as error:
                    refused.append(error)

            await anyio.to_thread.run_sync(other_loop)
            hold.release()
            assert "another event loop" in str(refused[0])
            assert len((await stream.output()).outputs[0].token_ids) == 8


# ---- P5: the event loop keeps turning


@both_backends
async def test_p5_the_engine_gets_on_with_the_default_thread_pool_full() -> None:
    may_go = threading.Event()
    async with new_engine(max_num_batched_tokens=8) as engine:
        async with anyio.create_task_group() as tasks:
            limiter = anyio.to_thread.current_default_thread_limiter()
            for _ in range(int(limiter.total_tokens)):
                tasks.start_soon(anyio.to_thread.run_sync, may_go.wait)
            await anyio.wait_all_tasks_blocked()
            assert limiter.available_tokens == 0
            output = await engine.generate(list(range(60)), GREEDY)
            await engine.update_weights(WEIGHTS[1])
            may_go.set()
        assert_made_by(output, weights=0, version=0)
        assert engine.policy_version == 1


@both_backends
async def test_p5_the_event_loop_turns_while_a_step_computes() -> None:
    async with new_engine() as engine:
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, [1, 2], GREEDY)
            await until(hold.reached.is_set)
            for _ in range(100):  # a step is under way all this time
                await anyio.lowlevel.checkpoint()
            assert engine.stats().num_running == 1
            hold.release()


@both_backends
async def test_p5_the_number_of_torch_threads_is_the_callers_business() -> None:
    before = torch.get_num_threads()
    try:
        async with new_engine() as engine:
            first = await engine.generate([1, 2], GREEDY)
            torch.set_num_threads(1)
            second = await engine.generate([1, 2], GREEDY)
            assert torch.get_num_threads() == 1
        assert same_samples(first, second)
    finally:
        torch.set_num_threads(before)


@both_backends
async def test_p5_no_thread_of_the_engine_outlives_it(tmp_path: Any) -> None:
    async with new_engine(ledger=tmp_path / "ledger") as engine:
        await engine.generate([1, 2], GREEDY)
        await engine.update_weights(WEIGHTS[1])
        assert set(engine_threads()) == {"aengine worker", "aengine ledger"}
    assert not engine_threads()


# ---- Q1: notebooks and scripts


def test_q1_a_script_uses_the_synchronous_engine_twice() -> None:
    for _ in range(2):
        with BlockingEngine(MODEL, CONFIG) as engine:
            assert same_samples(engine.generate([1, 2], GREEDY), anyio.run(solo, [1, 2], GREEDY))
        assert not engine_threads()


def test_q1_the_whole_api_without_a_loop() -> None:
    with BlockingEngine(MODEL, CONFIG) as engine:
        engine.check_health()
        events = engine.events()
        finished: list[RequestOutput] = []
        batch = engine.generate_batch([[1], [2]], GREEDY, on_finished=finished.append)
        assert [output.prompt_token_ids for output in batch] == [(1,), (2,)] and len(finished) == 2
        with engine.as_completed([[3], [4], [5]], GREEDY) as done:
            assert sorted(index for index, _ in done) == [0, 1, 2]
        with engine.stream([1, 2], GREEDY, request_id="s") as stream:
            assert stream.request_id == "s"
            assert sum(len(delta.token_ids) for delta in stream) == 8
            assert stream.output().finished
        assert engine.update_weights(WEIGHTS[1], mode="keep").policy_version == 1
        assert (engine.policy_version, engine.state) == (1, PolicyState.SERVING)
        assert engine.weight_checksum() == engine.installed_policy.digest
        engine.pause_generation()
        assert engine.is_paused()
        engine.resume_generation()
        assert engine.reset_prefix_cache() == 0
        engine.abort("nobody")
        assert engine.stats().num_running == 0 and engine.tokenizer is None
        with pytest.raises(RequestIdInUseError):
            with engine.stream([1], SamplingParams(max_tokens=200), request_id="a"):
                engine.generate([1], GREEDY, request_id="a")
    assert len(list(events)) > 3, "what happened before the end can still be read"
    with pytest.raises(EngineClosedError):
        engine.generate([1], GREEDY)
    engine.close()


def test_q1_methods_have_the_signatures_and_docstrings_of_the_asynchronous_engine() -> None:
    for name in ("generate", "generate_batch", "update_weights", "stream", "as_completed", "abort", "score"):
        own, other = getattr(BlockingEngine, name), getattr(Engine, name)
        assert own.__doc__ == other.__doc__.replace("async with", "with").replace("async for", "for")
        assert inspect.signature(own) == inspect.signature(other)
    public = {name for name in vars(Engine) if not name.startswith("_")} - {"aclose", "read_pretrained"}
    assert public <= set(dir(BlockingEngine)), "everything the engine can do"


def test_q1_a_second_thread_uses_the_same_engine() -> None:
    outputs: dict[int, RequestOutput] = {}
    with BlockingEngine(MODEL, CONFIG) as engine:

        def work(number: int) -> None:
            outputs[number] = engine.generate([number, 2], GREEDY)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, output in outputs.items():
        assert same_samples(output, anyio.run(solo, [number, 2], GREEDY))


def test_q1_closing_ends_what_other_threads_wait_for() -> None:
    outputs: list[RequestOutput] = []
    with BlockingEngine(MODEL, CONFIG) as engine:
        thread = threading.Thread(target=lambda: outputs.append(engine.generate([1], SamplingParams(max_tokens=250))))
        thread.start()
        while engine.stats().num_running == 0:
            pass
    thread.join()
    assert outputs[0].outputs[0].finish_reason == "abort"


@both_backends
async def test_q1_inside_a_running_loop_the_synchronous_engine_says_what_to_await() -> None:
    with pytest.raises(EventLoopRunningError, match="async with Engine"):
        BlockingEngine(MODEL, CONFIG)
    with pytest.raises(EventLoopRunningError, match=r"async with Engine\.from_pretrained"):
        BlockingEngine.from_pretrained("anywhere")
    async with new_engine() as asynchronous:
        assert len((await asynchronous.generate([1, 2], GREEDY)).outputs[0].token_ids) == 8


def test_q1_an_open_engine_refuses_a_thread_with_a_loop_and_leaves_no_coroutine_behind() -> None:
    with BlockingEngine(MODEL, CONFIG) as engine:

        async def cell() -> None:
            for call in (engine.generate, engine.generate_batch, engine.stream, engine.abort):
                with pytest.raises(EventLoopRunningError, match=rf"await Engine\.{call.__name__}"):
                    call([1, 2])  # type: ignore[operator]
            with pytest.raises(EventLoopRunningError):
                engine.stats()

        asyncio.run(cell())
        gc.collect()
        with pytest.raises(EventLoopRunningError):
            engine.generate_batch([[1]], GREEDY, on_finished=lambda _: engine.stats())


def test_q1_an_interrupt_aborts_the_request_and_comes_out() -> None:
    with BlockingEngine(MODEL, EngineConfig(page_size=4, num_pages=256)) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate_batch(
                [[1, 2], [3, 4]],
                [SamplingParams(max_tokens=1), SamplingParams(max_tokens=400, n=2)],
                on_finished=lambda _: _thread.interrupt_main(),
            )
        while engine.stats().pages.live:
            pass
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)
        assert len(engine.generate([1], GREEDY).outputs[0].token_ids) == 8


def test_q1_a_failed_request_and_an_error_in_the_body_come_out_as_they_are() -> None:
    with BlockingEngine(MODEL, CONFIG) as engine:
        faults = FaultInjector()
        faults.attach(engine.engine)
        faults.fail("forward", at=1, error=MemoryError("injected"))
        with pytest.raises(RequestFailedError) as failed:
            engine.generate([1], GREEDY)
        assert isinstance(failed.value.__cause__, MemoryError)
    with pytest.raises(ZeroDivisionError), BlockingEngine(MODEL, CONFIG):
        raise ZeroDivisionError
    assert not engine_threads()


def test_q1_a_trainer_writes_its_weights_in_a_body() -> None:
    shared_module = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in TINY.items() if k != "architectures"}))
    with BlockingEngine(shared_module, CONFIG, share=True) as engine:
        before = engine.generate([1, 2], GREEDY)
        with engine.weight_update() as update:
            with pytest.raises(InsideWeightUpdateError):
                engine.generate([1], GREEDY)
            with torch.no_grad():
                for parameter in shared_module.parameters():
                    parameter.mul_(1.5)
        assert update.ack.policy_version == engine.policy_version == 1
        assert not same_samples(before, engine.generate([1, 2], GREEDY))
        with pytest.raises(ZeroDivisionError), engine.weight_update():
            raise ZeroDivisionError
        assert (engine.policy_version, engine.state) == (1, PolicyState.SERVING)


def test_q1_a_script_that_forgets_to_close_ends_without_noise() -> None:
    script = """
from aengine import BlockingEngine, EngineConfig, SamplingParams
from aengine.testing import tiny_checkpoint
engine = BlockingEngine(tiny_checkpoint(), EngineConfig(num_pages=16)).__enter__()
stream = engine.stream([1], SamplingParams(max_tokens=200)).__enter__()
print(len(engine.generate([1, 2], SamplingParams(max_tokens=3)).outputs[0].token_ids))
"""
    environment = os.environ | {"PYTHONWARNINGS": "error", "PYTHONASYNCIODEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("3\n", "")
