"""An update is committed or untouched, whatever happens to it and to its caller."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping

import anyio
import pytest
import torch
from attrs import define, field
from torch import Tensor

from aengine.errors import EngineClosedError, StaleVersionError, WeightsMismatchError, WeightUpdateError
from aengine.policy.gate import PolicyGate, StableLease
from aengine.policy.update import StagedWeights, WeightUpdate, WeightUpdateAck, WeightUpdater
from aengine.policy.version import PolicyVersion
from aengine.signal import Signal
from statemachines.policy import PolicyState

BACKENDS = ["asyncio", "trio"]


@define
class Holder:
    """Holds one tensor; staging can be held up or made to fail."""

    installed: StagedWeights = StagedWeights("w0", "d0")
    error: Exception | None = None
    flip_error: Exception | None = None
    may_stage: threading.Event = field(factory=threading.Event)
    staged: list[Mapping[str, Tensor]] = field(factory=list)

    def stage(self, tensors: Mapping[str, Tensor]) -> StagedWeights:
        assert self.may_stage.wait(5)
        self.staged.append(tensors)
        if self.error is not None:
            raise self.error
        return StagedWeights(f"w{len(self.staged)}", f"d{len(self.staged)}")

    def flip(self, staged: StagedWeights) -> None:
        if self.flip_error is not None:
            raise self.flip_error
        self.installed = staged


@define
class Target:
    started: int = 0

    def is_drained(self) -> bool:
        return self.started == 0

    def num_started(self) -> int:
        return self.started


@define
class Bench:
    holder: Holder = field(factory=Holder)
    target: Target = field(factory=Target)
    gate: PolicyGate = field(factory=lambda: PolicyGate(PolicyVersion(0, "d0")))
    dropped: int = 5
    updater: WeightUpdater = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.updater = WeightUpdater(self.gate, self.holder, self.target, self._invalidate)
        self.holder.may_stage.set()

    def _invalidate(self, lease: StableLease) -> int:
        lease.bump_epoch()
        return self.dropped

    async def update(self, **fields: object) -> WeightUpdateAck:
        return await self.updater.submit(WeightUpdate({"w": torch.zeros(1)}, **fields))  # type: ignore[arg-type]

    def finish_requests(self) -> None:
        self.target.started = 0
        lease = self.gate.try_lease()
        assert lease is None
        self.gate.changed.set()

    def assert_untouched(self) -> None:
        assert (self.gate.state, self.gate.version, self.gate.epoch) == (PolicyState.SERVING, PolicyVersion(0, "d0"), 0)
        assert self.holder.installed.weights == "w0"


def with_updater(backend: str, scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = Bench()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.updater.run)
            await scenario(bench)
            tasks.cancel_scope.cancel()

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_committed_update_is_acknowledged_with_all_that_happened(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        ack = await bench.update(train_step=12)
        assert (ack.policy_version, ack.previous, ack.digest, ack.train_step) == (1, 0, "d1", 12)
        assert (ack.pages_invalidated, ack.requests_affected, ack.mode) == (5, 0, "wait")
        assert bench.gate.version == PolicyVersion(1, "d1", 12)
        assert (bench.gate.state, bench.gate.epoch, bench.holder.installed.weights) == (PolicyState.SERVING, 1, "w1")

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_waits_for_started_requests_and_counts_them(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.target.started = 3
        acks: list[WeightUpdateAck] = []

        async def caller() -> None:
            acks.append(await bench.update())

        async with anyio.create_task_group() as callers:
            callers.start_soon(caller)
            while bench.gate.state is not PolicyState.DRAINING:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert not acks
            bench.finish_requests()
        assert acks[0].requests_affected == 3

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 0}, "version 0 is not greater than version 0"),
        ({"version": -3}, "version -3"),
        ({"expected_version": 4}, "expected_version is 4, but version 0"),
    ],
)
def test_a_stale_version_is_refused_before_anything_is_staged(
    backend: str, fields: dict[str, int], message: str
) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(StaleVersionError, match=message):
            await bench.update(**fields)
        bench.assert_untouched()
        assert not bench.holder.staged

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_versions_are_compared_when_the_updates_turn_comes(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        results: dict[int, object] = {}

        async def caller(name: int) -> None:
            try:
                results[name] = await bench.update(expected_version=0)
            except StaleVersionError as error:
                results[name] = error

        bench.holder.may_stage.clear()
        async with anyio.create_task_group() as callers:
            callers.start_soon(caller, 1)
            await anyio.lowlevel.checkpoint()
            callers.start_soon(caller, 2)
            await anyio.lowlevel.checkpoint()
            bench.holder.may_stage.set()
        kinds = {type(result) for result in results.values()}
        assert kinds == {WeightUpdateAck, StaleVersionError}
        assert bench.gate.version.number == 1

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_jump_in_the_version_is_accepted(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        assert (await bench.update(version=40)).policy_version == 40
        assert (await bench.update()).policy_version == 41

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_source_leaves_everything_and_the_next_update_works(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.holder.error = WeightsMismatchError(missing=["model.norm.weight"])
        with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight") as failed:
            await bench.update()
        assert (failed.value.stage, failed.value.engine_state) == ("stage", "Serving")
        assert failed.value.__cause__ is bench.holder.error
        bench.assert_untouched()
        bench.holder.error = None
        assert (await bench.update()).policy_version == 1

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_flip_rolls_back(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.holder.flip_error = RuntimeError("device lost")
        with pytest.raises(WeightUpdateError, match="device lost") as failed:
            await bench.update()
        assert (failed.value.stage, failed.value.engine_state) == ("swap", "Serving")
        bench.assert_untouched()

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_caller_cancelled_while_it_drains_withdraws_the_update_at_once(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.target.started = 1
        after = Signal()
        async with anyio.create_task_group() as callers:

            async def caller() -> None:
                try:
                    await bench.update()
                finally:
                    bench.assert_untouched()
                    after.set()

            callers.start_soon(caller)
            while bench.gate.state is not PolicyState.DRAINING:
                await anyio.lowlevel.checkpoint()
            callers.cancel_scope.cancel()
        bench.assert_untouched()
        bench.target.started = 0
        assert (await bench.update()).policy_version == 1

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_caller_cancelled_while_it_stages_withdraws_the_update(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.holder.may_stage.clear()
        async with anyio.create_task_group() as callers:
            callers.start_soon(bench.update)
            await anyio.lowlevel.checkpoint()
            callers.cancel_scope.cancel()
        bench.holder.may_stage.set()
        assert (await bench.update()).policy_version == 1
        assert len(bench.holder.staged) in (1, 2)

    with_updater(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_withdraws_what_has_not_flipped_and_tells_the_callers(backend: str) -> None:
    async def scenario(bench: Bench) -> None:
        bench.target.started = 1
        errors: list[BaseException] = []

        async def caller() -> None:
            with pytest.raises(EngineClosedError) as closed:
                await bench.update()
            errors.append(closed.value)

        async with anyio.create_task_group() as callers:
            callers.start_soon(caller)
            callers.start_soon(caller)
            while bench.gate.state is not PolicyState.DRAINING:
                await anyio.lowlevel.checkpoint()
            bench.updater.withdraw_all(EngineClosedError("the engine was closed"))
        assert len(errors) == 2
        bench.assert_untouched()

    with_updater(backend, scenario)


def test_a_native_timeout_around_an_update_gets_through() -> None:
    import asyncio

    async def scenario(bench: Bench) -> None:
        bench.target.started = 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.update(), 0.05)
        bench.assert_untouched()

    with_updater("asyncio", scenario)
