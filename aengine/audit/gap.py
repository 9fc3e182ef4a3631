"""The gap between an engine's log-probabilities and those of a trainer's own forward pass.

A trainer that computes the same policy with other code gets slightly other numbers, and its importance ratios are not
exactly 1 where they should be. `trainer_gap` says by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from attrs import field, frozen
from numpy.typing import NDArray
from torch import Tensor, nn

from aengine.audit.record import SampleRecord, sample_records
from aengine.errors import RolloutBatchError
from aengine.outputs import RequestOutput
from aengine.params import SamplingParams
from aengine.validate import refuse_unless

__all__ = ["Forward", "TrainerGap", "trainer_gap"]

Floats = NDArray[np.float64]
Forward = Callable[[Tensor, Tensor], Tensor]
"""From (input_ids [B, T] int64, attention_mask [B, T] bool) to logits [B, T, vocab] after each position."""

CLIP_RANGE = 0.2
"""Of PPO (Schulman et al., "Proximal policy optimization algorithms", 2017)."""


@frozen(eq=False)
class TrainerGap:
    """What a trainer's forward pass makes of samples, token by token. A ratio is trainer's over engine's probability.

    A gap has at least one token. Means are over tokens; log-probabilities are in nats.
    """

    names: tuple[str, ...]
    """Of each sample."""
    differences: tuple[Floats, ...] = field(repr=False)
    """For each sample, the trainer's log-probability minus the engine's, of each of its tokens."""
    which: Literal["logprobs", "raw_logprobs"]

    @property
    def flat(self) -> Floats:
        """The differences of all tokens, sample after sample."""
        return np.concatenate(self.differences)

    @property
    def num_tokens(self) -> int:
        return len(self.flat)

    @property
    def mean(self) -> float:
        """Mean absolute difference."""
        return float(np.abs(self.flat).mean())

    @property
    def max(self) -> float:
        """Largest absolute difference."""
        return float(np.abs(self.flat).max())

    @property
    def worst(self) -> tuple[int, int]:
        """Where the largest absolute difference is: place of the sample, and index of its token."""
        largest = [np.abs(one).max(initial=-1.0) for one in self.differences]
        sample = int(np.argmax(largest))
        return sample, int(np.argmax(np.abs(self.differences[sample])))

    @property
    def mean_by_position(self) -> Floats:
        """[R]: mean absolute difference at each index of the output, over the samples that reach it."""
        means: Floats = np.nanmean(self._by_position(), 0)
        return means

    @property
    def max_by_position(self) -> Floats:
        """[R]: largest absolute difference at each index of the output."""
        largest: Floats = np.nanmax(self._by_position(), 0)
        return largest

    @property
    def ratios(self) -> Floats:
        """Of all tokens, sample after sample."""
        return np.exp(self.flat)

    @property
    def effective_sample_size(self) -> float:
        """Share of the tokens that so many equally weighted ones would be worth: (sum r)^2 / (n sum r^2), 1 where all
        ratios are equal (Kong, "A note on importance sampling using standardized weights", 1992)."""
        ratios = self.ratios
        return float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))

    @property
    def share_clipped(self) -> float:
        """Share of the tokens whose ratio is outside 1 ± 0.2."""
        return float((np.abs(self.ratios - 1) > CLIP_RANGE).mean())

    @property
    def kl_k1(self) -> float:
        """Estimate of KL(engine || trainer): mean of -log r, without bias, may be negative. This and `kl_k3`: Schulman,
        "Approximating KL divergence", joschu.net/blog/kl-approx.html, 2020."""
        return float(-self.flat.mean())

    @property
    def kl_k3(self) -> float:
        """The same as mean of (r - 1) - log r: without bias, never negative, and of less variance."""
        return float((np.expm1(self.flat) - self.flat).mean())

    def __str__(self) -> str:
        sample, token = self.worst
        ratios, worth = self.ratios, self.effective_sample_size
        return "\n".join(
            (
                f"trainer gap in {self.which}: {self.num_tokens} tokens of {len(self.differences)} samples",
                f"  difference  mean {self.mean:.2e}, max {self.max:.2e} (token {token} of {self.names[sample]})",
                f"  ratio       mean {ratios.mean():.6f}, min {ratios.min():.6f}, max {ratios.max():.6f}",
                f"  tokens      {self.share_clipped:.2%} outside 1 ± {CLIP_RANGE}, worth {worth:.2%}",
                f"  KL          k1 {self.kl_k1:.2e}, k3 {self.kl_k3:.2e}",
            )
        )

    def _by_position(self) -> Floats:
        """[samples with tokens, R] absolute differences, NaN behind the end of a sample."""
        some = [one for one in self.differences if len(one)]
        table = np.full((len(some), max(map(len, some))), np.nan)
        for row, one in zip(table, some, strict=True):
            row[: len(one)] = np.abs(one)
        return table


@torch.no_grad()
def trainer_gap(
    model: nn.Module | Forward,
    samples: Iterable[SampleRecord | RequestOutput],
    *,
    which: Literal["logprobs", "raw_logprobs"] = "logprobs",
    padding_side: Literal["left", "right"] = "right",
    pad_token_id: int = 0,
    batch_size: int = 8,
) -> TrainerGap:
    """Compute the samples with `model`, a `transformers` causal LM or any `Forward`, and compare log-probabilities.

    `which="logprobs"` compares what was sampled from, and divides the trainer's logits by each sample's temperature (at
    0 by 1, as the engine does). What truncation, penalties, bias or a mask changed is not repeated and is a part of
    the gap, as it is in a trainer. `"raw_logprobs"` compares the model's own distribution, whatever was sampled from.

    Sequences of similar length share a batch of `batch_size`, padded on `padding_side`. The trainer's logits are taken
    to float32 (float64 stays). A module computes as it is, in training mode with dropout.

    Raises `RolloutBatchError` if there is no token, for logits of a wrong shape, and, naming the sample, for a
    log-probability of the trainer that is not finite.
    """
    refuse_unless("which", which, ("logprobs", "raw_logprobs"))
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    refuse_unless("padding_side", padding_side, ("left", "right"))
    records = list(_records(samples))
    if not any(record.token_ids for record in records):
        raise RolloutBatchError(f"{len(records)} samples without a token; there is nothing to compare")
    forward = _forward_of(model) if isinstance(model, nn.Module) else model
    order = sorted(range(len(records)), key=lambda place: _length(records[place]))
    differences: dict[int, Floats] = {}
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        batch = [records[place] for place in places]
        ids, mask = _padded([(*r.prompt_token_ids, *r.token_ids) for r in batch], padding_side, pad_token_id)
        logits = forward(ids, mask)
        if logits.shape[:-1] != ids.shape:
            raise RolloutBatchError(f"the model gives logits {tuple(logits.shape)} for ids {tuple(ids.shape)}")
        for place, record, row, present in zip(places, batch, logits, mask, strict=True):
            differences[place] = _difference(record, row[present.to(row.device)], which)
    names = tuple(f"sample {record.index} of {record.prompt_id}" for record in records)
    return TrainerGap(names, tuple(differences[place] for place in range(len(records))), which)


def _records(samples: Iterable[SampleRecord | RequestOutput]) -> Iterator[SampleRecord]:
    for sample in samples:
        if isinstance(sample, SampleRecord):
            yield sample
        else:
            yield from sample_records(sample.request_id, sample, sample.params or SamplingParams())


def _length(record: SampleRecord) -> int:
    return len(record.prompt_token_ids) + len(record.token_ids)


def _padded(sequences: Sequence[Sequence[int]], side: str, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and which of them are real."""
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if side == "left" else slice(len(sequence))
        ids[row, place] = torch.tensor(sequence)
        mask[row, place] = True
    return ids, mask


