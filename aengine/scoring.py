"""Log-probabilities of given tokens under the installed policy, with the bits that generation would have recorded."""

from __future__ import annotations

import attrs
import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from aengine.errors import RequestFailedError
from aengine.outputs import Alternatives, NumericsLabel
from aengine.params import SamplingParams
from aengine.request import Request
from aengine.sampling.stop import StopRule
from aengine.targets import Targets

__all__ = ["ScoreOutput", "score_output", "scoring_request"]


@frozen
class ScoreOutput:
    """Log-probabilities of one response, as `CompletionOutput` has them, all under `policy_version`.

    A token that the parameters could not have sampled has a logprob of -inf.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    policy_version: int
    num_cached_tokens: int
    numerics: NumericsLabel
    """What is promised of the bits of these numbers."""
    top_logprobs: tuple[Alternatives, ...] | None = None
    support: tuple[NDArray[np.int32] | None, ...] | None = field(default=None, eq=False, repr=False)
    """Where it was asked for: the ids that could have been sampled in place of each token, in their order; None where
    the parameters left all."""


def scoring_request(
    request_id: str,
    prompt_token_ids: tuple[int, ...],
    token_ids: tuple[int, ...],
    params: SamplingParams,
    *,
    with_support: bool,
    priority: int,
    cache_salt: str | None,
) -> Request:
    """A request that computes a response that is given. Its last token needs no KV."""
    request = Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=attrs.evolve(params, n=1, stop=(), prompt_logprobs=None),
        stop=StopRule((), 0, len(token_ids)),
        seed=0,
        priority=priority,
        cache_salt=cache_salt,
        is_scoring=True,
    )
    sample = request.leader
    sample.tokens.extend(token_ids[:-1])
    sample.targets = Targets(request.params, len(prompt_token_ids) - 1, token_ids, with_support)
    return request


def score_output(request: Request, numerics: NumericsLabel) -> ScoreOutput:
    """Raises `RequestFailedError` if the request failed, or was aborted before all of it was scored."""
    targets = request.leader.targets
    assert targets is not None
    if request.error is not None:
        raise RequestFailedError(request.request_id, str(request.error)) from request.error
    if targets.version is None or not targets.is_complete:
        raise RequestFailedError(request.request_id, "it was aborted before all tokens were scored")
    results = targets.results
    return ScoreOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(targets.token_ids),
        logprobs=tuple(result.logprob for result in results),
        raw_logprobs=tuple(result.raw_logprob for result in results),
        policy_version=targets.version,
        num_cached_tokens=request.num_cached_tokens,
        numerics=numerics,
        top_logprobs=None if request.params.logprobs is None else tuple(result.top or () for result in results),
        support=tuple(result.support for result in results) if targets.with_support else None,
    )
