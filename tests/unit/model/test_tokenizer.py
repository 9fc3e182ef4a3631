"""Text becomes ids and comes back; chats are rendered as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading_support import CORPUS, TEMPLATE, tiny_backend, tiny_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from aengine.errors import CheckpointError, PromptError
from aengine.model.tokenizer import Tokenizer

TOKENIZER = tiny_tokenizer()
USER = {"role": "user", "content": "hello <b>&</b> 'world'"}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_undoes_encoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_whole_in_a_text_and_skipped_in_decoding() -> None:
    token_ids = TOKENIZER.encode("<|im_start|>the<|im_end|>")
    assert (token_ids[0], token_ids[-1]) == (1, 2)
    assert TOKENIZER.decode(token_ids) == "the"
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(PromptError, match=r"not a text of valid Unicode: 'hello \\ud83d'"):
        TOKENIZER.encode("hello \ud83d")


def test_half_a_character_is_decoded_to_a_replacement_mark() -> None:
    token_ids = TOKENIZER.encode("é")
    assert len(token_ids) == 2
    assert TOKENIZER.decode(token_ids[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_ids_of_a_padded_vocabulary_decode_to_nothing() -> None:
    token_ids = TOKENIZER.encode("the")
    assert TOKENIZER.decode([*token_ids, TOKENIZER.vocab_size + 5]) == "the"


def test_a_leading_bos_is_added_only_when_asked() -> None:
    backend = tiny_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer = tiny_tokenizer(backend=backend)
    plain = TOKENIZER.encode("the cat")
    assert tokenizer.encode("the cat") == [1, *plain]
    assert tokenizer.encode("the cat", add_special_tokens=False) == plain
    assert tokenizer.apply_chat_template([USER]).count(1) == 2


def test_a_saved_tokenizer_comes_back_whole(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    assert again.chat_template == TEMPLATE
    assert (again.special_tokens, again.eos_token_ids) == (TOKENIZER.special_tokens, (2,))
    assert again.vocab_size == TOKENIZER.vocab_size
    assert [again.encode(text) for text in CORPUS] == [TOKENIZER.encode(text) for text in CORPUS]


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tiny_backend(), eos_token="<|im_end|>", bos_token="<|im_start|>", chat_template=TEMPLATE
    )
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert ours.eos_token_ids == (2,)
    for text in CORPUS:
        assert ours.encode(text) == theirs(text).input_ids
    for add_generation_prompt in (False, True):
        rendered = theirs.apply_chat_template([USER], tokenize=False, add_generation_prompt=add_generation_prompt)
        assert ours.render_chat([USER], add_generation_prompt) == rendered


@pytest.mark.parametrize(
    ("entry", "file", "expected"),
    [
        (None, None, None),
        ("entry", None, "entry"),
        ("entry", "file", "file"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], None, "d"),
        ([{"name": "tool_use", "template": "t"}], None, None),
        (["default", {"template": "t"}], None, None),
        (5, None, None),
    ],
)
def test_the_template_is_found_in_either_place(
    entry: Any, file: str | None, expected: str | None, tmp_path: Path
) -> None:
    tiny_tokenizer(chat_template=None).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    assert Tokenizer.from_directory(tmp_path).chat_template == expected


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_a_special_token_may_be_text_or_an_object(eos: Any, tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "unk_token": None}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.special_tokens, tokenizer.eos_token_ids) == ({"eos_token": "<|im_end|>"}, (2,))


def test_an_eos_token_outside_the_vocabulary_is_no_eos(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == ()


def test_settings_of_a_batch_left_in_the_file_do_not_cut_or_pad_prompts(tmp_path: Path) -> None:
    backend = tiny_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tiny_tokenizer(backend=backend).save(tmp_path)
    assert Tokenizer.from_directory(tmp_path).encode(CORPUS[0]) == TOKENIZER.encode(CORPUS[0])


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Magic"}}'])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing or not a tokenizer file"):
        Tokenizer.from_directory(tmp_path)


def test_a_template_that_is_not_text_is_named(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_without_a_template_a_chat_is_refused() -> None:
    with pytest.raises(PromptError, match="the model has no chat template"):
        tiny_tokenizer(chat_template=None).apply_chat_template([USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_refuses_or_trips_says_why(template: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        tiny_tokenizer(chat_template=template).render_chat([USER])


@pytest.mark.parametrize("messages", [[5], ["user"], [{"role": "user"}]])
def test_messages_of_another_shape_are_refused(messages: list[Any]) -> None:
    with pytest.raises(PromptError, match="refuses these messages"):
        TOKENIZER.render_chat(messages)


def test_a_template_that_is_not_jinja_is_named() -> None:
    with pytest.raises(CheckpointError, match="chat template is not valid Jinja"):
        tiny_tokenizer(chat_template="{% if %}").render_chat([USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}{{ {'b': 1, 'a': 'ä'} | tojson(indent=2, sort_keys=true) }}",
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.role }}\n{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ eos_token }}",
        "{{ strftime_now('%Y') }}{{ tools is none }}{{ undefined_thing }}",
        "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ],
    ids=["json", "loop controls and blocks", "generation block", "globals", "namespace"],
)
def test_templates_render_as_in_transformers(template: str) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_backend(), eos_token="<|im_end|>", chat_template=template)
    messages = [USER, {"role": "assistant", "content": "ja"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tiny_tokenizer(chat_template=template).render_chat(messages) == rendered


def test_a_template_cannot_change_the_callers_messages() -> None:
    messages = [dict(USER)]
    with pytest.raises(PromptError):
        tiny_tokenizer(chat_template="{{ messages[0].update({'role': 'x'}) }}").render_chat(messages)
    assert messages == [USER]
