"""What a ledger says: the kinds of records, and how a record becomes a line.

A line is one JSON object: `seq` (its line number, from 1), `time` (wall clock, UTC), `record` (tagged by `kind`),
`prev` (the `hash` of the line before, `GENESIS` for the first) and `hash`, last: the SHA-256 of everything in the line
that stands before it. So a line vouches for itself and, through `prev`, for every line before it.
"""

from __future__ import annotations

import hashlib
import operator
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec

from statemachines.policy import PolicyState, Trigger

__all__ = [
    "FORMAT_VERSION",
    "GENESIS",
    "AckRecord",
    "AuditRecord",
    "CloseRecord",
    "CommitRecord",
    "FailureRecord",
    "FenceRecord",
    "InvalidationRecord",
    "Line",
    "OpenRecord",
    "Record",
    "TransitionRecord",
    "UpdateRecord",
    "UpdateStage",
    "WithdrawnRecord",
    "decode_line",
    "encode_line",
]

FORMAT_VERSION = 1
GENESIS = "0" * 64
REASON_LIMIT = 1000
"""Characters kept of a reason: it is often an exception's message, and those can be of any length."""
_END = len(GENESIS) + len('"}')

UpdateStage = Literal["staged", "draining", "swapping"]
Digest = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Record(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=lambda name: name.removesuffix("Record").lower(),
):
    """Base of all kinds. `update` is the ordinal of an update within its run, counted from 1 as updates arrive."""


class OpenRecord(_Record, frozen=True, kw_only=True):
    """A run begins, Serving at `version`."""

    run_id: str
    format: int = FORMAT_VERSION
    version: Count
    digest: Digest
    continues: str | None = None
    """`hash` of the last line of the run before, None in a new ledger."""
    torn_bytes: Count = 0
    """Length of the torn last line that was cut off before this run began."""


class TransitionRecord(_Record, frozen=True, kw_only=True):
    """The policy machine changed state. `version` is the number before or after it, None where that is unknown."""

    trigger: Trigger
    source: PolicyState
    dest: PolicyState
    version: Count | None
    reason: str = ""


class UpdateRecord(_Record, frozen=True, kw_only=True):
    """An update reached a stage; written after the transition that brought it there. `version` is its target."""

    update: Count
    stage: UpdateStage
    version: Count
    mode: str


class CommitRecord(_Record, frozen=True, kw_only=True):
    """Every holder of weights has flipped. Must be durable before the version is published."""

    update: Count
    version: Count
    digest: Digest
    train_step: int | None = None
    previous: Count


class WithdrawnRecord(_Record, frozen=True, kw_only=True):
    """The commit in line `commit` may be on the disk, but its version was never published."""

    commit: Count
    reason: str


class AckRecord(_Record, frozen=True, kw_only=True):
    """The caller may be told. A no-op (unchanged weights) acknowledges the version that was installed before."""

    update: Count
    version: Count
    pages_invalidated: Count
    requests_affected: Count


class InvalidationRecord(_Record, frozen=True, kw_only=True):
    """The prefix index was emptied; no KV of an epoch below `epoch` can be matched after this."""

    reason: str
    entries: Count
    epoch: Count


class FailureRecord(_Record, frozen=True, kw_only=True):
    """An update ended without a commit. `torn`: it left weights that no version describes."""

    update: Count
    stage: str
    torn: bool
    reason: str


class FenceRecord(_Record, frozen=True, kw_only=True):
    """The weights are torn: no sample is made until a full update commits."""

    reason: str


class AuditRecord(_Record, frozen=True, kw_only=True):
    """A sample that the audit in the engine replayed is not what its labels say."""

    request_id: str
    index: Count
    verdict: str
    reason: str


class CloseRecord(_Record, frozen=True, kw_only=True):
    """The run ended in good order."""


Record = (
    OpenRecord
    | TransitionRecord
    | UpdateRecord
    | CommitRecord
    | WithdrawnRecord
    | AckRecord
    | InvalidationRecord
    | FailureRecord
    | FenceRecord
    | AuditRecord
    | CloseRecord
)


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line, read or about to be written."""

    seq: int
    time: Annotated[datetime, msgspec.Meta(tz=True)]
    record: Record
    prev: str
    hash: str = ""


_ENCODER = msgspec.json.Encoder(enc_hook=operator.index)  # integers of numpy and torch, too
_DECODER = msgspec.json.Decoder(Line)


def encode_line(seq: int, record: Record, prev: str) -> tuple[bytes, str]:
    """The line, newline included, and its hash. Raises `msgspec.ValidationError` for a field of a wrong type."""
    unsigned = _ENCODER.encode(Line(seq=seq, time=datetime.now(UTC), record=_with_plain_reason(record), prev=prev))
    _DECODER.decode(unsigned)
    signed = unsigned.removesuffix(b'"}')
    digest = hashlib.sha256(signed).hexdigest()
    return signed + digest.encode() + b'"}\n', digest


def decode_line(raw: bytes) -> Line:
    """Read a line without its newline. Raises `ValueError` if it is not a record, or not as it was written."""
    line = _DECODER.decode(raw)
    if line.hash != hashlib.sha256(raw[:-_END]).hexdigest():
        raise ValueError("the line does not match its own hash")
    return line


def _with_plain_reason(record: Record) -> Record:
    """Cut to `REASON_LIMIT`, and without the lone surrogates of undecodable file names, which JSON cannot carry."""
    if isinstance(
        record, TransitionRecord | WithdrawnRecord | InvalidationRecord | FailureRecord | FenceRecord | AuditRecord
    ):
        plain = record.reason[:REASON_LIMIT].encode(errors="replace").decode()
        return record if plain == record.reason else msgspec.structs.replace(record, reason=plain)
    return record
