"""Tokens and both their log-probabilities from logits.

What is sampled from is the model's distribution after, in vLLM's order: the ban on ending tokens before `min_tokens`,
temperature, min-p, top-k, top-p (`transforms` says what each does). All of it happens inside one pass over each row;
nothing of the size of the logits is made, but for a copy of the rows that ban a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from aengine.errors import EngineError, NonFiniteLogitsError, SamplingParamsError
from aengine.kernels.sample import DRAW, EMPTY, GREEDY, NON_FINITE, ROW, num_blocks, sample_rows
from aengine.kernels.threads import use_threads
from aengine.params import SamplingParams
from aengine.sampling.stop import ending_token_ids

__all__ = ["Draw", "Drawn", "sample", "score"]

Floats = NDArray[np.float32]

MIN_TEMPERATURE = 1e-30
"""Its inverse is still a float32; below, the distribution is the same (all on the largest logits)."""


@frozen
class Draw:
    """One token to sample: from which row of the logits, how, and which draw of its sample it is."""

    row: int
    params: SamplingParams
    seed: int
    index: int
    position: int
    """Index of the token in the output; 0 is the first new one."""


@frozen
class Drawn:
    """A token, its log-probability under what it was sampled from, and under the model's own distribution."""

    token_id: int
    logprob: float
    raw_logprob: float


def sample(logits: Tensor, draws: Sequence[Draw], eos_token_ids: Collection[int] = ()) -> list[Drawn | EngineError]:
    """One token for each of `draws` from `logits` [L, V] float32; several draws may share a row.

    Each result depends on its own row and draw alone, bit for bit. In place of a result stands a
    `NonFiniteLogitsError` where the row holds NaN or an infinity, and a `SamplingParamsError` where `min_tokens` bans
    every token there is; the others are not affected. Temperature 0 takes the likeliest token (the lowest id of equal
    ones) and gives `logprob` at temperature 1. `eos_token_ids` are banned where `min_tokens` asks for it.
    """
    tokens = [GREEDY if draw.params.temperature == 0 else DRAW for draw in draws]
    return _run(logits, draws, tokens, eos_token_ids)


def score(
    logits: Tensor,
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    first_position: int = 0,
    eos_token_ids: Collection[int] = (),
) -> list[Drawn | EngineError]:
    """Both log-probabilities of given tokens, with the bits that sampling them would have recorded.

    Row i of `logits` [L, V] scores `token_ids[i]` as the token at position `first_position + i` of an output. A token
    that `params` could not have sampled there has `logprob` -inf.
    """
    for token_id in token_ids:
        if not 0 <= token_id < logits.shape[1]:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {logits.shape[1]}")
    draws = [Draw(row, params, 0, 0, first_position + row) for row in range(len(token_ids))]
    return _run(logits, draws, token_ids, eos_token_ids)


def _run(
    logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int], eos_token_ids: Collection[int]
) -> list[Drawn | EngineError]:
    raw = logits.detach().to(torch.float32).contiguous().numpy()  # [L, V]
    size = raw.shape[1]
    for draw in draws:
        if not 0 <= draw.row < len(raw):
            raise IndexError(f"a draw asks for row {draw.row} of {len(raw)} rows of logits")
    bans = [_banned(draw, size, eos_token_ids) for draw in draws]
    edited, edited_rows = _edit(raw, draws, bans)
    rows = np.array(list(map(_row, draws, edited_rows, tokens)), dtype=ROW)
    sums = np.empty((len(rows), num_blocks(size)))
    kernel = sample_rows.parallel if len(rows) > 1 and use_threads(len(rows) * size) else sample_rows.serial
    kernel(raw.reshape(-1), edited.reshape(-1), size, rows, sums)
    columns = [rows[name].tolist() for name in ("status", "token", "logprob", "raw_logprob")]
    return list(map(_result, draws, *columns))


def _row(draw: Draw, edited_row: int, token: int) -> tuple[float, ...]:
    params = draw.params
    scale = 1.0 if params.temperature == 0 else 1.0 / max(params.temperature, MIN_TEMPERATURE)
    what = (draw.row, edited_row, scale, params.top_k, params.top_p, params.min_p)
    return (*what, draw.seed, draw.index, draw.position, token, 0.0, 0.0, 0)


def _banned(draw: Draw, size: int, eos_token_ids: Collection[int]) -> list[int]:
    if draw.position >= draw.params.min_tokens:
        return []
    return [token for token in ending_token_ids(draw.params, eos_token_ids) if token < size]


def _edit(raw: Floats, draws: Sequence[Draw], bans: Sequence[Sequence[int]]) -> tuple[Floats, list[int]]:
    """Copies [E, V] of the rows that ban tokens, and for each draw its copy's row or -1."""
    banning = [n for n, ban in enumerate(bans) if ban]
    edited = raw[[draws[n].row for n in banning]]
    edited_row = [-1] * len(draws)
    for row, n in enumerate(banning):
        edited[row, bans[n]] = -np.inf
        edited_row[n] = row
    return edited, edited_row


def _result(draw: Draw, status: int, token: int, logprob: float, raw_logprob: float) -> Drawn | EngineError:
    if status == NON_FINITE:
        return NonFiniteLogitsError(f"non-finite logits at output position {draw.position}")
    if status == EMPTY:
        return SamplingParamsError("min_tokens", draw.params.min_tokens, "bans every token of the vocabulary")
    return Drawn(token, logprob, raw_logprob)
