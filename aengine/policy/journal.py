"""Where everything that happens to the policy is written down: the event stream, and the ledger if there is one."""

from __future__ import annotations

from attrs import define, field

from aengine.events import EventLog
from aengine.policy.ledger import Ledger
from aengine.policy.ledger_records import InvalidationRecord, Record
from aengine.worker import Outcome, Worker

__all__ = ["Journal"]


@define(eq=False)
class Journal:
    """`append` tells the readers of events and the ledger; `durable` returns when the ledger is on the disk."""

    events: EventLog
    ledger: Ledger | None = None
    num_invalidated: int = field(default=0, init=False)
    """Entries of the prefix index that updates and resets have dropped."""
    _writer: Worker | None = field(default=None, init=False)

    def append(self, record: Record) -> int:
        """The record's line number in the ledger; 0 without one."""
        if isinstance(record, InvalidationRecord):
            self.num_invalidated += record.entries
        self.events.append(record)
        return 0 if self.ledger is None else self.ledger.append(record)

    async def durable(self) -> Outcome[None]:
        """Bring the ledger to the disk, in a thread of its own. Runs to its end whatever happens to the caller: a
        failure and a cancellation are in the outcome."""
        if self.ledger is None:
            return Outcome(None, None, None)
        if self._writer is None:
            self._writer = Worker("aengine ledger")
        return await self._writer.finish(self.ledger.sync)

    async def ready(self) -> None:
        """Refuse an update while the ledger cannot be written: raises `LedgerError` unless it can be again."""
        if self.ledger is None or self.ledger.failure is None:
            return
        outcome = await self.durable()
        for reason in (outcome.cancelled, outcome.error):
            if reason is not None:
                raise reason

    def close(self) -> None:
        """End the event stream, and the ledger in good order. Raises `LedgerError` if that cannot be written."""
        self.events.close()
        if self._writer is not None:
            self._writer.close()
        if self.ledger is not None:
            self.ledger.close()
