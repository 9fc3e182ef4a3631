"""The default strategy: pages from a shared pool, found again by prefix, shared, and copied on write."""

from __future__ import annotations

from collections.abc import Collection

from aengine.cache.allocator import Allocator
from aengine.cache.integrity import check_paged
from aengine.cache.keys import TOKEN_BYTES, TokenIds, token_bytes
from aengine.cache.pool import ReqToTokenPool
from aengine.cache.radix import RadixCache
from aengine.cache.state import PageStats, TaskCacheState
from aengine.cache.strategy import AllocationStrategy
from aengine.errors import OutOfPagesError

__all__ = ["PagedStrategy"]


class PagedStrategy(AllocationStrategy):
    """Only full pages whose KV has been computed are indexed, and nobody writes to a page that is indexed or shared.

    Whoever holds an indexed page holds the canonical page of every position before it. Eviction relies on that, so
    when a page turns out to be the twin of an indexed one, all tasks that share it are re-pointed together. Page size
    1 is a token slot: nothing is indexed.
    """

    name = "paged"
    can_fork = True

    def __init__(
        self, num_pages: int, page_size: int, table: ReqToTokenPool, *, prefix_caching: bool = True, epoch: int = 0
    ) -> None:
        super().__init__(num_pages, page_size, table)
        self.prefix_caching = prefix_caching and page_size > 1
        self.radix = RadixCache(num_pages, page_size)
        self.allocator = Allocator(num_pages, self.radix.evict, epoch=epoch)
        self._page_bytes = TOKEN_BYTES * page_size

    @property
    def capacity_tokens(self) -> int:
        return min(self.num_pages, self.table.max_pages_per_seq) * self.page_size

    @property
    def num_available(self) -> int:
        return self.allocator.num_available

    @property
    def num_indexed(self) -> int:
        return self.allocator.num_indexed

    def stats(self) -> PageStats:
        pages = self.allocator
        return PageStats(self.num_pages, live=pages.num_live, cached=pages.num_reusable, free=pages.num_free)

    def lookup(self, root: bytes, prompt: bytes) -> int:
        return len(self._match(root, prompt)) * self.page_size

    def _match(self, root: bytes, prompt: bytes) -> list[int]:
        """Indexed pages of a prompt, never that of its last token: its logits are needed, so it is computed again."""
        if not self.prefix_caching:
            return []
        num_pages = (len(prompt) - TOKEN_BYTES) // self._page_bytes
        return self.radix.lookup(root, prompt[: num_pages * self._page_bytes])

    def alloc(self, state: TaskCacheState, max_cached_tokens: int | None = None) -> None:
        end = None if max_cached_tokens is None else TOKEN_BYTES * (max_cached_tokens + 1)
        pages = self._match(state.root, state.prompt[:end])
        state.num_published = len(pages)
        state.num_cached_tokens = len(pages) * self.page_size
        pages += self._acquire(pages, self.pages_for(state.length) - len(pages))
        state.pages = pages
        self.table.write(state.row, 0, pages)

    def _acquire(self, matched: list[int], needed: int) -> list[int]:
        """Reference matched pages and hand out `needed` others; a match is no longer there to be evicted."""
        available = self.allocator.num_available
        if needed > available - len(matched):
            available -= self.allocator.count_reusable(matched)
            if needed > available:
                raise OutOfPagesError(needed, available)
        self.allocator.share(matched)
        return self.allocator.alloc(needed)

    def must_copy(self, state: TaskCacheState) -> bool:
        block = state.length // self.page_size
        return block < len(state.pages) and not self.allocator.is_exclusive(state.pages[block])

    def extend(self, state: TaskCacheState, num_tokens: int) -> tuple[tuple[int, int], ...]:
        if num_tokens <= state.length:
            return ()
        pages = state.pages
        copying = self.must_copy(state)
        missing = self.pages_for(num_tokens) - len(pages)
        if not copying and not missing:
            state.length = num_tokens
            return ()
        fresh = self.allocator.alloc(missing + copying)
        copies: tuple[tuple[int, int], ...] = ()
        block = state.length // self.page_size
        if copying:
            source, target = pages[block], fresh.pop()
            pages[block] = target
            self.allocator.release([source])
            copies = ((source, target),)
        pages += fresh
        self.table.write(state.row, block, pages[block:])
        state.length = num_tokens
        return copies

    def fork(self, parent: TaskCacheState, child: TaskCacheState) -> None:
        pages = parent.pages[: self.pages_for(child.length)]
        self.allocator.share(pages)
        child.pages = pages
        child.num_published = min(parent.num_published, child.length // self.page_size)
        if parent.family is None:
            parent.family = {parent}
        child.family = parent.family
        child.family.add(child)
        self.table.write(child.row, 0, pages)

    def publish(self, state: TaskCacheState, token_ids: TokenIds, num_computed: int) -> None:
        first, last = state.num_published, num_computed // self.page_size
        if last <= first or not (self.prefix_caching and state.publishable and state.epoch == self.allocator.epoch):
            return
        pages = state.pages[first:last]
        after = state.pages[first - 1] if first else None
        known = self.radix.publish(state.root, pages, self._tokens(state, token_ids, first, last), after)
        self.allocator.keep(pages[len(known) :])
        for block, page in enumerate(known, first):
            if page != state.pages[block]:
                self._repoint(state, block, page)
        state.num_published = last

    def _tokens(self, state: TaskCacheState, token_ids: TokenIds, first: int, last: int) -> bytes:
        """Tokens of pages `first` to `last`; those of the prompt are at hand as bytes already."""
        start, stop = first * self._page_bytes, last * self._page_bytes
        if stop <= len(state.prompt):
            return state.prompt[start:stop]
        return token_bytes(token_ids[first * self.page_size : last * self.page_size])

    def _repoint(self, state: TaskCacheState, block: int, page: int) -> None:
        """Let every holder of a page whose twin is indexed hold the twin; the duplicate goes free."""
        duplicate = state.pages[block]
        for holder in state.family or (state,):
            if block < len(holder.pages) and holder.pages[block] == duplicate:
                self.allocator.share([page])
                self.allocator.release([duplicate])
                holder.pages[block] = page
                self.table.write(holder.row, block, [page])

    def free(self, state: TaskCacheState) -> None:
        self.allocator.release(state.pages)
        state.pages = []
        if state.family is not None:
            state.family.discard(state)

    def invalidate(self, epoch: int) -> int:
        return self.allocator.invalidate(epoch)

    def check_integrity(self, states: Collection[TaskCacheState]) -> None:
        check_paged(self.allocator, self.radix, self.page_size, states)
