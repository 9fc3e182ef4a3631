"""What a ledger writes, and from where it goes on."""

from __future__ import annotations

import hashlib
import json

import msgspec
import numpy as np
import pytest
from ledger_disk import PATH, MemoryDisk, open_ledger
from ledger_support import Scribe, reset_record

from aengine.errors import LedgerError
from aengine.policy.ledger_check import check_ledger
from aengine.policy.ledger_records import (
    GENESIS,
    REASON_LIMIT,
    CommitRecord,
    OpenRecord,
    decode_line,
)

COMMIT = CommitRecord(update=1, version=1, digest="digest 1", previous=0)


def lines(disk: MemoryDisk) -> list[bytes]:
    return bytes(disk.content).splitlines()


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


# ---- what is written


def test_a_line_can_be_verified_with_nothing_but_json_and_sha256(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk, version=4)
    ledger.append(reset_record(1))
    prev = GENESIS
    for number, raw in enumerate(lines(disk), 1):
        fields = json.loads(raw)
        signed, _, rest = raw.rpartition(fields["hash"].encode())
        assert rest == b'"}'
        assert hashlib.sha256(signed).hexdigest() == fields["hash"]
        assert (fields["seq"], fields["prev"]) == (number, prev)
        prev = fields["hash"]
    assert json.loads(lines(disk)[0])["record"] == {
        "kind": "open",
        "run_id": "run",
        "format": 1,
        "version": 4,
        "digest": "digest 0",
        "continues": None,
        "torn_bytes": 0,
    }


def test_append_returns_the_line_number_of_the_record(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk)
    numbers = [ledger.append(reset_record(epoch)) for epoch in (1, 2, 3)]
    assert numbers == [2, 3, 4]
    assert [decode_line(lines(disk)[number - 1]).record for number in numbers] == [
        reset_record(1),
        reset_record(2),
        reset_record(3),
    ]


def test_a_reason_of_any_length_and_content_can_be_written(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk)
    ledger.append(reset_record(1, "two\nlines, \udce4 and \x1b[31m"))
    ledger.append(reset_record(2, "x" * 10 * REASON_LIMIT))
    assert len(lines(disk)) == 3
    assert check_ledger(disk.read()).is_legal
    assert decode_line(lines(disk)[1]).record == reset_record(1, "two\nlines, ? and \x1b[31m")
    assert decode_line(lines(disk)[2]).record == reset_record(2, "x" * REASON_LIMIT)


def test_integers_of_numpy_are_integers(disk: MemoryDisk) -> None:
    record = msgspec.structs.replace(COMMIT, train_step=np.int64(7))
    open_ledger(disk).append(record)
    assert decode_line(lines(disk)[1]).record == msgspec.structs.replace(COMMIT, train_step=7)


@pytest.mark.parametrize("fields", [{"version": -1}, {"digest": ""}, {"previous": "0"}, {"train_step": 1.5}])
def test_a_field_of_a_wrong_type_is_refused_and_nothing_is_written(disk: MemoryDisk, fields: dict[str, object]) -> None:
    ledger, before = open_ledger(disk), disk.read()
    with pytest.raises(msgspec.ValidationError):
        ledger.append(msgspec.structs.replace(COMMIT, **fields))
    assert disk.read() == before
    assert ledger.append(COMMIT) == 2


# ---- runs


def test_closing_records_the_end_of_the_run_and_is_idempotent(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk)
    ledger.close()
    ledger.close()
    ledger.sync()
    report = check_ledger(bytes(disk.durable))
    assert (report.is_closed, report.num_records, disk.is_open) == (True, 2, False)
    with pytest.raises(LedgerError, match="it is closed"):
        ledger.append(COMMIT)


def test_a_ledger_is_continued_from_its_head(disk: MemoryDisk) -> None:
    open_ledger(disk).close()
    head = decode_line(lines(disk)[-1]).hash
    open_ledger(disk, run_id="second").close()
    record = decode_line(lines(disk)[2]).record
    assert record == OpenRecord(run_id="second", version=0, digest="digest 0", continues=head)
    assert check_ledger(disk.read()).num_runs == 2


def test_a_torn_last_line_is_cut_off_and_its_length_noted() -> None:
    disk = Scribe().play(["commit"]).disk
    whole = disk.read()
    disk = MemoryDisk(disk.content + b'{"seq":')
    open_ledger(disk)
    assert disk.read().startswith(whole)
    record = decode_line(lines(disk)[-1]).record
    assert isinstance(record, OpenRecord)
    assert (record.torn_bytes, record.version) == (7, 2)
    assert check_ledger(disk.read()).is_legal


@pytest.mark.parametrize(
    ("fields", "initial"),
    [
        ({"digest": "digest 1"}, 1),
        ({"digest": "another"}, 2),
        ({"digest": "digest 1", "version": 1}, 1),
        ({"digest": "another", "version": 9}, 9),
    ],
)
def test_a_run_begins_at_a_version_that_no_other_weights_have(fields: dict[str, object], initial: int) -> None:
    disk = Scribe().play(["commit", "reopen"]).disk
    disk.close()
    assert open_ledger(disk, **fields).initial_version == initial
    assert check_ledger(disk.read()).is_legal


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 0}, "cannot begin at version 0: version 1 is committed already"),
        ({"version": 1}, "version 1 is committed already, with other weights"),
    ],
)
def test_a_run_cannot_begin_at_a_version_that_is_taken(fields: dict[str, object], message: str) -> None:
    disk = Scribe().play(["commit"]).disk
    disk.close()
    before = disk.read()
    with pytest.raises(LedgerError, match=message):
        open_ledger(disk, **fields)
    assert (disk.read(), disk.is_open) == (before, False)


def test_a_damaged_ledger_is_refused_by_naming_the_line(disk: MemoryDisk) -> None:
    Scribe(disk).play(["commit"]).ledger.close()
    disk.content[len(lines(disk)[0]) + 30] ^= 1
    with pytest.raises(LedgerError, match=r"run\.ledger, line 2: ") as refused:
        open_ledger(disk)
    assert (refused.value.line, refused.value.path, disk.is_open) == (2, PATH, False)
