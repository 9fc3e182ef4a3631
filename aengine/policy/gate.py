"""The gate: who may touch KV, run the model or write weights, and under which policy version.

`PolicyGate` owns the state machine, the installed version and the epoch. Whatever reads or writes KV takes a
`StableLease`, which only the gate hands out; so "the version is stable while this runs" is not a convention but the
only way to get there. All methods are synchronous except the waiting ones, and one event loop owns the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from attrs import define, field

from aengine.errors import StaleLeaseError
from aengine.policy.version import PolicyVersion
from aengine.signal import Signal
from statemachines.policy import Operation, PolicyMachine, PolicyState, Transition, Trigger, permits

__all__ = ["PolicyGate", "StableLease"]


@define(eq=False)
class StableLease:
    """The right to use the cache and the model while one version is stable; use it as a context manager.

    Permission is checked when the lease is used, against the state the gate is in then.
    """

    version: PolicyVersion
    _gate: PolicyGate = field(repr=False)
    ended: bool = False

    def check(self, operation: Operation) -> None:
        """Raise `StaleLeaseError` unless this lease is alive and the present state permits `operation`."""
        if self.ended:
            raise StaleLeaseError(f"{operation.value!r} with a lease on version {self.version.number} that has ended")
        if not permits(self._gate.state, operation):
            raise StaleLeaseError(f"{operation.value!r} is not permitted in state {self._gate.state.value}")

    @property
    def epoch(self) -> int:
        return self._gate.epoch

    def bump_epoch(self) -> int:
        """Make every indexed KV page unreachable: returns the new epoch. Only with permission to invalidate."""
        self.check(Operation.INVALIDATE)
        return self._gate.bump_epoch(self)

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._gate.lease_ended(self)

    def __enter__(self) -> StableLease:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class PolicyGate:
    """Owner of the policy machine, the installed version and the epoch."""

    def __init__(self, version: PolicyVersion) -> None:
        self._machine = PolicyMachine(self._transitioned)
        self._observers: list[Callable[[], None]] = []
        self._version = version
        self._epoch = 0
        self._leases: set[StableLease] = set()
        self._drain_done: Callable[[], bool] = _never
        self.changed = Signal()
        """Set at every transition and whenever a lease ends."""

    @property
    def state(self) -> PolicyState:
        return self._machine.state

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def epoch(self) -> int:
        return self._epoch

    def on_transition(self, observer: Callable[[], None]) -> None:
        """Call `observer` after every transition; it must not raise."""
        self._observers.append(observer)

    def try_lease(self) -> StableLease | None:
        """A lease on the installed version, or None while there is no stable one.

        Once a drain's condition holds no further lease is handed out, so a swap waits only for those in use.
        """
        if self.state is PolicyState.SERVING or (self.state is PolicyState.DRAINING and not self._drain_done()):
            return self._hand_out()
        return None

    def drain(self, done: Callable[[], bool]) -> None:
        """Enter Draining. `done` is the drain's condition: pure, synchronous, asked again whenever a lease ends."""
        self._machine.fire(Trigger.DRAIN)
        self._drain_done = done

    async def drained(self) -> None:
        """Wait until the drain's condition holds and no lease is in use. Cancelling changes nothing."""
        while self._leases or not self._drain_done():
            await self.changed.wait()

    def cancel(self) -> None:
        """Leave Draining for Serving; version and cache are as before."""
        self._machine.fire(Trigger.CANCEL)

    def swap(self) -> None:
        """Enter Swapping. Raises `StaleLeaseError` while a lease is in use, so nothing runs while weights change."""
        if self._leases:
            raise StaleLeaseError(f"swap with {len(self._leases)} lease(s) in use")
        self._machine.fire(Trigger.SWAP)

    def rollback(self) -> None:
        """Leave Swapping for Serving: nothing was written."""
        self._machine.fire(Trigger.ROLLBACK)

    def commit(self, version: PolicyVersion, invalidate: Callable[[StableLease], int]) -> int:
        """Install `version`, drop every KV entry of the old one, and serve again, in one step.

        `invalidate` gets a lease that permits nothing but invalidation and must bump the epoch with it; returns what
        it returns, the number of entries dropped.
        """
        self._machine.fire(Trigger.COMMIT)
        self._version = version
        before = self._epoch
        with self._hand_out() as lease:
            dropped = invalidate(lease)
        assert self._epoch > before, "an update was committed without invalidating the cache"
        self._machine.fire(Trigger.RESUME)
        return dropped

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

    def _transitioned(self, transition: Transition) -> None:
        if transition.dest is not PolicyState.DRAINING:
            self._drain_done = _never
        self.changed.set()
        for observer in self._observers:
            observer()


def _never() -> bool:
    return False
