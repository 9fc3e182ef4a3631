"""Text from token ids, piece by piece, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import Factory, define

__all__ = ["Detokenizer"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character, and so the most tokens a half character can have."""


@define(eq=False)
class Detokenizer:
    """Decodes output ids as they come. The pieces joined are the decoding of all ids.

    Ids are decoded in a window that starts at a token border known to begin a character, as in vLLM's and TGI's
    incremental detokenisers: what a token adds is the difference of two decodings of the window. A piece that ends in
    a replacement character is held back, since the next token may complete it, but for no more tokens than a
    character has bytes.
    """

    _decode: Callable[[list[int]], str]
    _window: list[int] = Factory(list)
    _num_read: int = 0

    def feed(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """The text that `token_ids` complete; with `last`, all that was held back as well."""
        pieces = [self._feed_one(token) for token in token_ids]
        if last:
            pieces.append(self._take())
        return "".join(pieces)

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        held = len(self._window) - self._num_read
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and held < LONGEST_CHARACTER:
            return ""
        return self._take()

    def _take(self) -> str:
        """The text of the ids not read yet; they become the context of the next ones."""
        before = self._decode(self._window[: self._num_read])
        text = self._decode(self._window)[len(before) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return text
