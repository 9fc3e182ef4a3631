"""An update on its way, as its caller and the updater see it."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping

import anyio
from attrs import Factory, define, field, frozen
from torch import Tensor

from aengine.policy.roles import KVOnUpdate, StagedWeights, UpdateMode
from aengine.signal import Signal

__all__ = ["PendingUpdate", "Tensors", "UpdateBody", "WeightUpdateAck"]

Tensors = Mapping[str, Tensor] | AsyncIterable[tuple[str, Tensor]]


@frozen
class WeightUpdateAck:
    """A committed update: the version is installed, acknowledged by every holder, and no older KV can be matched."""

    policy_version: int
    previous: int
    digest: str
    train_step: int | None
    mode: UpdateMode
    casts: Mapping[str, int]
    """How many tensors were converted to the engine's type, by the type they came in."""
    pages_invalidated: int
    """Entries the prefix index held when the update was committed."""
    requests_affected: int
    """Requests that held tokens of the previous version when the drain began."""
    seconds: float
    """From the update's turn to its commit, staging and drain included."""


@define(eq=False)
class UpdateBody:
    """The part of an update that its caller runs: the updater lets it in, in Swapping, and waits until it has left."""

    train_step: Callable[[], int | None]
    """Read when the body has left, so that it counts the step taken in it."""
    changed: Signal = Factory(Signal)
    is_inside: bool = False
    has_left: bool = False
    error: BaseException | None = None

    def let_in(self) -> None:
        self.is_inside = True
        self.changed.set()

    def leave(self, error: BaseException | None) -> None:
        self.is_inside, self.has_left, self.error = False, True, error
        self.changed.set()

    async def left(self) -> None:
        while not self.has_left:
            await self.changed.wait()


@define(eq=False)
class PendingUpdate:
    """Fields up to `check_finite` are those of `Engine.update_weights`."""

    tensors: Tensors = field(repr=False)
    version: int | None = None
    expected_version: int | None = None
    train_step: int | None = None
    mode: UpdateMode = "wait"
    kv: KVOnUpdate = "recompute"
    in_place: bool = False
    check_finite: bool = True
    body: UpdateBody | None = None
    """The caller writes the weights itself; then there are no `tensors`."""
    changed: Signal = Factory(Signal)
    """Set when it has settled, and when its body enters or leaves."""
    ordinal: int = 0
    number: int | None = None
    """The version it installs, once its turn has come."""
    stage: str = "stage"
    withdrawn: str | None = None
    """Why it was withdrawn, if it was."""
    withdrawn_by: BaseException | None = None
    """What its caller is to get if it was withdrawn for the engine's sake and does not commit all the same."""
    commit_line: int = 0
    """Line of its commit record in the ledger."""
    late_cancellation: BaseException | None = None
    """A cancellation of the updater's task that came too late to stop this update; raised when it has settled."""
    ack: WeightUpdateAck | None = None
    error: BaseException | None = None
    replaced: list[StagedWeights] = Factory(list)
    """The weights it took the place of, if they still exist."""
    is_written: bool = False
    """Whether the installed weights may have been written over."""
    scope: anyio.CancelScope = Factory(anyio.CancelScope)

    @classmethod
    def in_body(cls, train_step: Callable[[], int | None], mode: UpdateMode, kv: KVOnUpdate) -> PendingUpdate:
        """An update whose weights its caller writes."""
        body = UpdateBody(train_step)
        return cls({}, mode=mode, kv=kv, in_place=True, body=body, changed=body.changed)

    @property
    def name(self) -> str:
        return f"update {self.ordinal}"

    @property
    def is_settled(self) -> bool:
        return self.ack is not None or self.error is not None

    def settle(self, ack: WeightUpdateAck | None = None, error: BaseException | None = None) -> None:
        """The first outcome counts."""
        if not self.is_settled:
            self.ack, self.error = ack, error
            self.changed.set()

    def outcome(self) -> WeightUpdateAck:
        if self.error is not None:
            raise self.error
        assert self.ack is not None
        return self.ack
