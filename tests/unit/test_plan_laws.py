"""Laws of planning, on random load, with a step that computes nothing."""

from __future__ import annotations

from collections import deque

from attrs import Factory, define, field, frozen
from hypothesis import given
from hypothesis import strategies as st

from aengine.cache.manager import TaskCacheManager
from aengine.params import SamplingParams
from aengine.plan import Planner
from aengine.policy.gate import PolicyGate
from aengine.policy.lease import StableLease
from aengine.policy.version import PolicyVersion
from aengine.request import Request, Sample
from aengine.sampling.stop import StopRule
from aengine.steps import StepPlan
from statemachines.policy import PolicyState
from statemachines.request import RequestState


@frozen
class Limits:
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int | None

    @property
    def slots(self) -> int:
        return self.num_pages * self.page_size


@frozen
class Arrival:
    """A request that comes before step `step`; `abort_after` steps later it is aborted, if it has not ended."""

    step: int
    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    priority: int
    abort_after: int | None


@define(eq=False)
class Harness:
    """The scheduler's loop without its threads and its model."""

    limits: Limits
    planner: Planner = field(init=False)
    cache: TaskCacheManager = field(init=False)
    gate: PolicyGate = Factory(lambda: PolicyGate(PolicyVersion(0, "digest")))
    requests: list[Request] = Factory(list)

    def __attrs_post_init__(self) -> None:
        limits = self.limits
        self.cache = TaskCacheManager(
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.slots + 1,
        )
        self.planner = Planner(
            self.cache,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_queued_reqs=limits.max_num_queued_reqs,
        )

    def submit(self, arrival: Arrival) -> Request:
        prompt = arrival.prompt[: self.limits.slots]
        params = SamplingParams(n=arrival.n, max_tokens=arrival.max_tokens, ignore_eos=True)
        request = Request(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=prompt,
            params=params,
            stop=StopRule.of(params, (), self.limits.slots + 1 - len(prompt)),
            seed=0,
            priority=arrival.priority,
            arrival=len(self.requests),
        )
        self.requests.append(request)
        self.planner.submit(request)
        return request

    def samples(self, *states: RequestState) -> list[Sample]:
        return [sample for request in self.requests for sample in request.samples if sample.state in states]

    def step(self, state: PolicyState = PolicyState.SERVING) -> StepPlan:
        with self.gate.try_lease() as lease:  # type: ignore[union-attr]
            self.planner.release(lease)
            before = {s: s.state for s in self.samples(*RequestState) if s.request.is_queued}
            plan = self.planner.plan(lease, state)
            self.check_plan(plan, before, state)
            self.apply(lease, plan)
            self.cache.check_integrity()
            self.check_counts()
        return plan

    def apply(self, lease: StableLease, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            chunk.sample.computed(chunk.start + chunk.count, 0)
            for sample in chunk.draws[1:]:
                sample.provenance.share_context(chunk.sample.provenance)
        for sample in [sample for chunk in plan.chunks for sample in chunk.draws]:
            sample.append(sample.index % 2, 0.0, 0.0, 0)
        for chunk in plan.chunks:
            self.cache.publish(lease, chunk.cache, chunk.sample.tokens, chunk.sample.num_computed)
        for sample in [sample for chunk in plan.chunks for sample in chunk.draws]:
            finish = sample.request.stop.check(sample.tokens[-1], sample.num_output)
            if finish is not None:
                self.planner.finish(sample, finish.finish_reason)
        self.planner.release(lease)

    def abort(self, request: Request) -> None:
        for sample in request.samples:
            self.planner.finish(sample, "abort")

    # ---- the laws

    def check_plan(self, plan: StepPlan, before: dict[Sample, RequestState], state: PolicyState) -> None:
        running = self.samples(RequestState.RUNNING)
        assert plan.num_tokens == sum(chunk.count for chunk in plan.chunks) <= self.limits.max_num_batched_tokens
        assert all(chunk.count > 0 for chunk in plan.chunks)
        assert len({chunk.sample for chunk in plan.chunks}) == len(plan.chunks)
        assert len(running) == self.planner.num_running <= self.limits.max_num_seqs
        assert not plan.failures
        drawn = [sample for chunk in plan.chunks for sample in chunk.draws]
        assert len(set(drawn)) == len(drawn) and set(drawn) <= set(running)
        decoding = [
            sample for sample in running if before.get(sample) is RequestState.RUNNING and sample.num_pending == 1
        ]
        assert set(decoding) <= {chunk.sample for chunk in plan.chunks}, "decoding waits for nobody"
        self.check_order(plan, before, state)
        preempted = [
            s for s, was in before.items() if was is RequestState.RUNNING and s.state is RequestState.PREEMPTED
        ]
        for victim in preempted:
            assert all(sample.key < victim.key for sample in running), "the last in order goes first"

    def check_order(self, plan: StepPlan, before: dict[Sample, RequestState], state: PolicyState) -> None:
        """Nobody in the queue is overtaken at admission. Samples forked from one that has just computed their prompt
        came with it and are not admitted."""
        admitted = [
            chunk.sample
            for chunk in plan.chunks
            if before.get(chunk.sample) in (RequestState.WAITING, RequestState.PREEMPTED)
        ]
        if state is PolicyState.DRAINING:
            assert all(sample.request.is_started for sample in self.samples(RequestState.RUNNING))
            assert all(before.get(sample.request.leader) is not RequestState.WAITING for sample in admitted)
        candidates = [
            sample
            for sample in self.samples(RequestState.WAITING, RequestState.PREEMPTED)
            if sample in before
            if (sample.request.is_started and sample.request.are_siblings_placed)
            or (sample is sample.request.leader and state is PolicyState.SERVING)
        ]
        for sample in admitted:
            placed_now = {sibling for chunk in plan.chunks for sibling in chunk.sample.request.samples[1:]}
            assert all(sample.key < waiting.key for waiting in candidates if waiting not in placed_now)

    def check_counts(self) -> None:
        limit = self.limits.max_num_queued_reqs
        queued = [request for request in self.requests if request.is_queued and not request.is_started]
        queued = [request for request in queued if not request.is_finished]
        if limit is not None:
            assert len(queued) <= limit
            in_line = [r.leader.key for r in self.requests if not (r.is_queued or r.is_finished)]
            assert not in_line or len(queued) == limit
        alive = [s for s in self.samples(RequestState.WAITING, RequestState.PREEMPTED) if s.request.is_queued]
        assert self.planner.num_waiting == len(alive)

    def check_idle(self) -> None:
        pages = self.cache.stats().pages
        assert (pages.live, pages.cached + pages.free) == (0, pages.total)
        assert (self.planner.num_waiting, self.planner.num_running) == (0, 0)
        assert self.planner.is_drained() and not self.planner.has_work(PolicyState.SERVING)


limits = st.builds(
    Limits,
    num_pages=st.integers(1, 8),
    page_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 12),
    max_num_queued_reqs=st.none() | st.integers(1, 3),
)
arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=32).map(tuple),
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        abort_after=st.none() | st.integers(0, 6),
    ),
    min_size=1,
    max_size=8,
)


