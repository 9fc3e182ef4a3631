"""An engine keeps the weights it has installed, while requests run and updates wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from attrs import define, field
from case_support import GREEDY, MODEL, WEIGHTS, both_backends, new_engine
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from aengine import BlockingEngine, Engine, EngineConfig, EngineInvalidatedError, WeightUpdateError
from aengine.audit.snapshots import SnapshotStore
from aengine.errors import SnapshotError
from aengine.model.spec import ModelSpec
from aengine.policy.version import PolicyVersion
from aengine.testing import TINY, FaultInjector, until
from statemachines.policy import PolicyState


@define(eq=False)
class SlowStore(SnapshotStore):
    """Begins to write only when told to."""

    begun: threading.Event = field(factory=threading.Event)
    go_on: threading.Event = field(factory=threading.Event)

    def save(self, policy: PolicyVersion, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        SnapshotStore.save(self, policy, spec, tensors)


def assert_holds(store: SnapshotStore, number: int, weights: int) -> None:
    snapshot = store.load(number)
    assert (snapshot.policy.number, snapshot.spec) == (number, MODEL.spec)
    assert snapshot.tensors.keys() == WEIGHTS[weights].keys()
    assert all(torch.equal(tensor, WEIGHTS[weights][name]) for name, tensor in snapshot.tensors.items())


@both_backends
async def test_each_version_is_kept_with_its_policy(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    async with new_engine() as engine:
        assert await engine.save_snapshot(store) == engine.installed_policy
        await engine.update_weights(WEIGHTS[1], train_step=7)
        policy = await engine.save_snapshot(store)
        assert (policy, policy.train_step) == (engine.installed_policy, 7)
        assert store.load(1).policy == policy
    assert_holds(store, 0, 0)
    assert_holds(store, 1, 1)


@both_backends
async def test_an_update_waits_for_the_snapshot_and_requests_do_not(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    async with new_engine() as engine, anyio.create_task_group() as tasks:
        await engine.generate([1, 2, 3], GREEDY)  # compiles, which can take long
        tasks.start_soon(engine.save_snapshot, store)
        await until(store.begun.is_set)
        assert (await engine.generate([1, 2, 3], GREEDY)).finished
        tasks.start_soon(engine.update_weights, WEIGHTS[1])
        await until(lambda: engine.state is PolicyState.DRAINING)
        await anyio.wait_all_tasks_blocked()
        assert (engine.policy_version, engine.state) == (0, PolicyState.DRAINING)
        store.go_on.set()
        await until(lambda: engine.policy_version == 1)
    assert store.versions() == [0]
    assert_holds(store, 0, 0)


@both_backends
async def test_a_snapshot_waits_for_an_update_that_is_at_its_swap_and_keeps_the_new_version(tmp_path: Path) -> None:
    store, faults = SnapshotStore(tmp_path / "snapshots"), FaultInjector()
    async with new_engine(ledger=tmp_path / "ledger") as engine, anyio.create_task_group() as tasks:
        faults.attach(engine)
        hold = faults.hold("ledger sync", at=1)
        tasks.start_soon(engine.update_weights, WEIGHTS[1])
        await until(hold.reached.is_set)
        assert engine.state is PolicyState.SWAPPING
        tasks.start_soon(engine.save_snapshot, store)
        await anyio.wait_all_tasks_blocked()
        assert store.versions() == []
        hold.release()
    assert store.versions() == [1]
    assert_holds(store, 1, 1)


@both_backends
async def test_a_snapshot_can_be_taken_under_a_pause(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    async with new_engine() as engine:
        await engine.pause_generation()
        with anyio.fail_after(20):
            await engine.save_snapshot(store)
            await engine.update_weights(WEIGHTS[1])
            await engine.save_snapshot(store)
        assert engine.is_paused()
        await engine.resume_generation()
    assert_holds(store, 0, 0)
    assert_holds(store, 1, 1)


@both_backends
async def test_a_cancelled_snapshot_ends_when_its_writing_does(tmp_path: Path) -> None:
    store, ended = SlowStore(tmp_path), []

    async with new_engine() as engine, anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def save() -> None:
            with scope:
                await engine.save_snapshot(store)
                ended.append(store.versions())
                await anyio.sleep_forever()

        tasks.start_soon(save)
        await until(store.begun.is_set)
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not ended
        store.go_on.set()
        await until(lambda: ended)
        assert ended == [[0]]
        assert (await engine.update_weights(WEIGHTS[1])).policy_version == 1
    assert_holds(store, 0, 0)


async def test_a_snapshot_whose_task_is_cancelled_natively_ends_when_its_writing_does(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    async with new_engine() as engine:
        task = asyncio.create_task(engine.save_snapshot(store))
        await until(store.begun.is_set)
        task.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not task.done()
        store.go_on.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (await engine.update_weights(WEIGHTS[1])).policy_version == 1
    assert_holds(store, 0, 0)


@both_backends
async def test_a_snapshot_that_fails_lets_go_of_the_version(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    async with new_engine() as engine:
        with pytest.raises(SnapshotError, match="cannot be read or written"):
            await engine.save_snapshot(SnapshotStore(tmp_path / "file"))
        assert (await engine.update_weights(WEIGHTS[1])).policy_version == 1


@both_backends
async def test_a_fenced_engine_has_nothing_to_keep(tmp_path: Path) -> None:
    store, faults = SnapshotStore(tmp_path / "snapshots"), FaultInjector()
    faults.fail("weight", at=3)
    async with new_engine(staging="none") as engine:
        with pytest.raises(WeightUpdateError):
            await engine.update_weights(faults.weights(WEIGHTS[1]))
        with pytest.raises(EngineInvalidatedError):
            await engine.save_snapshot(store)
    assert not store.path.exists()


@both_backends
async def test_weights_that_changed_under_the_engine_are_not_kept(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    async with new_engine() as engine:
        tensors: Any = engine._opened().runner.decoder.weights.tensors
        tensors["model.norm.weight"][0] += 1.0
        with pytest.raises(SnapshotError, match="the tensors given as version 0 have digest"):
            await engine.save_snapshot(store)
    assert store.versions() == []


@both_backends
async def test_shared_parameters_are_kept_before_their_owner_may_change_them(tmp_path: Path) -> None:
    store, log = SlowStore(tmp_path), []
    module = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in TINY.items() if key != "architectures"}))
    weight = module.model.norm.weight

    async with Engine(module, EngineConfig(num_pages=16), share=True) as engine, anyio.create_task_group() as tasks:

        async def train() -> None:
            async with engine.weight_update():
                log.append("body")
                weight.data.mul_(2.0)

        tasks.start_soon(engine.save_snapshot, store)
        await until(store.begun.is_set)
        tasks.start_soon(train)
        await anyio.wait_all_tasks_blocked()
        assert not log
        store.go_on.set()
        await until(lambda: engine.policy_version == 1)
        await engine.save_snapshot(store)
    before, after = (store.load(number).tensors["model.norm.weight"] for number in (0, 1))
    assert torch.equal(after, 2 * before) and torch.equal(after, weight.data)


def test_the_blocking_engine_keeps_snapshots_too(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    with BlockingEngine(MODEL, EngineConfig(num_pages=16)) as engine:
        assert engine.save_snapshot(store) == engine.installed_policy
    assert_holds(store, 0, 0)
    assert BlockingEngine.save_snapshot.__doc__ == Engine.save_snapshot.__doc__
