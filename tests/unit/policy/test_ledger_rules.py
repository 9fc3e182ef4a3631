"""Histories that are hashed right and still cannot be: each is rejected with the rule it breaks."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_support import Scribe

from aengine.policy.ledger_check import LedgerReport, check_ledger
from aengine.policy.ledger_records import (
    AckRecord,
    CloseRecord,
    CommitRecord,
    FailureRecord,
    FenceRecord,
    InvalidationRecord,
    OpenRecord,
    Record,
    TransitionRecord,
    UpdateRecord,
    WithdrawnRecord,
)
from statemachines.policy import PolicyState, Trigger

SERVING, DRAINING, SWAPPING, INVALIDATED = PolicyState

CLOSE, FENCE = CloseRecord(), FenceRecord(reason="")


def committed(version: int = 1, **fields: Any) -> CommitRecord:
    return CommitRecord(**{"update": 1, "version": version, "digest": "d", "previous": 0} | fields)


def moved(trigger: Trigger, source: PolicyState, dest: PolicyState, version: int | None = 0) -> TransitionRecord:
    return TransitionRecord(trigger=trigger, source=source, dest=dest, version=version)


def reached(stage: Any, update: int = 1, version: int = 1) -> UpdateRecord:
    return UpdateRecord(update=update, stage=stage, version=version, mode="wait")


def acked(version: int, update: int = 1) -> AckRecord:
    return AckRecord(update=update, version=version, pages_invalidated=0, requests_affected=0)


def failed(update: int = 1, *, torn: bool = False) -> FailureRecord:
    return FailureRecord(update=update, stage="swap", torn=torn, reason="")


def dropped(epoch: int) -> InvalidationRecord:
    return InvalidationRecord(reason="", entries=0, epoch=epoch)


def withdrawn(line: int) -> WithdrawnRecord:
    return WithdrawnRecord(commit=line, reason="")


DRAIN = moved(Trigger.DRAIN, SERVING, DRAINING)
SWAP = moved(Trigger.SWAP, DRAINING, SWAPPING)
PUBLISH = moved(Trigger.COMMIT, SWAPPING, INVALIDATED, 1)
RESUME = moved(Trigger.RESUME, INVALIDATED, SERVING, 1)
ROLLBACK = moved(Trigger.ROLLBACK, SWAPPING, SERVING)
FAIL = moved(Trigger.FAIL, SWAPPING, INVALIDATED, None)
RECOVER = moved(Trigger.SWAP, INVALIDATED, SWAPPING, None)

TO_SWAP = [reached("staged"), DRAIN, reached("draining"), SWAP, reached("swapping")]  # lines 2 to 6
UPDATE = [*TO_SWAP, committed(), PUBLISH, RESUME, dropped(1), acked(1)]  # lines 2 to 11
FLIPPED_BACK = [*TO_SWAP, committed(), ROLLBACK]
AGAIN = [reached("staged", 2), DRAIN, reached("draining", 2), SWAP, reached("swapping", 2)]
TORN = [*TO_SWAP, FAIL]


def report_of(records: list[Record]) -> LedgerReport:
    scribe = Scribe()
    for record in records:
        scribe.ledger.append(record)
    return check_ledger(scribe.disk.read())


def findings(records: list[Record]) -> list[str]:
    return [finding.message for finding in report_of(records).findings]


@pytest.mark.parametrize(
    "records",
    [
        UPDATE,
        [*FLIPPED_BACK, withdrawn(7), failed(), *AGAIN, committed(update=2)],
        [*TO_SWAP, committed(), withdrawn(7), ROLLBACK, failed(), CLOSE],
        [*TORN, FENCE, failed(torn=True), RECOVER, reached("swapping", 2), committed(update=2), PUBLISH, RESUME],
        [*TORN, failed(torn=True), FENCE, CLOSE],
        [*TO_SWAP, ROLLBACK, acked(0), CLOSE],
        [failed(2), reached("staged"), failed(1), CLOSE],
    ],
)
def test_these_are_legal(records: list[Record]) -> None:
    assert findings(records) == []


@pytest.mark.parametrize(
    ("records", "message"),
    [
        # the machine
        ([SWAP], "'swap' from Draining, but the state is Serving"),
        ([moved(Trigger.SWAP, SERVING, SWAPPING)], "no 'swap' leads from Serving to Swapping"),
        ([DRAIN, moved(Trigger.CANCEL, DRAINING, SWAPPING)], "no 'cancel' leads from Draining to Swapping"),
        ([moved(Trigger.DRAIN, SERVING, DRAINING, 5)], "the transition names version 5, but version 0 is installed"),
        ([moved(Trigger.DRAIN, SERVING, DRAINING, None)], "names version None"),
        ([*TORN, FENCE, moved(Trigger.RESUME, INVALIDATED, SERVING, None)], "against its guard 'weights_known'"),
        ([*TORN, FENCE, RECOVER, moved(Trigger.ROLLBACK, SWAPPING, SERVING, None)], "guard 'entered_from_draining'"),
        # commits
        ([reached("staged"), committed()], "a commit without a swap"),
        ([reached("staged"), DRAIN, SWAP, committed()], "a commit without a swap"),
        ([DRAIN, SWAP, committed()], "a commit without a swap"),
        ([*TO_SWAP, committed(2)], "the commit is not of update 1 to version 1"),
        ([*TO_SWAP, committed(update=2)], "the commit is not of update 1 to version 1"),
        ([*TO_SWAP, committed(previous=3)], "names version 3 as its previous one, not version 0"),
        ([*TO_SWAP, committed(), committed()], "a commit before the one in line 7 took effect or was withdrawn"),
        ([*FLIPPED_BACK, failed(), *AGAIN, committed(update=2)], "a commit before the one in line 7"),
        ([*TO_SWAP, PUBLISH], "a version is published without a commit record"),
        ([*FLIPPED_BACK, failed(), *AGAIN, PUBLISH], "a version is published without a commit record"),
        ([*TO_SWAP, committed(), withdrawn(7), PUBLISH], "a version is published without a commit record"),
        ([withdrawn(1)], "line 1 is withdrawn, but is no commit"),
        ([*UPDATE, withdrawn(7)], "line 7 is withdrawn, but is no commit whose fate is open"),
        ([*TO_SWAP, committed(), withdrawn(6)], "line 6 is withdrawn, but is no commit"),
        # acknowledgements
        ([acked(0)], "update 1 is acknowledged when it is not its turn"),
        ([*UPDATE, acked(1)], "update 1 is acknowledged when it is not its turn"),
        ([*TO_SWAP, ROLLBACK, acked(1)], "version 1 is acknowledged, but version 0 is installed"),
        ([*FLIPPED_BACK, acked(1)], "version 1 is acknowledged, but version 0 is installed"),
        ([*TO_SWAP, committed(), acked(1)], "version 1 is acknowledged, but version 0 is installed"),
        ([*TO_SWAP, acked(0)], "acknowledged in the middle of its swap"),
        ([*TO_SWAP, committed(), PUBLISH, RESUME, acked(1)], "acknowledged before the old KV was invalidated"),
        ([*TORN, FENCE, acked(0)], "version 0 is acknowledged, but version None is installed"),
        # updates
        ([reached("draining")], "update 1 is draining in state Serving"),
        ([DRAIN, reached("swapping")], "update 1 is swapping in state Draining"),
        ([DRAIN, SWAP, reached("staged")], "update 1 is staged in state Swapping"),
        ([reached("staged"), reached("staged")], "update 1 is staged after it was staged"),
        ([DRAIN, reached("draining"), reached("staged")], "update 1 is staged after it was draining"),
        ([reached("staged"), DRAIN, reached("draining", version=2)], "to version 1 goes on to version 2"),
        ([reached("staged"), reached("staged", 2)], "update 2 starts before update 1 ended"),
        ([*UPDATE, reached("staged", 1, 2)], "update 1 starts a second time or out of order"),
        ([failed(), reached("staged")], "update 1 starts a second time or out of order"),
        ([reached("staged", version=0)], "update 1 aims at version 0, not above version 0"),
        ([*UPDATE, reached("staged", 2, 1)], "update 2 aims at version 1, not above version 1"),
        # failures
        ([*UPDATE[:-1], failed()], "update 1 fails after its version was published"),
        ([*TO_SWAP, failed()], "update 1 fails in the middle of its swap"),
        ([*TO_SWAP, ROLLBACK, failed(torn=True)], "update 1 fails torn, against its transitions"),
        ([*TORN, failed()], "update 1 fails untorn, against its transitions"),
        ([*UPDATE, failed()], "update 1 fails after it ended"),
        ([failed(), failed()], "update 1 fails after it ended"),
        ([failed(torn=True)], "update 1 fails torn before it started"),
        # the fence
        ([FENCE], "a fence, but nothing has torn the weights"),
        ([*TORN, failed(torn=True), RECOVER], "a swap after torn weights that were not fenced"),
        ([*TORN, FENCE, RECOVER, FAIL, RECOVER], "a swap after torn weights that were not fenced"),
        # invalidation
        ([dropped(0)], "epoch 0 after epoch 0"),
        ([dropped(4), dropped(4)], "epoch 4 after epoch 4"),
        ([*TO_SWAP, dropped(1)], "an invalidation in state Swapping"),
        # runs
        ([CLOSE, DRAIN], "the record stands outside of a run"),
        ([CLOSE, CLOSE], "the record stands outside of a run"),
        ([reached("staged"), CLOSE], "closed before update 1 ended"),
        ([DRAIN, SWAP, CLOSE], "closed in the middle of a swap"),
        ([*TORN, failed(torn=True), CLOSE], "closed with torn weights that were not fenced"),
    ],
)
def test_an_impossible_history_is_rejected(records: list[Record], message: str) -> None:
    found = findings(records)
    assert found
    assert message in found[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 0}, "the run begins at version 0, below the committed version 1"),
        ({"version": 1}, "the run begins at version 1 with another digest than line 7 gives it"),
        ({"version": 2, "format": 2}, "format version 2 is not known"),
        ({"version": 2, "continues": None}, "the run does not continue from the line before"),
    ],
)
def test_a_run_that_cannot_follow_is_rejected(fields: dict[str, Any], message: str) -> None:
    scribe = Scribe()
    for record in UPDATE:
        scribe.ledger.append(record)
    head = check_ledger(scribe.disk.read()).head
    scribe.ledger.append(OpenRecord(**{"run_id": "x", "digest": "other", "continues": head} | fields))
    assert [finding.message for finding in check_ledger(scribe.disk.read()).findings] == [message]


@pytest.mark.parametrize(
    ("records", "unfinished"),
    [
        ([reached("staged")], "update 1 to version 1 is staged"),
        (UPDATE[:3], "update 1 to version 1 is draining"),
        (UPDATE[:6], "version 1 is committed, but nothing says yet that it was published"),
        (FLIPPED_BACK, "the commit of version 1 did not take effect and is not withdrawn yet"),
        ([*TORN, failed(torn=True)], "the weights are torn and not fenced yet"),
        (UPDATE, None),
    ],
)
def test_what_was_under_way_at_the_end_is_named(records: list[Record], unfinished: str | None) -> None:
    report = report_of(records)
    assert (report.findings, report.unfinished) == ((), unfinished)


def test_a_commit_is_counted_from_its_record_on_until_it_is_flipped_back_or_withdrawn() -> None:
    def numbers(records: list[Record]) -> list[int]:
        return [version.number for version in report_of(records).versions]

    assert numbers(UPDATE[:6]) == [0, 1]
    assert numbers(FLIPPED_BACK) == [0]
    assert numbers([*UPDATE[:6], withdrawn(7)]) == [0]
