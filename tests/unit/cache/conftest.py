"""Caches small enough to run out of pages, proved to be right when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cache_support import Lease, NewCache, RunTask

from aengine.cache.manager import TaskCacheManager


@pytest.fixture
def lease() -> Lease:
    return Lease()


@pytest.fixture
def new_cache() -> Iterator[NewCache]:
    """Makes caches: page size 4 and 8 pages unless told otherwise."""
    made: list[TaskCacheManager] = []

    def make(**settings: Any) -> TaskCacheManager:
        defaults = {"num_pages": 8, "page_size": 4, "max_num_seqs": 8, "max_model_len": 64}
        cache = TaskCacheManager(**{**defaults, **settings})
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.check_integrity()


@pytest.fixture
def run_task(lease: Lease) -> RunTask:
    """Runs a task from `alloc` to `free`, all of it computed; returns how many of its tokens were cached."""

    def run(cache: TaskCacheManager, tokens: list[int], salt: str | None = None) -> int:
        state = cache.alloc(lease, "passing", tokens, salt)
        cache.publish(lease, state, tokens, len(tokens))
        cache.free(lease, state)
        cache.check_integrity()
        return state.num_cached_tokens

    return run
