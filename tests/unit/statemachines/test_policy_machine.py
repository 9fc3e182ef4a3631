"""The policy machine is the table in the design, cell by cell."""

import itertools
import subprocess
import sys

import pytest

from statemachines import render
from statemachines.policy import (
    PERMISSIONS,
    TRANSITIONS,
    IllegalTransitionError,
    Operation,
    PolicyMachine,
    PolicyState,
    Transition,
    Trigger,
    permits,
)

PATHS: dict[PolicyState, tuple[Trigger, ...]] = {
    PolicyState.SERVING: (),
    PolicyState.DRAINING: (Trigger.DRAIN,),
    PolicyState.SWAPPING: (Trigger.DRAIN, Trigger.SWAP),
    PolicyState.INVALIDATED: (Trigger.DRAIN, Trigger.SWAP, Trigger.COMMIT),
}
DEST = {(row.source, row.trigger): row.dest for row in TRANSITIONS}


def machine_after(*triggers: Trigger) -> PolicyMachine:
    machine = PolicyMachine()
    for trigger in triggers:
        machine.fire(trigger)
    return machine


@pytest.mark.parametrize(("state", "trigger"), list(itertools.product(PolicyState, Trigger)))
def test_every_trigger_in_every_state_does_what_the_table_says(state: PolicyState, trigger: Trigger) -> None:
    machine = machine_after(*PATHS[state])
    assert machine.state is state
    if (state, trigger) in DEST:
        machine.fire(trigger)
        assert machine.state is DEST[state, trigger]
    else:
        with pytest.raises(IllegalTransitionError) as refused:
            machine.fire(trigger)
        assert (refused.value.state, refused.value.trigger) == (state, trigger)
        assert state.value in str(refused.value) and trigger.value in str(refused.value)
        assert machine.state is state


def test_torn_weights_cannot_resume_until_an_update_commits() -> None:
    machine = machine_after(Trigger.DRAIN, Trigger.SWAP, Trigger.FAIL)
    with pytest.raises(IllegalTransitionError, match="weights_known"):
        machine.fire(Trigger.RESUME)
    for trigger in (Trigger.SWAP, Trigger.FAIL):
        machine.fire(trigger)
    with pytest.raises(IllegalTransitionError, match="weights_known"):
        machine.fire(Trigger.RESUME)
    for trigger in (Trigger.SWAP, Trigger.COMMIT, Trigger.RESUME):
        machine.fire(trigger)
    assert machine.state is PolicyState.SERVING


def test_a_recovery_cannot_be_rolled_back() -> None:
    machine = machine_after(Trigger.DRAIN, Trigger.SWAP, Trigger.FAIL, Trigger.SWAP)
    with pytest.raises(IllegalTransitionError, match="entered_from_draining"):
        machine.fire(Trigger.ROLLBACK)
    assert machine.state is PolicyState.SWAPPING


def test_an_observer_sees_each_transition_once_and_no_refused_one() -> None:
    seen: list[Transition] = []
    machine = PolicyMachine(seen.append)
    machine.fire(Trigger.DRAIN)
    with pytest.raises(IllegalTransitionError):
        machine.fire(Trigger.COMMIT)
    machine.fire(Trigger.CANCEL)
    assert [row.trigger for row in seen] == [Trigger.DRAIN, Trigger.CANCEL]


def test_no_state_is_without_a_way_out() -> None:
    assert {row.source for row in TRANSITIONS} == set(PolicyState)


def test_the_permission_table_is_the_designs() -> None:
    assert set(PERMISSIONS) == set(Operation)
    rows = {
        operation: "".join("y" if permits(state, operation) else "n" for state in PolicyState)
        for operation in Operation
    }
    admission = {Operation.LOOKUP, Operation.ALLOC}
    for operation, row in rows.items():
        if operation in admission:
            assert row == "ynnn"
        elif operation is Operation.WRITE_WEIGHTS:
            assert row == "nnyn"
        elif operation is Operation.INVALIDATE:
            assert row == "yyny"
        else:
            assert row == "yynn"


def test_the_module_prints_four_states_and_seven_triggers() -> None:
    printed = subprocess.run([sys.executable, "-m", "statemachines"], capture_output=True, text=True, check=True).stdout
    assert printed == render.report() + "\n"
    diagram = printed.split("```mermaid")[1].split("```")[0]
    for name in (*PolicyState, *Trigger):
        assert name.value in diagram


def test_the_package_imports_nothing_of_the_engine() -> None:
    code = "import sys, statemachines.render; print([m for m in ('aengine', 'torch', 'anyio') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
