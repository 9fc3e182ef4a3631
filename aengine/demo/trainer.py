"""The trainer of the demo: a `transformers` copy of the model, and one GRPO step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import define, field, frozen
from torch import Tensor, nn

from aengine.demo.verify import check_labels, largest_difference
from aengine.errors import VerificationError
from aengine.model.checkpoint import Checkpoint
from aengine.outputs import RequestOutput
from aengine.policy.digest import digest_tensors
from aengine.policy.version import PolicyVersion
from aengine.rl import PolicyTracker, RolloutBatch, group_advantages, grpo_loss

__all__ = ["Group", "Trainer", "Verified", "transformers_copy"]

MAX_GRAD_NORM = 1.0


@frozen(eq=False)
class Group:
    """The samples of one prompt and their rewards."""

    output: RequestOutput
    rewards: tuple[float, ...]

    def batch(self, pad_token_id: int) -> RolloutBatch:
        return RolloutBatch.from_outputs([self.output], [self.rewards], pad_token_id=pad_token_id)


@frozen
class Verified:
    """How many samples a plain forward pass recomputed, and the largest distance of a log-probability found in them;
    and how many the engine's replay reproduced bit for bit."""

    samples: int = 0
    largest_difference: float = 0.0
    reproduced: int = 0

    def __add__(self, other: Verified) -> Verified:
        largest = max(self.largest_difference, other.largest_difference)
        return Verified(self.samples + other.samples, largest, self.reproduced + other.reproduced)


def transformers_copy(checkpoint: Checkpoint) -> nn.Module:
    """The checkpoint as a float32 causal LM of `transformers`, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**checkpoint.spec.to_config())
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    missing, unexpected = model.load_state_dict(dict(checkpoint.tensors), strict=False)
    assert not unexpected, "both sides use the names of the checkpoint"
    assert set(missing) <= {"lm_head.weight"}, "only a tied head may be missing"
    return model.eval()


@define(eq=False)
class Trainer:
    """`model` holds exactly the weights of the installed policy between a push and the next step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tracker: PolicyTracker
    pad_token_id: int = field(default=0)

    @classmethod
    def of(cls, checkpoint: Checkpoint, learning_rate: float) -> Trainer:
        model = transformers_copy(checkpoint)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        return cls(model, optimizer, PolicyTracker(optimizer, model=model))

    def verify(self, groups: Sequence[Group], policy: PolicyVersion, pause: Callable[[], None]) -> Verified:
        """Recompute every sample by a plain full forward pass under the weights of `policy`, without gradients.

        `pause` is called between groups and may raise. Raises `VerificationError`.
        """
        self._check_weights(policy)
        verified = Verified()
        with torch.no_grad():
            for group in groups:
                pause()
                verified += self._recompute(group, policy)[2]
        return verified

    def backward(self, groups: Sequence[Group], policy: PolicyVersion, pause: Callable[[], None]) -> Verified:
        """Verify like `verify`, and leave the gradient of the GRPO loss over all groups in the parameters.

        Nothing is stepped, so a failure leaves the weights as they were. The pass of the loss is the one that verifies.
        """
        self._check_weights(policy)
        self.optimizer.zero_grad()
        num_tokens = sum(len(sample.token_ids) for group in groups for sample in group.output.outputs)
        verified = Verified()
        for group in groups:
            pause()
            # Equal rewards teach nothing: their gradient is zero, so the pass is only there to verify.
            with torch.set_grad_enabled(len(set(group.rewards)) > 1):
                batch, logprobs, part = self._recompute(group, policy)
            verified += part
            if logprobs.requires_grad:
                self._loss(batch, logprobs, num_tokens).backward()  # type: ignore[no-untyped-call]
        return verified

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()

    def _check_weights(self, policy: PolicyVersion) -> None:
        if digest_tensors(self.model.named_parameters()) != policy.digest:
            raise VerificationError(f"the trainer's weights are not those of policy version {policy.number}")

    def _recompute(self, group: Group, policy: PolicyVersion) -> tuple[RolloutBatch, Tensor, Verified]:
        """The group as a batch, the log-probabilities [1, G, R] of its tokens, and what verifying found."""
        check_labels(group.output, policy.number)
        batch = group.batch(self.pad_token_id)
        # One prompt, so nothing is padded but the ends, which no token before them attends to.
        _, _, prompt, response = batch.shape
        result: Any = self.model(input_ids=batch.input_ids(), use_cache=False, logits_to_keep=response + 1)
        logits = F.pad(result.logits, (0, 0, prompt - 1, 0))  # what a prompt's inner tokens predict is not asked for
        logprobs = batch.response_logprobs(logits)
        return batch, logprobs, Verified(len(group.output.outputs), largest_difference(batch, logprobs))

    def _loss(self, batch: RolloutBatch, logprobs: Tensor, num_tokens: int) -> Tensor:
        """The group's share of the mean over all tokens of the step."""
        advantages = group_advantages(batch.rewards)
        loss, _ = grpo_loss(logprobs, batch.logprobs, advantages, batch.response_mask, normalize="token")
        return loss * (int(batch.response_mask.sum()) / num_tokens)
