"""A rollouts file: JSON Lines that a run appends to, and a later run goes on with."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
from attrs import Factory, asdict, define, field

from aengine.audit.record import Record, RolloutHeader, SampleRecord, decode_record, encode_record
from aengine.errors import RolloutFileError

__all__ = ["RolloutFile", "read_rollouts"]


def read_rollouts(path: str | Path) -> Iterator[Record]:
    """The records of a file in order; the torn last line of a killed run is left out.

    Raises `RolloutFileError`, naming the line, for a whole line that is no record.
    """
    with Path(path).open("rb") as file:
        yield from (record for record, _ in _scan(file, Path(path)))


def _scan(file: BinaryIO, path: Path) -> Iterator[tuple[Record, int]]:
    """Each record with the offset behind its line. A line without a newline was torn while it was written."""
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            record = decode_record(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RolloutFileError(f"{path}, line {number} is not a record of a rollouts file: {error}") from error
        if (number == 1) != isinstance(record, RolloutHeader):
            reason = "has no header in its first line" if number == 1 else f"has a second header in line {number}"
            raise RolloutFileError(f"{path} {reason}")
        yield record, file.tell()


@define(eq=False)
class RolloutFile:
    """A file being written, locked against a second writer. Use it as a context manager.

    Opening it makes the file, or reads what is there and cuts off a torn last line. A file that is still empty when
    it is closed was made for nothing and is removed. Raises `OSError` where the file cannot be written, and
    `RolloutFileError` where it is something else or another run is writing it.
    """

    path: Path = field(converter=Path)
    header: RolloutHeader | None = None
    _made: dict[str, _Made] = field(factory=dict, init=False)
    _file: BinaryIO = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._file = self.path.open("a+b")
        try:
            self._lock()
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RolloutFileError(f"{self.path} is being written by another run") from None

    def _resume(self) -> None:
        self._file.seek(0)
        whole = 0
        for record, behind in _scan(self._file, self.path):
            whole = behind
            if isinstance(record, RolloutHeader):
                self.header = record
            elif isinstance(record, SampleRecord):
                self._note(record)
        self._file.truncate(whole)

    def __enter__(self) -> RolloutFile:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.fstat(self._file.fileno()).st_size == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._file.close()

    def begin(self, header: RolloutHeader) -> None:
        """Write the header, or check that the file was begun with one that agrees.

        Raises `RolloutFileError` naming what differs; model name, machine and version number may.
        """
        if self.header is None:
            self.header = header
            self.append([header])
        elif found := _differences(self.header, header):
            raise RolloutFileError(
                f"{self.path} was begun with other settings ({'; '.join(found)}); give the same, or another output"
            )

    def append(self, records: Iterable[Record]) -> None:
        """Write the records as one piece and hand them to the system."""
        records = list(records)
        self._file.write(b"".join(map(encode_record, records)))
        self._file.flush()
        for record in records:
            if isinstance(record, SampleRecord):
                self._note(record)

    def made(self, prompt_id: str, prompt_token_ids: tuple[int, ...]) -> set[int]:
        """Indices of the samples that are there for a prompt.

        Raises `RolloutFileError` if those are of another prompt under this id.
        """
        made = self._made.get(prompt_id)
        if made is None:
            return set()
        if made.prompt_token_ids != prompt_token_ids:
            raise RolloutFileError(f"{self.path} has samples of another prompt under the id {prompt_id!r}")
        return made.indices

    def _note(self, record: SampleRecord) -> None:
        made = self._made.setdefault(record.prompt_id, _Made(record.prompt_token_ids))
        made.indices.add(record.index)


@define
class _Made:
    prompt_token_ids: tuple[int, ...]
    indices: set[int] = Factory(set)


def _differences(old: RolloutHeader, new: RolloutHeader) -> list[str]:
    """What would make samples of two runs incomparable, one clause each."""
    pairs = [
        ("policy digest", old.policy.digest[:12], new.policy.digest[:12]),
        ("dtype", old.dtype, new.dtype),
        ("numerics", old.numerics, new.numerics),
        ("eos_token_ids", old.eos_token_ids, new.eos_token_ids),
        ("max_sequence_len", old.max_sequence_len, new.max_sequence_len),
    ]
    before, after = asdict(old.params), asdict(new.params)
    pairs += [(name, before[name], after[name]) for name in before]
    return [f"{name}: {a!r} in the file, {b!r} now" for name, a, b in pairs if a != b]
