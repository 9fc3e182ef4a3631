"""The tokenizer of a GGUF file splits, adds and skips tokens as the model it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading_support import tiny_backend, tiny_module, tokenizer_metadata, write_gguf
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from aengine.model.gguf_tokenizer import PRE_TOKENIZER_KINDS, build_tokenizer
from aengine.model.tokenizer import Tokenizer


def build(pre: str = "smollm", **changes: Any) -> Tokenizer:
    tokenizer = build_tokenizer(tokenizer_metadata(pre, **changes))
    assert tokenizer is not None
    return tokenizer


def words(pre: str, text: str) -> list[str]:
    """The pieces the pre-tokenizer cuts a text into, spaces shown as they are."""
    pre_tokenizer = build(pre).backend.pre_tokenizer
    assert pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]


BUILT = {pre: build(pre, add_bos_token=False) for pre in PRE_TOKENIZER_KINDS}


@given(st.sampled_from(["default", "gpt-2", "llama-bpe", "smollm"]), st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_undoes_encoding(pre: str, text: str) -> None:
    assert BUILT[pre].decode(BUILT[pre].encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " see", " 12345", "!!", "\n\n ", " X"]),
        ("default", ["I", "'ll", " see", " 12345", "!!", "\n\n ", " X"]),
        ("smollm", ["I", "'ll", " see", " ", "1", "2", "3", "4", "5", "!!", "\n\n ", " X"]),
        ("llama-bpe", ["I", "'ll", " see", " ", "123", "45", "!!\n\n", " ", " X"]),
        ("qwen2", ["I", "'ll", " see", " ", "1", "2", "3", "4", "5", "!!\n\n", " ", " X"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_model(pre: str, expected: list[str]) -> None:
    assert words(pre, "I'll see 12345!!\n\n  X") == expected


def test_gpt2_ids_are_those_of_the_tokenizer_the_file_was_made_from() -> None:
    backend = tiny_backend()
    for text in ["hello world", "the 1234 cats", "def f(x):\n\n", "<|im_start|>ß😀<|im_end|>"]:
        assert build("gpt-2").encode(text) == backend.encode(text).ids


@pytest.mark.parametrize(("pre", "architecture"), [("llama-bpe", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM")])
def test_ids_are_those_of_transformers_for_the_same_file(pre: str, architecture: str, tmp_path: Path) -> None:
    metadata = tokenizer_metadata(pre, add_bos_token=False)
    write_gguf(tmp_path / "tiny.gguf", tiny_module(architecture), metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    ours = build(pre, add_bos_token=False)
    for text in ["I'll see 12345!!\n\n  X", "the cat sat 99 99", "é😀 ß\t\tthen", "<|im_start|>the<|im_end|>\n"]:
        assert ours.encode(text) == theirs(text).input_ids


def test_smollm_digits_are_cut_whatever_merges_there_are() -> None:
    backend = tiny_backend()
    text = "1234 99"
    assert len(backend.encode(text).ids) < len(build("smollm").encode(text)) == len(text)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert build("smollm").encode(text) == backend.encode(text).ids


def test_qwen2_composes_characters_first() -> None:
    assert build("qwen2").encode("e\N{COMBINING ACUTE ACCENT}") == build("qwen2").encode("é")


def test_llama_takes_a_word_that_is_a_token_whole() -> None:
    metadata = tokenizer_metadata("llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("zqx")
    metadata["tokenizer.ggml.token_type"].append(1)
    tokenizer = build_tokenizer(metadata)
    assert tokenizer is not None
    assert tokenizer.encode("zqx") == [len(metadata["tokenizer.ggml.tokens"]) - 1]


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "has_bos"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_as_the_file_says_or_its_kind_is_used_to(
    pre: str, add_bos_token: bool | None, has_bos: bool
) -> None:
    changes = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    tokenizer = build(pre, **changes)
    assert (tokenizer.encode("the")[0] == 1) == has_bos
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 1


def test_user_defined_tokens_are_matched_whole_and_not_skipped() -> None:
    metadata = tokenizer_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens.append("<tool call>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = build_tokenizer(metadata)
    assert tokenizer is not None
    token_ids = tokenizer.encode("the<tool call>the")
    assert len(tokens) - 1 in token_ids
    assert tokenizer.decode(token_ids) == "the<tool call>the"


def test_special_tokens_and_every_kind_of_end_are_read() -> None:
    tokenizer = build(eot_token_id=0, padding_token_id=2)
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    }
    assert tokenizer.eos_token_ids == (2, 0)


def test_ids_stay_those_of_the_file() -> None:
    tokens = tokenizer_metadata()["tokenizer.ggml.tokens"]
    backend = build().backend
    assert [backend.token_to_id(token) for token in tokens] == list(range(len(tokens)))
    assert build().vocab_size == len(tokens)


def test_a_chat_is_rendered_from_the_template_in_the_file() -> None:
    token_ids = build().apply_chat_template([{"role": "user", "content": "the"}])
    assert build().decode(token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    )
