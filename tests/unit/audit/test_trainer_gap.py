"""The trainer gap: numbers worked out by hand, an oracle as trainer, and a transformers model padded either way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from audit_support import output, sample_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from aengine import Engine, EngineConfig, RequestOutput, SamplingParams
from aengine.audit.gap import trainer_gap
from aengine.audit.oracle import oracle_logits
from aengine.audit.record import SampleRecord, sample_records
from aengine.errors import RolloutBatchError
from aengine.testing import TINY, tiny_checkpoint

MODEL = tiny_checkpoint(0)
PROMPTS = [[1, 2, 3], [9] * 11, [5]]


def sample(token_ids: Sequence[int], logprobs: Sequence[float], **changes: Any) -> SampleRecord:
    """A sample behind the prompt (1, 2)."""
    fields = {"logprobs": tuple(logprobs), "raw_logprobs": tuple(logprobs), "params": SamplingParams()} | changes
    return msgspec.structs.replace(sample_of(output(-1.0)), token_ids=tuple(token_ids), **fields)


def coin(share: float) -> Any:
    """A model of two tokens and one more, which gives token 1 this share always, and token 2 none to speak of."""

    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        logits = torch.tensor([math.log(1 - share), math.log(share), -50.0], dtype=torch.float64)
        return logits.expand(*ids.shape, 3)

    return forward


HAND = (sample([1, 0], [math.log(0.25), math.log(0.5)]), sample([1], [math.log(0.5)]))
"""Under `coin(0.5)` the ratios are 2, 1 and 1."""


def test_every_number_of_a_case_worked_out_by_hand() -> None:
    gap = trainer_gap(coin(0.5), HAND)
    assert gap.num_tokens == 3
    np.testing.assert_allclose(gap.ratios, [2, 1, 1], rtol=1e-12)
    assert gap.mean == pytest.approx(math.log(2) / 3)
    assert gap.max == pytest.approx(math.log(2))
    assert gap.worst == (0, 0)
    np.testing.assert_allclose(gap.mean_by_position, [math.log(2) / 2, 0], atol=1e-12)
    np.testing.assert_allclose(gap.max_by_position, [math.log(2), 0], atol=1e-12)
    assert gap.effective_sample_size == pytest.approx(16 / (3 * 6))
    assert gap.share_clipped == pytest.approx(1 / 3)
    assert gap.kl_k1 == pytest.approx(-math.log(2) / 3)
    assert gap.kl_k3 == pytest.approx((2 - 1 - math.log(2)) / 3)


def test_it_says_what_it_found() -> None:
    assert str(trainer_gap(coin(0.5), HAND)).splitlines() == [
        "trainer gap in logprobs: 3 tokens of 2 samples",
        "  difference  mean 2.31e-01, max 6.93e-01 (token 0 of sample 0 of p)",
        "  ratio       mean 1.333333, min 1.000000, max 2.000000",
        "  tokens      33.33% outside 1 ± 0.2, worth 88.89%",
        "  KL          k1 -2.31e-01, k3 1.02e-01",
    ]


def test_temperature_divides_the_logits_of_what_was_sampled_from_and_no_others() -> None:
    """At temperature 0.5 the coin of 0.8 gives token 1 a share of 16/17."""
    both = sample([1], [math.log(16 / 17)], raw_logprobs=(math.log(0.8),), params=SamplingParams(temperature=0.5))
    assert trainer_gap(coin(0.8), [both]).max < 1e-7
    assert trainer_gap(coin(0.8), [both], which="raw_logprobs").max < 1e-7
    greedy = sample([1], [math.log(0.8)], params=SamplingParams(temperature=0))
    assert trainer_gap(coin(0.8), [greedy]).max < 1e-7


def test_the_kl_estimates_agree_with_the_divergence_they_estimate() -> None:
    """Tokens drawn from a coin of 0.6, and a trainer with one of 0.5."""
    draws = (np.random.default_rng(0).random(20_000) < 0.6).astype(int)
    gap = trainer_gap(coin(0.5), [sample(draws.tolist(), np.log(np.where(draws, 0.6, 0.4)).tolist())])
    exact = 0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5)
    assert gap.kl_k1 == pytest.approx(exact, abs=5e-3)
    assert gap.kl_k3 == pytest.approx(exact, abs=5e-4)


def test_a_sample_without_tokens_counts_for_nothing() -> None:
    gap = trainer_gap(coin(0.5), [sample([], []), *HAND])
    assert gap.num_tokens == 3 and gap.worst == (1, 0)
    assert len(gap.differences) == 3 and not len(gap.differences[0])
    np.testing.assert_allclose(gap.mean_by_position, [math.log(2) / 2, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("model", "samples", "sentence"),
    [
        (coin(0.5), [], "0 samples without a token"),
        (coin(0.5), [sample([], [])], "1 samples without a token"),
        (coin(0.5), [sample([3], [-1.0])], "sample 0 of p has token 3; the model has 3 logits"),
        (coin(math.nan), [sample([1], [-1.0])], "token 0 of sample 0 of p the log-probability nan"),
        (lambda ids, mask: torch.zeros(2, 3), [sample([1], [-1.0])], r"logits \(2, 3\) for ids \(1, 3\)"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(model: Any, samples: list[SampleRecord], sentence: str) -> None:
    with pytest.raises(RolloutBatchError, match=sentence):
        trainer_gap(model, samples)


@pytest.mark.parametrize("name", ["which", "padding_side"])
def test_arguments_that_are_no_choices_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        trainer_gap(coin(0.5), HAND, **{name: "both"})  # type: ignore[arg-type]


async def rollouts(**params: Any) -> list[RequestOutput]:
    async with Engine(MODEL, EngineConfig(num_pages=64)) as engine:
        return await engine.generate_batch(PROMPTS, SamplingParams(n=2, max_tokens=9, seed=3, **params))


def oracle(ids: Tensor, mask: Tensor) -> Tensor:
    """Logits of the real tokens by the oracle, and NaN at the others."""
    logits = torch.full((*ids.shape, MODEL.spec.vocab_size), math.nan)
    for row, real in enumerate(mask):
        logits[row, real] = oracle_logits(MODEL.spec, MODEL.tensors, ids[row, real].tolist())
    return logits


@pytest.mark.parametrize("padding_side", ["left", "right"])
async def test_the_gap_to_the_oracle_is_that_of_rounding(padding_side: Any) -> None:
    outputs = await rollouts(temperature=0.7)
    gap = trainer_gap(oracle, outputs, padding_side=padding_side, batch_size=4, pad_token_id=63)
    assert gap.num_tokens == sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    assert 0 < gap.max < 1e-4
    assert gap.effective_sample_size > 1 - 1e-8 and gap.share_clipped == 0
    raw = trainer_gap(oracle, outputs, which="raw_logprobs", padding_side=padding_side)
    assert 0 < raw.max < 1e-4


async def test_records_and_outputs_give_the_same_gap_in_their_own_order() -> None:
    outputs = await rollouts()
    records = [record for output in outputs for record in sample_records(output.request_id, output, SamplingParams())]
    gaps = [trainer_gap(oracle, some, batch_size=size) for some, size in ((outputs, 8), (records, 1))]
    assert gaps[0].names == gaps[1].names
    for a, b in zip(gaps[0].differences, gaps[1].differences, strict=True):
        np.testing.assert_array_equal(a, b)


async def test_what_truncation_changed_is_a_part_of_the_gap() -> None:
    outputs = await rollouts(top_k=3)
    assert trainer_gap(oracle, outputs, which="raw_logprobs").max < 1e-4
    assert trainer_gap(oracle, outputs).max > 0.01


@pytest.mark.parametrize("padding_side", ["left", "right"])
async def test_the_gap_to_a_transformers_model_is_that_of_rounding(padding_side: Any) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in TINY.items() if k != "architectures"})).eval()
    model.load_state_dict(dict(MODEL.tensors), strict=False)
    gap = trainer_gap(model, await rollouts(temperature=0.7), padding_side=padding_side, batch_size=3)
    assert 0 < gap.max < 1e-4
    torch.nn.init.normal_(model.model.norm.weight)
    assert trainer_gap(model, await rollouts(temperature=0.7), padding_side=padding_side).max > 0.1


def test_numbers_that_do_not_go_with_the_tokens_are_refused() -> None:
    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 8)

    record = sample_of(output(-1.0, -2.0))
    for wrong in ({"logprobs": (-1.0,)}, {"prompt_token_ids": ()}):
        with pytest.raises(RolloutBatchError, match="sample 0 of p has"):
            trainer_gap(forward, [msgspec.structs.replace(record, **wrong)])
    with pytest.raises(ValueError, match="batch_size"):
        trainer_gap(forward, [record], batch_size=0)
