"""A decoder-only transformer of the Llama family, over a paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels import cpu
from aengine.kernels.interface import HeadShape, Kernels
from aengine.model.inputs import ForwardInputs
from aengine.model.rotary import build_rotary
from aengine.model.spec import ModelSpec
from aengine.model.weights import DecoderWeights, LayerWeights

if TYPE_CHECKING:
    from aengine.cache.storage import KVStorage

__all__ = ["Decoder"]


class Decoder:
    """Computes rows of tokens; every row's numbers depend on its own sequence alone.

    Activations are of the weights' type, which the pages should have too; every operator computes in float32 and rounds
    once, as `Kernels` says and as vLLM does.

    `weights` may be replaced, in one assignment, between two calls; a call uses what it found at its start. Results
    are new tensors; nothing is kept between calls, so several threads may call at once with different storage.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, max_model_len: int, *, kernels: Kernels = cpu) -> None:
        self.spec = spec
        self.weights = weights
        self.max_model_len = max_model_len
        self._kernels = kernels
        self._rotary = build_rotary(spec, max_model_len)

    @torch.no_grad()
    def forward(self, inputs: ForwardInputs, storage: KVStorage) -> Tensor:
        """Hidden states [R, hidden] after the final norm; keys and values of all rows are in `storage` afterwards.

        Raises `ValueError` for positions, sequences or pages out of bounds, before anything is written.
        """
        num_pages, _, page_numbers = storage.layers[0].shape
        shape = self._head_shape(page_numbers // (2 * self.spec.head_dim))
        inputs.check_bounds(max_model_len=self.max_model_len, num_pages=num_pages, page_size=shape.page_size)
        weights, norm = self.weights, self._kernels.add_rms_norm
        residual = F.embedding(torch.from_numpy(inputs.token_ids), weights.embedding)  # [R, hidden]
        eps = self.spec.rms_norm_eps
        x = self._kernels.rms_norm(residual, weights.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for layer, kv, next_norm in zip(weights.layers, storage.layers, next_norms, strict=True):
            x = norm(residual, self._attention(layer, x, inputs, kv, shape), layer.post_attention_norm, eps)
            x = norm(residual, self._mlp(layer, x), next_norm, eps)
        return x

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to float32 [n, vocab]; with 16-bit weights, the head's product rounded to their type."""
        return self.weights.head(hidden).float()

    def _attention(self, layer: LayerWeights, x: Tensor, inputs: ForwardInputs, kv: Tensor, shape: HeadShape) -> Tensor:
        qkv = layer.qkv(x)  # [R, (heads + 2 * kv heads) * head_dim]
        if layer.query_norm is not None and layer.key_norm is not None:
            self._kernels.norm_heads(qkv, layer.query_norm, layer.key_norm, self.spec.rms_norm_eps, shape)
        self._kernels.rotate_and_write(qkv, self._rotary, inputs, kv, shape)
        mixed = self._kernels.paged_attention(qkv, inputs, kv, shape)  # [R, heads * head_dim]
        return layer.output(mixed)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return layer.down(self._kernels.silu_mul(layer.gate_up(x)))

    def _head_shape(self, page_size: int) -> HeadShape:
        return HeadShape(self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim, page_size)
