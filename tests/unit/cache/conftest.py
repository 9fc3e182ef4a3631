"""A gate in Serving with a lease on it, and caches small enough to run out of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aengine.cache.manager import TaskCacheManager
from aengine.policy.gate import PolicyGate, StableLease
from aengine.policy.version import PolicyVersion

NewCache = Callable[..., TaskCacheManager]
RunTask = Callable[..., int]


@pytest.fixture
def gate() -> PolicyGate:
    return PolicyGate(PolicyVersion(0, ""))


@pytest.fixture
def lease(gate: PolicyGate) -> Iterator[StableLease]:
    lease = gate.try_lease()
    assert lease is not None
    with lease:
        yield lease


@pytest.fixture
def new_cache() -> Iterator[NewCache]:
    """Makes caches (page size 4, 8 pages unless told otherwise) whose integrity is proved when the test ends."""
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
def run_task(lease: StableLease) -> RunTask:
    """Runs a task from `alloc` to `free`, all of it computed; returns how many of its tokens were cached."""

    def run(cache: TaskCacheManager, tokens: list[int], salt: str | None = None) -> int:
        state = cache.alloc(lease, "passing", tokens, salt)
        cache.publish(lease, state, tokens, len(tokens))
        cache.free(lease, state)
        cache.check_integrity()
        return state.num_cached_tokens

    return run
