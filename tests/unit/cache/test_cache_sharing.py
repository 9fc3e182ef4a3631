"""Samples of one prompt share its pages, nobody writes to a page another can read, and twins become one."""

from __future__ import annotations

import pytest
from cache_support import Lease, NewCache

from aengine.errors import OutOfPagesError, PageAccountingError, StaleLeaseError
from statemachines.policy import Operation

PROMPT = [1, 2, 3, 4, 5, 6]


def test_h6_forks_share_every_page_and_copy_the_partial_one_when_they_write(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    leader = cache.alloc(lease, "0", PROMPT)
    cache.publish(lease, leader, PROMPT, 6)
    forks = [cache.fork(lease, leader, str(index)) for index in (1, 2)]
    full, partial = leader.pages
    assert all(fork.pages == [full, partial] for fork in forks)
    assert cache.stats().pages.live == 2
    copies = [cache.extend(lease, state, 7) for state in (forks[0], leader, forks[1])]
    assert copies == [((partial, forks[0].pages[1]),), ((partial, leader.pages[1]),), ()]
    assert forks[1].pages == [full, partial], "the last holder writes in place"
    assert len({state.pages[1] for state in (leader, *forks)}) == 3
    assert cache.page_tables([leader, *forks]).tolist() == [state.pages for state in (leader, *forks)]
    cache.check_integrity()


def test_a_fork_at_a_page_border_copies_nothing(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    leader = cache.alloc(lease, "0", PROMPT[:4])
    fork = cache.fork(lease, leader, "1")
    assert cache.extend(lease, leader, 5) == cache.extend(lease, fork, 5) == ()
    assert leader.pages[0] == fork.pages[0]
    assert leader.pages[1] != fork.pages[1]


def test_a_copy_that_finds_no_page_changes_nothing(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache(num_pages=2)
    leader = cache.alloc(lease, "0", PROMPT)
    fork = cache.fork(lease, leader, "1")
    with pytest.raises(OutOfPagesError):
        cache.extend(lease, fork, 7)
    assert (fork.length, fork.pages) == (6, leader.pages)
    cache.check_integrity()
    cache.free(lease, leader)
    assert cache.extend(lease, fork, 7) == ()


class LeaseWithoutCopies(Lease):
    def check(self, operation: Operation) -> None:
        if operation is Operation.COPY_ON_WRITE:
            raise StaleLeaseError("no copies")


def test_a_copy_needs_a_permission_of_its_own(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    leader = cache.alloc(lease, "0", PROMPT)
    fork = cache.fork(lease, leader, "1")
    with pytest.raises(StaleLeaseError, match="no copies"):
        cache.extend(LeaseWithoutCopies(), fork, 7)
    assert (fork.length, fork.pages) == (6, leader.pages)
    cache.free(lease, leader)
    assert cache.extend(LeaseWithoutCopies(), fork, 7) == (), "it has the page to itself"


def test_asking_again_for_slots_that_exist_copies_nothing_more(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    leader = cache.alloc(lease, "0", PROMPT)
    fork = cache.fork(lease, leader, "1")
    assert len(cache.extend(lease, fork, 7)) == 1
    assert cache.extend(lease, fork, 7) == cache.extend(lease, fork, 8) == ()


def test_a_fork_made_late_copies_a_page_that_was_filled_and_indexed_meanwhile(
    new_cache: NewCache, lease: Lease
) -> None:
    cache, tokens = new_cache(), [*PROMPT, 7, 8, 9]
    leader = cache.alloc(lease, "0", PROMPT)
    cache.extend(lease, leader, 9)
    cache.publish(lease, leader, tokens, 8)
    fork = cache.fork(lease, leader, "1", 6)
    assert (fork.length, fork.pages) == (6, leader.pages[:2])
    cache.free(lease, leader)
    shared = fork.pages[1]
    assert cache.extend(lease, fork, 7) == ((shared, fork.pages[1]),), "held by it alone, but others may match it"
    assert cache.lookup(lease, tokens) == 8
    cache.check_integrity()


@pytest.mark.parametrize("num_tokens", [0, 7])
def test_a_fork_of_tokens_that_have_no_slot_is_refused(new_cache: NewCache, lease: Lease, num_tokens: int) -> None:
    cache = new_cache()
    leader = cache.alloc(lease, "0", PROMPT)
    with pytest.raises(PageAccountingError, match="slots for 6 tokens"):
        cache.fork(lease, leader, "1", num_tokens)


def test_forks_find_what_their_leader_published_and_publish_what_follows(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    leader = cache.alloc(lease, "0", PROMPT)
    fork = cache.fork(lease, leader, "1")
    cache.publish(lease, leader, PROMPT, 6)
    cache.free(lease, leader)
    cache.extend(lease, fork, 8)
    tokens = [*PROMPT, 70, 80]
    cache.publish(lease, fork, tokens, 8)
    assert cache.lookup(lease, [*tokens, 0]) == 8
    assert cache.stats().num_indexed == 2
    cache.check_integrity()


def test_h2_twins_are_told_apart_until_they_are_computed_and_are_one_afterwards(
    new_cache: NewCache, lease: Lease
) -> None:
    cache, tokens = new_cache(num_pages=12), list(range(10))
    twins = [cache.alloc(lease, str(index), tokens) for index in range(4)]
    assert [state.num_cached_tokens for state in twins] == [0, 0, 0, 0], "nothing was computed yet"
    assert cache.stats().pages.live == 12
    for state in twins:
        cache.publish(lease, state, tokens, 10)
        cache.check_integrity()
    assert {tuple(state.pages[:2]) for state in twins} == {tuple(twins[0].pages[:2])}
    assert len({state.pages[2] for state in twins}) == 4
    assert cache.page_tables(twins).tolist() == [state.pages for state in twins]
    assert cache.stats().pages.live == 6
    for state in twins:
        cache.free(lease, state)
    stats = cache.stats().pages
    assert (stats.live, stats.cached, stats.free) == (0, 2, 10)


def test_h2_twins_with_forks_leave_no_fork_on_a_duplicate(new_cache: NewCache, lease: Lease) -> None:
    """Were the leader alone re-pointed, its forks would hold an indexed page behind one that can be evicted."""
    cache, tokens = new_cache(num_pages=12), list(range(12))
    first = cache.alloc(lease, "first", [*tokens[:4], 50])
    leader = cache.alloc(lease, "0", tokens)
    forks = [cache.fork(lease, leader, str(index)) for index in (1, 2)]
    cache.publish(lease, first, [*tokens[:4], 50], 5)
    cache.publish(lease, forks[0], tokens, 12)
    assert {tuple(state.pages) for state in (leader, *forks)} == {(first.pages[0], *leader.pages[1:])}
    cache.check_integrity()
    for state in (first, leader, forks[0]):
        cache.free(lease, state)
        cache.check_integrity()
    cache.publish(lease, forks[1], tokens, 12)
    cache.free(lease, forks[1])
    assert cache.lookup(lease, [*tokens, 0]) == 12


def test_twins_share_a_beginning_and_keep_their_own_endings(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    one, other = [1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 3, 3, 3, 3]
    first, second = cache.alloc(lease, "first", one), cache.alloc(lease, "second", other)
    cache.publish(lease, first, one, 8)
    cache.publish(lease, second, other, 8)
    assert second.pages[0] == first.pages[0]
    assert cache.stats().num_indexed == 3
    assert cache.lookup(lease, [*other, 9]) == 8


def test_h3_a_chain_loses_its_last_page_first(new_cache: NewCache, lease: Lease) -> None:
    cache, tokens = new_cache(num_pages=3), list(range(12))
    state = cache.alloc(lease, "task", tokens)
    cache.publish(lease, state, tokens, 12)
    cache.free(lease, state)
    cache.alloc(lease, "other", [99])
    assert cache.lookup(lease, [*tokens, 0]) == 8
    cache.check_integrity()


def test_a_prefix_in_use_outlives_its_older_branches(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache(num_pages=4)
    for branch in (5, 6):
        tokens = [1, 1, 1, 1, branch, branch, branch, branch]
        state = cache.alloc(lease, "branch", tokens)
        cache.publish(lease, state, tokens, 8)
        cache.free(lease, state)
    cache.alloc(lease, "other", list(range(20, 27)))
    assert cache.lookup(lease, [1, 1, 1, 1, 5, 5, 5, 5, 0]) == 4
    assert cache.lookup(lease, [1, 1, 1, 1, 6, 6, 6, 6, 0]) == 8
    cache.check_integrity()
