"""Calls into an event loop from wherever one happens to be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from anyio.lowlevel import EventLoopToken

__all__ = ["call_soon"]


def call_soon(token: EventLoopToken, call: Callable[[], Any]) -> None:
    """Have the loop of `token` make a call soon, without waiting for it; nothing happens if that loop has ended.

    Safe from any thread and at any moment, also while the garbage collector runs, so it is what finalizers may use.
    """
    native: Any = token.native_token
    schedule = native.run_sync_soon if hasattr(native, "run_sync_soon") else native.call_soon_threadsafe
    with suppress(RuntimeError):  # the loop is closed; trio's own error is one of these too
        schedule(call)
