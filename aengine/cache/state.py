"""What passes between the cache and those who use it: leases, the state of a task, and figures."""

from __future__ import annotations

from typing import Protocol

from attrs import Factory, define, field, frozen

from statemachines.policy import Operation

__all__ = ["CacheLease", "CacheStats", "PageStats", "TaskCacheState"]


class CacheLease(Protocol):
    """What the cache needs of a `StableLease`."""

    @property
    def epoch(self) -> int: ...

    def check(self, operation: Operation) -> None: ...

    def bump_epoch(self) -> int: ...


@define(eq=False)
class TaskCacheState:
    """The KV slots of one task: the contract between manager and strategy. Only they change it, save `publishable`.

    Position i lies in `pages[i // page_size]`. A position may be read once its KV has been computed, and written while
    it is at or behind the last `extend`.
    """

    task_id: str
    row: int
    """The task's row in the request-to-page table."""
    epoch: int
    """Epoch the task was allocated in; what it computes is never indexed in another."""
    root: bytes = field(repr=False)
    """What its first page follows: epoch and salt."""
    prompt: bytes = field(repr=False)
    """The tokens it was allocated for, as `token_bytes`."""
    length: int
    """Positions that have a slot."""
    num_cached_tokens: int = 0
    """Leading tokens whose KV was there already: found in the index, or shared by the task it was forked from."""
    num_published: int = 0
    """Leading pages that are indexed."""
    publishable: bool = True
    """Set to False, for good, when KV was made in a way no other task may share."""
    pages: list[int] = Factory(list)
    family: set[TaskCacheState] | None = field(default=None, repr=False)
    """The tasks forked from one another that still hold pages, itself included; None where there was no fork."""


@frozen
class PageStats:
    """Pages of the pool: held by a task, reusable through the prefix index, or neither."""

    total: int
    live: int
    cached: int
    free: int


@frozen
class CacheStats:
    pages: PageStats
    evictable: int
    """Cached pages that an allocation can take; every one, as eviction takes leaves first."""
    num_indexed: int
    """Entries that can be matched, on live and cached pages."""
    num_tasks: int
    query_tokens: int
    """Tokens of admitted requests that were looked up; readmissions after a preemption are not counted."""
    hit_tokens: int
    """Those of `query_tokens` whose KV was found."""
