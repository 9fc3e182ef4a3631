"""One thread of the engine's own, for everything that computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import anyio
import anyio.lowlevel
import torch
from attrs import Factory, define, frozen

from aengine.errors import EngineClosedError
from aengine.loops import call_soon

__all__ = ["Outcome", "Worker"]

T = TypeVar("T")


@frozen
class Outcome(Generic[T]):
    """How a call ended: its result or its error, and the cancellation that came for the caller meanwhile, if any."""

    result: T | None
    error: BaseException | None
    cancelled: BaseException | None


@define(eq=False)
class _Job:
    call: Callable[[], Any]
    token: Any
    done: anyio.Event = Factory(anyio.Event)
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error
        call_soon(self.token, self.done.set)


class Worker:
    """A single thread that runs one call at a time, without gradients.

    It is a thread of the engine's own so that a full default pool cannot stop the engine, and always the same one,
    since grad mode and OpenMP teams belong to threads. The caller's grad mode and thread counts are left alone.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    async def finish(self, call: Callable[[], T]) -> Outcome[T]:
        """Run `call` in the thread to its end. A cancellation is not delivered but handed back, also a native one of
        asyncio, which passes through shields; who calls this raises it when what must follow has been done. After
        `close` the outcome is an `EngineClosedError`."""
        if self._is_closed:
            return Outcome(None, EngineClosedError("the engine is closed"), None)
        job = _Job(call, anyio.lowlevel.current_token())
        self._jobs.put(job)
        cancelled: BaseException | None = None
        while not job.done.is_set():
            try:
                with anyio.CancelScope(shield=True):
                    await job.done.wait()
            except anyio.get_cancelled_exc_class() as late:
                cancelled = late
        return Outcome(job.result, job.error, cancelled)

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in the thread. A cancellation is delivered only once the thread is done with it, so whatever the
        call uses may be released by the caller's own unwinding."""
        outcome = await self.finish(call)
        if outcome.cancelled is not None:
            raise outcome.cancelled
        if outcome.error is not None:
            raise outcome.error
        return cast("T", outcome.result)

    def close(self) -> None:
        """Let the thread end after the job in hand; returns when it has."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            job.run()
            del job
