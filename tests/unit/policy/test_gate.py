"""Leases are the only way to the cache, and a swap finds none in use."""

import anyio
import pytest

from aengine.errors import EngineInvalidatedError, IllegalTransitionError, StaleLeaseError
from aengine.policy.gate import PolicyGate
from aengine.policy.lease import StableLease
from aengine.policy.version import PolicyVersion
from statemachines.policy import PERMISSIONS, Operation, PolicyState

V0, V1 = PolicyVersion(0, "a"), PolicyVersion(1, "b")


def bump(lease: StableLease) -> int:
    lease.bump_epoch()
    return 7


def gate_in(state: PolicyState) -> PolicyGate:
    gate = PolicyGate(V0)
    if state is not PolicyState.SERVING:
        gate.drain(lambda: True, "test")
    if state is PolicyState.SWAPPING:
        gate.swap("test")
    return gate


def lease_of(gate: PolicyGate) -> StableLease:
    lease = gate.try_lease()
    assert lease is not None
    return lease


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("state", [PolicyState.SERVING, PolicyState.DRAINING])
def test_a_lease_permits_exactly_what_the_table_permits(state: PolicyState, operation: Operation) -> None:
    gate = PolicyGate(V0)
    lease = lease_of(gate)
    if state is PolicyState.DRAINING:
        gate.drain(lambda: True, "test")
    if state in PERMISSIONS[operation]:
        lease.check(operation)
    else:
        with pytest.raises(StaleLeaseError, match=state.value):
            lease.check(operation)


@pytest.mark.parametrize("operation", Operation)
def test_the_lease_of_a_commit_permits_invalidation_only(operation: Operation) -> None:
    gate = gate_in(PolicyState.SWAPPING)
    refused: list[StaleLeaseError] = []

    def invalidate(lease: StableLease) -> int:
        try:
            lease.check(operation)
        except StaleLeaseError as error:
            refused.append(error)
        return bump(lease)

    assert gate.commit(V1, invalidate, "test") == 7
    assert bool(refused) == (operation is not Operation.INVALIDATE)
    assert (gate.state, gate.version, gate.epoch) == (PolicyState.SERVING, V1, 1)


def test_an_ended_lease_permits_nothing() -> None:
    gate = PolicyGate(V0)
    with lease_of(gate) as lease:
        lease.check(Operation.EXTEND)
    with pytest.raises(StaleLeaseError, match="has ended"):
        lease.check(Operation.EXTEND)
    with pytest.raises(StaleLeaseError):
        lease.bump_epoch()
    assert gate.epoch == 0


def test_no_lease_while_weights_change() -> None:
    assert gate_in(PolicyState.SWAPPING).try_lease() is None


def test_no_further_lease_once_the_drain_is_done() -> None:
    gate = PolicyGate(V0)
    done = False
    gate.drain(lambda: done, "test")
    lease_of(gate).end()
    done = True
    assert gate.try_lease() is None
    gate.cancel("test")
    lease_of(gate).end()


def test_swap_is_refused_while_a_lease_is_in_use() -> None:
    gate = PolicyGate(V0)
    lease = lease_of(gate)
    gate.drain(lambda: True, "test")
    with pytest.raises(StaleLeaseError, match="1 lease"):
        gate.swap("test")
    assert gate.state is PolicyState.DRAINING
    lease.end()
    gate.swap("test")


