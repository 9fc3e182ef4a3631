"""A state dict is checked whole before any of it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loading_support import tiny_config
from torch import Tensor

from aengine.errors import WeightsMismatchError
from aengine.model.checkpoint import match_tensors
from aengine.model.spec import ModelSpec

SPEC = ModelSpec.from_config(tiny_config())
TIED = ModelSpec.from_config(tiny_config(tie_word_embeddings=True))
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def random_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in spec.tensor_shapes().items()}


def test_matching_tensors_come_back_in_the_specs_order_without_a_copy() -> None:
    tensors = random_tensors(SPEC)
    matched = match_tensors(SPEC, dict(reversed(tensors.items())))
    assert list(matched) == list(SPEC.tensor_shapes())
    assert all(matched[name].data_ptr() == tensors[name].data_ptr() for name in tensors)


def test_parameters_come_back_without_their_gradients() -> None:
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in random_tensors(SPEC).items()}
    assert not any(tensor.requires_grad for tensor in match_tensors(SPEC, parameters).values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_float_dtypes_are_kept(dtype: torch.dtype) -> None:
    matched = match_tensors(SPEC, {name: tensor.to(dtype) for name, tensor in random_tensors(SPEC).items()})
    assert {tensor.dtype for tensor in matched.values()} == {dtype}


def test_rotary_buffers_are_left_out() -> None:
    buffers = {
        "model.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    assert match_tensors(SPEC, random_tensors(SPEC) | buffers).keys() == SPEC.tensor_shapes().keys()


def test_missing_unexpected_and_wrong_tensors_are_all_named_at_once() -> None:
    tensors = random_tensors(SPEC)
    del tensors[NORM]
    tensors["module.extra"] = torch.ones(1)
    tensors[EMBEDDING] = torch.ones(320, 33)
    tensors[HEAD] = torch.ones(320, 32, dtype=torch.int8)
    with pytest.raises(WeightsMismatchError) as caught:
        match_tensors(SPEC, tensors)
    assert caught.value.missing == (NORM,)
    assert caught.value.unexpected == ("module.extra",)
    assert caught.value.wrong == (
        f"{EMBEDDING}: expected [320, 32], got [320, 33]",
        f"{HEAD}: expected a float tensor, got torch.int8",
    )


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([1.0] * 32, "expected a tensor, got list"),
        (torch.ones(32, device="meta"), "has no data"),
        (torch.ones(32, dtype=torch.float8_e4m3fn), "expected a float tensor, got torch.float8_e4m3fn"),
    ],
)
def test_a_value_without_usable_numbers_is_refused(value: Any, complaint: str) -> None:
    with pytest.raises(WeightsMismatchError, match=complaint):
        match_tensors(SPEC, {**random_tensors(SPEC), NORM: value})


def test_a_prefix_is_not_stripped() -> None:
    with pytest.raises(WeightsMismatchError) as caught:
        match_tensors(SPEC, {f"module.{name}": tensor for name, tensor in random_tensors(SPEC).items()})
    assert len(caught.value.missing) == len(caught.value.unexpected) == len(SPEC.tensor_shapes())


def test_a_tied_head_may_be_absent_or_repeat_the_embedding() -> None:
    tensors = random_tensors(TIED)
    tensors[EMBEDDING][0, 0] = float("nan")
    assert HEAD not in match_tensors(TIED, tensors)
    assert HEAD not in match_tensors(TIED, {**tensors, HEAD: tensors[EMBEDDING]})
    tensors[EMBEDDING][0, 0] = 0.0
    assert HEAD not in match_tensors(TIED, {**tensors, HEAD: tensors[EMBEDDING].clone()})


@pytest.mark.parametrize("head", [torch.ones(320, 32), torch.ones(2, 2), "nothing"])
def test_a_tied_head_that_differs_from_the_embedding_is_refused(head: Any) -> None:
    with pytest.raises(WeightsMismatchError, match=f"{HEAD}: expected a repetition of {EMBEDDING}"):
        match_tensors(TIED, {**random_tensors(TIED), HEAD: head})


def test_an_untied_head_must_be_there() -> None:
    with pytest.raises(WeightsMismatchError) as caught:
        match_tensors(SPEC, random_tensors(TIED))
    assert caught.value.missing == (HEAD,)
