"""The file under a ledger."""

from __future__ import annotations

import fcntl
import io
import os
from pathlib import Path
from typing import Protocol

__all__ = ["DiskFile", "LedgerFile"]


class LedgerFile(Protocol):
    """What a ledger needs of its file; every method may raise `OSError`."""

    def read(self) -> bytes:
        """All of it."""

    def write(self, data: bytes) -> None:
        """Append all of `data`, or raise; then a part of it may be there."""

    def truncate(self, size: int) -> None:
        """Cut it down to `size` bytes; later writes append there."""

    def sync(self) -> None:
        """Return once what was written survives a loss of power."""

    def close(self) -> None: ...


class DiskFile:
    """A file on a disk, made if it is not there, locked against a second writer as long as it is open."""

    def __init__(self, path: Path) -> None:
        self._raw = io.FileIO(path, "a+")
        try:
            fcntl.flock(self._raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sync_directory(path.parent)
        except BaseException:
            self._raw.close()
            raise

    def read(self) -> bytes:
        self._raw.seek(0)
        return self._raw.readall()

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._raw.write(rest) :]

    def truncate(self, size: int) -> None:
        self._raw.truncate(size)

    def sync(self) -> None:
        os.fsync(self._raw.fileno())

    def close(self) -> None:
        self._raw.close()


def _sync_directory(path: Path) -> None:
    """A new file survives a loss of power only once its directory has been synced too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
