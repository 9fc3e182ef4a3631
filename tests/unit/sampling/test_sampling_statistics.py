"""What is drawn follows the distribution that is reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from aengine.params import SamplingParams
from aengine.sampling.history import TokenHistory
from aengine.sampling.sampler import Draw, Drawn, sample

NUM_DRAWS = 10_000
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
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=-0.3),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(logit_bias={3: 4.0, 5: -2.0}),
    SamplingParams(allowed_token_ids=range(0, SIZE, 7)),
    SamplingParams(
        allowed_token_ids=range(400),
        logit_bias={3: 4.0},
        repetition_penalty=1.2,
        frequency_penalty=0.2,
        presence_penalty=0.5,
        temperature=0.9,
        min_p=0.002,
        top_k=90,
        top_p=0.93,
    ),
    SamplingParams(min_p=0.005, top_k=80, top_p=0.9, min_tokens=NUM_DRAWS, stop_token_ids=(0, 1)),
]


class Frozen(TokenHistory):
    """The same tokens before every draw, also where the draws differ in their position."""

    def counts(self, num_output: int) -> Any:
        return super().counts(len(self.tokens) - self.num_prompt)


HISTORY = Frozen([3, 4, 4, 90, *range(50, 70), 55, 55, 3], 4)


def some_logits() -> Tensor:
    return torch.randn(1, SIZE, generator=torch.Generator().manual_seed(5)) * 2


def draw(params: SamplingParams, **fields: Any) -> Draw:
    return Draw(**{"row": 0, "params": params, "seed": 99, "index": 0, "position": 0, "history": HISTORY, **fields})


def reported_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    scores = sample(logits, [draw(params, token=token) for token in range(SIZE)])
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
    draws = [draw(params, **{along: number}) for number in range(NUM_DRAWS)]
    tokens = torch.tensor([one.token_id for one in sample(logits, draws) if isinstance(one, Drawn)])
    assert len(tokens) == NUM_DRAWS
    probabilities = reported_probabilities(logits, params)
    counts = torch.bincount(tokens, minlength=SIZE).double()
    assert counts[probabilities == 0].sum() == 0
    assert chi_square_deviation(counts, probabilities * NUM_DRAWS) < 4


@pytest.mark.parametrize("params", SETTINGS)
def test_reported_probabilities_add_up_to_one(params: SamplingParams) -> None:
    assert float(reported_probabilities(some_logits(), params).sum()) == pytest.approx(1.0, abs=2e-6)
