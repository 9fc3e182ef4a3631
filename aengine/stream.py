"""A stream: a cursor over a request's own output."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Literal

import anyio.lowlevel
from anyio.lowlevel import EventLoopToken
from attrs import Factory, define, field, frozen

from aengine.errors import EngineClosedError
from aengine.outputs import Alternatives, FinishReason, RequestOutput
from aengine.request import Request, Sample
from aengine.sampling.text import Detokenizer
from aengine.signal import Signal

__all__ = ["OutputKind", "RequestStream", "StreamDelta"]

OutputKind = Literal["delta", "cumulative"]


@frozen
class StreamDelta:
    """What one sample gained since the stream was last read; fields as in `CompletionOutput`, new tokens only.

    In a cumulative stream: all tokens of the sample so far.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    token_versions: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    top_logprobs: tuple[Alternatives, ...] | None = None


@define(eq=False)
class _Cursor:
    sample: Sample
    detokenizer: Detokenizer | None
    is_cumulative: bool
    position: int = 0
    is_done: bool = False
    num_pieces: int = 0
    text: str = ""

    def read(self) -> StreamDelta | None:
        """The tokens after the cursor, which moves behind them; None where there is nothing new."""
        sample, start, end = self.sample, self.position, self.sample.num_output
        if self.is_done or (end == start and not sample.is_finished):
            return None
        self.position, self.is_done = end, sample.is_finished
        piece = self._read_text(start)
        return self._delta(0, self.text) if self.is_cumulative else self._delta(start, piece)

    def _read_text(self, start: int) -> str | None:
        if self.detokenizer is None:
            return None
        if self.sample.stop_text is None:
            piece = self.detokenizer.feed(self.sample.output_since(start), last=self.is_done)
        else:  # its text holds back what could become a stop string, and may end before its tokens do
            piece = "".join(self.sample.stop_text.pieces[self.num_pieces :])
            self.num_pieces = len(self.sample.stop_text.pieces)
        if self.is_cumulative:
            self.text += piece
        return piece

    def _delta(self, start: int, text: str | None) -> StreamDelta:
        sample = self.sample
        versions = tuple(
            span.version for span in sample.provenance.version_spans() for _ in range(max(start, span.start), span.end)
        )
        return StreamDelta(
            index=sample.index,
            token_ids=tuple(sample.output_since(start)),
            text=text if self.detokenizer is not None else None,
            logprobs=tuple(sample.logprobs[start:]),
            raw_logprobs=tuple(sample.raw_logprobs[start:]),
            token_versions=versions,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            top_logprobs=None if sample.request.params.logprobs is None else sample.top_logprobs[start:],
        )


@define(eq=False)
class RequestStream(AsyncIterator[StreamDelta]):
    """One request, read while it is sampled. Use it as an async context manager, which submits the request, and iterate
    over it; items of different samples alternate, those of one sample come in order.

    Leaving the context, `aclose()` from whichever task, or dropping the last reference aborts the request unless it has
    ended; its pages are free within two steps, and what it had can still be read. Breaking out of the loop or
    cancelling the reader alone does nothing to the request.

    Nothing is buffered beyond the request's own output, so a slow reader costs nothing and holds nobody up. A
    cancelled read loses nothing: the next read returns what was there. Reads may come from any number of tasks of the
    loop that opened it; each item goes to one of them.
    """

    _requests: Sequence[Request]
    """The one request, as what the engine calls takes sequences."""
    _submit: Callable[[Sequence[Request]], None] = field(repr=False)
    _withdraw: Callable[[Iterable[Request]], None] = field(repr=False)
    _withdraw_soon: Callable[[Iterable[Request]], None] = field(repr=False)
    _result: Callable[[Request], RequestOutput] = field(repr=False)
    _new_detokenizer: Callable[[], Detokenizer | None] = field(repr=False)
    _output_kind: OutputKind = "delta"
    _progress: Signal = Factory(Signal)
    _cursors: list[_Cursor] = Factory(list)
    _token: EventLoopToken | None = None

    @property
    def _request(self) -> Request:
        return self._requests[0]

    @property
    def request_id(self) -> str:
        return self._request.request_id

    async def __aenter__(self) -> RequestStream:
        """Submit the request; returns when it has its place in the queue. Raises what `Engine.generate` raises then."""
        if self._token is not None:
            raise EngineClosedError("a stream is opened once; make a new one")
        request, cumulative = self._request, self._output_kind == "cumulative"
        progress = self._progress  # the request must not keep the stream alive
        request.on_progress = lambda _: progress.set()
        self._cursors = [_Cursor(sample, self._new_detokenizer(), cumulative) for sample in request.samples]
        self._token = anyio.lowlevel.current_token()
        self._submit(self._requests)
        weakref.finalize(self, self._withdraw_soon, self._requests).atexit = False
        try:
            while not (request.is_queued or request.is_finished):
                await self._progress.wait()
        except BaseException:
            self._withdraw(self._requests)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Idempotent; readers get what is left and come to the end."""
        self._withdraw(self._requests)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamDelta:
        """The next item of whichever sample has one. Raises `RequestFailedError` after the last one if it failed."""
        while True:
            for cursor in self._cursors:
                delta = cursor.read()
                if delta is not None:
                    return delta
            if self._request.is_finished:
                self._result(self._request)
                raise StopAsyncIteration
            await self._wait()

    async def output(self) -> RequestOutput:
        """Wait for the end and return the whole result; raises `RequestFailedError` if the request failed."""
        while not self._request.is_finished:
            await self._wait()
        return self._result(self._request)

    async def _wait(self) -> None:
        if self._token is None:
            raise EngineClosedError("the stream is not open; enter it with `async with`, which submits the request")
        if anyio.lowlevel.current_token() != self._token:
            raise EngineClosedError("the stream was opened in another event loop; read it there")
        await self._progress.wait()
