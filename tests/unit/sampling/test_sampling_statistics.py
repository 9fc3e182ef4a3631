"""What is drawn follows the distribution that is reported."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aengine.params import SamplingParams
from aengine.sampling.sampler import Draw, Drawn, sample, score

NUM_DRAWS = 20_000
SIZE = 600
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.6),
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.02),
    SamplingParams(temperature=0.8, top_k=100, top_p=0.9),
    SamplingParams(temperature=1.5, min_p=0.01, top_p=0.95),
    SamplingParams(min_p=0.005, top_k=80, top_p=0.9, min_tokens=NUM_DRAWS, stop_token_ids=(0, 1)),
]


def some_logits() -> Tensor:
    return torch.randn(1, SIZE, generator=torch.Generator().manual_seed(5)) * 2


def reported_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    scores = score(logits.expand(SIZE, SIZE), range(SIZE), params)
    return torch.tensor([one.logprob for one in scores if isinstance(one, Drawn)], dtype=torch.float64).exp()


def chi_square_deviation(counts: Tensor, expected: Tensor) -> float:
    """Chi-square in standard deviations from its mean; tokens expected fewer than ten times share one bin."""
    often = expected >= 10
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("along", ["position", "index", "seed"])
def test_drawn_frequencies_follow_the_reported_distribution(params: SamplingParams, along: str) -> None:
    logits = some_logits()
    key = {"seed": 99, "index": 0, "position": 0}
    draws = [Draw(0, params, **{**key, along: number}) for number in range(NUM_DRAWS)]
    tokens = torch.tensor([one.token_id for one in sample(logits, draws) if isinstance(one, Drawn)])
    assert len(tokens) == NUM_DRAWS
    probabilities = reported_probabilities(logits, params)
    counts = torch.bincount(tokens, minlength=SIZE).double()
    assert counts[probabilities == 0].sum() == 0
    assert chi_square_deviation(counts, probabilities * NUM_DRAWS) < 4


@pytest.mark.parametrize("params", SETTINGS)
def test_reported_probabilities_add_up_to_one(params: SamplingParams) -> None:
    assert float(reported_probabilities(some_logits(), params).sum()) == pytest.approx(1.0, abs=2e-6)
