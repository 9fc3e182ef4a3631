"""Faults on demand: at chosen counts, or by seed, what an engine does fails or takes its time."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal

import anyio.to_thread
from attrs import Factory, define, field
from torch import Tensor

if TYPE_CHECKING:
    from aengine.engine import Engine

__all__ = ["FaultInjector", "FaultPoint"]

FaultPoint = Literal["forward", "allocation", "weight", "ledger write", "ledger sync"]
"""Where a fault can strike:

* `"forward"`: a forward pass, in the engine's worker thread;
* `"allocation"`: pages are taken, for a request that is admitted or for its next token;
* `"weight"`: one tensor is read from a source made with `FaultInjector.weights`;
* `"ledger write"`, `"ledger sync"`: bytes are handed to the ledger's file, or it is brought to the disk.
"""

Hook = Callable[[int], object]
"""Called with how often the point was reached, from 1; what it raises, the engine meets there."""

DEFAULT_ERRORS: Mapping[FaultPoint, type[Exception]] = {
    "forward": RuntimeError,
    "allocation": MemoryError,
    "weight": OSError,
    "ledger write": OSError,
    "ledger sync": OSError,
}


@define(eq=False)
class FaultInjector:
    """Counts what an engine does, and breaks or delays it where told to.

        faults = FaultInjector(seed=7)
        faults.attach(engine)
        faults.fail("forward", at=3)
        faults.fail_some("allocation", share=0.05)
        await engine.update_weights(faults.weights(state_dict))

    Faults of one point strike in the order in which they were asked for; the first that raises ends it. What is asked
    for by count strikes once, by share for good, until `clear`. The same seed fails the same counts.
    """

    seed: int = 0
    counts: Counter[FaultPoint] = Factory(Counter)
    """How often each point has been reached."""
    _hooks: defaultdict[FaultPoint, list[Hook]] = field(factory=lambda: defaultdict(list), repr=False)

    def attach(self, engine: Engine) -> None:
        """Watch an open engine from now on, for as long as it lives. Weights are watched by `weights` instead."""
        parts = engine._opened()
        self._wrap("forward", parts.runner.decoder, "forward")
        self._wrap("allocation", parts.cache, "alloc")
        self._wrap("allocation", parts.cache, "extend")
        if parts.journal.ledger is not None:
            self._wrap("ledger write", parts.journal.ledger._file, "write")
            self._wrap("ledger sync", parts.journal.ledger._file, "sync")

    def weights(self, tensors: Mapping[str, Tensor]) -> AsyncIterator[tuple[str, Tensor]]:
        """A source for `Engine.update_weights` that reaches the point `"weight"` before each tensor."""
        return _WatchedTensors(iter(tensors.items()), partial(self.strike, "weight"))

    def fail(self, point: FaultPoint, *, at: int | Iterable[int], error: Exception | None = None) -> None:
        """Raise `error` at these counts."""
        counts = {at} if isinstance(at, int) else set(at)
        self.call(point, lambda count: self._fail(point, error) if count in counts else None)

    def fail_some(self, point: FaultPoint, *, share: float, error: Exception | None = None) -> None:
        """Raise `error` at this share of all counts; which ones, the seed decides."""

        def hook(count: int) -> None:
            if random.Random(f"{self.seed} {point} {count}").random() < share:
                self._fail(point, error)

        self.call(point, hook)

    def delay(self, point: FaultPoint, *, at: int | Iterable[int], seconds: float) -> None:
        """Sleep at these counts, in whatever thread the point is reached in: `"allocation"` stops the event loop."""
        counts = {at} if isinstance(at, int) else set(at)
        self.call(point, lambda count: time.sleep(seconds) if count in counts else None)

    def hold(self, point: FaultPoint, *, at: int, within: float = 60.0) -> Hold:
        """Stop there until the hold is released; for points in threads of their own, so not for `"allocation"`.

        A hold that is not released `within` that many seconds raises `TimeoutError` where it stands, so that a test
        which failed before its `release` ends with its own error."""
        hold = Hold(f"{point} {at}", within)
        self.call(point, lambda count: hold.stop() if count == at else None)
        return hold

    def call(self, point: FaultPoint, hook: Hook) -> None:
        """Call `hook` with the count whenever the point is reached, where it is reached."""
        self._hooks[point].append(hook)

    def clear(self) -> None:
        """No more faults; counting goes on."""
        self._hooks.clear()

    def strike(self, point: FaultPoint) -> None:
        """The point is reached: for code that is to be watched like the engine's own."""
        self.counts[point] += 1
        for hook in tuple(self._hooks[point]):
            hook(self.counts[point])

    def _fail(self, point: FaultPoint, error: Exception | None) -> None:
        raise error if error is not None else DEFAULT_ERRORS[point](f"injected fault: {point} {self.counts[point]}")

    def _wrap(self, point: FaultPoint, owner: object, name: str) -> None:
        method = getattr(owner, name)

        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.strike(point)
            return method(*args, **kwargs)

        setattr(owner, name, watched)


@define(eq=False)
class Hold:
    """`reached` is set when the engine has come to the point, which it leaves on `release`."""

    name: str
    within: float
    reached: threading.Event = Factory(threading.Event)
    _released: threading.Event = Factory(threading.Event)

    def stop(self) -> None:
        self.reached.set()
        if not self._released.wait(self.within):
            raise TimeoutError(f"the hold at {self.name} was not released within {self.within:g} s")

    def release(self) -> None:
        self._released.set()


@define(eq=False)
class _WatchedTensors(AsyncIterator[tuple[str, Tensor]]):
    _items: Iterator[tuple[str, Tensor]]
    _strike: Callable[[], None]

    async def __anext__(self) -> tuple[str, Tensor]:
        for name, tensor in self._items:
            await anyio.to_thread.run_sync(self._strike)  # a hook may block
            return name, tensor
        raise StopAsyncIteration
