"""The progress bar of `aengine rollout`."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["RolloutProgress"]


class RolloutProgress:
    """Samples done, tokens a second and cached prompt tokens; nothing where the console is no terminal."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (
            TextColumn("samples"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s, {task.fields[cached]} cached"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("samples", total=total, rate=0.0, cached=0)

    def __enter__(self) -> RolloutProgress:
        self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, samples: int, tokens: int, cached: int) -> None:
        elapsed = self._bar.tasks[self._task].elapsed or 0.0
        self._bar.update(self._task, completed=samples, rate=tokens / elapsed if elapsed else 0.0, cached=cached)
