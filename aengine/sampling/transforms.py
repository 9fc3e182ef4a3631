"""What each sampling parameter does to the logits, in plain torch: the definition, and the oracle of the kernel.

Order as in vLLM: ban on ending tokens, temperature, min-p, top-k, top-p; each works on what those before it left,
renormalised. Tokens are ordered by falling logit and equal ones by rising id, so a cut through equal logits keeps the
lowest ids, whatever else is in the batch. Logits are [L, V] float32, parameters one per row; a row's bits depend on
that row alone. `log_softmax` of the result is the distribution that is sampled from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from aengine.params import SamplingParams
from aengine.sampling.stop import ending_token_ids

__all__ = ["apply_min_p", "apply_temperature", "apply_top_k", "apply_top_p", "ban_tokens", "transform"]

BANNED = float("-inf")


def transform(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], eos_token_ids: Collection[int] = ()
) -> Tensor:
    """All of it: row i as for the token at output position `positions[i]` under `params[i]`."""
    bans = [
        ending_token_ids(one, eos_token_ids) if position < one.min_tokens else ()
        for one, position in zip(params, positions, strict=True)
    ]
    logits = ban_tokens(logits, bans)
    logits = apply_temperature(logits, torch.tensor([one.temperature for one in params]))
    logits = apply_min_p(logits, torch.tensor([one.min_p for one in params], dtype=torch.float64))
    logits = apply_top_k(logits, torch.tensor([one.top_k for one in params]))
    return apply_top_p(logits, torch.tensor([one.top_p for one in params], dtype=torch.float64))


def ban_tokens(logits: Tensor, bans: Sequence[Collection[int]]) -> Tensor:
    """`bans[i]` cannot be sampled from row i; ids outside the vocabulary are ignored."""
    logits = logits.clone()
    for row, ban in zip(logits, bans, strict=True):
        row[[token for token in ban if token < logits.shape[1]]] = BANNED
    return logits


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
