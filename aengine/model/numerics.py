"""What may be said of a model's numbers on this machine, found by probing everything that its decoder computes with."""

from __future__ import annotations

import torch

from aengine.kernels.interface import HeadShape
from aengine.kernels.invariance import UNPACKED, Numerics, probe
from aengine.kernels.operator_probe import DecoderShape, probe_operators
from aengine.model.shared import shared_linear_shapes
from aengine.model.spec import ModelSpec
from aengine.model.weights import linear_shapes
from aengine.sampling.sampler_probe import probe_sampler

__all__ = ["decoder_shape", "probe_numerics"]


def probe_numerics(spec: ModelSpec, shape: DecoderShape, *, share: bool = False) -> Numerics:
    """Products, kernels and sampler, each tried at the model's sizes; `share` for weights that are not packed.

    Takes about a second for a model of 135 M parameters, and nothing for the same sizes again. Call it in the thread
    that will run the model.
    """
    products = probe(shared_linear_shapes(spec), UNPACKED) if share else probe(linear_shapes(spec, shape.dtype))
    return products.with_operators((*probe_operators(shape), probe_sampler(spec.vocab_size)))


def decoder_shape(spec: ModelSpec, *, page_size: int, max_model_len: int, dtype: torch.dtype) -> DecoderShape:
    """The sizes that kernels see."""
    return DecoderShape(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        heads=HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size),
        eps=spec.rms_norm_eps,
        max_positions=max_model_len,
        has_head_norms=spec.qk_norm,
        dtype=dtype,
    )
