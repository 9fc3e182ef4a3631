"""The queue of updates: one at a time, in order of arrival, in a task of the engine's own."""

from __future__ import annotations

from collections import deque

from aengine.errors import EngineError
from aengine.policy.pending import PendingUpdate, WeightUpdateAck
from aengine.policy.update import Transaction
from aengine.signal import Signal

__all__ = ["WeightUpdater"]


class WeightUpdater:
    """Owner of the queue of updates and of the one under way."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._queue: deque[PendingUpdate] = deque()
        self._current: PendingUpdate | None = None
        self._num_arrived = 0
        self._arrived = Signal()

    async def submit(self, update: PendingUpdate) -> WeightUpdateAck:
        """Queue an update and await its outcome. Cancelled before the flip, the update is withdrawn and nothing has
        changed when this raises; cancelled later, it completes on its own."""
        self._num_arrived += 1
        update.ordinal = self._num_arrived
        self._queue.append(update)
        self._arrived.set()
        try:
            while not update.is_settled:
                await update.settled.wait()
        except BaseException:
            self._withdraw(update, "its caller was cancelled")
            raise
        return update.outcome()

    async def run(self) -> None:
        """Run queued updates until cancelled."""
        while True:
            while self._queue:
                self._current = self._queue.popleft()
                try:
                    await self._settle(self._current)
                finally:
                    self._current = None
            await self._arrived.wait()

    def withdraw_all(self, error: EngineError) -> None:
        """Withdraw every update that has not come to its flip; their callers get `error`."""
        for update in [*self._queue, *([self._current] if self._current else [])]:
            if not self._is_past_withdrawal(update):
                update.settle(error=error)
                self._withdraw(update, str(error))

    def _is_past_withdrawal(self, update: PendingUpdate) -> bool:
        """After the flip an update completes; one that writes in place may be stopped while it writes."""
        return update.stage == "commit" or (update.stage == "swap" and not update.in_place)

    def _withdraw(self, update: PendingUpdate, reason: str) -> None:
        if self._is_past_withdrawal(update):
            return
        update.withdrawn = f"withdrawn: {reason}"
        if update is self._current:
            if update.stage == "drain":
                self._transaction.leave_drain(update)
            update.scope.cancel()
        elif update in self._queue:
            self._queue.remove(update)
            self._fail(update, self._transaction.failure(update, update.withdrawn))

    async def _settle(self, update: PendingUpdate) -> None:
        with update.scope:
            try:
                update.settle(ack=await self._transaction.run(update))
            except EngineError as error:
                self._fail(update, error)
            except BaseException as error:
                self._fail(update, error)
                raise
        if update.late_cancellation is not None:
            raise update.late_cancellation

    def _fail(self, update: PendingUpdate, error: BaseException) -> None:
        self._transaction.record_failure(update, error)
        if not isinstance(error, EngineError):
            reason = update.withdrawn or "the engine was stopped"
            error = self._transaction.failure(update, reason)
        update.settle(error=error)
