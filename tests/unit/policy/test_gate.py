"""Leases are the only way to the cache, and a swap finds none in use."""

import anyio
import pytest

from aengine.errors import IllegalTransitionError, StaleLeaseError
from aengine.policy.gate import PolicyGate, StableLease
from aengine.policy.version import PolicyVersion
from statemachines.policy import PERMISSIONS, Operation, PolicyState

V0, V1 = PolicyVersion(0, "a"), PolicyVersion(1, "b")


def bump(lease: StableLease) -> int:
    lease.bump_epoch()
    return 7


def gate_in(state: PolicyState) -> PolicyGate:
    gate = PolicyGate(V0)
    if state is not PolicyState.SERVING:
        gate.drain(lambda: True)
    if state is PolicyState.SWAPPING:
        gate.swap()
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
        gate.drain(lambda: True)
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

    assert gate.commit(V1, invalidate) == 7
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
    gate.drain(lambda: done)
    lease_of(gate).end()
    done = True
    assert gate.try_lease() is None
    gate.cancel()
    lease_of(gate).end()


def test_swap_is_refused_while_a_lease_is_in_use() -> None:
    gate = PolicyGate(V0)
    lease = lease_of(gate)
    gate.drain(lambda: True)
    with pytest.raises(StaleLeaseError, match="1 lease"):
        gate.swap()
    assert gate.state is PolicyState.DRAINING
    lease.end()
    gate.swap()


def test_a_version_cannot_be_installed_outside_a_swap() -> None:
    gate = PolicyGate(V0)
    with pytest.raises(IllegalTransitionError, match="commit"):
        gate.commit(V1, bump)
    assert (gate.version, gate.epoch) == (V0, 0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_drained_waits_for_the_condition_and_the_last_lease(backend: str) -> None:
    async def scenario() -> list[str]:
        gate, log, done = PolicyGate(V0), [], [False]
        lease = lease_of(gate)
        gate.drain(lambda: done[0])

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