def test_a_version_cannot_be_installed_outside_a_swap() -> None:
    gate = PolicyGate(V0)
    with pytest.raises(IllegalTransitionError, match="commit"):
        gate.commit(V1, bump, "test")
    assert (gate.version, gate.epoch) == (V0, 0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_drained_waits_for_the_condition_and_the_last_lease(backend: str) -> None:
    async def scenario() -> list[str]:
        gate, log, done = PolicyGate(V0), [], [False]
        lease = lease_of(gate)
        gate.drain(lambda: done[0], "test")

        async def wait() -> None:
            await gate.drained()
            log.append("drained")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            done[0] = True
            log.append("condition")
            await anyio.wait_all_tasks_blocked()
            lease.end()
            log.append("lease ended")
        return log

    assert anyio.run(scenario, backend=backend) == ["condition", "lease ended", "drained"]


def always() -> bool:
    return True


def test_a_hold_is_a_drain_that_lasts_until_it_is_lifted() -> None:
    gate = PolicyGate(V0)
    gate.hold(always, "pause")
    assert (gate.state, gate.is_held) == (PolicyState.DRAINING, True)
    assert gate.try_lease() is None
    gate.lift("resume")
    assert (gate.state, gate.is_held) == (PolicyState.SERVING, False)
    gate.lift("resume again")
    lease_of(gate).end()


def test_an_update_under_a_hold_finds_the_drain_done_and_leaves_the_hold() -> None:
    gate = PolicyGate(V0)
    gate.hold(always, "pause")
    gate.drain(lambda: False, "update")
    gate.swap("update")
    gate.commit(V1, bump, "update")
    assert (gate.state, gate.version, gate.is_held) == (PolicyState.DRAINING, V1, True)
    assert gate.try_lease() is None
    gate.lift("resume")
    assert gate.state is PolicyState.SERVING


@pytest.mark.parametrize("end", ["cancel", "rollback"])
def test_an_update_that_fails_under_a_hold_leaves_the_hold(end: str) -> None:
    gate = PolicyGate(V0)
    gate.hold(always, "pause")
    gate.drain(lambda: False, "update")
    if end == "rollback":
        gate.swap("update")
        gate.rollback("update failed")
    else:
        gate.cancel("withdrawn")
    assert (gate.state, gate.version, gate.is_held) == (PolicyState.DRAINING, V0, True)
    gate.lift("resume")
    assert gate.state is PolicyState.SERVING


def test_a_hold_that_comes_during_an_update_waits_for_it() -> None:
    gate = PolicyGate(V0)
    gate.drain(lambda: False, "update")
    gate.hold(always, "pause")
    lease_of(gate).end()  # the update's drain still lets requests finish
    gate.cancel("withdrawn")
    assert gate.state is PolicyState.DRAINING
    assert gate.try_lease() is None


def test_a_hold_lifted_during_an_update_does_not_end_the_update() -> None:
    gate = PolicyGate(V0)
    gate.hold(lambda: False, "pause")
    gate.drain(lambda: False, "update")
    gate.lift("resume")
    assert gate.state is PolicyState.DRAINING
    gate.cancel("withdrawn")
    assert gate.state is PolicyState.SERVING


def test_a_hold_that_is_withdrawn_leaves_the_others() -> None:
    gate = PolicyGate(V0)
    first, second = (lambda: True), (lambda: False)
    gate.hold(first, "one trainer")
    gate.hold(second, "another")
    lease_of(gate).end()  # the second counts, and it lets requests finish
    gate.withdraw_hold(second, "its caller was cancelled")
    assert gate.is_held
    assert gate.try_lease() is None
    gate.withdraw_hold(second, "again")
    gate.withdraw_hold(first, "its caller was cancelled too")
    assert (gate.state, gate.is_held) == (PolicyState.SERVING, False)


def test_torn_weights_fence_the_gate_until_an_update_commits() -> None:
    gate = gate_in(PolicyState.SWAPPING)
    assert gate.fail(EngineInvalidatedError("torn"), bump) == 7
    assert (gate.state, gate.version, gate.last_number) == (PolicyState.INVALIDATED, None, 0)
    assert gate.try_lease() is None
    with pytest.raises(EngineInvalidatedError, match="torn"):
        gate.installed()
    gate.swap("recovery")
    assert not gate.can_roll_back
    gate.commit(V1, bump, "recovery")
    assert (gate.state, gate.version, gate.fence) == (PolicyState.SERVING, V1, None)


def test_an_invalidation_lease_is_to_be_had_whenever_weights_stand_still() -> None:
    for state in (PolicyState.SERVING, PolicyState.DRAINING):
        lease = gate_in(state).try_invalidation_lease()
        assert lease is not None
        lease.bump_epoch()
    assert gate_in(PolicyState.SWAPPING).try_invalidation_lease() is None


def test_observers_hear_of_every_transition_with_its_reason() -> None:
    gate, heard = PolicyGate(V0), []
    gate.on_transition(lambda record: heard.append((record.trigger.value, record.version, record.reason)))
    gate.drain(always, "update 1")
    gate.swap("update 1")
    gate.commit(V1, bump, "update 1")
    assert heard == [
        ("drain", 0, "update 1"),
        ("swap", 0, "update 1"),
        ("commit", 1, "update 1"),
        ("resume", 1, "update 1"),
    ]
