"""Text piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_tokenizers import PIECES, byte_level, metaspace

from aengine.model.tokenizer import Tokenizer
from aengine.sampling.text import REPLACEMENT, Detokenizer, decode_all

BYTE_LEVEL = byte_level("hello", " world", "日本", "x" + "é")
METASPACE = metaspace(with_bytes=False)
WITH_BYTES = metaspace(with_bytes=True)
EMOJI = list("😀".encode())
END = BYTE_LEVEL.eos_token_ids[0]
NO_TOKEN = 9999

some_bytes = st.sampled_from([*EMOJI, 0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xFF, 0x80, ord("a")])


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed([token]) for token in token_ids), detokenizer.feed((), last=True)]


class Counting:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.count = tokenizer, 0
        self.is_silent, self.byte_of = tokenizer.is_silent, tokenizer.byte_of

    def decode(self, token_ids: list[int]) -> str:
        self.count += len(token_ids)
        return self._tokenizer.decode(token_ids)


@given(st.lists(some_bytes | st.integers(0, 255 + 4) | st.sampled_from([END, NO_TOKEN]), max_size=60))
def test_joined_pieces_are_the_decoding_of_all_ids_on_byte_level(token_ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids) == decode_all(BYTE_LEVEL, token_ids)


@given(st.lists(st.integers(0, len(PIECES)) | st.just(NO_TOKEN), max_size=60))
def test_joined_pieces_are_the_decoding_of_all_ids_with_metaspace(token_ids: list[int]) -> None:
    assert "".join(pieces(METASPACE, token_ids)) == METASPACE.decode(token_ids) == decode_all(METASPACE, token_ids)


words = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=4)
runs = st.text(min_size=1, max_size=4).map(str.encode) | st.binary(min_size=1, max_size=6).filter(
    lambda run: all(not is_utf8(run[:end]) for end in range(1, len(run) + 1))
)


def is_utf8(run: bytes) -> bool:
    try:
        run.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.lists(st.tuples(words, runs.map(lambda run: [len(PIECES) + byte for byte in run])), max_size=8))
def test_joined_pieces_are_the_decoding_of_all_ids_with_byte_tokens(parts: list[tuple[list[int], list[int]]]) -> None:
    token_ids = [token for word, run in parts for token in (*word, *run)]
    assert "".join(pieces(WITH_BYTES, token_ids)) == WITH_BYTES.decode(token_ids)
    assert decode_all(WITH_BYTES, token_ids) == WITH_BYTES.decode(token_ids)


def test_what_was_given_out_of_a_run_of_bytes_stays_when_the_run_goes_wrong() -> None:
    token_ids = [3, *(len(PIECES) + byte for byte in b"\n\xff\xfe"), 3]
    assert pieces(WITH_BYTES, token_ids) == ["b", "\n", REPLACEMENT, REPLACEMENT, "b", ""]
    assert decode_all(WITH_BYTES, token_ids) == f"b\n{REPLACEMENT * 2}b"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WITH_BYTES])
def test_a_character_over_four_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    first = 0 if tokenizer is BYTE_LEVEL else len(PIECES)
    assert pieces(tokenizer, [first + byte for byte in EMOJI]) == ["", "", "", "😀", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WITH_BYTES])
def test_an_output_that_ends_inside_a_character_ends_in_a_replacement(tokenizer: Tokenizer) -> None:
    first = 0 if tokenizer is BYTE_LEVEL else len(PIECES)
    start = ord("b") if tokenizer is BYTE_LEVEL else PIECES.index("b")
    token_ids = [start, *(first + byte for byte in EMOJI[:2])]
    assert pieces(tokenizer, token_ids)[:3] == ["b", "", ""]
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_what_stands_before_half_a_character_is_not_held_back() -> None:
    tokenizer = byte_level("ok")
    half = len(tokenizer.backend.get_vocab()) - 2
    assert pieces(tokenizer, [half, EMOJI[0], ord("!")]) == ["ok", "", REPLACEMENT + "!", ""]


@pytest.mark.parametrize(
    ("tokenizer", "token_ids"),
    [
        (BYTE_LEVEL, [0xFF] * 2000),
        (BYTE_LEVEL, [0xE2, 0x82] * 1000),
        (BYTE_LEVEL, [*EMOJI[:3]] * 700),
        (BYTE_LEVEL, [END] * 2000),
        (METASPACE, [0] * 2000),
        (WITH_BYTES, [len(PIECES) + 0xFF] * 2000),
    ],
)
def test_each_token_is_decoded_a_bounded_number_of_times(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    counting = Counting(tokenizer)
    text = "".join(pieces(counting, token_ids))  # type: ignore[arg-type]
    assert text == tokenizer.decode(token_ids)
    assert counting.count < 20 * len(token_ids) + 100


def test_only_byte_tokens_have_bytes_and_only_special_ones_are_silent() -> None:
    assert (WITH_BYTES.byte_of(len(PIECES) + 7), WITH_BYTES.byte_of(3)) == (7, None)
    assert BYTE_LEVEL.byte_of(7) is METASPACE.byte_of(7) is None
    assert [BYTE_LEVEL.is_silent(token) for token in (5, END, NO_TOKEN)] == [False, True, True]
