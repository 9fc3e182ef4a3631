"""The prefix index: from a page's whole prefix, by exact tokens, to the page.

There is no tree of objects. One flat dictionary maps (identity of the parent page, the page's tokens as bytes) to the
page; a chain is walked once, one dictionary access a page, and equality is equality of tokens, never of a hash.

An *identity* is eight bytes that name one publication of one page, and are never used again; so whatever comes after
a page that has gone cannot be taken for the child of what comes in its place. The parent identity of a first page is
longer: it is made of the epoch and the salt, so that nothing indexed in an old epoch can be reached from a new one.
Keys hold only bytes and the dictionary only integers, which keeps both out of the garbage collector's way.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from operator import add
from typing import Protocol

from aengine.errors import PageAccountingError, PromptError

__all__ = ["RadixCache", "Salt", "TokenIds", "root_identity", "token_bytes"]

TOKEN_BYTES = 4
_IDENTITY = struct.Struct("<q")


class _Array(Protocol):
    """Arrays of `array`, numpy and torch."""

    def tolist(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> _Array: ...


TokenIds = Sequence[int] | _Array
Salt = str | tuple[str, ...] | None
"""What besides the tokens decides whether KV may be shared: the user's `cache_salt`, or it and the identity of an
adapter. None, "" and () are three different salts."""


def token_bytes(token_ids: TokenIds) -> bytes:
    """Token ids as little-endian int32; the same for list, tuple, array, numpy and torch.

    Raises `PromptError` for what is not an integer or does not fit.
    """
    values = token_ids if isinstance(token_ids, list | tuple) else _as_list(token_ids)
    try:
        return struct.pack(f"<{len(values)}i", *values)
    except struct.error as error:
        raise PromptError(f"token ids must be a flat sequence of integers of at most 32 bits: {error}") from None


def _as_list(token_ids: TokenIds) -> Sequence[int]:
    if isinstance(token_ids, Sequence):
        return list(token_ids)
    return token_ids.tolist()


def root_identity(epoch: int, salt: Salt) -> bytes:
    """Parent identity of first pages: at least nine bytes, different for every (epoch, salt)."""
    if salt is None:
        return _IDENTITY.pack(epoch) + b"\0"
    if isinstance(salt, str):
        return _IDENTITY.pack(epoch) + b"\1" + salt.encode("utf-8", "surrogatepass")
    parts = [part.encode("utf-8", "surrogatepass") for part in salt]
    return _IDENTITY.pack(epoch) + b"\2" + b"".join(_IDENTITY.pack(len(part)) + part for part in parts)


class RadixCache:
    """Index of full pages. Tokens are given as `token_bytes` of whole pages, chains first page first.

    It holds at most one entry a page. Pages are not counted here: whoever looks a chain up takes its references
    (`Allocator.share`) before anything else runs, and the allocator says which entries have to go (`evict`).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys = [b""] * num_pages
        """Key of each page's entry, empty where it has none."""
        self._identities = [b""] * num_pages
        self._page_bytes = TOKEN_BYTES * page_size
        self._split = struct.Struct(f"{self._page_bytes}s").iter_unpack
        self._num_published = 0

    def __len__(self) -> int:
        """Entries, those of earlier epochs whose pages have not been used again included."""
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return bool(self._keys[page])

    def identity(self, page: int) -> bytes:
        """Identity of a page that is indexed: the parent identity of what follows it."""
        return self._identities[page]

    def lookup(self, parent: bytes, tokens: bytes) -> list[int]:
        """The longest indexed run of `tokens` that continues `parent`. Nothing is referenced, nothing touched."""
        find, identities = self._pages.get, self._identities
        chain = []
        for (chunk,) in self._split(tokens):
            page = find(parent + chunk)
            if page is None:
                break
            chain.append(page)
            parent = identities[page]
        return chain

    def publish(self, parent: bytes, pages: Sequence[int], tokens: bytes) -> list[int]:
        """Index `pages` as what follows `parent`; returns the pages that were indexed for the first of them before.

        Those are their canonical twins, or the same pages when another holder published them first. Only a beginning
        of the run can be indexed already, as what follows a new page is new.
        """
        known = self.lookup(parent, tokens)
        fresh = pages[len(known) :]
        if fresh:
            if known:
                parent = self._identities[known[-1]]
            self._insert(parent, fresh, tokens[len(known) * self._page_bytes :])
        return known

    def _insert(self, parent: bytes, pages: Sequence[int], tokens: bytes) -> None:
        keys, identities = self._keys, self._identities
        if any(map(keys.__getitem__, pages)):
            raise PageAccountingError(f"one of pages {pages} is indexed already, as what follows another prefix")
        first, count = self._num_published, len(pages)
        self._num_published += count
        names = struct.unpack(f"{_IDENTITY.size}s" * count, struct.pack(f"<{count}q", *range(first, first + count)))
        chunks = struct.unpack(f"{self._page_bytes}s" * count, tokens)
        new_keys = list(map(add, (parent, *names), chunks))
        self._pages.update(zip(new_keys, pages, strict=True))
        for page, key, name in zip(pages, new_keys, names, strict=True):
            keys[page] = key
            identities[page] = name

    def evict(self, pages: Sequence[int]) -> None:
        """Delete the entries of pages that are used again; all or nothing."""
        keys, entries = self._keys, self._pages
        doomed = [keys[page] for page in pages]
        if not all(doomed):
            page = pages[doomed.index(b"")]
            raise PageAccountingError(f"page {page} has no entry in the prefix index")
        for page, key in zip(pages, doomed, strict=True):
            keys[page] = b""
            del entries[key]

    def parents(self, epoch: int, indexed: Collection[int]) -> dict[int, int | None]:
        """The page before each of `indexed`, None for first pages; linear in the pool.

        Raises `PageAccountingError` if an entry and its page disagree, or a page cannot be reached in `epoch`.
        """
        entries = {page for page, key in enumerate(self._keys) if key}
        if len(entries) != len(self._pages) or any(self._pages.get(self._keys[page]) != page for page in entries):
            raise PageAccountingError("entries of the prefix index and keys of pages disagree")
        if not entries.issuperset(indexed):
            raise PageAccountingError(f"pages {sorted(set(indexed) - entries)} count as indexed and have no entry")
        by_identity = {self._identities[page]: page for page in indexed}
        parents: dict[int, int | None] = {}
        for page in indexed:
            parent = self._keys[page][: -self._page_bytes]
            if len(parent) > _IDENTITY.size and parent.startswith(_IDENTITY.pack(epoch)):
                parents[page] = None
            elif parent in by_identity:
                parents[page] = by_identity[parent]
            else:
                raise PageAccountingError(f"page {page} is indexed, but what it follows cannot be reached")
        return parents
