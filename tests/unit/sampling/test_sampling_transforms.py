"""The torch definition of each transform, against transformers and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aengine.params import SamplingParams
from aengine.sampling.transforms import apply_min_p, apply_top_k, apply_top_p, ban_tokens, transform

BANNED = float("-inf")
SETTINGS = [
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=-1, top_p=0.5),
    SamplingParams(top_p=0.95, temperature=0.7),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.3, min_p=0.01, top_k=60, top_p=0.8),
]


def random_logits(rows: int = 6, size: int = 301, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def by_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    logits = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.min_p > 0:
        logits = MinPLogitsWarper(params.min_p)(ids, logits)
    if params.top_k > 0:
        logits = TopKLogitsWarper(params.top_k)(ids, logits)
    if params.top_p < 1:
        logits = TopPLogitsWarper(params.top_p)(ids, logits)
    return logits


@pytest.mark.parametrize("params", SETTINGS)
def test_transforms_agree_with_transformers(params: SamplingParams) -> None:
    logits = random_logits()
    ours = transform(logits, [params] * len(logits), [()] * len(logits))
    torch.testing.assert_close(ours, by_transformers(logits, params))


def test_rows_with_different_parameters_share_a_batch_and_keep_their_bits() -> None:
    logits = random_logits(len(SETTINGS))
    together = transform(logits, SETTINGS, [()] * len(SETTINGS))
    for row, params in enumerate(SETTINGS):
        alone = transform(logits[row : row + 1], [params], [()])
        assert torch.equal(together[row], alone[0])


def test_top_k_keeps_the_lowest_ids_of_equal_logits() -> None:
    kept = apply_top_k(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]]), torch.tensor([3]))
    assert kept.tolist() == [[1.0, 2.0, BANNED, 2.0, BANNED]]


def test_top_p_keeps_the_lowest_ids_of_equal_logits() -> None:
    kept = apply_top_p(torch.zeros(1, 8), torch.tensor([0.3]))
    assert kept.tolist() == [[0.0, 0.0, 0.0] + [BANNED] * 5]


def test_top_p_keeps_at_least_the_likeliest() -> None:
    kept = apply_top_p(torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([1e-9]))
    assert kept.tolist() == [[BANNED, 3.0, BANNED]]


def test_min_p_of_one_keeps_all_of_the_likeliest() -> None:
    kept = apply_min_p(torch.tensor([[2.0, 0.0, 2.0]]), torch.tensor([1.0]))
    assert kept.tolist() == [[2.0, BANNED, 2.0]]


def test_defaults_change_nothing() -> None:
    logits = random_logits()
    assert torch.equal(transform(logits, [SamplingParams()] * len(logits), [()] * len(logits)), logits)


def test_ending_tokens_are_banned_until_min_tokens_have_been_sampled() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(3,))
    kept = transform(torch.zeros(3, 5), [params] * 3, [(), (4,), (4, 4)], eos_token_ids=(0,))
    assert kept.tolist() == [[BANNED, 0.0, 0.0, BANNED, 0.0]] * 2 + [[0.0] * 5]


def test_ignored_eos_is_not_banned() -> None:
    params = SamplingParams(min_tokens=2, ignore_eos=True)
    assert transform(torch.zeros(1, 3), [params], [()], eos_token_ids=(0,)).tolist() == [[0.0] * 3]


def test_banning_copies_and_ignores_ids_outside_the_vocabulary() -> None:
    logits = torch.zeros(1, 3)
    assert ban_tokens(logits, [(1, 99)]).tolist() == [[0.0, BANNED, 0.0]]
    assert logits.tolist() == [[0.0] * 3]