def _forward_of(module: nn.Module) -> Forward:
    """A `transformers` module as a `Forward`; positions are counted over real tokens, so padding leaves no gap."""

    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        device = next(module.parameters()).device
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits: Tensor = module(
            input_ids=ids.to(device),
            attention_mask=mask.to(device, torch.int64),
            position_ids=positions.to(device),
            use_cache=False,
        ).logits
        return logits

    return forward


def _difference(record: SampleRecord, logits: Tensor, which: str) -> Floats:
    """Trainer's minus engine's log-probability of each token; `logits` [T, vocab] are those of the whole sequence."""
    size = logits.shape[-1]
    if wrong := [token for token in record.token_ids if token >= size]:
        raise RolloutBatchError(
            f"sample {record.index} of {record.prompt_id} has token {wrong[0]}; the model has {size} logits"
        )
    recorded = len(getattr(record, which))
    if recorded != len(record.token_ids) or not record.prompt_token_ids:
        raise RolloutBatchError(
            f"sample {record.index} of {record.prompt_id} has {len(record.prompt_token_ids)} prompt tokens, "
            f"{len(record.token_ids)} tokens and {recorded} {which}"
        )
    first = len(record.prompt_token_ids) - 1
    rows = logits[first : first + len(record.token_ids)]
    rows = rows if rows.dtype == torch.float64 else rows.float()
    temperature = record.params.temperature if which == "logprobs" else 1.0
    chosen = torch.tensor(record.token_ids, dtype=torch.int64, device=rows.device)[:, None]
    ours = torch.log_softmax(rows / (temperature or 1.0), -1).gather(-1, chosen)[:, 0].double().cpu().numpy()
    if len(bad := np.flatnonzero(~np.isfinite(ours))):
        raise RolloutBatchError(
            f"the model gives token {bad[0]} of sample {record.index} of {record.prompt_id} the log-probability "
            f"{ours[bad[0]]}"
        )
    theirs = record.logprobs if which == "logprobs" else record.raw_logprobs
    difference: Floats = ours - np.asarray(theirs, np.float64)
    return difference
