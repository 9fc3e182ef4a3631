"""Directories and modules become checkpoints with the same tensors, or one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loading_support import ARCHITECTURES, tiny_config, tiny_module, tiny_tokenizer, tokenizer_metadata, write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from aengine.errors import CheckpointError, ModelUnavailableError, UnsupportedModelError, WeightsMismatchError
from aengine.model.checkpoint import Checkpoint, checkpoint_from_module, load_checkpoint, save_checkpoint
from aengine.model.gguf_tokenizer import build_tokenizer
from aengine.model.spec import ModelSpec


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small model as transformers saves it."""
    directory = tmp_path / "tiny"
    tiny_module().save_pretrained(directory)
    return directory


def assert_same_tensors(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> None:
    assert checkpoint.tensors.keys() == checkpoint.spec.tensor_shapes().keys()
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_transformers_saves_is_loaded_bit_for_bit(
    architecture: str, is_tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    module = tiny_module(architecture, tie_word_embeddings=is_tied).to(dtype)
    module.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.spec == ModelSpec.from_config(module.config.to_dict())
    assert_same_tensors(checkpoint, module.state_dict())


def test_shards_are_put_together(tmp_path: Path) -> None:
    module = tiny_module()
    module.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_tensors(load_checkpoint(str(tmp_path)), module.state_dict())


def test_weights_under_another_file_name_are_found(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "weights.safetensors")
    assert load_checkpoint(saved).name == "tiny"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_module_is_taken_without_a_copy(architecture: str) -> None:
    module = tiny_module(architecture, tie_word_embeddings=True)
    checkpoint = checkpoint_from_module(module)
    assert_same_tensors(checkpoint, module.state_dict())
    assert checkpoint.tensors["model.norm.weight"].data_ptr() == module.model.norm.weight.data_ptr()
    assert (checkpoint.name, checkpoint.tokenizer, checkpoint.eos_token_ids) == (architecture, None, (2,))


def test_a_module_of_another_kind_is_refused() -> None:
    module: Any = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        checkpoint_from_module(module)


def test_a_base_model_without_its_head_is_refused() -> None:
    module: Any = tiny_module().model
    with pytest.raises(WeightsMismatchError, match=r"missing .*model.embed_tokens.weight"):
        checkpoint_from_module(module)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_checkpoint_is_loaded_by_us_and_by_transformers(architecture: str, tmp_path: Path) -> None:
    module = tiny_module(architecture)
    # For a Qwen2 config transformers 5 splits text as Qwen2 does, whatever tokenizer.json says.
    tokenizer = build_tokenizer(tokenizer_metadata("qwen2" if architecture == "Qwen2ForCausalLM" else "smollm"))
    assert tokenizer is not None
    checkpoint = Checkpoint(
        spec=ModelSpec.from_config(module.config.to_dict()),
        tensors=module.state_dict(),
        tokenizer=tokenizer,
        eos_token_ids=(2, 0),
        name="tiny",
    )
    save_checkpoint(checkpoint, tmp_path / "a" / "b")
    again = load_checkpoint(tmp_path / "a" / "b")
    assert (again.spec, again.eos_token_ids) == (checkpoint.spec, (2, 0))
    assert_same_tensors(again, module.state_dict())

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "b")
    token_ids = torch.tensor([[1, 5, 9, 200]])
    assert torch.equal(loaded(token_ids).logits, module(token_ids).logits)
    assert loaded.generation_config.eos_token_id == [2, 0]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "a" / "b")
    messages = [{"role": "user", "content": "hello 1234"}]
    assert theirs.eos_token == "<|im_end|>"
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == (
        tokenizer.apply_chat_template(messages)
    )
    assert again.tokenizer is not None
    assert again.tokenizer.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)


def test_views_of_one_tensor_can_be_saved(tmp_path: Path) -> None:
    spec = ModelSpec.from_config(tiny_config())
    storage = torch.randn(320 * 48)
    tensors = {name: storage[: torch.Size(shape).numel()].view(shape) for name, shape in spec.tensor_shapes().items()}
    checkpoint = Checkpoint(spec=spec, tensors=tensors, tokenizer=None, eos_token_ids=(), name="views")
    save_checkpoint(checkpoint, tmp_path)
    assert_same_tensors(load_checkpoint(tmp_path), tensors)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpoint = checkpoint_from_module(tiny_module())
    with pytest.raises(CheckpointError, match="file/inside cannot be written"):
        save_checkpoint(checkpoint, tmp_path / "file" / "inside")


