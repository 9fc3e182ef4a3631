"""Proof that the page accounting is right. Linear in the pool: for tests and for debugging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from aengine.cache.allocator import Allocator
from aengine.cache.pool import ReqToTokenPool
from aengine.cache.radix import RadixCache
from aengine.cache.state import PageStats, TaskCacheState
from aengine.errors import PageAccountingError

__all__ = ["check_paged", "check_totals"]


def check_totals(pages: PageStats, table: ReqToTokenPool, states: Collection[TaskCacheState]) -> None:
    """What holds under any strategy. Raises `PageAccountingError`, like all here, naming the first violation."""
    if pages.live + pages.cached + pages.free != pages.total:
        raise PageAccountingError(f"live + cached + free is not the pool: {pages}")
    if len({state.row for state in states}) != table.num_rows - table.num_free:
        raise PageAccountingError("the rows taken in the request table are not those of the tasks")
    for state in states:
        if table.table[state.row, : len(state.pages)].tolist() != state.pages:
            raise PageAccountingError(f"row {state.row} of the table is not the pages of task {state.task_id!r}")


def check_paged(allocator: Allocator, radix: RadixCache, page_size: int, states: Collection[TaskCacheState]) -> None:
    """Every page in one place, every reference held by a task, every indexed page reachable and evicted in order."""
    _check_lists(allocator, radix)
    _check_holders(allocator, states)
    indexed = {page for page in range(allocator.num_pages) if allocator.is_indexed(page)}
    if len(indexed) != allocator.num_indexed:
        raise PageAccountingError(f"{len(indexed)} pages are indexed, {allocator.num_indexed} are counted")
    parents = radix.parents(allocator.epoch, indexed)
    _check_order(allocator, parents)
    for state in states:
        if len(state.pages) != -(-state.length // page_size):
            raise PageAccountingError(f"task {state.task_id!r}: {len(state.pages)} pages for {state.length} slots")
        if state.epoch == allocator.epoch:
            _check_chain(parents, state)
    _check_families(allocator, [state for state in states if state.epoch == allocator.epoch])


def _check_lists(allocator: Allocator, radix: RadixCache) -> None:
    reusable = list(allocator.reusable())
    stale, unindexed = list(allocator.stale()), list(allocator.unindexed())
    idle = [*reusable, *stale, *unindexed]
    if sorted(idle) != [page for page in range(allocator.num_pages) if not allocator.ref_count(page)]:
        raise PageAccountingError("the pages nobody holds are not, once each, the reusable and the free ones")
    if reusable != list(allocator.reusable_backwards())[::-1]:
        raise PageAccountingError("the list of reusable pages differs when it is read backwards")
    for page in idle:
        if allocator.is_indexed(page) != (page in reusable):
            raise PageAccountingError(f"page {page} is reusable without being indexed, or the reverse")
    for page in unindexed:
        if page in radix:
            raise PageAccountingError(f"page {page} is free and its entry would never be deleted")


def _check_holders(allocator: Allocator, states: Collection[TaskCacheState]) -> None:
    holders = Counter(page for state in states for page in state.pages)
    for page in range(allocator.num_pages):
        count = allocator.ref_count(page)
        if count != holders[page]:
            raise PageAccountingError(f"page {page} counts {count} references, but {holders[page]} tasks hold it")


def _check_order(allocator: Allocator, parents: dict[int, int | None]) -> None:
    place = {page: at for at, page in enumerate(allocator.reusable())}
    for page, parent in parents.items():
        if parent is None or allocator.ref_count(parent):
            continue
        if allocator.ref_count(page):
            raise PageAccountingError(f"page {page} is held, but nobody holds page {parent} before it")
        if place[page] > place[parent]:
            raise PageAccountingError(f"page {parent} would be evicted before page {page}, which follows it")


def _check_chain(parents: dict[int, int | None], state: TaskCacheState) -> None:
    """A task that holds an indexed page holds the pages it follows."""
    before: int | None = None
    for block, page in enumerate(state.pages):
        if page in parents and parents[page] != before:
            raise PageAccountingError(f"task {state.task_id!r} holds page {page} behind {before}, not {parents[page]}")
        if page not in parents and block < state.num_published:
            raise PageAccountingError(f"page {page} of task {state.task_id!r} should be indexed, and is not")
        before = page


def _check_families(allocator: Allocator, states: Collection[TaskCacheState]) -> None:
    """Whoever shares a page that is not indexed can be found when its twin is."""
    families: dict[int, Collection[TaskCacheState]] = {}
    for state in states:
        own = (state,) if state.family is None else state.family
        for page in state.pages:
            if not allocator.is_indexed(page) and state not in families.setdefault(page, own):
                raise PageAccountingError(f"task {state.task_id!r} is not in the family that shares page {page}")
