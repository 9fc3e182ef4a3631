"""Long random runs of the cache beside a naive model of it, and of what would lie in its slots."""

from __future__ import annotations

import pytest
from cache_model import Lease, Model, OutOfModelPages, Page, Slots, Task, after_copies
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aengine.cache.manager import TaskCacheManager
from aengine.cache.state import TaskCacheState
from aengine.errors import OutOfPagesError, OutOfRowsError, PageAccountingError

NUM_PAGES, MAX_SEQS = 8, 4
SALTS = st.sampled_from([None, None, None, None, "salt"])
BITS = st.integers(0, 1)
BLOCKS = [[0], [0, 1], [0, 0], [0, 1, 1]]  # what prompts begin with, page by page: mostly the same


class CacheMachine(RuleBasedStateMachine):
    """Copies are made when the next forward pass runs, not when they are asked for, as in the engine."""

    page_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.lease = Lease()
        self.model = Model(NUM_PAGES, self.page_size)
        self.cache = TaskCacheManager(
            num_pages=NUM_PAGES, page_size=self.page_size, max_num_seqs=MAX_SEQS, max_model_len=5 * self.page_size
        )
        self.slots: Slots = {}
        self.copies: list[tuple[int, int]] = []
        self.ended: list[TaskCacheState] = []
        self.prompts: list[list[int]] = [[0]]
        self.queries = self.hits = self.num_tasks = 0

    # ---- what happens

    @rule(data=st.data(), salt=SALTS, readmit=st.booleans(), progress=st.sampled_from(["none", "some", "all", "end"]))
    def alloc(self, data: st.DataObject, salt: str | None, readmit: bool, progress: str) -> None:
        """A new prompt of few kinds, or the tokens of a task there was, as in a next turn or after a preemption."""
        blocks = data.draw(st.sampled_from(BLOCKS))
        fresh = [token for block in blocks for token in [block] * self.page_size]
        tokens = data.draw(st.sampled_from([fresh, fresh, fresh, *self.prompts[-2:]]))
        tokens = [*tokens, *data.draw(st.lists(BITS, max_size=self.page_size))]
        limit = data.draw(st.none() | st.none() | st.integers(0, 2 * self.page_size))
        task = self._alloc(tokens[: 5 * self.page_size], salt, readmit=readmit, limit=limit)
        if task is None or progress == "none":
            return
        self._forward(task, (task.computed + task.length + 1) // 2 if progress == "some" else task.length)
        self._publish(task)
        if progress == "end":
            self._free(task)

    @rule(blocks=st.sampled_from(BLOCKS), size=st.integers(1, 3), publish=st.booleans())
    def alloc_group(self, blocks: list[int], size: int, publish: bool) -> None:
        """Samples forked from the first in the step that computes their prompt, beside whoever computes the same."""
        leader = self._alloc([*(token for block in blocks for token in [block] * self.page_size), 0], None)
        if leader is None:
            return
        for _ in range(size):
            self._fork(leader, leader.length, publish=False)
        if publish:
            self._publish(leader)

    def _alloc(
        self, tokens: list[int], salt: str | None, *, readmit: bool = False, limit: int | None = None
    ) -> Task | None:
        matched = self.model.match(salt, tokens)
        assert self.cache.lookup(self.lease, tokens, salt) == len(matched) * self.page_size
        if limit is not None:
            matched = matched[: limit // self.page_size]
        if len(self.model.tasks) == MAX_SEQS:
            with pytest.raises(OutOfRowsError):
                self.cache.alloc(self.lease, "refused", tokens, salt)
            return None
        try:
            fresh = self.model.take(self.model.pages_for(len(tokens)) - len(matched), matched)
        except OutOfModelPages:
            with pytest.raises(OutOfPagesError):
                self.cache.alloc(self.lease, "refused", tokens, salt, max_cached_tokens=limit)
            return None
        self.num_tasks += 1
        name = str(self.num_tasks)
        state = self.cache.alloc(self.lease, name, tokens, salt, readmit=readmit, max_cached_tokens=limit)
        cached = len(matched) * self.page_size
        assert state.num_cached_tokens == cached < len(tokens)
        if not readmit:
            self.queries += len(tokens) if self.page_size > 1 else 0
            self.hits += cached
        task = Task(state, tokens, salt, self.model.epoch, len(tokens), cached, matched + fresh)
        task.contents = [(task.epoch, tuple(tokens[: at + 1])) for at in range(cached)]
        self._number(task)
        self.model.tasks.append(task)
        return task

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), bits=st.lists(BITS, min_size=1, max_size=9), publish=st.booleans())
    def decode(self, data: st.DataObject, bits: list[int], publish: bool) -> None:
        """Make room for some tokens and, unless the plan is dropped, compute them."""
        task = data.draw(st.sampled_from(self.model.tasks))
        self._forward(task, task.length)
        for bit in bits[: 5 * self.page_size - task.length]:
            if not self._extend(task, task.length + 1, bit):
                return
            if publish or task.length % 2:
                self._forward(task, task.length)
        if publish:
            self._publish(task)

    def _extend(self, task: Task, target: int, bit: int) -> bool:
        block, copying = task.length // self.page_size, self.model.must_copy(task)
        try:
            fresh = self.model.take(self.model.pages_for(target) - len(task.pages) + copying, [])
        except OutOfModelPages:
            with pytest.raises(OutOfPagesError):
                self.cache.extend(self.lease, task.state, target)
            return False
        copies = self.cache.extend(self.lease, task.state, target)
        assert self.cache.extend(self.lease, task.state, target) == ()
        if copying:
            source = task.pages[block]
            self.model.drop_reference(task, source)
            task.pages.insert(block, fresh.pop())
        task.pages += fresh
        task.length = target
        task.tokens = [*task.tokens, *[bit] * (target - len(task.tokens))]
        self._number(task)
        assert copies == (((source.number, task.pages[block].number),) if copying else ())
        self.copies += copies
        return True

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), publish=st.booleans())
    def fork(self, data: st.DataObject, publish: bool) -> None:
        parent = data.draw(st.sampled_from(self.model.tasks))
        self._fork(parent, data.draw(st.integers(1, parent.length)), publish=publish)

    def _fork(self, parent: Task, length: int, *, publish: bool) -> None:
        """If the parent has not computed what is shared, the forward pass of the same step does."""
        if len(self.model.tasks) == MAX_SEQS:
            with pytest.raises(OutOfRowsError):
                self.cache.fork(self.lease, parent.state, "refused", length)
            return
        self.num_tasks += 1
        state = self.cache.fork(self.lease, parent.state, str(self.num_tasks), length)
        pages = parent.pages[: self.model.pages_for(length)]
        child = Task(state, parent.tokens[:length], parent.salt, parent.epoch, length, length, pages)
        child.is_publishable = parent.is_publishable
        self.model.tasks.append(child)
        if parent.computed < length:
            self._forward(parent, length)
        child.contents = parent.contents[:length]
        if publish:
            self._publish(parent)

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), publish=st.booleans())
    def free(self, data: st.DataObject, publish: bool) -> None:
        task = data.draw(st.sampled_from(self.model.tasks))
        if publish:
            self._publish(task)
        self._free(task)

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), end_ownership=st.booleans(), event=st.sampled_from(["invalidate", "unpublishable", "misuse"]))
    def trouble(self, data: st.DataObject, end_ownership: bool, event: str) -> None:
        task = data.draw(st.sampled_from(self.model.tasks))
        if event == "invalidate":
            assert self.cache.invalidate_cache(self.lease, end_ownership=end_ownership) == self.model.invalidate()
            for ended in list(self.model.tasks) if end_ownership else []:
                self.model.release(ended)
                self.ended.append(ended.state)
        elif event == "unpublishable":
            task.is_publishable = task.state.publishable = False
        elif self.ended:
            with pytest.raises(PageAccountingError):
                self.cache.free(self.lease, data.draw(st.sampled_from(self.ended)))

    # ---- what the engine would do

    def _number(self, task: Task) -> None:
        """Learn which pages the cache chose for new ones of the model; those known are proved by the invariants."""
        for page, number in zip(task.pages, task.state.pages, strict=True):
            if page.number < 0:
                page.number = number

    def _forward(self, task: Task, computed: int) -> None:
        self.slots = after_copies(self.slots, self.copies, self.page_size)
        self.copies.clear()
        slots = self.cache.slot_indices(task.state, task.computed, computed).tolist()
        for at, slot in enumerate(slots, task.computed):
            content = (self.model.epoch, tuple(task.tokens[: at + 1]))
            self.slots[divmod(slot, self.page_size)] = content
            task.contents.append(content)
        task.computed = computed

    def _free(self, task: Task) -> None:
        self.cache.free(self.lease, task.state)
        self.model.release(task)
        self.ended.append(task.state)
        self.prompts.append(task.tokens)

    def _publish(self, task: Task) -> None:
        self.cache.publish(self.lease, task.state, task.tokens, task.computed)
        self.model.publish(task)

    # ---- what must hold

    @invariant()
    def the_accounting_is_right(self) -> None:
        self.cache.check_integrity()
        stats, live, cached = self.cache.stats(), len(self.model.live()), len(self.model.cached())
        assert (stats.pages.live, stats.pages.cached, stats.pages.free) == (live, cached, NUM_PAGES - live - cached)
        assert stats.num_indexed == len(self.model.indexed)
        assert stats.num_tasks == len(self.model.tasks)
        assert (stats.query_tokens, stats.hit_tokens) == (self.queries, self.hits)

    @invariant()
    def every_task_holds_its_pages_and_no_page_means_two_things(self) -> None:
        pages: set[Page] = self.model.live() | self.model.cached()
        assert len({page.number for page in pages}) == len(pages)
        for task in self.model.tasks:
            assert task.state.pages == [page.number for page in task.pages]

    @invariant()
    def exactly_what_the_model_has_indexed_can_be_found(self) -> None:
        for salt, tokens in self.model.indexed:
            assert self.cache.lookup(self.lease, [*tokens, 9], salt) == len(tokens)

    @invariant()
    def every_task_reads_what_was_computed_for_its_own_tokens(self) -> None:
        made = after_copies(self.slots, self.copies, self.page_size)
        for task in self.model.tasks:
            slots = self.cache.slot_indices(task.state, 0, task.computed).tolist()
            assert [made[divmod(slot, self.page_size)] for slot in slots] == task.contents


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_the_cache_does_what_the_model_does(page_size: int) -> None:
    machine = type("CacheMachine", (CacheMachine,), {"page_size": page_size})
    profile = settings.default
    assert profile is not None
    run_state_machine_as_test(
        machine, settings=settings(profile, max_examples=max(profile.max_examples // 2, 10), stateful_step_count=40)
    )
