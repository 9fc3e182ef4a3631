"""Replaying what engines on the cases' tiny model have sampled."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio
from case_support import MODEL, WEIGHTS, HookedRunner
from torch import Tensor

from aengine import Engine, RequestOutput, SamplingParams
from aengine.audit.explanation import Explanation
from aengine.audit.forensics import Forensics
from aengine.audit.policies import PolicyWeights
from aengine.audit.record import SampleRecord, sample_records
from aengine.audit.replay import Replay, Replayer
from aengine.audit.verdict import Reproduced
from aengine.kernels.invariance import probe
from aengine.model.checkpoint import Checkpoint
from aengine.model.weights import linear_shapes
from aengine.testing import until
from statemachines.policy import PolicyState

MAX_LEN = MODEL.spec.max_position_embeddings


def records_of(output: RequestOutput) -> list[SampleRecord]:
    assert output.params is not None
    return list(sample_records(output.request_id, output, output.params))


def new_replayer(
    weights: Mapping[int, Mapping[str, Tensor]] = WEIGHTS, model: Checkpoint = MODEL, max_sequence_len: int = MAX_LEN
) -> Replayer:
    """Knows the given weights under their numbers as versions."""
    numerics = probe(linear_shapes(model.spec))
    policies = PolicyWeights(model.spec, numerics, weights.__getitem__, tuple(weights))
    return Replayer(model.spec, policies, max_sequence_len, model.eos_token_ids)


def explain(
    record: SampleRecord,
    relatives: Sequence[tuple[int, int]] = (),
    weights: Mapping[int, Mapping[str, Tensor]] = WEIGHTS,
) -> tuple[Replay, Explanation | None]:
    replayer = new_replayer(weights)
    (replay,) = replayer.replay([record])
    return replay, Forensics(replayer, tuple(weights)).explain(replay, relatives)


def assert_reproduced(*outputs: RequestOutput, replayer: Replayer | None = None) -> None:
    records = [record for output in outputs for record in records_of(output)]
    assert records
    for replay in (replayer or new_replayer()).replay(records):
        assert isinstance(replay.verdict, Reproduced), replay.verdict
        assert replay.verdict.finish_unchecked is None


async def sample(engine: Engine, prompt: Sequence[int], **params: object) -> list[SampleRecord]:
    return records_of(await engine.generate(prompt, SamplingParams(**params)))  # type: ignore[arg-type]


class HeldSteps:
    """Lets an engine compute only so many steps as it is allowed."""

    def __init__(self, engine: Engine) -> None:
        self.begun, self._allowed, self._changed = 0, 0, threading.Condition()
        HookedRunner(engine, self._wait)

    def _wait(self, call: int) -> None:
        self.begun = call
        with self._changed:
            assert self._changed.wait_for(lambda: call <= self._allowed, 20)

    def allow(self, count: int) -> None:
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def hold(self) -> None:
        """Allow no step after the one that is under way or held up."""
        with self._changed:
            self._allowed = self.begun

    @property
    def is_held(self) -> bool:
        return self.begun > self._allowed

    async def update_after(self, count: int, engine: Engine, weights: int, **options: Any) -> None:
        """An update that comes after `count` more steps and one that is under way."""
        self.allow(count)
        await until(lambda: self.is_held)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(engine.update_weights, WEIGHTS[weights], **options))
            await until(lambda: engine.state is PolicyState.DRAINING)
            self.allow(1)
