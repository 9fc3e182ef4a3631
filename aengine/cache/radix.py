"""The prefix index: from a page's whole prefix, by exact tokens, to the page.

There is no tree of objects. Pages that were published together, one after the other, are a *run*; one flat dictionary
maps (identity of the parent page, tokens of the run's first page) to the run, and the tokens of its other pages are
compared as bytes, so a long prefix costs one dictionary access and one comparison of memory. Equality is equality of
tokens, never of a hash. A run never grows; pages leave it from its end.

An *identity* is eight bytes that name one publication of one page, and are never used again; so whatever comes after
a page that has gone cannot be taken for the child of what comes in its place. The parent identity of a first page is
longer: it is made of the epoch and the salt, so that nothing indexed in an old epoch can be reached from a new one.
Keys are bytes and the dictionary's values integers, which keeps both out of the garbage collector's way.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Protocol

from aengine.errors import PageAccountingError, PromptError

__all__ = ["RadixCache", "Salt", "TokenIds", "root_identity", "token_bytes"]

TOKEN_BYTES = 4
NO_RUN = -1
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
    (`Allocator.share`) before anything else runs, and the allocator says which entries have to go (`evict`), those of
    children before those of their parents.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_bytes = TOKEN_BYTES * page_size
        self._runs: dict[bytes, int] = {}
        self._run_of = [NO_RUN] * num_pages
        self._num_entries = 0
        self._num_published = 0
        # Of each run by number. A number is used again when all pages of its run have gone.
        self._keys: list[bytes] = []
        """What leads to it, empty if nothing does any more."""
        self._rests: list[bytes] = []
        """Tokens of its pages but the first, whose tokens are in the key."""
        self._pages: list[tuple[int, ...]] = []
        self._lengths: list[int] = []
        """How many of its pages are still there."""
        self._cuts: list[int] = []
        """Length at which the memory of those that have gone is given back."""
        self._firsts: list[int] = []
        """Identity of its first page as a number; those of the others follow."""
        self._free: list[int] = []

    def __len__(self) -> int:
        """Entries, those of earlier epochs whose pages have not been used again included."""
        return self._num_entries

    def __contains__(self, page: int) -> bool:
        return self._run_of[page] != NO_RUN

    def lookup(self, root: bytes, tokens: bytes, after: int | None = None) -> list[int]:
        """The longest indexed sequence of `tokens`, from the root on or from behind the indexed page `after`.

        Nothing is referenced, nothing touched.
        """
        size = self._page_bytes
        chain: list[int] = []
        parent = root
        if after is not None:
            run, place = self._place(after)
            count = self._count_equal(run, place, tokens, 0)
            chain += self._pages[run][place + 1 : place + 1 + count]
            parent = self._identity(run, place + count)
        while (at := len(chain) * size) < len(tokens):
            next_run = self._runs.get(parent + tokens[at : at + size])
            if next_run is None:
                break
            count = self._count_equal(next_run, 0, tokens, at + size)
            chain += self._pages[next_run][: count + 1]
            parent = self._identity(next_run, count)
        return chain

    def _place(self, page: int) -> tuple[int, int]:
        run = self._run_of[page]
        pages, last = self._pages[run], self._lengths[run] - 1
        return run, last if pages[last] == page else pages.index(page)

    def _identity(self, run: int, place: int) -> bytes:
        return _IDENTITY.pack(self._firsts[run] + place)

    def _count_equal(self, run: int, place: int, tokens: bytes, start: int) -> int:
        """How many pages of a run, from behind `place` on, hold the tokens from byte `start` on."""
        size, rest, shift = self._page_bytes, self._rests[run], place * self._page_bytes - start
        low, high = 0, min(self._lengths[run] - 1 - place, (len(tokens) - start) // size)
        end = start + high * size
        if tokens[start:end] == rest[start + shift : end + shift]:
            return high
        while high - low > 1:  # `low` pages are equal, `high` are not
            middle = (low + high) // 2
            begin, end = start + low * size, start + middle * size
            if tokens[begin:end] == rest[begin + shift : end + shift]:
                low = middle
            else:
                high = middle
        return low

    def publish(self, root: bytes, pages: Sequence[int], tokens: bytes, after: int | None = None) -> list[int]:
        """Index `pages` from the root on or behind the indexed page `after`.

        Returns the pages that were indexed for the first of them before: their canonical twins, or the same pages when
        another holder published them first. Only a beginning can be there, as what follows a new page is new.
        """
        known = self.lookup(root, tokens, after)
        fresh = pages[len(known) :]
        if fresh:
            parent = known[-1] if known else after
            key = root if parent is None else self._identity(*self._place(parent))
            self._insert(key, fresh, tokens[len(known) * self._page_bytes :])
        return known

    def _insert(self, parent: bytes, pages: Sequence[int], tokens: bytes) -> None:
        run_of = self._run_of
        if max(map(run_of.__getitem__, pages)) != NO_RUN:
            raise PageAccountingError(f"one of pages {pages} is indexed already, as what follows another prefix")
        run = self._free.pop() if self._free else self._new_run()
        key = parent + tokens[: self._page_bytes]
        self._runs[key] = run
        self._keys[run], self._rests[run] = key, tokens[self._page_bytes :]
        self._pages[run], self._lengths[run], self._cuts[run] = tuple(pages), len(pages), len(pages) // 4
        self._firsts[run] = self._num_published
        self._num_published += len(pages)
        self._num_entries += len(pages)
        for page in pages:
            run_of[page] = run

    def _new_run(self) -> int:
        self._keys.append(b"")
        self._rests.append(b"")
        self._pages.append(())
        self._lengths.append(0)
        self._cuts.append(0)
        self._firsts.append(0)
        return len(self._keys) - 1

    def evict(self, pages: Sequence[int]) -> None:
        """Delete the entries of pages that are used again; all or nothing.

        A run that loses another page than its last cannot be reached from then on. That happens only in earlier
        epochs, where pages still held are given back in any order.
        """
        run_of, lengths, cuts, run_pages = self._run_of, self._lengths, self._cuts, self._pages
        runs = [run_of[page] for page in pages]
        if NO_RUN in runs:
            raise PageAccountingError(f"page {pages[runs.index(NO_RUN)]} has no entry in the prefix index")
        for page, run in zip(pages, runs, strict=True):
            run_of[page] = NO_RUN
            lengths[run] = length = lengths[run] - 1
            is_last = run_pages[run][length] == page
            if length == cuts[run] or (not is_last and self._keys[run]):
                self._cut(run, is_reachable=length > 0 and is_last)
        self._num_entries -= len(pages)

    def _cut(self, run: int, *, is_reachable: bool) -> None:
        """Forget what a run no longer needs; being done at each quarter, it bounds memory by the pages left."""
        length = self._lengths[run]
        if not is_reachable and self._keys[run]:
            del self._runs[self._keys[run]]
            self._keys[run] = b""
        self._pages[run] = self._pages[run][:length]
        self._rests[run] = self._rests[run][: max(length - 1, 0) * self._page_bytes]
        self._cuts[run] = length // 4
        if not length:
            self._free.append(run)

    def parents(self, epoch: int, indexed: Collection[int]) -> dict[int, int | None]:
        """The page before each of `indexed`, None for first pages; linear in the pool.

        Raises `PageAccountingError` if the books disagree, or a page cannot be reached in `epoch`.
        """
        chains = {run: self._pages[run][: self._lengths[run]] for run in self._runs.values()}
        reachable = {page: (run, at) for run, pages in chains.items() for at, page in enumerate(pages)}
        if any(self._runs.get(self._keys[run]) != run for run in chains) or len(chains) != len(self._runs):
            raise PageAccountingError("runs of the prefix index and their keys disagree")
        if any(self._run_of[page] != run for page, (run, _) in reachable.items()):
            raise PageAccountingError("runs of the prefix index and their pages disagree")
        if self._num_entries != sum(run != NO_RUN for run in self._run_of):
            raise PageAccountingError(f"{self._num_entries} entries are counted in the prefix index, there are others")
        by_identity = {self._identity(*place): page for page, place in reachable.items() if page in indexed}
        parents: dict[int, int | None] = {}
        for page in indexed:
            if page not in reachable:
                raise PageAccountingError(f"page {page} counts as indexed, and no run holds it")
            run, at = reachable[page]
            parents[page] = chains[run][at - 1] if at else self._parent(self._keys[run], epoch, by_identity)
        return parents

    def _parent(self, key: bytes, epoch: int, by_identity: dict[bytes, int]) -> int | None:
        parent = key[: -self._page_bytes]
        if len(parent) > _IDENTITY.size and parent.startswith(_IDENTITY.pack(epoch)):
            return None
        if parent not in by_identity:
            raise PageAccountingError("a page is indexed, but what it follows cannot be reached")
        return by_identity[parent]
