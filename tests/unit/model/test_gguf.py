"""A GGUF file written as llama.cpp writes it gives back the model it was converted from."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from attrs import evolve
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from loading_support import ARCHITECTURES, tiny_module, write_gguf

from aengine.errors import CheckpointError, EngineError, UnsupportedModelError, WeightsMismatchError
from aengine.model.checkpoint import load_checkpoint
from aengine.model.gguf import dequantise, read_gguf
from aengine.model.spec import ModelSpec, RopeScaling

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"]


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_module())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["plain", "biases"])
def test_tensors_and_spec_are_those_of_the_module(
    architecture: str, is_tied: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    module = tiny_module(architecture, tie_word_embeddings=is_tied, **changes)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", module))
    expected = ModelSpec.from_config(module.config.to_dict())
    assert checkpoint.spec == evolve(expected, architecture=checkpoint.spec.architecture)
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, module.state_dict()[name]), name


def test_a_mistral_file_says_llama_which_computes_the_same(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_module("MistralForCausalLM"))
    assert load_checkpoint(path).spec.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12, 3e-5, 0.1])
def test_the_eps_is_the_decimal_it_was_before_32_bits(eps: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_module(), {"llama.attention.layer_norm_rms_epsilon": eps})
    assert read_gguf(path).spec.rms_norm_eps == eps


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_tensors_are_dequantised(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((32, 48 * 32), dtype=np.float32)
    quantisation = gguf.GGMLQuantizationType[kind]
    packed = quantize(values, quantisation)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x.weight", packed, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(path).tensors
    found = dequantise(tensor)
    assert found.shape == values.shape
    assert torch.equal(found, torch.tensor(dequantize(packed, quantisation)))
    assert float((found - torch.tensor(values)).abs().max()) < 0.5


def test_tensors_do_not_depend_on_the_file_once_read(tmp_path: Path) -> None:
    module = tiny_module()
    path = write_gguf(tmp_path / "tiny.gguf", module)
    tensors = read_gguf(path).tensors
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_factors(factor: float, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    module = tiny_module(rope_parameters={**scaling, "rope_theta": 5e5, "original_max_position_embeddings": 8192})
    plain = 1.0 / 5e5 ** (torch.arange(0, 8, 2) / 8)
    factors = (plain / module.model.rotary_emb.inv_freq).numpy()
    path = write_gguf(tmp_path / "tiny.gguf", module, arrays={"rope_freqs.weight": factors})
    assert load_checkpoint(path).spec.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)


@pytest.mark.parametrize("factors", [[1.0, 2.0, 3.0, 4.0], [1.0], [float("nan")] * 4])
def test_other_rotary_factors_are_refused(factors: list[float], tmp_path: Path) -> None:
    arrays = {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight are not those of a Llama 3 model"):
        read_gguf(write_gguf(tmp_path / "tiny.gguf", tiny_module(), arrays=arrays))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma3"}, "GGUF architecture 'gemma3' is not supported"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.attention.sliding_window": 64}, "window 64 is below its context 128"),
        ({"llama.rope.dimension_count": 4}, r"rope.dimension_count 4 differs from attention.key_length 8"),
        ({"llama.attention.value_length": 16}, r"attention.value_length 16 differs"),
        ({"tokenizer.ggml.model": "llama"}, "GGUF tokenizer 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "GGUF pre-tokenizer 'tekken' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf(write_gguf(tmp_path / "tiny.gguf", tiny_module(), metadata))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "num_hidden_layers must be a positive whole number, got None"),
        ({"llama.context_length": "long"}, "context_length must be a whole number, got 'long'"),
        ({"llama.attention.head_count_kv": [2, 2]}, r"num_key_value_heads must be .* got \[2, 2\]"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon must be a number, got None"),
        ({"llama.rope.freq_base": "x"}, r"rope.freq_base must be a number, got 'x'"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "names a token twice"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": [1, 2]}, r"tokenizer.ggml.merges is missing or not a list of strings"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges do not fit its vocabulary"),
        ({"tokenizer.ggml.merges": ["unpaired"]}, "merges do not fit its vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "does not give one type to each token"),
        ({"tokenizer.ggml.eos_token_id": 4000}, r"eos_token_id 4000 is outside its \d+ tokens"),
    ],
)
def test_metadata_that_cannot_be_is_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_gguf(write_gguf(tmp_path / "tiny.gguf", tiny_module(), metadata))


@pytest.mark.parametrize(
    ("metadata", "arrays", "message"),
    [
        ({"llama.block_count": 1}, {}, r"unexpected \(9\): model.layers.1"),
        ({"llama.attention.head_count": 8}, {}, r"q_proj.weight: expected \[64, 32\], got \[32, 32\]"),
        ({}, {"blk.0.attn_q.weight": np.ones((33, 32), np.float32)}, r"expected \[32, 32\], got \[33, 32\]"),
        ({}, {"blk.0.ssm_conv1d.weight": np.ones(3, np.float32)}, r"unexpected \(1\): .*ssm_conv1d.weight"),
    ],
)
def test_tensors_that_disagree_with_the_metadata_are_refused(
    metadata: dict[str, Any], arrays: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsMismatchError, match=message):
        load_checkpoint(write_gguf(tmp_path / "tiny.gguf", tiny_module(), metadata, arrays))


def test_a_file_without_embedding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"has no tensor token_embd.weight"):
        read_gguf(path)


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    arrays = {"blk.0.attn_q.weight": np.ones((32, 32), np.int32)}
    with pytest.raises(UnsupportedModelError, match=r"blk.0.attn_q.weight is stored as I32"):
        read_gguf(write_gguf(tmp_path / "tiny.gguf", tiny_module(), arrays=arrays))


def test_a_file_without_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_module(), {"tokenizer.ggml.model": None})
    checkpoint = load_checkpoint(path)
    assert (checkpoint.tokenizer, checkpoint.eos_token_ids) == (None, ())


def test_a_file_cut_anywhere_is_called_truncated(tiny_file: Path, tmp_path: Path) -> None:
    whole = tiny_file.read_bytes()
    path = tmp_path / "cut.gguf"
    # The last bytes may be padding, whose absence harms nobody.
    for length in [0, 1, 3, 4, 7, 8, 20, 24, 25, *range(40, len(whole) - 32, len(whole) // 60)]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut.gguf is truncated or not a GGUF file") as caught:
            read_gguf(path)
        assert caught.value.__cause__ is not None


def test_another_format_is_called_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\n" * 9)
    with pytest.raises(CheckpointError, match="GGUF magic invalid"):
        load_checkpoint(path)


@pytest.fixture(scope="module")
def header_size(tiny_file: Path) -> int:
    return int(gguf.GGUFReader(tiny_file).data_offset)


@given(st.data())
def test_a_file_with_a_wrong_byte_is_read_or_refused(tiny_file: Path, header_size: int, data: st.DataObject) -> None:
    content = bytearray(tiny_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_size - 1))] = data.draw(st.integers(0, 255))
    path = tiny_file.with_name("wrong.gguf")
    path.write_bytes(content)
    with contextlib.suppress(EngineError):
        assert load_checkpoint(path).tensors
