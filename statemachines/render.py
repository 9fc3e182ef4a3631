"""Mermaid diagrams and Markdown tables, made from the same data the engine runs on."""

from __future__ import annotations

from collections.abc import Iterable

from statemachines.policy import INITIAL, PERMISSIONS, TRANSITIONS, PolicyState
from statemachines.request import REQUEST_INITIAL, REQUEST_TRANSITIONS

__all__ = ["permission_table", "policy_diagram", "report", "request_diagram", "transition_table"]


def _diagram(initial: str, edges: Iterable[tuple[str, str, str]], finals: Iterable[str] = ()) -> str:
    lines = ["stateDiagram-v2", "    direction LR", f"    [*] --> {initial}"]
    lines += [f"    {source} --> {dest}: {label}" for source, dest, label in edges]
    lines += [f"    {state} --> [*]" for state in finals]
    return "\n".join(lines)


def policy_diagram() -> str:
    """The policy machine as Mermaid source; guards stand in brackets."""
    edges = (
        (row.source.value, row.dest.value, row.trigger.value + (f" [{row.guard.value}]" if row.guard else ""))
        for row in TRANSITIONS
    )
    return _diagram(INITIAL.value, edges)


def request_diagram() -> str:
    """The request machine as Mermaid source."""
    edges = ((row.source.value, row.dest.value, row.trigger.value) for row in REQUEST_TRANSITIONS)
    return _diagram(REQUEST_INITIAL.value, edges, ["finished"])


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [list(header)]
    cells += [["---"] * len(cells[0])] + [list(row) for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def transition_table() -> str:
    """Every transition of the policy machine, with its guard and meaning."""
    rows = (
        (
            row.source.value,
            f"`{row.trigger.value}`",
            row.dest.value,
            f"`{row.guard.value}`" if row.guard else "",
            row.meaning,
        )
        for row in TRANSITIONS
    )
    return _table(("from", "trigger", "to", "guard", "meaning"), rows)


def permission_table() -> str:
    """What may run in which state."""
    rows = (
        (operation.value, *("yes" if state in allowed else "no" for state in PolicyState))
        for operation, allowed in PERMISSIONS.items()
    )
    return _table(("operation", *(state.value for state in PolicyState)), rows)


def report() -> str:
    """Both diagrams and both tables as one Markdown text."""
    parts = (
        "# State machines",
        "## Policy",
        f"```mermaid\n{policy_diagram()}\n```",
        transition_table(),
        "## What may run where",
        permission_table(),
        "## Request",
        f"```mermaid\n{request_diagram()}\n```",
    )
    return "\n\n".join(parts)
