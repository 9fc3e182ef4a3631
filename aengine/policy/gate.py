"""The gate: who may touch KV, run the model or write weights, and under which policy version.

`PolicyGate` owns the state machine, the installed version and the epoch. Whatever reads or writes KV takes a
`StableLease`, which only the gate hands out; so "the version is stable while this runs" is not a convention but the
only way to get there. All methods are synchronous except the waiting ones, and one event loop owns the gate.
"""

from __future__ import annotations

from collections.abc import Callable

from aengine.errors import EngineError, EngineInvalidatedError, StaleLeaseError
from aengine.policy.lease import StableLease
from aengine.policy.ledger_records import TransitionRecord
from aengine.policy.version import PolicyVersion
from aengine.signal import Signal
from statemachines.policy import PERMITTED, Operation, PolicyMachine, PolicyState, Trigger

__all__ = ["Condition", "PolicyGate"]

Condition = Callable[[], bool]
"""Pure and synchronous; asked again whenever a lease ends."""


class PolicyGate:
    """Owner of the policy machine, the installed version and the epoch.

    A pause is a *hold*: a drain that nobody ends until the hold is lifted. An update may come and go under it; when
    that has settled, the gate is back in the hold.
    """

    def __init__(self, version: PolicyVersion, changed: Signal | None = None) -> None:
        self._machine = PolicyMachine()
        self.permitted = PERMITTED[self._machine.state]
        """What the present state permits; only `_fire` changes it."""
        self._observers: list[Callable[[TransitionRecord], object]] = []
        self._version = version
        self._epoch = 0
        self._leases: set[StableLease] = set()
        self._holds: list[Condition] = []
        """Of pauses that have been asked for; the last one counts, and lifting ends all."""
        self._drain_done: Condition = _never
        self._is_updating = False
        self._fence: EngineInvalidatedError | None = None
        self._stopped: EngineError | None = None
        self.changed = changed if changed is not None else Signal()
        """Set at every transition, whenever a lease ends, and when the hold changes."""

    # ---- what holds now

    @property
    def state(self) -> PolicyState:
        return self._machine.state

    @property
    def version(self) -> PolicyVersion | None:
        """The installed version; None while the weights are unknown."""
        return None if self._fence is not None else self._version

    def installed(self) -> PolicyVersion:
        """The installed version. Raises `EngineInvalidatedError` while the weights are unknown."""
        if self._fence is not None:
            raise EngineInvalidatedError(str(self._fence))
        return self._version

    @property
    def last_number(self) -> int:
        """The last number that was installed, known weights or not; the next is greater."""
        return self._version.number

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def fence(self) -> EngineInvalidatedError | None:
        """Why the engine is fenced, if it is: its weights are torn until a full update commits."""
        return self._fence

    @property
    def is_held(self) -> bool:
        return self._hold is not None

    def on_transition(self, observer: Callable[[TransitionRecord], object]) -> None:
        """Call `observer` after every transition; it must not raise."""
        self._observers.append(observer)

    # ---- leases

    def try_lease(self) -> StableLease | None:
        """A lease on the installed version, or None while there is no stable one.

        Once a drain's condition holds no further lease is handed out, so a swap waits only for those in use.
        """
        if self.state is PolicyState.SERVING or (self.state is PolicyState.DRAINING and not self._drain_done()):
            return self._hand_out()
        return None

    def try_invalidation_lease(self) -> StableLease | None:
        """A lease to invalidate with, also where a drain is done or the engine fenced; None while weights change.

        It must end before the next `await`.
        """
        return self._hand_out() if Operation.INVALIDATE in self.permitted else None

    def try_reading_lease(self) -> StableLease | None:
        """A lease to read the installed weights with, also where generation is held; None while an update is at its
        swap or the weights are unknown. An update that comes to its swap waits for it."""
        if self.state is PolicyState.DRAINING and not self._is_updating:
            return self._hand_out()
        return self.try_lease()

    def bump_epoch(self, lease: StableLease) -> int:
        """For `StableLease.bump_epoch`."""
        assert lease in self._leases
        self._epoch += 1
        return self._epoch

    def lease_ended(self, lease: StableLease) -> None:
        """For `StableLease.end`."""
        self._leases.remove(lease)
        self.changed.set()

    def _hand_out(self) -> StableLease:
        lease = StableLease(self._version, self)
        self._leases.add(lease)
        return lease

    # ---- holds

    def hold(self, done: Condition, reason: str) -> None:
        """Pause: nothing new is admitted, and once `done` holds nothing runs. Counts before a hold that is in place.

        While an update is on its way it only takes effect when that has settled.
        """
        self._holds.append(done)
        self._holds_changed(reason)

    def withdraw_hold(self, done: Condition, reason: str) -> None:
        """Forget one hold, as if it had not been asked for; others stay."""
        if done in self._holds:
            self._holds.remove(done)
            self._holds_changed(reason)

    def lift(self, reason: str) -> None:
        """End the hold; without one, do nothing."""
        self._holds.clear()
        self._holds_changed(reason)

    @property
    def _hold(self) -> Condition | None:
        return self._holds[-1] if self._holds else None

    def _holds_changed(self, reason: str) -> None:
        hold = self._hold
        if hold is not None and self.state is PolicyState.SERVING:
            self._fire(Trigger.DRAIN, reason)
        if self.state is PolicyState.DRAINING and not self._is_updating:
            if hold is None:
                self._fire(Trigger.CANCEL, reason)
            else:
                self._drain_done = hold
        self.changed.set()

    @property
    def is_stopped(self) -> bool:
        return self._stopped is not None

    def stop(self, error: EngineError) -> None:
        """The engine's loops have ended: whoever waits for a hold is told."""
        self._stopped = error
        self.changed.set()

    async def held(self) -> None:
        """Wait until the hold's promise is kept: its condition holds, nothing runs, no update is on its way. Returns
        early if the hold is lifted. Cancelling changes nothing. Raises what `stop` was given, as the promise cannot be
        kept any more."""
        while self._hold is not None and (self._is_updating or self._leases or not self._is_quiet()):
            self.refuse_if_stopped()
            await self.changed.wait()

    def refuse_if_stopped(self) -> None:
        """Raise what `stop` was given."""
        if self._stopped is not None:
            raise type(self._stopped)(str(self._stopped)) from self._stopped.__cause__

    def _is_quiet(self) -> bool:
        return self.state is PolicyState.INVALIDATED or (self.state is PolicyState.DRAINING and self._drain_done())

    # ---- the steps of an update

    def drain(self, done: Condition, reason: str) -> None:
        """Enter Draining for an update; under a hold, whichever condition comes first ends it."""
        hold = self._hold
        if hold is None or self.state is not PolicyState.DRAINING:
            self._fire(Trigger.DRAIN, reason)
            self._drain_done = done
        else:
            self._drain_done = lambda: (self._hold is hold and hold()) or done()
        self._is_updating = True

    async def drained(self) -> None:
        """Wait until the drain's condition holds and no lease is in use. Cancelling changes nothing."""
        while self._leases or not self._drain_done():
            await self.changed.wait()

    def cancel(self, reason: str) -> None:
        """Withdraw an update that drains; version and cache are as before. Back to Serving, or to the hold."""
        self._is_updating = False
        if self._hold is None:
            self._fire(Trigger.CANCEL, reason)
        else:
            self._drain_done = self._hold
            self.changed.set()

    def swap(self, reason: str) -> None:
        """Enter Swapping. Raises `StaleLeaseError` while a lease is in use, so nothing runs while weights change."""
        if self._leases:
            raise StaleLeaseError(f"swap with {len(self._leases)} lease(s) in use")
        self._fire(Trigger.SWAP, reason)
        self._is_updating = True

    @property
    def can_roll_back(self) -> bool:
        """Whether Swapping was entered from Draining, so that there is a version to go back to."""
        return self._machine.entered_from_draining()

    def rollback(self, reason: str) -> None:
        """Leave Swapping: nothing was written. Back to Serving, or to the hold."""
        self._fire(Trigger.ROLLBACK, reason)
        self._settled(reason)

    def commit(self, version: PolicyVersion, invalidate: Callable[[StableLease], int], reason: str) -> int:
        """Install `version`, drop every KV entry of the old one, and serve again (or hold), in one step.

        `invalidate` gets a lease that permits nothing but invalidation and must bump the epoch with it; returns what
        it returns, the number of entries dropped.
        """
        self._fire(Trigger.COMMIT, reason, version)
        dropped = self._invalidate(invalidate)
        self._fire(Trigger.RESUME, reason)
        self._settled(reason)
        return dropped

    def fail(self, error: EngineInvalidatedError, invalidate: Callable[[StableLease], int]) -> int:
        """The weights are torn: leave Swapping for Invalidated, with no version, until a full update commits."""
        self._fire(Trigger.FAIL, str(error), fence=error)
        self._is_updating = False
        return self._invalidate(invalidate)

    def _invalidate(self, invalidate: Callable[[StableLease], int]) -> int:
        before = self._epoch
        with self._hand_out() as lease:
            dropped = invalidate(lease)
        assert self._epoch > before, "the cache was not invalidated"
        return dropped

    def _settled(self, reason: str) -> None:
        """An update has settled and the machine is in Serving: fall back into the hold, if there is one."""
        self._is_updating = False
        if self._hold is not None:
            self._fire(Trigger.DRAIN, f"held after {reason}")
            self._drain_done = self._hold

    def _fire(
        self,
        trigger: Trigger,
        reason: str,
        version: PolicyVersion | None = None,
        fence: EngineInvalidatedError | None = None,
    ) -> None:
        """Take a transition and tell the observers. A commit installs `version`, which ends a fence."""
        row = self._machine.fire(trigger)
        self.permitted = PERMITTED[row.dest]
        if version is not None:
            self._version = version
        if version is not None or fence is not None:
            self._fence = fence
        if row.dest is not PolicyState.DRAINING:
            self._drain_done = _never
        number = self.version.number if self.version is not None else None
        record = TransitionRecord(trigger=trigger, source=row.source, dest=row.dest, version=number, reason=reason)
        self.changed.set()
        for observer in self._observers:
            observer(record)


def _never() -> bool:
    return False
