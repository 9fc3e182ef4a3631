"""`StableLease`: the right to touch KV and to run the model."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from attrs import define, field

from aengine.errors import StaleLeaseError
from aengine.policy.version import PolicyVersion
from statemachines.policy import Operation

if TYPE_CHECKING:
    from aengine.policy.gate import PolicyGate

__all__ = ["StableLease"]


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
        if operation not in self._gate.permitted:
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
