"""Stop strings: the text of a sample up to the first of them, and what of it can be given out already."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from aengine.sampling.text import Detokenizer, TextDecoder

__all__ = ["StopText"]


@define(eq=False)
class _Pattern:
    """Counts how many characters of `text`'s beginning the stream ends with (Knuth, Morris and Pratt 1977)."""

    text: str
    fallbacks: list[int] = field(init=False)
    """For each count, that of the next shorter beginning with which such a stream ends."""
    count: int = 0

    def __attrs_post_init__(self) -> None:
        self.fallbacks = [0, 0]
        for char in self.text[1:]:
            self.fallbacks.append(self._next(self.fallbacks[-1], char))

    def read(self, char: str) -> bool:
        """Whether `char` completes the text."""
        if self.count == len(self.text):
            self.count = self.fallbacks[-1]
        self.count = self._next(self.count, char)
        return self.count == len(self.text)

    def _next(self, count: int, char: str) -> int:
        while count and self.text[count] != char:
            count = self.fallbacks[count]
        return count + (self.text[count] == char)

    @property
    def num_held(self) -> int:
        """Characters that could still become a match."""
        return self.fallbacks[-1] if self.count == len(self.text) else self.count


@define(eq=False)
class StopText:
    """Text of one sample with `stop` strings, read token by token.

    The match is the one that is complete first in the text; of those that end with the same character, the longest. So
    it does not depend on how the text is cut into tokens. `pieces` holds the text before the match as it becomes
    certain: only what could still become a stop string is held back, until `close`.
    """

    _detokenizer: Detokenizer
    _patterns: list[_Pattern]
    _held: str = ""
    pieces: list[str] = field(factory=list)
    matched: str | None = None
    is_closed: bool = False

    @classmethod
    def of(cls, decoder: TextDecoder, stop: Sequence[str]) -> StopText:
        return cls(Detokenizer(decoder), [_Pattern(text) for text in stop])

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def feed(self, token_id: int, *, may_match: bool = True) -> str | None:
        """The stop string that the token completes, if any. `may_match=False` passes over it, for `min_tokens`."""
        text = self._held + self._detokenizer.feed([token_id])
        for place in range(len(self._held), len(text)):
            complete = [pattern.text for pattern in self._patterns if pattern.read(text[place])]
            if complete and may_match:
                self.matched = max(complete, key=len)
                self._give(text[: place + 1 - len(self.matched)], held="")
                return self.matched
        certain = len(text) - max(pattern.num_held for pattern in self._patterns)
        self._give(text[:certain], text[certain:])
        return None

    def close(self) -> None:
        """The sample has ended: without a match, what was held back is text after all."""
        if not self.is_closed and self.matched is None:
            self._give(self._held + self._detokenizer.feed((), last=True), held="")
        self.is_closed = True

    def _give(self, piece: str, held: str) -> None:
        self._held = held
        if piece:
            self.pieces.append(piece)
