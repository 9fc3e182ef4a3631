"""`aengine ledger` says what a ledger holds and what is wrong with it, for people, for programs and by exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from ledger_support import Scribe
from typer.testing import CliRunner

from aengine.audit.machine import machine_facts
from aengine.audit.record import (
    PolicyRecord,
    Record,
    RolloutHeader,
    SampleRecord,
    encode_record,
)
from aengine.cli.main import app
from aengine.model.spec import ModelSpec
from aengine.outputs import KVSpan, VersionSpan
from aengine.params import SamplingParams
from aengine.policy.ledger_records import AckRecord, FailureRecord
from aengine.policy.version import PolicyVersion
from aengine.testing import TINY

ONE_OF_EACH = ["commit", "not durable", "pause", "resume", "no-op", "reset", "audit", "torn", "refused", "commit"]


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["ledger", *map(str, args)])


def written(path: Path, events: list[str], *, close: bool = True) -> Path:
    scribe = Scribe().play(events)
    if close:
        scribe.ledger.close()
    path.write_bytes(scribe.disk.read())
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Versions 0 to 2 with digests "digest 0", "digest 1" and "digest 3"."""
    return written(tmp_path / "run.ledger", ONE_OF_EACH)


def header(number: int = 0, digest: str = "digest 0") -> RolloutHeader:
    return RolloutHeader(
        model="tiny",
        spec=ModelSpec.from_config(TINY),
        eos_token_ids=(),
        max_sequence_len=512,
        policy=PolicyVersion(number, digest),
        dtype="float32",
        numerics="invariant",
        is_shared=False,
        products={},
        operators={},
        unverified=(),
        params=SamplingParams(),
        machine=machine_facts(),
    )


def sample(token_version: int, kv_version: int) -> SampleRecord:
    return SampleRecord(
        prompt_id="p",
        request_id="r",
        index=0,
        prompt_token_ids=(1,),
        token_ids=(2,),
        text=None,
        logprobs=(-1.0,),
        raw_logprobs=(-1.0,),
        finish_reason="length",
        stop_reason=None,
        version_spans=(VersionSpan(token_version, 0, 1),),
        kv_spans=(KVSpan(kv_version, 0, 1, 0, 1),),
        seed=1,
        params=SamplingParams(),
        numerics="invariant",
        num_cached_tokens=0,
        num_preemptions=0,
    )


def rollouts(path: Path, *records: Record) -> Path:
    path.write_bytes(b"".join(map(encode_record, records)))
    return path


# ---- check


def test_a_legal_ledger_is_summed_up_in_a_few_lines(ledger: Path) -> None:
    result = run("check", ledger)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{ledger}: legal",
        "  50 records in 1 run",
        "  versions 0 to 2, the last with digest digest 3",
        "  2 updates committed, 1 withdrawn, 3 failed",
    ]


def test_what_a_killed_run_leaves_is_legal_and_named(tmp_path: Path) -> None:
    path = written(tmp_path / "run.ledger", ["commit"], close=False)
    whole = path.read_bytes()
    assert "the last run was not closed" in run("check", path).stdout
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:7]) + b"{")
    result = run("check", path)
    assert result.exit_code == 0
    assert "unfinished at the end: version 1 is committed, but nothing says yet" in result.stdout
    assert "torn last line of 1 byte, which counts as not written" in result.stdout


def test_an_empty_ledger_is_legal(tmp_path: Path) -> None:
    result = run("check", written(tmp_path / "run.ledger", [], close=False))
    assert result.exit_code == 0
    (tmp_path / "empty").touch()
    result = run("check", tmp_path / "empty")
    assert (result.exit_code, "0 records in 0 runs" in result.stdout) == (0, True)


def test_a_damaged_ledger_is_illegal_and_the_line_named(ledger: Path) -> None:
    ledger.write_bytes(ledger.read_bytes().replace(b'"version":1', b'"version":9', 1))
    result = run("check", ledger)
    assert result.exit_code == 1
    assert f"{ledger}: illegal" in result.stdout
    assert "  line 2: the line does not match its own hash" in result.stdout


def test_many_findings_are_cut_short(ledger: Path) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(reversed(lines)))
    result = run("check", ledger)
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) < 30
    assert result.stdout.splitlines()[-1].endswith("more")


def test_the_report_as_json_holds_everything(ledger: Path) -> None:
    result = run("check", ledger, "--json")
    report: dict[str, Any] = json.loads(result.stdout)
    assert (result.exit_code, report["legal"], report["findings"], report["is_closed"]) == (0, True, [], True)
    assert report["versions"][1] == {"number": 1, "digest": "digest 1", "line": 7}
    ledger.write_bytes(ledger.read_bytes()[200:])
    result = run("check", ledger, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["legal"], report["findings"][0]["line"]) == (1, False, 1)