def run(harness: Harness, load: list[Arrival], draining: frozenset[int] = frozenset()) -> None:
    """Until everything has ended. Every step must do something, and the steps are no more than the work there is."""
    coming = deque(sorted(load, key=lambda arrival: arrival.step))
    aborts: dict[int, list[Request]] = {}
    most = sum((len(a.prompt) + a.max_tokens) * a.n for a in load)
    for step in range(20 + 8 * most):
        while coming and coming[0].step <= step:
            arrival = coming.popleft()
            request = harness.submit(arrival)
            if arrival.abort_after is not None:
                aborts.setdefault(step + arrival.abort_after, []).append(request)
        for request in aborts.pop(step, []):
            harness.abort(request)
        alive = any(not request.is_finished for request in harness.requests)
        state = PolicyState.DRAINING if step in draining else PolicyState.SERVING
        plan = harness.step(state)
        assert plan.chunks or not alive or state is PolicyState.DRAINING, "there was work, and nothing was planned"
        if not (alive or coming):
            return
    raise AssertionError("a request never ended")


@given(limits, arrivals)
def test_every_request_ends_in_order_within_its_limits(limits: Limits, load: list[Arrival]) -> None:
    harness = Harness(limits)
    run(harness, load)
    for request in harness.requests:
        for sample in request.samples:
            if sample.finish_reason != "abort":
                room = limits.slots + 1 - len(request.prompt_token_ids)
                assert sample.num_output == min(request.params.max_tokens or 0, room)
    harness.check_idle()


