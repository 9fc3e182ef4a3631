"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from attrs import field, frozen
from jinja2 import Template

from aengine.errors import CheckpointError, PromptError
from aengine.model.chat_template import compile_template, render_template
from aengine.model.tensor_files import read_json

__all__ = ["Tokenizer"]

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@frozen(eq=False, kw_only=True)
class Tokenizer:
    """A tokenizer with its chat template.

    `special_tokens` maps names as in `tokenizer_config.json` (`bos_token`, …) to their text. `eos_token_ids` are the
    ids that end a text for the tokenizer; a checkpoint may know more.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | None = field(default=None, repr=False)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read `tokenizer.json` and, where there are, `tokenizer_config.json` and `chat_template.jinja`.

        Raises `CheckpointError` when a file is missing or damaged.
        """
        directory = Path(directory)
        backend = read_backend(directory / TOKENIZER_FILE)
        config_path = directory / TOKENIZER_CONFIG_FILE
        config = read_json(config_path) if config_path.is_file() else {}
        special_tokens = read_special_tokens(config)
        eos_token_id = backend.token_to_id(special_tokens.get("eos_token", ""))
        return cls(
            backend=backend,
            special_tokens=special_tokens,
            eos_token_ids=() if eos_token_id is None else (eos_token_id,),
            chat_template=read_chat_template(directory / CHAT_TEMPLATE_FILE, config),
        )

    @property
    def vocab_size(self) -> int:
        """The number of tokens with a text; a model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` means those the tokenizer puts around every text, such as a leading BOS.

        Special tokens written out in the text become their ids either way. Raises `PromptError` for a text with half
        a surrogate pair, which has no UTF-8.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise PromptError(f"not a text of valid Unicode: {text[:40]!r}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids without a text (a padded vocabulary has some) give nothing; half a UTF-8 character gives U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out: it is special, or an id without a text."""
        return token_id in self._special_ids or self.backend.id_to_token(token_id) is None

    def byte_of(self, token_id: int) -> int | None:
        """The byte that the token stands for, in a vocabulary that spells rare characters in bytes ("<0xE2>")."""
        return self._byte_ids.get(token_id)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(
            token_id for token_id, token in self.backend.get_added_tokens_decoder().items() if token.special
        )

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        if "ByteFallback" not in str(json.loads(self.backend.to_str())["decoder"]):
            return {}
        ids = {self.backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {token_id: byte for token_id, byte in ids.items() if token_id is not None}

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of `render_chat`; special tokens are those the template writes, no others."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Raises `PromptError` when there is no chat template or it refuses the messages."""
        if self.compiled_template is None:
            raise PromptError("the model has no chat template; give a text or token ids instead of messages")
        return render_template(
            self.compiled_template, messages, self.special_tokens, add_generation_prompt=add_generation_prompt
        )

    @cached_property
    def compiled_template(self) -> Template | None:
        return None if self.chat_template is None else compile_template(self.chat_template)

    def save(self, directory: Path) -> None:
        """Write the three files `from_directory` and transformers read."""
        config = {
            **self.special_tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        (directory / TOKENIZER_FILE).write_text(self.backend.to_str(), encoding="utf-8")
        (directory / TOKENIZER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self.chat_template is None:
            (directory / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
        else:
            (directory / CHAT_TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")


def read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is missing or not a tokenizer file: {error}") from error
    # A file may carry the settings of its last batch, which would cut or pad every prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Each is given as its text or as an object with the text in `content`."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def read_chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the entry in `tokenizer_config.json`, which may be a list of named templates."""
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    entry = config.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None
