"""`aengine export`: the samples of a rollouts file as a Parquet file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aengine.audit.rollout_file import read_rollouts
from aengine.cli.report import DebugOption, JsonOption, errors_in_one_sentence, new_console
from aengine.errors import EngineError

__all__ = ["export"]


def export(
    rollouts: Annotated[Path, typer.Argument(metavar="ROLLOUTS", help="A rollouts file.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Parquet file to write; one that is there is replaced.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the samples of a rollouts file as Parquet, one row each; header and policies go into its metadata."""
    with errors_in_one_sentence(debug):
        try:
            from aengine.audit.arrow import write_parquet
        except ModuleNotFoundError as error:
            raise EngineError(f"{error.name} is not installed; `export` needs the extra `arrow`") from error
        count = write_parquet(read_rollouts(rollouts), out)
        if as_json:
            typer.echo(json.dumps({"samples": count, "out": str(out)}))
        else:
            new_console().print(f"{out}: {count} samples", markup=False)
