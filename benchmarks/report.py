"""What every benchmark does with its figures: a table on the terminal, and a JSON list where one is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

__all__ = ["Figure", "at_least", "at_most", "plain", "report"]


@frozen
class Figure:
    """One measured number; `goal` None where there is none to reach."""

    name: str
    value: float
    unit: str
    goal: float | None
    holds: bool | None

    def as_row(self) -> dict[str, object]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "goal": self.goal, "holds": self.holds}


def plain(name: str, value: float, unit: str) -> Figure:
    return Figure(name, value, unit, None, None)


def at_least(name: str, value: float, unit: str, goal: float) -> Figure:
    return Figure(name, value, unit, goal, value >= goal)


def at_most(name: str, value: float, unit: str, goal: float) -> Figure:
    return Figure(name, value, unit, goal, value <= goal)


def report(figures: Sequence[Figure], json_file: Path | None) -> None:
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        verdict = "" if figure.holds is None else f"  goal {figure.goal:g}: {'holds' if figure.holds else 'MISSED'}"
        print(f"{figure.name:<{width}}  {figure.value:>12.4g} {figure.unit:<8}{verdict}")
    if json_file is not None:
        rows = [figure.as_row() for figure in figures]
        json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
