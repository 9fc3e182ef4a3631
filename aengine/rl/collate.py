"""From ragged samples to padded tensors, without a Python loop over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from aengine.errors import RolloutBatchError
from aengine.outputs import CompletionOutput, RequestOutput

__all__ = ["PaddingSide", "check_groups", "check_logprobs", "flatten", "pad", "padding_mask", "token_versions"]

PaddingSide = Literal["left", "right"]
Array = NDArray[Any]


def flatten(sequences: Sequence[Sequence[float]], dtype: DTypeLike) -> Array:
    """All values of all sequences, one after the other."""
    return np.fromiter(chain.from_iterable(sequences), dtype, count=sum(map(len, sequences)))


def padding_mask(lengths: Array, width: int, side: PaddingSide) -> Array:
    """[N, width], True where row n holds one of its `lengths[n]` values when padded on `side`."""
    columns = np.arange(width)[None, :]
    if side == "right":
        return columns < lengths[:, None]
    return columns >= width - lengths[:, None]


def pad(values: Array, mask: Array, fill: float) -> Tensor:
    """Lay the flat `values` out over the True places of `mask`, in row-major order."""
    padded = np.full(mask.shape, fill, dtype=values.dtype)
    padded[mask] = values
    return torch.from_numpy(padded)


def token_versions(samples: Iterable[CompletionOutput]) -> Array:
    """The version that sampled each token of each sample, flat."""
    spans = [span for sample in samples for span in sample.version_spans]
    lengths = [span.end - span.start for span in spans]
    return np.repeat(np.array([span.version for span in spans], np.int64), lengths)


def check_groups(outputs: Sequence[RequestOutput], rewards: Sequence[Sequence[float]]) -> None:
    """Raise `RolloutBatchError` unless there are samples, each with one finite reward and fields of one length."""
    if not any(output.outputs for output in outputs):
        raise RolloutBatchError("a batch needs at least one sample, got none")
    if len(outputs) != len(rewards):
        raise RolloutBatchError(f"{len(outputs)} outputs but {len(rewards)} groups of rewards")
    for output, group in zip(outputs, rewards, strict=True):
        if not output.prompt_token_ids:
            raise RolloutBatchError(f"request {output.request_id!r} has an empty prompt")
        if len(output.outputs) != len(group):
            raise RolloutBatchError(
                f"request {output.request_id!r} has {len(output.outputs)} samples but {len(group)} rewards"
            )
        for sample, reward in zip(output.outputs, group, strict=True):
            _check_sample(output.request_id, sample, float(reward))


def check_logprobs(outputs: Sequence[RequestOutput], name: str, values: Array) -> None:
    """Raise `RolloutBatchError` for the first of the flat `values` that is not finite."""
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size == 0:
        return
    samples = [(output.request_id, sample) for output in outputs for sample in output.outputs]
    ends = np.cumsum([len(sample.token_ids) for _, sample in samples])
    at = int(np.searchsorted(ends, bad[0], side="right"))
    request_id, sample = samples[at]
    token = int(bad[0]) - int(ends[at]) + len(sample.token_ids)
    raise RolloutBatchError(
        f"{_where(request_id, sample)}: {name}[{token}] is {values[bad[0]]}, expected a finite value"
    )


def _check_sample(request_id: str, sample: CompletionOutput, reward: float) -> None:
    length = len(sample.token_ids)
    if not math.isfinite(reward):
        raise RolloutBatchError(f"{_where(request_id, sample)}: its reward is {reward}, which is not finite")
    for name in ("logprobs", "raw_logprobs"):
        if len(getattr(sample, name)) != length:
            raise RolloutBatchError(
                f"{_where(request_id, sample)}: {length} token_ids but {len(getattr(sample, name))} {name}"
            )
    position = 0
    for span in sample.version_spans:
        if span.start != position or span.end < span.start:
            break
        position = span.end
    if position != length:
        raise RolloutBatchError(
            f"{_where(request_id, sample)}: version_spans do not cover its {length} tokens one by one"
        )


def _where(request_id: str, sample: CompletionOutput) -> str:
    return f"request {request_id!r}, sample {sample.index}"
