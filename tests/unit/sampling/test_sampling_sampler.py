"""The fused sampler against the torch definition, and what its results may not depend on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aengine.errors import EngineError, NonFiniteLogitsError, SamplingParamsError
from aengine.kernels import sample as kernel
from aengine.kernels.weights import ALL, num_blocks, sum_weights
from aengine.params import SamplingParams
from aengine.sampling.sampler import Draw, Drawn, sample, score
from aengine.sampling.transforms import transform

LARGEST_SEED = 2**64 - 1
SIZES = [1, 2, 15, 16, 17, 511, 512, 513, 1030]
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(top_p=0.9137),
    SamplingParams(min_p=0.0321),
    SamplingParams(temperature=0.0, top_p=0.6543),
    SamplingParams(temperature=1.3, min_p=0.0123, top_k=60, top_p=0.8765),
]


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_logits(rows: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(results: Sequence[Drawn | EngineError]) -> list[Drawn]:
    tokens = [result for result in results if isinstance(result, Drawn)]
    assert len(tokens) == len(results)
    return tokens


def reported(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Both distributions of a row [1, V], as `score` reports them token by token; token 0 is the EOS."""
    size = logits.numel()
    tokens = drawn(score(logits.expand(size, size), range(size), params, eos_token_ids=(0,)))
    return torch.tensor([one.logprob for one in tokens]), torch.tensor([one.raw_logprob for one in tokens])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.float(), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("size", [1, 17, 130, 3001])
def test_both_distributions_are_those_of_the_definition(size: int, params: SamplingParams) -> None:
    logits = random_logits(1, size, seed=size)
    logprobs, raw_logprobs = reported(logits, params)
    close(logprobs, transform(logits, [params], [()]).double().log_softmax(-1)[0])
    close(raw_logprobs, logits.double().log_softmax(-1)[0])


@given(
    logits=st.lists(st.integers(-6, 6).map(float) | st.floats(-6, 6, width=32), min_size=1, max_size=40),
    top_k=st.integers(-1, 45),
    top_p=st.sampled_from([1.0, 0.1234, 0.5678, 0.9137]),
    min_p=st.sampled_from([0.0, 0.0123, 0.3456]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    min_tokens=st.sampled_from([0, 1000]),
)
def test_the_same_tokens_are_kept_as_by_the_definition_ties_included(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float, min_tokens: int
) -> None:
    if len(logits) == 1:
        min_tokens = 0  # a ban on the only token has its own test
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, min_tokens=min_tokens)
    row = torch.tensor([logits])
    expected = transform(row, [params], [()], eos_token_ids=(0,)).double().log_softmax(-1)[0]
    logprobs, _ = reported(row, params)
    assert torch.equal(logprobs.isinf(), expected.isinf())
    close(logprobs, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("params", SETTINGS)
def test_a_result_has_the_same_bits_alone_and_in_company(size: int, params: SamplingParams) -> None:
    logits = random_logits(len(SETTINGS) * 2, size, seed=1)
    others = [Draw(row, SETTINGS[row // 2], seed=row, index=0, position=row) for row in range(len(logits))]
    mine = Draw(3, params, seed=11, index=2, position=5)
    alone = sample(logits[3:4].clone(), [Draw(0, params, seed=11, index=2, position=5)])
    assert sample(logits, [*others[:7], mine, *others[7:]])[7] == alone[0]


@pytest.mark.usefixtures("restored_threads")
def test_a_result_has_the_same_bits_on_one_thread_and_on_two() -> None:
    logits = random_logits(32, 2050)  # enough for a parallel launch
    draws = [Draw(row, SETTINGS[row % len(SETTINGS)], seed=row, index=0, position=0) for row in range(32)]
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(sample(logits, draws))
    assert results[0] == results[1]


@pytest.mark.parametrize("params", SETTINGS)
def test_scoring_gives_the_bits_that_sampling_recorded(params: SamplingParams) -> None:
    logits = random_logits(24, 777)
    tokens = drawn(sample(logits, [Draw(row, params, seed=9, index=1, position=row) for row in range(24)]))
    assert score(logits, [one.token_id for one in tokens], params) == tokens


def test_samples_of_one_row_differ_by_index_and_repeat() -> None:
    logits = random_logits(1, 500)
    draws = [Draw(0, SamplingParams(), seed=7, index=index, position=0) for index in range(8)]
    tokens = [one.token_id for one in drawn(sample(logits, draws))]
    assert len(set(tokens)) > 1
    assert [one.token_id for one in drawn(sample(logits, draws[:4]))] == tokens[:4]


@pytest.mark.parametrize("seed", [0, LARGEST_SEED])
def test_seeds_at_the_edges_work_and_differ_from_their_neighbours(seed: int) -> None:
    logits = torch.zeros(1, 4096)
    near = 1 if seed == 0 else seed - 1
    first, second = sample(logits, [Draw(0, SamplingParams(), one, 0, 0) for one in (seed, near)])
    assert isinstance(first, Drawn)
    assert first != second


def test_greedy_takes_the_lowest_id_of_equal_logits_and_reports_temperature_one() -> None:
    logits = torch.zeros(1, 600)
    logits[0, [300, 17, 599]] = 4.0
    (token,) = drawn(sample(logits, [Draw(0, SamplingParams(temperature=0.0), 0, 0, 0)]))
    assert token.token_id == 17
    assert token.logprob == token.raw_logprob
    assert token.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 17]), abs=1e-6)


def test_plus_and_minus_zero_are_a_tie() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0]])
    assert drawn(sample(logits, [Draw(0, SamplingParams(temperature=0.0), 0, 0, 0)]))[0].token_id == 0
    logprobs, _ = reported(logits, SamplingParams(top_k=2))
    assert logprobs.isfinite().tolist() == [True, True, False]


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1.0, 1e4])
def test_one_dominant_logit_is_certain_and_its_logprob_finite(temperature: float) -> None:
    logits = torch.full((1, 100), -1e30)
    logits[0, 42] = 1e30
    tokens = drawn(sample(logits, [Draw(0, SamplingParams(temperature=temperature), 0, 0, i) for i in range(50)]))
    assert set(tokens) == {Drawn(42, 0.0, 0.0)}


