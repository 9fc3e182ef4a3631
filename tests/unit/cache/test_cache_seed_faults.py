"""One test for each fault of the module this cache grew from."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from cache_support import Lease, NewCache, RunTask, counts

from aengine.cache.allocator import Allocator
from aengine.cache.keys import root_identity, token_bytes
from aengine.cache.radix import RadixCache
from aengine.errors import OutOfPagesError, PageAccountingError

ROOT = root_identity(0, None)
TOKENS = list(range(12))


def lines_run(act: Callable[[], object]) -> int:
    """How many lines of Python an act takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def bytes_needed(act: Callable[[], object]) -> int:
    """Peak of memory allocated during an act."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_pages_in_use_do_not_match_after_an_invalidation(new_cache: NewCache, lease: Lease) -> None:
    cache = new_cache()
    held = cache.alloc(lease, "held", TOKENS)
    cache.publish(lease, held, TOKENS, 12)
    cache.invalidate_cache(lease)
    assert cache.lookup(lease, TOKENS) == 0
    cache.free(lease, held)
    assert cache.lookup(lease, TOKENS) == 0


def test_an_eviction_that_raises_has_changed_nothing() -> None:
    def refuse(_: list[int]) -> None:
        raise RuntimeError("refused")

    pages = Allocator(2, refuse)
    chain = pages.alloc(2)
    pages.keep(chain)
    pages.release(chain)
    with pytest.raises(RuntimeError):
        pages.alloc(1)
    assert (pages.num_reusable, pages.num_free, list(pages.reusable())) == (2, 0, chain[::-1])
    pages.invalidate(1)
    with pytest.raises(RuntimeError):
        pages.alloc(1)
    assert (pages.num_reusable, pages.num_free, list(pages.stale())) == (0, 2, chain[::-1])


def test_eviction_orphans_no_child(new_cache: NewCache, run_task: RunTask, lease: Lease) -> None:
    cache = new_cache(num_pages=4)
    run_task(cache, TOKENS)
    for taken in range(1, 5):
        state = cache.alloc(lease, "other", [50] * (4 * taken))
        assert cache.lookup(lease, [*TOKENS, 0]) == 4 * min(4 - taken, 3)
        cache.check_integrity()
        cache.free(lease, state)
        run_task(cache, TOKENS)


def test_a_match_cannot_be_evicted_for_the_request_that_made_it(
    new_cache: NewCache, run_task: RunTask, lease: Lease
) -> None:
    cache = new_cache(num_pages=4)
    run_task(cache, TOKENS[:8])
    held = cache.alloc(lease, "held", [50])
    run_task(cache, [60, 60, 60, 60])
    assert counts(cache) == (1, 3, 0)
    state = cache.alloc(lease, "task", TOKENS)
    assert state.num_cached_tokens == 8
    assert len({*state.pages, *held.pages}) == 4


def test_a_second_release_does_not_go_below_zero() -> None:
    pages = Allocator(2, lambda _: None)
    chain = pages.alloc(1)
    pages.release(chain)
    with pytest.raises(PageAccountingError):
        pages.release(chain)
    assert pages.ref_count(chain[0]) == 0
    assert sorted(pages.alloc(2)) == [0, 1], "and the page is not handed out twice"


def test_a_failed_allocation_keeps_nothing(new_cache: NewCache, run_task: RunTask, lease: Lease) -> None:
    cache = new_cache(num_pages=4, max_num_seqs=1)
    run_task(cache, TOKENS[:8])
    before = counts(cache)
    for _ in range(3):
        with pytest.raises(OutOfPagesError):
            cache.alloc(lease, "big", [*TOKENS, *TOKENS])
        assert counts(cache) == before
    cache.alloc(lease, "fits", TOKENS)


def test_publishing_walks_a_chain_once() -> None:
    def publish(num_pages: int) -> int:
        index = RadixCache(num_pages, page_size=2)
        tokens = token_bytes(range(2 * num_pages))
        return lines_run(lambda: index.publish(ROOT, list(range(num_pages)), tokens))

    short, long = publish(100), publish(1000)
    assert long < 11 * short


def test_publishing_one_more_page_does_not_walk_the_pages_before_it() -> None:
    def publish(num_pages: int) -> int:
        index = RadixCache(num_pages + 1, page_size=2)
        index.publish(ROOT, list(range(num_pages)), token_bytes(range(2 * num_pages)))
        return lines_run(lambda: index.publish(ROOT, [num_pages], token_bytes([7, 7]), num_pages - 1))

    assert publish(10) == publish(1000)


def test_publishing_a_prefix_again_detaches_nothing(new_cache: NewCache, run_task: RunTask, lease: Lease) -> None:
    cache = new_cache()
    run_task(cache, [*TOKENS[:4], 1, 1, 1, 1])
    run_task(cache, [*TOKENS[:4], 2, 2, 2, 2])
    run_task(cache, TOKENS[:4])
    assert cache.lookup(lease, [*TOKENS[:4], 1, 1, 1, 1, 0]) == 8
    assert cache.lookup(lease, [*TOKENS[:4], 2, 2, 2, 2, 0]) == 8


def test_a_whole_prompt_hit_leaves_its_end_to_be_computed(new_cache: NewCache, run_task: RunTask) -> None:
    cache = new_cache()
    assert [run_task(cache, TOKENS) for _ in range(3)] == [0, 8, 8]


def test_an_operation_costs_the_same_in_any_pool() -> None:
    def cost(num_pages: int) -> tuple[list[int], int]:
        index = RadixCache(num_pages, page_size=2)
        pages = Allocator(num_pages, index.evict)
        pages.invalidate(1)
        chain = pages.alloc(num_pages)
        index.publish(ROOT, chain, token_bytes(range(2 * num_pages)))
        pages.keep(chain)
        pages.release(chain)
        held: list[list[int]] = []
        acts: list[Callable[[], object]] = [
            lambda: held.append(pages.alloc(8)),
            lambda: pages.release(held[0]),
            lambda: held.append(pages.alloc(8)),
            lambda: pages.share(chain[:8]),
            lambda: pages.release(chain[:8]),
            lambda: pages.touch(chain[:8]),
            lambda: pages.invalidate(2),
            lambda: held.append(pages.alloc(8)),
        ]
        memory = 0

        def measured(act: Callable[[], object]) -> int:
            nonlocal memory
            lines = lines_run(act)
            memory = max(memory, bytes_needed(lambda: pages.release(pages.alloc(8))))
            return lines

        return [measured(act) for act in acts], memory

    cost(100)  # whoever watches, such as a measurement of coverage, has allocated what it needs after this
    small, large = cost(100), cost(50_000)
    assert small[0] == large[0]
    assert large[1] < small[1] + 2_000, "no list or number as long as the pool is made on the way"
