"""A bad disk costs a ledger nothing but time, and one thread may append while another syncs."""

from __future__ import annotations

import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ledger_support import MemoryDisk, Scribe, open_ledger, reset_record

from aengine.errors import LedgerError
from aengine.policy.ledger import Ledger
from aengine.policy.ledger_check import check_ledger
from aengine.policy.ledger_records import (
    FenceRecord,
    WithdrawnRecord,
    decode_line,
)


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Ledger]]:
    """Opens ledgers on the real disk and lets go of them in the end."""
    made: list[Ledger] = []

    def make(**fields: object) -> Ledger:
        made.append(Ledger.open(tmp_path / "ledger", **{"run_id": "run", "digest": "digest 0"} | fields))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for ledger in made:
        ledger.close()


# ---- a disk that fails


def test_a_full_disk_fails_the_sync_and_not_the_append(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk)
    disk.room = 100
    ledger.append(reset_record(1))
    ledger.append(reset_record(2))
    assert isinstance(ledger.failure, LedgerError)
    with pytest.raises(LedgerError, match="No space left on device") as failed:
        ledger.sync()
    assert isinstance(failed.value.__cause__, OSError)
    disk.room = None
    ledger.sync()
    assert ledger.failure is None
    assert (bytes(disk.durable), check_ledger(disk.read()).num_records) == (disk.read(), 3)
    assert check_ledger(disk.read()).is_legal


def test_while_the_disk_fails_every_sync_does(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk)
    disk.sync_fails = True
    ledger.append(reset_record(1))
    for _ in range(3):
        with pytest.raises(LedgerError, match="Input/output error"):
            ledger.sync()
    assert check_ledger(bytes(disk.durable)).num_records == 1


def test_a_record_lost_by_a_failed_sync_is_written_again_by_the_next(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk)
    disk.sync_fails = True
    ledger.append(reset_record(1))
    with pytest.raises(LedgerError):
        ledger.sync()
    disk.sync_fails = False
    ledger.append(reset_record(2))
    ledger.sync()
    report = check_ledger(bytes(disk.durable))
    assert (report.is_legal, report.num_records) == (True, 3)


def test_after_an_outage_the_uncertain_commit_is_withdrawn_and_its_number_used_again(disk: MemoryDisk) -> None:
    scribe = Scribe(disk)
    disk.sync_fails = True
    scribe.play(["not durable"])
    with pytest.raises(LedgerError):
        scribe.ledger.sync()
    disk.sync_fails = False
    scribe.play(["commit"])
    report = check_ledger(bytes(disk.durable))
    assert (report.is_legal, report.num_withdrawn, report.num_failed) == (True, 1, 1)
    assert [(version.number, version.digest) for version in report.versions] == [(0, "digest 0"), (1, "digest 2")]


def test_closing_on_a_bad_disk_raises_and_lets_go_of_the_file(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk)
    disk.sync_fails = True
    with pytest.raises(LedgerError, match="Input/output error"):
        ledger.close()
    assert not disk.is_open
    ledger.close()
    with pytest.raises(LedgerError, match="closed before all of it was durable"):
        ledger.sync()


def test_a_ledger_that_cannot_be_begun_is_not_open_ledger(disk: MemoryDisk) -> None:
    disk.room = 50
    with pytest.raises(LedgerError, match="No space left"):
        open_ledger(disk)
    assert not disk.is_open


# ---- two threads


def test_append_does_not_wait_for_a_sync_and_is_not_covered_by_it(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk)
    in_sync, go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        in_sync.set()
        assert go_on.wait(5)

    ledger.append(reset_record(1))
    disk.on_sync = hold_up
    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(ledger.sync)
        assert in_sync.wait(5)
        ledger.append(reset_record(2))
        go_on.set()
        syncing.result(5)
    assert (check_ledger(bytes(disk.durable)).num_records, check_ledger(disk.read()).num_records) == (2, 3)
    disk.on_sync = lambda: None
    ledger.sync()
    assert disk.durable == disk.content


def test_an_append_that_fails_during_a_sync_is_not_forgotten(disk: MemoryDisk) -> None:
    ledger = open_ledger(disk)
    ledger.append(reset_record(1))

    def fill_up() -> None:
        disk.room = 10
        ledger.append(reset_record(2))

    disk.on_sync = fill_up
    ledger.sync()
    assert isinstance(ledger.failure, LedgerError)
    disk.on_sync, disk.room = lambda: None, None
    ledger.sync()
    assert check_ledger(bytes(disk.durable)).num_records == 3


def test_appending_while_another_thread_syncs_keeps_the_chain(make: Callable[..., Ledger]) -> None:
    ledger, done = make(), threading.Event()

    def keep_syncing() -> None:
        while not done.is_set():
            ledger.sync()

    with ThreadPoolExecutor(2) as pool:
        syncers = [pool.submit(keep_syncing) for _ in range(2)]
        for epoch in range(1, 501):
            ledger.append(reset_record(epoch))
        done.set()
        for syncer in syncers:
            syncer.result(5)
    ledger.close()
    report = check_ledger(ledger.path.read_bytes())
    assert (report.is_legal, report.num_records) == (True, 502)


# ---- the real disk


def test_a_second_writer_is_refused(make: Callable[..., Ledger]) -> None:
    make()
    with pytest.raises(LedgerError, match="another writer has it open"):
        make()


def test_a_ledger_on_the_disk_is_continued(make: Callable[..., Ledger]) -> None:
    first = make()
    first.append(reset_record(1))
    first.close()
    with first.path.open("ab") as file:
        file.write(b'{"torn')
    make().close()
    report = check_ledger(first.path.read_bytes())
    assert (report.is_legal, report.num_runs, report.num_records, report.torn_bytes) == (True, 2, 5, 0)


def test_the_directory_is_synced_before_the_ledger_is_used(
    make: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
    make()
    assert synced == [True, False]


def test_a_short_write_is_gone_on_with(make: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    class Reluctant(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            return super().write(data[:7])

    monkeypatch.setattr(io, "FileIO", Reluctant)
    ledger = make()
    ledger.append(WithdrawnRecord(commit=1, reason="x"))
    ledger.append(FenceRecord(reason="y"))
    assert [decode_line(raw).seq for raw in ledger.path.read_bytes().splitlines()] == [1, 2, 3]


def test_a_path_that_cannot_be_opened_is_a_ledger_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "ledger"):
        with pytest.raises(LedgerError, match=r"cannot be opened: (Is a directory|No such file)"):
            Ledger.open(path, run_id="run", digest="d")
