"""The policy state machine: four states, seven triggers, and what may run where.

Everything here is data plus a thin wrapper over the synchronous `transitions.Machine`. A transition is decided in one
call without waiting; all waiting happens outside, between two triggers.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from attrs import frozen
from transitions import Machine, MachineError

__all__ = [
    "INITIAL",
    "PERMISSIONS",
    "PERMITTED",
    "TRANSITIONS",
    "IllegalTransitionError",
    "Operation",
    "PolicyMachine",
    "PolicyState",
    "Transition",
    "Trigger",
    "permits",
]


class PolicyState(StrEnum):
    __hash__ = str.__hash__  # the members are keys that every cache operation looks up; that of Enum is Python code

    SERVING = "Serving"
    DRAINING = "Draining"
    SWAPPING = "Swapping"
    INVALIDATED = "Invalidated"


class Trigger(StrEnum):
    DRAIN = "drain"
    SWAP = "swap"
    CANCEL = "cancel"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    FAIL = "fail"
    RESUME = "resume"


class Operation(StrEnum):
    """What wants to run. The first eleven need a lease on a stable version; the table says which state permits them."""

    __hash__ = str.__hash__

    LOOKUP = "prefix lookup"
    ALLOC = "alloc (admit a new request)"
    READMIT = "readmit a preempted request"
    FORK = "fork a group member"
    COPY_ON_WRITE = "copy on write"
    EXTEND = "extend"
    PUBLISH = "publish"
    FREE = "free"
    FORWARD = "forward pass"
    SAMPLE = "sample"
    WRITE_WEIGHTS = "write weights"
    INVALIDATE = "invalidate"


class Guard(StrEnum):
    """Names of the conditions a transition may carry; each is a method of `PolicyMachine`."""

    ENTERED_FROM_DRAINING = "entered_from_draining"
    WEIGHTS_KNOWN = "weights_known"


@frozen
class Transition:
    trigger: Trigger
    source: PolicyState
    dest: PolicyState
    meaning: str
    guard: Guard | None = None


INITIAL = PolicyState.SERVING

TRANSITIONS: tuple[Transition, ...] = (
    Transition(Trigger.DRAIN, PolicyState.SERVING, PolicyState.DRAINING, "an update or a pause asks for quiet"),
    Transition(Trigger.SWAP, PolicyState.DRAINING, PolicyState.SWAPPING, "the drain's condition holds"),
    Transition(Trigger.CANCEL, PolicyState.DRAINING, PolicyState.SERVING, "withdrawn, timed out or cancelled"),
    Transition(Trigger.COMMIT, PolicyState.SWAPPING, PolicyState.INVALIDATED, "every holder acknowledged the version"),
    Transition(
        Trigger.ROLLBACK,
        PolicyState.SWAPPING,
        PolicyState.SERVING,
        "nothing was written: the version and its cache still hold",
        Guard.ENTERED_FROM_DRAINING,
    ),
    Transition(Trigger.FAIL, PolicyState.SWAPPING, PolicyState.INVALIDATED, "the weights are torn: fenced"),
    Transition(
        Trigger.RESUME,
        PolicyState.INVALIDATED,
        PolicyState.SERVING,
        "old entries are unreachable",
        Guard.WEIGHTS_KNOWN,
    ),
    Transition(Trigger.SWAP, PolicyState.INVALIDATED, PolicyState.SWAPPING, "recovery by a full update"),
)

_STABLE = frozenset({PolicyState.SERVING, PolicyState.DRAINING})

PERMISSIONS: dict[Operation, frozenset[PolicyState]] = {
    Operation.LOOKUP: frozenset({PolicyState.SERVING}),
    Operation.ALLOC: frozenset({PolicyState.SERVING}),
    Operation.READMIT: _STABLE,
    Operation.FORK: _STABLE,
    Operation.COPY_ON_WRITE: _STABLE,
    Operation.EXTEND: _STABLE,
    Operation.PUBLISH: _STABLE,
    Operation.FREE: _STABLE,
    Operation.FORWARD: _STABLE,
    Operation.SAMPLE: _STABLE,
    Operation.WRITE_WEIGHTS: frozenset({PolicyState.SWAPPING}),
    Operation.INVALIDATE: _STABLE | {PolicyState.INVALIDATED},
}


PERMITTED: dict[PolicyState, frozenset[Operation]] = {
    state: frozenset(operation for operation, states in PERMISSIONS.items() if state in states) for state in PolicyState
}
"""The same table by state."""


def permits(state: PolicyState, operation: Operation) -> bool:
    return operation in PERMITTED[state]


class IllegalTransitionError(Exception):
    """A trigger was tried where the table has no transition for it, or its guard refused; nothing changed."""

    def __init__(self, state: PolicyState, trigger: Trigger, guard: Guard | None = None) -> None:
        why = f"its guard {guard.value!r} does not hold" if guard else "no transition leaves from there"
        super().__init__(f"trigger {trigger.value!r} refused in state {state.value}: {why}")
        self.state, self.trigger, self.guard = state, trigger, guard


class PolicyMachine:
    """The machine with its two guards. `on_transition(transition)` is called after each state change.

    `weights_known` is false from a `fail` until a later `commit`: the fence. Not thread-safe; one event loop owns it.
    """

    def __init__(self, on_transition: Callable[[Transition], None] | None = None) -> None:
        self._on_transition = on_transition
        self._entered_swapping_from: PolicyState | None = None
        self._weights_known = True
        self._machine = Machine(
            model=self,
            states=PolicyState,
            initial=INITIAL,
            auto_transitions=False,
            queued=False,
            send_event=True,
            model_attribute="_state",
        )
        for row in TRANSITIONS:
            self._machine.add_transition(
                row.trigger.value, row.source, row.dest, conditions=row.guard.value if row.guard else None
            )

    @property
    def state(self) -> PolicyState:
        state: PolicyState = self._state  # type: ignore[attr-defined]
        return state

    def entered_from_draining(self, _: Any = None) -> bool:
        return self._entered_swapping_from is PolicyState.DRAINING

    def weights_known(self, _: Any = None) -> bool:
        return self._weights_known

    def fire(self, trigger: Trigger) -> Transition:
        """Take the transition or raise `IllegalTransitionError`; never waits, never half-happens."""
        source = self.state
        try:
            taken = getattr(self, trigger.value)()
        except MachineError as refused:
            raise IllegalTransitionError(source, trigger) from refused
        row = next(row for row in TRANSITIONS if (row.trigger, row.source) == (trigger, source))
        if not taken:
            raise IllegalTransitionError(source, trigger, row.guard)
        self._note(row)
        return row

    def _note(self, row: Transition) -> None:
        if row.trigger is Trigger.SWAP:
            self._entered_swapping_from = row.source
        elif row.trigger in (Trigger.FAIL, Trigger.COMMIT):
            self._weights_known = row.trigger is Trigger.COMMIT
        if self._on_transition is not None:
            self._on_transition(row)
