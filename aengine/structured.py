"""Structured output: token masks from a JSON schema, a regular expression or a grammar, by llguidance (an extra)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from aengine.errors import GrammarError
from aengine.model.tokenizer import Tokenizer

__all__ = ["Grammar", "Grammars"]


class Grammars:
    """Makes token masks for one tokenizer: `await engine.generate(..., token_mask=grammars.regex("yes|no"))`.

    Making it reads the whole vocabulary, which takes up to a second; make it once. `eos_token_ids` end a text that is
    complete; default are those of the tokenizer. Raises `GrammarError` if llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, *, eos_token_ids: Sequence[int] | None = None) -> None:
        self._library = _llguidance()
        eos = list(tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids)
        if not eos:
            raise GrammarError("a grammar needs an EOS to end its texts with, and the tokenizer has none")
        self._tokenizer = self._library.LLTokenizer(tokenizer.backend.to_str(), eos_token=eos)

    def json_schema(self, schema: Mapping[str, Any] | str) -> Grammar:
        """Texts that are JSON of this schema. Raises `GrammarError`, here and below, for what cannot be enforced."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            return self._compile(self._library.LLMatcher.grammar_from_json_schema(text))
        except ValueError as error:
            raise GrammarError(f"not a JSON schema: {error}") from error

    def regex(self, pattern: str) -> Grammar:
        """Texts that match the whole pattern (Rust's syntax, without look-around)."""
        return self._compile(self._library.LLMatcher.grammar_from_regex(pattern))

    def lark(self, grammar: str) -> Grammar:
        """Texts of a context-free grammar, in llguidance's variant of Lark's notation."""
        return self._compile(self._library.LLMatcher.grammar_from_lark(grammar))

    def _compile(self, grammar: str) -> Grammar:
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return Grammar(matcher, self._tokenizer.vocab_size)


@define(eq=False)
class Grammar:
    """A compiled grammar: the token mask source of any number of requests."""

    _matcher: Any = field(repr=False)
    _vocab_size: int

    def start(self) -> GrammarMask:
        return GrammarMask(self._matcher.deep_copy(), self._vocab_size)


@define(eq=False)
class GrammarMask:
    """Where one sample is in the grammar."""

    _matcher: Any = field(repr=False)
    _vocab_size: int
    _num_read: int = 0

    def next_mask(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Raises `GrammarError` for an output that the grammar does not allow, or one too complex to follow."""
        fresh = list(output_ids[self._num_read :])
        if not self._matcher.consume_tokens(fresh):
            raise GrammarError(self._matcher.get_error())
        self._num_read += len(fresh)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GrammarError('structured output needs llguidance: install the extra "structured"') from error
    return llguidance
