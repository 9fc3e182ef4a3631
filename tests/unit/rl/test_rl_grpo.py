"""Advantages and losses against cases worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aengine.errors import RolloutBatchError
from aengine.rl.grpo import GRPOMetrics, group_advantages, grpo_loss

LN2 = math.log(2.0)


def test_advantages_are_standard_scores_within_each_group() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), eps=0.0 + 1e-12)
    # mean 2, unbiased deviation sqrt(2): -1/sqrt(2), 1/sqrt(2); a group without spread gets 0
    torch.testing.assert_close(advantages, torch.tensor([[-0.70710678, 0.70710678], [0.0, 0.0]]))


def test_unscaled_advantages_are_distances_from_the_mean() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 2.0, 6.0]]), scale_by_std=False)
    assert advantages.tolist() == [[-2.0, -1.0, 3.0]]


def test_places_without_a_sample_take_no_part_in_their_group() -> None:
    rewards = torch.tensor([[1.0, 3.0, 50.0], [4.0, 70.0, float("nan")]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    advantages = group_advantages(rewards, mask, scale_by_std=False)
    assert advantages.tolist() == [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    scaled = group_advantages(rewards, mask, eps=1e-12)
    torch.testing.assert_close(scaled, torch.tensor([[-0.70710678, 0.70710678, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("size", range(1, 12))
def test_equal_rewards_give_no_advantage_whatever_their_rounding(size: int) -> None:
    assert group_advantages(torch.full((1, size), 0.1)).abs().max() < 1e-6


def test_integer_rewards_are_taken() -> None:
    advantages = group_advantages(torch.tensor([[0, 2]]), scale_by_std=False)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [[-1.0, 1.0]]


def ratios(*values: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities with these ratios to old ones of log(1/2)."""
    old = torch.full((1, len(values)), -LN2)
    return (old + torch.tensor([values]).log()).requires_grad_(), old


# Ratios 1.5 and 0.5, clipped to [0.8, 1.2] where that is smaller:
# advantage +1: min(1.5, 1.2) = 1.2, min(0.5, 0.8) = 0.5;  advantage -1: min(-1.5, -1.2) = -1.5, min(-0.5, -0.8) = -0.8
@pytest.mark.parametrize(
    ("advantage", "expected", "gradient"), [(1.0, -(1.2 + 0.5) / 2, [0.0, -0.25]), (-1.0, (1.5 + 0.8) / 2, [0.75, 0.0])]
)
def test_the_loss_is_clipped_on_the_side_that_would_gain(
    advantage: float, expected: float, gradient: list[float]
) -> None:
    logprobs, old = ratios(1.5, 0.5)
    loss, metrics = grpo_loss(logprobs, old, torch.tensor([advantage]), torch.ones(1, 2, dtype=torch.bool))
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx(gradient)  # of -ratio * advantage / 2, where not clipped
    assert metrics.clip_fraction == 0.5


def test_clip_higher_widens_the_upper_side_only() -> None:
    logprobs, old = ratios(1.5, 0.5)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = grpo_loss(logprobs, old, torch.tensor([1.0]), mask, clip_low=0.2, clip_high=0.4)
    assert loss.item() == pytest.approx(-(1.4 + 0.5) / 2)
    loss, _ = grpo_loss(logprobs, old, torch.tensor([-1.0]), mask, clip_low=0.2, clip_high=0.4)
    assert loss.item() == pytest.approx((1.5 + 0.8) / 2)


def three_samples() -> tuple[Tensor, Tensor, Tensor]:
    """On-policy log-probabilities [1, 3, 4], advantages [1, 3], mask: 4, 1 and no tokens."""
    mask = torch.tensor([[[True] * 4, [True, False, False, False], [False] * 4]])
    return torch.full((1, 3, 4), -1.0), torch.tensor([[1.0, -2.0, 100.0]]), mask


# Per token the loss is minus the advantage: -1 four times, 2 once.
@pytest.mark.parametrize(
    ("normalize", "constant", "expected"),
    [("token", None, (-4 + 2) / 5), ("sequence", None, (-1 + 2) / 2), ("constant", 8.0, (-4 + 2) / (2 * 8))],
)
def test_the_three_normalisations(normalize: str, constant: float | None, expected: float) -> None:
    logprobs, advantages, mask = three_samples()
    loss, _ = grpo_loss(logprobs, logprobs, advantages, mask, normalize=normalize, constant=constant)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(expected)


