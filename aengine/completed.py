"""Requests submitted together, and their results in the order in which they end."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType

from attrs import Factory, define, field

from aengine.errors import EngineError
from aengine.outputs import RequestOutput
from aengine.request import Request
from aengine.signal import Signal

__all__ = ["CompletedOutputs", "Gathering", "submit_all"]


@define(eq=False)
class Gathering:
    """Collects those of its requests that have ended, each once, at a cost that does not depend on how many are left.
    It is to be made before they are submitted."""

    requests: Sequence[Request]
    _indices: dict[int, int] = field(init=False)
    """Of each request, by its `id`: a bound callback for each would be an object more for each."""
    _num_left: int = field(init=False)
    _ended: deque[int] = Factory(deque)
    _progress: Signal = Factory(Signal)

    def __attrs_post_init__(self) -> None:
        self._num_left = len(self.requests)
        self._indices = {id(request): index for index, request in enumerate(self.requests)}
        look_at = self._look_at
        for request in self.requests:
            request.on_progress = look_at

    def _look_at(self, request: Request) -> None:
        if request.is_finished:
            request.on_progress = _nothing
            self._ended.append(self._indices[id(request)])
            self._progress.set()

    async def next(self) -> int | None:
        """Index of the next request that has ended; None when all have been told. A cancelled wait loses nothing."""
        while not self._ended:
            if self._num_left == 0:
                return None
            await self._progress.wait()
        self._num_left -= 1
        if self._num_left == 0:
            self._progress.set()  # other readers have nothing to wait for any more
        return self._ended.popleft()

    def alive(self) -> list[Request]:
        return [request for request in self.requests if not request.is_finished]


@define(eq=False)
class CompletedOutputs(AsyncIterator[tuple[int, RequestOutput]]):
    """Yields (index of the prompt, its result) as requests end; made by `Engine.as_completed`.

    Use it as an async context manager, which submits all prompts, or iterate over it at once. Leaving the context,
    `aclose()`, or dropping the last reference aborts what has not ended. A request that failed raises its
    `RequestFailedError` in its turn; `request_ids` says which prompt that was, and the next read goes on with the
    others. A cancelled read loses nothing, and several tasks may read: each result goes to one of them.
    """

    _requests: Sequence[Request] = field(repr=False)
    _submit: Callable[[Sequence[Request]], None] = field(repr=False)
    _abandon: Callable[[Iterable[Request]], None] = field(repr=False)
    _abandon_soon: Callable[[Iterable[Request]], None] = field(repr=False)
    _result: Callable[[Request], RequestOutput] = field(repr=False)
    _gathering: Gathering | None = field(default=None, repr=False)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the requests, in order of their prompts."""
        return tuple(request.request_id for request in self._requests)

    def _start(self) -> Gathering:
        if self._gathering is None:
            gathering = Gathering(self._requests)
            self._submit(self._requests)
            self._gathering = gathering
            weakref.finalize(self, self._abandon_soon, self._requests).atexit = False
        return self._gathering

    async def __aenter__(self) -> CompletedOutputs:
        self._start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what has not ended; results of those requests can still be read, with what they had."""
        if self._gathering is not None:
            self._abandon(self._gathering.alive())

    def __aiter__(self) -> CompletedOutputs:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        index = await self._start().next()
        if index is None:
            raise StopAsyncIteration
        return index, self._result(self._requests[index])


def submit_all(
    requests: Sequence[Request], submit: Callable[[Request], None], withdraw: Callable[[Request], None]
) -> None:
    """All or none: what `submit` raises for one withdraws those before it."""
    for number, request in enumerate(requests):
        try:
            submit(request)
        except EngineError:
            for submitted in requests[:number]:
                withdraw(submitted)
            raise


def _nothing(_: Request) -> None:
    """For requests that have ended."""
