"""The loop: lease, plan, run, apply.

Each turn takes a lease on the stable version, plans the next step, runs it in the worker thread, and applies what came
back. Everything but the run is synchronous, so no other task sees the queues half changed.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable
from typing import Literal

import anyio
import anyio.lowlevel
import numpy as np

from aengine.cache.manager import TaskCacheManager
from aengine.draws import StepDraws
from aengine.errors import EngineDeadError, EngineError, EngineInvalidatedError, QueueFullError, RequestIdInUseError
from aengine.model.inputs import ForwardInputs
from aengine.plan import Planner
from aengine.policy.gate import Condition, PolicyGate
from aengine.policy.lease import StableLease
from aengine.policy.roles import KVOnUpdate, UpdateMode
from aengine.request import Request, Sample
from aengine.runner import ModelRunner, StepResult
from aengine.sampling.sampler import Draw, Drawn
from aengine.signal import Signal
from aengine.steps import StepPlan
from aengine.worker import Worker
from statemachines.policy import Operation
from statemachines.request import RequestState

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)


class Scheduler:
    """Owner of the requests that are alive."""

    def __init__(
        self,
        gate: PolicyGate,
        cache: TaskCacheManager,
        planner: Planner,
        runner: ModelRunner,
        worker: Worker,
        changed: Signal,
        *,
        refuse_when_full: bool,
        check_integrity: bool,
        on_finished: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self._gate, self._cache, self._planner, self._runner, self._worker = gate, cache, planner, runner, worker
        self._refuse_when_full = refuse_when_full
        self._check_integrity = check_integrity
        self._on_finished = on_finished
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._changed = changed
        self.num_sampled_tokens = 0
        self.death: EngineDeadError | None = None

    def is_alive(self, request_id: str) -> bool:
        return request_id in self._requests

    def submit(self, request: Request) -> None:
        """Take a validated request. Raises `RequestIdInUseError`, `QueueFullError` where a full queue is to refuse,
        `EngineInvalidatedError` while the engine is fenced, and `EngineDeadError` with the cause if a loop has died."""
        self._refuse_if_unusable()
        if self.is_alive(request.request_id):
            raise RequestIdInUseError(request.request_id)
        if self._refuse_when_full and self._planner.is_full:
            raise QueueFullError(
                f"request {request.request_id!r} was refused: the queue is full (max_num_queued_reqs requests wait)"
            )
        self._num_arrived += 1
        request.arrival = self._num_arrived
        self._requests[request.request_id] = request
        self._planner.submit(request)
        self._changed.set()

    def refuse_if_dead(self) -> None:
        if self.death is not None:
            raise EngineDeadError(str(self.death)) from self.death.__cause__

    def _refuse_if_unusable(self) -> None:
        self.refuse_if_dead()
        if self._gate.fence is not None:
            raise EngineInvalidatedError(str(self._gate.fence))

    def abort(self, request_id: str) -> None:
        """End a request now, with what it has; unknown and finished ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "abort")
            self._changed.set()

    def withdraw(self, request: Request) -> None:
        """Abort this very request, whoever uses its id now."""
        if self._requests.get(request.request_id) is request:
            self.abort(request.request_id)

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    async def run(self) -> None:
        """Run steps until cancelled. Raises what broke anything but a step."""
        while True:
            await self._turn()

    def die(self, error: EngineDeadError) -> None:
        """A loop of the engine has ended for good: every request that is alive fails, every later one is refused."""
        self.death = error
        for request in list(self._requests.values()):
            self._fail(request, error)

    async def _turn(self) -> None:
        lease = self._gate.try_lease() if self._planner.has_work(self._gate.state) else None
        if lease is None:
            await self._changed.wait()
            return
        with lease:
            self._planner.release(lease)
            plan = self._planner.plan(lease, self._gate.state)
            for request, error in plan.failures:
                self._log_failure("no pages could be taken for a request", error, [request])
                self._fail(request, error)
            if plan.chunks:
                await self._step(lease, plan)
            if self._check_integrity:
                self._cache.check_integrity()
        if not plan.chunks:
            await (anyio.lowlevel.checkpoint() if plan.failures else self._changed.wait())

    def hold_condition(self, mode: UpdateMode) -> Condition:
        """When a pause in this mode has come to its end: at once, or when nothing that was started is left."""
        return (lambda: True) if mode == "keep" else self.is_drained

    # ---- what an update asks (`policy.roles.DrainTarget`)

    def is_drained(self) -> bool:
        return self._planner.is_drained()

    def num_started(self) -> int:
        return len(self._planner.started())

    def abort_started(self) -> None:
        for request in self._planner.started():
            self._end(request, "abort")
        self._changed.set()

    def carry_over(self, kv: KVOnUpdate) -> None:
        self._planner.carry_over(kv)

    def fence(self, error: EngineInvalidatedError) -> None:
        for request in list(self._requests.values()):
            self._fail(request, error)
        self._planner.forget_pages()

    async def _step(self, lease: StableLease, plan: StepPlan) -> None:
        lease.check(Operation.FORWARD)
        inputs, wanted = self._prepare(plan), StepDraws.of(plan)
        try:
            drawn = await self._worker.run(lambda: self._runner.step(inputs, plan.copies, wanted.rows, wanted.draws))
        except Exception as error:
            self._fail_step(lease, plan, error)
        else:
            self._apply(lease, plan, wanted, drawn)

    def _prepare(self, plan: StepPlan) -> ForwardInputs:
        """What to feed to the model, as arrays."""
        tokens = array("i")
        for c in plan.chunks:
            tokens += c.sample.tokens[c.start : c.start + c.count]
        positions = np.concatenate([np.arange(c.start, c.start + c.count, dtype=np.int64) for c in plan.chunks])
        counts = [chunk.count for chunk in plan.chunks]
        return ForwardInputs(
            token_ids=np.array(tokens, dtype=np.int64),
            positions=positions,
            sequences=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
            page_tables=self._cache.page_tables([chunk.cache for chunk in plan.chunks]),
        )

    def _apply(self, lease: StableLease, plan: StepPlan, wanted: StepDraws, drawn: StepResult) -> None:
        lease.check(Operation.SAMPLE)
        for chunk in plan.chunks:
            if chunk.sample.state is RequestState.RUNNING:
                chunk.sample.computed(chunk.start + chunk.count, lease.version.number)
            for sample in chunk.draws[1:]:
                if sample.state is RequestState.RUNNING:
                    sample.provenance.share_context(chunk.sample.provenance)
        for sample, draw, result in zip(wanted.samples, wanted.draws, drawn, strict=True):
            if sample.state is not RequestState.RUNNING:
                continue  # ended or preempted since it was planned
            if isinstance(result, EngineError):
                self._log_failure("a sample failed", result, [sample.request])
                self._fail(sample.request, result)
            else:
                self._take(sample, draw, result, lease.version.number)
        self._publish(lease, plan)
        for sample, draw in zip(wanted.samples, wanted.draws, strict=True):
            if sample.state is RequestState.RUNNING:
                self._finish_if_due(sample, draw)
        self._planner.release(lease)
        self._announce(sample.request for sample in wanted.samples)

    def _take(self, sample: Sample, draw: Draw, result: Drawn, version: int) -> None:
        if draw.token is None:
            self.num_sampled_tokens += 1
            sample.append(result.token_id, result.logprob, result.raw_logprob, version, result.top)
        elif sample.targets is not None:
            sample.targets.add(result, version)

    def _publish(self, lease: StableLease, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            sample = chunk.sample
            if sample.state is RequestState.RUNNING and sample.cache is not None:
                self._cache.publish(lease, sample.cache, sample.tokens, sample.num_computed)

    def _finish_if_due(self, sample: Sample, draw: Draw) -> None:
        if draw.token is None:
            finish = sample.check_stop()
            if finish is not None:
                self._planner.finish(sample, finish.finish_reason, finish.stop_reason)
        elif sample.request.is_scoring and sample.targets is not None and sample.targets.is_complete:
            self._planner.finish(sample, "length")

    def _fail_step(self, lease: StableLease, plan: StepPlan, error: Exception) -> None:
        """An exception in a step ends the requests of that batch and gives back their pages; the rest goes on."""
        requests = list({id(chunk.sample.request): chunk.sample.request for chunk in plan.chunks}.values())
        self._log_failure("a step failed", error, requests)
        for request in requests:
            self._fail(request, error)
        self._planner.release(lease)

    def _log_failure(self, what: str, error: BaseException, requests: list[Request]) -> None:
        request_ids = [request.request_id for request in requests]
        logger.error("%s: %r; failed with it: %s", what, error, request_ids, extra={"request_ids": request_ids})

    def _fail(self, request: Request, error: BaseException) -> None:
        request.error = request.error or error
        self._end(request, "error")

    def _end(self, request: Request, reason: Literal["abort", "error"]) -> None:
        for sample in request.samples:
            self._planner.finish(sample, reason)
        self._announce([request])

    def _announce(self, requests: Iterable[Request]) -> None:
        """Wake whoever waits for these requests, and forget those that have ended."""
        for request in {id(request): request for request in requests}.values():
            if request.is_finished and self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
                self._on_finished(request)
            request.on_progress(request)
