"""The offline check of a ledger: is every line as it was written, and is the history they tell legal?

What it proves: no line was edited, dropped, swapped or put in without the whole rest being written anew, and the rules
of `ledger_rules` hold. What it cannot prove: that nothing was cut off the end, for that is what a crash does too.
Rollouts close that gap: a sample names its version, and that version must be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from attrs import Factory, define, evolve, frozen

from aengine.policy.ledger_history import CommittedVersion, History
from aengine.policy.ledger_records import GENESIS, Line, OpenRecord, decode_line
from aengine.policy.ledger_rules import follow

__all__ = ["Finding", "LedgerReport", "PolicyClaim", "check_claims", "check_ledger"]


@frozen
class Finding:
    """Something that is not as it must be. Lines count from 1."""

    line: int
    message: str
    file: Literal["ledger", "rollouts"] = "ledger"


@frozen
class LedgerReport:
    """What a ledger holds and what is wrong with it. Counts and versions are those of the lines that could be read."""

    num_records: int
    num_runs: int
    num_committed: int
    num_withdrawn: int
    num_failed: int
    versions: tuple[CommittedVersion, ...]
    """What samples may name, in order: initial versions of runs, and commits that were not withdrawn."""
    is_closed: bool
    """Whether the last run was closed in good order; one that still goes on is not."""
    unfinished: str | None
    """What was under way at the end. Legal."""
    torn_bytes: int
    """Length of a torn last line, which is no record and counts as not written. Legal."""
    head: str
    """`hash` of the last line."""
    findings: tuple[Finding, ...]

    @property
    def is_legal(self) -> bool:
        return not self.findings

    @property
    def last_version(self) -> CommittedVersion | None:
        return self.versions[-1] if self.versions else None


@frozen
class PolicyClaim:
    """What a line of a rollouts file says: that this version was installed, with this digest where it gives one."""

    line: int
    version: int
    digest: str | None = None


@define
class _Chain:
    """What the next line must continue."""

    seq: int = 0
    head: str = GENESIS
    findings: list[Finding] = Factory(list)

    def complain(self, line: int, message: str) -> None:
        self.findings.append(Finding(line, message))

    def add(self, number: int, raw: bytes) -> Line | None:
        """The line, if it is one. After a break the chain goes on from what the line says."""
        try:
            line = decode_line(raw)
        except ValueError as error:
            self.complain(number, str(error))
            return None
        if line.seq != self.seq + 1:
            self.complain(number, f"seq is {line.seq} after {self.seq}: lines were dropped, repeated or moved")
        if line.prev != self.head:
            self.complain(number, "the hash of the line before is another: the chain is broken")
        if isinstance(line.record, OpenRecord) and line.record.continues != (None if number == 1 else line.prev):
            self.complain(number, "the run does not continue from the line before")
        self.seq, self.head = line.seq, line.hash
        return line


def check_ledger(data: bytes) -> LedgerReport:
    """Check the bytes of a ledger file. Never raises for what is in them."""
    *lines, tail = data.split(b"\n")
    chain, history = _Chain(), History()
    for number, raw in enumerate(lines, 1):
        line = chain.add(number, raw)
        if line is not None:
            for message in follow(history, number, line.record):
                chain.complain(number, message)
    return LedgerReport(
        num_records=len(lines),
        num_runs=history.num_runs,
        num_committed=history.num_committed,
        num_withdrawn=history.num_withdrawn,
        num_failed=history.num_failed,
        versions=tuple(history.versions),
        is_closed=history.num_runs > 0 and not history.is_open,
        unfinished=history.unfinished(),
        torn_bytes=len(tail),
        head=chain.head,
        findings=tuple(chain.findings),
    )


def check_claims(report: LedgerReport, claims: Iterable[PolicyClaim]) -> LedgerReport:
    """The report with what rollouts say against it: versions that were never committed, or with another digest."""
    digests = {version.number: version.digest for version in report.versions}
    return evolve(report, findings=report.findings + tuple(_contradictions(digests, claims)))


def _contradictions(digests: dict[int, str], claims: Iterable[PolicyClaim]) -> Iterator[Finding]:
    for claim in claims:
        if claim.version not in digests:
            yield Finding(claim.line, f"version {claim.version} was never committed", "rollouts")
        elif claim.digest is not None and claim.digest != digests[claim.version]:
            yield Finding(claim.line, f"version {claim.version} was committed with another digest", "rollouts")
