"""The audit in the engine: what it chooses, when it replays, and what it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aengine import Engine, EngineConfig, SamplingParams
from aengine.audit.verdict import Consistent, Reproduced, Unauditable
from aengine.errors import ConfigError, EngineClosedError
from aengine.policy.ledger_check import check_ledger
from aengine.policy.ledger_records import AuditRecord
from aengine.stats import AuditTotals
from aengine.testing import FaultInjector, random_tensors, tiny_checkpoint, until

MODEL = tiny_checkpoint()
OTHER = random_tensors(MODEL.spec, 1)
PARAMS = SamplingParams(max_tokens=6, seed=5)


def new_engine(fraction: float = 1.0, **fields: Any) -> Engine:
    return Engine(MODEL, EngineConfig(**{"page_size": 4, "num_pages": 64, "audit_fraction": fraction, **fields}))


async def all_audited(engine: Engine) -> AuditTotals:
    await until(lambda: not engine.stats().audits.queued and not engine._opened().gate._leases)
    return engine.stats().audits


async def test_every_sample_reproduces() -> None:
    params = SamplingParams(n=3, max_tokens=6, seed=5, temperature=0.8, top_k=20, repetition_penalty=1.2)
    async with new_engine() as engine:
        await engine.generate_batch([[1, 2, 3], [4, 5]], params)
        assert await all_audited(engine) == AuditTotals(reproduced=6)


async def test_a_share_is_chosen_by_the_seed() -> None:
    async def chosen(seed: int) -> int:
        async with new_engine(0.25, seed=seed) as engine:
            await engine.generate_batch([[1, at] for at in range(40)], SamplingParams(max_tokens=1, seed=0))
            totals = await all_audited(engine)
            assert totals.failed == totals.unaudited == 0
            return totals.reproduced

    counts = [await chosen(seed) for seed in (0, 0, 1, 2)]
    assert counts[0] == counts[1]
    assert all(2 < count < 20 for count in counts)
    assert len(set(counts)) > 1


async def test_without_a_share_nothing_is_replayed() -> None:
    async with new_engine(0) as engine:
        await engine.generate([1, 2], PARAMS)
        assert engine.stats().audits == AuditTotals()


async def test_a_sample_of_other_weights_is_an_event_and_a_line_of_the_ledger(tmp_path: Path) -> None:
    async with new_engine(ledger=tmp_path / "ledger") as engine:
        faults = FaultInjector()
        faults.attach(engine)
        last, replay = faults.hold("forward", at=6), faults.hold("forward", at=7)
        events = engine.events()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, [1, 2], PARAMS)
            await until(last.reached.is_set)
            engine._opened().runner.decoder.weights.final_norm.mul_(1.5)  # nobody says so: no version describes these
            last.release()
            replay.release()
        await until(lambda: engine.stats().audits.failed)
        assert engine.stats().audits == AuditTotals(failed=1)
    failures = [event.record async for event in events if isinstance(event.record, AuditRecord)]
    assert [(failure.request_id, failure.index) for failure in failures] == [("request-1", 0)]
    assert failures[0].verdict == "not_reproduced" and "token 0" in failures[0].reason
    report = check_ledger((tmp_path / "ledger").read_bytes())
    assert not report.findings and report.is_closed


async def test_what_is_queued_at_a_flip_counts_as_unaudited() -> None:
    async with new_engine() as engine:
        parts = engine._opened()
        parts.auditor.is_idle = lambda: False
        await engine.generate_batch([[1], [2], [3]], PARAMS)
        assert engine.stats().audits == AuditTotals(queued=3)
        await engine.update_weights(OTHER)
        assert engine.stats().audits == AuditTotals(unaudited=3)
        parts.auditor.is_idle = lambda: True
        await engine.generate([1], PARAMS)
        assert await all_audited(engine) == AuditTotals(reproduced=1, unaudited=3)


async def test_a_replay_under_way_holds_the_flip_off() -> None:
    async with new_engine() as engine:
        faults = FaultInjector()
        faults.attach(engine)
        hold = faults.hold("forward", at=7)
        auditor = engine._opened().auditor
        auditor._replayer = SimpleNamespace(replay=held(auditor._replayer.replay, hold))  # type: ignore[assignment]
        await engine.generate([1, 2], PARAMS)
        async with anyio.create_task_group() as tasks:
            await until(hold.reached.is_set)
            tasks.start_soon(engine.update_weights, OTHER)
            await until(lambda: engine.state == "Draining")
            await anyio.sleep(0.02)
            assert engine.policy_version == 0
            hold.release()
        assert engine.policy_version == 1
        assert engine.stats().audits == AuditTotals(reproduced=1)


def held(replay: Any, hold: Any) -> Any:
    def replay_when_released(records: Any) -> Any:
        hold.stop()
        return replay(records)

    return replay_when_released


async def test_a_sample_of_two_versions_and_a_failed_replay_are_unaudited(caplog: pytest.LogCaptureFixture) -> None:
    async with new_engine() as engine:
        auditor = engine._opened().auditor
        async with engine.stream([1, 2], SamplingParams(max_tokens=20, seed=5)) as stream:
            await stream.__anext__()
            await engine.update_weights(OTHER, mode="keep")
            await stream.output()
        assert await all_audited(engine) == AuditTotals(unaudited=1)

        def broken(_: Any) -> Any:
            raise MemoryError("no room")

        auditor._replayer = SimpleNamespace(replay=broken)  # type: ignore[assignment]
        await engine.generate([1], PARAMS)
        assert await all_audited(engine) == AuditTotals(unaudited=2)
        assert "no room" in caplog.text
        await engine.check_health()


async def test_aborted_samples_are_audited_and_failed_ones_are_not() -> None:
    async with new_engine() as engine:
        faults = FaultInjector()
        faults.attach(engine)
        async with engine.stream([1, 2], SamplingParams(max_tokens=50, seed=5)) as stream:
            await stream.__anext__()
        assert await all_audited(engine) == AuditTotals(reproduced=1)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, True, "half", float("nan")])
def test_a_share_outside_of_0_to_1_is_refused(fraction: Any) -> None:
    with pytest.raises(ConfigError, match="audit_fraction"):
        EngineConfig(audit_fraction=fraction)


async def test_outputs_are_replayed_on_demand_between_the_steps_of_other_requests() -> None:
    async with new_engine(0) as engine:
        params = SamplingParams(n=4, max_tokens=6, seed=5)
        outputs = await engine.generate_batch([[at] for at in range(1, 9)], params)
        async with engine.stream([1, 2], SamplingParams(max_tokens=50, seed=1)) as stream:
            await stream.__anext__()
            replays = await engine.replay(outputs)
        assert [(replay.record.request_id, replay.record.index) for replay in replays] == [
            (output.request_id, index) for output in outputs for index in range(4)
        ]
        assert all(isinstance(replay.verdict, Reproduced) for replay in replays)
        await engine.update_weights(OTHER)
        assert all(isinstance(replay.verdict, Unauditable) for replay in await engine.replay(outputs[:2]))
        assert engine.stats().audits == AuditTotals()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("how", ["replaying", "paused"])
def test_a_replay_ends_with_the_engine(how: str, backend: str) -> None:
    async def scenario() -> None:
        refused: list[type[Exception]] = []
        async with anyio.create_task_group() as tasks:
            async with new_engine(0) as engine:
                output = await engine.generate([1, 2], SamplingParams(n=64, max_tokens=20, seed=1))
                started = anyio.Event()

                async def replay() -> None:
                    started.set()
                    try:
                        await engine.replay([output] * 8)
                    except EngineClosedError as error:
                        refused.append(type(error))

                if how == "paused":
                    await engine.pause_generation()
                    assert await engine.replay([]) == []
                tasks.start_soon(replay)
                await started.wait()
                await anyio.lowlevel.checkpoint()
        assert refused == [EngineClosedError]

    with_limit(scenario, backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cancelled_replay_ends_early(backend: str) -> None:
    async def scenario() -> None:
        async with new_engine(0) as engine:
            output = await engine.generate([1, 2], SamplingParams(n=64, max_tokens=20, seed=1))
            with anyio.move_on_after(0.01) as scope:
                await engine.replay([output] * 64)
            assert scope.cancelled_caught
            assert len(await engine.replay([output])) == 64

    with_limit(scenario, backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_closing_does_not_wait_for_what_is_queued(backend: str) -> None:
    async def scenario() -> None:
        async with new_engine(1) as engine:
            await engine.generate([1, 2], SamplingParams(n=64, max_tokens=20, seed=1))
            await engine.aclose()
            totals = engine.stats().audits
            assert totals.reproduced + totals.unaudited == 64 and totals.unaudited > 32

    with_limit(scenario, backend)


def with_limit(scenario: Any, backend: str) -> None:
    async def limited() -> None:
        with anyio.fail_after(60):
            await scenario()

    anyio.run(limited, backend=backend)


async def test_numbers_of_16_bits_may_be_as_far_off_as_the_type_rounds() -> None:
    params = SamplingParams(n=8, max_tokens=40, seed=1)
    async with new_engine(0, dtype="float16", numerics="fast", max_num_batched_tokens=3) as engine:
        replays = await engine.replay([await engine.generate(list(range(1, 30)), params)])
        assert all(isinstance(replay.verdict, Reproduced | Consistent) for replay in replays)