@given(limits, arrivals, st.frozensets(st.integers(0, 30), max_size=12))
def test_while_draining_only_what_has_started_goes_on(
    limits: Limits, load: list[Arrival], draining: frozenset[int]
) -> None:
    harness = Harness(limits)
    run(harness, load, draining)
    harness.check_idle()


@given(limits, arrivals)
def test_a_drain_comes_to_its_end_without_what_waits(limits: Limits, load: list[Arrival]) -> None:
    harness = Harness(limits)
    for arrival in load:
        harness.submit(arrival)
    harness.step()
    started = {request for request in harness.requests if request.is_started}
    for _ in range(20 + 8 * sum((len(a.prompt) + a.max_tokens) * a.n for a in load)):
        if harness.planner.is_drained():
            break
        harness.step(PolicyState.DRAINING)
    assert harness.planner.is_drained()
    assert {request for request in harness.requests if request.is_started} == started
    assert all(request.is_finished for request in started)


def test_a_prompt_is_prefilled_once_for_its_group_in_chunks_of_the_budget() -> None:
    harness = Harness(
        Limits(num_pages=16, page_size=4, max_num_seqs=4, max_num_batched_tokens=4, max_num_queued_reqs=None)
    )
    harness.submit(Arrival(0, tuple([1] * 10), n=4, max_tokens=2, priority=0, abort_after=None))
    chunks = [[(c.start, c.count, len(c.draws)) for c in harness.step().chunks] for _ in range(3)]
    assert chunks == [[(0, 4, 0)], [(4, 4, 0)], [(8, 2, 4)]]


def test_a_lower_number_is_served_first_and_equals_in_order_of_arrival() -> None:
    harness = Harness(
        Limits(num_pages=8, page_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_num_queued_reqs=None)
    )
    for priority in (1, 0, 1, 0):
        harness.submit(Arrival(0, (1, 2), n=1, max_tokens=1, priority=priority, abort_after=None))
    order = [chunk.sample.request.request_id for _ in range(4) for chunk in harness.step().chunks]
    assert order == ["r1", "r3", "r0", "r2"]


def test_places_in_a_full_queue_are_given_in_the_order_of_service() -> None:
    harness = Harness(Limits(num_pages=8, page_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_num_queued_reqs=1))
    told: list[str] = []
    for priority in (0, 1, 1, 0, 1):
        request = harness.submit(Arrival(0, (1, 2), n=1, max_tokens=1, priority=priority, abort_after=None))
        request.on_progress = lambda request: told.append(request.request_id)
    harness.abort(harness.requests[2])
    for _ in range(4):
        harness.step()
    assert told == ["r3", "r1", "r4"]
    harness.check_idle()


def test_what_breaks_while_pages_are_taken_is_the_failure_of_that_request_alone() -> None:
    harness = Harness(
        Limits(num_pages=8, page_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_num_queued_reqs=None)
    )
    first, second = (harness.submit(Arrival(0, (1, 2), 1, 2, 0, None)) for _ in range(2))
    alloc, error = harness.cache.alloc, MemoryError("no memory for a table")

    def failing(lease: StableLease, task_id: str, *args: object, **options: object) -> object:
        if task_id == first.leader.task_id:
            raise error
        return alloc(lease, task_id, *args, **options)  # type: ignore[arg-type]

    harness.cache.alloc = failing  # type: ignore[assignment, method-assign]
    with harness.gate.try_lease() as lease:  # type: ignore[union-attr]
        plan = harness.planner.plan(lease, PolicyState.SERVING)
    assert plan.failures == [(first, error)] and not plan.chunks
    harness.abort(first)
    harness.step()
    harness.step()
    assert second.is_finished
    harness.check_idle()
