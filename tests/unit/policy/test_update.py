"""An update is committed or untouched, whatever happens to it and to its caller."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import anyio
import pytest
import torch
from attrs import define, field
from torch import Tensor

from aengine.errors import (
    EngineClosedError,
    EngineInvalidatedError,
    LedgerError,
    StaleVersionError,
    WeightsMismatchError,
    WeightUpdateError,
)
from aengine.events import EventLog
from aengine.policy.gate import PolicyGate
from aengine.policy.journal import Journal
from aengine.policy.lease import StableLease
from aengine.policy.ledger import Ledger
from aengine.policy.ledger_check import check_ledger
from aengine.policy.ledger_records import Record
from aengine.policy.pending import PendingUpdate, WeightUpdateAck
from aengine.policy.roles import StagedWeights
from aengine.policy.update import Transaction
from aengine.policy.updater import WeightUpdater
from aengine.policy.version import PolicyVersion
from aengine.signal import Signal
from aengine.testing import until
from aengine.worker import Worker
from statemachines.policy import PolicyState

BACKENDS = ["asyncio", "trio"]


@define
class Writer:
    """Writes into a holder in place; fails at the tensor called "bad"."""

    holder: Holder
    names: list[str] = field(factory=list)

    def write(self, name: str, tensor: Tensor) -> None:
        self.holder.installed = StagedWeights("torn", "")
        if name == "bad":
            raise WeightsMismatchError(unexpected=[name])
        self.names.append(name)

    def finish(self, *, check_finite: bool) -> str:
        self.holder.installed = StagedWeights("+".join(self.names), "written")
        return "written"


@define
class Holder:
    """Holds a name for its weights; staging can be held up, staging and flipping made to fail."""

    installed: StagedWeights = StagedWeights("w0", "d0")
    error: Exception | None = None
    flip_error: Exception | None = None
    may_stage: threading.Event = field(factory=threading.Event)
    staged: list[Mapping[str, Tensor]] = field(factory=list)

    def stage(self, tensors: Mapping[str, Tensor], *, check_finite: bool) -> StagedWeights:
        assert self.may_stage.wait(5)
        self.staged.append(tensors)
        if self.error is not None:
            raise self.error
        return StagedWeights(f"w{len(self.staged)}", f"d{len(self.staged)}")

    def check(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.error is not None:
            raise self.error
        return tensors

    def flip(self, staged: StagedWeights) -> StagedWeights:
        if self.flip_error is not None:
            raise self.flip_error
        previous, self.installed = self.installed, staged
        return previous

    def open_writer(self) -> Writer:
        return Writer(self)


@define
class Target:
    started: int = 0
    carried: list[str] = field(factory=list)
    fenced: list[EngineInvalidatedError] = field(factory=list)

    def is_drained(self) -> bool:
        return self.started == 0

    def num_started(self) -> int:
        return self.started

    def abort_started(self) -> None:
        self.started = 0

    def carry_over(self, kv: str) -> None:
        self.carried.append(kv)

    def fence(self, error: EngineInvalidatedError) -> None:
        self.started = 0
        self.fenced.append(error)


@define
class Disk:
    """A ledger file whose syncs can be made to fail or to take until told."""

    ledger: Ledger
    error: OSError | None = None
    may_sync: threading.Event = field(factory=threading.Event)
    failure: OSError | None = None

    def append(self, record: Record) -> int:
        return self.ledger.append(record)

    def sync(self) -> None:
        assert self.may_sync.wait(5)
        self.failure = self.error
        if self.error is not None:
            raise LedgerError(self.ledger.path, "no space left") from self.error
        self.ledger.sync()

    def close(self) -> None:
        self.ledger.close()


@define
class Bench:
    path: Path
    holder: Holder = field(factory=Holder)
    target: Target = field(factory=Target)
    gate: PolicyGate = field(factory=lambda: PolicyGate(PolicyVersion(0, "d0")))
    dropped: int = 5
    owned: bool = True
    disk: Disk = field(init=False)
    journal: Journal = field(init=False)
    worker: Worker = field(init=False)
    updater: WeightUpdater = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.disk = Disk(Ledger.open(self.path, run_id="test", digest="d0"))
        self.disk.may_sync.set()
        self.holder.may_stage.set()
        self.journal = Journal(EventLog(), self.disk)  # type: ignore[arg-type]
        self.gate.on_transition(self.journal.append)
        self.worker = Worker("test worker")
        self.updater = WeightUpdater(
            Transaction(self.gate, self.holder, self.target, self._invalidate, self.journal, self.worker)
        )

    def _invalidate(self, lease: StableLease, end_ownership: bool) -> int:
        lease.bump_epoch()
        self.owned = self.owned and not end_ownership
        return self.dropped

    async def update(self, tensors: object = None, **fields: object) -> WeightUpdateAck:
        tensors = {"w": torch.zeros(1)} if tensors is None else tensors
        return await self.updater.submit(PendingUpdate(tensors, **fields))  # type: ignore[arg-type]

    async def until(self, state: PolicyState) -> None:
        await until(lambda: self.gate.state is state)

    def finish_requests(self) -> None:
        self.target.started = 0
        self.gate.changed.set()

    def assert_untouched(self) -> None:
        assert (self.gate.state, self.gate.version, self.gate.epoch) == (PolicyState.SERVING, PolicyVersion(0, "d0"), 0)
        assert self.holder.installed.weights == "w0"

    def close(self) -> list[str]:
        """Close everything; returns what the offline check finds wrong with the ledger, and the versions in it."""
        self.worker.close()
        self.journal.close()
        report = check_ledger(self.path.read_bytes())
        return [finding.message for finding in report.findings]


def with_updater(backend: str, scenario: Callable[[Bench], Awaitable[None]]) -> None:
    """Run a scenario beside an updater; the ledger it leaves must be legal."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "ledger.jsonl")

        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bench.updater.run)
                await scenario(bench)
                tasks.cancel_scope.cancel()

        try:
            anyio.run(main, backend=backend)
        finally:
            findings = bench.close()
        assert findings == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_committed_update_is_acknowledged_with_all_that_happened(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        ack = await bench.update(train_step=12)
        assert (ack.policy_version, ack.previous, ack.digest, ack.train_step) == (1, 0, "d1", 12)
        assert (ack.pages_invalidated, ack.requests_affected, ack.mode) == (5, 0, "wait")
        assert bench.gate.version == PolicyVersion(1, "d1", 12)
        assert (bench.gate.state, bench.gate.epoch, bench.holder.installed.weights) == (PolicyState.SERVING, 1, "w1")

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_waits_for_started_requests_and_counts_them(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.target.started = 3
        acks: list[WeightUpdateAck] = []

        async def caller() -> None:
            acks.append(await bench.update())

        async with anyio.create_task_group() as callers:
            callers.start_soon(caller)
            await bench.until(PolicyState.DRAINING)
            await anyio.wait_all_tasks_blocked()
            assert not acks
            bench.finish_requests()
        assert acks[0].requests_affected == 3

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 0}, "version 0 is not greater than version 0"),
        ({"version": -3}, "version -3"),
        ({"expected_version": 4}, "expected_version is 4, but version 0"),
    ],
)
def test_a_stale_version_is_refused_before_anything_is_staged(
    backend: str, fields: dict[str, int], message: str
) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(StaleVersionError, match=message):
            await bench.update(**fields)
        bench.assert_untouched()
        assert not bench.holder.staged

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_versions_are_compared_when_the_updates_turn_comes(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        results: dict[int, object] = {}

        async def caller(name: int) -> None:
            try:
                results[name] = await bench.update(expected_version=0)
            except StaleVersionError as error:
                results[name] = error

        bench.holder.may_stage.clear()
        async with anyio.create_task_group() as callers:
            callers.start_soon(caller, 1)
            await anyio.lowlevel.checkpoint()
            callers.start_soon(caller, 2)
            await anyio.lowlevel.checkpoint()
            bench.holder.may_stage.set()
        kinds = {type(result) for result in results.values()}
        assert kinds == {WeightUpdateAck, StaleVersionError}
        assert bench.gate.version.number == 1

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_jump_in_the_version_is_accepted(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        assert (await bench.update(version=40)).policy_version == 40
        assert (await bench.update()).policy_version == 41

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_source_leaves_everything_and_the_next_update_works(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.holder.error = WeightsMismatchError(missing=["model.norm.weight"])
        with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight") as failed:
            await bench.update()
        assert (failed.value.stage, failed.value.engine_state) == ("stage", "Serving")
        assert failed.value.__cause__ is bench.holder.error
        bench.assert_untouched()
        bench.holder.error = None
        assert (await bench.update()).policy_version == 1

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_flip_rolls_back(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.holder.flip_error = RuntimeError("device lost")
        with pytest.raises(WeightUpdateError, match="device lost") as failed:
            await bench.update()
        assert (failed.value.stage, failed.value.engine_state) == ("swap", "Serving")
        bench.assert_untouched()

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_caller_cancelled_while_it_drains_withdraws_the_update_at_once(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.target.started = 1
        after = Signal()
        async with anyio.create_task_group() as callers:

            async def caller() -> None:
                try:
                    await bench.update()
                finally:
                    bench.assert_untouched()
                    after.set()

            callers.start_soon(caller)
            await bench.until(PolicyState.DRAINING)
            callers.cancel_scope.cancel()
        bench.assert_untouched()
        bench.target.started = 0
        assert (await bench.update()).policy_version == 1

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_caller_cancelled_while_it_stages_withdraws_the_update(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.holder.may_stage.clear()
        async with anyio.create_task_group() as callers:
            callers.start_soon(bench.update)
            await anyio.lowlevel.checkpoint()
            callers.cancel_scope.cancel()
        bench.holder.may_stage.set()
        assert (await bench.update()).policy_version == 1
        assert len(bench.holder.staged) in (1, 2)

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_withdraws_what_has_not_flipped_and_tells_the_callers(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.target.started = 1
        errors: list[BaseException] = []

        async def caller() -> None:
            with pytest.raises(EngineClosedError) as closed:
                await bench.update()
            errors.append(closed.value)

        async with anyio.create_task_group() as callers:
            callers.start_soon(caller)
            callers.start_soon(caller)
            await bench.until(PolicyState.DRAINING)
            bench.updater.withdraw_all(EngineClosedError("the engine was closed"))
        assert len(errors) == 2
        bench.assert_untouched()

    with_updater(backend, scenario)


def test_a_native_timeout_around_an_update_gets_through() -> None:
    async def scenario(bench: Bench) -> None:
        bench.target.started = 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.update(), 0.05)
        bench.assert_untouched()

    with_updater("asyncio", scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_abort_mode_ends_what_has_started(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.target.started = 2
        ack = await bench.update(mode="abort")
        assert (ack.requests_affected, ack.mode, bench.target.started) == (2, "abort", 0)

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_keep_mode_carries_requests_over(backend: str, kv: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.target.started = 2
        ack = await bench.update(mode="keep", kv=kv)
        assert (ack.requests_affected, bench.target.started, bench.target.carried) == (2, 2, [kv])

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_commit_record_that_cannot_be_written_flips_back(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.disk.error = OSError("no space left")
        with pytest.raises(WeightUpdateError, match="no space left") as failed:
            await bench.update()
        assert (failed.value.stage, failed.value.engine_state) == ("commit", "Serving")
        bench.assert_untouched()
        with pytest.raises(WeightUpdateError, match="no space left") as refused:
            await bench.update()
        assert refused.value.stage == "stage"
        assert len(bench.holder.staged) == 1
        bench.disk.error = None
        assert (await bench.update()).policy_version == 1

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["scope", "native"])
def test_a_caller_cancelled_after_the_flip_changes_nothing(backend: str, how: str) -> None:
    if (backend, how) == ("trio", "native"):
        return

    async def scenario(bench: Bench) -> None:
        bench.disk.may_sync.clear()
        if how == "native":
            caller = asyncio.ensure_future(bench.update())
            await bench.until(PolicyState.SWAPPING)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
        else:
            async with anyio.create_task_group() as callers:
                callers.start_soon(bench.update)
                await bench.until(PolicyState.SWAPPING)
                callers.cancel_scope.cancel()
        assert bench.holder.installed.weights == "w1"
        bench.disk.may_sync.set()
        await bench.until(PolicyState.SERVING)
        assert bench.gate.version == PolicyVersion(1, "d1")

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_of_tensors_is_staged_like_a_state_dict(backend: str) -> None:
    async def stream() -> AsyncIterator[tuple[str, Tensor]]:
        for name in "ab":
            await anyio.lowlevel.checkpoint()
            yield name, torch.zeros(2)

    async def scenario(bench: Bench) -> None:
        await bench.update(stream())
        assert sorted(bench.holder.staged[0]) == ["a", "b"]

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_stream_that_is_given_up_is_closed(backend: str, in_place: bool) -> None:
    closed: list[str] = []

    async def stream() -> AsyncIterator[tuple[str, Tensor]]:
        try:
            for name in ("bad", "bad", "never read"):
                yield name, torch.zeros(2)
        finally:
            closed.append("closed")

    async def scenario(bench: Bench) -> None:
        with pytest.raises(WeightUpdateError):
            await bench.update(stream(), in_place=in_place)
        assert closed == ["closed"]

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flip_back_that_fails_fences(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.disk.may_sync.clear()
        bench.disk.error = OSError("no space left")
        async with anyio.create_task_group() as callers:

            async def caller() -> None:
                with pytest.raises(WeightUpdateError, match="no space left"):
                    await bench.update()

            callers.start_soon(caller)
            await bench.until(PolicyState.SWAPPING)
            bench.holder.flip_error = RuntimeError("device lost")
            bench.disk.may_sync.set()
        assert (bench.gate.state, bench.gate.version) == (PolicyState.INVALIDATED, None)
        bench.holder.flip_error = bench.disk.error = None
        assert (await bench.update()).policy_version == 1

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_in_place_update_commits_what_was_written(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        ack = await bench.update({"a": torch.zeros(1), "b": torch.zeros(1)}, in_place=True)
        assert (ack.digest, bench.holder.installed.weights) == ("written", "a+b")
        assert bench.gate.state is PolicyState.SERVING

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_in_place_update_refused_before_it_writes_leaves_everything(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.holder.error = WeightsMismatchError(missing=["a"])
        with pytest.raises(WeightUpdateError):
            await bench.update(in_place=True)
        bench.assert_untouched()

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_torn_update_fences_until_a_full_update_commits(backend: str) -> None:
    async def broken() -> AsyncIterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(1)
        raise OSError("the trainer went away")

    async def scenario(bench: Bench) -> None:
        bench.target.started = 0
        for source in (broken(), {"a": torch.zeros(1), "bad": torch.zeros(1)}):
            with pytest.raises(WeightUpdateError) as failed:
                await bench.update(source, in_place=True)
            assert (failed.value.stage, failed.value.engine_state) == ("swap", "Invalidated")
            assert (bench.gate.state, bench.gate.version) == (PolicyState.INVALIDATED, None)
            assert not bench.owned
        assert "update_weights" in str(bench.target.fenced[0])
        assert len(bench.target.fenced) == 2
        with pytest.raises(StaleVersionError):
            await bench.update(version=0)
        assert (await bench.update()).policy_version == 1
        assert (bench.gate.state, bench.gate.fence) == (PolicyState.SERVING, None)

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_caller_cancelled_while_its_update_writes_in_place_fences(backend: str) -> None:
    async def endless() -> AsyncIterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(1)
        await anyio.sleep_forever()

    async def scenario(bench: Bench) -> None:
        async with anyio.create_task_group() as callers:
            callers.start_soon(lambda: bench.update(endless(), in_place=True))
            await bench.until(PolicyState.SWAPPING)
            await anyio.wait_all_tasks_blocked()
            callers.cancel_scope.cancel()
        await bench.until(PolicyState.INVALIDATED)
        assert bench.gate.fence is not None
        assert (await bench.update()).policy_version == 1

    with_updater(backend, scenario)
