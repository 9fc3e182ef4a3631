"""A real engine in an event loop that takes as many turns as it is told to, with nothing in other threads."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import anyio.lowlevel
import torch
from attrs import Factory, define
from torch import Tensor

from aengine import Engine, EngineConfig, RequestOutput
from aengine.audit.oracle import oracle_logprobs
from aengine.outputs import CompletionOutput
from aengine.policy.ledger_check import LedgerReport, check_ledger
from aengine.testing import random_tensors, tiny_checkpoint
from aengine.worker import Outcome

__all__ = ["WEIGHTS", "Call", "EngineRig", "Tap", "assert_true_to_label"]

MODEL = tiny_checkpoint(0, num_hidden_layers=1)
WEIGHTS = [dict(MODEL.tensors), *(random_tensors(MODEL.spec, seed) for seed in (1, 2, 3))]
PATIENCE = 3000
"""Turns of the loop in which everything that can end must have ended."""


class InlineWorker:
    """Has the meaning of `Worker`, in the loop's own thread: a call ends a turn after it was made."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def finish(self, call: Callable[[], Any]) -> Outcome[Any]:
        cancelled: BaseException | None = None
        try:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
        except anyio.get_cancelled_exc_class() as late:
            cancelled = late
        try:
            with torch.no_grad():
                return Outcome(call(), None, cancelled)
        except Exception as error:
            return Outcome(None, error, cancelled)

    async def run(self, call: Callable[[], Any]) -> Any:
        outcome = await self.finish(call)
        for error in (outcome.cancelled, outcome.error):
            if error is not None:
                raise error
        return outcome.result

    def close(self) -> None:
        """There is nothing to end."""


async def run_inline(call: Callable[[], Any], **_: Any) -> Any:
    await anyio.lowlevel.checkpoint()
    return call()


@define(eq=False)
class Tap:
    """Weights that come in parts, of which the last comes when the tap is opened; a broken one raises instead."""

    tensors: dict[str, Tensor]
    breaks: bool = False
    opened: asyncio.Event = Factory(asyncio.Event)

    async def flow(self) -> AsyncIterator[tuple[str, Tensor]]:
        *most, last = self.tensors.items()
        for pair in most:
            yield pair
        await self.opened.wait()
        if self.breaks:
            raise OSError("the trainer went away")
        yield last


@define(eq=False)
class Call:
    """A call of the engine on its way, and how it ended."""

    task: asyncio.Task[Any]
    was_cancelled: bool = False

    @property
    def error(self) -> BaseException | None:
        return None if not self.task.done() or self.task.cancelled() else self.task.exception()

    @property
    def result(self) -> Any:
        return self.task.result() if self.task.done() and not self.task.cancelled() and not self.error else None

    def cancel(self) -> None:
        self.was_cancelled = self.was_cancelled or not self.task.done()
        self.task.cancel()


class EngineRig:
    """Opens an engine, makes calls in tasks of their own, and turns the loop."""

    def __init__(self, **fields: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.ledger = Path(self._folder.name) / "ledger.jsonl"
        self.loop = asyncio.new_event_loop()
        self._patches = [
            patch("aengine.assembly.Worker", InlineWorker),
            patch("aengine.policy.journal.Worker", InlineWorker),
            patch("anyio.to_thread.run_sync", run_inline),
        ]
        for one in self._patches:
            one.start()
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiny products only wait for each other in more
        config = {"page_size": 4, "num_pages": 14, "max_num_seqs": 4, "max_num_batched_tokens": 16, "seed": 3}
        self.engine = Engine(
            MODEL, EngineConfig(**config, numerics="fast", check_integrity=True, ledger=self.ledger, **fields)
        )
        self.calls: list[Call] = []
        self._leave: asyncio.Event
        self._host = self.loop.create_task(self._open())
        self.turn(30)
        assert self.engine.policy_version == 0

    async def _open(self) -> None:
        self._leave = asyncio.Event()
        async with self.engine:
            await self._leave.wait()

    def turn(self, turns: int) -> None:
        async def pass_by() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(pass_by())

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Call:
        call = Call(self.loop.create_task(coroutine))
        self.calls.append(call)
        self.turn(1)
        return call

    def until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(PATIENCE):
            if condition():
                return
            self.turn(1)
        raise AssertionError(f"it does not come to an end: {what}")

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        call = self.call(coroutine)
        self.until(call.task.done, str(coroutine))
        return call.task.result()

    def leave(self) -> LedgerReport:
        """Leave the engine's block; returns what the check says of the ledger."""
        self._leave.set()
        self.until(self._host.done, "closing")
        self._host.result()
        return check_ledger(self.ledger.read_bytes())

    def close(self) -> None:
        torch.set_num_threads(self._num_threads)
        for one in reversed(self._patches):
            one.stop()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.turn(3)
        self.loop.close()
        self._folder.cleanup()


def assert_true_to_label(output: RequestOutput, weights_of: dict[int, int], *, may_mix: bool = False) -> None:
    """Every token whose KV is all of its own version has the log-probability that this version's weights give it, and
    unless KV was kept across an update that is every token."""
    for sample in output.outputs:
        for span in sample.version_spans:
            expected = oracle_logprobs(
                MODEL.spec, WEIGHTS[weights_of[span.version]], output.prompt_token_ids, sample.token_ids
            )
            pure = [at for at in range(span.start, span.end) if kv_versions(sample, at) == {span.version}]
            assert may_mix or len(pure) == span.end - span.start, "a token attended to KV of another version"
            got = torch.tensor(sample.raw_logprobs)[pure]
            torch.testing.assert_close(got, expected[pure], atol=1e-4, rtol=0)


def kv_versions(sample: CompletionOutput, token: int) -> set[int]:
    return {span.version for span in sample.kv_spans if span.first_token <= token < span.last_token}
