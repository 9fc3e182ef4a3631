"""The fields of a Hugging Face `config.json`, read with their checks.

Absent fields take the defaults of `transformers`, so that both read the same file the same way; where a default would
hide a wrong file (`rms_norm_eps`, the sizes) the field is required instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from aengine.errors import CheckpointError, UnsupportedModelError

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DEFAULT_WINDOW = 4096
QWEN_DEFAULT_MAX_WINDOW_LAYERS = 28
QWEN3_DEFAULT_HEAD_DIM = 128
MAX_LAYERS = 10_000


@frozen
class RopeScaling:
    """The `llama3` scaling of rotary frequencies, the only one the decoder knows besides none."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def read_architecture(config: Mapping[str, Any]) -> str:
    """A module built in memory has no `architectures`; its `model_type` says the same."""
    named = config.get("architectures") or [
        architecture for architecture, model_type in MODEL_TYPES.items() if model_type == config.get("model_type")
    ]
    if not isinstance(named, list) or not named:
        raise UnsupportedModelError(
            f"the config names no known architecture (architectures = {config.get('architectures')!r}, "
            f"model_type = {config.get('model_type')!r}); supported are {', '.join(MODEL_TYPES)}"
        )
    if named[0] not in list(MODEL_TYPES):
        raise UnsupportedModelError(
            f"architecture {named[0]!r} is not supported; supported are {', '.join(MODEL_TYPES)}"
        )
    return str(named[0])


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported, only 'silu'")
    quantization_method = read_mapping(config, "quantization_config").get("quant_method", "gguf")
    # transformers leaves the method "gguf" in the config of a model it has dequantised on loading.
    if quantization_method != "gguf":
        raise UnsupportedModelError(
            f"quantised weights are not supported (quantization_config.quant_method = {quantization_method!r}); "
            "use the unquantised checkpoint"
        )


def refuse_sliding_window(config: Mapping[str, Any], architecture: str, num_layers: int, max_positions: int) -> None:
    """Refuse a window that some layer uses and some position could reach beyond."""
    window = sliding_window_in_use(config, architecture, num_layers)
    if window is not None and window < max_positions:
        raise UnsupportedModelError(
            f"sliding-window attention is not supported: sliding_window {window} is below max_position_embeddings "
            f"{max_positions}; with max_position_embeddings lowered to {window} the window is never reached"
        )


def sliding_window_in_use(config: Mapping[str, Any], architecture: str, num_layers: int) -> int | None:
    """None for Llama, which has no such field, and for Qwen unless switched on for at least one layer."""
    if architecture == "LlamaForCausalLM" or config.get("sliding_window", DEFAULT_WINDOW) is None:
        return None
    window = read_size({"sliding_window": DEFAULT_WINDOW, **config}, "sliding_window")
    if architecture == "MistralForCausalLM":
        return window
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        has_sliding_layers = "sliding_attention" in layer_types
    else:
        first = config.get("max_window_layers", QWEN_DEFAULT_MAX_WINDOW_LAYERS)
        has_sliding_layers = not isinstance(first, int) or first < num_layers
    return window if read_bool(config, "use_sliding_window") and has_sliding_layers else None


def read_num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    if config.get("num_key_value_heads") is None:
        return num_heads
    num_kv_heads = read_size(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def read_head_dim(config: Mapping[str, Any], architecture: str, num_heads: int) -> int:
    hidden_size = read_size(config, "hidden_size")
    if config.get("head_dim") is not None:
        head_dim = read_size(config, "head_dim")
    elif architecture == "Qwen3ForCausalLM" and "head_dim" not in config:
        head_dim = QWEN3_DEFAULT_HEAD_DIM
    elif hidden_size % num_heads:
        raise CheckpointError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd; rotary embeddings need pairs")
    return head_dim


def read_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings in one mapping: `rope_parameters` (transformers 5) over `rope_scaling` (4)."""
    rope = {
        "rope_theta": config.get("rope_theta") or 10000.0,
        **read_mapping(config, "rope_scaling"),
        **read_mapping(config, "rope_parameters"),
    }
    if per_layer := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise UnsupportedModelError(f"rope parameters per layer type ({', '.join(per_layer)}) are not supported")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial!r} is not supported, only 1.0")
    return rope


def read_rope_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported, only 'default' and 'llama3'")
    return RopeScaling(
        factor=read_positive(rope, "factor"),
        low_freq_factor=read_positive(rope, "low_freq_factor"),
        high_freq_factor=read_positive(rope, "high_freq_factor"),
        original_max_position_embeddings=(
            read_size(rope, "original_max_position_embeddings")
            if rope.get("original_max_position_embeddings") is not None
            else max_positions
        ),
    )


def read_size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"the config's {key} must be a positive whole number, got {value!r}")
    return value


def read_num_layers(config: Mapping[str, Any]) -> int:
    """Bounded, because the names of all layers are listed before they are looked for."""
    num_layers = read_size(config, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise CheckpointError(f"the config's num_hidden_layers {num_layers} is above {MAX_LAYERS}")
    return num_layers


def read_positive(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise CheckpointError(f"the config's {key} must be a positive number, got {value!r}")
    return float(value)


def read_mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"the config's {key} must be an object, got {value!r}")
    return value


def read_bool(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"the config's {key} must be true or false, got {value!r}")
    return value
