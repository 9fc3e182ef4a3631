"""A lease for the tests of the cache, and the types of its fixtures."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from aengine.cache.manager import TaskCacheManager
from aengine.errors import StaleLeaseError
from statemachines.policy import Operation, PolicyState, permits

NewCache = Callable[..., TaskCacheManager]
RunTask = Callable[..., int]


@define
class Lease:
    """A `StableLease` whose state the test sets, None once it has ended; the permissions are the real ones."""

    state: PolicyState | None = PolicyState.SERVING
    epoch: int = 0

    def check(self, operation: Operation) -> None:
        if self.state is None or not permits(self.state, operation):
            raise StaleLeaseError(f"{operation.value!r} is not permitted: {self.state}")

    def bump_epoch(self) -> int:
        self.epoch += 1
        return self.epoch


def counts(cache: TaskCacheManager) -> tuple[int, int, int]:
    """Live, cached and free pages."""
    pages = cache.stats().pages
    return pages.live, pages.cached, pages.free
