"""A prefix is found by its exact tokens, its salt and its epoch, whatever the tokens came as, and by nothing else."""

from __future__ import annotations

import array
import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.cache.radix import RadixCache, Salt, TokenIds, root_identity, token_bytes
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
    identity = index.identity(2)
    assert index.publish(ROOT, [1, 2], token_bytes([1, 1, 2, 2])) == [1, 2]
    assert (len(index), index.identity(2)) == (2, identity)


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
    index.publish(ROOT, [1, 2], token_bytes([1, 1, 2, 2]))
    index.evict([1])  # against the order of eviction, to show that the keys alone are enough
    index.publish(ROOT, [1], token_bytes([1, 1]))
    assert index.lookup(ROOT, token_bytes([1, 1, 2, 2])) == [1]


def test_the_index_is_invisible_to_the_garbage_collector() -> None:
    index = RadixCache(64, page_size=2)
    index.publish(ROOT, list(range(64)), token_bytes(range(128)))
    if not hasattr(gc, "is_tracked") or gc.is_tracked({b"": 0}):
        pytest.skip("this Python tracks every dictionary")
    assert not gc.is_tracked(index._pages)
    assert not any(gc.is_tracked(key) for key in index._pages)