def test_advantages_may_be_given_per_token_and_groups_flattened() -> None:
    logprobs, advantages, mask = three_samples()
    per_sample, _ = grpo_loss(logprobs, logprobs, advantages, mask)
    per_token, _ = grpo_loss(logprobs, logprobs, advantages.unsqueeze(-1).expand(1, 3, 4), mask)
    flat, _ = grpo_loss(logprobs[0], logprobs[0], advantages[0], mask[0])
    assert per_sample == per_token == flat


def test_the_reference_term_is_added_with_its_coefficient() -> None:
    logprobs, old = ratios(1.0, 1.0)
    reference = old + torch.tensor([[LN2, 0.0]])  # reference / policy = 2, 1: 2 - ln 2 - 1 and 0
    mask = torch.ones(1, 2, dtype=torch.bool)
    expected = (1.0 - LN2) / 2
    loss, metrics = grpo_loss(logprobs, old, torch.zeros(1), mask, ref_logprobs=reference, kl_coef=0.5)
    assert loss.item() == pytest.approx(0.5 * expected)
    assert metrics.ref_kl == pytest.approx(expected)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.5 * (1 - 2) / 2, 0.0])


def test_importance_weights_are_truncated_and_carry_no_gradient() -> None:
    logprobs, old = ratios(1.0, 1.0)
    behaviour = old - torch.tensor([[math.log(4.0), math.log(0.5)]])  # old / behaviour = 4, 0.5
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, metrics = grpo_loss(
        logprobs, old, torch.tensor([1.0]), mask, behaviour_logprobs=behaviour, importance_cap=2.0
    )
    assert loss.item() == pytest.approx(-(2.0 + 0.5) / 2)
    assert metrics.importance_mean == pytest.approx(1.25)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-1.0, -0.25])


def test_metrics_say_what_was_seen_within_the_mask() -> None:
    logprobs, old = ratios(1.5, 0.5, 40.0)
    mask = torch.tensor([[True, True, False]])
    _, metrics = grpo_loss(logprobs, old, torch.tensor([1.0]), mask)
    assert metrics.num_tokens == 2
    assert metrics.ratio_mean == pytest.approx(1.0)
    assert metrics.ratio_max == pytest.approx(1.5)
    assert metrics.kl == pytest.approx(((1.5 - math.log(1.5) - 1) + (0.5 - math.log(0.5) - 1)) / 2, abs=1e-6)
    assert (metrics.ref_kl, metrics.importance_mean) == (None, None)


def test_values_outside_the_mask_change_neither_loss_nor_gradient() -> None:
    logprobs = torch.tensor([[-1.0, float("-inf")]], requires_grad=True)
    old = torch.tensor([[-1.0, float("nan")]])
    mask = torch.tensor([[1, 0]])  # integers, as attention masks are
    loss, metrics = grpo_loss(logprobs, old, torch.tensor([2.0]), mask, ref_logprobs=old, kl_coef=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(-2.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, 0.0]]
    assert metrics.num_tokens == 1


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_an_empty_mask_gives_zero_and_a_gradient_of_zero(normalize: str) -> None:
    logprobs, old = ratios(1.5, 0.5)
    loss, metrics = grpo_loss(
        logprobs,
        old,
        torch.tensor([1.0]),
        torch.zeros(1, 2, dtype=torch.bool),
        normalize=normalize,  # type: ignore[arg-type]
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0]]
    assert metrics == GRPOMetrics(0, 1.0, 1.0, 0.0, 0.0, None, None)


def test_shapes_that_would_broadcast_wrongly_are_refused() -> None:
    logprobs, advantages, mask = three_samples()
    with pytest.raises(RolloutBatchError, match=r"old_logprobs has shape \(3, 4\), expected \(1, 3, 4\)"):
        grpo_loss(logprobs, logprobs[0], advantages, mask)
    with pytest.raises(RolloutBatchError, match=r"advantages \(3, 1\) do not fit"):
        grpo_loss(logprobs, logprobs, advantages.T, mask)
    with pytest.raises(RolloutBatchError, match="mask has shape"):
        group_advantages(torch.zeros(2, 3), torch.ones(3, dtype=torch.bool))


def test_missing_companions_of_an_option_are_refused() -> None:
    logprobs, advantages, mask = three_samples()
    with pytest.raises(TypeError, match="needs behaviour_logprobs"):
        grpo_loss(logprobs, logprobs, advantages, mask, importance_cap=2.0)
    with pytest.raises(TypeError, match="needs constant"):
        grpo_loss(logprobs, logprobs, advantages, mask, normalize="constant")
