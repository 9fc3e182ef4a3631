"""The contiguous strategy behaves like the paged one without sharing, and can serve as its oracle."""

from __future__ import annotations

import pytest
from cache_support import Lease, NewCache, RunTask

from aengine.cache.manager import TaskCacheManager
from aengine.errors import OutOfPagesError, PageAccountingError


def contiguous(new_cache: NewCache, **settings: int) -> TaskCacheManager:
    return new_cache(cache="contiguous", **{"num_pages": 9, "max_model_len": 12, **settings})


def test_every_task_has_a_range_of_its_own(new_cache: NewCache, lease: Lease) -> None:
    cache = contiguous(new_cache)
    states = [cache.alloc(lease, str(index), [1]) for index in range(3)]
    assert [state.pages for state in states] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cache.page_tables(states).tolist() == [[0], [3], [6]]
    assert cache.num_available == 0
    with pytest.raises(OutOfPagesError):
        cache.alloc(lease, "one more", [1])
    cache.check_integrity()


def test_a_slot_is_extended_in_place(new_cache: NewCache, lease: Lease) -> None:
    cache = contiguous(new_cache)
    state = cache.alloc(lease, "task", [1])
    assert cache.extend(lease, state, 12) == ()
    assert cache.page_tables([state]).tolist() == [[0, 1, 2]]
    assert cache.slot_indices(state, 0, 12).tolist() == list(range(12))


def test_a_pool_smaller_than_the_longest_sequence_is_one_slot(new_cache: NewCache, lease: Lease) -> None:
    cache = contiguous(new_cache, num_pages=2)
    assert cache.capacity_tokens == 8
    with pytest.raises(OutOfPagesError):
        cache.alloc(lease, "task", list(range(9)))
    state = cache.alloc(lease, "task", list(range(8)))
    with pytest.raises(OutOfPagesError):
        cache.extend(lease, state, 9)
    assert state.length == 8


def test_pages_behind_the_last_slot_are_not_counted(new_cache: NewCache, lease: Lease) -> None:
    cache = contiguous(new_cache, num_pages=8)
    state = cache.alloc(lease, "task", [1])
    stats = cache.stats()
    assert (stats.pages.total, stats.pages.live, stats.pages.cached, stats.pages.free) == (6, 3, 0, 3)
    cache.free(lease, state)
    assert cache.stats().pages.free == 6


def test_rows_are_used_again_after_a_refusal(new_cache: NewCache, lease: Lease) -> None:
    cache = contiguous(new_cache, num_pages=6)
    first, second = cache.alloc(lease, "first", [1]), cache.alloc(lease, "second", [1])
    for _ in range(3):
        with pytest.raises(OutOfPagesError):
            cache.alloc(lease, "third", [1])
    for state in (first, second):
        cache.free(lease, state)
    assert [cache.alloc(lease, name, [1]).pages[0] for name in "ab"] == [3, 0]


def test_nothing_is_shared_or_found_again(new_cache: NewCache, run_task: RunTask, lease: Lease) -> None:
    cache = contiguous(new_cache)
    assert [run_task(cache, list(range(9))) for _ in range(2)] == [0, 0]
    assert cache.lookup(lease, list(range(9))) == 0
    assert cache.invalidate_cache(lease) == 0
    assert not cache.can_fork
    state = cache.alloc(lease, "task", [1])
    with pytest.raises(PageAccountingError, match="shares no pages"):
        cache.fork(lease, state, "fork")
    assert cache.stats().num_tasks == 1


def test_freeing_twice_raises_and_changes_nothing(new_cache: NewCache, lease: Lease) -> None:
    cache = contiguous(new_cache)
    state = cache.alloc(lease, "task", [1])
    cache.free(lease, state)
    with pytest.raises(PageAccountingError):
        cache.free(lease, state)
    assert cache.stats().pages.free == 9
