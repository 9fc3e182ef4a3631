"""The questions of the demo, shipped with the package."""

from __future__ import annotations

from importlib.resources import files

import msgspec

from aengine.model.tokenizer import Tokenizer

__all__ = ["Question", "Questions", "load_questions"]


class Question(msgspec.Struct, frozen=True):
    """`answers` are the words of which one must be named."""

    question: str
    answers: tuple[str, ...]

    def prompt(self, tokenizer: Tokenizer, system: str) -> list[int]:
        """Token ids of the chat up to where the model answers. Raises `PromptError` without a chat template."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": self.question}]
        return tokenizer.apply_chat_template(messages)


class Questions(msgspec.Struct, frozen=True):
    system: str
    train: tuple[Question, ...]
    held_out: tuple[Question, ...]


def load_questions() -> Questions:
    return msgspec.json.decode(files("aengine.demo").joinpath("questions.json").read_bytes(), type=Questions)
