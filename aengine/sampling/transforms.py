"""What each sampling parameter does to the logits, in plain torch: the definition, and the oracle of the kernel.

Order as in vLLM: token mask, allowed ids, ban on ending tokens, bias, penalties (repetition, frequency, presence),
temperature, min-p, top-k, top-p; each works on what those before it left, renormalised. Tokens are ordered by falling
logit and equal ones by rising id, so a cut through equal logits keeps the lowest ids, whatever else is in the batch.
Logits are [L, V] float32, parameters one per row; a row's bits depend on that row alone. `log_softmax` of the result is
the distribution that is sampled from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from aengine.params import SamplingParams
from aengine.sampling.stop import ending_token_ids

__all__ = [
    "add_bias",
    "allow_tokens",
    "apply_frequency_penalty",
    "apply_masks",
    "apply_min_p",
    "apply_presence_penalty",
    "apply_repetition_penalty",
    "apply_temperature",
    "apply_top_k",
    "apply_top_p",
    "ban_tokens",
    "transform",
]

BANNED = float("-inf")


def transform(
    logits: Tensor,
    params: Sequence[SamplingParams],
    outputs: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]] | None = None,
    masks: Sequence[Tensor | None] | None = None,
    eos_token_ids: Collection[int] = (),
) -> Tensor:
    """All of it: row i as for the token after `prompts[i]` and `outputs[i]`, where `masks[i]`, bool [V], is given."""
    prompts = [()] * len(params) if prompts is None else prompts
    bans = [
        ending_token_ids(one, eos_token_ids) if len(output) < one.min_tokens else ()
        for one, output in zip(params, outputs, strict=True)
    ]
    logits = apply_masks(logits, [None] * len(params) if masks is None else masks)
    logits = allow_tokens(logits, [one.allowed_token_ids for one in params])
    logits = ban_tokens(logits, bans)
    logits = add_bias(logits, [one.logit_bias or () for one in params])
    logits = apply_repetition_penalty(logits, _column(params, "repetition_penalty"), prompts, outputs)
    logits = apply_frequency_penalty(logits, _column(params, "frequency_penalty"), outputs)
    logits = apply_presence_penalty(logits, _column(params, "presence_penalty"), outputs)
    logits = apply_temperature(logits, _column(params, "temperature"))
    logits = apply_min_p(logits, _column(params, "min_p", torch.float64))
    logits = apply_top_k(logits, _column(params, "top_k", torch.int64))
    return apply_top_p(logits, _column(params, "top_p", torch.float64))


def _column(params: Sequence[SamplingParams], name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([getattr(one, name) for one in params], dtype=dtype)


def apply_masks(logits: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """Only tokens that are True in `masks[i]` can be sampled from row i; None allows all."""
    allowed = [torch.ones(logits.shape[1], dtype=torch.bool) if mask is None else mask for mask in masks]
    return logits.masked_fill(~torch.stack(allowed), BANNED)


def allow_tokens(logits: Tensor, allowed: Sequence[Collection[int] | None]) -> Tensor:
    """Only `allowed[i]` can be sampled from row i; None allows all."""
    everything = range(logits.shape[1])
    return ban_tokens(logits, [() if ids is None else set(everything) - set(ids) for ids in allowed])


def ban_tokens(logits: Tensor, bans: Sequence[Collection[int]]) -> Tensor:
    """`bans[i]` cannot be sampled from row i; ids outside the vocabulary are ignored."""
    logits = logits.clone()
    for row, ban in zip(logits, bans, strict=True):
        row[[token for token in ban if token < logits.shape[1]]] = BANNED
    return logits


def add_bias(logits: Tensor, bias: Sequence[Collection[tuple[int, float]]]) -> Tensor:
    """Add to the logits of single tokens."""
    added = torch.zeros_like(logits)
    for row, pairs in zip(added, bias, strict=True):
        for token, number in pairs:
            row[token] = number
    return logits + added


def apply_repetition_penalty(
    logits: Tensor, penalty: Tensor, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> Tensor:
    """Divide positive logits of tokens in prompt or output, multiply negative ones (Keskar et al. 2019, CTRL)."""
    seen = _counts(logits, [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]) > 0
    factor = torch.where(seen, penalty.unsqueeze(-1), 1.0)
    return torch.where(logits > 0, logits / factor, logits * factor).clamp(max=torch.finfo(logits.dtype).max)


def apply_frequency_penalty(logits: Tensor, penalty: Tensor, outputs: Sequence[Sequence[int]]) -> Tensor:
    """Subtract for each time that a token is in the output."""
    return logits - penalty.unsqueeze(-1) * _counts(logits, outputs)


def apply_presence_penalty(logits: Tensor, penalty: Tensor, outputs: Sequence[Sequence[int]]) -> Tensor:
    """Subtract where a token is in the output."""
    return logits - penalty.unsqueeze(-1) * (_counts(logits, outputs) > 0)


def _counts(logits: Tensor, sequences: Sequence[Sequence[int]]) -> Tensor:
    ids = [torch.tensor(list(tokens), dtype=torch.int64) for tokens in sequences]
    return torch.stack([torch.bincount(one, minlength=logits.shape[1]) for one in ids]).to(logits.dtype)


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide; a temperature of 0 leaves the row as it is (it then is argmax that takes the token)."""
    return logits / torch.where(temperature == 0, 1.0, temperature).unsqueeze(-1)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens of at least `min_p` times the largest probability."""
    largest = logits.max(-1, keepdim=True).values
    return logits.masked_fill(logits.double() < largest.double() + min_p.log().unsqueeze(-1), BANNED)


def apply_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep the `top_k` first tokens in the order; 0 and -1 keep all."""
    order = _order(logits)
    rank = torch.arange(logits.shape[1]).expand_as(order)
    kept = (rank < top_k.unsqueeze(-1)) | (top_k <= 0).unsqueeze(-1)
    return _keep(logits, order, kept)


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep tokens in the order until their probability reaches `top_p`; at least one, and all for 1."""
    order = _order(logits)
    probs = logits.gather(-1, order).double().softmax(-1)
    before = probs.cumsum(-1) - probs
    kept = (before < top_p.unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1)
    return _keep(logits, order, kept)


def _order(logits: Tensor) -> Tensor:
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices


def _keep(logits: Tensor, order: Tensor, kept: Tensor) -> Tensor:
    """`kept` says for each place in `order` whether its token stays."""
    return logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), BANNED)
