"""The weights of a decoder as it computes with them: fused, packed, and always a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from attrs import Factory, evolve, frozen
from torch import Tensor

from aengine.kernels.invariance import LinearShape, Numerics
from aengine.kernels.linear import Linear
from aengine.model.spec import ModelSpec

__all__ = ["DecoderWeights", "LayerWeights", "Product", "build_weights", "linear_shapes", "repack_weights"]

Product = Callable[[Tensor], Tensor]
"""Rows [R, in] to rows [R, out]."""


@frozen(eq=False)
class LayerWeights:
    input_norm: Tensor  # [hidden]
    qkv: Product  # to (heads + 2 * kv heads) * head_dim: query, key and value heads
    query_norm: Tensor | None  # [head_dim], with qk_norm
    key_norm: Tensor | None
    output: Product  # from heads * head_dim to hidden
    post_attention_norm: Tensor  # [hidden]
    gate_up: Product  # to 2 * intermediate: gate, then up
    down: Product  # from intermediate to hidden


@frozen(eq=False)
class DecoderWeights:
    """All of one type, whatever the checkpoint had. Products and norms read the very memory of `tensors`, but for
    packed forms, which are made from it."""

    spec: ModelSpec
    strategy: Numerics
    tensors: Mapping[str, Tensor]
    """By Hugging Face name, as `ModelSpec.tensor_shapes` lists them."""
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Product  # to the vocabulary; of the embedding where the two are tied

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.dtype

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """For the digest."""
        yield from self.tensors.items()

    def write_count(self) -> int:
        """Sum of torch's version counters: a hint at writes to the tensors. `.data` writes and fused optimizers do
        not count."""
        return sum(tensor._version for tensor in self.tensors.values())  # noqa: SLF001


def linear_shapes(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> tuple[LinearShape, ...]:
    """The products the decoder needs, for `probe`."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return (
        LinearShape(q_size + 2 * kv_size, spec.hidden_size, spec.attention_bias, dtype),
        LinearShape(spec.hidden_size, q_size, spec.output_bias, dtype),
        LinearShape(2 * spec.intermediate_size, spec.hidden_size, spec.mlp_bias, dtype),
        LinearShape(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, dtype),
        LinearShape(spec.vocab_size, spec.hidden_size, False, dtype),
    )


def build_weights(
    spec: ModelSpec, tensors: Mapping[str, Tensor], strategy: Numerics, dtype: torch.dtype = torch.float32
) -> DecoderWeights:
    """Cast, fuse and pack copies of tensors under their Hugging Face names (see `match_tensors`).

    The input is not kept. Takes about 0.2 s for 135 M parameters, and needs twice their memory for as long as the
    result lives, since the packed forms cannot be read back; three times where a 16-bit type has to be widened, which
    is 0.75 of what float32 takes. `strategy` must have been probed for `linear_shapes(spec, dtype)`.
    """
    with torch.no_grad():
        copier = _Copier(spec, tensors, strategy, dtype)
        embedding = copier.copy("model.embed_tokens.weight")
        layers = tuple(_build_layer(spec, copier, f"model.layers.{index}.") for index in range(spec.num_layers))
        final_norm = copier.copy("model.norm.weight")
        head = embedding if spec.tie_word_embeddings else copier.copy("lm_head.weight")
        return DecoderWeights(
            spec=spec,
            strategy=strategy,
            tensors={name: copier.copies[name] for name in spec.tensor_shapes()},
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=strategy.linear(head),
        )


def repack_weights(weights: DecoderWeights) -> DecoderWeights:
    """The same tensors, packed again after they were written over."""

    def repack(product: Product) -> Linear:
        assert isinstance(product, Linear), "only copied weights are packed"
        return weights.strategy.linear(product.weight, product.bias)

    layers = tuple(
        evolve(
            layer,
            qkv=repack(layer.qkv),
            output=repack(layer.output),
            gate_up=repack(layer.gate_up),
            down=repack(layer.down),
        )
        for layer in weights.layers
    )
    return evolve(weights, layers=layers, head=repack(weights.head))


@frozen(eq=False)
class _Copier:
    """Copies tensors out of `tensors`, and keeps a view of each copy under its name."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    strategy: Numerics
    dtype: torch.dtype
    copies: dict[str, Tensor] = Factory(dict)

    def copy(self, name: str) -> Tensor:
        self.copies[name] = self.tensors[name].detach().to(device="cpu", dtype=self.dtype, copy=True).contiguous()
        return self.copies[name]

    def linear(self, names: Sequence[str], has_bias: bool) -> Linear:
        """One product of several, side by side."""
        weight = self._fuse([f"{name}.weight" for name in names])
        return self.strategy.linear(weight, self._fuse([f"{name}.bias" for name in names]) if has_bias else None)

    def _fuse(self, names: Sequence[str]) -> Tensor:
        if len(names) == 1:
            return self.copy(names[0])
        parts = [self.tensors[name].detach().to(device="cpu", dtype=self.dtype) for name in names]
        fused = torch.cat(parts)
        self.copies.update(zip(names, torch.split(fused, [len(part) for part in parts]), strict=True))
        return fused


def _build_layer(spec: ModelSpec, copier: _Copier, prefix: str) -> LayerWeights:
    def linear(block: str, parts: Sequence[str], has_bias: bool) -> Linear:
        return copier.linear([f"{prefix}{block}.{part}_proj" for part in parts], has_bias)

    def norm(name: str) -> Tensor:
        return copier.copy(f"{prefix}{name}.weight")

    return LayerWeights(
        input_norm=norm("input_layernorm"),
        qkv=linear("self_attn", ("q", "k", "v"), spec.attention_bias),
        query_norm=norm("self_attn.q_norm") if spec.qk_norm else None,
        key_norm=norm("self_attn.k_norm") if spec.qk_norm else None,
        output=linear("self_attn", ("o",), spec.output_bias),
        post_attention_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp", ("gate", "up"), spec.mlp_bias),
        down=linear("mlp", ("down",), spec.mlp_bias),
    )
