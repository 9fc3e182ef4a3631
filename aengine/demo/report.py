"""What a run of the demo tells: one report a step, one at the end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from attrs import frozen

from aengine.demo.trainer import Verified

__all__ = ["DemoReport", "StepReport"]

EDGE = 2


@frozen(kw_only=True)
class StepReport:
    """One step: rollouts under `policy_version`, verified, then trained on. `reward` is the mean over its samples."""

    step: int
    policy_version: int
    reward: float
    tokens: int
    tokens_per_second: float
    cached_tokens: int
    verified: Verified
    example: str
    seconds: float


@frozen(kw_only=True)
class DemoReport:
    """`held_out_before` and `held_out_after` are mean rewards of greedy answers to questions never trained on."""

    steps: tuple[StepReport, ...]
    held_out_before: float
    held_out_after: float
    verified: Verified
    training_seconds: float
    seconds: float
    out: str

    @property
    def reward_before(self) -> float:
        """Mean of the first two steps."""
        return _mean_reward(self.steps[:EDGE])

    @property
    def reward_after(self) -> float:
        """Mean of the last two steps."""
        return _mean_reward(self.steps[-EDGE:])

    def lines(self) -> list[str]:
        proof = (
            f"{self.verified.samples} of {self.verified.samples} samples verified: log-probabilities recomputed by a "
            f"plain forward pass under the labelled weights, largest difference {self.verified.largest_difference:.1e}"
        )
        return [
            f"reward, first {EDGE} steps to last {EDGE}: {self.reward_before:.2f} -> {self.reward_after:.2f}",
            f"reward, held-out questions, greedy: {self.held_out_before:.2f} -> {self.held_out_after:.2f}",
            proof,
            f"rollouts written to {self.out}; {self.seconds:.0f} s, training {self.training_seconds:.0f} s of it",
            f"{self.verified.reproduced} of {self.verified.samples} samples reproduced bit for bit",
        ]


def _mean_reward(steps: Sequence[StepReport]) -> float:
    return fmean(step.reward for step in steps)
