"""The audit in the engine: a share of the samples that end is replayed while there is nothing else to do."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import anyio.lowlevel
from attrs import Factory, define, field

from aengine.audit.record import SampleRecord, sample_records
from aengine.audit.replay import EPSILONS, Replay, Replayer
from aengine.audit.verdict import Consistent, NotReproduced, OtherBits, Reproduced, Unauditable
from aengine.errors import UnknownVersionError
from aengine.model.weights import DecoderWeights
from aengine.policy.gate import PolicyGate
from aengine.policy.journal import Journal
from aengine.policy.lease import StableLease
from aengine.policy.ledger_records import AuditRecord, TransitionRecord
from aengine.request import Request
from aengine.runner import ModelRunner
from aengine.signal import Signal
from aengine.stats import AuditTotals
from aengine.worker import Worker
from statemachines.policy import Operation, Trigger

__all__ = ["Auditor"]

logger = logging.getLogger(__name__)

RECORDS_AT_ONCE = 16
"""Of `Auditor.replay`; steps of the engine come between."""


@define(eq=False)
class Auditor:
    """Owner of the samples to be replayed. A replay is one job of the engine's worker thread, under a lease, and begins
    only while the scheduler has nothing to do; so an update waits for the one under way and for no other.

    A replay shares weights, kernels and thread with the engine, but neither its scheduler nor its cache nor its KV.
    """

    gate: PolicyGate
    runner: ModelRunner
    worker: Worker
    journal: Journal
    changed: Signal
    is_idle: Callable[[], bool]
    fraction: float
    seed: int
    max_model_len: int
    _queue: deque[SampleRecord] = Factory(deque)
    _num_offered: int = 0
    _num_reproduced: int = 0
    _num_failed: int = 0
    _num_unaudited: int = 0
    _replayer: Replayer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._replayer = Replayer(
            spec=self.runner.decoder.spec,
            weights_of=self._installed_weights,
            max_sequence_len=self.max_model_len,
            eos_token_ids=self.runner.eos_token_ids,
            epsilon=EPSILONS[self.runner.decoder.weights.dtype],
        )
        self.gate.on_transition(self._on_transition)

    def offer(self, request: Request) -> None:
        """A request has ended; choose among its samples. Failed ones and scores are not audited."""
        if not self.fraction or request.error is not None or request.is_scoring:
            return
        chosen = {sample.index for sample in request.samples if sample.num_output and self._draw()}
        if not chosen:
            return
        output = request.output(numerics=self.runner.decoder.weights.strategy.mode)
        records = sample_records(request.request_id, output, request.params)
        self._queue.extend(record for record in records if record.index in chosen)
        self.changed.set()

    def _draw(self) -> bool:
        self._num_offered += 1
        return random.Random(f"audit {self.seed} {self._num_offered}").random() < self.fraction

    async def run(self) -> None:
        """Replay what is chosen, one sample after the other, until cancelled."""
        while True:
            await anyio.lowlevel.checkpoint()  # the worker's jobs end before a cancellation is seen
            lease = self.gate.try_lease() if self._queue and self.is_idle() else None
            if lease is None:
                await self.changed.wait()
                continue
            with lease:
                await self._audit(lease, self._queue.popleft())

    async def _audit(self, lease: StableLease, record: SampleRecord) -> None:
        lease.check(Operation.FORWARD)
        self._num_unaudited += 1  # until it has a verdict: a cancellation leaves it so
        try:
            verdict = await self.worker.run(lambda: self._replayer.replay([record])[0].verdict)
        except Exception:
            logger.exception("the replay of sample %d of request %r failed", record.index, record.request_id)
            return
        if isinstance(verdict, Unauditable):
            return
        self._num_unaudited -= 1
        if isinstance(verdict, Reproduced | Consistent):
            self._num_reproduced += 1
        else:
            self._fail(record, verdict)

    def _fail(self, record: SampleRecord, verdict: NotReproduced | OtherBits) -> None:
        self._num_failed += 1
        kind = str(verdict.__struct_config__.tag)
        reason = verdict.reason if isinstance(verdict, NotReproduced) else _other_bits(verdict)
        failure = AuditRecord(request_id=record.request_id, index=record.index, verdict=kind, reason=reason)
        logger.error(
            "sample %d of request %r did not reproduce: %s",
            record.index,
            record.request_id,
            reason,
            extra={"request_ids": [record.request_id]},
        )
        self.journal.append(failure)

    async def replay(self, records: Sequence[SampleRecord]) -> list[Replay]:
        """A verdict on each record under the installed version, which no update replaces meanwhile.

        A cancellation, and the end of the engine, take effect between two parts of `RECORDS_AT_ONCE`.
        """
        lease, replays = await self._lease(), list[Replay]()
        with lease:
            for first in range(0, len(records), RECORDS_AT_ONCE):
                await anyio.lowlevel.checkpoint()
                self.gate.refuse_if_stopped()
                lease.check(Operation.FORWARD)
                replay = partial(self._replayer.replay, records[first : first + RECORDS_AT_ONCE])
                replays += await self.worker.run(replay)
        return replays

    async def _lease(self) -> StableLease:
        """Wait while generation is paused or weights change."""
        while (lease := self.gate.try_lease()) is None:
            self.gate.refuse_if_stopped()
            self.gate.installed()
            await self.changed.wait()
        return lease

    def close(self) -> None:
        """What is still queued will not be audited."""
        self._num_unaudited += len(self._queue)
        self._queue.clear()

    def totals(self) -> AuditTotals:
        return AuditTotals(self._num_reproduced, self._num_failed, self._num_unaudited, len(self._queue))

    def _on_transition(self, record: TransitionRecord) -> None:
        """Weights that have been replaced, or torn, cannot make a sample again."""
        if record.trigger in (Trigger.COMMIT, Trigger.FAIL):
            self.close()

    def _installed_weights(self, version: int) -> DecoderWeights:
        installed = self.gate.version
        if installed is None or version != installed.number:
            raise UnknownVersionError(version, () if installed is None else (installed.number,))
        return self.runner.decoder.weights


def _other_bits(verdict: OtherBits) -> str:
    return (
        f"{verdict.num_differing} log-probabilities have other bits, the first at token {verdict.position}; "
        f"the largest difference is {verdict.largest_difference:.1e}"
    )
