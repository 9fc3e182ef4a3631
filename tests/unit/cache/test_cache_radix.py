"""A prefix is found by its exact tokens, its salt and its epoch, whatever the tokens came as, and by nothing else."""

from __future__ import annotations

import array
import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.cache.keys import Salt, TokenIds, root_identity, token_bytes
from aengine.cache.radix import RadixCache
from aengine.errors import PageAccountingError, PromptError

ROOT = root_identity(0, None)
SALTS = st.none() | st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3).map(tuple)
TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=8).map(lambda tokens: tokens[: len(tokens) // 2 * 2])


def test_the_longest_run_of_full_pages_is_found() -> None:
    index = RadixCache(8, page_size=2)
    assert index.publish(ROOT, [5, 3, 7], token_bytes([1, 2, 3, 4, 5, 6])) == []
    assert index.lookup(ROOT, token_bytes([1, 2, 3, 4, 9, 9])) == [5, 3]
    assert index.lookup(ROOT, token_bytes([1, 2, 3, 4, 5, 6, 7, 8])) == [5, 3, 7]
    assert index.lookup(ROOT, token_bytes([3, 4, 5, 6])) == []
    assert index.lookup(ROOT, b"") == []


@pytest.mark.parametrize(
    "token_ids",
    [(0, 1, 2), range(3), array.array("q", [0, 1, 2]), np.arange(3), np.arange(3, dtype=np.int32), torch.arange(3)],
    ids=["tuple", "range", "array", "numpy", "numpy int32", "torch"],
)
def test_token_ids_of_any_type_hit_each_other(token_ids: TokenIds) -> None:
    assert token_bytes(token_ids) == token_bytes([0, 1, 2])


@pytest.mark.parametrize("ids", [[1.0], ["a"], [2**31], [[1, 2]], np.array([1.5]), np.array([2**40]), np.array([[1]])])
def test_what_is_no_token_id_is_refused_and_never_rounded(ids: TokenIds) -> None:
    with pytest.raises(PromptError, match="token ids must be"):
        token_bytes(ids)


@given(TOKENS, TOKENS)
def test_a_prefix_is_found_exactly_where_the_tokens_are_equal(indexed: list[int], asked: list[int]) -> None:
    index = RadixCache(4, page_size=2)
    pages = list(range(len(indexed) // 2))
    index.publish(ROOT, pages, token_bytes(indexed))
    common = 0
    while common < min(len(indexed), len(asked)) and indexed[common : common + 2] == asked[common : common + 2]:
        common += 2
    assert index.lookup(ROOT, token_bytes(asked)) == pages[: common // 2]


@given(SALTS, SALTS, st.integers(0, 2), st.integers(0, 2))
def test_salts_and_epochs_share_nothing(salt: Salt, other: Salt, epoch: int, later: int) -> None:
    index = RadixCache(2, page_size=2)
    index.publish(root_identity(epoch, salt), [1], token_bytes([7, 7]))
    found = index.lookup(root_identity(later, other), token_bytes([7, 7]))
    assert found == ([1] if (salt, epoch) == (other, later) else [])


def test_a_page_indexed_twice_for_the_same_prefix_is_reported_by_its_first_page() -> None:
    index = RadixCache(8, page_size=2)
    index.publish(ROOT, [1, 2], token_bytes([1, 1, 2, 2]))
    assert index.publish(ROOT, [3, 4, 5], token_bytes([1, 1, 2, 2, 3, 3])) == [1, 2]
    assert index.lookup(ROOT, token_bytes([1, 1, 2, 2, 3, 3])) == [1, 2, 5]
    assert (len(index), 3 in index, 4 in index, 5 in index) == (3, False, False, True)


def test_publishing_again_what_is_indexed_changes_nothing() -> None:
    index = RadixCache(8, page_size=2)
    index.publish(ROOT, [1, 2], token_bytes([1, 1, 2, 2]))
    assert index.publish(ROOT, [1, 2], token_bytes([1, 1, 2, 2])) == [1, 2]
    assert index.publish(ROOT, [2], token_bytes([2, 2]), after=1) == [2]
    assert (len(index), index.lookup(ROOT, token_bytes([1, 1, 2, 2]))) == (2, [1, 2])


def test_what_follows_a_page_is_found_from_there_whether_it_was_published_with_it_or_not() -> None:
    index = RadixCache(16, page_size=2)
    index.publish(ROOT, [1, 2, 3], token_bytes([1, 1, 2, 2, 3, 3]))
    assert index.publish(ROOT, [4, 5], token_bytes([2, 2, 9, 9]), after=1) == [2]
    assert index.publish(ROOT, [6], token_bytes([4, 4]), after=3) == []
    assert index.lookup(ROOT, token_bytes([2, 2, 3, 3, 4, 4]), after=1) == [2, 3, 6]
    assert index.lookup(ROOT, token_bytes([1, 1, 2, 2, 9, 9])) == [1, 2, 5]
    assert index.lookup(ROOT, token_bytes([4, 4]), after=3) == [6]
    assert index.lookup(ROOT, token_bytes([9, 9]), after=3) == []


@given(st.lists(st.lists(st.integers(0, 1), max_size=8), max_size=8), st.lists(st.integers(0, 1), max_size=10))
def test_runs_of_any_shape_are_one_tree(published: list[list[int]], asked: list[int]) -> None:
    index = RadixCache(64, page_size=1)
    tree: dict[tuple[int, ...], int] = {}
    for number, tokens in enumerate(published):
        pages = list(range(8 * number, 8 * number + len(tokens)))
        known = index.publish(ROOT, pages, token_bytes(tokens))
        for at, page in enumerate([*known, *pages[len(known) :]]):
            assert tree.setdefault(tuple(tokens[: at + 1]), page) == page
    expected = [tree[tuple(asked[: at + 1])] for at in range(len(asked)) if tuple(asked[: at + 1]) in tree]
    assert index.lookup(ROOT, token_bytes(asked)) == expected
    assert len(index) == len(tree)


def test_a_page_cannot_stand_for_two_prefixes() -> None:
    index = RadixCache(8, page_size=2)
    index.publish(ROOT, [1], token_bytes([1, 1]))
    with pytest.raises(PageAccountingError, match="indexed already"):
        index.publish(ROOT, [2, 1], token_bytes([2, 2, 3, 3]))
    assert index.lookup(ROOT, token_bytes([2, 2])) == []
    assert len(index) == 1


def test_an_evicted_page_is_forgotten_and_its_number_can_stand_for_something_else() -> None:
    index = RadixCache(8, page_size=2)
    index.publish(ROOT, [1, 2], token_bytes([1, 1, 2, 2]))
    index.evict([2])
    assert index.lookup(ROOT, token_bytes([1, 1, 2, 2])) == [1]
    index.publish(ROOT, [2], token_bytes([2, 2]))
    assert index.lookup(ROOT, token_bytes([2, 2])) == [2]


def test_eviction_of_a_page_without_an_entry_raises_and_evicts_nothing() -> None:
    index = RadixCache(8, page_size=2)
    index.publish(ROOT, [1], token_bytes([1, 1]))
    with pytest.raises(PageAccountingError, match="page 3 has no entry"):
        index.evict([1, 3])
    assert index.lookup(ROOT, token_bytes([1, 1])) == [1]


def test_children_of_a_page_that_has_gone_never_match_behind_its_successor() -> None:
    index = RadixCache(8, page_size=2)
    index.publish(ROOT, [1], token_bytes([1, 1]))
    index.publish(ROOT, [2], token_bytes([2, 2]), after=1)
    index.evict([1])  # against the order of eviction, to show that the keys alone are enough
    index.publish(ROOT, [1], token_bytes([1, 1]))
    assert index.lookup(ROOT, token_bytes([1, 1, 2, 2])) == [1]


@pytest.mark.parametrize("order", [[1, 2, 3], [2, 3, 1], [3, 1, 2], [3, 2, 1]])
def test_a_run_may_lose_its_pages_in_any_order_and_never_matches_what_has_gone(order: list[int]) -> None:
    index = RadixCache(8, page_size=2)
    tokens = token_bytes([1, 1, 2, 2, 3, 3])
    index.publish(ROOT, [1, 2, 3], tokens)
    left = [1, 2, 3]
    for page in order:
        index.evict([page])
        left.remove(page)
        assert index.lookup(ROOT, tokens) in ([], left)
        assert (len(index), page in index) == (len(left), False)
    index.publish(ROOT, [3, 1], token_bytes([1, 1, 2, 2]))
    assert index.lookup(ROOT, tokens) == [3, 1]


def test_memory_of_pages_that_have_gone_is_given_back() -> None:
    index = RadixCache(1000, page_size=2)
    tokens = token_bytes(range(2000))
    index.publish(ROOT, list(range(1000)), tokens)
    for page in reversed(range(1, 1000)):
        index.evict([page])
        assert sum(map(len, index._rests)) <= 4 * 8 * page
        assert sum(map(len, index._pages)) <= 4 * page + 4
    assert index.lookup(ROOT, tokens) == [0]
    index.evict([0])
    assert (index._runs, index._free, index._rests, index._pages) == ({}, [0], [b""], [()])


def test_the_index_is_invisible_to_the_garbage_collector() -> None:
    index = RadixCache(64, page_size=2)
    index.publish(ROOT, list(range(64)), token_bytes(range(128)))
    if not hasattr(gc, "is_tracked") or gc.is_tracked({b"": 0}):
        pytest.skip("this Python tracks every dictionary")
    gc.collect()
    assert not gc.is_tracked(index._runs)
    assert not any(map(gc.is_tracked, [*index._runs, *index._rests, *index._pages]))
