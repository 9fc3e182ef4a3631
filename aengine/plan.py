"""Planning: which tokens the next step computes, decided from queues, pages and budget. No torch, no event loop.

A step is a set of chunks: each the next few tokens of one sample. Decoding is the chunk of one token, prefill of a
long prompt several chunks in a row, recomputation after a preemption the same as prefill. Decoding comes first, then
prefill under way, then admission, each in the order of `Sample.key`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

from aengine.errors import OutOfPagesError
from aengine.outputs import FinishReason
from aengine.request import Request, Sample
from aengine.steps import Chunk, StepPlan
from statemachines.policy import Operation, PolicyState, permits
from statemachines.request import RequestState, RequestTrigger

if TYPE_CHECKING:
    from aengine.cache.manager import TaskCacheManager
    from aengine.cache.state import TaskCacheState
    from aengine.policy.lease import StableLease
    from aengine.policy.roles import KVOnUpdate

__all__ = ["Planner"]


class Planner:
    """Owner of the queues: who waits, who runs, whose pages are still to be given back."""

    def __init__(
        self,
        cache: TaskCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_queued_reqs: int | None = None,
    ) -> None:
        self._cache = cache
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._budget = max_num_batched_tokens
        self._max_num_queued_reqs = max_num_queued_reqs
        self._line: SortedDict = SortedDict()
        """First samples of requests for which the queue has no place yet; empty unless the queue is full."""
        self._waiting: SortedDict = SortedDict()
        """First samples of requests not started, the queue: admitted in Serving only."""
        self._set_aside: SortedDict = SortedDict()
        """Preempted samples, and samples of started requests that found no room: admitted while draining, too."""
        self._running: SortedDict = SortedDict()
        self._to_free: list[Sample] = []
        """Finished samples that still hold pages; they are freed under the next lease."""
        self._to_recompute: list[Sample] = []
        """Running samples whose KV is of an earlier version; it is given up under the next lease."""
        self._num_alive = 0
        """Samples of queued and started requests that have not ended."""
        self.num_preemptions = 0
        self.num_reprefilled_tokens = 0
        """Tokens whose KV had been given up and was, or is being, computed again."""
        self.num_mixed_policy_samples = 0
        """Samples that ended with more than one policy version in them."""

    @property
    def num_waiting(self) -> int:
        """Samples that are to run and do not: of requests in the queue, set aside, or waiting for their group's prompt.
        Those for whose request the queue has no place are not counted."""
        return self._num_alive - len(self._running)

    @property
    def is_full(self) -> bool:
        """Whether the queue of requests not started has no place left."""
        return self._max_num_queued_reqs is not None and len(self._waiting) >= self._max_num_queued_reqs

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_work(self, state: PolicyState) -> bool:
        """Whether a plan made in `state` could hold anything, or pages are to be given back."""
        admissible = self._waiting if permits(state, Operation.ALLOC) else ()
        return bool(self._running or self._set_aside or self._to_free or admissible)

    def is_drained(self) -> bool:
        """Whether nothing that was started is left: what `mode="wait"` waits for."""
        return not (self._running or self._set_aside or self._to_free)

    def started(self) -> list[Request]:
        """Requests that hold tokens of the installed version."""
        samples = [*self._running.values(), *self._set_aside.values()]
        return list({id(sample.request): sample.request for sample in samples}.values())

    def submit(self, request: Request) -> None:
        """Put a request in the queue, or in line for it while it is full; its first sample computes the prompt for all.

        Places in the queue are given in the order of service; whoever gets one is told by `on_progress`.
        """
        if self.is_full:
            self._line[request.leader.key] = request.leader
        else:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        request.is_queued = True
        self._waiting[request.leader.key] = request.leader
        self._num_alive += len(request.samples)

    def _fill_queue(self) -> None:
        while self._line and not self.is_full:
            request = self._line.popitem(0)[1].request
            self._enqueue(request)
            request.on_progress(request)

    def finish(self, sample: Sample, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sample now; pages it holds are given back under the next lease."""
        if sample.is_finished:
            return
        self._leave(sample)
        self._num_alive -= sample.request.is_queued
        self.num_mixed_policy_samples += sample.provenance.is_mixed
        sample.finish(reason, stop_reason)
        self._fill_queue()
        if sample.cache is not None:
            self._to_free.append(sample)

    def _leave(self, sample: Sample) -> None:
        """Take a sample out of the queue it is in, if it is in one."""
        is_running = sample.state is RequestState.RUNNING
        key = sample.key
        for queue in (self._running,) if is_running else (self._waiting, self._set_aside, self._line):
            if queue.pop(key, None) is not None:
                return

    def carry_over(self, kv: KVOnUpdate) -> None:
        """A new version is about to be committed: what runs goes on under it, its KV computed again or kept as it is.
        KV that is kept is never indexed. Scores that are not complete begin anew."""
        for sample in self._set_aside.values():
            sample.restart_targets()
        for sample in self._running.values():
            assert sample.cache is not None
            if sample.restart_targets() or kv == "recompute":
                self._to_recompute.append(sample)
            else:
                sample.cache.publishable = False

    def forget_pages(self) -> None:
        """The cache has ended all ownership of pages; every sample must have been finished."""
        assert not self._running
        for sample in self._to_free:
            sample.forget_kv()
        self._to_free.clear()
        self._to_recompute.clear()

    def release(self, lease: StableLease) -> None:
        """Give back the pages of samples that ended, and of those whose KV is to be computed again."""
        for sample in self._to_recompute:
            if sample.state is RequestState.RUNNING:
                self._set_sample_aside(lease, sample)
        for sample in self._to_free:
            self._give_up_pages(lease, sample)
        self._to_recompute.clear()
        self._to_free.clear()

    def _give_up_pages(self, lease: StableLease, sample: Sample) -> None:
        assert sample.cache is not None
        self._cache.free(lease, sample.cache)
        sample.forget_kv()

    def _set_sample_aside(self, lease: StableLease, sample: Sample) -> None:
        """Take a running sample's pages away; it will be computed again from its tokens."""
        self._give_up_pages(lease, sample)
        sample.follow(RequestTrigger.PREEMPT)
        del self._running[sample.key]
        self._set_aside[sample.key] = sample

    def plan(self, lease: StableLease, state: PolicyState) -> StepPlan:
        """Decide the next step and take the pages it needs. May preempt; empty when nothing can run."""
        step = StepPlan()
        preemptions = self.num_preemptions
        self._plan_decodes(lease, step)
        self._plan_prefills(lease, step)
        if self.num_preemptions == preemptions:  # pages just taken from one sample are not given to the next
            self._plan_admissions(lease, step, state)
        return step

    def _plan_decodes(self, lease: StableLease, step: StepPlan) -> None:
        for sample in [s for s in self._running.values() if s.num_pending == 1]:
            if step.num_tokens == self._budget:
                return
            if sample.state is RequestState.RUNNING and self._make_room(lease, sample, step):
                self._add_chunk(lease, step, sample)

    def _make_room(self, lease: StableLease, sample: Sample, step: StepPlan) -> bool:
        """Make the slot of the sample's next token writable, preempting those behind it; False if it had to go itself.

        Samples are served in order, so whoever is preempted has no chunk in this step yet.
        """
        while True:
            cache = sample.cache
            assert cache is not None
            try:
                copies = step.take(sample.request, partial(self._cache.extend, lease, cache, len(sample.tokens)))
                step.copies += copies or ()
                return copies is not None
            except OutOfPagesError:
                victim = self._running.peekitem(-1)[1]
                self._preempt(lease, victim)
                if victim is sample:
                    return False

    def _preempt(self, lease: StableLease, sample: Sample) -> None:
        self._set_sample_aside(lease, sample)
        sample.num_preemptions += 1
        self.num_preemptions += 1

    def _plan_prefills(self, lease: StableLease, step: StepPlan) -> None:
        for sample in [s for s in self._running.values() if s.num_pending > 1]:
            if step.num_tokens == self._budget:
                return
            self._add_chunk(lease, step, sample)

    def _add_chunk(self, lease: StableLease, step: StepPlan, sample: Sample) -> None:
        count = min(sample.num_pending, self._budget - step.num_tokens)
        draws: tuple[Sample, ...] = ()
        if count == sample.num_pending and not sample.request.is_scoring:
            draws = (sample, *self._place_siblings(lease, sample))
        assert sample.cache is not None
        step.add(Chunk(sample, sample.cache, sample.num_computed, count, draws))

    def _plan_admissions(self, lease: StableLease, step: StepPlan, state: PolicyState) -> None:
        while step.num_tokens < self._budget and len(self._running) < self._max_num_seqs:
            sample = self._next_candidate(state)
            if sample is None or not self._admit(lease, step, sample):
                return  # the first in line waits for pages; nobody overtakes it, so nobody starves
            self._add_chunk(lease, step, sample)

    def _next_candidate(self, state: PolicyState) -> Sample | None:
        queues = [self._set_aside, self._waiting] if permits(state, Operation.ALLOC) else [self._set_aside]
        heads: Iterator[tuple[tuple[int, int, int], Sample]] = (queue.peekitem(0) for queue in queues if queue)
        return min(heads, default=(None, None))[1]

    def _admit(self, lease: StableLease, step: StepPlan, sample: Sample) -> bool:
        request = sample.request
        alloc = partial(
            self._cache.alloc,
            lease,
            sample.task_id,
            sample.tokens,
            request.cache_salt,
            max_cached_tokens=sample.max_cached_tokens,
        )
        try:
            cache = step.take(request, partial(alloc, readmit=request.is_started))
        except OutOfPagesError:
            return False
        if cache is None:
            return False
        if not request.is_started:
            request.is_started, request.num_cached_tokens = True, cache.num_cached_tokens
        self.num_reprefilled_tokens += max(sample.num_given_up - cache.num_cached_tokens, 0)
        self._run(sample, cache)
        sample.computed(cache.num_cached_tokens, lease.version.number)
        return True

    def _run(self, sample: Sample, cache: TaskCacheState) -> None:
        self._leave(sample)
        self._fill_queue()
        preempted = sample.state is RequestState.PREEMPTED
        sample.follow(RequestTrigger.READMIT if preempted else RequestTrigger.ADMIT)
        sample.cache = cache
        self._running[sample.key] = sample

    def _place_siblings(self, lease: StableLease, leader: Sample) -> list[Sample]:
        """When a prompt's last chunk is planned: fork as many other samples from it as there is room for, and put the
        rest in line. Each fork needs a page of its own soon, for the copy or for its next token."""
        request = leader.request
        if request.are_siblings_placed:
            return []
        request.are_siblings_placed = True
        assert leader.cache is not None
        room = min(self._max_num_seqs - len(self._running), self._cache.num_available) if self._cache.can_fork else 0
        siblings = [sample for sample in request.samples[1:] if not sample.is_finished]
        forked, rest = siblings[:room], siblings[room:]
        for sample in forked:
            self._run(sample, self._cache.fork(lease, leader.cache, sample.task_id))
            sample.num_computed = len(sample.tokens)  # by the step being planned
        for sample in rest:
            self._set_aside[sample.key] = sample
        return forked
