"""What changes single logits: against the definition, against transformers, and what it may not depend on."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from aengine.errors import SamplingParamsError, TokenMaskError
from aengine.params import SamplingParams
from aengine.sampling.history import TokenHistory
from aengine.sampling.sampler import Draw, Drawn, sample
from aengine.sampling.transforms import transform

SIZE = 130
PROMPT, OUTPUT = [3, 5, 5, 9, 70], [5, 8, 8, 8, 3, 100]
SETTINGS = [
    SamplingParams(presence_penalty=0.7),
    SamplingParams(presence_penalty=-1.5),
    SamplingParams(frequency_penalty=0.9, temperature=0.7),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.8, temperature=0.0),
    SamplingParams(logit_bias={5: 3.5, 9: -100, 127: 100}),
    SamplingParams(allowed_token_ids=[1, 5, 8, 9, 20]),
    SamplingParams(
        allowed_token_ids=range(2, 90),
        min_tokens=50,
        stop_token_ids=[8, 9],
        logit_bias={5: 2, 30: 4.5},
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.4,
        temperature=0.8,
        min_p=0.001,
        top_k=40,
        top_p=0.97,
    ),
]


class EvenOnly:
    """A mask that also remembers the outputs it was asked about."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def next_mask(self, output_ids: Any) -> Any:
        self.asked.append(list(output_ids))
        return np.arange(SIZE) % 2 == 0


def logits_of(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def draw(params: SamplingParams, output: list[int] = OUTPUT, **fields: Any) -> Draw:
    history = TokenHistory([*PROMPT, *output], len(PROMPT))
    return Draw(
        **{"row": 0, "params": params, "seed": 1, "index": 0, "position": len(output), "history": history, **fields}
    )


def reported(logits: Tensor, params: SamplingParams, **fields: Any) -> Tensor:
    """The distribution that one draw reports, token by token."""
    results = sample(logits, [draw(params, token=token, **fields) for token in range(SIZE)], eos_token_ids=(0,))
    return torch.tensor([one.logprob for one in results if isinstance(one, Drawn)])


@pytest.mark.parametrize("params", SETTINGS)
def test_the_distribution_is_that_of_the_definition(params: SamplingParams) -> None:
    logits = logits_of()
    expected = transform(logits, [params], [OUTPUT], [PROMPT], eos_token_ids=(0,)).double().log_softmax(-1)[0]
    torch.testing.assert_close(reported(logits, params), expected.float(), atol=2e-6, rtol=1e-6)


def test_a_mask_comes_before_everything_else() -> None:
    logits, even = logits_of(), EvenOnly()
    allowed = torch.from_numpy(EvenOnly().next_mask([]))
    expected = transform(logits, [SETTINGS[-1]], [OUTPUT], [PROMPT], [allowed], eos_token_ids=(0,))
    actual = reported(logits, SETTINGS[-1], mask=even)
    torch.testing.assert_close(actual, expected.double().log_softmax(-1)[0].float(), atol=2e-6, rtol=1e-6)
    assert even.asked == [OUTPUT] * SIZE


@given(
    logits=st.lists(st.integers(-6, 6).map(float), min_size=6, max_size=6),
    prompt=st.lists(st.integers(0, 5), max_size=5),
    output=st.lists(st.integers(0, 5), max_size=8),
    presence=st.sampled_from([-2.0, 0.0, 0.75]),
    frequency=st.sampled_from([-1.0, 0.0, 0.5]),
    repetition=st.sampled_from([0.5, 1.0, 1.7]),
    allowed=st.none() | st.sets(st.integers(0, 5), min_size=1),
    bias=st.none() | st.dictionaries(st.integers(0, 5), st.sampled_from([-7.5, 2.0])),
)
def test_any_combination_is_that_of_the_definition(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    allowed: set[int] | None,
    bias: dict[int, float] | None,
) -> None:
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        allowed_token_ids=allowed,
        logit_bias=bias,
    )
    row, history = torch.tensor([logits]), TokenHistory([*prompt, *output], len(prompt))
    draws = [Draw(0, params, 0, 0, len(output), history, token=token) for token in range(6)]
    actual = torch.tensor([one.logprob for one in sample(row, draws) if isinstance(one, Drawn)])
    expected = transform(row, [params], [output], [prompt])[0]
    torch.testing.assert_close(actual, expected.double().log_softmax(-1).float(), atol=2e-6, rtol=1e-6)


