"""Compiled kernels against the torch oracle."""

from __future__ import annotations

import pytest
import torch
from kernel_support import make_batch

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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_agrees_with_the_reference(shape: HeadShape) -> None:
    batch = make_batch(shape, [37, 1, 18])
    expected_kv, kv = batch.empty_kv(), batch.empty_kv()
    expected = batch.run(reference, expected_kv)
    torch.testing.assert_close(batch.run(cpu, kv), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(kv, expected_kv, atol=1e-5, rtol=0, equal_nan=True)


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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_head_norms_agree_with_the_reference_and_leave_values_alone(shape: HeadShape) -> None:
    batch = make_batch(shape, [5])
    query_weight, key_weight = torch.rand(shape.head_dim), torch.rand(shape.head_dim)
    expected, qkv = batch.qkv.clone(), batch.qkv.clone()
    reference.norm_heads(expected, query_weight, key_weight, 1e-6, shape)
    cpu.norm_heads(qkv, query_weight, key_weight, 1e-6, shape)
    torch.testing.assert_close(qkv, expected, atol=1e-5, rtol=0)
    values = shape.num_kv_heads * shape.head_dim
    assert torch.equal(qkv[:, -values:], batch.qkv[:, -values:])


@pytest.mark.parametrize("width", [1, 16, 50, 576])
@pytest.mark.parametrize("num_rows", [1, 7, 130])
def test_norms_agree_with_the_reference(num_rows: int, width: int) -> None:
    x, delta, weight = torch.randn(num_rows, width), torch.randn(num_rows, width), torch.rand(width)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=1e-5, rtol=0)
    residual, expected_residual = x.clone(), x.clone()
    normed = cpu.add_rms_norm(residual, delta, weight, 1e-5)
    expected = reference.add_rms_norm(expected_residual, delta, weight, 1e-5)
    torch.testing.assert_close(normed, expected, atol=1e-5, rtol=0)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("width", [1, 16, 50, 1536])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_gated_activation_agrees_with_the_reference(width: int, scale: float) -> None:
    gate_up = torch.randn(33, 2 * width) * torch.tensor([scale, 1.0]).repeat_interleave(width)
    torch.testing.assert_close(cpu.silu_mul(gate_up), reference.silu_mul(gate_up), atol=1e-5, rtol=1e-6)