def test_a_failed_save_leaves_no_part_of_the_weights(saved: Path) -> None:
    (saved / "config.json").unlink()
    (saved / "config.json").mkdir()
    before = (saved / "model.safetensors").stat().st_size
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(checkpoint_from_module(tiny_module()), saved)
    assert [path.name for path in saved.glob("*.part")] == []
    assert (saved / "model.safetensors").stat().st_size == before


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 2]}, 2, (7, 2)),
        ({"eos_token_id": 7}, [2, 9], (7, 2, 9)),
        ({}, None, ()),
        ({"eos_token_id": 151645}, 2, (2,)),
    ],
)
def test_eos_ids_are_gathered_in_order_and_kept_to_the_vocabulary(
    saved: Path, generation: dict[str, Any], config: Any, expected: tuple[int, ...]
) -> None:
    rewrite(saved / "generation_config.json", generation)
    rewrite(saved / "config.json", tiny_config(eos_token_id=config))
    assert load_checkpoint(saved).eos_token_ids == expected


def test_the_tokenizers_eos_is_one_of_the_models(saved: Path) -> None:
    tiny_tokenizer(special_tokens={"eos_token": "<|endoftext|>"}).save(saved)
    assert load_checkpoint(saved).eos_token_ids == (2, 0)


@pytest.mark.parametrize("value", ["</s>", [2, "x"], True])
def test_an_eos_id_that_is_none_is_refused(saved: Path, value: Any) -> None:
    rewrite(saved / "config.json", tiny_config(eos_token_id=value))
    with pytest.raises(CheckpointError, match="eos_token_id must be"):
        load_checkpoint(saved)


def test_a_path_that_is_not_there_is_named_with_the_known_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere' is neither a directory.*smollm2-135m"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"models/absent.gguf' is neither"):
        load_checkpoint("models/absent.gguf")


def test_another_kind_of_file_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a .gguf file"):
        load_checkpoint(saved / "model.safetensors")


def test_a_known_model_that_is_not_cached_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENGINE_CACHE", str(tmp_path))
    with pytest.raises(ModelUnavailableError, match="run: aengine models get smollm2-135m"):
        load_checkpoint("smollm2-135m")


def test_a_directory_without_config_is_refused(saved: Path) -> None:
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tiny has no config\.json"):
        load_checkpoint(saved)


def test_a_directory_without_weights_is_refused(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"tiny has no \*\.safetensors file"):
        load_checkpoint(saved)


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object")])
def test_a_damaged_config_is_refused(saved: Path, content: str, message: str) -> None:
    (saved / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved)


def test_an_unsupported_architecture_is_refused_before_its_weights_are_read(saved: Path) -> None:
    rewrite(saved / "config.json", {"architectures": ["GPT2LMHeadModel"]})
    (saved / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, r"expected \[320, 64\], got \[320, 32\]"),
        ({"num_hidden_layers": 3}, r"missing \(9\): model.layers.2"),
        ({"num_hidden_layers": 1}, r"unexpected \(9\): model.layers.1"),
        ({"num_key_value_heads": 4}, r"k_proj.weight: expected \[32, 32\], got \[16, 32\]"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"missing \(6\): model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_config_that_disagrees_with_the_weights_is_refused(
    saved: Path, changes: dict[str, Any], message: str
) -> None:
    rewrite(saved / "config.json", tiny_config(**changes))
    with pytest.raises(WeightsMismatchError, match=message):
        load_checkpoint(saved)


@pytest.mark.parametrize("length", [0, 4, 8, 100, 2000, 9000, -1])
def test_a_truncated_weights_file_is_named(saved: Path, length: int) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated or not a safetensors file") as caught:
        load_checkpoint(saved)
    assert caught.value.__cause__ is not None


def test_a_weights_file_of_noise_is_named(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {"a": "model-00002-of-00002.safetensors"}},
            "names the file 'model-00002-of-00002.safetensors'",
        ),
        ({"weight_map": {"a": "../other.safetensors"}}, r"names the file '\.\./other.safetensors'"),
        ({"weight_map": {}}, "has no weight_map"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(saved: Path, index: dict[str, Any], message: str) -> None:
    (saved / "model.safetensors").rename(saved.parent / "other.safetensors")
    rewrite(saved / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved)


def test_a_tensor_in_two_files_is_refused(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").rename(saved / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"].clone()}, saved / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"repeats the tensor 'model.norm.weight'"):
        load_checkpoint(saved)


def test_a_damaged_tokenizer_is_refused(saved: Path) -> None:
    (saved / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing or not a tokenizer file"):
        load_checkpoint(saved)


def test_a_gguf_file_is_named_by_its_stem(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.Q8.gguf", tiny_module())
    checkpoint = load_checkpoint(path)
    assert (checkpoint.name, checkpoint.eos_token_ids) == ("tiny.Q8", (2,))


def rewrite(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))
