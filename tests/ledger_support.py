"""A scribe that writes histories as the engine's transaction does."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

from attrs import Factory, define
from ledger_disk import MemoryDisk, open_ledger

from aengine.policy.ledger import Ledger
from aengine.policy.ledger_records import (
    AckRecord,
    AuditRecord,
    CommitRecord,
    FailureRecord,
    FenceRecord,
    InvalidationRecord,
    TransitionRecord,
    UpdateRecord,
    UpdateStage,
    WithdrawnRecord,
)
from statemachines.policy import PolicyMachine, Trigger

EVENTS = (
    "commit",
    "jump",
    "not durable",
    "torn",
    "refused",
    "withdrawn in queue",
    "withdrawn in drain",
    "flip failed",
    "no-op",
    "pause",
    "resume",
    "reset",
    "audit",
    "reopen",
    "crash",
    "crash in a line",
)


def reset_record(epoch: int, reason: str = "reset") -> InvalidationRecord:
    return InvalidationRecord(reason=reason, entries=0, epoch=epoch)


@define(eq=False)
class Scribe:
    """A model of the engine: every event of `EVENTS` becomes the records that the engine writes for it."""

    disk: MemoryDisk = Factory(MemoryDisk)
    installed: int = 0
    digest: str = "digest 0"
    is_fenced: bool = False
    is_held: bool = False
    acked: list[int] = Factory(list)
    _num_digests: int = 0
    _ordinal: int = 0
    _epoch: int = 0
    _machine: PolicyMachine = Factory(PolicyMachine)
    ledger: Ledger = Factory(lambda self: self.open(), takes_self=True)

    def open(self) -> Ledger:
        ledger = open_ledger(self.disk, digest=self.digest)
        self.installed, self.is_fenced, self.is_held = ledger.initial_version, False, False
        self._ordinal, self._epoch, self._machine = 0, 0, PolicyMachine()
        return ledger

    def play(self, events: Iterable[str]) -> Scribe:
        for event in events:
            getattr(self, f"on_{event.replace(' ', '_').replace('-', '_')}")()
        return self

    # ---- updates that end well

    def on_commit(self, jump: int = 1) -> None:
        target = self.reach_swap(jump)
        self.commit(target)
        self.ledger.sync()
        self.installed, self.digest, self.is_fenced = target, f"digest {self._num_digests}", False
        self.fire(Trigger.COMMIT)
        self.fire(Trigger.RESUME)
        self.hold_again()
        self.invalidate("update")
        self.ack(target)
        self.acked.append(target)

    def on_jump(self) -> None:
        self.on_commit(jump=5)

    def on_no_op(self) -> None:
        if self.is_fenced:
            return
        self.reach_swap()
        self.fire(Trigger.ROLLBACK)
        self.hold_again()
        self.ack(self.installed)

    # ---- updates that do not

    def on_not_durable(self) -> None:
        line = self.commit(self.reach_swap())
        self.ledger.append(WithdrawnRecord(commit=line, reason="fsync failed"))
        if self.is_fenced:
            self.tear()
        else:
            self.fire(Trigger.ROLLBACK)
            self.hold_again()
        self.fail("commit", torn=self.is_fenced)

    def on_torn(self) -> None:
        self.reach_swap()
        self.tear()
        self.fail("swap", torn=True)

    def on_refused(self) -> None:
        self.reach("staged", self.begin())
        self.fail("drain", torn=False)

    def on_withdrawn_in_queue(self) -> None:
        self._ordinal += 1
        self.fail("stage", torn=False)

    def on_withdrawn_in_drain(self) -> None:
        if self.is_fenced:
            return
        self.drain(self.begin())
        if not self.is_held:
            self.fire(Trigger.CANCEL)
        self.fail("drain", torn=False)

    def on_flip_failed(self) -> None:
        if self.is_fenced:
            return
        self.reach_swap()
        self.fire(Trigger.ROLLBACK)
        self.hold_again()
        self.fail("swap", torn=False)

    # ---- everything else

    def on_pause(self) -> None:
        if not self.is_held and not self.is_fenced:
            self.is_held = True
            self.fire(Trigger.DRAIN)

    def on_resume(self) -> None:
        if self.is_held and not self.is_fenced:
            self.fire(Trigger.CANCEL)
        self.is_held = False

    def on_reset(self) -> None:
        self.invalidate("reset")

    def on_audit(self) -> None:
        self.ledger.append(
            AuditRecord(request_id="request-7", index=1, verdict="not_reproduced", reason="token 3: another draw")
        )

    def on_reopen(self) -> None:
        self.ledger.close()
        self.ledger = self.open()

    def on_crash(self) -> None:
        self.disk = self.disk.lose_power(kept=len(self.disk.content))
        self.ledger = self.open()

    def on_crash_in_a_line(self) -> None:
        self.disk.content += b'{"seq":'
        self.on_crash()

    # ---- helpers

    def begin(self, jump: int = 1) -> int:
        self._ordinal += 1
        return self.installed + jump

    def drain(self, target: int) -> None:
        self.reach("staged", target)
        if not self.is_held:
            self.fire(Trigger.DRAIN)
        self.reach("draining", target)

    def reach_swap(self, jump: int = 1) -> int:
        target = self.begin(jump)
        if not self.is_fenced:
            self.drain(target)
        self.fire(Trigger.SWAP)
        self.reach("swapping", target)
        return target

    def reach(self, stage: UpdateStage, target: int) -> None:
        self.ledger.append(UpdateRecord(update=self._ordinal, stage=stage, version=target, mode="wait"))

    def commit(self, target: int) -> int:
        self._num_digests += 1
        record = CommitRecord(
            update=self._ordinal, version=target, digest=f"digest {self._num_digests}", previous=self.installed
        )
        return self.ledger.append(record)

    def ack(self, version: int) -> None:
        record = AckRecord(update=self._ordinal, version=version, pages_invalidated=3, requests_affected=2)
        self.ledger.append(record)

    def tear(self) -> None:
        self.is_fenced = True
        self.fire(Trigger.FAIL)
        self.invalidate("torn")
        self.ledger.append(FenceRecord(reason="torn"))

    def fail(self, stage: str, *, torn: bool) -> None:
        self.ledger.append(FailureRecord(update=self._ordinal, stage=stage, torn=torn, reason="it had to be"))

    def invalidate(self, reason: str) -> None:
        self._epoch += 1
        self.ledger.append(InvalidationRecord(reason=reason, entries=3, epoch=self._epoch))

    def hold_again(self) -> None:
        if self.is_held:
            self.fire(Trigger.DRAIN)

    def fire(self, trigger: Trigger) -> None:
        row = self._machine.fire(trigger)
        version = None if self.is_fenced else self.installed
        self.ledger.append(TransitionRecord(trigger=trigger, source=row.source, dest=row.dest, version=version))


def keep_committing(path: Path, acks: Connection) -> None:
    """Runs in a process of its own until it is killed."""
    ledger = Ledger.open(path, run_id="run", digest="restored")
    scribe = Scribe(ledger=ledger, installed=ledger.initial_version)
    while True:
        scribe.play(["commit"])
        acks.send_bytes(str(scribe.acked[-1]).encode())
