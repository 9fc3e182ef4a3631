"""Waiting for something that another task or thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import anyio.lowlevel

__all__ = ["until"]

TURN = 50e-6
"""Seconds in which other threads may run. A loop that only yields to its own tasks can starve them: it gives the
interpreter's lock away and has it again before a waiting thread has woken."""


async def until(condition: Callable[[], object], *, within: float = 60.0) -> None:
    """Look again and again, between the turns of the other tasks, until `condition()` is true.

    Looks often enough that a test can act between two steps of an engine, at the cost of a busy event loop.

    Raises:
        TimeoutError: `condition` was not true `within` that many seconds.
    """
    with anyio.fail_after(within):
        while not condition():
            await anyio.lowlevel.checkpoint()
            _give_a_turn()


def _give_a_turn() -> None:
    time.sleep(TURN)
