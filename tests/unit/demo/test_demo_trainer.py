"""The demo's trainer verifies every sample before it learns from it."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
import torch
from attrs import evolve
from talking_support import talking_checkpoint

from aengine import CompletionOutput, Engine, PolicyVersion, SamplingParams
from aengine.demo.trainer import Group, Trainer, Verified
from aengine.errors import VerificationError

CHECKPOINT = talking_checkpoint()
PROMPTS = [[1, 4, 5, 2], [6], [1, 3, 3, 3, 3, 2, 7]]


def roll_out() -> tuple[list[Group], PolicyVersion]:
    async def run() -> tuple[list[Group], PolicyVersion]:
        async with Engine(CHECKPOINT) as engine:
            outputs = await engine.generate_batch(PROMPTS, SamplingParams(n=3, max_tokens=5, seed=1))
            return [Group(output, (1.0, 0.0, 0.5)) for output in outputs], engine.installed_policy

    return anyio.run(run)


@pytest.fixture(scope="module")
def rolled_out() -> tuple[list[Group], PolicyVersion]:
    return roll_out()


@pytest.fixture
def trainer() -> Trainer:
    return Trainer.of(CHECKPOINT, 1e-3)


def no_pause() -> None:
    pass


def gradient_norm(trainer: Trainer) -> float:
    grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    return float(torch.stack([grad.norm() for grad in grads]).norm()) if grads else 0.0


def changed(group: Group, change: Callable[[CompletionOutput], CompletionOutput]) -> Group:
    """The group with its second sample changed."""
    first, second, third = group.output.outputs
    return evolve(group, output=evolve(group.output, outputs=(first, change(second), third)))


def test_every_sample_is_recomputed_within_a_hair(
    trainer: Trainer, rolled_out: tuple[list[Group], PolicyVersion]
) -> None:
    groups, policy = rolled_out
    verified = trainer.verify(groups, policy, no_pause)
    assert verified.samples == 9
    assert 0 < verified.largest_difference < 1e-4
    assert gradient_norm(trainer) == 0


@pytest.mark.parametrize("by", [2e-3, -2e-3])
@pytest.mark.parametrize("place", [0, -1])
def test_a_tampered_logprob_is_found(
    trainer: Trainer, rolled_out: tuple[list[Group], PolicyVersion], by: float, place: int
) -> None:
    groups, policy = rolled_out

    def tamper(sample: CompletionOutput) -> CompletionOutput:
        logprobs = list(sample.logprobs)
        logprobs[place] += by
        return evolve(sample, logprobs=tuple(logprobs))

    bad = [groups[0], changed(groups[1], tamper), groups[2]]
    for check in (trainer.verify, trainer.backward):
        with pytest.raises(VerificationError, match=f"sample 1 of {groups[1].output.request_id}, token"):
            check(bad, policy, no_pause)


def test_a_sample_with_another_label_is_found(trainer: Trainer, rolled_out: tuple[list[Group], PolicyVersion]) -> None:
    groups, policy = rolled_out

    def relabel(sample: CompletionOutput) -> CompletionOutput:
        return evolve(sample, kv_spans=tuple(evolve(span, version=7) for span in sample.kv_spans))

    with pytest.raises(VerificationError, match="made under versions 0 to 7, not under 0 alone"):
        trainer.verify([changed(groups[0], relabel)], policy, no_pause)


def test_weights_that_are_not_those_of_the_label_are_found(
    trainer: Trainer, rolled_out: tuple[list[Group], PolicyVersion]
) -> None:
    groups, policy = rolled_out
    with torch.no_grad():
        next(trainer.model.parameters())[0, 0] += 1e-6
    with pytest.raises(VerificationError, match="not those of policy version 0"):
        trainer.backward(groups, policy, no_pause)


def test_the_gradient_of_all_groups_is_that_of_one_loss_over_all_tokens(
    trainer: Trainer, rolled_out: tuple[list[Group], PolicyVersion]
) -> None:
    groups, policy = rolled_out
    trainer.backward(groups, policy, no_pause)
    parameter = next(trainer.model.parameters())
    assert parameter.grad is not None
    found = parameter.grad.clone()

    trainer.optimizer.zero_grad()
    total, tokens = torch.zeros(()), 0
    for group in groups:
        rewards = torch.tensor(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for sample, advantage in zip(group.output.outputs, advantages, strict=True):
            ids = torch.tensor([[*group.output.prompt_token_ids, *sample.token_ids]])
            logits = trainer.model(input_ids=ids).logits[0, len(group.output.prompt_token_ids) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])
            total = total - (logprobs * advantage).sum()
            tokens += len(sample.token_ids)
    (total / tokens).backward()
    torch.testing.assert_close(found, parameter.grad, atol=1e-5, rtol=1e-3)


def test_equal_rewards_are_verified_and_teach_nothing(
    trainer: Trainer, rolled_out: tuple[list[Group], PolicyVersion]
) -> None:
    groups, policy = rolled_out
    equal = [evolve(group, rewards=(1.0, 1.0, 1.0)) for group in groups]
    assert trainer.backward(equal, policy, no_pause).samples == 9
    assert gradient_norm(trainer) == 0


def test_a_step_makes_the_rewarded_sample_likelier_and_is_counted(
    trainer: Trainer, rolled_out: tuple[list[Group], PolicyVersion]
) -> None:
    groups, policy = rolled_out
    prompt, best = groups[0].output.prompt_token_ids, groups[0].output.outputs[0].token_ids

    def loglikelihood() -> float:
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([[*prompt, *best]])).logits[0, len(prompt) - 1 : -1]
        return float(logits.log_softmax(-1).gather(-1, torch.tensor(best)[:, None]).sum())

    before = loglikelihood()
    trainer.backward(groups, policy, no_pause)
    trainer.step()
    assert loglikelihood() > before
    assert trainer.tracker.train_step == 1


def test_sums_keep_the_largest_difference() -> None:
    assert Verified(2, 1e-5, 2) + Verified(3, 1e-6, 1) == Verified(5, 1e-5, 3)
