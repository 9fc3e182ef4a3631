"""Given tokens whose log-probabilities are wanted: a prompt's own, or a response that is scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import Factory, define, field

from aengine.params import SamplingParams

if TYPE_CHECKING:
    from aengine.sampling.sampler import Drawn

__all__ = ["Targets"]


@define(eq=False)
class Targets:
    """The logits at position `first` + i of a sequence score `token_ids[i]`, which stands behind that position.

    All results are of one policy version: when that changes before they are complete, they begin anew.
    """

    params: SamplingParams
    first: int
    token_ids: Sequence[int] = field(repr=False)
    with_support: bool = False
    results: list[Drawn] = field(default=Factory(list), repr=False)
    version: int | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.token_ids)

    @property
    def next_position(self) -> int:
        """KV of positions before this may be found in the cache; the logits from here on are needed."""
        return self.first + len(self.results)

    def positions(self, end: int) -> range:
        """Positions before `end` whose logits are wanted still."""
        return range(self.next_position, min(end, self.first + len(self.token_ids)))

    def add(self, result: Drawn, version: int) -> None:
        assert self.version in (None, version), "a new version begins anew"
        self.version = version
        self.results.append(result)

    def restart_unless_complete(self) -> bool:
        """Forget results of a version that is about to end; whether that was needed."""
        if self.is_complete:
            return False
        self.results.clear()
        self.version = None
        return True
