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

from collections.abc import Collection, Sequence

from aengine.cache.keys import IDENTITY, TOKEN_BYTES
from aengine.errors import PageAccountingError

__all__ = ["RadixCache"]

NO_RUN = -1


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
        return IDENTITY.pack(self._firsts[run] + place)

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
        self._pages[run], self._lengths[run] = tuple(pages), len(pages)
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
        self._firsts.append(0)
        return len(self._keys) - 1

    def evict(self, pages: Sequence[int]) -> None:
        """Delete the entries of pages that are used again; all or nothing.

        A run that loses other pages than its last ones cannot be reached from then on. That happens only in earlier
        epochs, where pages still held are given back in any order.
        """
        run_of = self._run_of
        runs = [run_of[page] for page in pages]
        if NO_RUN in runs:
            raise PageAccountingError(f"page {pages[runs.index(NO_RUN)]} has no entry in the prefix index")
        for page in pages:
            run_of[page] = NO_RUN
        self._num_entries -= len(pages)
        if len(set(runs)) == 1:
            self._shorten(runs[0], pages)
            return
        gone: dict[int, list[int]] = {}
        for page, run in zip(pages, runs, strict=True):
            gone.setdefault(run, []).append(page)
        for run, its_pages in gone.items():
            self._shorten(run, its_pages)

    def _shorten(self, run: int, gone: Sequence[int]) -> None:
        pages, before = self._pages[run], self._lengths[run]
        self._lengths[run] = length = before - len(gone)
        if self._keys[run] and not (length and pages[length:before] == tuple(reversed(gone))):
            del self._runs[self._keys[run]]
            self._keys[run] = b""
        if 4 * length <= len(pages):  # so that memory is bounded by the pages that are left
            self._pages[run] = pages[:length]
            self._rests[run] = self._rests[run][: max(length - 1, 0) * self._page_bytes]
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
        if len(parent) > IDENTITY.size and parent.startswith(IDENTITY.pack(epoch)):
            return None
        if parent not in by_identity:
            raise PageAccountingError("a page is indexed, but what it follows cannot be reached")
        return by_identity[parent]
