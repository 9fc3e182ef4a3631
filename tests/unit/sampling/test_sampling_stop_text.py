"""Stop strings across token borders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_tokenizers import byte_level

from aengine.sampling.stop_text import StopText

TOKENIZER = byte_level("beta", " gam", "ma", " brown", " fox", "ox", "😀")
VOCAB = {TOKENIZER.decode([token]): token for token in range(256, TOKENIZER.vocab_size - 1)}


def ids(*words: str) -> list[int]:
    return [token for word in words for token in ([VOCAB[word]] if word in VOCAB else word.encode())]


def read(token_ids: list[int], *stop: str) -> tuple[list[str], str | None, int]:
    """What is given out after each token and at the end, the match, and how many tokens were read."""
    text, given, shown = StopText.of(TOKENIZER, stop), [], 0
    for token in token_ids:
        text.feed(token)
        given.append("".join(text.pieces[shown:]))
        shown = len(text.pieces)
        if text.matched is not None:
            break
    text.close()
    return [*given, "".join(text.pieces[shown:])], text.matched, len(given)


def test_a_stop_string_over_three_tokens_is_never_shown() -> None:
    given, matched, count = read(ids("a", "beta", " gam", "ma", "z"), "beta gamma")
    assert (given, matched, count) == (["a", "", "", "", ""], "beta gamma", 4)


def test_a_stop_string_that_begins_inside_a_token_cuts_it() -> None:
    given, matched, _ = read(ids(" brown", " fox", "z"), "own fox")
    assert (given, matched) == ([" br", "", ""], "own fox")


def test_what_could_have_become_a_match_is_text_when_it_does_not_or_the_sample_ends() -> None:
    assert read(ids("beta", " gam", "!"), "beta gamma")[0] == ["", "", "beta gam!", ""]
    assert read(ids("beta", " gam"), "beta gamma")[0] == ["", "", "beta gam"]


def test_text_behind_the_match_in_the_same_token_is_dropped() -> None:
    assert read(ids("a", " brown"), "r")[:2] == (["a", " b", ""], "r")


def test_the_match_that_ends_first_wins_and_of_those_the_longest() -> None:
    assert read(ids("x", " brown"), "wn", "own", "br", "brown")[1] == "br"
    assert read(ids("x", " brown"), "wn", "own")[1] == "own"


def test_a_match_before_min_tokens_is_text() -> None:
    text = StopText.of(TOKENIZER, ["aa"])
    assert [text.feed(ord("a"), may_match=place >= 2) for place in range(4)] == [None, None, "aa", "aa"]
    text = StopText.of(TOKENIZER, ["ab"])
    for token in b"ab":
        text.feed(token, may_match=False)
    text.close()
    assert text.text == "ab"


def test_half_a_character_and_a_stop_string_are_held_together() -> None:
    given, matched, _ = read([*b"x", *"😀".encode(), *b"!"], "😀!")
    assert (given, matched) == (["x", "", "", "", "", "", ""], "😀!")


stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(text=st.text("ab", max_size=40), stop=stops)
def test_any_match_is_found_where_a_search_finds_it(text: str, stop: list[str]) -> None:
    ends = [(text.find(one) + len(one), -len(one), one) for one in stop if one in text]
    given, matched, count = read(list(text.encode()), *stop)
    if not ends:
        assert ("".join(given), matched) == (text, None)
    else:
        end, _, first = min(ends)
        assert ("".join(given), matched, count) == (text[: end - len(first)], first, end)


@given(text=st.text("ab", max_size=40), stop=stops)
def test_no_more_is_held_back_than_could_become_a_match(text: str, stop: list[str]) -> None:
    given, matched, _ = read(list(text.encode()), *stop)
    for place in range(1, len(given) - (1 if matched is None else 2)):
        seen, shown = text[:place], "".join(given[:place])
        held = seen[len(shown) :]
        assert not held or any(one.startswith(held) and one != held for one in stop)


@pytest.mark.parametrize("stop", [["a" * 50 + "b"], ["ab" * 30, "ba" * 30]])
def test_a_long_text_that_always_nearly_matches_is_read_in_linear_time(stop: list[str]) -> None:
    given, matched, count = read(list(b"a" * 4000), *stop)
    assert (len("".join(given)), matched, count) == (4000, None, 4000)
