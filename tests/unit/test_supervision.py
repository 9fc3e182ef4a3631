"""A loop that dies, and what the log says."""

from __future__ import annotations

import logging
import subprocess
import sys

import anyio
import pytest

from aengine import Engine, EngineConfig, EngineDeadError, SamplingParams, WeightUpdateError
from aengine.errors import EngineClosedError, EngineInvalidatedError, PageAccountingError, RequestFailedError
from aengine.testing import FaultInjector, random_tensors, tiny_checkpoint, until

MODEL = tiny_checkpoint()
WEIGHTS = random_tensors(MODEL.spec, 1)
LONG = SamplingParams(max_tokens=50, seed=0)


@pytest.mark.parametrize("loop", ["scheduler", "updater"])
async def test_a_dead_loop_tells_every_waiter_and_every_later_call(loop: str) -> None:
    cause = PageAccountingError("page 3 was freed twice") if loop == "scheduler" else ZeroDivisionError("a bug")
    told: list[BaseException] = []

    async def expect(error: type[Exception], call) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(error) as raised:
            await call
        told.append(raised.value)

    async with Engine(MODEL, EngineConfig(num_pages=64, page_size=4, max_num_seqs=1)) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=2)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(expect, RequestFailedError, engine.generate([1], LONG))
                tasks.start_soon(expect, RequestFailedError, engine.generate([2], LONG))
                await until(hold.reached.is_set)
                tasks.start_soon(expect, EngineDeadError, engine.pause_generation())
                await anyio.wait_all_tasks_blocked()
                if loop == "scheduler":
                    faults.fail("allocation", at=faults.counts["allocation"] + 1, error=cause)
                    tasks.start_soon(expect, EngineDeadError, engine.update_weights(WEIGHTS))
                else:
                    engine._opened().updater._transaction = None  # type: ignore[assignment]
                    tasks.start_soon(expect, EngineDeadError, engine.update_weights(WEIGHTS))
                await anyio.wait_all_tasks_blocked()
                hold.release()
        assert len(told) == 4
        for call in (engine.generate([1], LONG), engine.update_weights(WEIGHTS), engine.check_health()):
            with pytest.raises(EngineDeadError, match=f"the {loop} loop died.*close the engine") as refused:
                await call
            assert refused.value.__cause__ is not None
        assert engine.stats().num_running == 0, "what there is can still be looked at"


async def test_check_health_tells_serving_from_fenced_and_closed() -> None:
    async with Engine(MODEL, EngineConfig(num_pages=4, staging="none")) as engine:
        await engine.check_health()
        with pytest.raises(WeightUpdateError):
            await engine.update_weights(FaultInjector().weights({"model.norm.weight": WEIGHTS["model.norm.weight"]}))
        with pytest.raises(EngineInvalidatedError):
            await engine.check_health()
        await engine.update_weights(WEIGHTS)
        await engine.check_health()
    with pytest.raises(EngineClosedError):
        await engine.check_health()


async def test_the_log_has_one_line_per_update_and_names_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aengine")
    async with Engine(MODEL, EngineConfig(num_pages=16)) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        await engine.update_weights(WEIGHTS, train_step=7)
        with pytest.raises(WeightUpdateError):
            await engine.update_weights({})
        faults.fail("forward", at=1)
        with pytest.raises(RequestFailedError):
            await engine.generate([1], LONG, request_id="mine")
    committed, failed, step = caplog.records
    assert (committed.levelname, committed.update, committed.outcome) == ("INFO", 1, "committed")  # type: ignore[attr-defined]
    assert (committed.policy_version, committed.train_step) == (1, 7)  # type: ignore[attr-defined]
    assert committed.getMessage().startswith("update 1 committed in ")
    assert (failed.levelname, failed.outcome, failed.policy_version) == ("WARNING", "failed", 1)  # type: ignore[attr-defined]
    assert "missing" in failed.getMessage()
    assert (step.levelname, step.request_ids) == ("ERROR", ["mine"])  # type: ignore[attr-defined]
    assert "injected fault" in step.getMessage() and "mine" in step.getMessage()


def test_nothing_is_printed_by_a_program_that_has_not_set_up_logging() -> None:
    script = """
import anyio
from aengine import Engine, EngineConfig, WeightUpdateError
from aengine.testing import tiny_checkpoint
async def main():
    async with Engine(tiny_checkpoint(), EngineConfig(num_pages=4)) as engine:
        try:
            await engine.update_weights({})
        except WeightUpdateError:
            print("refused")
anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("refused\n", "")
