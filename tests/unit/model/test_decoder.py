"""The decoder: right against the reference kernels, and the same bits in any company."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from decoder_support import Session, make_decoder, make_spec, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aengine.audit.oracle import oracle_logits
from aengine.kernels import reference
from aengine.model.decoder import Decoder
from aengine.testing import random_tensors

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "head_dim": 8}
MODELS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 1, "tie_word_embeddings": False},
    {"num_key_value_heads": 4, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
    QWEN2,
    QWEN3,
]
IDS = random_ids(45)
TYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
"""A rounding that falls otherwise in one layer is carried on through the next ones."""


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_decoder(make_spec())


@pytest.fixture(scope="module", params=TYPES, ids=str)
def any_decoder(request: pytest.FixtureRequest) -> Decoder:
    return make_decoder(make_spec(), dtype=request.param)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("config", MODELS, ids=str)
def test_logits_agree_with_the_reference_kernels(config: dict[str, Any], dtype: torch.dtype) -> None:
    spec = make_spec(**config)
    logits = Session(make_decoder(spec, dtype=dtype)).feed((0, IDS))
    expected = Session(make_decoder(spec, dtype=dtype, kernels=reference)).feed((0, IDS))
    assert logits.dtype == torch.float32
    assert logits.shape == (45, spec.vocab_size)
    torch.testing.assert_close(logits, expected, atol=NEAR[dtype], rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("config", MODELS, ids=str)
def test_16_bits_are_as_close_to_the_float64_oracle_as_their_rounding_lets_them(
    config: dict[str, Any], dtype: torch.dtype
) -> None:
    spec = make_spec(**config)
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(spec, 0).items()}
    expected = oracle_logits(spec, tensors, IDS, dtype=torch.float64)
    error = (Session(make_decoder(spec, dtype=dtype)).feed((0, IDS)) - expected).abs().mean() / expected.abs().mean()
    assert torch.finfo(dtype).eps / 10 < error < 5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("config", [{}, QWEN3], ids=str)
def test_page_size_and_chunks_change_no_bit(config: dict[str, Any], page_size: int, dtype: torch.dtype) -> None:
    decoder = make_decoder(make_spec(**config), dtype=dtype)
    expected = Session(decoder, page_size=16).feed((0, IDS))
    session = Session(decoder, page_size=page_size)
    chunks = [IDS[:1], IDS[1:8], IDS[8:40], *([token] for token in IDS[40:])]
    assert torch.equal(torch.cat([session.feed((0, chunk)) for chunk in chunks]), expected)


def test_decoding_step_by_step_gives_the_bits_of_a_whole_prefill(any_decoder: Decoder) -> None:
    session = Session(any_decoder)
    steps = torch.cat([session.feed((0, [token])) for token in IDS])
    assert torch.equal(steps, Session(any_decoder).feed((0, IDS)))


@pytest.fixture(scope="module")
def alone(any_decoder: Decoder) -> dict[int, Tensor]:
    """Logits of four prompts, each computed on its own."""
    return {sequence: Session(any_decoder).feed((0, random_ids(30, seed=sequence))) for sequence in range(4)}


@settings(max_examples=15)
@given(data=st.data())
def test_company_changes_no_bit(any_decoder: Decoder, alone: dict[int, Tensor], data: st.DataObject) -> None:
    session = Session(any_decoder, page_size=data.draw(st.sampled_from([1, 3, 16])))
    left = {sequence: random_ids(30, seed=sequence) for sequence in alone}
    while left:
        batch = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        chunks = [(sequence, left[sequence][: data.draw(st.integers(1, 30), label="rows")]) for sequence in batch]
        starts = {sequence: session.lengths.get(sequence, 0) for sequence in batch}
        parts = torch.split(session.feed(*chunks), [len(chunk) for _, chunk in chunks])
        for (sequence, chunk), part in zip(chunks, parts, strict=True):
            assert torch.equal(part, alone[sequence][starts[sequence] : starts[sequence] + len(chunk)])
            left[sequence] = left[sequence][len(chunk) :]
        left = {sequence: rest for sequence, rest in left.items() if rest}


def test_one_thread_and_two_give_the_same_bits(any_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.kernels.threads.PARALLEL_FROM", 0)
    results, before = [], torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(Session(any_decoder).feed((0, IDS), (1, IDS[:7])))
    torch.set_num_threads(before)
    assert torch.equal(*results)


def test_fresh_processes_with_one_thread_and_two_give_the_same_bits() -> None:
    program = """
        import sys, torch
        torch.set_num_threads(int(sys.argv[1]))
        from decoder_support import Session, make_decoder, make_spec, random_ids
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            decoder = make_decoder(make_spec(), dtype=dtype)
            print(Session(decoder).feed((0, random_ids(45))).numpy().tobytes().hex())
    """
    logits = [Session(make_decoder(make_spec(), dtype=dtype)).feed((0, IDS)) for dtype in TYPES]
    for num_threads in ("1", "2"):
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), num_threads]
        printed = subprocess.check_output(command, cwd=Path(__file__).parent, text=True)
        assert printed.split() == [of_one_type.numpy().tobytes().hex() for of_one_type in logits]


def test_decoders_in_two_threads_do_not_disturb_each_other(decoder: Decoder) -> None:
    expected, results = Session(decoder).feed((0, IDS)), {}

    def work(name: int) -> None:
        session = Session(decoder)
        results[name] = torch.cat([session.feed((0, [token])) for token in IDS])

    workers = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(results[name], expected) for name in range(2))


def test_results_stay_what_they_were_through_later_calls(decoder: Decoder) -> None:
    session = Session(decoder)
    hidden = decoder.forward(session.inputs([(0, IDS)]), session.storage)
    logits, hidden_before = decoder.logits(hidden), hidden.clone()
    logits_before = logits.clone()
    session.feed((1, IDS[::-1]))
    assert torch.equal(hidden, hidden_before)
    assert torch.equal(logits, logits_before)
    assert not logits.requires_grad
    assert not logits.is_inference()


def test_new_weights_take_effect_with_the_next_call() -> None:
    decoder, other = make_decoder(make_spec(), seed=1), make_decoder(make_spec(), seed=2)
    before = Session(decoder).feed((0, IDS))
    expected = Session(other).feed((0, IDS))
    decoder.weights = other.weights
    assert torch.equal(Session(decoder).feed((0, IDS)), expected)
    assert not torch.allclose(before, expected)


def test_logits_of_no_rows_are_empty(decoder: Decoder) -> None:
    assert decoder.logits(torch.empty(0, 32)).shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.array([0, 128])}, r"positions must be in \[0, 128\), got 0..128"),
        ({"positions": np.array([-1, 0])}, r"positions must be in \[0, 128\), got -1..0"),
        ({"sequences": np.array([0, 1])}, r"sequences must be in \[0, 1\), got 0..1"),
        ({"page_tables": np.full((1, 32), 9999, np.int32)}, r"pages must be in \[0, 128\), got 9999..9999"),
    ],
)
def test_inputs_out_of_bounds_are_refused_before_anything_is_written(
    decoder: Decoder, change: dict[str, Any], message: str
) -> None:
    session = Session(decoder)
    inputs = evolve(session.inputs([(0, [1, 2])]), **change)
    with pytest.raises(ValueError, match=message):
        decoder.forward(inputs, session.storage)
    assert all(layer.isnan().all() for layer in session.storage.layers)


def test_a_token_outside_the_vocabulary_is_refused(decoder: Decoder) -> None:
    with pytest.raises(IndexError):
        Session(decoder).feed((0, [64]))
