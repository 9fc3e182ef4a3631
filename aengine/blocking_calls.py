"""Calls into an engine's event loop from other threads: one call, an iterator, a body in the middle of a task."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from inspect import isawaitable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
from anyio import NoEventLoopError
from anyio.from_thread import BlockingPortal

from aengine.errors import EventLoopRunningError
from aengine.outputs import RequestOutput
from aengine.policy.in_place import InPlaceUpdate
from aengine.stream import RequestStream, StreamDelta

__all__ = ["BlockingIterator", "BlockingStream", "Body", "Call", "refuse_in_loop"]

T = TypeVar("T")
R = TypeVar("R")


class Call:
    """A call in the engine's loop; `cancel` may come before it has begun, or when it is over."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._is_cancelled = False

    @property
    def name(self) -> str:
        function = self._function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__name__", "call").strip("_")

    async def run(self) -> Any:
        if self._is_cancelled:
            return None
        with anyio.CancelScope() as self._scope:
            result = self._function()
            return await result if isawaitable(result) else result

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()


class Body:
    """One task of the engine's loop enters and leaves an update, while the body runs in the calling thread."""

    def __init__(self, update: InPlaceUpdate) -> None:
        self._update = update
        self._is_inside: Future[anyio.Event] = Future()
        self.error: BaseException | None = None

    def enter(self, portal: BlockingPortal) -> None:
        self._task = portal.start_task_soon(self._run)
        try:
            either: list[Future[Any]] = [self._task, self._is_inside]
            wait(either, return_when=FIRST_COMPLETED)
        except BaseException:
            self._task.cancel()
            raise
        if self._task.done():
            self._task.result()

    def leave(self, portal: BlockingPortal) -> None:
        """Raises what the update raises, unless the body has raised already."""
        portal.call(self._is_inside.result().set)
        self._task.result()

    async def _run(self) -> None:
        try:
            async with self._update:
                may_leave = anyio.Event()
                self._is_inside.set_result(may_leave)
                await may_leave.wait()
                if self.error is not None:
                    raise self.error
        except BaseException as error:
            if error is not self.error:
                raise


class Caller(Protocol):
    """What an iterator needs of a `BlockingEngine`."""

    @property
    def is_open(self) -> bool: ...

    def call(self, function: Callable[[], Any]) -> Any: ...


class BlockingIterator(Generic[T]):
    """An asynchronous iterator of the engine, read from threads; a context manager where that one is."""

    def __init__(self, engine: Caller, source: AsyncIterator[T]) -> None:
        self._engine, self._source = engine, source

    def __enter__(self) -> BlockingIterator[T]:
        self._do("__aenter__")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what has not ended; the rest can still be read."""
        if self._engine.is_open:
            self._do("aclose")

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return self._read(self._next)
        except StopAsyncIteration:
            raise StopIteration from None

    async def _next(self) -> T:
        return await self._source.__anext__()

    def _read(self, read: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Once the engine is closed there is nothing to wait for, and what is left needs no loop of the engine's."""
        result: R = self._engine.call(read) if self._engine.is_open else anyio.run(read)
        return result

    def _do(self, method: str) -> None:
        if hasattr(self._source, method):
            self._engine.call(getattr(self._source, method))


class BlockingStream(BlockingIterator[StreamDelta]):
    """As `RequestStream`."""

    def __init__(self, engine: Caller, source: RequestStream) -> None:
        super().__init__(engine, source)
        self._stream = source

    def __enter__(self) -> BlockingStream:
        super().__enter__()
        return self

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def output(self) -> RequestOutput:
        """Wait for the end and return the whole result; raises `RequestFailedError` if the request failed."""
        return self._read(self._stream.output)


def refuse_in_loop(call: str, instead: str) -> None:
    """Raise `EventLoopRunningError` if an event loop runs in this thread."""
    try:
        anyio.lowlevel.current_token()
    except NoEventLoopError:
        return
    raise EventLoopRunningError(f"{call} would block the event loop that runs in this thread; use `{instead}` instead")
