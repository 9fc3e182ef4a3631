"""Tokens and both their log-probabilities from logits.

What is sampled from is the model's distribution after, in vLLM's order: the token mask, allowed ids, the ban on ending
tokens before `min_tokens`, bias, penalties, temperature, min-p, top-k, top-p (`transforms` says what each does). From
temperature on it happens inside one pass over each row; the steps before it are made on a copy of the rows that they
change, so where they are not used nothing of the size of the logits is made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from attrs import field, frozen
from numpy.typing import NDArray
from torch import Tensor

from aengine.errors import EngineError, NonFiniteLogitsError, SamplingParamsError, TokenMaskError
from aengine.kernels.sample import DRAW, EMPTY, GREEDY, NON_FINITE, ROW, num_blocks, sample_rows
from aengine.kernels.threads import use_threads
from aengine.params import SamplingParams
from aengine.sampling.alternatives import KeptRow
from aengine.sampling.edits import edit_row, edits_logits
from aengine.sampling.history import TokenHistory
from aengine.sampling.mask import TokenMask

__all__ = ["Draw", "Drawn", "sample", "score"]

Floats = NDArray[np.float32]

MIN_TEMPERATURE = 1e-30
"""Its inverse is still a float32; below, the distribution is the same (all on the largest logits)."""


@frozen
class Draw:
    """One token to sample or to score: from which row of the logits, how, and which draw of its sample it is.

    `history` holds the tokens before it and may be left out where neither penalties nor a mask are used.
    """

    row: int
    params: SamplingParams
    seed: int
    index: int
    position: int
    """Index of the token in the output; 0 is the first new one."""
    history: TokenHistory | None = None
    mask: TokenMask | None = None
    token: int | None = None
    """A given token to score instead of sampling one."""
    with_support: bool = False
    """Whether to record the set of tokens that could have been sampled."""


@frozen
class Drawn:
    """A token, its log-probability under what it was sampled from, and under the model's own distribution."""

    token_id: int
    logprob: float
    raw_logprob: float
    top: tuple[tuple[int, float], ...] | None = None
    """Where `params.logprobs` asks for it: alternatives (`KeptRow.top`)."""
    support: NDArray[np.int32] | None = field(default=None, eq=False)
    """Where the draw asks for it: the tokens that could have been sampled; None where those are all."""


def sample(
    logits: Tensor, draws: Sequence[Draw], eos_token_ids: Collection[int] = (), *, first_row: int = 0
) -> list[Drawn | EngineError]:
    """One token for each of `draws` from `logits` [L, V] float32; several draws may share a row.

    Each result depends on its own row and draw alone, bit for bit. In place of a result stands an error where there is
    none: `NonFiniteLogitsError` where the row holds NaN or an infinity, `SamplingParamsError` where the parameters ban
    every token, `TokenMaskError` where the mask fails or does; the others are not affected. Temperature 0 takes the
    likeliest token (the lowest id of equal ones) and gives `logprob` at temperature 1. `eos_token_ids` are banned where
    `min_tokens` asks for it. Rows of draws count from `first_row`.

    A given token that could not have been sampled has `logprob` -inf.
    """
    raw = logits.detach().to(torch.float32).contiguous().numpy()  # [L, V]
    size = raw.shape[1]
    for draw in draws:
        _check(draw, first_row, raw)
    edited, edited_rows, errors = _edit(raw, first_row, draws, eos_token_ids)
    rows = np.array([_row(draw, first_row, at, size) for draw, at in zip(draws, edited_rows, strict=True)], dtype=ROW)
    sums = np.empty((len(rows), num_blocks(size)))
    kernel = sample_rows.parallel if len(rows) > 1 and use_threads(len(rows) * size) else sample_rows.serial
    kernel(raw.reshape(-1), edited.reshape(-1), size, rows, sums)
    columns = [rows[name].tolist() for name in ("status", "token", "logprob", "raw_logprob")]
    results = list(map(_result, draws, *columns))
    for n, draw in enumerate(draws):
        result = errors.get(n, results[n])
        if isinstance(result, Drawn) and (draw.params.logprobs is not None or draw.with_support):
            x = raw[draw.row - first_row] if edited_rows[n] < 0 else edited[edited_rows[n]]
            result = _with_alternatives(draw, result, x, rows[n])
        results[n] = result
    return results


