"""A ledger that was touched is rejected: by its chain, or where the chain was written anew, by the rules of history."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_disk import MemoryDisk
from ledger_support import EVENTS, Scribe

from aengine.policy.ledger_check import LedgerReport, PolicyClaim, check_claims, check_ledger
from aengine.policy.ledger_records import GENESIS, CommitRecord, OpenRecord, Record, decode_line, encode_line


def write_ledger() -> list[bytes]:
    """A closed ledger with every kind of record, as lines."""
    scribe = Scribe().play(["commit", "not durable", "commit", "no-op", "reset", "audit", "torn", "commit"])
    scribe.ledger.close()
    return scribe.disk.read().splitlines(keepends=True)


LINES = write_ledger()
KINDS = {json.loads(raw)["record"]["kind"]: place for place, raw in reversed(list(enumerate(LINES)))}
FIELDS = [
    pytest.param(place, path, id=f"{kind}-{'.'.join(path)}")
    for kind, place in sorted(KINDS.items())
    for path in (
        *(("record", field) for field in json.loads(LINES[place])["record"]),
        *((field,) for field in ("seq", "time", "prev", "hash")),
    )
]


def altered(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return "0" + value[1:] if value[:1] != "0" else "1" + value[1:]
        case _:
            return 1


def edit(raw: bytes, path: tuple[str, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(raw)
    *outer, last = path
    place = fields[outer[0]] if outer else fields
    place[last] = altered(place[last])
    return fields


def dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def with_own_hash(fields: dict[str, Any]) -> bytes:
    signed = dump(fields | {"hash": ""}).removesuffix(b'"}')
    return signed + hashlib.sha256(signed).hexdigest().encode() + b'"}\n'


def records_of(lines: list[bytes]) -> list[Record]:
    return [decode_line(raw.rstrip(b"\n")).record for raw in lines]


def chained(records: list[Record]) -> bytes:
    """Written anew, with every hash right."""
    lines, prev = [], GENESIS
    for seq, record in enumerate(records, 1):
        line, prev = encode_line(seq, record, prev)
        lines.append(line)
    return b"".join(lines)


def rejected(lines: list[bytes]) -> LedgerReport:
    report = check_ledger(b"".join(lines))
    assert not report.is_legal
    return report


def test_the_ledger_to_tamper_with_has_every_kind_of_record_and_is_legal() -> None:
    assert set(KINDS) == {kind.__struct_config__.tag for kind in Record.__args__}  # type: ignore[attr-defined]
    assert check_ledger(b"".join(LINES)).is_legal
    assert [dump(json.loads(raw)) + b"\n" for raw in LINES] == LINES
    assert [with_own_hash(json.loads(raw)) for raw in LINES] == LINES


@pytest.mark.parametrize(("place", "path"), FIELDS)
def test_an_edited_field_is_rejected(place: int, path: tuple[str, ...]) -> None:
    edited = edit(LINES[place], path)
    report = rejected([*LINES[:place], dump(edited) + b"\n", *LINES[place + 1 :]])
    assert report.findings[0].line == place + 1


@pytest.mark.parametrize(("place", "path"), [row for row in FIELDS if "close" not in str(row.id)])
def test_an_edited_field_is_rejected_though_the_line_was_hashed_anew(place: int, path: tuple[str, ...]) -> None:
    edited = with_own_hash(edit(LINES[place], path))
    if path != ("hash",):
        report = rejected([*LINES[:place], edited, *LINES[place + 1 :]])
        assert report.findings[0].line in (place + 1, place + 2)


@pytest.mark.parametrize("place", range(len(LINES) - 1))
def test_a_dropped_record_is_rejected(place: int) -> None:
    rejected(LINES[:place] + LINES[place + 1 :])


@pytest.mark.parametrize("place", range(len(LINES) - 1))
def test_swapped_neighbours_are_rejected(place: int) -> None:
    rejected([*LINES[:place], LINES[place + 1], LINES[place], *LINES[place + 2 :]])


@pytest.mark.parametrize("place", range(len(LINES)))
def test_a_repeated_record_is_rejected(place: int) -> None:
    rejected([*LINES[: place + 1], LINES[place], *LINES[place + 1 :]])
    rejected([*LINES, LINES[place]])


@pytest.mark.parametrize("place", range(len(LINES) - 1))
def test_a_line_cut_short_in_the_middle_is_rejected(place: int) -> None:
    raw = LINES[place]
    for size in (0, 1, len(raw) // 2, len(raw) - 2):
        rejected([*LINES[:place], raw[:size], *LINES[place + 1 :]])
        rejected([*LINES[:place], raw[:size] + b"\n", *LINES[place + 1 :]])


def test_the_middle_cut_out_is_rejected() -> None:
    for start in range(len(LINES) - 2):
        rejected(LINES[:start] + LINES[start + 2 :])


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b"null\n", b"\xff\n", b"[" * 5000 + b"\n", b'{"seq":' + b"9" * 5000 + b"}\n"]
)
def test_a_line_that_is_no_record_is_rejected(line: bytes) -> None:
    assert rejected([*LINES, line]).findings[0].line == len(LINES) + 1


def test_an_appended_record_with_a_wrong_hash_or_number_is_rejected() -> None:
    head, seq = decode_line(LINES[-1].rstrip(b"\n")).hash, len(LINES) + 1
    record = OpenRecord(run_id="x", version=9, digest="d", continues=head)
    assert check_ledger(b"".join([*LINES, encode_line(seq, record, head)[0]])).is_legal
    rejected([*LINES, encode_line(seq, record, "f" * 64)[0]])
    rejected([*LINES, encode_line(seq + 1, record, head)[0]])
    rejected([*LINES, encode_line(seq - 1, record, head)[0]])


def test_a_ledger_that_begins_with_a_continued_run_is_rejected() -> None:
    record = OpenRecord(run_id="x", version=9, digest="d", continues="f" * 64)
    assert "does not continue" in rejected([chained([record])]).findings[0].message


def test_versions_in_another_order_are_rejected_though_all_was_hashed_anew() -> None:
    records = records_of(LINES)
    places = [place for place, record in enumerate(records) if isinstance(record, CommitRecord)]
    first, last = places[0], places[-1]
    records[first], records[last] = records[last], records[first]
    rejected([chained(records)])
    for place, record in enumerate(records_of(LINES)):
        fields = msgspec.structs.asdict(record)
        renumbered = {name: 9 - fields[name] for name in ("version", "previous") if fields.get(name) is not None}
        records[place] = msgspec.structs.replace(record, **renumbered)
    rejected([chained(records)])


@given(st.lists(st.sampled_from(EVENTS), max_size=4), st.data())
def test_any_changed_byte_is_rejected_or_tears_the_last_line(events: list[str], data: st.DataObject) -> None:
    scribe = Scribe().play(events)
    scribe.ledger.close()
    changed = bytearray(scribe.disk.content)
    place = data.draw(st.integers(0, len(changed) - 1))
    changed[place] ^= data.draw(st.integers(1, 255))
    report = check_ledger(bytes(changed))
    assert report.is_legal == (place == len(changed) - 1)
    assert not report.is_legal or report.torn_bytes > 0


def test_every_changed_byte_of_a_short_ledger_is_rejected_or_tears_the_last_line() -> None:
    scribe = Scribe(MemoryDisk()).play(["reset"])
    scribe.ledger.close()
    whole = scribe.disk.read()
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            report = check_ledger(bytes(changed))
            assert report.is_legal == (place == len(whole) - 1), (place, bit)


@pytest.mark.parametrize(
    ("claims", "found"),
    [
        ([PolicyClaim(1, 0, "digest 0"), PolicyClaim(2, 1), PolicyClaim(3, 1, "digest 1")], []),
        ([PolicyClaim(1, 0, "digest 1")], ["version 0 was committed with another digest"]),
        ([PolicyClaim(1, 2, "digest 2")], ["version 2 was committed with another digest"]),
        ([PolicyClaim(1, 7)], ["version 7 was never committed"]),
    ],
)
def test_samples_may_only_name_committed_versions(claims: list[PolicyClaim], found: list[str]) -> None:
    report = check_claims(check_ledger(b"".join(LINES)), claims)
    assert [finding.message for finding in report.findings] == found


def test_an_end_cut_off_is_legal_but_not_for_the_samples_made_after_it() -> None:
    report = check_ledger(b"".join(LINES[:-12]))
    assert report.is_legal
    assert not check_claims(report, [PolicyClaim(1, 3)]).is_legal
