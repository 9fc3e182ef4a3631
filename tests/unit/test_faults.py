from __future__ import annotations

import time
from pathlib import Path

import pytest

from aengine import Engine, EngineConfig, SamplingParams, WeightUpdateError
from aengine.errors import LedgerError, RequestFailedError
from aengine.testing import FaultInjector, FaultPoint, random_tensors, tiny_checkpoint, until

MODEL = tiny_checkpoint()
WEIGHTS = random_tensors(MODEL.spec, 1)
SHORT = SamplingParams(max_tokens=4, seed=0)


def struck(faults: FaultInjector, point: FaultPoint, count: int) -> list[int]:
    """The counts at which a point fails."""
    failed = []
    for _ in range(count):
        try:
            faults.strike(point)
        except RuntimeError:
            failed.append(faults.counts[point])
    return failed


def test_faults_strike_at_their_counts_and_no_others() -> None:
    faults = FaultInjector()
    faults.fail("forward", at=2)
    faults.fail("forward", at=[4, 5])
    assert struck(faults, "forward", 7) == [2, 4, 5]
    assert faults.counts == {"forward": 7}
    faults.fail("forward", at=8)
    faults.clear()
    assert struck(faults, "forward", 3) == []


def test_the_same_seed_fails_the_same_share() -> None:
    runs = []
    for seed in (1, 1, 2):
        faults = FaultInjector(seed)
        faults.fail_some("forward", share=0.2)
        runs.append(struck(faults, "forward", 500))
    assert runs[0] == runs[1] != runs[2]
    assert 60 < len(runs[0]) < 140


def test_a_delay_delays() -> None:
    faults = FaultInjector()
    faults.delay("forward", at=2, seconds=0.02)
    begun = time.monotonic()
    faults.strike("forward")
    faults.strike("forward")
    assert time.monotonic() - begun >= 0.02


async def test_a_forward_pass_fails_and_the_next_request_is_served() -> None:
    async with Engine(MODEL, EngineConfig(num_pages=4)) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        faults.fail("forward", at=2, error=MemoryError("injected"))
        with pytest.raises(RequestFailedError, match="injected") as failed:
            await engine.generate([1, 2], SHORT)
        assert len(failed.value.outputs[0].outputs[0].token_ids) == 1
        assert len((await engine.generate([1, 2], SHORT)).outputs[0].token_ids) == 4
        assert faults.counts["forward"] == 2 + 4


async def test_an_allocation_that_breaks_fails_its_request_alone() -> None:
    async with Engine(MODEL, EngineConfig(num_pages=16, page_size=4, check_integrity=True)) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        faults.fail("allocation", at=2)
        faults.fail("allocation", at=5, error=MemoryError("for the next token"))
        with pytest.raises(RequestFailedError) as failed:
            await engine.generate_batch([[1], [2], [3]], SHORT)
        reasons = [output.outputs[0].finish_reason for output in failed.value.outputs]
        assert reasons.count("length") == 1 and reasons.count("error") == 2
        assert engine.stats().pages.live == 0
        await engine.check_health()


async def test_the_third_tensor_fails_and_the_update_changes_nothing() -> None:
    async with Engine(MODEL, EngineConfig(num_pages=4)) as engine:
        faults = FaultInjector()
        faults.fail("weight", at=3, error=OSError("the disk went away"))
        with pytest.raises(WeightUpdateError, match="the disk went away"):
            await engine.update_weights(faults.weights(WEIGHTS))
        assert (engine.policy_version, faults.counts["weight"]) == (0, 3)
        assert (await engine.update_weights(faults.weights(WEIGHTS))).policy_version == 1


async def test_a_ledger_that_cannot_be_synced_refuses_the_commit(tmp_path: Path) -> None:
    async with Engine(MODEL, EngineConfig(num_pages=4, ledger=tmp_path / "ledger")) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        faults.fail("ledger sync", at=1)
        with pytest.raises(WeightUpdateError) as failed:
            await engine.update_weights(WEIGHTS)
        assert isinstance(failed.value.__cause__, LedgerError)
        assert engine.policy_version == 0
        assert (await engine.update_weights(WEIGHTS)).policy_version == 1
        assert faults.counts["ledger write"] > 0


async def test_a_hold_stops_the_engine_until_it_is_released() -> None:
    async with Engine(MODEL, EngineConfig(num_pages=4)) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=3)
        async with engine.stream([1, 2], SHORT) as stream:
            await until(hold.reached.is_set)
            assert engine.stats().num_sampled_tokens == 2
            hold.release()
            assert len((await stream.output()).outputs[0].token_ids) == 4


def test_a_hold_that_nobody_releases_ends_by_itself() -> None:
    hold = FaultInjector().hold("forward", at=1, within=0.01)
    with pytest.raises(TimeoutError, match="forward 1 was not released within"):
        hold.stop()
