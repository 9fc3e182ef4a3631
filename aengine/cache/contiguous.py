"""The simplest strategy: every slot owns one fixed range of pages, nothing is shared, nothing is found again."""

from __future__ import annotations

from collections.abc import Collection

from aengine.cache.keys import TokenIds
from aengine.cache.pool import ReqToTokenPool
from aengine.cache.state import PageStats, TaskCacheState
from aengine.cache.strategy import AllocationStrategy
from aengine.errors import OutOfPagesError, PageAccountingError

__all__ = ["ContiguousStrategy"]


class ContiguousStrategy(AllocationStrategy):
    """Slots are as long as the longest sequence, or as the pool where that is smaller; there are as many as fit.

    Row r of the table owns pages `r * pages_per_slot` onwards. A slot's pages are live while a task has it, whatever
    its length; the few pages behind the last slot are never used and not counted.
    """

    name = "contiguous"

    def __init__(self, num_pages: int, page_size: int, table: ReqToTokenPool) -> None:
        self.pages_per_slot = min(table.max_pages_per_seq, num_pages)
        self.num_slots = min(num_pages // self.pages_per_slot, table.num_rows)
        super().__init__(self.num_slots * self.pages_per_slot, page_size, table)
        self._taken: set[int] = set()

    @property
    def capacity_tokens(self) -> int:
        return self.pages_per_slot * self.page_size

    @property
    def num_available(self) -> int:
        return (self.num_slots - len(self._taken)) * self.pages_per_slot

    def stats(self) -> PageStats:
        free = self.num_available
        return PageStats(self.num_pages, live=self.num_pages - free, cached=0, free=free)

    def lookup(self, root: bytes, prompt: bytes) -> int:
        return 0

    def alloc(self, state: TaskCacheState, max_cached_tokens: int | None = None) -> None:
        needed = self.pages_for(state.length)
        if state.row >= self.num_slots or needed > self.pages_per_slot:
            raise OutOfPagesError(needed, min(self.num_available, self.pages_per_slot))
        self._taken.add(state.row)
        start = state.row * self.pages_per_slot
        state.pages = list(range(start, start + self.pages_per_slot))
        self.table.write(state.row, 0, state.pages)

    def extend(self, state: TaskCacheState, num_tokens: int) -> tuple[tuple[int, int], ...]:
        if num_tokens > self.capacity_tokens:
            raise OutOfPagesError(self.pages_for(num_tokens), self.pages_per_slot)
        state.length = max(state.length, num_tokens)
        return ()

    def publish(self, state: TaskCacheState, token_ids: TokenIds, num_computed: int) -> None:
        """Nothing is indexed."""

    def free(self, state: TaskCacheState) -> None:
        self._taken.remove(state.row)
        state.pages = []

    def invalidate(self, epoch: int) -> int:
        return 0

    def check_integrity(self, states: Collection[TaskCacheState]) -> None:
        rows = sorted(state.row for state in states)
        if rows != sorted(self._taken):
            raise PageAccountingError(f"tasks hold slots {rows}, but slots {sorted(self._taken)} are taken")
        for state in states:
            start = state.row * self.pages_per_slot
            if state.pages != list(range(start, start + self.pages_per_slot)):
                raise PageAccountingError(f"task {state.task_id!r} does not hold the pages of its slot {state.row}")