# ---- check --rollouts


def test_samples_of_committed_versions_agree(ledger: Path, tmp_path: Path) -> None:
    file = rollouts(
        tmp_path / "rollouts.jsonl",
        header(),
        sample(0, 0),
        PolicyRecord(policy=PolicyVersion(1, "digest 1", 12)),
        sample(1, 0),
        PolicyRecord(policy=PolicyVersion(2, "digest 3")),
        sample(2, 2),
    )
    result = run("check", ledger, "--rollouts", file)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"  every version that {file} names was committed"


@pytest.mark.parametrize(
    ("records", "line", "message"),
    [
        ([header(), sample(7, 0)], 2, "version 7 was never committed"),
        ([header(), sample(0, 7)], 2, "version 7 was never committed"),
        ([header(0, "digest 9")], 1, "version 0 was committed with another digest"),
        ([header(), PolicyRecord(policy=PolicyVersion(2, "digest 2"))], 2, "version 2 was committed with another"),
    ],
)
def test_samples_without_a_commit_or_with_another_digest_are_found(
    ledger: Path, tmp_path: Path, records: list[Record], line: int, message: str
) -> None:
    result = run("check", ledger, "--rollouts", rollouts(tmp_path / "rollouts.jsonl", *records))
    assert result.exit_code == 1
    assert f"rollouts, line {line}: {message}" in result.stdout


def test_samples_tell_that_the_end_of_a_ledger_was_cut_off(ledger: Path, tmp_path: Path) -> None:
    file = rollouts(tmp_path / "rollouts.jsonl", header(), sample(2, 2))
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:15]))
    assert run("check", ledger).exit_code == 0
    assert run("check", ledger, "--rollouts", file).exit_code == 1


def test_a_damaged_rollouts_file_is_an_error_in_one_sentence(ledger: Path, tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text("nonsense\n")
    result = run("check", ledger, "--rollouts", tmp_path / "rollouts.jsonl")
    assert result.exit_code == 1
    assert "line 1 is not a record of a rollouts file" in result.stderr
    assert "legal" not in result.stdout


@pytest.mark.parametrize("args", [["check"], ["check", "missing"], ["check", "."], ["show", "missing"], ["nonsense"]])
def test_wrong_usage_has_status_2(args: list[str]) -> None:
    assert run(*args).exit_code == 2


# ---- show


def test_the_history_is_shown_a_line_for_each_record(ledger: Path) -> None:
    result = run("show", ledger)
    shown = result.stdout.splitlines()
    assert (result.exit_code, len(shown)) == (0, len(ledger.read_bytes().splitlines()))
    for sentence in (
        "run run begins at version 0, digest digest 0",
        "update 1 to version 1 (wait) is staged",
        "Serving → Draining by drain, version 0",
        "update 1 commits version 1, digest digest 1",
        "Swapping → Invalidated by commit, version 1",
        "cache invalidated, epoch 1: 3 pages dropped: update",
        "update 1 is acknowledged: version 1, 3 pages invalidated, 2 requests affected",
        "the commit in line 17 is withdrawn: fsync failed",
        "update 2 fails in commit: it had to be",
        "Swapping → Invalidated by fail, no version",
        "fenced: torn",
        "update 4 fails in swap, weights torn: it had to be",
        "run closed",
    ):
        assert any(line.endswith(sentence) for line in shown), sentence


def test_findings_stand_under_the_line_they_are_about(ledger: Path) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join([*lines[:3], b"{}\n", *lines[4:]]))
    shown = run("show", ledger).stdout.splitlines()
    place = next(number for number, line in enumerate(shown) if "cannot be read" in line)
    assert shown[place].split() == ["4", "cannot", "be", "read"]
    assert "↑ Object missing required field" in shown[place + 1]


def test_what_a_record_says_cannot_command_the_terminal(tmp_path: Path) -> None:
    scribe = Scribe()
    scribe.ledger.append(FailureRecord(update=1, stage="stage", torn=False, reason="[bold]\x1b[2J\nred\x9b0m"))
    scribe.ledger.append(AckRecord(update=2, version=0, pages_invalidated=1, requests_affected=1))
    (tmp_path / "run.ledger").write_bytes(scribe.disk.read())
    result = run("show", tmp_path / "run.ledger")
    assert "fails in stage: [bold] [2J red 0m" in result.stdout
    assert "1 page invalidated, 1 request affected" in result.stdout
    assert "\x1b" not in result.stdout
