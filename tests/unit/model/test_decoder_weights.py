"""Fused, packed weights are a copy, and can be read back under their own names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder_support import Session, make_decoder, make_spec, random_ids

from aengine.kernels.invariance import FAST, probe
from aengine.model.weights import build_weights, linear_shapes, repack_weights
from aengine.testing import random_tensors

CONFIGS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    {"architectures": ["Qwen2ForCausalLM"], "head_dim": 8},
    {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_named_tensors_are_those_of_the_spec_with_the_values_given(config: dict[str, Any]) -> None:
    spec = make_spec(**config)
    tensors = random_tensors(spec, 0)
    named = list(build_weights(spec, tensors, FAST).named_tensors())
    assert {name: tuple(tensor.shape) for name, tensor in named} == spec.tensor_shapes()
    assert len(named) == len(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in named)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nothing_of_the_input_is_kept(config: dict[str, Any]) -> None:
    spec = make_spec(**config)
    tensors = random_tensors(spec, 0)
    decoder = make_decoder(spec)
    decoder.weights = build_weights(spec, tensors, decoder.weights.strategy)
    expected = Session(decoder).feed((0, random_ids(9)))
    for tensor in tensors.values():
        tensor.fill_(torch.nan)
    assert torch.equal(Session(decoder).feed((0, random_ids(9))), expected)
    assert not any(tensor.isnan().any() for _, tensor in decoder.weights.named_tensors())


def test_parameters_and_other_types_are_copied_to_plain_float32() -> None:
    spec = make_spec()
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(spec, 0).items()}
    parameters = {name: torch.nn.Parameter(tensor.t().contiguous().t()) for name, tensor in tensors.items()}
    for name, tensor in build_weights(spec, parameters, FAST).named_tensors():
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad
        assert tensor.is_contiguous()
        assert torch.equal(tensor, tensors[name].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tensors_are_held_in_the_type_asked_for(config: dict[str, Any], dtype: torch.dtype) -> None:
    spec = make_spec(**config)
    tensors = random_tensors(spec, 0)
    weights = build_weights(spec, tensors, probe(linear_shapes(spec, dtype)), dtype)
    assert weights.dtype == dtype
    for name, tensor in weights.named_tensors():
        assert torch.equal(tensor, tensors[name].to(dtype))
        assert tensor.dtype == dtype


def test_weights_written_over_are_packed_again_in_their_type() -> None:
    spec = make_spec()
    decoder, other = (make_decoder(spec, seed, torch.bfloat16) for seed in (1, 2))
    with torch.no_grad():
        for name, tensor in decoder.weights.named_tensors():
            tensor.copy_(random_tensors(spec, 2)[name])
    decoder.weights = repack_weights(decoder.weights)
    ids = random_ids(9)
    assert torch.equal(Session(decoder).feed((0, ids)), Session(other).feed((0, ids)))


def test_a_tied_head_is_the_embedding_and_listed_once() -> None:
    spec = make_spec()
    weights = build_weights(spec, random_tensors(spec, 0), FAST)
    assert weights.head.weight is weights.embedding
    assert "lm_head.weight" not in dict(weights.named_tensors())


def test_every_product_of_the_decoder_is_among_the_probed_shapes() -> None:
    for config in CONFIGS:
        spec = make_spec(**config)
        numerics = probe(linear_shapes(spec))
        assert build_weights(spec, random_tensors(spec, 0), numerics).strategy is numerics
