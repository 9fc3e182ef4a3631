"""`aengine models`: known small models, and fetching them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.table import Table

from aengine.cli.report import DebugOption, JsonOption, errors_in_one_sentence, new_console
from aengine.model.known import KNOWN_MODELS, find_model, get_model

__all__ = ["app", "fetch_model"]

MEGABYTE = 1_000_000

app = typer.Typer(help="Known small models.", no_args_is_help=True)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="Name of a known model, as in `aengine models list`.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Fetch a known model into the user's cache and print where it lies."""
    with errors_in_one_sentence(debug):
        path = fetch_model(name, new_console())
        typer.echo(json.dumps({"name": name, "path": str(path)}) if as_json else path)


@app.command("list")
def list_models(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the known models and where those that were fetched lie."""
    with errors_in_one_sentence(debug):
        rows = [(model, find_model(name)) for name, model in KNOWN_MODELS.items()]
        if as_json:
            facts = [
                {"name": m.name, "bytes": m.size, "license": m.licence, "path": None if path is None else str(path)}
                for m, path in rows
            ]
            typer.echo(json.dumps(facts))
            return
        table = Table("name", "size", "license", "path", box=None)
        for model, path in rows:
            where = "not fetched" if path is None else str(path)
            table.add_row(model.name, f"{model.size / MEGABYTE:.0f} MB", model.licence, where)
        Console(soft_wrap=True).print(table)


def fetch_model(name: str, console: Console) -> Path:
    """`get_model` with a progress bar. Raises `ModelUnavailableError`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        stages: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(f"{name}: {stage}", total=total)
            bar.update(stages[stage], completed=done, total=total)

        return get_model(name, progress=show)
