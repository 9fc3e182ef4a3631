"""The `aengine` command. Each subcommand has a file of its own."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from aengine.cli import audit, demo, diagram, export, ledger, models, rollout

__all__ = ["app", "main"]

app = typer.Typer(
    help="Rollouts for reinforcement learning that know which policy made every token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(models.app, name="models")
app.add_typer(ledger.app, name="ledger")
app.command(name="rollout")(rollout.rollout)
app.command(name="audit")(audit.audit)
app.command(name="export")(export.export)
app.command(name="demo")(demo.demo)
app.command(name="diagram")(diagram.diagram)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("aengine-rollout"))
        raise typer.Exit


@app.callback()
def _options(
    wanted: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Exit status 0, 1 for an error said in one sentence, 2 for wrong usage, 130 for Ctrl-C; `audit` has more."""
    app()
