"""What a trainer does to an engine: new weights, pauses, resets; and what it sees of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import anyio.lowlevel

from aengine.audit.snapshots import SnapshotStore
from aengine.events import EventStream
from aengine.lifecycle import Lifecycle
from aengine.policy.in_place import InPlaceUpdate
from aengine.policy.ledger_records import InvalidationRecord
from aengine.policy.pending import PendingUpdate, WeightUpdateAck
from aengine.policy.roles import KVOnUpdate, UpdateMode
from aengine.policy.source import WeightSource, read_source
from aengine.policy.version import PolicyVersion
from aengine.stats import EngineStats
from aengine.validate import refuse_unless, refuse_unless_integer
from aengine.worker import Worker
from statemachines.policy import PolicyState

__all__ = ["PolicyControl"]


class PolicyControl(Lifecycle):
    """The half of `Engine` that changes and shows the policy."""

    async def update_weights(
        self,
        source: WeightSource,
        *,
        version: int | None = None,
        expected_version: int | None = None,
        train_step: int | None = None,
        mode: UpdateMode = "wait",
        kv: KVOnUpdate = "recompute",
        check_finite: bool = True,
        timeout: float | None = None,
    ) -> WeightUpdateAck:
        """Install new weights as one transaction; returns when they are installed and no older KV can be matched.

        `source` is a state dict, a module, a checkpoint, a safetensors file or directory, or an async iterator of
        (name, tensor), with the checkpoint's names; it is read until the tensors are copied, so do not change it
        before this returns. Requests that have started

        * finish under the old version first (`mode="wait"`),
        * end with what they have and reason `"abort"` (`"abort"`), or
        * stop at a token and go on under the new version (`"keep"`), their KV computed again or, with `kv="keep"`,
          kept on purpose: then their later tokens attend to KV of the old version, and their `kv_spans` say so.

        Requests still waiting run under the new version in any mode. `version` defaults to the next number. Updates
        run one at a time, in order of arrival; `version` and `expected_version` are compared when the turn comes.

        Raises `StaleVersionError` or `WeightUpdateError`; then version, weights and cache are as before, unless
        `EngineConfig.staging` is `"none"` and the update failed while it wrote: then the engine is fenced. `timeout`,
        in seconds, raises `TimeoutError`; like a cancellation it withdraws an update that has not come to its swap.
        """
        refuse_unless("mode", mode, ("wait", "abort", "keep"))
        refuse_unless("kv", kv, ("recompute", "keep"))
        for name, number in (("version", version), ("expected_version", expected_version), ("train_step", train_step)):
            refuse_unless_integer(name, number)
        if self._share:
            raise ValueError("this engine shares its parameters with a module; change them in weight_update()")
        update = PendingUpdate(
            read_source(source),
            version,
            expected_version,
            train_step,
            mode,
            kv,
            in_place=self._config.staging == "none",
            check_finite=check_finite,
        )
        parts = self._usable()
        with anyio.fail_after(timeout):
            return await parts.updater.submit(update)

    def weight_update(
        self,
        *,
        train_step: int | Callable[[], int] | None = None,
        mode: UpdateMode = "wait",
        kv: KVOnUpdate = "recompute",
    ) -> InPlaceUpdate:
        """For an engine with `share=True`: `async with engine.weight_update(): optimizer.step()`.

        Entering drains by `mode` as `update_weights` does and returns when nothing reads the weights any more; leaving
        commits what the body wrote as the next version. `train_step`, or what it returns when called after the body,
        goes into the version. See `InPlaceUpdate` for steps that change nothing and bodies that raise.
        """
        refuse_unless("mode", mode, ("wait", "abort", "keep"))
        refuse_unless("kv", kv, ("recompute", "keep"))
        if not self._share:
            raise ValueError("weight_update() is for an engine with share=True; use update_weights()")
        read_step = train_step if callable(train_step) else lambda: train_step
        update = PendingUpdate.in_body(read_step, mode, kv)
        assert update.body is not None
        return InPlaceUpdate(self._usable().updater, update, update.body, self._inside_updates)

    async def pause_generation(self, mode: UpdateMode = "wait") -> None:
        """Hold all generation; returns when that is so. Requests that have started finish first (`"wait"`), end with
        what they have (`"abort"`), or stop at a token and go on where they were when generation resumes (`"keep"`).

        Requests may still be submitted; they wait. An update under a pause finds nothing to wait for, and leaves the
        pause in place. Cancelling this takes back this pause, and no other.
        """
        refuse_unless("mode", mode, ("wait", "abort", "keep"))
        parts = self._usable()
        hold = parts.scheduler.hold_condition(mode)
        parts.gate.hold(hold, f"pause, mode {mode}")
        if mode == "abort":
            parts.scheduler.abort_started()
        try:
            await parts.gate.held()
        except BaseException:
            parts.gate.withdraw_hold(hold, "pause withdrawn")
            raise

    async def resume_generation(self) -> None:
        """End a pause; without one, do nothing."""
        self._usable().gate.lift("resume")
        await anyio.lowlevel.checkpoint()

    def is_paused(self) -> bool:
        return self._opened().gate.is_held

    async def reset_prefix_cache(self) -> int:
        """Make all cached prefixes unreachable, without an update; returns how many entries there were.

        Running requests keep their KV, which is of the installed version, but it is never matched by others. Waits
        while weights are being swapped.
        """
        while (lease := (parts := self._usable()).gate.try_invalidation_lease()) is None:
            await parts.gate.changed.wait()
        with lease:
            dropped = parts.cache.invalidate_cache(lease)
            parts.journal.append(InvalidationRecord(reason="reset_prefix_cache", entries=dropped, epoch=lease.epoch))
        await anyio.lowlevel.checkpoint()
        return dropped

    # ---- what it is doing

    @property
    def policy_version(self) -> int | None:
        """Number of the installed policy version; None while the engine is fenced."""
        version = self._opened().gate.version
        return None if version is None else version.number

    @property
    def installed_policy(self) -> PolicyVersion:
        """The installed policy version with its digest. Raises `EngineInvalidatedError` while the engine is fenced."""
        return self._opened().gate.installed()

    @property
    def state(self) -> PolicyState:
        return self._opened().gate.state

    async def weight_checksum(self) -> str:
        """The digest of the weights as they lie in memory now; equals `installed_policy.digest`."""
        parts = self._usable()
        return await parts.worker.run(parts.runner.digest)

    async def save_snapshot(self, store: SnapshotStore) -> PolicyVersion:
        """Keep the installed weights in `store`; returns their version, which no update replaces while they are
        written. Generation goes on meanwhile; under a pause it can be saved too.

        Raises `SnapshotError`, and `EngineInvalidatedError` while the engine is fenced. A cancellation is delivered
        when the writing is done.
        """
        while (lease := (parts := self._usable()).gate.try_reading_lease()) is None:
            parts.gate.installed()
            await parts.gate.changed.wait()
        decoder, writer = parts.runner.decoder, Worker("aengine snapshot")
        try:
            with lease:
                tensors = dict(decoder.weights.named_tensors())
                await writer.run(partial(store.save, lease.version, decoder.spec, tensors))
        finally:
            writer.close()
        return lease.version

    def events(self) -> EventStream:
        """Everything that happens to the policy from now on, as an async iterator that ends when the engine closes:
        transitions, updates, invalidations. Any number of readers may follow; none slows the engine."""
        return self._opened().journal.events.follow()

    def stats(self) -> EngineStats:
        return self._opened().stats()

    async def check_health(self) -> None:
        """Return if the engine can serve. Raises `EngineDeadError`, with the cause, if a loop of the engine has died,
        `EngineInvalidatedError` while it is fenced, and `EngineClosedError`."""
        self._usable().gate.installed()
        await anyio.lowlevel.checkpoint()
