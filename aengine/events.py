"""What happened, as a stream that any number of readers follow at their own pace."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from attrs import define, field, frozen

from aengine.policy.ledger_records import Record
from aengine.signal import Signal

__all__ = ["Event", "EventLog", "EventStream"]


@frozen
class Event:
    """One record of what happened (`policy.ledger_records` lists the kinds), and when, in seconds since 1970."""

    time: float
    record: Record


@define(eq=False)
class _Link:
    event: Event | None = None
    next: _Link | None = None


class EventLog:
    """Appends events; keeps none. Each reader holds on to the place it has read to, so what all readers have passed is
    forgotten, and a slow reader costs nobody but itself."""

    def __init__(self) -> None:
        self._last = _Link()
        self._closed = False
        self._arrived = Signal()

    def append(self, record: Record) -> None:
        link = _Link(Event(time.time(), record))
        self._last.next = link
        self._last = link
        self._arrived.set()

    def close(self) -> None:
        """No more events: readers end once they have read what there is."""
        self._closed = True
        self._arrived.set()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def follow(self) -> EventStream:
        """A reader of the events from now on."""
        return EventStream(self, self._last, self._arrived)


@define(eq=False)
class EventStream(AsyncIterator[Event]):
    """Iterates over the events since it was made; ends when the engine closes. A cancelled read loses nothing."""

    _log: EventLog = field(repr=False)
    _read: _Link = field(repr=False)
    _arrived: Signal = field(repr=False)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        while self._read.next is None:
            if self._log.is_closed:
                raise StopAsyncIteration
            await self._arrived.wait()
        self._read = self._read.next
        assert self._read.event is not None
        return self._read.event
