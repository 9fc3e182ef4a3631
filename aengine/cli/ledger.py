"""`aengine ledger`: verify a ledger offline, and read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from attrs import asdict
from rich.console import Console
from rich.text import Text

from aengine.audit.record import SampleRecord
from aengine.audit.rollout_file import read_rollouts
from aengine.cli.report import DebugOption, JsonOption, errors_in_one_sentence
from aengine.policy.ledger_check import Finding, LedgerReport, PolicyClaim, check_claims, check_ledger
from aengine.policy.ledger_records import (
    AckRecord,
    AuditRecord,
    CloseRecord,
    CommitRecord,
    FailureRecord,
    FenceRecord,
    InvalidationRecord,
    Line,
    OpenRecord,
    TransitionRecord,
    UpdateRecord,
    WithdrawnRecord,
    decode_line,
)

__all__ = ["app"]

MAX_FINDINGS = 20

app = typer.Typer(help="The ledger: which policy version was installed when.", no_args_is_help=True)

LedgerArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A ledger.", exists=True, dir_okay=False)]
RolloutsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also check the versions its samples name.", exists=True, dir_okay=False),
]


@app.command("check")
def check(
    file: LedgerArgument, rollouts: RolloutsOption = None, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Verify the hash chain and the rules of the history. Exit status 0 if legal, 1 if not, 2 for wrong usage."""
    with errors_in_one_sentence(debug):
        report = check_ledger(file.read_bytes())
        if rollouts is not None:
            report = check_claims(report, _claims(rollouts))
        if as_json:
            typer.echo(msgspec.json.encode({"legal": report.is_legal, **asdict(report)}).decode())
        else:
            _print(file, report, rollouts)
        raise typer.Exit(0 if report.is_legal else 1)


@app.command("show")
def show(file: LedgerArgument, debug: DebugOption = False) -> None:
    """Print the history, a line for each record, with what `check` finds wrong under the record it is about."""
    with errors_in_one_sentence(debug):
        data, console = file.read_bytes(), _console()
        report = check_ledger(data)
        findings = defaultdict(list)
        for finding in report.findings:
            findings[finding.line].append(finding)
        for number, raw in enumerate(data.split(b"\n")[:-1], 1):
            console.print(Text(f"{number:>5}  {_say(raw)}"))
            for finding in findings[number]:
                console.print(Text(f"       ↑ {_plain(finding.message)}", "red"))
        for fact in _ending(report):
            console.print(Text(f"       {fact}", "yellow"))


def _claims(path: Path) -> Iterator[PolicyClaim]:
    """What a rollouts file says about versions: each of its samples, for tokens and KV, and the policies it names."""
    for line, record in enumerate(read_rollouts(path), 1):
        if isinstance(record, SampleRecord):
            versions = {span.version for span in record.version_spans} | {span.version for span in record.kv_spans}
            for version in sorted(versions):
                yield PolicyClaim(line, version)
        else:
            yield PolicyClaim(line, record.policy.number, record.policy.digest)


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)


def _print(file: Path, report: LedgerReport, rollouts: Path | None) -> None:
    console = _console()
    console.print(Text.assemble(f"{file}: ", ("legal", "bold green") if report.is_legal else ("illegal", "bold red")))
    for fact in (*_facts(report), *_ending(report)):
        console.print(Text(f"  {fact}"))
    if rollouts is not None and all(finding.file == "ledger" for finding in report.findings):
        console.print(Text(f"  every version that {rollouts} names was committed"))
    for finding in report.findings[:MAX_FINDINGS]:
        console.print(Text(f"  {_where(finding)}: {_plain(finding.message)}", "red"))
    if len(report.findings) > MAX_FINDINGS:
        console.print(Text(f"  and {len(report.findings) - MAX_FINDINGS} more", "red"))


def _facts(report: LedgerReport) -> Iterator[str]:
    yield f"{_count(report.num_records, 'record')} in {_count(report.num_runs, 'run')}"
    if report.versions:
        first, last = report.versions[0], report.versions[-1]
        yield f"versions {first.number} to {last.number}, the last with digest {last.digest[:12]}"
    yield (
        f"{_count(report.num_committed, 'update')} committed, "
        f"{report.num_withdrawn} withdrawn, {report.num_failed} failed"
    )


def _ending(report: LedgerReport) -> Iterator[str]:
    if report.unfinished is not None:
        yield f"unfinished at the end: {report.unfinished}"
    elif report.num_runs and not report.is_closed:
        yield "the last run was not closed: it goes on, or was killed"
    if report.torn_bytes:
        yield f"torn last line of {_count(report.torn_bytes, 'byte')}, which counts as not written"


def _where(finding: Finding) -> str:
    return f"line {finding.line}" if finding.file == "ledger" else f"rollouts, line {finding.line}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _plain(text: str) -> str:
    """On one line, and without characters that command a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def _say(raw: bytes) -> str:
    try:
        line = decode_line(raw)
    except ValueError:
        return "cannot be read"
    return f"{line.time:%Y-%m-%d %H:%M:%S.%f}  {_plain(_sentence(line))}"


def _sentence(line: Line) -> str:
    return _SENTENCES[type(line.record)](line.record)


def _opened(record: OpenRecord) -> str:
    torn = f", after cutting off a torn line of {_count(record.torn_bytes, 'byte')}" if record.torn_bytes else ""
    return f"run {record.run_id} begins at version {record.version}, digest {record.digest[:12]}{torn}"


def _moved(record: TransitionRecord) -> str:
    version = "no version" if record.version is None else f"version {record.version}"
    return f"{record.source.value} → {record.dest.value} by {record.trigger.value}, {version}{_because(record.reason)}"


def _committed(record: CommitRecord) -> str:
    step = "" if record.train_step is None else f", train step {record.train_step}"
    return f"update {record.update} commits version {record.version}, digest {record.digest[:12]}{step}"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


_SENTENCES: dict[type, Callable[[Any], str]] = {
    OpenRecord: _opened,
    TransitionRecord: _moved,
    UpdateRecord: lambda r: f"update {r.update} to version {r.version} ({r.mode}) is {r.stage}",
    CommitRecord: _committed,
    WithdrawnRecord: lambda r: f"the commit in line {r.commit} is withdrawn{_because(r.reason)}",
    AckRecord: lambda r: (
        f"update {r.update} is acknowledged: version {r.version}, {_count(r.pages_invalidated, 'page')} invalidated, "
        f"{_count(r.requests_affected, 'request')} affected"
    ),
    InvalidationRecord: lambda r: (
        f"cache invalidated, epoch {r.epoch}: {_count(r.entries, 'page')} dropped{_because(r.reason)}"
    ),
    FailureRecord: lambda r: (
        f"update {r.update} fails in {r.stage}{', weights torn' if r.torn else ''}{_because(r.reason)}"
    ),
    FenceRecord: lambda r: f"fenced{_because(r.reason)}",
    AuditRecord: lambda r: f"sample {r.index} of {r.request_id} did not reproduce{_because(r.reason)}",
    CloseRecord: lambda r: "run closed",
}
