"""Compiled kernels against the torch oracle, in every type they compute with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_support import make_batch
from torch import Tensor

from aengine.kernels import cpu, reference
from aengine.kernels.interface import HeadShape

SHAPES = [
    HeadShape(9, 3, 64, 16),
    HeadShape(4, 4, 8, 1),
    HeadShape(4, 2, 16, 4),
    HeadShape(6, 2, 80, 5),
    HeadShape(14, 2, 128, 64),
    HeadShape(2, 1, 6, 2),
    HeadShape(3, 1, 72, 48),
]


TYPES = [torch.float32, torch.bfloat16, torch.float16]

in_every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def assert_agrees(actual: Tensor, expected: Tensor, atol: float = 1e-5, **options: Any) -> None:
    """Up to the float32 within, and where that decides a rounding, one unit in the last place of a 16-bit type."""
    rtol = 0.0 if expected.dtype == torch.float32 else torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, **options)


@in_every_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_agrees_with_the_reference(shape: HeadShape, dtype: torch.dtype) -> None:
    batch = make_batch(shape, [37, 1, 18], dtype=dtype)
    expected_kv, kv = batch.empty_kv(), batch.empty_kv()
    expected = batch.run(reference, expected_kv)
    assert_agrees(batch.run(cpu, kv), expected)
    assert_agrees(kv, expected_kv, equal_nan=True)


def test_attention_over_large_scores_does_not_overflow() -> None:
    batch = make_batch(HeadShape(2, 1, 16, 4), [21])
    batch.qkv[:, :48] *= 30
    expected = batch.run(reference, batch.empty_kv())
    torch.testing.assert_close(batch.run(cpu, batch.empty_kv()), expected, atol=1e-4, rtol=0)


def test_a_key_that_is_not_a_number_spoils_the_rows_that_see_it_and_no_other() -> None:
    batch = make_batch(HeadShape(2, 1, 16, 4), [9, 9])
    batch.qkv[4, 32] = torch.nan
    result = batch.run(cpu, batch.empty_kv())
    spoiled = result.isnan().any(1)
    assert spoiled.tolist() == [False] * 4 + [True] * 5 + [False] * 9


@in_every_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_head_norms_agree_with_the_reference_and_leave_values_alone(shape: HeadShape, dtype: torch.dtype) -> None:
    batch = make_batch(shape, [5], dtype=dtype)
    query_weight, key_weight = torch.rand(shape.head_dim).to(dtype), torch.rand(shape.head_dim).to(dtype)
    expected, qkv = batch.qkv.clone(), batch.qkv.clone()
    reference.norm_heads(expected, query_weight, key_weight, 1e-6, shape)
    cpu.norm_heads(qkv, query_weight, key_weight, 1e-6, shape)
    assert_agrees(qkv, expected)
    values = shape.num_kv_heads * shape.head_dim
    assert torch.equal(qkv[:, -values:], batch.qkv[:, -values:])


@in_every_type
@pytest.mark.parametrize("width", [1, 16, 50, 576])
@pytest.mark.parametrize("num_rows", [1, 7, 130])
def test_norms_agree_with_the_reference(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, delta = torch.randn(num_rows, width).to(dtype), torch.randn(num_rows, width).to(dtype)
    weight = torch.rand(width).to(dtype)
    assert_agrees(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residual, expected_residual = x.clone(), x.clone()
    normed = cpu.add_rms_norm(residual, delta, weight, 1e-5)
    expected = reference.add_rms_norm(expected_residual, delta, weight, 1e-5)
    assert_agrees(normed, expected)
    assert torch.equal(residual, expected_residual)


@in_every_type
@pytest.mark.parametrize("width", [1, 16, 50, 1536])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_gated_activation_agrees_with_the_reference(width: int, scale: float, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(33, 2 * width) * torch.tensor([scale, 1.0]).repeat_interleave(width)).to(dtype)
    assert_agrees(cpu.silu_mul(gate_up), reference.silu_mul(gate_up), atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_16_bits_round_what_float32_gives_for_the_same_numbers(dtype: torch.dtype) -> None:
    x, weight, gate_up = torch.randn(40, 96).to(dtype), torch.rand(96).to(dtype), torch.randn(40, 192).to(dtype)
    wide_residual, residual = x.float(), x.clone()
    assert torch.equal(cpu.rms_norm(x, weight, 1e-5), cpu.rms_norm(x.float(), weight.float(), 1e-5).to(dtype))
    assert torch.equal(cpu.silu_mul(gate_up), cpu.silu_mul(gate_up.float()).to(dtype))
    cpu.add_rms_norm(residual, x.flip(0), weight, 1e-5)
    cpu.add_rms_norm(wide_residual, x.flip(0).float(), weight.float(), 1e-5)
    assert torch.equal(residual, wide_residual.to(dtype))