def test_repetition_penalty_agrees_with_transformers() -> None:
    logits, ids = logits_of(), torch.tensor([[*PROMPT, *OUTPUT]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    assert torch.equal(transform(logits, [SamplingParams(repetition_penalty=1.3)], [OUTPUT], [PROMPT]), expected)


def test_logit_bias_agrees_with_transformers() -> None:
    logits, bias = logits_of(), {5: 3.5, 9: -80.0}
    expected = SequenceBiasLogitsProcessor({(token,): number for token, number in bias.items()})(
        torch.tensor([PROMPT]), logits.clone()
    )
    assert torch.equal(transform(logits, [SamplingParams(logit_bias=bias)], [OUTPUT]), expected)


def test_allowed_ids_agree_with_transformers() -> None:
    logits, banned = logits_of(), list(range(20, SIZE))
    expected = SuppressTokensLogitsProcessor(banned)(torch.tensor([PROMPT]), logits.clone())
    assert torch.equal(transform(logits, [SamplingParams(allowed_token_ids=range(20))], [()]), expected)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_min_tokens_agrees_with_transformers(length: int) -> None:
    logits, ids = logits_of(), torch.tensor([[*PROMPT, *OUTPUT[:length]]])
    expected = MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [7, 8])(ids, logits.clone())
    params = SamplingParams(min_tokens=4, stop_token_ids=[8])
    assert torch.equal(transform(logits, [params], [OUTPUT[:length]], eos_token_ids=(7,)), expected)


@pytest.mark.parametrize("params", SETTINGS)
def test_a_result_has_the_same_bits_alone_and_in_company(params: SamplingParams) -> None:
    logits = logits_of(len(SETTINGS) + 1, seed=3)
    mine = draw(params, row=4)
    company = [draw(other, row=row) for row, other in enumerate(SETTINGS)]
    alone = sample(logits[4:5].clone(), [draw(params)])
    assert sample(logits, [*company[:3], mine, *company[3:]])[3] == alone[0]


def test_penalties_grow_with_the_output_and_do_not_count_a_token_twice() -> None:
    params, logits = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, temperature=0.0), torch.zeros(1, SIZE)
    tokens = [*PROMPT]
    history = TokenHistory(tokens, len(PROMPT))
    for position in range(2 * SIZE):  # every token once, then every token again: equal logits fall to the lowest id
        for _ in range(2):  # a step that failed asks again
            (one,) = sample(logits, [draw(params, position=position, history=history)])
        assert isinstance(one, Drawn)
        assert one.token_id == position % SIZE
        tokens.append(one.token_id)


def test_an_extreme_penalty_never_gives_what_is_not_a_number() -> None:
    logits = torch.full((1, SIZE), 1e38)
    logits[0, 5] = 3e38
    (one,) = sample(logits, [draw(SamplingParams(repetition_penalty=1e-3))])
    assert isinstance(one, Drawn)
    assert np.isfinite([one.logprob, one.raw_logprob]).all()


def test_raw_logprobs_and_logits_stay_as_they_are() -> None:
    logits = logits_of()
    before = logits.clone()
    for one in sample(logits, [draw(params) for params in SETTINGS]):
        assert isinstance(one, Drawn)
        assert one.raw_logprob == pytest.approx(float(before.log_softmax(-1)[0, one.token_id]), abs=2e-6)
    assert torch.equal(logits, before)


