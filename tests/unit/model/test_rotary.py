"""Rotary tables follow the formula, and the angles of transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from decoder_support import make_spec
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from aengine.model.rotary import build_rotary
from aengine.model.spec import ModelSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {"max_position_embeddings": 4096, "head_dim": 64}


def test_pair_i_turns_by_position_over_theta_to_the_power_of_its_share() -> None:
    rotary = build_rotary(make_spec(rope_theta=500.0, head_dim=8), 50)
    for position in (0, 1, 49):
        for pair in range(4):
            angle = position * 500.0 ** (-2 * pair / 8)
            assert rotary.cosines[position, pair] == pytest.approx(math.cos(angle), abs=1e-5)
            assert rotary.sines[position, pair] == pytest.approx(math.sin(angle), abs=1e-5)


@pytest.mark.parametrize(
    "config",
    [LONG, LONG | {"rope_theta": 1e6}, LONG | {"rope_scaling": LLAMA3}],
    ids=["plain", "large theta", "llama3"],
)
def test_tables_are_those_of_transformers_at_all_positions(config: dict[str, object]) -> None:
    spec: ModelSpec = make_spec(**config)
    hf = spec.to_config()
    module = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=spec.num_heads * spec.head_dim,
            num_attention_heads=spec.num_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=4096,
            rope_parameters=hf["rope_parameters"],
        )
    )
    frequencies = module.inv_freq.numpy()
    rotary = build_rotary(spec, 4096)
    angles = np.outer(np.arange(4096, dtype=np.float32), frequencies).astype(np.float64)
    np.testing.assert_allclose(rotary.cosines, np.cos(angles), atol=5e-4)
    same = (rotary.sines == np.sin(angles).astype(np.float32)).all(0)
    assert same.mean() > 0.9
    assert rotary.cosines.dtype == np.float32
    assert torch.from_numpy(rotary.sines).is_contiguous()
