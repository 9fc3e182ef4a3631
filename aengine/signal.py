"""A wake-up for any number of waiting tasks."""

from __future__ import annotations

import anyio

__all__ = ["Signal"]


class Signal:
    """`set()` wakes every task that waits now; a task that waits later waits for the next `set()`.

    Waiters look at the state they wait for before they wait and again after they woke. On one event loop nothing can
    come between looking and waiting, so no wake-up is lost.
    """

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def set(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()
