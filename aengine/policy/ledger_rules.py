"""What makes a history legal, one record after the other.

The rules are those of the weight-update transaction: a commit lies inside a swap, takes effect or is withdrawn before
the next one, and versions only grow; whatever tears the weights is followed by a fence. Any prefix of a legal history
is legal, so a run that was killed leaves nothing to complain about.

A rule takes in its record and yields what is wrong with it, a sentence each; the history then goes on from what the
record says, so that one fault is not reported again with every record after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from aengine.policy.ledger_history import CommittedVersion, History, Progress
from aengine.policy.ledger_records import (
    FORMAT_VERSION,
    AckRecord,
    AuditRecord,
    CloseRecord,
    CommitRecord,
    FailureRecord,
    FenceRecord,
    InvalidationRecord,
    OpenRecord,
    Record,
    TransitionRecord,
    UpdateRecord,
    UpdateStage,
    WithdrawnRecord,
)
from statemachines.policy import TRANSITIONS, Operation, PolicyState, Trigger, permits

__all__ = ["follow"]

STAGES: tuple[UpdateStage, ...] = ("staged", "draining", "swapping")
STATES_OF_STAGE: dict[UpdateStage, frozenset[PolicyState]] = {
    "staged": frozenset(PolicyState) - {PolicyState.SWAPPING},
    "draining": frozenset({PolicyState.DRAINING}),
    "swapping": frozenset({PolicyState.SWAPPING}),
}
_ROWS = {(row.source, row.trigger): row for row in TRANSITIONS}


def follow(history: History, line: int, record: Record) -> list[str]:
    """Take in the record of a line; returns the rules it breaks."""
    outside = not history.is_open and not isinstance(record, OpenRecord)
    broken = ["the record stands outside of a run"] if outside else []
    return broken + list(_RULES[type(record)](history, line, record))


# ---- runs


def _open(history: History, line: int, record: OpenRecord) -> Iterator[str]:
    if record.format != FORMAT_VERSION:
        yield f"format version {record.format} is not known"
    last = history.versions[-1] if history.versions else None
    if last is not None and record.version < last.number:
        yield f"the run begins at version {record.version}, below the committed version {last.number}"
    elif last is not None and record.version == last.number and record.digest != last.digest:
        yield f"the run begins at version {last.number} with another digest than line {last.line} gives it"
    if last is None or record.version != last.number:
        history.versions.append(CommittedVersion(record.version, record.digest, line))
    history.begin_run(record)


def _close(history: History, line: int, record: CloseRecord) -> Iterator[str]:
    if history.update is not None:
        yield f"closed before update {history.update.ordinal} ended"
    if history.state is PolicyState.SWAPPING:
        yield "closed in the middle of a swap"
    if history.owes_fence:
        yield "closed with torn weights that were not fenced"
    history.is_open = False


# ---- the policy machine


def _transition(history: History, line: int, record: TransitionRecord) -> Iterator[str]:
    row = _ROWS.get((record.source, record.trigger))
    if record.source is not history.state:
        yield f"{record.trigger.value!r} from {record.source.value}, but the state is {history.state.value}"
    if row is None or row.dest is not record.dest:
        yield f"no {record.trigger.value!r} leads from {record.source.value} to {record.dest.value}"
    elif row.guard is not None and not history.holds(row.guard):
        yield f"{record.trigger.value!r} against its guard {row.guard.value!r}"
    before = history.installed
    if record.trigger in _ON_TRIGGER:
        yield from _ON_TRIGGER[record.trigger](history, record)
    if record.version not in (before, history.installed):
        yield f"the transition names version {record.version}, but version {history.installed} is installed"
    history.state = record.dest


def _swap(history: History, record: TransitionRecord) -> Iterator[str]:
    if history.owes_fence:
        yield "a swap after torn weights that were not fenced"
    history.swapped_from = record.source


def _publish(history: History, record: TransitionRecord) -> Iterator[str]:
    if history.pending is None or history.is_flipped_back:
        yield "a version is published without a commit record"
        return
    history.installed = history.last_installed = history.pending.number
    history.pending = None
    if history.update is not None:
        history.update.committed = True


def _roll_back(history: History, record: TransitionRecord) -> Iterator[str]:
    history.flip_back()
    yield from ()


def _tear(history: History, record: TransitionRecord) -> Iterator[str]:
    history.flip_back()
    history.installed, history.owes_fence = None, True
    if history.update is not None:
        history.update.torn = True
    yield from ()


def _fence(history: History, line: int, record: FenceRecord) -> Iterator[str]:
    if not history.owes_fence:
        yield "a fence, but nothing has torn the weights"
    history.owes_fence = False


def _audit(history: History, line: int, record: AuditRecord) -> Iterator[str]:
    if history.state is PolicyState.SWAPPING:
        yield "a replay in the middle of a swap"


def _invalidation(history: History, line: int, record: InvalidationRecord) -> Iterator[str]:
    if not permits(history.state, Operation.INVALIDATE):
        yield f"an invalidation in state {history.state.value}"
    if record.epoch <= history.epoch:
        yield f"epoch {record.epoch} after epoch {history.epoch}"
    history.epoch = record.epoch
    if history.update is not None and history.update.committed:
        history.update.invalidated = True


# ---- updates


def _update(history: History, line: int, record: UpdateRecord) -> Iterator[str]:
    update = history.update
    if update is None or update.ordinal != record.update:
        yield from _start(history, record)
        update = history.update = Progress(record.update, record.version)
    if update.stage is not None and STAGES.index(record.stage) <= STAGES.index(update.stage):
        yield f"update {update.ordinal} is {record.stage} after it was {update.stage}"
    if record.version != update.version:
        yield f"update {update.ordinal} to version {update.version} goes on to version {record.version}"
    if history.state not in STATES_OF_STAGE[record.stage]:
        yield f"update {update.ordinal} is {record.stage} in state {history.state.value}"
    update.stage = record.stage


def _start(history: History, record: UpdateRecord) -> Iterator[str]:
    if history.update is not None:
        yield f"update {record.update} starts before update {history.update.ordinal} ended"
    if record.update <= history.last_started or record.update in history.refused:
        yield f"update {record.update} starts a second time or out of order"
    if record.version <= history.last_installed:
        yield f"update {record.update} aims at version {record.version}, not above version {history.last_installed}"
    history.last_started = record.update


def _commit(history: History, line: int, record: CommitRecord) -> Iterator[str]:
    update = history.update
    if history.state is not PolicyState.SWAPPING or update is None or update.stage != "swapping":
        yield "a commit without a swap"
    elif (record.update, record.version) != (update.ordinal, update.version):
        yield f"the commit is not of update {update.ordinal} to version {update.version}"
    if history.pending is not None:
        yield f"a commit before the one in line {history.pending.line} took effect or was withdrawn"
    if record.version <= history.last_installed:
        yield f"version {record.version} is committed after version {history.last_installed}"
    if record.previous != history.last_installed:
        yield f"the commit names version {record.previous} as its previous one, not version {history.last_installed}"
    history.add_commit(CommittedVersion(record.version, record.digest, line))


def _withdrawn(history: History, line: int, record: WithdrawnRecord) -> Iterator[str]:
    if history.pending is None or history.pending.line != record.commit:
        yield f"line {record.commit} is withdrawn, but is no commit whose fate is open"
        return
    history.flip_back()
    history.pending = None
    history.num_withdrawn += 1


def _ack(history: History, line: int, record: AckRecord) -> Iterator[str]:
    update = history.update
    if update is None or update.ordinal != record.update:
        yield f"update {record.update} is acknowledged when it is not its turn"
        return
    if record.version != history.installed or history.pending is not None:
        yield f"version {record.version} is acknowledged, but version {history.installed} is installed"
    if update.committed and not update.invalidated:
        yield f"update {record.update} is acknowledged before the old KV was invalidated"
    if history.state is PolicyState.SWAPPING:
        yield f"update {record.update} is acknowledged in the middle of its swap"
    history.update = None


def _failure(history: History, line: int, record: FailureRecord) -> Iterator[str]:
    update, history.num_failed = history.update, history.num_failed + 1
    if update is None or update.ordinal != record.update:
        yield from _refuse(history, record)
        return
    if update.committed:
        yield f"update {record.update} fails after its version was published"
    if record.torn != update.torn:
        yield f"update {record.update} fails {'torn' if record.torn else 'untorn'}, against its transitions"
    if history.state is PolicyState.SWAPPING:
        yield f"update {record.update} fails in the middle of its swap"
    history.update = None


def _refuse(history: History, record: FailureRecord) -> Iterator[str]:
    """An update that ended before its turn came."""
    if record.update <= history.last_started or record.update in history.refused:
        yield f"update {record.update} fails after it ended"
    if record.torn:
        yield f"update {record.update} fails torn before it started"
    history.refused.add(record.update)


_ON_TRIGGER: dict[Trigger, Callable[[History, TransitionRecord], Iterator[str]]] = {
    Trigger.SWAP: _swap,
    Trigger.COMMIT: _publish,
    Trigger.ROLLBACK: _roll_back,
    Trigger.FAIL: _tear,
}
_RULES: dict[type[Record], Callable[[History, int, Any], Iterator[str]]] = {
    OpenRecord: _open,
    CloseRecord: _close,
    TransitionRecord: _transition,
    UpdateRecord: _update,
    CommitRecord: _commit,
    WithdrawnRecord: _withdrawn,
    AckRecord: _ack,
    InvalidationRecord: _invalidation,
    FailureRecord: _failure,
    FenceRecord: _fence,
    AuditRecord: _audit,
}
