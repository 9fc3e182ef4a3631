"""A tiny random model that has a tokenizer and a chat template."""

from __future__ import annotations

import tokenizers
from attrs import evolve

from aengine.model.checkpoint import Checkpoint
from aengine.model.tokenizer import Tokenizer
from aengine.testing import tiny_checkpoint

WORDS = ["<end>", "<user>", "<model>", "<unknown>", "hello", "world", "good", "night"]
TEMPLATE = (
    "{% for m in messages %}<user> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def word_tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    """One id a word; ids 0 to 7."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unknown>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(
        backend=backend, special_tokens={"eos_token": "<end>"}, eos_token_ids=(0,), chat_template=chat_template
    )


def talking_checkpoint(seed: int = 0) -> Checkpoint:
    return evolve(tiny_checkpoint(seed, eos_token_ids=(0,)), tokenizer=word_tokenizer())
