"""An update whose weights the caller writes: `async with engine.weight_update(): optimizer.step()`."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import anyio
from attrs import define, field

from aengine.policy.pending import PendingUpdate, UpdateBody, WeightUpdateAck

if TYPE_CHECKING:
    from aengine.policy.updater import WeightUpdater

__all__ = ["InPlaceUpdate"]


@define(eq=False)
class InPlaceUpdate:
    """The context manager that `Engine.weight_update` returns.

    Entering drains the engine and returns in Swapping, when nothing reads the weights. Leaving normally commits what
    the body wrote; `ack` is there afterwards. If the digest of the weights is what it was, as after a step that the
    optimizer skipped, the version stays and the acknowledgement names it. An exception in the body comes out as it is;
    it leaves the engine fenced, unless the digest is what it was.
    """

    _updater: WeightUpdater = field(repr=False)
    _update: PendingUpdate
    _body: UpdateBody = field(repr=False)
    _inside: set[int] = field(repr=False)
    """Ids of tasks inside such a body; the engine refuses their calls, which could never return."""

    @property
    def ack(self) -> WeightUpdateAck:
        """The acknowledgement, once the body has been left."""
        return self._update.outcome()

    async def __aenter__(self) -> InPlaceUpdate:
        self._updater.enqueue(self._update)
        try:
            while not (self._body.is_inside or self._update.is_settled):
                await self._update.changed.wait()
        except BaseException:
            self._updater.withdraw(self._update, "its caller was cancelled")
            raise
        if self._update.is_settled:
            self._update.outcome()
        self._inside.add(anyio.get_current_task().id)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside.discard(anyio.get_current_task().id)
        self._body.leave(exc)
        with anyio.CancelScope(shield=True):
            while not self._update.is_settled:
                await self._update.changed.wait()
        if exc is None:
            self._update.outcome()
