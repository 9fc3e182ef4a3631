"""`BlockingEngine`: the engine for trainers and scripts that are not asynchronous.

The event loop runs in a thread of its own (anyio's blocking portal), and every call is handed to it. The methods are
made from those of `Engine`, so that signatures and docstrings cannot drift apart.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import anyio.lowlevel
from anyio.from_thread import BlockingPortal, start_blocking_portal
from torch import nn

from aengine.blocking_calls import BlockingIterator, BlockingStream, Body, Call, refuse_in_loop
from aengine.config import EngineConfig
from aengine.engine import Engine
from aengine.errors import EngineClosedError, InsideWeightUpdateError
from aengine.loops import call_soon
from aengine.model.checkpoint import Checkpoint
from aengine.model.tokenizer import Tokenizer
from aengine.policy.in_place import InPlaceUpdate
from aengine.policy.version import PolicyVersion
from aengine.stream import RequestStream
from statemachines.policy import PolicyState

__all__ = ["BlockingEngine"]

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(method: Callable[Concatenate[Engine, P], Awaitable[T]]) -> Callable[Concatenate[BlockingEngine, P], T]:
    """A method of `Engine` as one that returns what awaiting it returns."""

    @functools.wraps(method)
    def call(self: BlockingEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.call(functools.partial(method, self.engine, *args, **kwargs))

    return call


def _called(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[BlockingEngine, P], T]:
    """A method of `Engine` that does not wait, called in the engine's loop."""

    @functools.wraps(method)
    def call(self: BlockingEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.call(functools.partial(method, self.engine, *args, **kwargs))

    return call


def _iterated(
    method: Callable[Concatenate[Engine, P], AsyncIterator[T]],
) -> Callable[Concatenate[BlockingEngine, P], BlockingIterator[T]]:
    @functools.wraps(method)
    def call(self: BlockingEngine, /, *args: P.args, **kwargs: P.kwargs) -> BlockingIterator[T]:
        return BlockingIterator(self, self.call(functools.partial(method, self.engine, *args, **kwargs)))

    call.__doc__ = _without_async(method)
    return call


def _streamed(
    method: Callable[Concatenate[Engine, P], RequestStream],
) -> Callable[Concatenate[BlockingEngine, P], BlockingStream]:
    @functools.wraps(method)
    def call(self: BlockingEngine, /, *args: P.args, **kwargs: P.kwargs) -> BlockingStream:
        return BlockingStream(self, self.call(functools.partial(method, self.engine, *args, **kwargs)))

    call.__doc__ = _without_async(method)
    return call


def _entered(
    method: Callable[Concatenate[Engine, P], InPlaceUpdate],
) -> Callable[Concatenate[BlockingEngine, P], AbstractContextManager[InPlaceUpdate]]:
    @functools.wraps(method)
    def call(self: BlockingEngine, /, *args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[InPlaceUpdate]:
        return self.inside(self.call(functools.partial(method, self.engine, *args, **kwargs)))

    call.__doc__ = _without_async(method)
    return call


def _without_async(method: Callable[..., Any]) -> str:
    return (method.__doc__ or "").replace("async with", "with").replace("async for", "for")


class BlockingEngine:
    """`Engine` with calls that block: `with BlockingEngine.from_pretrained("smollm2-135m") as engine`.

    Any number of threads may call it at once; callbacks such as `on_finished` are called in the engine's own. An
    interrupt (Ctrl-C) while a call waits aborts its request, or withdraws its update, and comes out of the call. In a
    thread that runs an event loop, as in a notebook, every use raises `EventLoopRunningError`, which names the call to
    await instead.
    """

    def __init__(
        self, model: Checkpoint | nn.Module, config: EngineConfig | None = None, *, share: bool = False
    ) -> None:
        refuse_in_loop("BlockingEngine(...)", "async with Engine(...)")
        self.engine = Engine(model, config, share=share)
        """The engine behind; it may be used in its own event loop only."""
        self._portal: BlockingPortal | None = None
        self._token: anyio.lowlevel.EventLoopToken | None = None
        self._stack = ExitStack()
        self._inside_updates: set[int] = set()

    @classmethod
    def from_pretrained(cls, source: str | Path, config: EngineConfig | None = None) -> BlockingEngine:
        """As `Engine.from_pretrained`."""
        refuse_in_loop("BlockingEngine.from_pretrained", "async with Engine.from_pretrained(...)")
        return cls(Engine.read_pretrained(source), config)

    # ---- life cycle

    def __enter__(self) -> BlockingEngine:
        refuse_in_loop("BlockingEngine", "async with Engine(...)")
        with ExitStack() as stack:
            # A program that forgets to close must not end while the engine's threads compute.
            atexit.register(self.close)
            stack.callback(atexit.unregister, self.close)
            portal = stack.enter_context(start_blocking_portal(name="aengine loop"))
            stack.callback(self._forget_portal)
            stack.enter_context(portal.wrap_async_context_manager(self.engine))
            self._token = portal.call(anyio.lowlevel.current_token)
            self._portal, self._stack = portal, stack.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(exc_type, exc, traceback)

    def close(self) -> None:
        """Leave: requests of other threads end with reason `"abort"`. Idempotent."""
        self._stack.close()

    @property
    def is_open(self) -> bool:
        return self._portal is not None

    def _forget_portal(self) -> None:
        self._portal = None

    @overload
    def call(self, function: Callable[[], Awaitable[T]]) -> T: ...

    @overload
    def call(self, function: Callable[[], T]) -> T: ...

    def call(self, function: Callable[[], Any]) -> Any:
        """Call `function` in the engine's event loop, and await what it returns if it can be awaited.

        Whatever interrupts the waiting cancels the call.
        """
        call = Call(function)
        refuse_in_loop(f"BlockingEngine.{call.name}", f"await Engine.{call.name}(...)")
        if threading.get_ident() in self._inside_updates:
            raise InsideWeightUpdateError("the engine cannot be used inside a weight_update() body; leave it first")
        if self._portal is None or self._token is None:
            raise EngineClosedError("the engine is not open; use it inside `with`")
        try:
            return self._portal.call(call.run)
        except Exception:
            raise
        except BaseException:
            call_soon(self._token, call.cancel)
            raise

    @contextmanager
    def inside(self, update: InPlaceUpdate) -> Iterator[InPlaceUpdate]:
        """The body of `weight_update` runs in the calling thread, which must not call the engine meanwhile."""
        assert self._portal is not None
        body, thread = Body(update), threading.get_ident()
        body.enter(self._portal)
        self._inside_updates.add(thread)
        try:
            yield update
        except BaseException as error:
            body.error = error
            raise
        finally:
            self._inside_updates.discard(thread)
            body.leave(self._portal)

    # ---- the API of `Engine`

    generate = _awaited(Engine.generate)
    generate_batch = _awaited(Engine.generate_batch)
    as_completed = _iterated(Engine.as_completed)
    stream = _streamed(Engine.stream)
    resume = _awaited(Engine.resume)
    score = _awaited(Engine.score)
    abort = _awaited(Engine.abort)

    update_weights = _awaited(Engine.update_weights)
    weight_update = _entered(Engine.weight_update)
    weight_checksum = _awaited(Engine.weight_checksum)
    save_snapshot = _awaited(Engine.save_snapshot)
    replay = _awaited(Engine.replay)
    pause_generation = _awaited(Engine.pause_generation)
    resume_generation = _awaited(Engine.resume_generation)
    is_paused = _called(Engine.is_paused)
    reset_prefix_cache = _awaited(Engine.reset_prefix_cache)

    stats = _called(Engine.stats)
    check_health = _awaited(Engine.check_health)
    events = _iterated(Engine.events)

    @property
    def policy_version(self) -> int | None:
        """As `Engine.policy_version`."""
        return self.call(lambda: self.engine.policy_version)

    @property
    def installed_policy(self) -> PolicyVersion:
        """As `Engine.installed_policy`."""
        return self.call(lambda: self.engine.installed_policy)

    @property
    def state(self) -> PolicyState:
        """As `Engine.state`."""
        return self.call(lambda: self.engine.state)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer
