"""The interface between the manager, which owns tasks and permission, and a way of handing out pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aengine.cache.keys import TokenIds
from aengine.cache.pool import ReqToTokenPool
from aengine.cache.state import PageStats, TaskCacheState
from aengine.errors import PageAccountingError

__all__ = ["AllocationStrategy"]


class AllocationStrategy(ABC):
    """Hands out pages to tasks and writes them into the request-to-page table.

    Every method is synchronous and all or nothing: an exception leaves pages, table and state as they were.
    """

    name: ClassVar[str]
    can_fork: ClassVar[bool] = False
    prefix_caching = False

    def __init__(self, num_pages: int, page_size: int, table: ReqToTokenPool) -> None:
        self.num_pages, self.page_size, self.table = num_pages, page_size, table

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def slot_indices(self, state: TaskCacheState, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of positions `start` to `stop`: `page * page_size + offset`, int64 [stop - start]."""
        if not 0 <= start <= stop <= state.length:
            raise PageAccountingError(f"task {state.task_id!r} has no slots {start} to {stop}, only {state.length}")
        positions = np.arange(start, stop, dtype=np.int64)
        pages = np.asarray(state.pages, dtype=np.int64)[positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    @property
    def num_indexed(self) -> int:
        """Pages that can be found by their prefix."""
        return 0

    @property
    @abstractmethod
    def capacity_tokens(self) -> int:
        """Most tokens one task can hold when it has the pool to itself."""

    @property
    @abstractmethod
    def num_available(self) -> int:
        """Pages that can be handed out now, evictable ones included."""

    @abstractmethod
    def stats(self) -> PageStats: ...

    @abstractmethod
    def lookup(self, root: bytes, prompt: bytes) -> int:
        """Tokens of `prompt` that `alloc` would find computed."""

    @abstractmethod
    def alloc(self, state: TaskCacheState, max_cached_tokens: int | None = None) -> None:
        """Give a new state pages for `state.prompt`, found ones for no more than `max_cached_tokens`. Raises
        `OutOfPagesError`."""

    @abstractmethod
    def extend(self, state: TaskCacheState, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Make `num_tokens` slots exist, and the next one writable; pages to copy as (from, to)."""

    def must_copy(self, state: TaskCacheState) -> bool:
        """Whether the page of the next position has to be copied before it is written."""
        return False

    def fork(self, parent: TaskCacheState, child: TaskCacheState) -> None:
        """Let `child` hold the pages of its `length` leading tokens together with `parent`."""
        raise PageAccountingError(f"the {self.name} strategy shares no pages, so a task cannot be forked")

    @abstractmethod
    def publish(self, state: TaskCacheState, token_ids: TokenIds, num_computed: int) -> None:
        """Index the full pages among the first `num_computed` tokens."""

    @abstractmethod
    def free(self, state: TaskCacheState) -> None:
        """Give back all pages of a state."""

    @abstractmethod
    def invalidate(self, epoch: int) -> int:
        """Make everything indexed unreachable; how many entries that were."""

    @abstractmethod
    def check_integrity(self, states: Collection[TaskCacheState]) -> None:
        """Raise `PageAccountingError` unless the pages are what `states`, all there are, say they are."""
