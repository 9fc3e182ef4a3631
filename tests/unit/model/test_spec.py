"""Configs of transformers 4 and 5 are read as transformers reads them, or refused with the reason."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from loading_support import ARCHITECTURES, tiny_config, tiny_module
from transformers import AutoConfig, AutoModelForCausalLM

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.spec import ModelSpec, RopeScaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 4}])
def test_tensor_shapes_are_those_of_the_transformers_module(architecture: str, changes: dict[str, Any]) -> None:
    module = tiny_module(architecture, **changes)
    spec = ModelSpec.from_config(module.config.to_dict())
    assert spec.tensor_shapes() == {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tied_head_is_not_among_the_tensors(architecture: str) -> None:
    spec = ModelSpec.from_config(tiny_config(architecture, tie_word_embeddings=True))
    untied = evolve(spec, tie_word_embeddings=False)
    assert untied.tensor_shapes().keys() - spec.tensor_shapes().keys() == {"lm_head.weight"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 64)])
def test_a_written_config_is_read_back_by_us_and_by_transformers(
    architecture: str, scaling: RopeScaling | None, tmp_path: Path
) -> None:
    spec = evolve(ModelSpec.from_config(tiny_config(architecture, rope_theta=5e5)), rope_scaling=scaling)
    (tmp_path / "config.json").write_text(json.dumps(spec.to_config()))
    config = AutoConfig.from_pretrained(tmp_path)
    assert ModelSpec.from_config(spec.to_config()) == spec
    assert ModelSpec.from_config(config.to_dict()) == spec
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.rope_parameters["rope_type"] == ("default" if scaling is None else "llama3")
    built = AutoModelForCausalLM.from_config(config).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in built.items()} == spec.tensor_shapes()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 500000, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 1.0, "rope_scaling": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
    ids=["transformers 4", "older still", "transformers 5", "5 over 4"],
)
def test_rotary_settings_are_read_from_either_place(rope: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(tiny_config(**rope))
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


def test_a_scaling_without_original_length_takes_the_models() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    spec = ModelSpec.from_config(tiny_config(rope_scaling=scaling))
    assert spec.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 128)


@pytest.mark.parametrize("rope_scaling", [None, {"type": "default"}, {"rope_type": "default"}])
def test_default_rotary_embeddings_have_no_scaling(rope_scaling: dict[str, Any] | None) -> None:
    spec = ModelSpec.from_config(tiny_config(rope_scaling=rope_scaling))
    assert (spec.rope_scaling, spec.rope_theta) == (None, 10000.0)


@pytest.mark.parametrize(
    ("architecture", "head_dim", "expected"),
    [
        ("LlamaForCausalLM", {}, 8),
        ("LlamaForCausalLM", {"head_dim": None}, 8),
        ("MistralForCausalLM", {"head_dim": 16}, 16),
        ("Qwen2ForCausalLM", {}, 8),
        ("Qwen3ForCausalLM", {}, 128),
        ("Qwen3ForCausalLM", {"head_dim": None}, 8),
    ],
)
def test_head_dim_takes_the_default_of_transformers(architecture: str, head_dim: dict[str, Any], expected: int) -> None:
    config = tiny_config(architecture)
    del config["head_dim"]
    assert ModelSpec.from_config(config | head_dim).head_dim == expected


def test_num_kv_heads_defaults_to_num_heads() -> None:
    assert ModelSpec.from_config(tiny_config(num_key_value_heads=None)).num_kv_heads == 4


def test_a_module_without_architectures_is_known_by_its_model_type() -> None:
    assert ModelSpec.from_config(tiny_config("Qwen3ForCausalLM", architectures=None)).qk_norm


def test_biases_follow_the_architecture() -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    found = {}
    for architecture in ARCHITECTURES:
        spec = ModelSpec.from_config(tiny_config(architecture, **biases))
        found[architecture] = (spec.attention_bias, spec.output_bias, spec.mlp_bias)
    assert found == {
        "LlamaForCausalLM": (True, True, True),
        "MistralForCausalLM": (False, False, False),
        "Qwen2ForCausalLM": (True, False, False),
        "Qwen3ForCausalLM": (True, True, False),
    }


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"sliding_window": 16}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": 128}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": False}),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}),
        ("Qwen3ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}),
        ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_a_sliding_window_that_is_never_reached_is_accepted(architecture: str, changes: dict[str, Any]) -> None:
    assert ModelSpec.from_config(tiny_config(architecture, **changes)).architecture == architecture


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": 127}),
        ("MistralForCausalLM", {"max_position_embeddings": 4097}),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen3ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"]}),
    ],
)
def test_a_sliding_window_in_use_is_refused_by_its_value(architecture: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"sliding_window {changes.get('sliding_window', 4096)} is below"):
        ModelSpec.from_config(tiny_config(architecture, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"architectures": None, "model_type": "t5"}, "names no known architecture"),
        ({"architectures": "LlamaForCausalLM"}, "names no known architecture"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights are not supported .*'awq'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"per layer type \(full_attention\)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelSpec.from_config(tiny_config(**changes))


def test_the_note_that_weights_came_from_gguf_is_not_taken_for_quantisation() -> None:
    config = tiny_config()
    assert ModelSpec.from_config({**config, "quantization_config": {"quant_method": "gguf"}}) == ModelSpec.from_config(
        config
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size must be a positive whole number, got None"),
        ({"hidden_size": 0}, "hidden_size must be a positive whole number, got 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive whole number, got 2.0"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers 10001 is above 10000"),
        ({"intermediate_size": True}, "intermediate_size must be a positive whole number, got True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 34}, "hidden_size 34 is not a multiple of num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number, got None"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, got '1e-5'"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number, got -1.0"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "factor must be a positive number, got None"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelSpec.from_config(tiny_config(**changes))


@given(st.sampled_from(ARCHITECTURES), st.data(), json_values)
def test_any_value_in_any_field_is_read_or_refused(architecture: str, data: st.DataObject, value: object) -> None:
    config = ModelSpec.from_config(tiny_config(architecture)).to_config()
    extra = ["quantization_config", "partial_rotary_factor", "layer_types", "max_window_layers"]
    key = data.draw(st.sampled_from([*config, *extra]))
    with contextlib.suppress(CheckpointError):
        spec = ModelSpec.from_config({**config, key: value})
        assert ModelSpec.from_config(spec.to_config()) == spec
