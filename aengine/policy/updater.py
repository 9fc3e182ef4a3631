"""The queue of updates: one at a time, in order of arrival, in a task of the engine's own."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Literal

import anyio.to_thread
from attrs import frozen

from aengine.errors import EngineDeadError, EngineError
from aengine.policy.pending import PendingUpdate, WeightUpdateAck
from aengine.policy.update import Transaction
from aengine.signal import Signal

__all__ = ["UpdateOutcome", "UpdateTotals", "WeightUpdater"]

logger = logging.getLogger(__name__)

UpdateOutcome = Literal["committed", "failed", "fenced"]
"""`"failed"`: everything is as before; `"fenced"`: weights were torn, and the engine waits for a full update."""


@frozen
class UpdateTotals:
    """How many updates had one outcome, and the seconds they took from their turn to it."""

    count: int = 0
    seconds: float = 0.0


class WeightUpdater:
    """Owner of the queue of updates and of the one under way."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._queue: deque[PendingUpdate] = deque()
        self._current: PendingUpdate | None = None
        self._num_arrived = 0
        self._arrived = Signal()
        self.totals: dict[UpdateOutcome, UpdateTotals] = {}

    def enqueue(self, update: PendingUpdate) -> None:
        self._num_arrived += 1
        update.ordinal = self._num_arrived
        self._queue.append(update)
        self._arrived.set()

    async def submit(self, update: PendingUpdate) -> WeightUpdateAck:
        """Queue an update and await its outcome. Cancelled before the flip, the update is withdrawn and nothing has
        changed when this raises; cancelled later, it completes on its own."""
        self.enqueue(update)
        try:
            while not update.is_settled:
                await update.changed.wait()
        except BaseException:
            self.withdraw(update, "its caller was cancelled")
            raise
        return update.outcome()

    async def run(self) -> None:
        """Run queued updates until cancelled."""
        while True:
            while self._queue:
                self._current = self._queue.popleft()
                try:
                    await self._settle(self._current)
                except Exception as cause:
                    self._current.settle(error=_dead(cause))
                    raise
                finally:
                    self._current = None
            await self._arrived.wait()

    def withdraw_all(self, error: EngineError) -> None:
        """Withdraw every update that has not come to its flip; their callers get `error`."""
        for update in [*self._queue, *([self._current] if self._current else [])]:
            if not self._is_past_withdrawal(update):
                update.withdrawn_by = error
                self.withdraw(update, str(error))

    def _is_past_withdrawal(self, update: PendingUpdate) -> bool:
        """After the flip an update completes; one that writes in place may be stopped while it writes."""
        return update.stage == "commit" or (update.stage == "swap" and not update.in_place)

    def withdraw(self, update: PendingUpdate, reason: str) -> None:
        """Stop an update that has not come to its flip; one that writes in place is torn if it writes already."""
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
            self._account_for(update, 0.0)

    async def _settle(self, update: PendingUpdate) -> None:
        begun = time.monotonic()
        with update.scope:
            try:
                update.settle(ack=await self._transaction.run(update))
            except EngineError as error:
                self._fail(update, error)
            except BaseException as error:
                self._fail(update, error)
                raise
            finally:
                self._account_for(update, time.monotonic() - begun)
        if update.late_cancellation is not None:
            raise update.late_cancellation
        # In another thread, since giving back gigabytes would hold up the loop.
        await anyio.to_thread.run_sync(update.replaced.clear)

    def _fail(self, update: PendingUpdate, error: BaseException) -> None:
        self._transaction.record_failure(update, error)
        if update.withdrawn_by is not None:
            error = update.withdrawn_by
        elif not isinstance(error, EngineError):
            reason = update.withdrawn or "the engine was stopped"
            error = self._transaction.failure(update, reason)
        update.settle(error=error)

    def _account_for(self, update: PendingUpdate, seconds: float) -> None:
        """One line in the log, and the totals."""
        torn = self._transaction.is_torn(update)
        outcome: UpdateOutcome = "committed" if update.ack is not None else "fenced" if torn else "failed"
        so_far = self.totals.get(outcome, UpdateTotals())
        self.totals[outcome] = UpdateTotals(so_far.count + 1, so_far.seconds + seconds)
        version = self._transaction.gate.version
        extra = {
            "update": update.ordinal,
            "outcome": outcome,
            "mode": update.mode,
            "policy_version": None if version is None else version.number,
            "train_step": None if version is None else version.train_step,
            "seconds": seconds,
        }
        level = logging.INFO if outcome == "committed" else logging.WARNING
        why = "" if update.error is None else f": {update.error}"
        logger.log(
            level,
            "%s %s in %.3f s (mode %s), policy version %s%s",
            update.name,
            outcome,
            seconds,
            update.mode,
            extra["policy_version"],
            why,
            extra=extra,
        )


def _dead(cause: Exception) -> EngineDeadError:
    error = EngineDeadError(f"the updater loop died: {cause!r}; close the engine")
    error.__cause__ = cause
    return error
