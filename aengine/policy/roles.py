"""What an update needs of the others: whoever holds weights, and whoever runs requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from attrs import Factory, frozen
from torch import Tensor

from aengine.errors import EngineInvalidatedError

__all__ = ["DrainTarget", "KVOnUpdate", "StagedWeights", "UpdateMode", "WeightHolder", "WeightWriter"]

UpdateMode = Literal["wait", "abort", "keep"]
KVOnUpdate = Literal["recompute", "keep"]


@frozen(eq=False)
class StagedWeights:
    """A full set of weights, copied and packed, and the digest of the copy."""

    weights: Any
    digest: str
    parts: Mapping[str, bytes] = Factory(dict)
    """The digest of each tensor, so that one that does not change need not be hashed again; may be empty."""
    casts: Mapping[str, int] = Factory(dict)
    """How many tensors were converted to the engine's type, by the type they came in."""


class WeightHolder(Protocol):
    """Whatever holds the model's weights."""

    def stage(self, tensors: Mapping[str, Tensor], *, check_finite: bool) -> StagedWeights:
        """Check `tensors` against the model, then copy and pack them beside what is installed, which is not touched.
        Runs off the event loop while steps go on."""

    def flip(self, staged: StagedWeights) -> StagedWeights:
        """Use `staged` from now on and return what was in use: one assignment, which happens or raises."""

    def check(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Names, shapes and types, without copying anything."""

    def digest(self) -> str:
        """Of the weights as they lie in memory now; runs in the worker thread."""

    def accept(self) -> str:
        """Take note of weights that their owner has written in place; returns their digest."""

    def open_writer(self) -> WeightWriter:
        """Write over the installed weights; from the first write until `finish` they are torn."""


class WeightWriter(Protocol):
    """Runs in the worker thread, in Swapping."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Raises `WeightsMismatchError` for a tensor the model does not have or that does not fit."""

    def finish(self, *, check_finite: bool) -> str:
        """Pack what was written and return its digest. Raises `WeightsMismatchError` naming what never came."""


class DrainTarget(Protocol):
    """Whatever runs requests."""

    def is_drained(self) -> bool:
        """Whether no request holds tokens of the installed version any more."""

    def num_started(self) -> int:
        """How many requests hold tokens of the installed version."""

    def abort_started(self) -> None:
        """End those requests with what they have."""

    def carry_over(self, kv: KVOnUpdate) -> None:
        """Those requests go on under the version just committed, with their KV computed again or kept."""

    def fence(self, error: EngineInvalidatedError) -> None:
        """End all requests with `error`; they hold no pages any more."""
