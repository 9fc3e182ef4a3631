"""Checking samples against the weights they are labelled with, before these are replaced."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from aengine.audit.replay import Replay
from aengine.audit.verdict import Consistent, Reproduced
from aengine.errors import VerificationError
from aengine.outputs import RequestOutput
from aengine.rl import RolloutBatch

__all__ = ["TOLERANCE", "check_labels", "largest_difference", "num_reproduced"]

TOLERANCE = 1e-3


def check_labels(output: RequestOutput, version: int) -> None:
    """Every token and all KV of every sample must be of policy version `version`, or `VerificationError` is raised."""
    for sample in output.outputs:
        if not sample.is_single_policy or sample.min_policy_version != version:
            raise VerificationError(
                f"sample {sample.index} of {output.request_id} was made under versions "
                f"{sample.min_policy_version} to {sample.max_policy_version}, not under {version} alone"
            )


def num_reproduced(replays: Iterable[Replay]) -> int:
    """How many samples were computed again with the same bits. Raises `VerificationError`, naming the sample, for one
    that should have been and was not; where the engine promises no bits, near ones are enough, and not counted."""
    count = 0
    for replay in replays:
        if not isinstance(replay.verdict, Reproduced | Consistent):
            record = replay.record
            raise VerificationError(f"sample {record.index} of {record.request_id} did not reproduce: {replay.verdict}")
        count += isinstance(replay.verdict, Reproduced)
    return count


def largest_difference(batch: RolloutBatch, logprobs: Tensor, tolerance: float = TOLERANCE) -> float:
    """Largest distance of the behaviour log-probabilities from `logprobs` [B, G, R], over all sampled tokens.

    Raises `VerificationError`, naming the sample, where it is over `tolerance` or not a number.
    """
    differences = (logprobs.detach() - batch.logprobs).abs().masked_fill(~batch.response_mask, 0.0)
    worst = differences.flatten(1).max(-1)
    for place, (largest, at) in enumerate(zip(worst.values.tolist(), worst.indices.tolist(), strict=True)):
        if not largest <= tolerance:
            sample, token = divmod(at, differences.shape[-1])
            raise VerificationError(
                f"sample {sample} of {batch.group_ids[place]}, token {token}: the labelled weights give a "
                f"log-probability that is {largest:.2e} from the recorded one (allowed: {tolerance:.0e})"
            )
    return float(worst.values.max())
