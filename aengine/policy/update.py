"""The weight update: one transaction in four steps, with one of three outcomes: committed, untouched, or fenced.

A transaction runs in a task of the engine's own (`updater`); its caller only awaits the outcome. Withdrawn before the
flip, it leaves everything as it was; after the flip it completes. Only `staging="none"`, which writes over the
installed weights as it reads, can tear them; then the engine is fenced until a full update commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import anyio
import anyio.to_thread
from attrs import Factory, define

from aengine.errors import AttributionError, EngineError, EngineInvalidatedError, WeightUpdateError
from aengine.policy.gate import Condition, PolicyGate
from aengine.policy.journal import Journal
from aengine.policy.lease import StableLease
from aengine.policy.ledger_records import (
    AckRecord,
    CommitRecord,
    FailureRecord,
    FenceRecord,
    InvalidationRecord,
    UpdateRecord,
    UpdateStage,
    WithdrawnRecord,
)
from aengine.policy.pending import PendingUpdate, UpdateBody, WeightUpdateAck
from aengine.policy.roles import DrainTarget, StagedWeights, WeightHolder
from aengine.policy.source import closing, collect
from aengine.policy.version import PolicyVersion, next_number
from aengine.worker import Worker
from statemachines.policy import PolicyState

__all__ = ["Invalidate", "Transaction"]

Invalidate = Callable[[StableLease, bool], int]
"""Drops every KV entry, and where told so ends all ownership of pages; returns the number of entries."""

HOW_TO_RECOVER = "only a full update_weights() that commits, or weight_update() for shared parameters, ends that"


@define(eq=False)
class Transaction:
    """What every update needs; `run` is one update from its turn to its outcome."""

    gate: PolicyGate
    holder: WeightHolder
    target: DrainTarget
    invalidate: Invalidate
    journal: Journal
    worker: Worker
    """The thread that runs the model; what writes over installed weights runs there too."""
    _stager: anyio.CapacityLimiter = Factory(lambda: anyio.CapacityLimiter(1))

    async def run(self, update: PendingUpdate) -> WeightUpdateAck:
        """Stage, drain, swap, commit. Raises `StaleVersionError` or `WeightUpdateError`, with all it did undone, or
        with the engine fenced."""
        started = time.monotonic()
        previous = self.gate.last_number
        update.number = next_number(previous, update.version, update.expected_version)
        staged = await self._stage(update)
        affected = await self._drain(update)
        version = await self._swap(update, staged)
        if version is None:
            version, dropped = self.gate.installed(), 0
        else:
            dropped = self._commit(update, version)
        await self._acknowledge(update, version, dropped, affected)
        return WeightUpdateAck(
            policy_version=version.number,
            previous=previous,
            digest=version.digest,
            train_step=version.train_step,
            mode=update.mode,
            casts={} if staged is None else staged.casts,
            pages_invalidated=dropped,
            requests_affected=affected,
            seconds=time.monotonic() - started,
        )

    # ---- 1. stage: nothing is touched

    async def _stage(self, update: PendingUpdate) -> StagedWeights | None:
        """Check everything that can be checked; unless the update writes in place, copy and pack it too."""
        staged = None
        with self._step(update, "stage"):
            await self.journal.ready()
            if not update.in_place:
                tensors = await collect(update.tensors)
                stage = partial(self.holder.stage, tensors, check_finite=update.check_finite)
                staged = await anyio.to_thread.run_sync(stage, limiter=self._stager)
            elif update.body is None and isinstance(update.tensors, Mapping):
                update.tensors = self.holder.check(update.tensors)
        self._refuse_if_withdrawn(update)
        self._reached(update, "staged")
        return staged

    # ---- 2. drain: the version still stands

    async def _drain(self, update: PendingUpdate) -> int:
        """Wait until nothing uses the weights. A fenced engine has nothing to drain."""
        if self.gate.fence is not None:
            return 0
        with self._step(update, "drain"):
            affected = self.target.num_started()
            self.gate.drain(self._drain_condition(update), update.name)
            self._reached(update, "draining")
            try:
                if update.mode == "abort":
                    self.target.abort_started()
                await self.gate.drained()
            except BaseException:
                self.leave_drain(update)
                raise
        self._refuse_if_withdrawn(update)
        return affected

    def _drain_condition(self, update: PendingUpdate) -> Condition:
        return _at_once if update.mode == "keep" else self.target.is_drained

    def leave_drain(self, update: PendingUpdate) -> None:
        if self.gate.state is PolicyState.DRAINING:
            self.gate.cancel(f"{update.name} withdrawn")

    # ---- 3. swap: nothing runs

    async def _swap(self, update: PendingUpdate, staged: StagedWeights | None) -> PolicyVersion | None:
        """Change the weights, and make the commit record durable before anybody can see the version. What was
        installed lives until then, and a failure flips back to it. None if the weights are what they were."""
        assert update.number is not None
        with self._step(update, "swap"):
            self.gate.swap(update.name)
            self._reached(update, "swapping")
            try:
                if staged is not None:
                    digest = staged.digest
                    update.replaced.append(self.holder.flip(staged))
                elif update.body is not None:
                    digest = await self._let_write(update, update.body)
                else:
                    digest = await self._write_over(update)
                if update.body is not None and self._is_installed(digest):
                    self.gate.rollback(f"{update.name} changed nothing")
                    return None
                version = PolicyVersion(update.number, digest, update.train_step)
                await self._make_durable(update, version)
            except BaseException as cause:
                self._undo(update, cause)
                raise
        return version

    async def _write_over(self, update: PendingUpdate) -> str:
        """Write tensors over the installed ones as they come; the caller's stream is not shielded."""
        writer = self.holder.open_writer()
        update.is_written = True
        if isinstance(update.tensors, Mapping):
            for name, tensor in update.tensors.items():
                await self.worker.run(partial(writer.write, name, tensor))
        else:
            async with closing(update.tensors) as stream:
                async for name, tensor in stream:
                    await self.worker.run(partial(writer.write, name, tensor))
        return await self.worker.run(partial(writer.finish, check_finite=update.check_finite))

    async def _let_write(self, update: PendingUpdate, body: UpdateBody) -> str:
        """Let the caller write the weights, and take their digest before and after."""
        if self.gate.fence is None:
            update.is_written = not self._is_installed(await self.worker.run(self.holder.digest))
        if update.is_written:
            raise AttributionError("the weights were changed outside of weight_update()")
        update.is_written = True
        body.let_in()
        await body.left()
        digest = await self.worker.run(self.holder.accept)
        update.is_written = self.gate.fence is not None or not self._is_installed(digest)
        update.train_step = body.train_step()
        if body.error is not None:  # not raised as it is: a cancellation of the caller's task is not one of this task
            raise RuntimeError(f"its body ended with {_reason(body.error)!r}")
        return digest

    def _is_installed(self, digest: str) -> bool:
        return self.gate.version is not None and self.gate.version.digest == digest

    async def _make_durable(self, update: PendingUpdate, version: PolicyVersion) -> None:
        """Write the commit record to the disk; from here on a cancellation no longer stops the update."""
        update.stage = "commit"
        record = CommitRecord(
            update=update.ordinal,
            version=version.number,
            digest=version.digest,
            train_step=version.train_step,
            previous=self.gate.last_number,
        )
        update.commit_line = self.journal.append(record)
        outcome = await self.journal.durable()
        update.late_cancellation = outcome.cancelled
        if outcome.error is not None:
            self.journal.append(WithdrawnRecord(commit=update.commit_line, reason=str(outcome.error)))
            raise outcome.error

    def _undo(self, update: PendingUpdate, cause: BaseException) -> None:
        """Leave Swapping for what holds now: the old version where the old weights are back, else the fence."""
        try:
            for replaced in update.replaced:
                self.holder.flip(replaced)
        except Exception:  # the old weights cannot be put back, so nobody knows which are in use
            update.is_written = True
        if not update.is_written and self.gate.can_roll_back:
            self.gate.rollback(f"{update.name} failed")
        else:
            self.tear(f"{update.name} failed when weights had been written: {_reason(cause)}")

    def tear(self, reason: str) -> None:
        """In Swapping: nobody knows what the weights are. Fence the engine."""
        error = EngineInvalidatedError(f"the engine is fenced: {reason}; {HOW_TO_RECOVER}")
        self.gate.fail(error, partial(self._invalidate, reason=reason, end_ownership=True))
        self.journal.append(FenceRecord(reason=reason))
        self.target.fence(error)

    # ---- 4. commit: old KV is unreachable, then the version serves

    def _commit(self, update: PendingUpdate, version: PolicyVersion) -> int:
        """Should this break, nobody knows what requests and cache hold: the engine is fenced."""
        with self._step(update, "commit"):
            try:
                self.target.carry_over(update.kv)
                return self.gate.commit(version, partial(self._invalidate, reason=update.name), update.name)
            except BaseException as cause:
                reason = f"{update.name} broke in its commit: {_reason(cause)}"
                if self.gate.state is PolicyState.SWAPPING:
                    self.journal.append(WithdrawnRecord(commit=update.commit_line, reason=reason))
                else:
                    self.gate.swap(reason)
                self.tear(reason)
                raise

    def _invalidate(self, lease: StableLease, *, reason: str, end_ownership: bool = False) -> int:
        dropped = self.invalidate(lease, end_ownership)
        self.journal.append(InvalidationRecord(reason=reason, entries=dropped, epoch=lease.epoch))
        return dropped

    async def _acknowledge(self, update: PendingUpdate, version: PolicyVersion, dropped: int, affected: int) -> None:
        """The version stands, whatever becomes of these last records."""
        self.journal.append(
            AckRecord(
                update=update.ordinal,
                version=version.number,
                pages_invalidated=dropped,
                requests_affected=affected,
            )
        )
        outcome = await self.journal.durable()
        update.late_cancellation = update.late_cancellation or outcome.cancelled

    # ---- for all steps

    def _reached(self, update: PendingUpdate, stage: UpdateStage) -> None:
        assert update.number is not None
        self.journal.append(UpdateRecord(update=update.ordinal, stage=stage, version=update.number, mode=update.mode))

    @contextmanager
    def _step(self, update: PendingUpdate, stage: str) -> Iterator[None]:
        """Name the step in `update`, and turn what goes wrong in it into a `WeightUpdateError` that keeps the cause."""
        update.stage = stage
        try:
            yield
        except Exception as cause:
            raise self.failure(update, _reason(cause)) from cause

    def _refuse_if_withdrawn(self, update: PendingUpdate) -> None:
        if update.withdrawn is not None:
            raise self.failure(update, update.withdrawn)

    def failure(self, update: PendingUpdate, reason: str) -> WeightUpdateError:
        return WeightUpdateError(update.stage, self.gate.state.value, reason)

    def is_torn(self, update: PendingUpdate) -> bool:
        """Whether a failed update is what fenced the engine, or left it fenced after it had begun to write."""
        return self.gate.fence is not None and update.stage in ("swap", "commit")

    def record_failure(self, update: PendingUpdate, error: BaseException) -> None:
        """Every update that did not commit ends in a record of why, when Swapping has been left."""
        torn = self.is_torn(update)
        stage = update.stage if isinstance(error, EngineError) else "cancelled"
        self.journal.append(FailureRecord(update=update.ordinal, stage=stage, torn=torn, reason=_reason(error)))


def _at_once() -> bool:
    return True


def _reason(error: BaseException) -> str:
    """In words for the ledger: the text of a cancellation names scopes and tasks, which say nothing to its readers."""
    if not isinstance(error, Exception):
        return "it was cancelled"
    return str(error) or type(error).__name__
