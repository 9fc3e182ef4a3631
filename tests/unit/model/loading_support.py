"""Tiny random models and tokenizers for the tests of loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from aengine.model.tokenizer import Tokenizer

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
CORPUS = [
    "hello world, it's 1234 o'clock",
    "def f(x):\n    return x ** 2\n\n\n",
    "the cat sat 99 99 1234 1234",
    "the   then",
]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    return {"architectures": [architecture], "model_type": model_type, **SIZES, **changes}


def tiny_module(architecture: str = "LlamaForCausalLM", **changes: Any) -> PreTrainedModel:
    """Random weights, norms and biases included, so that no mix-up of two tensors goes unseen."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config(architecture, **changes)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def tiny_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE with a few merges and three special tokens, ids 0 to 2."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def tiny_tokenizer(**changes: Any) -> Tokenizer:
    fields: dict[str, Any] = {
        "backend": tiny_backend(),
        "special_tokens": {"eos_token": "<|im_end|>"},
        "eos_token_ids": (2,),
        "chat_template": TEMPLATE,
    }
    return Tokenizer(**{**fields, **changes})


def tokenizer_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """What a GGUF file says of the tiny tokenizer."""
    state = json.loads(tiny_backend().to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def write_gguf(
    path: Path, module: PreTrainedModel, metadata: dict[str, Any] | None = None, arrays: dict[str, Any] | None = None
) -> Path:
    """Convert as llama.cpp does: its names, its row order in q and k for Llama, norms and biases in float32.

    `metadata` overrides what the file says, None leaving a key out; `arrays` adds or replaces tensors.
    """
    config = module.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    values = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.rope.dimension_count": config.head_dim,
        f"{architecture}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **tokenizer_metadata(),
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", architecture))
    for key, value in values.items():
        if value is not None:
            add_value(writer, key, value)
    for name, array in {**gguf_arrays(module, architecture), **(arrays or {})}.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_arrays(module: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    heads = {"q_proj": module.config.num_attention_heads, "k_proj": module.config.num_key_value_heads}
    arrays = {}
    for name, tensor in module.state_dict().items():
        array = tensor.float().numpy()
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            array = array.reshape(heads[part], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if not (name == "lm_head.weight" and module.config.tie_word_embeddings):
            arrays[gguf_name(name)] = np.ascontiguousarray(array)
    return arrays


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"
