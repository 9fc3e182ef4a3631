"""Allocations that must compute what the cache has already, since the logits there are wanted."""

from __future__ import annotations

import pytest
from cache_support import Lease, NewCache, RunTask, counts

TOKENS = list(range(13))


@pytest.mark.parametrize(("limit", "cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (12, 12), (100, 12), (None, 12)])
def test_no_more_tokens_are_found_than_may_be(
    new_cache: NewCache, lease: Lease, run_task: RunTask, limit: int | None, cached: int
) -> None:
    cache = new_cache()
    run_task(cache, TOKENS)
    state = cache.alloc(lease, "task", TOKENS, max_cached_tokens=limit)
    assert (state.num_cached_tokens, state.length, len(state.pages)) == (cached, 13, 4)
    assert cache.stats().hit_tokens == cached
    cache.free(lease, state)


def test_what_was_computed_again_is_given_back_for_the_pages_that_were_there(
    new_cache: NewCache, lease: Lease, run_task: RunTask
) -> None:
    cache = new_cache()
    run_task(cache, TOKENS)
    assert counts(cache) == (0, 3, 5)
    state = cache.alloc(lease, "task", TOKENS, max_cached_tokens=4)
    cache.publish(lease, state, TOKENS, 13)
    assert counts(cache) == (4, 0, 4)
    cache.free(lease, state)
    assert counts(cache) == (0, 3, 5)


def test_a_cache_that_shares_nothing_takes_the_limit_too(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache(cache="contiguous", max_model_len=16)
    assert cache.alloc(lease, "task", TOKENS, max_cached_tokens=4).num_cached_tokens == 0
