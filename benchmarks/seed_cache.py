"""The scheme this cache replaces, as a baseline: an integer bitmask of free pages, an ordered dictionary as LRU, and a
trie with tuples as keys into which each page is recorded from the root."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

__all__ = ["SeedCache"]


class _Pages:
    def __init__(self, num_pages: int, on_evict: Callable[[int], None]) -> None:
        self.free_mask = (1 << num_pages) - 1
        self.refs = [0] * num_pages
        self.lru: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    def alloc(self) -> int:
        if self.free_mask:
            lowest = self.free_mask & -self.free_mask
            page = lowest.bit_length() - 1
            self.free_mask ^= lowest
        else:
            page, _ = self.lru.popitem(last=False)
            self._on_evict(page)
            self.free_mask &= ~(1 << page)
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        self.refs[page] += 1
        self.lru.pop(page, None)

    def free(self, page: int, *, keep: bool) -> None:
        self.refs[page] -= 1
        if self.refs[page]:
            return
        if keep:
            self.lru[page] = None
        else:
            self.free_mask |= 1 << page

    def clear(self) -> int:
        dropped = len(self.lru)
        while self.lru:
            page, _ = self.lru.popitem(last=False)
            self._on_evict(page)
            self.free_mask |= 1 << page
        return dropped


class _Node:
    __slots__ = ("children", "page", "parent", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...]) -> None:
        self.parent, self.tokens = parent, tokens
        self.children: dict[tuple[int, ...], _Node] = {}
        self.page: int | None = None


class SeedCache:
    """`alloc`, `publish` and `free` of one request, as the benchmark asks for them."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._root = _Node(None, ())
        self._nodes: dict[int, _Node] = {}
        self._pages = _Pages(num_pages, self._evict)

    def fill(self, order: Sequence[int]) -> None:
        """Make these pages reusable, as chains of one page in order of last use, without the hour it takes."""
        mask = bytearray(self._pages.free_mask.to_bytes(len(self._pages.refs) // 8 + 1, "little"))
        for page in order:
            mask[page // 8] &= ~(1 << page % 8)
            self._link(self._root, (-1 - page,) * self._page_size, page)
            self._pages.lru[page] = None
        self._pages.free_mask = int.from_bytes(mask, "little")

    def alloc(self, token_ids: list[int]) -> list[int]:
        pages = self._lookup(token_ids)
        for page in pages:
            self._pages.share(page)
        pages += [self._pages.alloc() for _ in range(-(-len(token_ids) // self._page_size) - len(pages))]
        return pages

    def publish(self, pages: list[int], token_ids: list[int]) -> None:
        for block, page in enumerate(pages):
            self._record(page, token_ids, block)

    def free(self, pages: list[int]) -> None:
        for page in pages:
            self._pages.free(page, keep=page in self._nodes)

    def invalidate(self) -> int:
        return self._pages.clear()

    def _tokens(self, token_ids: list[int], block: int) -> tuple[int, ...]:
        return tuple(token_ids[block * self._page_size : (block + 1) * self._page_size])

    def _lookup(self, token_ids: list[int]) -> list[int]:
        pages: list[int] = []
        node = self._root
        for block in range((len(token_ids) - 1) // self._page_size):
            child = node.children.get(self._tokens(token_ids, block))
            if child is None or child.page is None:
                break
            pages.append(child.page)
            node = child
        return pages

    def _record(self, page: int, token_ids: list[int], block: int) -> None:
        node = self._root
        for ancestor in range(block):
            node = node.children[self._tokens(token_ids, ancestor)]
        self._link(node, self._tokens(token_ids, block), page)

    def _link(self, parent: _Node, tokens: tuple[int, ...], page: int) -> None:
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = _Node(parent, tokens)
        node.page = page
        self._nodes[page] = node

    def _evict(self, page: int) -> None:
        node = self._nodes.pop(page)
        node.page = None
        if node.parent is not None:
            node.parent.children.pop(node.tokens, None)
