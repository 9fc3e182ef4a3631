"""What one step computes: chunks of tokens, and the page copies that go before them. No torch, no event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from attrs import Factory, define, frozen

from aengine.errors import EngineError
from aengine.request import Request, Sample

if TYPE_CHECKING:
    from aengine.cache.state import TaskCacheState

__all__ = ["Chunk", "StepPlan"]

T = TypeVar("T")


@frozen(eq=False)
class Chunk:
    """Compute KV for tokens `start` to `start + count` of a sample.

    Where that reaches the sample's last token, the logits there are drawn from once for each sample in `draws`: the
    sample itself, and those forked from it that have no token yet.
    """

    sample: Sample
    cache: TaskCacheState
    start: int
    count: int
    draws: tuple[Sample, ...]


@define(eq=False)
class StepPlan:
    chunks: list[Chunk] = Factory(list)
    copies: list[tuple[int, int]] = Factory(list)
    """Pages to copy before anything is written: (from, to)."""
    num_tokens: int = 0
    failures: list[tuple[Request, Exception]] = Factory(list)
    """Requests that cannot go on, as something broke while pages were taken for them; they are to be ended."""

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.num_tokens += chunk.count

    def take(self, request: Request, pages: Callable[[], T]) -> T | None:
        """What `pages` returns. If it breaks, that is the failure of `request` alone, and None is returned. Errors of
        ours pass: a full pool is no failure, and wrong accounting is everybody's."""
        try:
            return pages()
        except EngineError:
            raise
        except Exception as error:
            self.failures.append((request, error))
            return None
