"""What a person sees while the demo runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Protocol

from attrs import define, field
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aengine.demo.report import DemoReport, StepReport
from aengine.stats import EngineStats

__all__ = ["DemoView", "LiveView", "PlainView", "new_view"]

BAR_WIDTH = 20
STATE_STYLES = {"Serving": "green", "Draining": "yellow", "Swapping": "red", "Invalidated": "magenta"}


class DemoView(Protocol):
    """Told of everything that happens, in order. `engine` is called often while a phase lasts."""

    def phase(self, what: str) -> None: ...

    def engine(self, stats: EngineStats, tokens_per_second: float) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def end(self, report: DemoReport) -> None: ...

    def __enter__(self) -> DemoView: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def new_view(console: Console) -> DemoView:
    return LiveView(console) if console.is_terminal else PlainView(console)


@define(eq=False)
class PlainView:
    console: Console

    def phase(self, what: str) -> None:
        pass

    def engine(self, stats: EngineStats, tokens_per_second: float) -> None:
        pass

    def step(self, report: StepReport) -> None:
        line = (
            f"step {report.step}: reward {report.reward:.2f}, policy {report.policy_version}, "
            f"{report.tokens} tokens at {report.tokens_per_second:.0f}/s, {report.cached_tokens} cached, "
            f"{report.verified.samples} samples verified to {report.verified.largest_difference:.1e}, "
            f"{report.seconds:.0f} s"
        )
        self.console.print(line, markup=False)

    def end(self, report: DemoReport) -> None:
        for line in report.lines():
            self.console.print(line, markup=False)

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


@define(eq=False)
class LiveView:
    """Drawn anew on every call and never from a thread of its own, so that leaving it leaves the terminal clean."""

    console: Console
    _what: str = ""
    _status: Text = field(factory=Text)
    _steps: list[StepReport] = field(factory=list)
    _live: Live = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._live = Live(console=self.console, auto_refresh=False)

    def phase(self, what: str) -> None:
        self._what = what
        self._draw()

    def engine(self, stats: EngineStats, tokens_per_second: float) -> None:
        self._status = Text.assemble(
            (stats.state, STATE_STYLES.get(stats.state, "")),
            f" · policy {stats.policy_version} · {stats.num_running} running, {stats.num_waiting} waiting"
            f" · {tokens_per_second:.0f} tokens/s · {stats.prefix.hit_tokens} prompt tokens from the cache",
        )
        self._draw()

    def step(self, report: StepReport) -> None:
        self._steps.append(report)
        self._draw()

    def end(self, report: DemoReport) -> None:
        self._live.stop()
        for line in report.lines():
            self.console.print(Text(line))

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def _draw(self) -> None:
        self._live.update(Group(_table(self._steps), Text(self._what, style="bold"), self._status), refresh=True)


def _table(steps: list[StepReport]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "policy", "reward", "", "tokens/s", "cached", "verified", "seconds", "an answer"):
        numeric = name in {"step", "policy", "tokens/s", "cached", "seconds"}
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True, overflow="ellipsis")
    for report in steps:
        table.add_row(
            str(report.step),
            str(report.policy_version),
            f"{report.reward:.2f}",
            Text("█" * math.ceil(BAR_WIDTH * report.reward), style="cyan"),
            f"{report.tokens_per_second:.0f}",
            str(report.cached_tokens),
            f"{report.verified.samples} to {report.verified.largest_difference:.0e}",
            f"{report.seconds:.0f}",
            Text(" ".join(report.example.split())),
        )
    return table
