"""Whether the sampler holds on this machine, as `kernels.operator_probe` asks it of the other operators."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from aengine.kernels.threads import PARALLEL_FROM
from aengine.kernels.trial import Operator, OperatorFinding, Pick, Trial, examine, thread_counts, torch_threads
from aengine.params import SamplingParams
from aengine.sampling import sampler
from aengine.sampling.random import uniform
from aengine.sampling.sampler import Draw, Drawn
from aengine.sampling.transforms import transform

__all__ = ["probe_sampler"]

SETTINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=50, min_p=0.01),
    SamplingParams(logit_bias={0: 3.0}),
)
FEWEST_ROWS = 65
NUM_DISTINCT = 16
"""Rows of logits; more draws share them."""
TOLERANCE = 1e-4
"""Of a log-probability: where a cut goes through it, a token of that probability may be kept or not."""


def probe_sampler(vocab_size: int, strategy: str = "numba") -> OperatorFinding:
    """The finding named `"sample"`. Call it in the thread that will sample; a second call costs nothing."""
    return _find(sampler.sample, vocab_size, strategy, thread_counts())


@functools.cache
def _find(operator: Operator, vocab_size: int, strategy: str, counts: tuple[int, ...]) -> OperatorFinding:
    with torch_threads(1):
        pool = 3 * torch.randn(NUM_DISTINCT, vocab_size, generator=torch.Generator().manual_seed(7))

    def compute(operator: Operator, pick: Pick) -> Tensor:
        draws = [_draw(place, row) for place, row in enumerate(pick.tolist())]
        results: list[Drawn] = operator(pool[pick % NUM_DISTINCT], draws)
        return torch.tensor([(one.token_id, one.logprob, one.raw_logprob) for one in results], dtype=torch.float64)

    def measure(pick: Pick, results: Tensor) -> float:
        draws = [_draw(place, row) for place, row in enumerate(pick.tolist())]
        return _worst_error(pool[pick % NUM_DISTINCT].double(), draws, results)

    num_rows = max(FEWEST_ROWS, -(-PARALLEL_FROM // vocab_size))
    num_checked = len(SETTINGS)
    return examine(Trial("sample", strategy, operator, num_rows, (compute,), measure, TOLERANCE, num_checked), counts)


def _draw(place: int, row: int) -> Draw:
    """The draw of one row of the pool, whose logits stand at `place` in the call."""
    return Draw(place, SETTINGS[row % len(SETTINGS)], seed=2**40 + row, index=row, position=row % 7)


def _worst_error(logits: Tensor, draws: list[Draw], results: Tensor) -> float:
    """`logits` [n, V] float64; `results` [n, 3]: token, logprob, raw logprob."""
    tokens = results[:, :1].long()
    logprobs = transform(logits, [draw.params for draw in draws], [()] * len(draws)).log_softmax(-1)
    raw_logprobs = logits.log_softmax(-1)
    expected = torch.cat([logprobs.gather(-1, tokens), raw_logprobs.gather(-1, tokens)], -1)
    missed = [_missed(one, draw, int(token)) for one, draw, token in zip(logprobs, draws, tokens, strict=True)]
    return float(torch.cat([(results[:, 1:] - expected).abs().flatten(), torch.tensor(missed)]).max())


def _missed(logprobs: Tensor, draw: Draw, token: int) -> float:
    """How far the draw's random number lies outside of what `token` covers; greedy, how far it is from the best."""
    if draw.params.temperature == 0:
        return float(logprobs.max() - logprobs[token])
    u, covered = uniform(draw.seed, draw.index, draw.position), logprobs.exp().cumsum(-1)
    start = float(covered[token - 1]) if token > 0 else 0.0
    return max(start - u, u - float(covered[token]), 0.0)
