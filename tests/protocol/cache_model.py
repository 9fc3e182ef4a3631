"""The cache as a naive model: a dictionary of prefixes, sets of holders, and what lies in every slot."""

from __future__ import annotations

from itertools import count

from attrs import Factory, define

from aengine.cache.state import TaskCacheState
from statemachines.policy import Operation

Key = tuple[str | None, tuple[int, ...]]
"""A prefix: its salt and all its tokens."""
Content = tuple[int, tuple[int, ...]]
"""KV of one position: the epoch it was computed in, and the tokens up to it."""
Slots = dict[tuple[int, int], Content]
"""What lies in each (page, offset)."""


@define
class Lease:
    epoch: int = 0

    def check(self, operation: Operation) -> None:
        """Everything is permitted."""

    def bump_epoch(self) -> int:
        self.epoch += 1
        return self.epoch


@define(eq=False)
class Page:
    """A page of the model; its number is whatever the cache chose."""

    number: int = -1
    key: Key | None = None
    released: int = -1


@define(eq=False)
class Task:
    state: TaskCacheState
    tokens: list[int]
    salt: str | None
    epoch: int
    length: int
    computed: int
    pages: list[Page]
    contents: list[Content] = Factory(list)
    is_publishable: bool = True


def after_copies(slots: Slots, copies: list[tuple[int, int]], page_size: int) -> Slots:
    slots = dict(slots)
    for source, target in copies:
        slots.update({(target, at): slots[source, at] for at in range(page_size) if (source, at) in slots})
    return slots


class OutOfModelPages(Exception):
    """The model cannot serve this either."""


class Model:
    """Eviction takes the page released longest ago that no indexed prefix continues, found by looking at all."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.epoch = 0
        self.tasks: list[Task] = []
        self.indexed: dict[Key, Page] = {}
        self._clock = count()

    def holders(self, page: Page) -> list[Task]:
        return [task for task in self.tasks if page in task.pages]

    def live(self) -> set[Page]:
        return {page for task in self.tasks for page in task.pages}

    def cached(self) -> set[Page]:
        return set(self.indexed.values()) - self.live()

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def prefix(self, salt: str | None, tokens: list[int], blocks: int) -> Key:
        return salt, tuple(tokens[: blocks * self.page_size])

    def match(self, salt: str | None, tokens: list[int]) -> list[Page]:
        pages: list[Page] = []
        while len(pages) < (len(tokens) - 1) // self.page_size:
            page = self.indexed.get(self.prefix(salt, tokens, len(pages) + 1))
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, needed: int, spared: list[Page]) -> list[Page]:
        """New pages, for which others may have to go, none of `spared` among them."""
        evictable = self.cached() - set(spared)
        free = self.num_pages - len(self.live()) - len(self.cached())
        if needed > free + len(evictable):
            raise OutOfModelPages
        for _ in range(needed - free):
            self._evict(self.cached() - set(spared))
        return [Page() for _ in range(needed)]

    def _evict(self, candidates: set[Page]) -> None:
        leaves = [page for page in candidates if not self._children(page)]
        oldest = min(leaves, key=lambda page: page.released)
        assert oldest.key is not None
        del self.indexed[oldest.key]

    def _children(self, page: Page) -> list[Key]:
        assert page.key is not None
        salt, tokens = page.key
        return [
            key for key in self.indexed if key[0] == salt and key[1][: -self.page_size] == tokens and key[1] != tokens
        ]

    def release(self, task: Task) -> None:
        self.tasks.remove(task)
        live = self.live()
        for page in reversed(task.pages):
            if page not in live:
                page.released = next(self._clock)

    def must_copy(self, task: Task) -> bool:
        block = task.length // self.page_size
        return block < len(task.pages) and self.is_readable_by_others(task.pages[block])

    def is_readable_by_others(self, page: Page) -> bool:
        return len(self.holders(page)) > 1 or page in self.indexed.values()

    def drop_reference(self, task: Task, page: Page) -> None:
        task.pages.remove(page)
        if page not in self.live():
            page.released = next(self._clock)

    def publish(self, task: Task) -> None:
        if not task.is_publishable or task.epoch != self.epoch or self.page_size == 1:
            return
        for block in range(task.computed // self.page_size):
            key = self.prefix(task.salt, task.tokens, block + 1)
            page, known = task.pages[block], self.indexed.get(key)
            if known is None:
                page.key = key
                self.indexed[key] = page
            elif known is not page:
                for holder in self.holders(page):
                    holder.pages[block] = known

    def invalidate(self) -> int:
        dropped = len(self.indexed)
        self.indexed.clear()
        self.epoch += 1
        return dropped