def score(
    logits: Tensor,
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    prompt_token_ids: Sequence[int] = (),
    eos_token_ids: Collection[int] = (),
) -> list[Drawn | EngineError]:
    """Both log-probabilities of an output's tokens, with the bits that sampling them would have recorded.

    Row i of `logits` [L, V] scores `token_ids[i]` as the token at position i of the output. A token that `params` could
    not have sampled there has `logprob` -inf.
    """
    history = TokenHistory([*prompt_token_ids, *token_ids], len(prompt_token_ids))
    draws = [Draw(row, params, 0, 0, row, history, token=token) for row, token in enumerate(token_ids)]
    return sample(logits, draws, eos_token_ids)


def _check(draw: Draw, first_row: int, raw: Floats) -> None:
    if not 0 <= draw.row - first_row < len(raw):
        raise IndexError(f"a draw asks for row {draw.row - first_row} of {len(raw)} rows of logits")
    if draw.token is not None and not 0 <= draw.token < raw.shape[1]:
        raise ValueError(f"token id {draw.token} is outside the vocabulary of {raw.shape[1]}")


def _row(draw: Draw, first_row: int, edited_row: int, size: int) -> tuple[float, ...]:
    params, token = draw.params, draw.token
    if token is None:
        token = GREEDY if params.temperature == 0 else DRAW
    scale = 1.0 if params.temperature == 0 else 1.0 / max(params.temperature, MIN_TEMPERATURE)
    top_k = min(params.top_k, size)  # more than there are is all of them
    what = (draw.row - first_row, edited_row, scale, top_k, params.top_p, params.min_p)
    return (*what, draw.seed, draw.index, draw.position, token, 0.0, 0.0, 0, 0.0, 0.0, 0.0, 0)


def _edit(
    raw: Floats, first_row: int, draws: Sequence[Draw], eos_token_ids: Collection[int]
) -> tuple[Floats, list[int], dict[int, EngineError]]:
    """Copies [E, V] of the rows that are changed, for each draw its copy's row or -1, and draws that failed."""
    editing = [n for n, draw in enumerate(draws) if edits_logits(draw)]
    edited = raw[[draws[n].row - first_row for n in editing]]
    edited_row = [-1] * len(draws)
    errors: dict[int, EngineError] = {}
    for row, n in enumerate(editing):
        edited_row[n] = row
        try:
            edit_row(edited[row], draws[n], eos_token_ids)
        except TokenMaskError as error:
            errors[n] = error
    return edited, edited_row, errors


def _result(draw: Draw, status: int, token: int, logprob: float, raw_logprob: float) -> Drawn | EngineError:
    if status == NON_FINITE:
        return NonFiniteLogitsError(f"non-finite logits at output position {draw.position}")
    if status == EMPTY:
        return _nothing_left(draw)
    return Drawn(token, logprob, raw_logprob)


def _nothing_left(draw: Draw) -> EngineError:
    params = draw.params
    if draw.mask is not None:
        return TokenMaskError(f"no token is left to sample at output position {draw.position}: the mask allows none")
    name = "min_tokens" if params.allowed_token_ids is None else "allowed_token_ids"
    return SamplingParamsError(name, getattr(params, name), f"bans every token at output position {draw.position}")


def _with_alternatives(draw: Draw, drawn: Drawn, x: Floats, row: np.void) -> Drawn:
    kept = KeptRow(x, *(row[name].item() for name in ("peak", "scale", "log_mass", "cut", "last")))
    count = draw.params.logprobs
    return Drawn(
        drawn.token_id,
        drawn.logprob,
        drawn.raw_logprob,
        top=None if count is None else kept.top(count, drawn.token_id),
        support=kept.support() if draw.with_support else None,
    )
