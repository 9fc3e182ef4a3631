"""When a sample is finished."""

from __future__ import annotations

import pytest

from aengine.params import SamplingParams
from aengine.sampling.stop import Finish, StopRule, ending_token_ids

EOS = (2, 5)


def rule(max_tokens: int = 10, **fields: object) -> StopRule:
    return StopRule.of(SamplingParams(**fields), EOS, max_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("token_id", EOS)
def test_each_eos_ends_a_sample_and_is_named(token_id: int) -> None:
    assert rule().check(token_id, 1) == Finish("stop", token_id)


def test_other_tokens_go_on() -> None:
    assert rule().check(3, 1) is None


def test_stop_tokens_end_a_sample_beside_eos() -> None:
    assert rule(stop_token_ids=(7,)).check(7, 1) == Finish("stop", 7)
    assert rule(stop_token_ids=(7,)).check(2, 1) == Finish("stop", 2)


def test_ignored_eos_goes_on_unless_it_is_a_stop_token_too() -> None:
    assert rule(ignore_eos=True).check(2, 1) is None
    assert rule(ignore_eos=True, stop_token_ids=(2,)).check(2, 1) == Finish("stop", 2)


def test_one_new_token_ends_by_length_or_by_eos() -> None:
    assert rule(max_tokens=1).check(3, 1) == Finish("length")
    assert rule(max_tokens=1).check(2, 1) == Finish("stop", 2)


def test_the_smaller_of_the_two_limits_counts() -> None:
    assert StopRule.of(SamplingParams(max_tokens=3), EOS, 5).max_tokens == 3
    assert StopRule.of(SamplingParams(max_tokens=9), EOS, 5).max_tokens == 5
    assert StopRule.of(SamplingParams(), EOS, 5).max_tokens == 5


def test_an_ending_token_within_min_tokens_goes_on() -> None:
    limited = rule(min_tokens=2)
    assert [limited.check(2, count) for count in (1, 2)] == [None, None]
    assert limited.check(2, 3) == Finish("stop", 2)


def test_ending_tokens_are_stop_tokens_and_eos() -> None:
    assert ending_token_ids(SamplingParams(stop_token_ids=(9,)), EOS) == {2, 5, 9}
    assert ending_token_ids(SamplingParams(stop_token_ids=(9,), ignore_eos=True), EOS) == {9}
