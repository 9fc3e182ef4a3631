"""Logits of the decoder and of transformers on the same weights, for each family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from parity_support import decoder_logits, make_decoder
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from aengine.model.checkpoint import checkpoint_from_module

LENGTH = 70
SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "sliding_window": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HEADS = [(6, 6, 8), (6, 2, 8), (4, 1, 16)]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def make_module(model_type: str, **config: Any) -> PreTrainedModel:
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | config))).eval()
    for parameter in module.parameters():
        if parameter.ndim == 1:  # biases start at zero and norms at one, which would hide a mistake
            torch.nn.init.normal_(parameter.data, mean=parameter.mean().item(), std=0.2)
    return module


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("model_type", "config"), VARIANTS, ids=str)
def test_logits_agree_with_transformers(
    model_type: str, config: dict[str, Any], heads: tuple[int, int, int], tied: bool
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    module = make_module(
        model_type,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        **config,
    )
    ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], LENGTH)
    with torch.no_grad():
        expected = module(torch.from_numpy(ids)[None]).logits[0]
    logits = decoder_logits(make_decoder(checkpoint_from_module(module), LENGTH), ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
