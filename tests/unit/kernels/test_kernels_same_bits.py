"""Whatever else is computed, a row's bits are its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import Batch, make_batch
from torch import Tensor

from aengine.kernels import cpu, threads
from aengine.kernels.interface import HeadShape
from aengine.kernels.trial import torch_threads

HEADS = (6, 2, 24)

TYPES = [torch.float32, torch.bfloat16, torch.float16]

in_every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def whole(batch: Batch) -> Tensor:
    return batch.run(cpu, batch.empty_kv())


def in_chunks(batch: Batch, sizes: Sequence[int]) -> Tensor:
    kv, starts = batch.empty_kv(), [sum(sizes[:i]) for i in range(len(sizes))]
    return torch.cat(
        [batch.run(cpu, kv, slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    )


@pytest.fixture
def always_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PARALLEL_FROM", 0)


@in_every_type
@pytest.mark.parametrize("page_size", [1, 2, 4, 64])
def test_page_size_changes_no_bit(page_size: int, dtype: torch.dtype) -> None:
    lengths = [67, 16, 1, 30]
    expected = whole(make_batch(HeadShape(*HEADS, 16), lengths, dtype=dtype))
    assert torch.equal(whole(make_batch(HeadShape(*HEADS, page_size), lengths, dtype=dtype)), expected)


@in_every_type
@pytest.mark.parametrize("page_size", [4, 16])
def test_decoding_step_by_step_gives_the_bits_of_a_whole_prefill(page_size: int, dtype: torch.dtype) -> None:
    batch = make_batch(HeadShape(*HEADS, page_size), [40], dtype=dtype)
    assert torch.equal(in_chunks(batch, [1] * 40), whole(batch))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    page_size=st.integers(1, 40),
    dtype=st.sampled_from(TYPES),
)
def test_chunks_of_any_size_give_the_bits_of_a_whole_prefill(
    sizes: list[int], page_size: int, dtype: torch.dtype
) -> None:
    batch = make_batch(HeadShape(*HEADS, page_size), [sum(sizes)], dtype=dtype)
    expected = whole(make_batch(HeadShape(*HEADS, 16), [sum(sizes)], dtype=dtype))
    assert torch.equal(in_chunks(batch, sizes), expected)


@in_every_type
def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(dtype: torch.dtype) -> None:
    batch = make_batch(HeadShape(*HEADS, 4), [23, 9, 31, 2], dtype=dtype)
    expected, kv = whole(batch), batch.empty_kv()
    for sequence in range(4):
        rows = (batch.rows.sequences == sequence).nonzero()[0].tolist()
        assert torch.equal(batch.run(cpu, kv, rows), expected[rows])


@in_every_type
@pytest.mark.usefixtures("always_parallel")
def test_threads_change_no_bit_of_attention(dtype: torch.dtype) -> None:
    batch = make_batch(HeadShape(*HEADS, 4), [23, 90, 31, 2], dtype=dtype)
    with torch_threads(1):
        expected = whole(batch)
    with torch_threads(2):
        assert torch.equal(whole(batch), expected)


@in_every_type
@pytest.mark.usefixtures("always_parallel")
@pytest.mark.parametrize("width", [50, 576])
def test_threads_and_neighbours_change_no_bit_of_norms_and_activation(width: int, dtype: torch.dtype) -> None:
    shape = HeadShape(3, 1, width // 5 // 2 * 2, 4)
    x, gate_up, qkv = (torch.randn(37, size).to(dtype) for size in (width, 2 * width, shape.row_size))
    weight, head_weight = torch.rand(width).to(dtype), torch.rand(shape.head_dim).to(dtype)

    def run(rows: slice) -> list[Tensor]:
        heads = qkv[rows].clone()
        cpu.norm_heads(heads, head_weight, head_weight, 1e-5, shape)
        normed = cpu.rms_norm(x[rows], weight, 1e-5)
        return [heads, normed, cpu.add_rms_norm(x[rows].clone(), normed, weight, 1e-5), cpu.silu_mul(gate_up[rows])]

    with torch_threads(2):
        expected = run(slice(None))
    with torch_threads(1):
        alone = [run(slice(i, i + 1)) for i in range(37)]
    for whole_result, rows in zip(expected, zip(*alone, strict=True), strict=True):
        assert torch.equal(torch.cat(rows), whole_result)
