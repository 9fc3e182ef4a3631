"""The loop: lease, plan, run, apply.

Each turn takes a lease on the stable version, plans the next step, runs it in the worker thread, and applies what came
back. Everything but the run is synchronous, so no other task sees the queues half changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

import numpy as np

from aengine.cache.manager import TaskCacheManager
from aengine.errors import EngineDeadError, EngineError, EngineInvalidatedError, QueueFullError, RequestIdInUseError
from aengine.model.inputs import ForwardInputs
from aengine.plan import Planner, StepPlan
from aengine.policy.gate import Condition, PolicyGate
from aengine.policy.lease import StableLease
from aengine.policy.roles import KVOnUpdate, UpdateMode
from aengine.request import Request, Sample
from aengine.runner import ModelRunner, StepResult
from aengine.sampling.sampler import Draw
from aengine.signal import Signal
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
        max_num_queued_reqs: int | None,
        check_integrity: bool,
    ) -> None:
        self._gate, self._cache, self._planner, self._runner, self._worker = gate, cache, planner, runner, worker
        self._max_num_queued_reqs = max_num_queued_reqs
        self._check_integrity = check_integrity
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._changed = changed
        self.num_sampled_tokens = 0
        self.death: EngineDeadError | None = None

    def submit(self, request: Request) -> None:
        """Take a validated request. Raises `RequestIdInUseError`, `QueueFullError`, `EngineInvalidatedError` while
        the engine is fenced, and `EngineDeadError` with the cause if the loop has died."""
        self._refuse_if_unusable()
        if request.request_id in self._requests:
            raise RequestIdInUseError(request.request_id)
        if self._max_num_queued_reqs is not None and self._planner.num_waiting >= self._max_num_queued_reqs:
            raise QueueFullError(f"{self._planner.num_waiting} requests are waiting already (max_num_queued_reqs)")
        self._num_arrived += 1
        request.arrival = self._num_arrived
        self._requests[request.request_id] = request
        self._planner.submit(request)
        self._changed.set()

    def _refuse_if_unusable(self) -> None:
        for reason in (self.death, self._gate.fence):
            if reason is not None:
                raise type(reason)(str(reason)) from reason.__cause__

    def abort(self, request_id: str) -> None:
        """End a request now, with what it has; unknown and finished ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "abort")
            self._changed.set()

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    async def run(self) -> None:
        """Run steps until cancelled. If anything but a step fails, every waiter and every later call is told."""
        try:
            while True:
                await self._turn()
        except Exception as cause:
            logger.exception("the scheduler loop died")
            self.death = EngineDeadError(f"the scheduler loop died: {cause!r}")
            self.death.__cause__ = cause
            for request in list(self._requests.values()):
                self._fail(request, self.death)

    async def _turn(self) -> None:
        lease = self._gate.try_lease() if self._planner.has_work(self._gate.state) else None
        if lease is None:
            await self._changed.wait()
            return
        with lease:
            self._planner.release(lease)
            plan = self._planner.plan(lease, self._gate.state)
            if plan.chunks:
                await self._step(lease, plan)
            if self._check_integrity:
                self._cache.check_integrity()
        if not plan.chunks:
            await self._changed.wait()

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
        inputs, rows, samples, draws = self._prepare(plan)
        try:
            drawn = await self._worker.run(lambda: self._runner.step(inputs, plan.copies, rows, draws))
        except Exception as error:
            self._fail_step(lease, plan, error)
        else:
            self._apply(lease, plan, samples, drawn)

    def _prepare(self, plan: StepPlan) -> tuple[ForwardInputs, list[int], list[Sample], list[Draw]]:
        """The step as arrays: what to feed, the rows whose logits are wanted, and what to draw from each."""
        rows: list[int] = []
        samples: list[Sample] = []
        draws: list[Draw] = []
        end = 0
        for chunk in plan.chunks:
            end += chunk.count
            if chunk.draws:
                for sample in chunk.draws:
                    samples.append(sample)
                    draws.append(Draw(len(rows), sample.request.params, sample.seed, sample.index, sample.num_output))
                rows.append(end - 1)
        tokens = [token for c in plan.chunks for token in c.sample.tokens[c.start : c.start + c.count]]
        positions = np.concatenate([np.arange(c.start, c.start + c.count, dtype=np.int64) for c in plan.chunks])
        counts = [chunk.count for chunk in plan.chunks]
        inputs = ForwardInputs(
            token_ids=np.array(tokens, dtype=np.int64),
            positions=positions,
            sequences=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
            page_tables=self._cache.page_tables([chunk.cache for chunk in plan.chunks]),
        )
        return inputs, rows, samples, draws

    def _apply(self, lease: StableLease, plan: StepPlan, samples: list[Sample], drawn: StepResult) -> None:
        lease.check(Operation.SAMPLE)
        for chunk in plan.chunks:
            if chunk.sample.state is RequestState.RUNNING:
                chunk.sample.computed(chunk.start + chunk.count, lease.version.number)
            for sample in chunk.draws[1:]:
                if sample.state is RequestState.RUNNING:
                    sample.provenance.share_context(chunk.sample.provenance)
        for sample, result in zip(samples, drawn, strict=True):
            if sample.state is not RequestState.RUNNING:
                continue  # ended or preempted since it was planned
            if isinstance(result, EngineError):
                self._fail(sample.request, result)
                continue
            self.num_sampled_tokens += 1
            sample.append(result.token_id, result.logprob, result.raw_logprob, lease.version.number)
        self._publish(lease, plan)
        for sample in samples:
            if sample.state is RequestState.RUNNING:
                self._finish_if_due(sample)
        self._planner.release(lease)
        self._announce(sample.request for sample in samples)

    def _publish(self, lease: StableLease, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            sample = chunk.sample
            if sample.state is RequestState.RUNNING and sample.cache is not None:
                self._cache.publish(lease, sample.cache, sample.tokens, sample.num_computed)

    def _finish_if_due(self, sample: Sample) -> None:
        finish = sample.request.stop.check(sample.tokens[-1], sample.num_output)
        if finish is not None:
            self._planner.finish(sample, finish.finish_reason, finish.stop_reason)

    def _fail_step(self, lease: StableLease, plan: StepPlan, error: Exception) -> None:
        """An exception in a step ends the requests of that batch and gives back their pages; the rest goes on."""
        logger.error("a step failed: %r", error)
        for chunk in plan.chunks:
            self._fail(chunk.sample.request, error)
        self._planner.release(lease)

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
            request.on_progress()
