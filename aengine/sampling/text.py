"""Text from token ids, piece by piece, never half a character."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from attrs import Factory, define

__all__ = ["Detokenizer", "TextDecoder", "decode_all"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 4
"""Tokens that are decoded again before the new ones: more than part of a character has bytes, so that a decoder that
starts inside of one is back at a border before the new ones begin."""
WINDOW = 4 * CONTEXT


class TextDecoder(Protocol):
    """What is needed of a tokenizer (`model.tokenizer.Tokenizer`)."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out: it is special, or stands for no text."""

    def byte_of(self, token_id: int) -> int | None:
        """The byte that the token stands for where a vocabulary spells rare characters in bytes ("<0xE2>")."""


@define(eq=False)
class Detokenizer:
    """Decodes output ids as they come; the joined pieces are the text of the output.

    That is the decoding of all ids of the output, and of nothing else: where a prompt ends inside a character, the
    output's text begins with U+FFFD for the bytes that are left, and never repeats the prompt.

    What a token adds is the difference of two decodings of a short window, as in vLLM's and TGI's incremental
    detokenisers. A piece that ends in U+FFFD keeps that one back: it may be the beginning of a character, and a decoder
    shows any such beginning as one. Each token is decoded a bounded number of times, whatever bytes there are.

    Tokens that are single bytes are put together here. A run of them that is not UTF-8 gives one U+FFFD a byte, as in
    `tokenizers`, which however also takes back characters that were complete before the run went wrong; what has been
    given out here stays.
    """

    _decoder: TextDecoder
    _window: list[int] = Factory(list)
    _num_given: int = 0
    """Characters of the window's text that were given out."""
    _is_in_run: bool = False
    _is_run_bad: bool = False
    _pending: bytearray = Factory(bytearray)
    """Bytes of the run that were not given out: the beginning of a character."""

    def feed(self, token_ids: Iterable[int], *, last: bool = False) -> str:
        """The text that `token_ids` complete; with `last`, all that was held back as well."""
        pieces = [self._feed_one(token) for token in token_ids if not self._decoder.is_silent(token)]
        if last:
            pieces += [self._end_run(), self._take(self._decoder.decode(self._window))]
        return "".join(pieces)

    def _feed_one(self, token_id: int) -> str:
        byte = self._decoder.byte_of(token_id)
        piece = self._end_run() if byte is None else self._begin_run()
        self._window.append(token_id)
        if byte is None:
            piece += self._take(self._decoder.decode(self._window).removesuffix(REPLACEMENT))
        else:
            piece += self._read_byte(byte)
        if len(self._window) >= WINDOW:
            self._shorten()
        return piece

    def _take(self, text: str) -> str:
        """What of the window's text was not given out."""
        piece = text[self._num_given :]
        self._num_given += len(piece)
        return piece

    def _shorten(self) -> None:
        """Go on with the last few tokens of the window, unless they have no text to tell where a text begins."""
        window = self._window[-CONTEXT:]
        if text := self._decoder.decode(window):
            self._window, self._num_given = window, len(text.removesuffix(REPLACEMENT))

    def _begin_run(self) -> str:
        piece = "" if self._is_in_run else self._take(self._decoder.decode(self._window))
        self._is_in_run = True
        return piece

    def _read_byte(self, byte: int) -> str:
        self._pending.append(byte)
        if not self._is_run_bad:
            try:
                text = self._pending.decode()
            except UnicodeDecodeError as error:
                if error.end == len(self._pending) and error.reason == "unexpected end of data":
                    return ""
                self._is_run_bad = True
            else:
                self._pending.clear()
                return text
        return self._replace_pending()

    def _replace_pending(self) -> str:
        text = REPLACEMENT * len(self._pending)
        self._pending.clear()
        return text

    def _end_run(self) -> str:
        if not self._is_in_run:
            return ""
        self._is_in_run = self._is_run_bad = False
        self._num_given = len(self._decoder.decode(self._window))
        return self._replace_pending()


def decode_all(decoder: TextDecoder, token_ids: Sequence[int]) -> str:
    """The text of an output: what a `Detokenizer` gives for it."""
    if any(decoder.byte_of(token) is not None for token in token_ids):
        return Detokenizer(decoder).feed(token_ids, last=True)
    return decoder.decode(token_ids)