def test_a_huge_spread_gives_finite_logprobs_for_what_is_drawn() -> None:
    logits = torch.linspace(-1e5, 1e5, 1000).view(1, -1)
    for one in drawn(sample(logits, [Draw(0, SamplingParams(temperature=1e4), 3, 0, i) for i in range(300)])):
        assert np.isfinite([one.logprob, one.raw_logprob]).all()


def test_a_token_outside_what_is_kept_scores_minus_infinity_and_keeps_its_raw_logprob() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    (one,) = drawn(score(logits, [2], SamplingParams(top_k=2)))
    assert one.logprob == -np.inf
    assert one.raw_logprob == pytest.approx(float(logits.log_softmax(-1)[0, 2]), abs=1e-6)


def test_ending_tokens_are_not_drawn_before_min_tokens() -> None:
    logits = torch.tensor([[9.0, 0.0, 9.0, 0.0]])
    params = SamplingParams(min_tokens=40, stop_token_ids=(2, 1000))
    draws = [Draw(0, params, 5, 0, position) for position in range(80)]
    tokens = [one.token_id for one in drawn(sample(logits, draws, eos_token_ids=(0,)))]
    assert set(tokens[:40]) == {1, 3}
    assert {0, 2} <= set(tokens[40:])


def test_banned_tokens_leave_raw_logprobs_alone() -> None:
    logits = random_logits(1, 50)
    (one,) = drawn(sample(logits, [Draw(0, SamplingParams(min_tokens=1), 5, 0, 0)], eos_token_ids=(1, 2)))
    assert one.raw_logprob == pytest.approx(float(logits.log_softmax(-1)[0, one.token_id]), abs=1e-6)
    assert one.logprob > one.raw_logprob


def test_a_ban_on_every_token_is_an_error_in_place_of_a_token() -> None:
    params = SamplingParams(min_tokens=1)
    results = sample(torch.zeros(1, 1), [Draw(0, params, 0, 0, 0), Draw(0, params, 0, 0, 1)], eos_token_ids=(0,))
    assert isinstance(results[0], SamplingParamsError)
    assert results[1] == Drawn(0, 0.0, 0.0)


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 600, 1029])
def test_a_row_that_is_not_finite_fails_alone(at: int, bad: float, params: SamplingParams) -> None:
    logits = random_logits(3, 1030)
    draws = [Draw(row, params, 7, 0, 0) for row in range(3)]
    whole = sample(logits, draws)
    logits[1, at] = bad
    results = sample(logits, draws)
    assert isinstance(results[1], NonFiniteLogitsError)
    assert "non-finite" in str(results[1])
    assert [results[0], results[2]] == [whole[0], whole[2]]


@pytest.mark.parametrize("u", [0.0, 0.25, 1.0 - 2.0**-53, 1.0])
def test_no_draw_gives_a_token_of_zero_probability(u: float) -> None:
    logits = np.full(1100, -200.0, np.float32)
    logits[[3, 700, 701]] = [0.0, -20.0, 0.0]  # the last tokens have no probability
    sums = np.empty(num_blocks(1100))
    shape = (np.float32(0), np.float32(1), ALL, -1)
    sum_weights(logits, 0, 1100, *shape, sums)
    token = kernel._draw(logits, 0, 1100, *shape, sums, u)
    assert token == (3 if u < 0.5 else 701)


def test_global_random_states_are_untouched() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    sample(random_logits(4, 100), [Draw(row, SETTINGS[row], 1, 0, 0) for row in range(4)])
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_the_logits_are_not_changed() -> None:
    logits = random_logits(2, 100)
    before = logits.clone()
    params = SamplingParams(min_tokens=3, top_k=5, top_p=0.5)
    sample(logits, [Draw(0, params, 1, 0, 0), Draw(1, params, 1, 0, 0)], eos_token_ids=(1,))
    assert torch.equal(logits, before)


def test_no_draws_give_no_tokens() -> None:
    assert sample(random_logits(1, 8), []) == []


def test_rows_and_tokens_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match="row 2 of 2"):
        sample(torch.zeros(2, 8), [Draw(2, SamplingParams(), 0, 0, 0)])
    with pytest.raises(ValueError, match="token id 8 is outside the vocabulary of 8"):
        score(torch.zeros(1, 8), [8], SamplingParams())
    with pytest.raises(ValueError, match="token id -1 is outside"):
        score(torch.zeros(1, 8), [-1], SamplingParams())
