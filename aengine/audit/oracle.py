"""The oracle: a plain full forward pass, without cache, batch, fusion or any kernel of the engine.

Slow and simple on purpose. It shares the checkpoint's tensor names with the engine and nothing else, so that agreement
means something.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.model.spec import ModelSpec, RopeScaling

__all__ = ["oracle_logits", "oracle_logprobs"]


def oracle_logprobs(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Log-probability of each of `token_ids` after the prompt and those before it: [len(token_ids)], in `dtype`.

    At temperature 1 these are a sample's `raw_logprobs`; without truncation those at its temperature are `logprobs`.
    """
    ids = [*prompt_token_ids, *token_ids]
    logits = oracle_logits(spec, tensors, ids[:-1], dtype=dtype)[len(prompt_token_ids) - 1 :]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]


@torch.no_grad()
def oracle_logits(
    spec: ModelSpec, tensors: Mapping[str, Tensor], token_ids: Sequence[int], *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits after each position of one sequence: [len(token_ids), vocab], in `dtype`."""
    weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    embedding = weights["model.embed_tokens.weight"]
    cos, sin = _rotation(spec, len(token_ids), dtype)
    x = embedding[torch.tensor(token_ids)]  # [T, H]
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        w = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        x = x + _attention(spec, w, _norm(x, w["input_layernorm.weight"], spec.rms_norm_eps), cos, sin)
        x = x + _mlp(w, _norm(x, w["post_attention_layernorm.weight"], spec.rms_norm_eps))
    head = embedding if spec.tie_word_embeddings else weights["lm_head.weight"]
    return _norm(x, weights["model.norm.weight"], spec.rms_norm_eps) @ head.T


def _linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _mlp(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return _linear(w, "mlp.down_proj", F.silu(_linear(w, "mlp.gate_proj", x)) * _linear(w, "mlp.up_proj", x))


def _attention(spec: ModelSpec, w: Mapping[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    length = len(x)
    q = _linear(w, "self_attn.q_proj", x).view(length, spec.num_heads, spec.head_dim)
    k = _linear(w, "self_attn.k_proj", x).view(length, spec.num_kv_heads, spec.head_dim)
    v = _linear(w, "self_attn.v_proj", x).view(length, spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm:
        q = _norm(q, w["self_attn.q_norm.weight"], spec.rms_norm_eps)
        k = _norm(k, w["self_attn.k_norm.weight"], spec.rms_norm_eps)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(spec.head_dim)
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, -1)
    return _linear(w, "self_attn.o_proj", mixed)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)  # [T, heads, head_dim / 2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _rotation(spec: ModelSpec, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, 1, head_dim / 2]; in Python floats, since torch's own may be inaccurate on a process's first
    parallel call (pytorch#188792)."""
    frequencies = [spec.rope_theta ** (-2 * i / spec.head_dim) for i in range(spec.head_dim // 2)]
    if spec.rope_scaling is not None:
        frequencies = [_scale(frequency, spec.rope_scaling) for frequency in frequencies]
    angles = [[position * frequency for frequency in frequencies] for position in range(length)]
    cos = torch.tensor([[math.cos(angle) for angle in row] for row in angles], dtype=torch.float64)
    sin = torch.tensor([[math.sin(angle) for angle in row] for row in angles], dtype=torch.float64)
    return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def _scale(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3's stretching of long wavelengths (Dubey et al. 2024, section 3.1; smooth between the two bounds)."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_position_embeddings / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_position_embeddings / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
