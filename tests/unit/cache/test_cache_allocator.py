"""Counts never lie: misuse raises and changes nothing, and every operation is independent of the pool's size."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from aengine.cache.allocator import Allocator
from aengine.errors import OutOfPagesError, PageAccountingError


def ignore(_: list[int]) -> None:
    """Index that nobody reads."""


def counts(pages: Allocator) -> tuple[int, int, int, list[int]]:
    return pages.num_live, pages.num_reusable, pages.num_free, [pages.ref_count(p) for p in range(pages.num_pages)]


def kept_chain(pages: Allocator, n: int) -> list[int]:
    """A chain that has been used, indexed and released."""
    chain = pages.alloc(n)
    pages.keep(chain)
    pages.release(chain)
    return chain


def test_pages_are_handed_out_once_each_with_one_reference() -> None:
    pages = Allocator(4, ignore)
    assert sorted(pages.alloc(3) + pages.alloc(1)) == [0, 1, 2, 3]
    assert counts(pages) == (4, 0, 0, [1, 1, 1, 1])


def test_an_allocation_takes_all_pages_or_none() -> None:
    pages = Allocator(4, ignore)
    pages.alloc(2)
    before = counts(pages)
    with pytest.raises(OutOfPagesError) as refused:
        pages.alloc(3)
    assert (refused.value.needed, refused.value.available) == (3, 2)
    assert counts(pages) == before


def test_a_negative_number_of_pages_is_refused() -> None:
    with pytest.raises(OutOfPagesError):
        Allocator(4, ignore).alloc(-1)


def test_a_released_page_is_free_unless_its_content_was_indexed() -> None:
    pages = Allocator(4, ignore)
    chain = pages.alloc(3)
    pages.keep(chain[:2])
    pages.release(chain)
    assert (pages.num_live, pages.num_reusable, pages.num_free) == (0, 2, 2)


def test_a_page_is_live_until_its_last_holder_releases_it() -> None:
    pages = Allocator(2, ignore)
    chain = pages.alloc(1)
    pages.share(chain)
    pages.release(chain)
    assert (pages.num_live, pages.ref_count(chain[0])) == (1, 1)
    pages.release(chain)
    assert (pages.num_live, pages.num_free) == (0, 2)


def test_eviction_takes_the_deepest_page_of_the_chain_released_first() -> None:
    evicted: list[int] = []
    pages = Allocator(5, evicted.extend)
    old, new = kept_chain(pages, 3), kept_chain(pages, 2)
    pages.alloc(4)
    assert evicted == [old[2], old[1], old[0], new[1]]


def test_sharing_a_reusable_chain_saves_it_from_eviction() -> None:
    evicted: list[int] = []
    pages = Allocator(4, evicted.extend)
    old, new = kept_chain(pages, 2), kept_chain(pages, 2)
    pages.share(old)
    assert sorted(pages.alloc(2)) == sorted(new)
    assert sorted(evicted) == sorted(new)
    with pytest.raises(OutOfPagesError):
        pages.alloc(1)


def test_touching_a_chain_makes_it_the_last_to_be_evicted() -> None:
    pages = Allocator(4, ignore)
    old, new = kept_chain(pages, 2), kept_chain(pages, 2)
    pages.touch(old)
    assert list(pages.reusable()) == [new[1], new[0], old[1], old[0]]


def test_free_pages_go_before_reusable_ones() -> None:
    evicted: list[int] = []
    pages = Allocator(4, evicted.extend)
    kept_chain(pages, 2)
    pages.alloc(2)
    assert evicted == []


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(lambda pages, held, free: pages.release([*held, *free]), id="release a page nobody holds"),
        pytest.param(lambda pages, held, free: pages.release(held[:1] * 2), id="release a page twice at once"),
        pytest.param(lambda pages, held, free: pages.share([*held, *free]), id="share a free page"),
        pytest.param(lambda pages, held, free: pages.keep([*held, *free]), id="keep a free page"),
        pytest.param(lambda pages, held, free: pages.keep(held[:1] * 2), id="keep a page twice"),
        pytest.param(lambda pages, held, free: pages.touch(free), id="touch a free page"),
        pytest.param(lambda pages, held, free: pages.release([held[0], 6]), id="release a page behind the pool"),
        pytest.param(lambda pages, held, free: pages.share([held[0], -1]), id="share a negative page"),
        pytest.param(lambda pages, held, free: pages.invalidate(0), id="invalidate to an epoch that was"),
    ],
)
def test_misuse_raises_and_changes_no_count(misuse: object) -> None:
    pages = Allocator(6, ignore)
    kept_chain(pages, 2)
    held, free = pages.alloc(2), [4, 5]
    before = counts(pages), pages.num_indexed
    assert callable(misuse)
    with pytest.raises(PageAccountingError):
        misuse(pages, held, free)
    assert (counts(pages), pages.num_indexed) == before
    pages.keep(held)
    pages.release(held)
    assert pages.num_reusable == 4


def test_a_second_release_of_a_chain_raises_although_its_pages_are_reusable() -> None:
    pages = Allocator(4, ignore)
    chain = kept_chain(pages, 3)
    before = counts(pages)
    with pytest.raises(PageAccountingError, match="held by nobody"):
        pages.release(chain)
    assert counts(pages) == before


def test_an_index_that_raises_leaves_the_pages_as_they_were() -> None:
    def refuse(_: list[int]) -> None:
        raise RuntimeError("the index is broken")

    pages = Allocator(3, refuse)
    kept_chain(pages, 3)
    before = counts(pages), list(pages.reusable())
    with pytest.raises(RuntimeError, match="broken"):
        pages.alloc(2)
    assert (counts(pages), list(pages.reusable())) == before


def test_invalidation_frees_what_is_reusable_and_says_what_was_indexed() -> None:
    evicted: list[int] = []
    pages = Allocator(6, evicted.extend)
    kept_chain(pages, 3)
    held = pages.alloc(1)
    pages.keep(held)
    assert pages.invalidate(1) == 4
    assert (pages.num_live, pages.num_reusable, pages.num_free) == (1, 0, 5)
    assert evicted == [], "entries are deleted when their pages are used again, not now"
    pages.release(held)
    assert (pages.num_live, pages.num_reusable, pages.num_free) == (0, 0, 6)
    assert evicted == held, "a page held across the invalidation is not reusable"
    assert pages.invalidate(2) == 0


def test_stale_pages_of_several_epochs_are_all_handed_out_again() -> None:
    evicted: list[int] = []
    pages = Allocator(6, evicted.extend)
    chains = []
    for epoch in (1, 2, 3):
        chains.append(kept_chain(pages, 2))
        assert pages.invalidate(epoch) == 2
    assert list(pages.stale()) == [page for chain in chains for page in reversed(chain)]
    assert sorted(pages.alloc(6)) == list(range(6))
    assert sorted(evicted) == list(range(6))
    assert pages.num_free == 0


def test_a_pool_of_a_million_pages_makes_no_object_per_page_until_it_is_used() -> None:
    before = sys.getallocatedblocks()
    pages = Allocator(1_000_000, ignore)
    assert sys.getallocatedblocks() - before < 100
    assert sum(sys.getsizeof(value) for value in vars(pages).values()) < 50e6
    assert pages.alloc(2) == [0, 1]


def test_a_million_reusable_pages_are_invalidated_without_touching_them() -> None:
    evicted: list[int] = []
    pages = Allocator(100_000, evicted.extend)
    chain = kept_chain(pages, 100_000)
    tags = pages._tags.copy()
    assert pages.invalidate(1) == 100_000
    assert (pages.num_free, evicted) == (100_000, [])
    assert pages._tags == tags
    assert pages.alloc(2) == chain[:-3:-1] == evicted
    assert all(later < earlier for earlier, later in pairwise(pages.stale()))
