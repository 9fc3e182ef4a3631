"""SmolLM2 as read from its GGUF file is what transformers reads from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from aengine.model.checkpoint import Checkpoint, checkpoint_from_module, load_checkpoint, save_checkpoint
from aengine.model.known import get_model
from aengine.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = [
    "",
    " ",
    "The capital of France is Paris.",
    "I'll say 1234567890 and 3.14159, or 10,000 + 7.",
    "  leading, trailing  and   inner spaces   ",
    "line\n\n\nline\r\n\ttab\t\ttabs\n",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)  # O(φⁿ)\n",
    "😀 👩‍👩‍👧‍👦 🇫🇷 e\N{COMBINING ACUTE ACCENT} naïve Straße 日本語 Привет مرحبا",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "don't DON'T we've it's",
    '{"a": [1, 22, 333], "b": null}',
    "\x00\x7f\N{REPLACEMENT CHARACTER}\N{ZERO WIDTH SPACE}",
]
CHATS = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\nthere 😀"}],
    [
        {"role": "user", "content": "Name a color."},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Another, <b>please</b>."},
    ],
]


@pytest.fixture(scope="module")
def path() -> Path:
    return get_model("smollm2-135m")


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> Checkpoint:
    return load_checkpoint("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    assert checkpoint.tokenizer is not None
    return checkpoint.tokenizer


@pytest.fixture(scope="module")
def their_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def their_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Its rebuild forgets that SmolLM2 cuts numbers into digits, which shows on digits outside ASCII."""
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return theirs


def test_tensors_are_equal_bit_for_bit(checkpoint: Checkpoint, their_model: PreTrainedModel) -> None:
    state = their_model.state_dict()
    assert state.keys() - checkpoint.tensors.keys() == {"lm_head.weight"}
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, state[name]), name


def test_the_spec_is_theirs_but_for_the_eps_they_keep_in_32_bits(
    checkpoint: Checkpoint, their_model: PreTrainedModel
) -> None:
    assert checkpoint.spec.rms_norm_eps == 1e-5 != their_model.config.rms_norm_eps
    their_model.config.rms_norm_eps = 1e-5
    theirs = checkpoint_from_module(their_model)
    assert theirs.spec == checkpoint.spec
    assert theirs.eos_token_ids == checkpoint.eos_token_ids == (2,)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_same_ids_and_comes_back(
    text: str, tokenizer: Tokenizer, their_tokenizer: PreTrainedTokenizerFast
) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids == their_tokenizer(text).input_ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert tokenizer.decode(token_ids) == their_tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_chat_is_rendered_to_the_same_text_and_ids(
    chat: list[dict[str, str]],
    add_generation_prompt: bool,
    tokenizer: Tokenizer,
    their_tokenizer: PreTrainedTokenizerFast,
) -> None:
    rendered = their_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert tokenizer.render_chat(chat, add_generation_prompt) == rendered
    token_ids = their_tokenizer.apply_chat_template(
        chat, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert tokenizer.apply_chat_template(chat, add_generation_prompt) == token_ids


def test_saved_it_is_loaded_back_and_by_transformers(
    checkpoint: Checkpoint, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_checkpoint(checkpoint, tmp_path)
    again = load_checkpoint(tmp_path)
    assert (again.spec, again.eos_token_ids) == (checkpoint.spec, checkpoint.eos_token_ids)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.rms_norm_eps == 1e-5
    state = theirs.state_dict()
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, again.tensors[name]), name
        assert torch.equal(tensor, state[name]), name
    their_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert [their_tokenizer(text).input_ids for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert their_tokenizer.apply_chat_template(CHATS[0], add_generation_prompt=True, return_dict=False) == (
        tokenizer.apply_chat_template(CHATS[0])
    )
