"""The cache as the scheduler sees it: tasks, permission, and pages behind a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aengine.cache.contiguous import ContiguousStrategy
from aengine.cache.integrity import check_totals
from aengine.cache.keys import TOKEN_BYTES, Salt, TokenIds, root_identity, token_bytes
from aengine.cache.paged import PagedStrategy
from aengine.cache.pool import ReqToTokenPool
from aengine.cache.state import CacheLease, CacheStats, TaskCacheState
from aengine.cache.strategy import AllocationStrategy
from aengine.errors import ConfigError, PageAccountingError, PromptError, StaleLeaseError
from statemachines.policy import Operation

__all__ = ["TaskCacheManager"]


class TaskCacheManager:
    """Owner of every task's cache state. Each method is one synchronous step and all or nothing.

    Methods that read or change pages take a lease and raise `StaleLeaseError` if it does not permit that. None may
    run while a forward pass uses the states it is given.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        prefix_caching: bool = True,
        cache: Literal["paged", "contiguous"] = "paged",
        epoch: int = 0,
    ) -> None:
        names = ("num_pages", "page_size", "max_num_seqs", "max_model_len")
        for name, value in zip(names, (num_pages, page_size, max_num_seqs, max_model_len), strict=True):
            if value < 1:
                raise ConfigError(name, value, "must be at least 1")
        table = ReqToTokenPool(max_num_seqs, -(-max_model_len // page_size))
        self._strategy: AllocationStrategy
        if cache == "paged":
            self._strategy = PagedStrategy(num_pages, page_size, table, prefix_caching=prefix_caching, epoch=epoch)
        elif cache == "contiguous":
            self._strategy = ContiguousStrategy(num_pages, page_size, table)
        else:
            raise ConfigError("cache", cache, "must be 'paged' or 'contiguous'")
        self._table = table
        self._max_model_len = max_model_len
        self._epoch = epoch
        self._tasks: dict[str, TaskCacheState] = {}
        self._query_tokens = self._hit_tokens = 0

    @property
    def page_size(self) -> int:
        return self._strategy.page_size

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def can_fork(self) -> bool:
        return self._strategy.can_fork

    @property
    def num_available(self) -> int:
        return self._strategy.num_available

    @property
    def capacity_tokens(self) -> int:
        """Most tokens a task can hold KV for when it has the pool to itself."""
        return min(self._strategy.capacity_tokens, self._max_model_len)

    def can_ever_fit(self, num_tokens: int) -> bool:
        return num_tokens <= self.capacity_tokens

    def lookup(self, lease: CacheLease, token_ids: TokenIds, salt: Salt = None) -> int:
        """Leading tokens whose KV `alloc` would find now, at most all but the last. Takes and touches nothing."""
        lease.check(Operation.LOOKUP)
        self._check_epoch(lease)
        return self._strategy.lookup(root_identity(self._epoch, salt), token_bytes(token_ids))

    def alloc(
        self,
        lease: CacheLease,
        task_id: str,
        token_ids: TokenIds,
        salt: Salt = None,
        *,
        readmit: bool = False,
        max_cached_tokens: int | None = None,
    ) -> TaskCacheState:
        """Give a task pages for `token_ids`, the longest indexed prefix included, without its last token and of no
        more than `max_cached_tokens`.

        `readmit` says that the task was preempted: other permission, and no count as a query. Raises
        `OutOfPagesError` (`OutOfRowsError` among them), and `PromptError` for tokens that can never be served.
        """
        lease.check(Operation.READMIT if readmit else Operation.ALLOC)
        if not readmit:
            lease.check(Operation.LOOKUP)
        self._check_epoch(lease)
        prompt = token_bytes(token_ids)
        length = len(prompt) // TOKEN_BYTES
        if not 0 < length <= self._max_model_len:
            raise PromptError(f"{length} tokens cannot be allocated; between 1 and {self._max_model_len} can")
        state = self._new_state(task_id, self._epoch, root_identity(self._epoch, salt), prompt, length)
        try:
            self._strategy.alloc(state, max_cached_tokens)
        except BaseException:
            self._table.give_back(state.row)
            raise
        self._tasks[task_id] = state
        if not readmit and self._strategy.prefix_caching:
            self._query_tokens += length
            self._hit_tokens += state.num_cached_tokens
        return state

    def extend(self, lease: CacheLease, state: TaskCacheState, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Make slots for `num_tokens` tokens exist, and that of the next token (`state.length` before) writable.

        Returns page copies as (from, to). They are to be made in order before the next forward pass writes anything;
        a plan that is dropped leaves its copies to the next one, as asking again returns none.
        """
        lease.check(Operation.EXTEND)
        self._check_owned(state)
        if num_tokens > self._max_model_len:
            raise PageAccountingError(
                f"task {state.task_id!r} asks for {num_tokens} slots; max_model_len is {self._max_model_len}"
            )
        if self._strategy.must_copy(state):
            lease.check(Operation.COPY_ON_WRITE)
        return self._strategy.extend(state, num_tokens)

    def fork(
        self, lease: CacheLease, state: TaskCacheState, task_id: str, num_tokens: int | None = None
    ) -> TaskCacheState:
        """Another task that shares the pages of the first `num_tokens` tokens (default: all that have slots).

        Their KV must be computed before the fork's first `extend`. Whoever writes first to a shared page copies it.
        """
        lease.check(Operation.FORK)
        self._check_owned(state)
        length = state.length if num_tokens is None else num_tokens
        if not 0 < length <= state.length:
            raise PageAccountingError(f"task {state.task_id!r} has slots for {state.length} tokens, not for {length}")
        child = self._new_state(task_id, state.epoch, state.root, state.prompt[: length * TOKEN_BYTES], length)
        child.num_cached_tokens, child.publishable = length, state.publishable
        try:
            self._strategy.fork(state, child)
        except BaseException:
            self._table.give_back(child.row)
            raise
        self._tasks[task_id] = child
        return child

    def publish(self, lease: CacheLease, state: TaskCacheState, token_ids: TokenIds, num_computed: int) -> None:
        """Index every full page among the first `num_computed` tokens, all of whose KV has been computed.

        `token_ids` are the task's tokens, those it was allocated for first. May re-point the task, and its forks, to
        pages with the same content. Nothing is indexed for a task that is not publishable or of an earlier epoch.
        """
        lease.check(Operation.PUBLISH)
        self._check_owned(state)
        if not 0 <= num_computed <= min(state.length, len(token_ids)):
            raise PageAccountingError(
                f"task {state.task_id!r} has {state.length} slots and {len(token_ids)} tokens, {num_computed} computed"
            )
        if lease.epoch == self._epoch:
            self._strategy.publish(state, token_ids, num_computed)

    def free(self, lease: CacheLease, state: TaskCacheState) -> None:
        """Give back a task's pages and its row; what is indexed stays to be found until it is evicted."""
        lease.check(Operation.FREE)
        self._check_owned(state)
        self._release(state)

    def invalidate_cache(self, lease: CacheLease, *, end_ownership: bool = False) -> int:
        """Bump the epoch: nothing indexed until now can be matched again. Returns how many entries that were.

        Tasks keep their pages, unless `end_ownership`: then all of them are over and must not be freed again.
        """
        lease.check(Operation.INVALIDATE)
        self._epoch = lease.bump_epoch()
        dropped = self._strategy.invalidate(self._epoch)
        if end_ownership:
            for state in list(self._tasks.values()):
                self._release(state)
        return dropped

    def page_tables(self, states: Sequence[TaskCacheState]) -> NDArray[np.int32]:
        """Pages of a batch, int32 [len(states), widest]; entries behind a task's last page mean nothing."""
        width = self._strategy.pages_for(max((state.length for state in states), default=0))
        return self._table.gather([state.row for state in states], width)

    def slot_indices(self, state: TaskCacheState, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of positions `start` to `stop`: `page * page_size + offset`, int64 [stop - start]."""
        return self._strategy.slot_indices(state, start, stop)

    def stats(self) -> CacheStats:
        pages = self._strategy.stats()
        return CacheStats(
            pages=pages,
            evictable=pages.cached,
            num_indexed=self._strategy.num_indexed,
            num_tasks=len(self._tasks),
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
        )

    def check_integrity(self) -> None:
        """Raise `PageAccountingError` on any violation of the accounting; linear in the pool."""
        states = self._tasks.values()
        check_totals(self._strategy.stats(), self._table, states)
        self._strategy.check_integrity(states)

    def __repr__(self) -> str:
        pages = self._strategy.stats()
        return (
            f"<TaskCacheManager {self._strategy.name}, page size {self.page_size}, epoch {self._epoch} | pages: "
            f"{pages.live} live, {pages.cached} cached, {pages.free} free of {pages.total} | tasks: {len(self._tasks)}>"
        )

    def _new_state(self, task_id: str, epoch: int, root: bytes, prompt: bytes, length: int) -> TaskCacheState:
        if task_id in self._tasks:
            raise PageAccountingError(f"task {task_id!r} holds pages already")
        return TaskCacheState(task_id, self._table.take(), epoch, root, prompt, length)

    def _release(self, state: TaskCacheState) -> None:
        self._strategy.free(state)
        self._table.give_back(state.row)
        del self._tasks[state.task_id]

    def _check_owned(self, state: TaskCacheState) -> None:
        if self._tasks.get(state.task_id) is not state:
            raise PageAccountingError(f"task {state.task_id!r} holds no pages")

    def _check_epoch(self, lease: CacheLease) -> None:
        if lease.epoch > self._epoch:
            raise StaleLeaseError(f"the lease is of epoch {lease.epoch}, the cache still of epoch {self._epoch}")
