"""Sampling parameters: what is refused, and how what is given is kept."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from aengine.errors import SamplingParamsError
from aengine.params import SamplingParams

BAD: dict[str, list[Any]] = {
    "presence_penalty": [-2.1, 2.1, float("nan"), "much", None, True],
    "frequency_penalty": [-2.1, 2.1, float("inf"), None],
    "repetition_penalty": [0, -1, 101, float("nan"), None],
    "logit_bias": [
        {-1: 1.0},
        {"a": 1.0},
        {1: 100.5},
        {1: float("nan")},
        {1: None},
        {1.5: 1},
        5,
        "ab",
        [(1, 2, 3)],
        [1],
    ],
    "allowed_token_ids": [[], [-1], ["a"], [1.5], [True]],
    "stop": ["", ["a", ""], [1], [None], b"a", 5],
    "logprobs": [-1, 1.5, True, "all"],
    "prompt_logprobs": [-1, 1.5, True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_and_the_field_named(name: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=rf"SamplingParams\.{name} = ") as refused:
        SamplingParams(**{name: value})
    assert refused.value.field == name


def test_a_token_is_biased_once() -> None:
    with pytest.raises(SamplingParamsError, match="twice"):
        SamplingParams(logit_bias=[(1, 2.0), (1, 3.0)])


def test_what_is_given_is_frozen_and_can_be_a_key() -> None:
    params = SamplingParams(stop="END", allowed_token_ids=range(3), logit_bias={7: -1, 2: 0.5}, stop_token_ids=[4])
    assert (params.stop, params.allowed_token_ids, params.stop_token_ids) == (("END",), (0, 1, 2), (4,))
    assert params.logit_bias == ((2, 0.5), (7, -1))
    assert {params: 1}[
        SamplingParams(
            **{f: getattr(params, f) for f in ("stop", "allowed_token_ids", "logit_bias")}, stop_token_ids=(4,)
        )
    ] == 1


def test_numbers_of_numpy_are_taken() -> None:
    params = SamplingParams(
        logit_bias={np.int64(3): np.float32(1.5)}, allowed_token_ids=np.arange(2), logprobs=np.int32(2)
    )
    assert params.logit_bias == ((3, 1.5),)
    assert params.allowed_token_ids == (0, 1)


def test_parameters_survive_a_record() -> None:
    params = SamplingParams(
        stop=["a", "b"], logit_bias={1: 2.5}, allowed_token_ids=[1, 2], logprobs=3, presence_penalty=1
    )
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [10]}, "stop_token_ids.*0 to 9, not 10"),
        ({"logit_bias": {3: 1.0, 12: 1.0}}, "logit_bias.*not 12"),
        ({"allowed_token_ids": [9, 10]}, "allowed_token_ids.*not 10"),
        ({"logprobs": 11}, "logprobs.*10 tokens"),
        ({"prompt_logprobs": 11}, "prompt_logprobs.*10 tokens"),
    ],
)
def test_what_is_beyond_the_vocabulary_is_refused_where_that_is_known(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**fields).check_vocabulary(10)


def test_what_fits_the_vocabulary_passes() -> None:
    SamplingParams(stop_token_ids=[9], logit_bias={0: 1}, allowed_token_ids=[9], logprobs=10).check_vocabulary(10)
