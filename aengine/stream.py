"""A stream: a cursor over a request's own output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType

from attrs import Factory, define, frozen

from aengine.outputs import FinishReason, RequestOutput
from aengine.request import Request, Sample
from aengine.sampling.text import Detokenizer
from aengine.signal import Signal

__all__ = ["RequestStream", "StreamDelta"]


@frozen
class StreamDelta:
    """What one sample gained since the stream was last read; fields as in `CompletionOutput`, new tokens only."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    token_versions: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@define(eq=False)
class _Cursor:
    sample: Sample
    detokenizer: Detokenizer | None
    position: int = 0
    is_done: bool = False

    def read(self) -> StreamDelta | None:
        """The tokens after the cursor, which moves behind them; None where there is nothing new."""
        sample, start, end = self.sample, self.position, self.sample.num_output
        if self.is_done or (end == start and not sample.is_finished):
            return None
        self.position, self.is_done = end, sample.is_finished
        token_ids = tuple(sample.output_ids[start:])
        versions = tuple(
            span.version for span in sample.provenance.version_spans() for _ in range(max(start, span.start), span.end)
        )
        text = None if self.detokenizer is None else self.detokenizer.feed(token_ids, last=self.is_done)
        return StreamDelta(
            index=sample.index,
            token_ids=token_ids,
            text=text,
            logprobs=tuple(sample.logprobs[start:]),
            raw_logprobs=tuple(sample.raw_logprobs[start:]),
            token_versions=versions,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )


@define(eq=False)
class RequestStream:
    """Deltas of one request as they are sampled. Use it as an async context manager, which submits the request, and
    iterate over it; leaving the context aborts the request unless it has ended.

    Nothing is buffered beyond the request's own output, so a slow reader costs nothing and holds nobody up. A
    cancelled read loses nothing: the next read returns what was there.
    """

    _request: Request
    _submit: Callable[[Request], None]
    _abort: Callable[[str], None]
    _result: Callable[[Request], RequestOutput]
    _new_detokenizer: Callable[[], Detokenizer | None]
    _progress: Signal = Factory(Signal)
    _cursors: list[_Cursor] = Factory(list)

    @property
    def request_id(self) -> str:
        return self._request.request_id

    async def __aenter__(self) -> RequestStream:
        self._request.on_progress = self._progress.set
        self._cursors = [_Cursor(sample, self._new_detokenizer()) for sample in self._request.samples]
        self._submit(self._request)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._request.is_finished:
            self._abort(self._request.request_id)

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        """The next delta of whichever sample has one. Raises `RequestFailedError` after the last one if it failed."""
        while True:
            for cursor in self._cursors:
                delta = cursor.read()
                if delta is not None:
                    return delta
            if self._request.is_finished:
                self._result(self._request)
                raise StopAsyncIteration
            await self._progress.wait()

    async def output(self) -> RequestOutput:
        """Wait for the end and return the whole result; raises `RequestFailedError` if the request failed."""
        while not self._request.is_finished:
            await self._progress.wait()
        return self._result(self._request)
