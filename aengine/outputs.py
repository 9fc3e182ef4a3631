"""What comes out: samples with the policy versions that made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from attrs import frozen

from aengine.params import SamplingParams

__all__ = [
    "Alternatives",
    "CompletionOutput",
    "FinishReason",
    "KVSpan",
    "NumericsLabel",
    "RequestOutput",
    "VersionSpan",
    "weakest",
]

FinishReason = Literal["stop", "length", "abort", "error"]

NumericsLabel = Literal["invariant", "unverified", "fast"]
"""What is promised of a sample's bits; see `EngineStats.numerics`."""

PROMISES: tuple[NumericsLabel, ...] = ("fast", "unverified", "invariant")
"""Weakest first."""


def weakest(labels: Iterable[NumericsLabel]) -> NumericsLabel:
    """What is promised of something that was made in several parts."""
    return min(labels, key=PROMISES.index)


Alternatives = tuple[tuple[int, float], ...]
"""(token id, log-probability) by falling probability; the token that is there comes last where it is not among them."""


@frozen
class VersionSpan:
    """Output tokens `start` to `end` (half-open) were sampled under policy version `version`."""

    version: int
    start: int
    end: int


@frozen
class KVSpan:
    """Output tokens `first_token` to `last_token` attended to context positions `start` to `end`
    as computed under policy version `version`. Both ranges are half-open; positions count from the prompt's start.

    A token attends to every position before its own that had been computed by then, so within a span the token at
    output index i sees positions up to prompt length + i only.
    """

    version: int
    start: int
    end: int
    first_token: int
    last_token: int


@frozen
class CompletionOutput:
    """One sample of a request.

    `logprobs` are of the distribution that was sampled from (after temperature and truncation, renormalised; at
    temperature 0 they are taken at temperature 1), `raw_logprobs` of the model's own distribution. Both are float32
    values aligned with `token_ids` one to one.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    version_spans: tuple[VersionSpan, ...]
    kv_spans: tuple[KVSpan, ...]
    seed: int
    top_logprobs: tuple[Alternatives, ...] | None = None
    """Where `SamplingParams.logprobs` asks for k: for each token, (id, logprob) of the k likeliest under the
    distribution that was sampled from (fewer where truncation left fewer), and of the token itself."""

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The policy version that sampled each token."""
        return tuple(span.version for span in self.version_spans for _ in range(span.start, span.end))

    @property
    def min_policy_version(self) -> int | None:
        """The oldest version that had a part in this sample, KV included; None where there are no tokens."""
        return min(self._versions(), default=None)

    @property
    def max_policy_version(self) -> int | None:
        """The newest version that had a part in this sample, KV included; None where there are no tokens."""
        return max(self._versions(), default=None)

    @property
    def is_single_policy(self) -> bool:
        """Whether one version sampled every token and computed all KV that was attended to."""
        return len(self._versions()) <= 1

    @property
    def cumulative_logprob(self) -> float:
        """Sum of `logprobs`."""
        return sum(self.logprobs)

    def _versions(self) -> set[int]:
        return {span.version for span in self.version_spans} | {span.version for span in self.kv_spans}


@frozen
class RequestOutput:
    """The samples of one prompt, in order of their index.

    `num_cached_tokens` counts prompt tokens whose KV came from the prefix cache when the request was first
    scheduled; recomputation after a preemption is not counted. `num_preemptions` is over all samples.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    num_preemptions: int
    prompt_logprobs: tuple[Alternatives | None, ...] | None = None
    """Where `SamplingParams.prompt_logprobs` asks for k: for each prompt token but the first, for which it is None,
    (id, logprob) of the k likeliest under the model's own distribution, and of the token itself. None if the request
    ended before the prompt was computed."""
    params: SamplingParams | None = None
    """The parameters that the request was submitted with."""
    has_token_mask: bool = False
    """Whether a token mask decided what could be sampled; without it the draws cannot be repeated."""
    numerics: NumericsLabel = "unverified"
    """What is promised of the bits of these samples."""
