"""The ledger: an append-only, hash-chained record of which policy version was installed when, and how it got there.

`append` says what happened and promises nothing; `sync` promises. That is all a writer needs to get right: a commit is
appended, synced, and only then is its version published. See `ledger_records` for what is written and `ledger_check`
for how it is verified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aengine.errors import LedgerError
from aengine.policy.ledger_check import LedgerReport, check_ledger
from aengine.policy.ledger_file import DiskFile, LedgerFile
from aengine.policy.ledger_records import CloseRecord, OpenRecord, Record, encode_line

__all__ = ["Ledger"]


class Ledger:
    """A ledger being written; made by `Ledger.open`.

    `append` may be called while `sync` runs in another thread. A disk that fails loses nothing: records are kept in
    memory until they are durable, and each `sync` first writes again what an earlier failure may have dropped (after
    a failed fsync the system may believe that lost pages are clean, so another fsync alone would prove nothing).
    """

    def __init__(self, path: Path, file: LedgerFile, report: LedgerReport, size: int, initial_version: int) -> None:
        self.path = path
        self.initial_version = initial_version
        """Number of the policy version that this run began with."""
        self._file = file
        self._seq, self._head = report.num_records, report.head
        self._durable_size = size
        """Bytes that are known to survive; the lines after them are in `_pending`."""
        self._pending: list[bytes] = []
        self._failure: OSError | None = None
        self._is_closed = False
        self._writing = threading.Lock()
        self._syncing = threading.Lock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        run_id: str,
        digest: str,
        version: int | None = None,
        open_file: Callable[[Path], LedgerFile] = DiskFile,
    ) -> Ledger:
        """Begin a run in the ledger at `path`: a new one, or one that is verified and continued. Blocks on the disk.

        `version` is the number of the weights with this `digest` that the run begins with. None takes the lowest
        number that is free: 0 in a new ledger, the last committed one if it has this digest, else the one after it.
        The choice is in `initial_version`.

        A torn last line, the trace of a crash, is cut off. Raises `LedgerError` for a ledger that fails its check
        (naming the first line that does), for a version that it rules out, if another writer has it open, and if it
        cannot be written.
        """
        path = Path(path)
        with _disk_errors(path):
            file = open_file(path)
            try:
                return cls._continue(path, file, run_id, version, digest)
            except BaseException:
                file.close()
                raise

    @classmethod
    def _continue(cls, path: Path, file: LedgerFile, run_id: str, version: int | None, digest: str) -> Ledger:
        data = file.read()
        report = check_ledger(data)
        if report.findings:
            first = report.findings[0]
            raise LedgerError(path, first.message, first.line)
        size = len(data) - report.torn_bytes
        file.truncate(size)
        number = _initial_version(path, report, version, digest)
        ledger = cls(path, file, report, size, number)
        ledger.append(
            OpenRecord(
                run_id=run_id,
                version=number,
                digest=digest,
                continues=report.head if report.num_records else None,
                torn_bytes=report.torn_bytes,
            )
        )
        ledger.sync()
        return ledger

    @property
    def failure(self) -> LedgerError | None:
        """Why the file cannot be written at the moment; None once a `sync` has got everything through."""
        return None if self._failure is None else self._error(self._failure)

    def append(self, record: Record) -> int:
        """Add a record and return its line number. Quick: it is handed to the system, not to the disk.

        A failing disk does not make it raise, since what happened has happened; the next `sync` raises. Raises
        `msgspec.ValidationError` for a record with a field of a wrong type, and `LedgerError` after `close`.
        """
        with self._writing:
            if self._is_closed:
                raise LedgerError(self.path, "it is closed")
            line, self._head = encode_line(self._seq + 1, record, self._head)
            self._seq += 1
            self._pending.append(line)
            if self._failure is None:
                try:
                    self._file.write(line)
                except OSError as cause:
                    self._failure = cause
            return self._seq

    def sync(self) -> None:
        """Return when every record appended before is durable. Blocks on the disk: not for the event loop's thread.

        Raises `LedgerError` with the `OSError` as its cause; then the fate of the records not durable before is open:
        each may be on the disk or not. They stay in the history, and the next `sync` tries again with all of them.
        """
        with self._syncing:
            self._sync()

    def close(self) -> None:
        """Record that the run ended in good order, make everything durable, and let go of the file. Idempotent.

        Raises `LedgerError` if that fails; the file is let go of all the same.
        """
        with self._syncing:
            if self._is_closed:
                return
            try:
                self.append(CloseRecord())
                self._sync()
            finally:
                self._is_closed = True
                self._file.close()

    def _sync(self) -> None:
        if not self._pending:
            return
        if self._is_closed:
            raise LedgerError(self.path, "it was closed before all of it was durable")
        try:
            num_lines, size = self._hand_over()
            self._file.sync()
        except OSError as cause:
            self._failure = cause
            raise self._error(cause) from cause
        with self._writing:
            del self._pending[:num_lines]
            self._durable_size += size

    def _hand_over(self) -> tuple[int, int]:
        """Make sure that the system has every pending line; returns how many lines and bytes those are."""
        with self._writing:
            data = b"".join(self._pending)
            if self._failure is not None:
                self._file.truncate(self._durable_size)
                self._file.write(data)
                self._failure = None
            return len(self._pending), len(data)

    def _error(self, cause: OSError) -> LedgerError:
        error = LedgerError(self.path, f"it cannot be written: {cause.strerror or cause}")
        error.__cause__ = cause
        return error


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError as cause:
        raise LedgerError(path, "another writer has it open") from cause
    except OSError as cause:
        raise LedgerError(path, f"it cannot be opened: {cause.strerror or cause}") from cause


def _initial_version(path: Path, report: LedgerReport, version: int | None, digest: str) -> int:
    last = report.last_version
    if last is None:
        return 0 if version is None else version
    if version is None:
        return last.number if digest == last.digest else last.number + 1
    if version < last.number:
        raise LedgerError(path, f"a run cannot begin at version {version}: version {last.number} is committed already")
    if version == last.number and digest != last.digest:
        raise LedgerError(path, f"version {version} is committed already, with other weights")
    return version
