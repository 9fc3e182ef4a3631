"""`RolloutBatch`: groups of samples as padded tensors for a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from aengine.errors import RolloutBatchError
from aengine.outputs import FinishReason, RequestOutput
from aengine.rl.collate import (
    Array,
    PaddingSide,
    check_groups,
    check_logprobs,
    flatten,
    pad,
    padding_mask,
    token_versions,
)

__all__ = ["RolloutBatch"]


@frozen(eq=False, kw_only=True)
class RolloutBatch:
    """B prompts and up to G samples of each; prompts are padded to P tokens, responses to R.

    Prompts are padded on `padding_side`, responses always on the right. Groups of fewer than G samples are filled up
    with places that hold none: False in `sample_mask` and in all of `response_mask`, reward 0. Outside
    `response_mask` ids are the padding id, log-probabilities 0 and versions -1; use the mask, since a
    log-probability of 0 reads as certainty.
    """

    prompt_ids: Tensor
    """[B, P] int64."""
    prompt_mask: Tensor
    """[B, P] bool, True on the prompt's tokens."""
    response_ids: Tensor
    """[B, G, R] int64."""
    response_mask: Tensor
    """[B, G, R] bool, True on sampled tokens, the ending one included."""
    logprobs: Tensor
    """[B, G, R] float32: behaviour log-probabilities, of the distribution that was sampled from."""
    raw_logprobs: Tensor
    """[B, G, R] float32: of the model's own distribution, before temperature and truncation."""
    versions: Tensor
    """[B, G, R] int64: the policy version that sampled each token."""
    rewards: Tensor
    """[B, G] float32."""
    sample_mask: Tensor
    """[B, G] bool, True where there is a sample; an aborted one without tokens is a sample too."""
    truncated: Tensor
    """[B, G] bool, True where the finish reason is "length"."""
    finish_reasons: tuple[tuple[FinishReason | None, ...], ...]
    """[B][G]; None where there is no sample, or an unfinished one."""
    group_ids: tuple[str, ...]
    """[B]: the request id of each group."""
    padding_side: PaddingSide = "left"

    @classmethod
    def from_outputs(
        cls,
        outputs: Sequence[RequestOutput],
        rewards: Sequence[Sequence[float]],
        *,
        pad_token_id: int,
        padding_side: PaddingSide = "left",
    ) -> RolloutBatch:
        """Pad the groups of `outputs`; `rewards[b][g]` belongs to sample g of group b.

        Raises `RolloutBatchError`, naming request and sample, for a missing or surplus reward, for fields of a sample
        that differ in length, and for log-probabilities or rewards that are not finite.
        """
        if padding_side not in ("left", "right"):
            raise RolloutBatchError(f"padding_side is {padding_side!r}, expected 'left' or 'right'")
        check_groups(outputs, rewards)
        prompts = [output.prompt_token_ids for output in outputs]
        lengths = np.array([len(prompt) for prompt in prompts])
        prompt_mask = padding_mask(lengths, int(lengths.max()), padding_side)
        return cls(
            prompt_ids=pad(flatten(prompts, np.int64), prompt_mask, pad_token_id),
            prompt_mask=torch.from_numpy(prompt_mask),
            group_ids=tuple(output.request_id for output in outputs),
            padding_side=padding_side,
            **_response_fields(outputs, pad_token_id),
            **_sample_fields(outputs, rewards),
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, G, P, R)."""
        batch, group, response = self.response_ids.shape
        return batch, group, self.prompt_ids.shape[1], response

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The same batch with its tensors on `device`."""
        tensors: dict[str, Any] = {
            field.name: value.to(device)
            for field in attrs.fields(type(self))
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return attrs.evolve(self, **tensors)

    def input_ids(self) -> Tensor:
        """[B * G, P + R] int64: every sample behind its prompt, for a trainer's forward pass."""
        return self._joined(self.prompt_ids, self.response_ids)

    def attention_mask(self) -> Tensor:
        """[B * G, P + R] bool, True on prompt and response tokens."""
        return self._joined(self.prompt_mask, self.response_mask)

    def position_ids(self) -> Tensor:
        """[B * G, P + R] int64: positions counted over real tokens only, so padding anywhere leaves no gap."""
        return (self.attention_mask().cumsum(-1) - 1).clamp(min=0)

    def response_logprobs(self, logits: Tensor, *, temperature: float = 1.0) -> Tensor:
        """[B, G, R] float32: log-probabilities of the response tokens under a trainer's `logits` [B * G, P + R, V].

        The logits at a token's predecessor predict it. `temperature` divides them: give the sampling temperature to
        compare with `logprobs`, 1 to compare with `raw_logprobs`. Differentiable; 0 outside `response_mask`. Works
        row by row on the response's own positions, so no second tensor of the logits' size is made.
        """
        batch, group, prompt, response = self.shape
        if logits.shape[:-1] != (batch * group, prompt + response):
            expected = f"[{batch * group}, {prompt + response}, vocabulary]"
            raise RolloutBatchError(f"logits have shape {list(logits.shape)}, expected {expected}")
        ids = self.response_ids.flatten(0, 1)
        lengths = self.response_mask.sum(-1).flatten().tolist()
        starts = self._last_prompt_positions().repeat_interleave(group).tolist()
        rows = [
            _row_logprobs(_predicting(logits[n], start, prompt, length), ids[n, :length], temperature, response)
            for n, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
        return torch.stack(rows).view(batch, group, response)

    def _last_prompt_positions(self) -> Tensor:
        if self.padding_side == "left":
            return torch.full((self.shape[0],), self.shape[2] - 1)
        return self.prompt_mask.sum(-1) - 1

    def _joined(self, prompt: Tensor, response: Tensor) -> Tensor:
        batch, group, width, _ = self.shape
        return torch.cat([prompt.unsqueeze(1).expand(batch, group, width), response], dim=-1).flatten(0, 1)


def _predicting(row: Tensor, start: int, width: int, length: int) -> Tensor:
    """Of one row's logits [P + R, V] those [length, V] that predict its response, the first at `start`."""
    if start == width - 1 or length == 0:
        return row[start : start + length]
    return torch.cat([row[start : start + 1], row[width : width + length - 1]])


def _row_logprobs(logits: Tensor, ids: Tensor, temperature: float, width: int) -> Tensor:
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    chosen = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return torch.nn.functional.pad(chosen - scaled.logsumexp(-1), (0, width - len(ids)))


def _response_fields(outputs: Sequence[RequestOutput], pad_token_id: int) -> dict[str, Any]:
    samples = [sample for output in outputs for sample in output.outputs]
    flat = {name: flatten([getattr(s, name) for s in samples], np.float32) for name in ("logprobs", "raw_logprobs")}
    for name, values in flat.items():
        check_logprobs(outputs, name, values)
    lengths = np.zeros(_present(outputs).shape, np.int64)
    lengths[_present(outputs)] = [len(sample.token_ids) for sample in samples]
    mask = padding_mask(lengths.reshape(-1), int(lengths.max()), "right").reshape(*lengths.shape, -1)
    return {
        "response_ids": pad(flatten([sample.token_ids for sample in samples], np.int64), mask, pad_token_id),
        "response_mask": torch.from_numpy(mask),
        "versions": pad(token_versions(samples), mask, -1),
        **{name: pad(values, mask, 0.0) for name, values in flat.items()},
    }


def _sample_fields(outputs: Sequence[RequestOutput], rewards: Sequence[Sequence[float]]) -> dict[str, Any]:
    present = _present(outputs)
    padded_rewards = np.zeros(present.shape, np.float32)
    padded_rewards[present] = [float(reward) for group in rewards for reward in group]
    reasons = [[sample.finish_reason for sample in output.outputs] for output in outputs]
    padded = tuple((*group, *[None] * (present.shape[1] - len(group))) for group in reasons)
    return {
        "rewards": torch.from_numpy(padded_rewards),
        "sample_mask": torch.from_numpy(present),
        "truncated": torch.tensor([[reason == "length" for reason in group] for group in padded]),
        "finish_reasons": padded,
    }


def _present(outputs: Sequence[RequestOutput]) -> Array:
    """[B, G], True where there is a sample."""
    counts = np.array([len(output.outputs) for output in outputs])
    return padding_mask(counts, int(counts.max()), "right")