def test_by_default_no_row_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a row was edited")

    monkeypatch.setattr("aengine.sampling.sampler.edit_row", refuse)
    params = SamplingParams(temperature=0.5, top_p=0.9, logprobs=3)
    assert isinstance(sample(logits_of(), [draw(params)])[0], Drawn)


def test_nothing_left_names_the_parameter_that_did_it() -> None:
    params = SamplingParams(allowed_token_ids=[0], min_tokens=99)
    (error,) = sample(logits_of(), [draw(params)], eos_token_ids=(0,))
    assert isinstance(error, SamplingParamsError)
    assert "allowed_token_ids" in str(error)


class Broken:
    def __init__(self, result: Any) -> None:
        self._result = result

    def next_mask(self, output_ids: Any) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RuntimeError("oops"), "RuntimeError.*oops"),
        (np.zeros(SIZE, np.bool_), "allows none"),
        (np.zeros(SIZE + 1, np.bool_), r"bool \[131\]"),
        (np.zeros(SIZE), r"float64 \[130\]"),
        ([True] * SIZE, "list"),
    ],
)
def test_a_mask_that_fails_is_an_error_in_place_of_its_own_token_only(result: Any, message: str) -> None:
    params = SamplingParams()
    good, bad, other = sample(logits_of(), [draw(params), draw(params, mask=Broken(result)), draw(params)])
    assert good == other
    assert isinstance(bad, TokenMaskError)
    with pytest.raises(TokenMaskError, match=message):
        raise bad


def test_tokens_beyond_a_short_mask_are_not_allowed() -> None:
    logprobs = reported(logits_of(), SamplingParams(), mask=Broken(np.ones(100, np.bool_)))
    assert logprobs.isfinite().tolist() == [True] * 100 + [False] * (SIZE - 100)


def test_a_mask_of_none_allows_all() -> None:
    assert sample(logits_of(), [draw(SamplingParams(), mask=Broken(None))]) == sample(
        logits_of(), [draw(SamplingParams())]
    )


# ---- alternatives


@pytest.mark.parametrize("params", [SamplingParams(), *SETTINGS, SamplingParams(top_k=7), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("count", [0, 1, 5, SIZE])
def test_alternatives_are_the_likeliest_and_have_the_bits_of_a_score(params: SamplingParams, count: int) -> None:
    logits = logits_of(seed=8)
    params = attrs.evolve(params, logprobs=count)
    scores = reported(logits, params)
    (one,) = sample(logits, [draw(params)], eos_token_ids=(0,))
    assert isinstance(one, Drawn)
    assert one.top is not None
    assert all(logprob == float(scores[token]) for token, logprob in one.top)
    assert (one.token_id, one.logprob) in one.top
    order = sorted(range(SIZE), key=lambda token: (-float(scores[token]), token))
    likeliest = [token for token in order[:count] if scores[token].isfinite()]
    chosen = [] if one.token_id in likeliest else [one.token_id]
    assert [token for token, _ in one.top] == likeliest + chosen


def test_equal_alternatives_stand_in_order_of_their_ids() -> None:
    logits = torch.zeros(1, SIZE)
    logits[0, 77] = 1.0
    (one,) = sample(logits, [draw(SamplingParams(temperature=0.0, logprobs=4))])
    assert isinstance(one, Drawn)
    assert one.top is not None
    assert [token for token, _ in one.top] == [77, 0, 1, 2]


@pytest.mark.parametrize("params", [SamplingParams(), *SETTINGS, SamplingParams(top_k=7), SamplingParams(top_p=0.5)])
def test_the_support_is_what_has_a_probability(params: SamplingParams) -> None:
    logits = logits_of(seed=9)
    (one,) = sample(logits, [draw(params, with_support=True)], eos_token_ids=(0,))
    assert isinstance(one, Drawn)
    kept = torch.arange(SIZE)[reported(logits, params).isfinite()].tolist()
    assert (list(range(SIZE)) if one.support is None else one.support.tolist()) == kept
    assert (one.support is None) == (len(kept) == SIZE)
