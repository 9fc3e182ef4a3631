"""Advantages and losses of group-relative policy optimisation, as functions of tensors.

Shapes: B prompts, G samples of each, R response positions. Losses take [B, G, R] or any [..., R] (a flattened
[B * G, R] for instance); masks are True on the tokens that count.
"""

from __future__ import annotations

from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from aengine.errors import RolloutBatchError

__all__ = ["GRPOMetrics", "Normalize", "group_advantages", "grpo_loss"]

Normalize = Literal["token", "sequence", "constant"]


@frozen
class GRPOMetrics:
    """What `grpo_loss` saw, over the tokens of its mask; all zero (ratios one) where the mask is empty."""

    num_tokens: int
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    """Share of tokens whose clipped term was the smaller one, so that they gave no gradient."""
    kl: float
    """Estimate of KL(old || new), by the same estimator as the reference term."""
    ref_kl: float | None
    """Estimate of KL(new || reference); None where there is no reference."""
    importance_mean: float | None
    """Mean truncated importance weight; None where `importance_cap` was not given."""


def group_advantages(
    rewards: Tensor, mask: Tensor | None = None, *, scale_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation plus `eps`.

    `rewards` [B, G]; `mask` [B, G] is False for places without a sample, which take no part and get 0. The deviation is
    the unbiased one; a group of one sample gets 0. GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2).
    `scale_by_std=False` leaves the division out, which Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) shows to weigh
    very easy and very hard prompts too much.
    """
    valid = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    _check_shapes(rewards, mask=valid)
    count = valid.sum(-1, keepdim=True)
    # In float32 the mean of equal rewards may differ from them by a rounding, which the division would blow up.
    kept = torch.where(valid, rewards.double(), 0.0)
    centred = torch.where(valid, kept - kept.sum(-1, keepdim=True) / count.clamp(min=1), 0.0)
    if scale_by_std:
        variance = centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    return centred.to(torch.promote_types(rewards.dtype, torch.float32))


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    normalize: Normalize = "token",
    constant: float | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    behaviour_logprobs: Tensor | None = None,
    importance_cap: float | None = None,
) -> tuple[Tensor, GRPOMetrics]:
    """The clipped policy-gradient loss, a scalar to minimise, and what it saw.

    `logprobs`, `old_logprobs`, `mask` [..., R]; `advantages` [...] (one per sample) or [..., R]. Only `logprobs` gets a
    gradient. Values outside the mask may be anything.

    - Clipping: GRPO (Shao et al. 2024, arXiv 2402.03300, equation 3); a larger `clip_high` than `clip_low` is DAPO's
      clip-higher (Yu et al. 2025, arXiv 2503.14476, section 3.1).
    - `normalize`: `"sequence"` averages over each sample's tokens, then over samples (GRPO); `"token"` averages over
      all tokens (DAPO, section 3.3); `"constant"` divides the sum by samples times `constant`, one fixed length for
      the whole run (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). Samples without a token in the mask do not count.
    - `ref_logprobs`, `kl_coef`: adds `kl_coef` times the estimate r - log r - 1 with r = reference / policy, which is
      unbiased and never negative (GRPO, equation 4; Schulman 2020, "Approximating KL Divergence").
    - `importance_cap`: weighs each token's clipped term by min(old / behaviour, cap), for engines whose numbers differ
      from the trainer's or whose policy is older (Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025,
      "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). Needs `behaviour_logprobs`.
    """
    _check_shapes(logprobs, old_logprobs=old_logprobs, mask=mask, ref=ref_logprobs, behaviour=behaviour_logprobs)
    mask, old = mask.bool(), old_logprobs.detach()
    log_ratio = _masked(logprobs - old, mask)
    ratio = log_ratio.exp()
    gain = _per_token(advantages, logprobs).detach()
    plain, clipped = ratio * gain, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * gain
    loss = -torch.minimum(plain, clipped)
    importance = _importance(old, behaviour_logprobs, mask, importance_cap)
    if importance is not None:
        loss = loss * importance
    ref_kl = None if ref_logprobs is None else _kl(_masked(ref_logprobs.detach() - logprobs, mask))
    if ref_kl is not None:
        loss = loss + kl_coef * ref_kl
    metrics = _metrics(mask, ratio, clipped < plain, _kl(log_ratio), ref_kl, importance)
    return _normalised(_masked(loss, mask), mask, normalize, constant), metrics


def _normalised(loss: Tensor, mask: Tensor, normalize: Normalize, constant: float | None) -> Tensor:
    tokens = mask.sum(-1)  # [...]
    samples = (tokens > 0).sum().clamp(min=1)
    match normalize:
        case "token":
            return loss.sum() / tokens.sum().clamp(min=1)
        case "sequence":
            return (loss.sum(-1) / tokens.clamp(min=1)).sum() / samples
        case "constant":
            if constant is None:
                raise TypeError('normalize="constant" needs constant, a length fixed for the whole run')
            return loss.sum() / (samples * constant)


def _importance(old: Tensor, behaviour: Tensor | None, mask: Tensor, cap: float | None) -> Tensor | None:
    if cap is None:
        return None
    if behaviour is None:
        raise TypeError("importance_cap needs behaviour_logprobs, the engine's log-probabilities of the tokens")
    return _masked(old - behaviour.detach(), mask).exp().clamp(max=cap)


def _kl(log_ratio: Tensor) -> Tensor:
    """Estimate of KL(p || q) for tokens drawn from p, from log(q / p)."""
    return log_ratio.exp() - log_ratio - 1.0


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)


def _per_token(advantages: Tensor, logprobs: Tensor) -> Tensor:
    per_token = advantages.unsqueeze(-1) if advantages.dim() == logprobs.dim() - 1 else advantages
    if per_token.dim() != logprobs.dim() or per_token.shape[:-1] != logprobs.shape[:-1]:
        raise RolloutBatchError(
            f"advantages {tuple(advantages.shape)} do not fit logprobs {tuple(logprobs.shape)}: "
            "one per sample or one per token"
        )
    return per_token


def _check_shapes(first: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != first.shape:
            raise RolloutBatchError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(first.shape)}")


@torch.no_grad()
def _metrics(
    mask: Tensor, ratio: Tensor, clipped: Tensor, kl: Tensor, ref_kl: Tensor | None, importance: Tensor | None
) -> GRPOMetrics:
    def mean(values: Tensor) -> float:
        return float(values[mask].double().mean()) if bool(mask.any()) else 0.0

    some = bool(mask.any())
    return GRPOMetrics(
        num_tokens=int(mask.sum()),
        ratio_mean=mean(ratio) if some else 1.0,
        ratio_max=float(ratio[mask].max()) if some else 1.0,
        clip_fraction=mean(clipped),
        kl=mean(kl),
        ref_kl=None if ref_kl is None else mean(ref_kl),
        importance_mean=None if importance is None else mean(importance),
    )
