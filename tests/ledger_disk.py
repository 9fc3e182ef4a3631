"""A disk that can fill up, fail and forget, and ledgers on it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import Factory, define

from aengine.policy.ledger import Ledger

PATH = Path("run.ledger")


@define(eq=False)
class MemoryDisk:
    """One file in memory. `durable` is what a loss of power leaves at the least, `content` what it may leave.

    A failed sync marks what it did not write as clean, as Linux does, so only writing it again makes it durable.
    """

    content: bytearray = Factory(bytearray)
    durable: bytearray = Factory(bytearray)
    room: int | None = None
    """Bytes that can still be written; None for no limit."""
    sync_fails: bool = False
    is_open: bool = False
    on_sync: Callable[[], None] = lambda: None
    _dirty_from: int = 0

    def open(self, path: Path) -> MemoryDisk:
        if self.is_open:
            raise BlockingIOError(errno.EAGAIN, "locked")
        self.is_open = True
        return self

    def read(self) -> bytes:
        return bytes(self.content)

    def write(self, data: bytes) -> None:
        part = data if self.room is None else data[: self.room]
        self.content += part
        if self.room is not None:
            self.room -= len(part)
        if len(part) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, size: int) -> None:
        if self.room is not None:
            self.room += len(self.content) - size
        del self.content[size:], self.durable[size:]
        self._dirty_from = min(self._dirty_from, size)

    def sync(self) -> None:
        size = len(self.content)
        self.on_sync()
        dirty_from, self._dirty_from = self._dirty_from, size
        if self.sync_fails:
            raise OSError(errno.EIO, "Input/output error")
        self.durable.extend(bytes(max(0, dirty_from - len(self.durable))))
        self.durable[dirty_from:size] = self.content[dirty_from:size]

    def close(self) -> None:
        self.is_open = False

    def lose_power(self, kept: int | None = None) -> MemoryDisk:
        """The disk after the machine came back: `kept` bytes, or no more than was durable."""
        left = self.content[: len(self.durable) if kept is None else kept]
        return MemoryDisk(bytearray(left), bytearray(left), dirty_from=len(left))


def open_ledger(disk: MemoryDisk, **fields: Any) -> Ledger:
    return Ledger.open(PATH, **{"run_id": "run", "digest": "digest 0", "open_file": disk.open} | fields)
