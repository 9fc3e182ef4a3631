"""Whatever kills the writer, what is left is a legal ledger that holds every version it acknowledged."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_disk import MemoryDisk
from ledger_support import EVENTS, Scribe, keep_committing

from aengine.policy.ledger_check import LedgerReport, check_ledger

SHORT = ("commit", "not durable", "commit")
LONG = tuple(event for event in EVENTS if event not in ("reopen", "crash", "crash in a line")) * 3
NUM_KILLS = 10


def numbers(report: LedgerReport) -> set[int]:
    return {version.number for version in report.versions}


def assert_holds(data: bytes, acked: dict[int, int]) -> None:
    """`acked`: for each acknowledged version, how much of the file was durable when it was acknowledged."""
    report = check_ledger(data)
    assert report.findings == ()
    assert report.torn_bytes == len(data) - (data.rfind(b"\n") + 1)
    assert numbers(report) >= {version for version, durable in acked.items() if durable <= len(data)}


def acked_sizes(scribe: Scribe, events: tuple[str, ...]) -> dict[int, int]:
    sizes = {}
    for event in events:
        scribe.play([event])
        for version in set(scribe.acked) - set(sizes):
            sizes[version] = len(scribe.disk.durable)
    return sizes


def boundaries(data: bytes) -> Iterator[int]:
    yield 0
    for place, byte in enumerate(data, 1):
        if byte == ord("\n"):
            yield place


def test_a_short_ledger_may_be_cut_at_every_byte() -> None:
    scribe = Scribe()
    acked = acked_sizes(scribe, SHORT)
    data = scribe.disk.read()
    assert set(acked) == {1, 2}
    for size in range(len(data) + 1):
        assert_holds(data[:size], acked)


def test_a_long_ledger_may_be_cut_at_every_record_and_every_byte_of_the_last() -> None:
    scribe = Scribe()
    acked = acked_sizes(scribe, LONG)
    data = scribe.disk.read()
    *_, last, end = boundaries(data)
    assert len(acked) == 6
    for size in (*boundaries(data), *range(last, end)):
        assert_holds(data[:size], acked)


def test_no_acknowledged_version_depends_on_what_was_not_synced() -> None:
    scribe = Scribe()
    for event in LONG:
        scribe.play([event])
        assert numbers(check_ledger(bytes(scribe.disk.durable))) >= set(scribe.acked)


@pytest.mark.parametrize("torn", [0, 1, 100])
def test_a_run_can_go_on_from_every_cut(torn: int) -> None:
    data = Scribe().play(SHORT).disk.read()
    for size in boundaries(data):
        disk = MemoryDisk(bytearray(data[: size + torn])).lose_power(kept=size + torn)
        scribe = Scribe(disk, digest="restored").play(["commit"])
        report = check_ledger(bytes(disk.durable))
        assert report.findings == ()
        assert report.last_version is not None
        assert report.last_version.number == scribe.acked[-1]


@given(st.lists(st.sampled_from(EVENTS), max_size=12), st.data())
def test_any_history_the_engine_can_write_is_legal_and_so_is_any_beginning_of_it(
    events: list[str], data: st.DataObject
) -> None:
    scribe = Scribe().play(events)
    written = scribe.disk.read()
    report = check_ledger(written)
    assert report.findings == ()
    assert numbers(report) >= set(scribe.acked)
    assert report.num_withdrawn == events.count("not durable")
    cut = written[: data.draw(st.integers(0, len(written)))]
    assert check_ledger(cut).findings == ()
    after = Scribe(MemoryDisk(bytearray(cut)), digest="restored").play(events)
    assert check_ledger(after.disk.read()).findings == ()


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.data())
def test_losing_power_at_any_moment_loses_no_acknowledged_version(events: list[str], data: st.DataObject) -> None:
    disk = MemoryDisk()
    scribe = Scribe(disk)
    moments: list[tuple[MemoryDisk, list[int]]] = []

    def remember() -> None:
        kept = data.draw(st.integers(len(disk.durable), len(disk.content)))
        moments.append((disk.lose_power(kept), list(scribe.acked)))

    disk.on_sync = remember
    scribe.play(events)
    for left, acked in moments:
        report = check_ledger(left.read())
        assert report.findings == ()
        assert numbers(report) >= set(acked)


def received(acks: Connection) -> Iterator[int]:
    """Until the other end is gone; a message that was cut short acknowledges nothing."""
    try:
        while True:
            yield int(acks.recv_bytes())
    except (EOFError, OSError):
        return


def test_killing_the_writer_loses_no_acknowledged_version(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aengine.policy.ledger"])
    path, chance, acked = tmp_path / "ledger", random.Random(7), set[int]()
    for _ in range(NUM_KILLS):
        acks, far_end = context.Pipe(duplex=False)
        process = context.Process(target=keep_committing, args=(path, far_end), daemon=True)
        process.start()
        far_end.close()
        incoming = received(acks)
        acked |= {next(incoming) for _ in range(chance.randint(1, 6))}
        process.join(chance.uniform(0, 0.02))
        process.kill()
        acked |= set(incoming)
        process.join()
        process.close()
        acks.close()
        report = check_ledger(path.read_bytes())
        assert report.findings == ()
        assert numbers(report) >= acked
    assert len(acked) >= NUM_KILLS
