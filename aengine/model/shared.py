"""Weights that stay where a trainer's module has them: no copy, no fusion, no packing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.invariance import LinearShape, Numerics
from aengine.kernels.linear import Linear
from aengine.model.spec import ModelSpec
from aengine.model.weights import DecoderWeights, LayerWeights

__all__ = ["share_weights", "shared_linear_shapes"]


@frozen(eq=False)
class JoinedLinear:
    """Several products of the same rows, side by side: what a fused weight would give."""

    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def shared_linear_shapes(spec: ModelSpec) -> set[LinearShape]:
    """The products of unfused weights, for `probe`."""
    shapes = spec.tensor_shapes()
    linears = [name for name, shape in shapes.items() if len(shape) == 2]
    return {
        LinearShape(shapes[name][0], shapes[name][1], name.replace(".weight", ".bias") in shapes) for name in linears
    }


def share_weights(spec: ModelSpec, tensors: Mapping[str, Tensor], strategy: Numerics) -> DecoderWeights:
    """Weights over `tensors` (see `match_tensors`) as they lie. `strategy` must not pack.

    Raises `UnsupportedModelError` for tensors that are not contiguous float32 on the CPU, which is what kernels read.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise UnsupportedModelError(
                f"{name} cannot be shared: it is {tensor.dtype} on {tensor.device}, and must be contiguous float32 on "
                "the CPU; make an engine that copies instead"
            )

    def linear(name: str) -> Linear:
        return strategy.linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def layer(prefix: str) -> LayerWeights:
        return LayerWeights(
            input_norm=tensors[f"{prefix}.input_layernorm.weight"],
            qkv=JoinedLinear(tuple(linear(f"{prefix}.self_attn.{part}_proj") for part in "qkv")),
            query_norm=tensors.get(f"{prefix}.self_attn.q_norm.weight"),
            key_norm=tensors.get(f"{prefix}.self_attn.k_norm.weight"),
            output=linear(f"{prefix}.self_attn.o_proj"),
            post_attention_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
            gate_up=JoinedLinear(tuple(linear(f"{prefix}.mlp.{part}_proj") for part in ("gate", "up"))),
            down=linear(f"{prefix}.mlp.down_proj"),
        )

    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if spec.tie_word_embeddings else tensors["lm_head.weight"]
    return DecoderWeights(
        spec=spec,
        strategy=strategy,
        tensors=tensors,
        embedding=embedding,
        layers=tuple(layer(f"model.layers.{index}") for index in range(spec.num_layers)),
        final_norm=tensors["model.norm.weight"],
        head=strategy.linear(head),
    )
