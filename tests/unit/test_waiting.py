"""Waiting in a test must not keep other threads from working."""

from __future__ import annotations

import threading

import pytest

from aengine.testing import until


async def test_a_thread_that_asks_for_its_turn_often_gets_it() -> None:
    turns, done = 0, threading.Event()

    def work() -> None:
        nonlocal turns
        for _ in range(500):
            done.wait(0)  # gives up the interpreter's lock and asks for it again
            turns += 1
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        await until(done.is_set, within=20)
    finally:
        thread.join()
    assert turns == 500


async def test_what_never_becomes_true_times_out() -> None:
    with pytest.raises(TimeoutError):
        await until(lambda: False, within=0.01)
