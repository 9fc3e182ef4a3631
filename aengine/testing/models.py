"""Tiny models that load in no time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aengine.model.checkpoint import Checkpoint
from aengine.model.spec import ModelSpec

__all__ = ["TINY", "random_tensors", "tiny_checkpoint"]

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""A Hugging Face config of a model with 2 layers and 64 tokens."""


def random_tensors(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Weights drawn from `seed` alone, spread enough that different seeds give plainly different distributions."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise
    return tensors


def tiny_checkpoint(seed: int = 0, *, eos_token_ids: tuple[int, ...] = (), **config: Any) -> Checkpoint:
    """A random model without a tokenizer; `config` overrides fields of `TINY`."""
    spec = ModelSpec.from_config(TINY | config)
    return Checkpoint(
        spec=spec,
        tensors=random_tensors(spec, seed),
        tokenizer=None,
        eos_token_ids=eos_token_ids,
        name=f"tiny-{seed}",
    )
