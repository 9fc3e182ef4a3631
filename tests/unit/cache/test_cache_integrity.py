"""`check_integrity` finds every way in which the accounting could be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cache_support import Lease

from aengine.cache.integrity import check_totals
from aengine.cache.manager import TaskCacheManager
from aengine.cache.paged import PagedStrategy
from aengine.cache.pool import ReqToTokenPool
from aengine.cache.state import PageStats, TaskCacheState
from aengine.errors import PageAccountingError

Damage = Callable[[TaskCacheManager, PagedStrategy, TaskCacheState], object]


def set_ref(page: int, count: int) -> Damage:
    return lambda cache, paged, state: paged.allocator._refs.__setitem__(page, count)


def swap_order(cache: TaskCacheManager, paged: PagedStrategy, state: TaskCacheState) -> None:
    """Put the last two reusable pages, a child and its parent, the other way round."""
    pages, end = paged.allocator, paged.num_pages
    order = list(pages.reusable())
    order[-2:] = order[:-3:-1]
    for before, after in zip([end, *order], [*order, end], strict=True):
        pages._next[before], pages._prev[after] = after, before


def swap_pages(cache: TaskCacheManager, paged: PagedStrategy, state: TaskCacheState) -> None:
    state.pages[:2] = state.pages[1::-1]
    cache._table.write(state.row, 0, state.pages)


def move_run(cache: TaskCacheManager, paged: PagedStrategy, state: TaskCacheState) -> None:
    """Let the reusable run follow a page that does not exist."""
    radix = paged.radix
    key = b"nobody.." + radix._keys[1][-16:]
    radix._runs[key] = radix._runs.pop(radix._keys[1])
    radix._keys[1] = key


def drop_parent(cache: TaskCacheManager, paged: PagedStrategy, state: TaskCacheState) -> None:
    """Let the task forget its first page, properly released."""
    paged.allocator.release([state.pages[0]])
    state.pages, state.length, state.num_published = state.pages[1:], 6, 0
    cache._table.write(state.row, 0, state.pages)


DAMAGES: dict[str, Damage] = {
    "a reference too many": set_ref(0, 5),
    "a reference lost": set_ref(0, 0),
    "a negative count": set_ref(7, -1),
    "a page free and reusable": lambda cache, paged, state: paged.allocator._stack.append(3),
    "a page free twice": lambda cache, paged, state: paged.allocator._stack.extend([6, 6]),
    "a free page lost": lambda cache, paged, state: setattr(paged.allocator, "_bump", 8),
    "reusable pages miscounted": lambda cache, paged, state: setattr(paged.allocator, "num_reusable", 1),
    "indexed pages miscounted": lambda cache, paged, state: setattr(paged.allocator, "num_indexed", 9),
    "a broken back link": lambda cache, paged, state: paged.allocator._prev.__setitem__(3, 7),
    "a parent evicted before its child": swap_order,
    "two keys of one run": lambda cache, paged, state: paged.radix._runs.__setitem__(b"x", 0),
    "a run without its page": lambda cache, paged, state: paged.radix._run_of.__setitem__(4, -1),
    "entries miscounted": lambda cache, paged, state: setattr(paged.radix, "_num_entries", 3),
    "an indexed page without an entry": lambda cache, paged, state: paged.radix.evict([4]),
    "an unreachable run": move_run,
    "a free page with an entry": lambda cache, paged, state: paged.radix.publish(b"root", [7], bytes(16)),
    "a reusable page that is not indexed": lambda cache, paged, state: paged.allocator._tags.__setitem__(3, -1),
    "a task that holds a page it has no reference on": lambda cache, paged, state: state.pages.append(6),
    "a task that holds an indexed page behind another": swap_pages,
    "a task that published less than it says": lambda cache, paged, state: setattr(state, "num_published", 3),
    "a task that holds a page without the one before it": drop_parent,
    "a task with too many slots": lambda cache, paged, state: setattr(state, "length", 30),
    "a row that is not the task's pages": lambda cache, paged, state: cache._table.write(state.row, 0, [5]),
    "a row without a task": lambda cache, paged, state: cache._table.take(),
    "two tasks in one row": lambda cache, paged, state: setattr(state, "row", state.row + 1),
    "a fork missing in its family": lambda cache, paged, state: setattr(state, "family", set()),
}


@pytest.mark.parametrize("damage", [pytest.param(damage, id=name) for name, damage in DAMAGES.items()])
def test_damage_is_found(lease: Lease, damage: Damage) -> None:
    cache = TaskCacheManager(num_pages=8, page_size=4, max_num_seqs=4, max_model_len=32)
    paged = cache._strategy
    assert isinstance(paged, PagedStrategy)
    held = cache.alloc(lease, "held", list(range(10)))
    cache.publish(lease, held, list(range(10)), 10)
    passing = cache.alloc(lease, "passing", list(range(20, 32)))
    cache.publish(lease, passing, list(range(20, 32)), 8)
    assert (held.pages, passing.pages) == ([0, 1, 2], [3, 4, 5])
    cache.free(lease, passing)
    cache.check_integrity()
    damage(cache, paged, held)
    with pytest.raises(PageAccountingError):
        cache.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda slots, state: slots.clear(), id="a slot that is not taken"),
        pytest.param(lambda slots, state: slots.add(1), id="a slot without a task"),
        pytest.param(lambda slots, state: setattr(state, "pages", [0, 1]), id="pages of another slot"),
    ],
)
def test_damage_of_the_contiguous_strategy_is_found(lease: Lease, damage: Callable[..., object]) -> None:
    cache = TaskCacheManager(num_pages=8, page_size=4, max_num_seqs=4, max_model_len=16, cache="contiguous")
    state = cache.alloc(lease, "held", [1])
    cache.check_integrity()
    damage(cache._strategy._taken, state)  # type: ignore[attr-defined]
    with pytest.raises(PageAccountingError):
        cache.check_integrity()


def test_pages_that_do_not_add_up_are_found() -> None:
    with pytest.raises(PageAccountingError, match="live \\+ cached \\+ free"):
        check_totals(PageStats(total=4, live=1, cached=1, free=1), ReqToTokenPool(1, 1), [])
