"""Tasks from `alloc` to `free` under a lease: all or nothing, exact counts, and no page without an owner."""

from __future__ import annotations

import numpy as np
import pytest
from cache_support import Lease, NewCache, RunTask, counts

from aengine.errors import (
    ConfigError,
    OutOfPagesError,
    OutOfRowsError,
    PageAccountingError,
    PromptError,
    StaleLeaseError,
)
from statemachines.policy import PolicyState


def test_a_second_request_finds_the_full_pages_of_the_first(new_cache: NewCache, run_task: RunTask) -> None:
    cache = new_cache()
    assert run_task(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert run_task(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert run_task(cache, [1, 2, 3, 4, 0, 6, 7, 8, 9]) == 4
    assert run_task(cache, [0, 2, 3, 4]) == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_h1_the_last_prompt_token_is_always_computed_again(
    new_cache: NewCache, run_task: RunTask, lease: Lease, length: int
) -> None:
    cache, tokens = new_cache(), list(range(length))
    for _ in range(3):
        run_task(cache, tokens)
    assert cache.lookup(lease, tokens) == (length - 1) // 4 * 4 < length


def test_h1_the_page_written_by_the_recomputation_is_not_shared(new_cache: NewCache, lease: Lease) -> None:
    cache, tokens = new_cache(), list(range(8))
    first = cache.alloc(lease, "first", tokens)
    cache.publish(lease, first, tokens, 8)
    second = cache.alloc(lease, "second", tokens)
    assert second.num_cached_tokens == 4
    assert second.pages[0] == first.pages[0]
    assert second.pages[1] != first.pages[1], "position 7 will be written"
    cache.publish(lease, second, tokens, 8)
    assert second.pages == first.pages, "once it is computed it is the same page"


def test_lookup_takes_no_reference_and_leaves_the_order_of_eviction(
    new_cache: NewCache, run_task: RunTask, lease: Lease
) -> None:
    cache = new_cache(num_pages=2)
    run_task(cache, [1, 1, 1, 1])
    run_task(cache, [2, 2, 2, 2])
    assert cache.lookup(lease, [1, 1, 1, 1, 9]) == 4
    assert counts(cache) == (0, 2, 0)
    run_task(cache, [3])
    assert cache.lookup(lease, [1, 1, 1, 1, 9]) == 0, "the oldest went, although it was looked up last"
    assert cache.lookup(lease, [2, 2, 2, 2, 9]) == 4


def test_an_allocation_that_does_not_fit_leaves_everything_as_it_was(
    new_cache: NewCache, run_task: RunTask, lease: Lease
) -> None:
    cache = new_cache(num_pages=4)
    run_task(cache, list(range(8)))
    held = cache.alloc(lease, "held", [9, 9, 9, 9, 9])
    order = list(cache._strategy.allocator.reusable())  # type: ignore[attr-defined]
    with pytest.raises(OutOfPagesError) as refused:
        cache.alloc(lease, "big", list(range(13)))
    assert (refused.value.needed, refused.value.available) == (2, 0), "its two matched pages cannot be evicted for it"
    assert counts(cache) == (2, 2, 0)
    assert list(cache._strategy.allocator.reusable()) == order  # type: ignore[attr-defined]
    assert cache.stats().num_tasks == 1
    cache.free(lease, held)
    assert cache.alloc(lease, "big", list(range(13))).num_cached_tokens == 8


def test_without_a_free_row_no_page_is_taken(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache(max_num_seqs=1)
    first = cache.alloc(lease, "first", [1])
    with pytest.raises(OutOfRowsError, match="all 1 rows"):
        cache.alloc(lease, "second", [2])
    with pytest.raises(OutOfRowsError):
        cache.fork(lease, first, "fork")
    assert counts(cache) == (1, 0, 7)
    cache.free(lease, first)
    cache.alloc(lease, "second", [2])


def test_extend_adds_pages_as_positions_need_them(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    state = cache.alloc(lease, "task", [1, 2, 3])
    assert cache.extend(lease, state, 4) == ()
    assert (state.length, len(state.pages)) == (4, 1)
    assert cache.extend(lease, state, 5) == ()
    assert cache.extend(lease, state, 13) == ()
    assert (state.length, len(state.pages)) == (13, 4)
    assert cache.extend(lease, state, 2) == ()
    assert state.length == 13


def test_an_extension_that_does_not_fit_leaves_the_task_as_it_was(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache(num_pages=2)
    state = cache.alloc(lease, "task", [1, 2, 3])
    with pytest.raises(OutOfPagesError):
        cache.extend(lease, state, 9)
    assert (state.length, counts(cache)) == (3, (1, 0, 1))


def test_tokens_beyond_the_longest_sequence_are_refused(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache(max_model_len=10, num_pages=100)
    with pytest.raises(PromptError, match="11 tokens"):
        cache.alloc(lease, "task", list(range(11)))
    with pytest.raises(PromptError, match="0 tokens"):
        cache.alloc(lease, "task", [])
    state = cache.alloc(lease, "task", list(range(10)))
    with pytest.raises(PageAccountingError, match="max_model_len is 10"):
        cache.extend(lease, state, 11)
    assert counts(cache) == (3, 0, 97)


@pytest.mark.parametrize(
    ("settings", "capacity"),
    [({}, 32), ({"max_model_len": 30}, 30), ({"num_pages": 4}, 16), ({"num_pages": 4, "cache": "contiguous"}, 16)],
)
def test_i1_capacity_says_what_can_ever_fit(new_cache: NewCache, settings: dict[str, int], capacity: int) -> None:
    cache = new_cache(**settings)
    assert cache.capacity_tokens == capacity
    assert cache.can_ever_fit(capacity)
    assert not cache.can_ever_fit(capacity + 1)


def test_freeing_twice_raises_and_changes_nothing(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    state = cache.alloc(lease, "task", [1, 2, 3])
    cache.free(lease, state)
    other = cache.alloc(lease, "task", [1, 2, 3])
    for misuse in (
        lambda: cache.free(lease, state),
        lambda: cache.extend(lease, state, 4),
        lambda: cache.publish(lease, state, [1, 2, 3], 3),
        lambda: cache.fork(lease, state, "fork"),
    ):
        with pytest.raises(PageAccountingError, match="'task' holds no pages"):
            misuse()
    assert counts(cache) == (1, 0, 7)
    assert other.pages


def test_a_task_id_has_one_owner(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    state = cache.alloc(lease, "task", [1])
    with pytest.raises(PageAccountingError, match="'task' holds pages already"):
        cache.alloc(lease, "task", [2])
    with pytest.raises(PageAccountingError, match="'task' holds pages already"):
        cache.fork(lease, state, "task")
    assert counts(cache) == (1, 0, 7)


def test_f4_only_what_was_computed_is_published(new_cache: NewCache, lease: Lease) -> None:
    cache, tokens = new_cache(), list(range(20))
    state = cache.alloc(lease, "task", tokens)
    cache.publish(lease, state, tokens, 7)
    assert cache.lookup(lease, tokens) == 4
    cache.publish(lease, state, tokens, 8)
    assert cache.lookup(lease, tokens) == 8
    cache.free(lease, state)
    assert cache.lookup(lease, tokens) == 8
    assert counts(cache) == (0, 2, 6)


@pytest.mark.parametrize("num_computed", [-1, 5, 6])
def test_more_than_there_are_slots_or_tokens_cannot_be_computed(
    new_cache: NewCache, lease: Lease, num_computed: int
) -> None:
    cache = new_cache()
    state = cache.alloc(lease, "task", [1, 2, 3, 4])
    with pytest.raises(PageAccountingError, match="4 slots"):
        cache.publish(lease, state, [1, 2, 3, 4, 5], num_computed)


def test_generated_pages_are_found_by_the_next_turn(new_cache: NewCache, lease: Lease) -> None:
    cache, tokens = new_cache(), [1, 2, 3]
    state = cache.alloc(lease, "turn 1", tokens)
    for generated in range(10, 17):
        cache.publish(lease, state, tokens, len(tokens))
        tokens = [*tokens, generated]
        cache.extend(lease, state, len(tokens))
    cache.publish(lease, state, tokens, len(tokens) - 1)
    cache.free(lease, state)
    assert cache.lookup(lease, [*tokens, 50, 51]) == 8


def test_an_unpublishable_task_publishes_nothing(new_cache: NewCache, lease: Lease) -> None:
    cache, tokens = new_cache(), list(range(9))
    state = cache.alloc(lease, "task", tokens)
    state.publishable = False
    cache.publish(lease, state, tokens, 9)
    assert cache.lookup(lease, tokens) == 0
    cache.free(lease, state)
    assert counts(cache) == (0, 0, 8)


@pytest.mark.parametrize("settings", [{"prefix_caching": False}, {"page_size": 1}])
def test_without_prefix_caching_nothing_is_found_again(
    new_cache: NewCache, run_task: RunTask, settings: dict[str, int]
) -> None:
    cache = new_cache(**settings)
    assert [run_task(cache, [1, 2, 3, 4, 5, 6]) for _ in range(2)] == [0, 0]
    assert counts(cache) == (0, 0, 8)


def test_requests_share_only_under_the_same_salt(new_cache: NewCache, run_task: RunTask) -> None:
    cache, tokens = new_cache(), [1, 2, 3, 4, 5]
    assert [run_task(cache, tokens, salt) for salt in (None, "a", "b", "a", None, "")] == [0, 0, 0, 4, 4, 0]


@pytest.mark.parametrize(("limit", "cached"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8), (None, 8)])
def test_a_request_can_ask_for_more_of_its_prompt_to_be_computed(
    new_cache: NewCache, run_task: RunTask, lease: Lease, limit: int | None, cached: int
) -> None:
    cache, tokens = new_cache(), list(range(11))
    run_task(cache, tokens)
    state = cache.alloc(lease, "task", tokens, max_cached_tokens=limit)
    assert state.num_cached_tokens == cached
    cache.publish(lease, state, tokens, 11)
    assert cache.stats().num_indexed == 2, "what it computed again is the same page"


def test_only_first_admissions_count_as_queries(new_cache: NewCache, lease: Lease) -> None:
    cache, tokens = new_cache(), list(range(9))
    for _ in range(2):
        state = cache.alloc(lease, "task", tokens)
        cache.publish(lease, state, tokens, 9)
        cache.free(lease, state)
    state = cache.alloc(lease, "task", tokens, readmit=True)
    assert state.num_cached_tokens == 8
    assert (cache.stats().query_tokens, cache.stats().hit_tokens) == (18, 8)


def test_page_tables_list_each_task_in_order_with_the_widest_as_width(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    short, long = cache.alloc(lease, "short", [1]), cache.alloc(lease, "long", list(range(9)))
    tables = cache.page_tables([long, short])
    assert tables.dtype == np.int32
    assert tables.flags.c_contiguous
    assert tables.tolist() == [long.pages, [*short.pages, 0, 0]]
    assert cache.page_tables([short]).shape == (1, 1)
    assert cache.page_tables([]).shape == (0, 0)


def test_the_slot_of_a_position_is_its_page_and_offset(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    cache.alloc(lease, "other", [1])
    state = cache.alloc(lease, "task", list(range(9)))
    slots = cache.slot_indices(state, 3, 9)
    assert slots.tolist() == [state.pages[i // 4] * 4 + i % 4 for i in range(3, 9)]
    with pytest.raises(PageAccountingError, match="no slots 8 to 10"):
        cache.slot_indices(state, 8, 10)


def test_its_repr_tells_where_the_pages_are(new_cache: NewCache, run_task: RunTask, lease: Lease) -> None:
    cache = new_cache()
    run_task(cache, list(range(8)))
    cache.alloc(lease, "task", [1])
    assert repr(cache) == (
        "<TaskCacheManager paged, page size 4, epoch 0 | pages: 1 live, 2 cached, 5 free of 8 | tasks: 1>"
    )


def test_while_draining_running_tasks_go_on_and_new_ones_are_refused(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    state = cache.alloc(lease, "task", [1, 2, 3, 4])
    lease.state = PolicyState.DRAINING
    for refused in (lambda: cache.alloc(lease, "new", [1]), lambda: cache.lookup(lease, [1])):
        with pytest.raises(StaleLeaseError, match="Draining"):
            refused()
    cache.extend(lease, state, 5)
    cache.publish(lease, state, [1, 2, 3, 4], 4)
    fork = cache.fork(lease, state, "fork", 4)
    cache.free(lease, state)
    cache.free(lease, fork)
    assert cache.alloc(lease, "task", [1, 2, 3, 4, 5], readmit=True).num_cached_tokens == 4


def test_an_ended_lease_opens_nothing(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    state = cache.alloc(lease, "task", [1])
    lease.state = None
    for refused in (
        lambda: cache.lookup(lease, [1]),
        lambda: cache.alloc(lease, "new", [1]),
        lambda: cache.alloc(lease, "new", [1], readmit=True),
        lambda: cache.extend(lease, state, 2),
        lambda: cache.fork(lease, state, "fork"),
        lambda: cache.publish(lease, state, [1], 1),
        lambda: cache.free(lease, state),
        lambda: cache.invalidate_cache(lease),
    ):
        with pytest.raises(StaleLeaseError, match="not permitted"):
            refused()
    assert (cache.epoch, counts(cache)) == (0, (1, 0, 7))


@pytest.mark.parametrize("setting", ["num_pages", "page_size", "max_num_seqs", "max_model_len"])
def test_sizes_below_one_are_refused(new_cache: NewCache, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        new_cache(**{setting: 0})


def test_an_unknown_strategy_is_refused(new_cache: NewCache) -> None:
    with pytest.raises(ConfigError, match="'paged' or 'contiguous'"):
        new_cache(cache="ring")
