"""What a decoder of the Llama family is made of: sizes, switches, and the tensors that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen

from aengine.model.hf_config import (
    MODEL_TYPES,
    RopeScaling,
    read_architecture,
    read_bool,
    read_head_dim,
    read_num_kv_heads,
    read_num_layers,
    read_positive,
    read_rope,
    read_rope_scaling,
    read_size,
    refuse_sliding_window,
    refuse_unsupported,
)

__all__ = ["ModelSpec", "RopeScaling"]


@frozen(kw_only=True)
class ModelSpec:
    """Sizes and switches of one model; equal specs have the same tensors with the same shapes.

    `attention_bias` is the bias of q, k and v; `output_bias` that of o_proj. `rope_scaling` is None for plain rotary
    embeddings. `qk_norm` is the RMS norm of each head of q and k before rotation (Qwen3), with `rms_norm_eps`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a `config.json` of transformers 4 or 5.

        Raises `UnsupportedModelError` for what the decoder does not compute, `CheckpointError` for fields that are
        missing or contradict each other.
        """
        architecture = read_architecture(config)
        refuse_unsupported(config)
        num_layers = read_num_layers(config)
        max_position_embeddings = read_size(config, "max_position_embeddings")
        refuse_sliding_window(config, architecture, num_layers, max_position_embeddings)
        num_heads = read_size(config, "num_attention_heads")
        rope = read_rope(config)
        attention_bias = read_bool(config, "attention_bias") and architecture in (
            "LlamaForCausalLM",
            "Qwen3ForCausalLM",
        )
        return cls(
            architecture=architecture,
            vocab_size=read_size(config, "vocab_size"),
            hidden_size=read_size(config, "hidden_size"),
            intermediate_size=read_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=read_num_kv_heads(config, num_heads),
            head_dim=read_head_dim(config, architecture, num_heads),
            rms_norm_eps=read_positive(config, "rms_norm_eps"),
            rope_theta=read_positive(rope, "rope_theta"),
            max_position_embeddings=max_position_embeddings,
            rope_scaling=read_rope_scaling(rope, max_position_embeddings),
            tie_word_embeddings=read_bool(config, "tie_word_embeddings"),
            attention_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=read_bool(config, "mlp_bias") and architecture == "LlamaForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
        )

    def to_config(self) -> dict[str, Any]:
        """The `config.json` that `from_config` and transformers (4 and 5) read back as this spec."""
        scaling = None if self.rope_scaling is None else {"rope_type": "llama3", **asdict(self.rope_scaling)}
        return {
            "architectures": [self.architecture],
            "model_type": MODEL_TYPES[self.architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "sliding_window": None,
            "use_sliding_window": False,
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by its Hugging Face name; a tied `lm_head.weight` is not among them."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in self.layer_shapes().items()})
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer, named from the layer on; linear weights are [out, in]."""
        hidden, inner, q_size = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (q_size, hidden, self.attention_bias),
            "self_attn.k_proj": (kv_size, hidden, self.attention_bias),
            "self_attn.v_proj": (kv_size, hidden, self.attention_bias),
            "self_attn.o_proj": (hidden, q_size, self.output_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{name}.bias"] = (rows,)
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)
        if self.qk_norm:
            norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), self.head_dim)
        return shapes | {f"{name}.weight": (size,) for name, size in norms.items()}
