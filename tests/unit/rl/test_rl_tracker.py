"""Optimizer steps, pushes, and what is carried across a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aengine.policy.update import WeightUpdateAck
from aengine.rl.tracker import PolicyTracker


class FakeEngine:
    """Acknowledges updates, or fails them, and notes what it was given."""

    def __init__(self, *, failure: Exception | None = None) -> None:
        self.failure = failure
        self.version = 0
        self.updates: list[tuple[Mapping[str, Tensor], int | None, dict[str, Any]]] = []
        self.during_update: Any = lambda: None

    async def update_weights(
        self, source: Mapping[str, Tensor], *, train_step: int | None = None, **options: Any
    ) -> WeightUpdateAck:
        self.updates.append((source, train_step, options))
        self.during_update()
        if self.failure is not None:
            raise self.failure
        self.version += 1
        return WeightUpdateAck(
            policy_version=self.version,
            previous=self.version - 1,
            digest="digest",
            train_step=train_step,
            mode="wait",
            casts={},
            pages_invalidated=0,
            requests_affected=0,
            seconds=0.0,
        )


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


def test_each_step_counts_once_however_many_backward_passes_it_had(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    tracker = PolicyTracker(optimizer)
    for _ in range(3):
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert tracker.train_step == 3


def test_a_step_that_calls_its_closure_many_times_counts_once(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    tracker = PolicyTracker(optimizer)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    assert tracker.train_step == 1


def test_a_step_that_raises_does_not_count(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    tracker = PolicyTracker(optimizer)

    def closure() -> float:
        raise RuntimeError("loss is broken")

    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step(closure)
    assert tracker.train_step == 0


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_do_not_count(model: nn.Module, fused: bool) -> None:
    optimizer = optimizer_of(model, fused=fused)
    tracker = PolicyTracker(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        before = [parameter.clone() for parameter in model.parameters()]
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        assert changed == (factor == 1.0)
    assert tracker.train_step == 2


def test_several_optimizers_count_once_all_have_stepped() -> None:
    actor, critic = optimizer_of(nn.Linear(2, 2)), optimizer_of(nn.Linear(2, 2))
    tracker = PolicyTracker(actor, critic)
    steps = []
    for optimizer in (critic, critic, critic, actor, actor, critic):
        optimizer.step()
        steps.append(tracker.train_step)
    assert steps == [0, 0, 0, 1, 1, 2]


def test_one_optimizer_given_twice_is_one(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    tracker = PolicyTracker(optimizer, optimizer)
    optimizer.step()
    assert tracker.train_step == 1


async def test_push_carries_the_step_and_records_the_acknowledged_version(model: nn.Module) -> None:
    optimizer, engine = optimizer_of(model), FakeEngine()
    tracker = PolicyTracker(optimizer, model=model)
    optimizer.step()
    optimizer.step()
    assert tracker.steps_since_push == 2
    ack = await tracker.push(engine, mode="abort")
    source, train_step, options = engine.updates[0]
    assert (ack.policy_version, train_step, options) == (1, 2, {"mode": "abort"})
    assert torch.equal(source["weight"], model.weight)
    assert (tracker.pushed_version, tracker.pushed_step, tracker.steps_since_push) == (1, 2, 0)
    optimizer.step()
    assert tracker.steps_since_push == 1


async def test_push_takes_a_source_of_the_callers(model: nn.Module) -> None:
    engine = FakeEngine()
    source = {"weight": torch.zeros(1)}
    await PolicyTracker(optimizer_of(model), model=model).push(engine, source)
    assert engine.updates[0][0] is source


async def test_a_push_that_fails_is_not_recorded(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    tracker = PolicyTracker(optimizer, model=model)
    await tracker.push(FakeEngine())
    optimizer.step()
    with pytest.raises(RuntimeError, match="refused"):
        await tracker.push(FakeEngine(failure=RuntimeError("refused")))
    assert (tracker.pushed_version, tracker.pushed_step, tracker.steps_since_push) == (1, 0, 1)


async def test_a_step_taken_during_a_push_belongs_to_the_next(model: nn.Module) -> None:
    optimizer, engine = optimizer_of(model), FakeEngine()
    tracker = PolicyTracker(optimizer, model=model)
    optimizer.step()
    engine.during_update = optimizer.step
    await tracker.push(engine)
    assert (tracker.train_step, tracker.pushed_step, tracker.steps_since_push) == (2, 1, 1)


async def test_a_push_without_model_or_source_is_refused(model: nn.Module) -> None:
    engine = FakeEngine()
    with pytest.raises(TypeError, match="needs a source"):
        await PolicyTracker(optimizer_of(model)).push(engine)
    assert engine.updates == []


async def test_a_resumed_tracker_goes_on_where_it_was() -> None:
    first = [optimizer_of(nn.Linear(2, 2)) for _ in range(2)]
    tracker = PolicyTracker(*first, model=nn.Linear(2, 2))
    for optimizer in (*first, *first):
        optimizer.step()
    await tracker.push(FakeEngine())
    first[0].step()

    second = [optimizer_of(nn.Linear(2, 2)) for _ in range(2)]
    resumed = PolicyTracker(*second)
    resumed.load_state_dict(tracker.state_dict())
    assert (resumed.train_step, resumed.pushed_version, resumed.pushed_step) == (2, 1, 2)
    second[1].step()  # the other half of the step that was under way
    assert resumed.train_step == 3
    assert resumed.steps_since_push == 1


def test_a_closed_tracker_keeps_its_counts_and_counts_no_more(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    tracker = PolicyTracker(optimizer)
    optimizer.step()
    tracker.close()
    tracker.close()
    optimizer.step()
    assert tracker.train_step == 1
