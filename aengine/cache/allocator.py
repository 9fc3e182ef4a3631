"""Pages and who holds them: reference counts, free pages, and reusable pages in order of last use.

Every operation is linear in the pages it is given and does not depend on the size of the pool. All state lies in flat
lists indexed by page; a pool makes no object per page until that page is first used.

A page is in exactly one of three states:

* live: held by at least one task (`refs > 0`);
* reusable: held by nobody, its content indexed in the present epoch (`refs == 0`, `tag == epoch`);
* free: held by nobody, its content worth nothing. Free pages lie on a stack, or beyond the bump counter (never used
  yet), or on the stale list (reusable in an earlier epoch: splicing them there took one step, their index entries are
  deleted when they are handed out).

**Child before parent.** A chain is always released as a whole prefix, deepest page first, and whoever holds a page
holds the pages before it. So among reusable pages a child always stands before its parent, the head of the list is
always a leaf of the prefix tree, and taking the head is exact least-recently-used eviction of leaves in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import length_hint

from aengine.errors import OutOfPagesError, PageAccountingError

__all__ = ["Allocator"]

UNINDEXED = -1


class Allocator:
    """Owner of `num_pages` pages. Chains of pages are given and returned in order of position, first page first.

    `on_reuse` is told which pages lose their indexed content, before anything else changes; an exception in it leaves
    every count as it was. Misuse raises `PageAccountingError` and changes no count.
    """

    def __init__(self, num_pages: int, on_reuse: Callable[[list[int]], object], *, epoch: int = 0) -> None:
        self.num_pages = num_pages
        self.epoch = epoch
        self.num_reusable = 0
        self.num_indexed = 0
        """Pages, live and reusable, whose content is indexed in this epoch."""
        self._on_reuse = on_reuse
        self._refs = [0] * num_pages
        self._tags = [UNINDEXED] * num_pages
        """Epoch in which a page's content was indexed."""
        # The reusable list is circular; its sentinel, the slot behind the last page, has the head as next.
        self._next = [num_pages] * (num_pages + 1)
        self._prev = [num_pages] * (num_pages + 1)
        self._stack: list[int] = []
        self._bump = 0
        self._num_stale = 0
        self._stale_head = self._stale_tail = num_pages

    @property
    def num_free(self) -> int:
        return len(self._stack) + self.num_pages - self._bump + self._num_stale

    @property
    def num_live(self) -> int:
        return self.num_pages - self.num_free - self.num_reusable

    @property
    def num_available(self) -> int:
        """Pages `alloc` can hand out now: free ones, and reusable ones, all of which can be evicted."""
        return self.num_free + self.num_reusable

    def ref_count(self, page: int) -> int:
        return self._refs[page]

    def is_indexed(self, page: int) -> bool:
        """Whether its content is indexed in this epoch, so that nobody may write to it."""
        return self._tags[page] == self.epoch

    def is_exclusive(self, page: int) -> bool:
        """Whether nobody but its one holder can read it, so that it may write."""
        return self._refs[page] == 1 and self._tags[page] != self.epoch

    def count_reusable(self, pages: Sequence[int]) -> int:
        return sum(not self._refs[page] for page in pages)

    def alloc(self, n: int) -> list[int]:
        """Hand out `n` pages, each with one reference; all or nothing. Raises `OutOfPagesError`.

        Free pages go first, then stale ones, then the least recently used reusable ones.
        """
        if not 0 <= n <= self.num_available:
            raise OutOfPagesError(n, self.num_available)
        stack, refs, bump = self._stack, self._refs, self._bump
        old = n - len(stack) - self.num_pages + bump
        reclaimed = self._reclaim(old) if old > 0 else []
        at = max(len(stack) - n, 0)
        pages = stack[at:]
        del stack[at:]
        unused = n - len(pages) - len(reclaimed)
        pages += range(bump, bump + unused)
        self._bump = bump + unused
        for page in pages:
            refs[page] = 1
        return pages + reclaimed

    def share(self, pages: Sequence[int]) -> None:
        """Take a reference on every page of a chain; raises `PageAccountingError` if one of them is free."""
        self._check_range(pages)
        refs, tags, epoch, nexts, prevs = self._refs, self._tags, self.epoch, self._next, self._prev
        revived = 0
        for page in pages:
            count = refs[page]
            if not count:
                if tags[page] != epoch:
                    self.num_reusable -= revived
                    self.release(pages[: pages.index(page)])
                    raise PageAccountingError(f"page {page} is free: it cannot be shared")
                before, after = prevs[page], nexts[page]
                nexts[before] = after
                prevs[after] = before
                revived += 1
            refs[page] = count + 1
        self.num_reusable -= revived

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference on every page of a chain, deepest first.

        A page nobody holds any more becomes reusable if its content is indexed in this epoch, else free.
        """
        self._check_range(pages)
        refs = self._refs
        dropped = []
        for page in (rest := reversed(pages)):
            refs[page] = count = refs[page] - 1
            if not count:
                dropped.append(page)
            elif count < 0:
                for undone in pages[length_hint(rest) :]:
                    refs[undone] += 1
                raise PageAccountingError(f"page {page} is held by nobody: it cannot be released")
        if dropped:
            self._retire(dropped)

    def keep(self, pages: Sequence[int]) -> None:
        """Note that the content of these live pages is indexed from now on: released, they will be reusable."""
        self._check_range(pages)
        refs, tags, epoch = self._refs, self._tags, self.epoch
        for done, page in enumerate(pages):
            if not refs[page] or tags[page] == epoch:
                for undone in pages[:done]:
                    tags[undone] = UNINDEXED
                raise PageAccountingError(f"page {page} is held by nobody, or indexed already: it cannot be kept")
            tags[page] = epoch
        self.num_indexed += len(pages)

    def touch(self, pages: Sequence[int]) -> None:
        """Make a chain, given from its first page on, the most recently used."""
        self.share(pages)
        self.release(pages)

    def invalidate(self, epoch: int) -> int:
        """Enter `epoch`: every reusable page is free, and no live page will be reusable. One step in any pool.

        Returns how many pages, live and reusable, were indexed until now.
        """
        if epoch <= self.epoch:
            raise PageAccountingError(f"epoch {epoch} does not come after epoch {self.epoch}")
        nexts, prevs, end = self._next, self._prev, self.num_pages
        if self.num_reusable:
            if self._num_stale:
                nexts[self._stale_tail] = nexts[end]
            else:
                self._stale_head = nexts[end]
            self._stale_tail = prevs[end]
            self._num_stale += self.num_reusable
            nexts[end] = prevs[end] = end
        dropped, self.num_indexed, self.num_reusable, self.epoch = self.num_indexed, 0, 0, epoch
        return dropped

    def reusable(self) -> Iterator[int]:
        """Reusable pages, least recently used first."""
        return self._walk(self._next[self.num_pages], self.num_reusable, self._next)

    def reusable_backwards(self) -> Iterator[int]:
        return self._walk(self._prev[self.num_pages], self.num_reusable, self._prev)

    def stale(self) -> Iterator[int]:
        """Free pages whose content was indexed in an earlier epoch."""
        return self._walk(self._stale_head, self._num_stale, self._next)

    def unindexed(self) -> Iterator[int]:
        """Free pages that are not stale, those never used included."""
        return chain(self._stack, range(self._bump, self.num_pages))

    def _walk(self, page: int, count: int, links: list[int]) -> Iterator[int]:
        for _ in range(count):
            yield page
            page = links[page]

    def _reclaim(self, n: int) -> list[int]:
        """Hand out `n` pages from the stale list and, when that is empty, from the head of the reusable list."""
        nexts, end = self._next, self.num_pages
        num_stale = min(n, self._num_stale)
        pages = []
        stale, head = self._stale_head, nexts[end]
        for _ in range(num_stale):
            pages.append(stale)
            stale = nexts[stale]
        for _ in range(n - num_stale):
            pages.append(head)
            head = nexts[head]
        self._on_reuse(pages)
        self._stale_head = stale
        self._num_stale -= num_stale
        nexts[end] = head
        self._prev[head] = end
        self.num_reusable -= n - num_stale
        self.num_indexed -= n - num_stale
        refs, tags = self._refs, self._tags
        for page in pages:
            tags[page] = UNINDEXED
            refs[page] = 1
        return pages

    def _retire(self, pages: list[int]) -> None:
        """Put pages nobody holds, deepest first, where their content belongs."""
        tags, epoch, nexts, prevs, end = self._tags, self.epoch, self._next, self._prev, self.num_pages
        worthless = []
        tail = prevs[end]
        for page in pages:
            if tags[page] == epoch:
                nexts[tail] = page
                prevs[page] = tail
                tail = page
            else:
                worthless.append(page)
        nexts[tail] = end
        prevs[end] = tail
        self.num_reusable += len(pages) - len(worthless)
        if worthless:
            self._stack += worthless
            self._forget([page for page in worthless if tags[page] != UNINDEXED])

    def _forget(self, pages: list[int]) -> None:
        """Delete what the index says of pages that were indexed in an earlier epoch."""
        self._on_reuse(pages)
        for page in pages:
            self._tags[page] = UNINDEXED

    def _check_range(self, pages: Sequence[int]) -> None:
        if pages and not (min(pages) >= 0 and max(pages) < self.num_pages):
            raise PageAccountingError(f"pages {min(pages)} to {max(pages)} are not all in a pool of {self.num_pages}")
