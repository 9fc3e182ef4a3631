"""Opening and closing an engine, and who may call it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel
from torch import nn

from aengine.assembly import Assembly, assemble
from aengine.config import EngineConfig
from aengine.errors import EngineClosedError, InsideWeightUpdateError
from aengine.model.checkpoint import Checkpoint, checkpoint_from_module
from aengine.supervision import supervise

__all__ = ["Lifecycle"]


class Lifecycle:
    """Owner of the engine's parts and of the tasks that run them."""

    def __init__(
        self, model: Checkpoint | nn.Module, config: EngineConfig | None = None, *, share: bool = False
    ) -> None:
        if share and isinstance(model, Checkpoint):
            raise TypeError("share=True needs the module whose parameters are shared, not a checkpoint")
        self._share = share
        self._inside_updates: set[int] = set()
        self._checkpoint = model if isinstance(model, Checkpoint) else checkpoint_from_module(model)
        self._config = config if config is not None else EngineConfig()
        self._parts: Assembly | None = None
        self._token: anyio.lowlevel.EventLoopToken | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._loops: anyio.CancelScope | None = None
        self._stopped: anyio.Event | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        if self._is_closed or self._parts is not None:
            raise EngineClosedError("an engine is opened once; make a new one")
        self._token = anyio.lowlevel.current_token()
        # A cancellation around the block reaches its callers; the loops serve what they shield until `aclose`.
        self._stopped, self._loops = anyio.Event(), anyio.CancelScope(shield=True)
        self._parts = await assemble(self._checkpoint, self._config, share=self._share)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run_loops, self._parts)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._parts is not None
        assert self._tasks is not None
        try:
            await self.aclose()
        finally:
            try:
                # The loops have ended; the body's own exception is not the group's business and comes out as it is.
                await self._tasks.__aexit__(None, None, None)
            finally:
                self._parts.close()

    async def aclose(self) -> None:
        """Stop: running and waiting requests end with reason `"abort"`, updates not yet flipped are withdrawn.

        Idempotent. Returns when the loops have ended, also when it is cancelled.
        """
        if self._parts is None or self._stopped is None or self._loops is None:
            self._is_closed = True
            return
        if not self._is_closed:
            self._is_closed = True
            self._parts.scheduler.abort_all()
            self._parts.updater.withdraw_all(EngineClosedError("the engine was closed"))
            self._parts.gate.stop(EngineClosedError("the engine was closed"))
            self._loops.cancel()
        with anyio.CancelScope(shield=True):
            await self._stopped.wait()

    async def _run_loops(self, parts: Assembly) -> None:
        assert self._stopped is not None
        assert self._loops is not None
        try:
            with self._loops:
                async with anyio.create_task_group() as loops:
                    loops.start_soon(supervise, parts, "scheduler", parts.scheduler.run)
                    loops.start_soon(supervise, parts, "updater", parts.updater.run)
                    loops.start_soon(supervise, parts, "auditor", parts.auditor.run)
        finally:
            parts.auditor.close()
            parts.journal.events.close()
            self._stopped.set()

    def _opened(self) -> Assembly:
        if self._parts is None:
            raise EngineClosedError("the engine is not open; open it with `async with`")
        return self._parts

    def _usable(self) -> Assembly:
        """The parts, for work in the loop that opened them."""
        parts = self._opened()
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        if anyio.lowlevel.current_token() != self._token:
            raise EngineClosedError("the engine was opened in another event loop; use it there, or open one here")
        parts.scheduler.refuse_if_dead()
        if self._inside_updates and anyio.get_current_task().id in self._inside_updates:
            raise InsideWeightUpdateError("the engine cannot be used inside a weight_update() body; leave it first")
        return parts
