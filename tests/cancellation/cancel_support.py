"""Cancelling a call at its n-th wait, and what must be true of an engine afterwards."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import torch
from attrs import define, field
from torch import Tensor

from aengine import Engine, EngineConfig, RequestOutput, SamplingParams
from aengine.audit.oracle import oracle_logprobs
from aengine.testing import random_tensors, tiny_checkpoint, until
from statemachines.policy import PolicyState

__all__ = [
    "GREEDY",
    "LONG",
    "MODEL",
    "PROMPT",
    "STRIKES",
    "WEIGHTS",
    "Blow",
    "Ended",
    "assert_made_by",
    "assert_works",
    "call_under",
    "new_engine",
    "stream_of",
    "strikes_on",
    "struck_at",
    "until_idle",
]

MODEL = tiny_checkpoint(0, num_hidden_layers=1)
WEIGHTS = {0: dict(MODEL.tensors), 1: random_tensors(MODEL.spec, 1), 2: random_tensors(MODEL.spec, 2)}
PROMPT = [1, 2, 3, 4, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(temperature=0, max_tokens=16)
STRIKES = {"asyncio": ("scope", "native", "double scope", "double native"), "trio": ("scope", "double scope")}


def strikes_on(backend: str) -> list[tuple[str, str]]:
    return [(backend, kind) for kind in STRIKES[backend]]


@define(eq=False)
class Blow:
    """Strikes at the `at`-th wait, and where told so again at every wait after that."""

    at: int
    strike: Callable[[], object] = field(default=lambda: None)
    again: bool = False
    num_waits: int = 0

    @property
    def has_struck(self) -> bool:
        return self.num_waits >= self.at

    def on_wait(self) -> None:
        self.num_waits += 1
        if self.num_waits == self.at or (self.again and self.num_waits == self.at + 1):
            self.strike()


@types.coroutine
def struck_at(coroutine: Coroutine[Any, Any, Any], on_wait: Callable[[], object]) -> Generator[Any, Any, Any]:
    """Run `coroutine` and call `on_wait` each time it waits: between the moment it gives up control and the moment the
    event loop sees what it waits for."""
    go_on: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        try:
            waits_for = go_on()
        except StopIteration as end:
            return end.value
        on_wait()
        try:
            value = yield waits_for
        except BaseException as error:
            go_on = partial(coroutine.throw, error)
        else:
            go_on = partial(coroutine.send, value)


@define(eq=False)
class Ended:
    """How a call ended."""

    result: Any = None
    error: BaseException | None = None
    was_cancelled: bool = False


async def call_under(kind: str, blow: Blow, call: Callable[[], Coroutine[Any, Any, Any]], *, own: bool = True) -> Ended:
    """Make a call that `blow` cancels in the way `kind` says; `own` says that the waits are those of the call itself.
    A cancellation must not come out of here, nor swallow another."""
    ended = Ended()
    blow.again = kind.startswith("double")

    async def run() -> None:
        coroutine = call()
        try:
            ended.result = await (struck_at(coroutine, blow.on_wait) if own else coroutine)
        except anyio.get_cancelled_exc_class():
            ended.was_cancelled = True
            raise
        except Exception as error:
            ended.error = error

    if kind.endswith("native"):
        task = asyncio.get_running_loop().create_task(run())
        blow.strike = task.cancel
        await asyncio.wait([task])
        assert task.cancelled() == ended.was_cancelled
    else:
        with anyio.CancelScope() as scope:
            blow.strike = scope.cancel
            await run()
    return ended


def new_engine(**fields: Any) -> Engine:
    return Engine(MODEL, EngineConfig(**{"page_size": 4, "num_pages": 48, "check_integrity": True, **fields}))


def assert_made_by(output: RequestOutput, weights: int, version: int) -> None:
    for sample in output.outputs:
        assert set(sample.token_versions) <= {version}
        expected = oracle_logprobs(MODEL.spec, WEIGHTS[weights], output.prompt_token_ids, sample.token_ids)
        torch.testing.assert_close(torch.tensor(sample.raw_logprobs), expected, atol=1e-4, rtol=0)


async def until_idle(engine: Engine) -> None:
    """Wait until all pages are given back; a leak would run into the time limit."""
    with anyio.fail_after(20):
        await until(lambda: not (engine.stats().pages.live or engine.stats().num_running or engine.stats().num_waiting))
    engine._opened().cache.check_integrity()


async def assert_works(engine: Engine, weights: int | None) -> None:
    """Idle, and Serving under `weights`, or fenced where that is None; either way a good update (to weights 2) commits,
    and the next request is right."""
    if weights is not None:
        await until_idle(engine)
        assert engine.state is PolicyState.SERVING
        assert engine.policy_version is not None
        assert_made_by(await engine.generate(PROMPT, GREEDY), weights, engine.policy_version)
    assert engine.state is (PolicyState.SERVING if weights is not None else PolicyState.INVALIDATED)
    with anyio.fail_after(20):
        ack = await engine.update_weights(WEIGHTS[2])
        assert_made_by(await engine.generate(PROMPT, GREEDY), 2, ack.policy_version)
    await until_idle(engine)
    assert engine.state is PolicyState.SERVING


async def stream_of(tensors: dict[str, Tensor]) -> AsyncIterator[tuple[str, Tensor]]:
    """The tensors as they come from afar, in three parts."""
    for number, pair in enumerate(tensors.items()):
        if number % (len(tensors) // 3) == 0:
            await anyio.lowlevel.checkpoint()
        yield pair
