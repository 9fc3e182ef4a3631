"""What an audit writes: one JSON object a line, a header first, then one for each sample; and what they add up to."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

import msgspec
from attrs import define, field
from msgspec import Struct

from aengine.audit.explanation import Explanation
from aengine.audit.machine import MachineFacts, differing_facts
from aengine.audit.record import SampleRecord, encode_record
from aengine.audit.verdict import Consistent, NotReproduced, OtherBits, Reproduced, Unauditable, Verdict
from aengine.errors import AuditError

__all__ = ["AuditHeader", "AuditLine", "AuditSummary", "ReportFile", "fingerprint"]


class AuditHeader(Struct, frozen=True, kw_only=True, tag="audit"):
    """Where the audit ran, on which file, and under which numerics."""

    format_version: Literal[1] = 1
    rollouts: str
    subject: str
    """Digest of what its samples have in common: header and digests of weights."""
    machine: MachineFacts
    machine_differences: tuple[str, ...]


class AuditLine(Struct, frozen=True, kw_only=True, tag="sample"):
    """One sample of the file: the `place`-th, counted from 0, whose record has this `fingerprint`."""

    place: int
    fingerprint: str
    prompt_id: str
    index: int
    verdict: Verdict
    explanation: Explanation | None = None
    oracle_difference: float | None = None
    """Largest distance of the recorded raw log-probabilities from a float64 pass in plain torch, where one was made."""
    oracle_agrees: bool = True

    @property
    def is_final(self) -> bool:
        """Whether another audit would find the same: what was missing may have come."""
        return not isinstance(self.verdict, Unauditable)


def fingerprint(record: SampleRecord) -> str:
    """Of all that a record says: a line of a report counts only for the very record it was written for."""
    return hashlib.sha256(encode_record(record)).hexdigest()[:16]


@define
class AuditSummary:
    """Counts over all samples that were looked at, those of an earlier run that was gone on with included."""

    samples: int = 0
    tokens: int = 0
    reproduced: int = 0
    other_bits: int = 0
    consistent: int = 0
    not_reproduced: int = 0
    unauditable: int = 0
    scored_only: int = 0
    """Of those reproduced, how many were drawn under a token mask, so that only `raw_logprobs` could be compared."""
    finish_unchecked: int = 0
    oracle_checked: int = 0
    oracle_failed: int = 0
    oracle_largest_difference: float = 0.0
    largest_difference: float = 0.0
    left_out: int = 0
    """Samples of the file that were not drawn for the audit."""
    seconds: float = 0.0
    explanations: Counter[str] = field(factory=Counter)
    """How often each sentence explains a sample."""

    def add(self, line: AuditLine) -> None:
        verdict = line.verdict
        self.samples += 1
        name = type(verdict).__struct_config__.tag
        assert isinstance(name, str)
        setattr(self, name, getattr(self, name) + 1)
        if isinstance(verdict, Reproduced):
            self.tokens += verdict.num_tokens
            self.scored_only += not verdict.is_redrawn
            self.finish_unchecked += verdict.finish_unchecked is not None
        elif isinstance(verdict, OtherBits | Consistent | NotReproduced):
            self.largest_difference = max(self.largest_difference, verdict.largest_difference or 0.0)
        if line.oracle_difference is not None:
            self.oracle_checked += 1
            self.oracle_failed += not line.oracle_agrees
            self.oracle_largest_difference = max(self.oracle_largest_difference, line.oracle_difference)
        if line.explanation is not None:
            self.explanations[line.explanation.sentence] += 1
        elif isinstance(verdict, NotReproduced | Unauditable):
            self.explanations[verdict.reason] += 1

    @property
    def is_proved(self) -> bool:
        return self.reproduced == self.samples and not self.oracle_failed

    def sentence(self) -> str:
        if self.consistent and self.consistent + self.reproduced == self.samples:
            return f"{self.samples} of {self.samples} samples are consistent; {self.reproduced} bit for bit"
        return f"{self.reproduced} of {self.samples} samples reproduced bit for bit"


_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[AuditHeader | AuditLine] = msgspec.json.Decoder(AuditHeader | AuditLine)


@define(eq=False)
class ReportFile:
    """A report being written, and what an interrupted audit had written to it. Use it as a context manager.

    A torn last line is cut off. Raises `AuditError` for a file that is something else, or the report on another
    file or from another kind of machine; and `OSError`.
    """

    path: Path
    header: AuditHeader
    done: dict[int, AuditLine] = field(factory=dict, init=False)
    """By place."""
    _file: BinaryIO = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._file = self.path.open("a+b")
        try:
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ReportFile:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, lines: Iterable[AuditLine]) -> None:
        self._file.write(b"".join(_ENCODER.encode(line) + b"\n" for line in lines))
        self._file.flush()

    def _resume(self) -> None:
        self._file.seek(0)
        whole, header = 0, None
        for content, behind in self._scan():
            whole = behind
            if isinstance(content, AuditHeader):
                header = content
            else:
                self.done[content.place] = content
        self._file.truncate(whole)
        if header is None:
            self._file.write(_ENCODER.encode(self.header) + b"\n")
            return
        if header.rollouts != self.header.rollouts:
            raise AuditError(f"{self.path} is the report on {header.rollouts}, not on {self.header.rollouts}")
        if header.subject != self.header.subject:
            raise AuditError(f"{self.path} is a report on {header.rollouts} with another header, or of other weights")
        if differences := differing_facts(header.machine, self.header.machine):
            raise AuditError(f"{self.path} was begun on another machine ({'; '.join(differences)})")

    def _scan(self) -> Iterator[tuple[AuditHeader | AuditLine, int]]:
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                content = _DECODER.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise AuditError(f"{self.path}, line {number} is not of an audit's report: {error}") from error
            if (number == 1) != isinstance(content, AuditHeader):
                raise AuditError(f"{self.path}, line {number}: a report has one header, in its first line")
            yield content, self._file.tell()
