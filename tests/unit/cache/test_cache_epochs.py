"""After an invalidation nothing that was indexed can be found, whoever still holds it, and no count is off."""

from __future__ import annotations

import pytest
from cache_support import Lease, NewCache, RunTask, counts

from aengine.errors import PageAccountingError, StaleLeaseError
from statemachines.policy import PolicyState

TOKENS = list(range(9))


def test_a3_pages_in_use_are_counted_and_never_found_again(
    new_cache: NewCache, run_task: RunTask, lease: Lease
) -> None:
    cache = new_cache()
    run_task(cache, [7, 7, 7, 7])
    held = cache.alloc(lease, "held", TOKENS)
    cache.publish(lease, held, TOKENS, 9)
    assert cache.invalidate_cache(lease) == 3
    assert counts(cache) == (3, 0, 5)
    assert cache.lookup(lease, TOKENS) == cache.lookup(lease, [7, 7, 7, 7, 7]) == 0
    cache.check_integrity()
    cache.free(lease, held)
    assert (counts(cache), cache.stats().num_indexed) == ((0, 0, 8), 0)
    assert cache.lookup(lease, TOKENS) == 0
    assert cache.invalidate_cache(lease) == 0


def test_a_task_of_an_earlier_epoch_goes_on_and_publishes_nothing(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    old = cache.alloc(lease, "old", TOKENS)
    cache.invalidate_cache(lease)
    cache.publish(lease, old, TOKENS, 9)
    assert cache.extend(lease, old, 13) == ()
    cache.publish(lease, old, list(range(13)), 13)
    fork = cache.fork(lease, old, "fork")
    assert fork.epoch == old.epoch == 0
    cache.publish(lease, fork, list(range(13)), 13)
    assert cache.stats().num_indexed == 0
    new = cache.alloc(lease, "new", TOKENS)
    assert (new.epoch, new.num_cached_tokens) == (1, 0)
    cache.publish(lease, new, TOKENS, 9)
    assert cache.stats().num_indexed == 2
    cache.check_integrity()
    for state in (old, fork):
        cache.free(lease, state)
    assert counts(cache) == (3, 0, 5)
    assert cache.lookup(lease, TOKENS) == 8


def test_a_stale_page_in_use_may_be_written_by_its_one_holder(new_cache: NewCache, lease: Lease) -> None:
    cache, tokens = new_cache(), list(range(8))
    leader = cache.alloc(lease, "leader", tokens)
    cache.publish(lease, leader, tokens, 8)
    fork = cache.fork(lease, leader, "fork", 6)
    cache.invalidate_cache(lease)
    cache.free(lease, leader)
    assert cache.extend(lease, fork, 7) == ()


def test_a5_a_match_is_made_when_pages_are_taken_not_before(
    new_cache: NewCache, run_task: RunTask, lease: Lease
) -> None:
    cache = new_cache()
    run_task(cache, TOKENS)
    assert cache.lookup(lease, TOKENS) == 8
    cache.invalidate_cache(lease)
    assert cache.alloc(lease, "task", TOKENS).num_cached_tokens == 0


def test_a5_a_prefix_evicted_while_a_request_waited_is_computed_again(
    new_cache: NewCache, run_task: RunTask, lease: Lease
) -> None:
    cache = new_cache(num_pages=3)
    run_task(cache, TOKENS)
    assert cache.lookup(lease, TOKENS) == 8
    run_task(cache, list(range(50, 62)))
    assert cache.alloc(lease, "task", TOKENS).num_cached_tokens == 0


def test_a7_without_an_invalidation_every_later_request_hits(new_cache: NewCache, run_task: RunTask) -> None:
    cache = new_cache()
    assert [run_task(cache, [*range(8), tail]) for tail in range(20, 25)] == [0, 8, 8, 8, 8]


def test_the_same_tokens_are_indexed_anew_in_each_epoch(new_cache: NewCache, run_task: RunTask, lease: Lease) -> None:
    cache = new_cache(num_pages=3)
    for _ in range(4):
        assert [run_task(cache, TOKENS) for _ in range(2)] == [0, 8]
        assert cache.invalidate_cache(lease) == 2
        assert counts(cache) == (0, 0, 3)


def test_an_invalidation_that_ends_ownership_frees_every_page(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    state = cache.alloc(lease, "task", TOKENS)
    cache.publish(lease, state, TOKENS, 9)
    cache.fork(lease, state, "fork")
    assert cache.invalidate_cache(lease, end_ownership=True) == 2
    assert (counts(cache), cache.stats().num_tasks) == ((0, 0, 8), 0)
    with pytest.raises(PageAccountingError, match="holds no pages"):
        cache.free(lease, state)
    cache.alloc(lease, "task", list(range(32)))


def test_a_commit_invalidates_with_a_lease_that_permits_nothing_else(new_cache: NewCache, run_task: RunTask) -> None:
    cache = new_cache()
    run_task(cache, TOKENS)
    lease = Lease(PolicyState.INVALIDATED)
    with pytest.raises(StaleLeaseError, match="Invalidated"):
        cache.lookup(lease, TOKENS)
    assert cache.invalidate_cache(lease) == 2
    assert cache.epoch == lease.epoch == 1


def test_while_weights_change_there_is_no_invalidation(new_cache: NewCache, run_task: RunTask) -> None:
    cache = new_cache()
    run_task(cache, TOKENS)
    with pytest.raises(StaleLeaseError, match="Swapping"):
        cache.invalidate_cache(Lease(PolicyState.SWAPPING))
    assert (cache.epoch, cache.stats().num_indexed) == (0, 2)


def test_a_lease_of_an_epoch_the_cache_has_not_entered_opens_nothing(
    new_cache: NewCache, run_task: RunTask, lease: Lease
) -> None:
    cache = new_cache()
    run_task(cache, TOKENS)
    lease.bump_epoch()
    for refused in (lambda: cache.lookup(lease, TOKENS), lambda: cache.alloc(lease, "task", TOKENS)):
        with pytest.raises(StaleLeaseError, match="epoch 1"):
            refused()
    cache.invalidate_cache(lease)
    assert cache.lookup(lease, TOKENS) == 0


def test_g5_nothing_grows_with_the_number_of_requests(new_cache: NewCache, run_task: RunTask, lease: Lease) -> None:
    cache = new_cache(num_pages=16)
    index = cache._strategy.radix  # type: ignore[attr-defined]
    for number in range(300):
        run_task(cache, [number, *range(11)], salt=f"salt {number}")
        if number % 50 == 0:
            cache.invalidate_cache(lease)
        assert len(index) <= 16
    assert cache.stats().num_tasks == 0
