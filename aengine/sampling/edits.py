"""What changes single logits before temperature and truncation, in NumPy: `transforms` says what each step does."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aengine.params import SamplingParams
from aengine.sampling.mask import allowed_by
from aengine.sampling.stop import ending_token_ids

if TYPE_CHECKING:
    from aengine.sampling.sampler import Draw

__all__ = ["edit_row", "edits_logits"]

Floats = NDArray[np.float32]

LARGEST = np.finfo(np.float32).max


def edits_logits(draw: Draw) -> bool:
    """Whether `edit_row` may change anything; by default it does not, and no row is copied."""
    params = draw.params
    return (
        draw.position < params.min_tokens
        or params.allowed_token_ids is not None
        or params.logit_bias is not None
        or params.has_penalties
        or draw.mask is not None
    )


def edit_row(row: Floats, draw: Draw, eos_token_ids: Collection[int]) -> None:
    """Change the logits [V] in place. Raises `TokenMaskError`; then the row is not to be used."""
    params = draw.params
    if draw.mask is not None:
        output = draw.history.output(draw.position) if draw.history is not None else ()
        allowed = allowed_by(draw.mask, output, len(row))
        if allowed is not None:
            row[~allowed] = -np.inf
    if params.allowed_token_ids is not None:
        _allow(row, params.allowed_token_ids)
    if draw.position < params.min_tokens:
        row[[token for token in ending_token_ids(params, eos_token_ids) if token < len(row)]] = -np.inf
    if params.logit_bias is not None:
        _add_bias(row, params.logit_bias)
    if params.has_penalties and draw.history is not None:
        _penalise(row, params, *draw.history.counts(draw.position))


def _allow(row: Floats, token_ids: Collection[int]) -> None:
    ids = np.fromiter((token for token in token_ids if token < len(row)), np.int64)
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept


def _add_bias(row: Floats, bias: Collection[tuple[int, float]]) -> None:
    for token, number in bias:
        if token < len(row):
            row[token] += np.float32(number)


def _penalise(row: Floats, params: SamplingParams, ids: NDArray[np.int64], counts: Floats) -> None:
    logits, repetition = row[ids], np.float32(params.repetition_penalty)
    with np.errstate(all="ignore"):  # a row that holds NaN is refused afterwards, for what it was
        logits = np.where(logits > 0, logits / repetition, logits * repetition)
        logits -= np.float32(params.frequency_penalty) * counts
        logits -= np.float32(params.presence_penalty) * (counts > 0)
        row[ids] = np.minimum(logits, LARGEST)
