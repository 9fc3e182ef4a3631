"""The weight update: one transaction in four steps, with one of two outcomes: committed, or untouched.

Updates run one at a time, in order of arrival, in a task of the engine's own. Callers only await the outcome, so a
caller that is cancelled cannot tear an update: before the flip its update is withdrawn and nothing has changed, after
the flip it completes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import anyio
import anyio.to_thread
from attrs import Factory, define, field, frozen
from torch import Tensor

from aengine.errors import EngineError, WeightUpdateError
from aengine.policy.gate import PolicyGate, StableLease
from aengine.policy.version import PolicyVersion, next_number
from aengine.signal import Signal
from statemachines.policy import PolicyState

__all__ = ["DrainTarget", "StagedWeights", "WeightHolder", "WeightUpdate", "WeightUpdateAck", "WeightUpdater"]


@frozen(eq=False)
class StagedWeights:
    """New weights, copied and packed beside the installed ones, and the digest of the copy."""

    weights: Any
    digest: str


class WeightHolder(Protocol):
    """Whatever holds the model's weights."""

    def stage(self, tensors: Mapping[str, Tensor]) -> StagedWeights:
        """Check `tensors` against the model, then copy and pack them; runs off the event loop, changes nothing."""

    def flip(self, staged: StagedWeights) -> None:
        """Use `staged` from now on: one assignment, which happens or raises."""


class DrainTarget(Protocol):
    """Whatever runs requests."""

    def is_drained(self) -> bool:
        """Whether no request holds tokens of the installed version any more."""

    def num_started(self) -> int:
        """How many requests hold tokens of the installed version."""


@frozen
class WeightUpdateAck:
    """A committed update: the version is installed, acknowledged by every holder, and no older KV can be matched."""

    policy_version: int
    previous: int
    digest: str
    train_step: int | None
    mode: str
    pages_invalidated: int
    """Entries the prefix index held when the update was committed."""
    requests_affected: int
    """Requests that held tokens of the previous version when the drain began."""
    seconds: float
    """From the update's turn to its commit, staging and drain included."""


@define(eq=False)
class WeightUpdate:
    """One update on its way. `version`, `expected_version` and `train_step` as in `Engine.update_weights`."""

    tensors: Mapping[str, Tensor] = field(repr=False)
    version: int | None = None
    expected_version: int | None = None
    train_step: int | None = None
    mode: str = "wait"
    stage: str = "stage"
    withdrawn: bool = False
    ack: WeightUpdateAck | None = None
    error: BaseException | None = None
    scope: anyio.CancelScope = Factory(anyio.CancelScope)
    settled: Signal = Factory(Signal)

    @property
    def is_settled(self) -> bool:
        return self.ack is not None or self.error is not None

    def settle(self, ack: WeightUpdateAck | None = None, error: BaseException | None = None) -> None:
        if not self.is_settled:
            self.ack, self.error = ack, error
            self.settled.set()

    def outcome(self) -> WeightUpdateAck:
        if self.error is not None:
            raise self.error
        assert self.ack is not None
        return self.ack


class WeightUpdater:
    """Runs updates one after the other; owner of the queue of updates."""

    def __init__(
        self,
        gate: PolicyGate,
        holder: WeightHolder,
        target: DrainTarget,
        invalidate: Callable[[StableLease], int],
    ) -> None:
        self._gate, self._holder, self._target, self._invalidate = gate, holder, target, invalidate
        self._queue: deque[WeightUpdate] = deque()
        self._current: WeightUpdate | None = None
        self._arrived = Signal()
        self._stager = anyio.CapacityLimiter(1)

    async def submit(self, update: WeightUpdate) -> WeightUpdateAck:
        """Queue an update and await its outcome. Cancelled before the flip, it is withdrawn and nothing changes."""
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
                await self._settle(self._current)
                self._current = None
            await self._arrived.wait()

    def withdraw_all(self, error: EngineError) -> None:
        """Withdraw every update that has not come to its flip; their callers get `error`."""
        for update in [*self._queue, *([self._current] if self._current else [])]:
            update.settle(error=error)
            self._withdraw(update, str(error))

    def _withdraw(self, update: WeightUpdate, reason: str) -> None:
        update.settle(error=self._failure(update, f"withdrawn: {reason}"))
        update.withdrawn = True
        if update is not self._current:
            if update in self._queue:
                self._queue.remove(update)
            return
        if self._gate.state is PolicyState.DRAINING:
            self._gate.cancel()
        update.scope.cancel()

    async def _settle(self, update: WeightUpdate) -> None:
        with update.scope:
            try:
                update.settle(ack=await self._transact(update))
            except EngineError as error:
                update.settle(error=error)
            except BaseException:
                update.settle(error=self._failure(update, "the engine was stopped"))
                raise

    async def _transact(self, update: WeightUpdate) -> WeightUpdateAck:
        started = time.monotonic()
        previous = self._gate.version
        number = next_number(previous.number, update.version, update.expected_version)
        staged = await self._stage(update)
        affected = await self._drain(update)
        version = PolicyVersion(number, staged.digest, update.train_step)
        self._swap(update, staged)
        dropped = self._commit(update, version)
        return WeightUpdateAck(
            policy_version=number,
            previous=previous.number,
            digest=staged.digest,
            train_step=update.train_step,
            mode=update.mode,
            pages_invalidated=dropped,
            requests_affected=affected,
            seconds=time.monotonic() - started,
        )

    async def _stage(self, update: WeightUpdate) -> StagedWeights:
        with self._step(update, "stage"):
            staged = await anyio.to_thread.run_sync(self._holder.stage, update.tensors, limiter=self._stager)
        self._refuse_if_withdrawn(update)
        return staged

    async def _drain(self, update: WeightUpdate) -> int:
        with self._step(update, "drain"):
            affected = self._target.num_started()
            self._gate.drain(self._target.is_drained)
            try:
                await self._gate.drained()
            except BaseException:
                if self._gate.state is PolicyState.DRAINING:
                    self._gate.cancel()
                raise
        self._refuse_if_withdrawn(update)
        return affected

    def _swap(self, update: WeightUpdate, staged: StagedWeights) -> None:
        with self._step(update, "swap"):
            self._gate.swap()
            try:
                self._holder.flip(staged)
            except BaseException:
                self._gate.rollback()
                raise

    def _commit(self, update: WeightUpdate, version: PolicyVersion) -> int:
        with self._step(update, "commit"):
            return self._gate.commit(version, self._invalidate)

    @contextmanager
    def _step(self, update: WeightUpdate, stage: str) -> Iterator[None]:
        """Name the step in `update`, and turn what goes wrong in it into a `WeightUpdateError` that keeps the cause."""
        update.stage = stage
        try:
            yield
        except Exception as cause:
            raise self._failure(update, str(cause) or type(cause).__name__) from cause

    def _refuse_if_withdrawn(self, update: WeightUpdate) -> None:
        if update.withdrawn:
            raise self._failure(update, "withdrawn")

    def _failure(self, update: WeightUpdate, reason: str) -> WeightUpdateError:
        return WeightUpdateError(update.stage, self._gate.state.value, reason)
