"""Prompts as they come in: text or token ids, checked before anything of them reaches the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from aengine.errors import PromptError, TokenizerMissingError
from aengine.validate import as_integer

if TYPE_CHECKING:
    from aengine.model.tokenizer import Tokenizer

__all__ = ["Prompt", "PromptReader"]

Prompt = str | Sequence[int]


@frozen
class PromptReader:
    """Turns prompts into token ids, or says in one sentence why a prompt cannot be served.

    `max_model_len` bounds prompt and new tokens together; `capacity` is the number of tokens whose KV fits the pool.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    capacity: int

    def read(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of `prompt`. Raises `PromptError`, or `TokenizerMissingError` for text without a tokenizer."""
        token_ids = self._encode(prompt) if isinstance(prompt, str) else self._check_ids(prompt)
        if not token_ids:
            raise PromptError("the prompt is empty")
        if len(token_ids) >= self.max_model_len:
            raise PromptError(
                f"the prompt has {len(token_ids)} tokens; with one new token that is over max_model_len "
                f"({self.max_model_len})"
            )
        if len(token_ids) > self.capacity:
            raise PromptError(f"the prompt needs KV for {len(token_ids)} tokens; the page pool holds {self.capacity}")
        return token_ids

    def read_response(self, prompt: Sequence[int], token_ids: Sequence[int]) -> tuple[int, ...]:
        """Ids of a response to `prompt`. Raises `PromptError` for one that is empty or longer than could be sampled."""
        response, room = self._check_ids(token_ids, "response"), self.max_new_tokens(prompt)
        if not 0 < len(response) <= room:
            raise PromptError(f"the response has {len(response)} tokens; after this prompt there can be 1 to {room}")
        return response

    def max_new_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens a sample of this prompt may have. The one sampled last needs no KV, so a sequence may be one
        longer than what the pool holds."""
        return min(self.max_model_len, self.capacity + 1) - len(token_ids)

    def _encode(self, text: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise TokenizerMissingError("the prompt is text, and the model has no tokenizer; give token ids")
        return tuple(self.tokenizer.encode(text))

    def _check_ids(self, prompt: Iterable[int], what: str = "prompt") -> tuple[int, ...]:
        values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(values, Sequence):
            raise PromptError(f"a {what} is text or a sequence of token ids, not {type(prompt).__name__}")
        token_ids = [as_integer(token) for token in values]
        for position, token in enumerate(token_ids):
            if token is None:
                raise PromptError(f"{what} position {position} holds {values[position]!r}, which is not a token id")
            if not 0 <= token < self.vocab_size:
                raise PromptError(
                    f"{what} position {position} holds token id {token}; the vocabulary has ids 0 to "
                    f"{self.vocab_size - 1}"
                )
        return tuple(token for token in token_ids if token is not None)
