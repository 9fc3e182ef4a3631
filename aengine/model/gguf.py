"""A model from one GGUF file: its config, its tensors dequantised to float32, and its tokenizer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.gguf_tokenizer import build_tokenizer
from aengine.model.spec import ModelSpec
from aengine.model.tokenizer import Tokenizer

__all__ = ["GGUFModel", "read_gguf"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@frozen(eq=False, kw_only=True)
class GGUFModel:
    """`tensors` have Hugging Face names, are copies, not views of the file, and are not yet checked against `spec`."""

    spec: ModelSpec
    tensors: dict[str, Tensor] = field(repr=False)
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


class BoundedReader(GGUFReader):
    """Reads past the end of the file raise; `GGUFReader` returns short arrays there, and may loop over them for ever.

    It also reads a vocabulary several times faster, without a `memmap` object for every token.
    """

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        item_type = np.dtype(dtype)
        if offset + item_type.itemsize * int(count) > self.data.nbytes:
            raise EOFError(f"the file ends before byte {offset + item_type.itemsize * int(count)}")
        order = self.byte_order if override_order is None else override_order
        return np.frombuffer(self.data.data, item_type.newbyteorder(order), int(count), int(offset))


def read_gguf(path: Path) -> GGUFModel:
    """Raises `CheckpointError` for a damaged file, `UnsupportedModelError` for a model or tokenizer not supported."""
    try:
        reader = BoundedReader(path)
        metadata = {name: entry.contents() for name, entry in reader.fields.items()}
    except (OSError, ValueError, LookupError, EOFError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is truncated or not a GGUF file: {error}") from error
    spec = ModelSpec.from_config(build_config(metadata, {tensor.name: tensor for tensor in reader.tensors}))
    tokenizer = build_tokenizer(metadata)
    return GGUFModel(
        spec=spec,
        tensors=dict(read_tensors(reader.tensors, spec)),
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids if tokenizer else (),
    )


def build_config(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    """The `config.json` the file was converted from, as far as the spec reads it."""
    prefix = metadata.get("general.architecture")
    if prefix not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {prefix!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    values = {key.removeprefix(f"{prefix}."): value for key, value in metadata.items() if key.startswith(f"{prefix}.")}
    refuse_unsupported(values, metadata)
    if "token_embd.weight" not in tensors:
        raise CheckpointError("the GGUF file has no tensor token_embd.weight")
    config = {
        "architectures": [ARCHITECTURES[prefix]],
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "hidden_size": values.get("embedding_length"),
        "intermediate_size": values.get("feed_forward_length"),
        "num_hidden_layers": values.get("block_count"),
        "num_attention_heads": values.get("attention.head_count"),
        "num_key_value_heads": values.get("attention.head_count_kv"),
        "head_dim": values.get("attention.key_length", values.get("rope.dimension_count")),
        "rms_norm_eps": read_decimal(values, "attention.layer_norm_rms_epsilon"),
        "rope_theta": read_decimal(values, "rope.freq_base", 10000.0),
        "max_position_embeddings": values.get("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if ROPE_FACTORS in tensors:
        config["rope_scaling"] = rope_scaling(dequantise(tensors[ROPE_FACTORS]), config)
    return config


def refuse_unsupported(values: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """`values` is the metadata of the architecture, without its prefix."""
    if (parts := read_count(metadata, "split.count", 1)) > 1:
        raise UnsupportedModelError(f"the GGUF file is one of {parts} parts; merge them into one first")
    if experts := read_count(values, "expert_count", 0):
        raise UnsupportedModelError(f"mixtures of experts are not supported (expert_count = {experts})")
    if (scaling := values.get("rope.scaling.type", "none")) != "none":
        raise UnsupportedModelError(f"GGUF rope scaling {scaling!r} is not supported")
    window, context = read_count(values, "attention.sliding_window", 0), read_count(values, "context_length", 0)
    if 0 < window < context:
        raise UnsupportedModelError(
            f"sliding-window attention is not supported: the GGUF file's window {window} is below its context {context}"
        )
    head_dim = values.get("attention.key_length")
    for key in ("rope.dimension_count", "attention.value_length"):
        if head_dim is not None and values.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(f"GGUF {key} {values[key]} differs from attention.key_length {head_dim}")


def read_count(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key, default)
    if not isinstance(value, int):
        raise CheckpointError(f"the GGUF file's {key} must be a whole number, got {value!r}")
    return value


def read_decimal(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """GGUF keeps floats in 32 bits: 1e-05 comes back as 9.99999975e-06, and is 1e-05 again after this."""
    value = values.get(key, default)
    if not isinstance(value, float):
        raise CheckpointError(f"the GGUF file's {key} must be a number, got {value!r}")
    return float(str(np.float32(value)))


def rope_scaling(factors: Tensor, config: Mapping[str, Any]) -> dict[str, Any]:
    """The `llama3` scaling whose per-frequency factors [head_dim / 2] the file holds instead of its parameters.

    Those of the published Llama 3.1 to 3.3 models are tried; other factors are refused.
    """
    scaling = {"rope_type": "llama3", "factor": round(max(factors.flatten().tolist(), default=1.0), 3), **LLAMA3_ROPE}
    expected = llama3_factors(factors.numel(), config["rope_theta"], scaling)
    if [2 * size for size in factors.shape] != [config["head_dim"]] or not torch.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModelError(f"the GGUF file's {ROPE_FACTORS} are not those of a Llama 3 model")
    return scaling


def llama3_factors(count: int, rope_theta: float, scaling: Mapping[str, Any]) -> Tensor:
    wavelengths = 2 * math.pi * rope_theta ** (torch.arange(count, dtype=torch.float64) / count)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = ((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    factors: Tensor = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors.float()


def read_tensors(tensors: Iterable[ReaderTensor], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """By Hugging Face name; a name with no counterpart is kept, to be found unexpected."""
    permuted_heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    for tensor in tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        values = dequantise(tensor)
        part = re.fullmatch(r"blk\.\d+\.(attn_[qk])\.(weight|bias)", tensor.name)
        if part and spec.architecture == ARCHITECTURES["llama"]:
            values = undo_permutation(values, permuted_heads[part[1]])
        yield hugging_face_name(tensor.name), values


def hugging_face_name(name: str) -> str:
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        return f"model.layers.{layer[1]}.{LAYER_NAMES.get(layer[2], layer[2])}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{MODEL_NAMES.get(stem, stem)}.{kind}"


def dequantise(tensor: ReaderTensor) -> Tensor:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(
            f"{tensor.name} is stored as {tensor.tensor_type.name}, which is not supported"
        ) from error


def undo_permutation(values: Tensor, num_heads: int) -> Tensor:
    """llama.cpp pairs neighbouring rows of each head of q and k for its rotation, Hugging Face pairs the two halves.

    [heads, head_dim / 2, 2, in] to [heads, 2, head_dim / 2, in]
    """
    if len(values) % (2 * num_heads):
        return values  # of a wrong shape, which is reported with the others
    return values.reshape(num_heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
