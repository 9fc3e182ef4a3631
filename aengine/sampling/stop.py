"""When a sample is finished."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Literal

from attrs import frozen

from aengine.params import SamplingParams

__all__ = ["Finish", "StopRule", "ending_token_ids"]


@frozen
class Finish:
    """Why a sample ended. `stop_reason` is the token that ended it, an EOS included, or the stop string; None for the
    length. Tokens are looked at before text."""

    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None


def ending_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Tokens that end a sample: `stop_token_ids`, and the model's EOS unless `ignore_eos`."""
    eos = () if params.ignore_eos else eos_token_ids
    return frozenset((*params.stop_token_ids, *eos))


@frozen
class StopRule:
    """Decides after each token of a sample. The ending token is kept, and counts.

    Before `min_tokens` the ending tokens cannot be sampled (`sampler`), so one that is there anyway (a forced one) does
    not end the sample. A token that both ends a sample and is its last by length ends it with reason "stop".
    """

    ending: Collection[int]
    min_tokens: int
    max_tokens: int
    """New tokens this sample may have: the request's own limit, or what model and pool allow where that is less."""

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Iterable[int], max_tokens: int) -> StopRule:
        """`max_tokens` is what model and pool allow; `params.max_tokens` may lower it."""
        limit = max_tokens if params.max_tokens is None else min(params.max_tokens, max_tokens)
        return _shared_rule(params, tuple(eos_token_ids), limit)

    def check(self, token_id: int, num_tokens: int) -> Finish | None:
        """None to go on; `num_tokens` counts the new tokens, `token_id` (the last of them) included."""
        if token_id in self.ending and num_tokens > self.min_tokens:
            return Finish("stop", token_id)
        if num_tokens >= self.max_tokens:
            return Finish("length")
        return None


@functools.lru_cache(maxsize=64)
def _shared_rule(params: SamplingParams, eos_token_ids: tuple[int, ...], limit: int) -> StopRule:
    """The requests of a batch mostly have one rule, and thousands of them may wait."""
    return StopRule(ending_token_ids(params, eos_token_ids), params.min_tokens, limit)
