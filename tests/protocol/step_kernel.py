"""A scheduler of coroutines that takes one step at a time, whichever it is told to, and an explorer of all orders.

It stands in for the event loop: `Event`, `CancelScope` and `Job` have the meaning of their anyio counterparts, with
one difference: any task that can go on may be the next one to do so, which allows every order that asyncio or trio can
produce and more.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Hashable
from types import TracebackType
from typing import Any, Protocol

from attrs import Factory, define

__all__ = ["CancelScope", "Cancelled", "Event", "Job", "Kernel", "Task", "Walk", "explore"]


class Cancelled(BaseException):
    """What a cancelled scope throws into a task that waits inside it."""


class Wait(Protocol):
    """Something a task waits for."""

    cancellable: bool

    @property
    def is_over(self) -> bool: ...


@types.coroutine
def suspend(wait: Wait) -> Generator[Wait, None, None]:
    yield wait


@define(eq=False)
class Event:
    cancellable: bool = True
    is_over: bool = False

    def set(self) -> None:
        self.is_over = True

    async def wait(self) -> None:
        await suspend(self)


@define(eq=False)
class Job:
    """Something that happens elsewhere: a call in a thread, or a tensor that arrives. It ends when it is picked."""

    name: str
    call: Callable[[], Any]
    cancellable: bool = False
    is_over: bool = False
    result: Any = None
    error: BaseException | None = None

    def finish(self) -> None:
        try:
            self.result = self.call()
        except Exception as error:
            self.error = error
        self.is_over = True


@define(eq=False)
class Task:
    name: str
    coroutine: Coroutine[Any, Any, Any]
    wait: Wait | None = None
    scopes: list[CancelScope] = Factory(list)
    is_done: bool = False
    result: Any = None
    error: BaseException | None = None

    @property
    def is_cancelled(self) -> bool:
        return any(scope.cancel_called for scope in self.scopes)

    @property
    def can_go_on(self) -> bool:
        if self.is_done:
            return False
        return self.wait is None or self.wait.is_over or (self.wait.cancellable and self.is_cancelled)

    def place(self) -> tuple[Hashable, ...]:
        """Where it stands in its code."""
        place: list[Hashable] = [self.is_done, self.can_go_on, self.is_cancelled, type(self.error)]
        coroutine: Any = self.coroutine
        while isinstance(coroutine, types.CoroutineType) and coroutine.cr_frame is not None:
            place += [coroutine.cr_code.co_name, coroutine.cr_frame.f_lasti]
            coroutine = coroutine.cr_await
        return tuple(place)


@define(eq=False)
class Kernel:
    tasks: list[Task] = Factory(list)
    jobs: list[Job] = Factory(list)
    current: Task | None = None

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> Task:
        task = Task(name, coroutine)
        task.scopes.append(CancelScope(self))
        self.tasks.append(task)
        return task

    async def do(self, job: Job) -> Job:
        """Wait for a job, also through a cancellation unless the job allows it."""
        self.jobs.append(job)
        try:
            await suspend(job)
        finally:
            self.jobs.remove(job)
        return job

    def step(self, task: Task) -> None:
        """Let a task run to its next wait."""
        self.current = task
        is_interrupted = task.wait is not None and not task.wait.is_over
        try:
            task.wait = task.coroutine.throw(Cancelled()) if is_interrupted else task.coroutine.send(None)
        except StopIteration as end:
            task.is_done, task.result = True, end.value
        except BaseException as error:
            task.is_done, task.error = True, error
        finally:
            self.current = None

    def close(self) -> None:
        for task in self.tasks:
            task.coroutine.close()


@define(eq=False)
class CancelScope:
    kernel: Kernel
    cancel_called: bool = False
    _task: Task | None = None

    def cancel(self) -> None:
        self.cancel_called = True

    def __enter__(self) -> CancelScope:
        self._task = self.kernel.current
        assert self._task is not None
        self._task.scopes.append(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        assert self._task is not None
        self._task.scopes.remove(self)
        return isinstance(exc, Cancelled) and self.cancel_called and not self._task.is_cancelled


class World(Protocol):
    """Something to explore: built anew for each walk, and the same each time."""

    def actions(self) -> dict[str, Callable[[], None]]:
        """What may happen next, by a name that says the same thing in every walk."""

    def settle(self) -> None:
        """Called after each action: let happen what concerns nobody else."""

    def state(self) -> Hashable:
        """All that decides what may happen from here on."""

    def check(self) -> None:
        """Raise unless all is as it must be, in any state."""

    def check_end(self) -> None:
        """Raise unless all is as it must be when nothing more can happen."""

    def close(self) -> None: ...


@define
class Walk:
    """What was explored. `orders` counts the different orders of events from the start to an end; every state and
    every step between two states of theirs was visited, and states that were reached before were not walked again."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    orders: int = 0

    def __add__(self, other: Walk) -> Walk:
        return Walk(
            self.states + other.states,
            self.steps + other.steps,
            self.ends + other.ends,
            self.orders + other.orders,
        )


def explore(new_world: Callable[[], World]) -> Walk:
    """Walk through every state that any order of events leads to. A failed check names the events that led there."""
    walk, orders = Walk(), dict[Hashable, int]()

    def arrive(world: World, path: list[str]) -> int:
        """Explore from where `world` stands, which is used up; returns the number of orders from here to an end."""
        state = world.state()
        if state in orders:
            world.close()
            return orders[state]
        walk.states += 1
        names = list(world.actions())
        total = 0
        for at, name in enumerate(names):
            here = world if at == 0 else replay(path)
            here.actions()[name]()
            here.settle()
            here.check()
            walk.steps += 1
            path.append(name)
            total += arrive(here, path)
            path.pop()
        if not names:
            walk.ends += 1
            total = 1
            world.check_end()
            world.close()
        orders[state] = total
        return total

    def replay(path: list[str]) -> World:
        world = new_world()
        for name in path:
            world.actions()[name]()
            world.settle()
        return world

    path: list[str] = []
    try:
        walk.orders = arrive(new_world(), path)
    except BaseException as error:
        error.add_note("after: " + ", ".join(path))
        raise
    return walk
