"""`aengine demo`: a short training run on rollouts that are verified before they are used."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import anyio
import typer
from attrs import asdict

from aengine.audit.rollout_file import RolloutFile
from aengine.cli.loading import load_model
from aengine.cli.report import DebugOption, JsonOption, errors_in_one_sentence, new_console
from aengine.demo.run import DemoSettings, run_demo
from aengine.demo.view import new_view
from aengine.errors import EngineError, RolloutFileError

__all__ = ["demo"]


def demo(
    model: Annotated[str, typer.Option(help="A chat model with a tokenizer, small enough to train here.")] = (
        "smollm2-135m"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = DemoSettings().steps,
    out: Annotated[
        Path | None, typer.Option(help="New JSON Lines file for the rollouts. Default: runs/demo-<time>.jsonl.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all draws.")] = 0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Teach a small model to answer briefly by GRPO, and prove which policy made every sample."""
    with errors_in_one_sentence(debug):
        if find_spec("transformers") is None:
            raise EngineError("the demo trains a transformers model; install this package with its extra 'demo'")
        console = new_console()
        with RolloutFile(_new_path(out)) as file:
            checkpoint = load_model(model, console)
            with new_view(console) as view:
                settings = DemoSettings(steps=steps, seed=seed)
                report = anyio.run(partial(run_demo, checkpoint, settings, file, view))
        if as_json:
            typer.echo(json.dumps(asdict(report)))


def _new_path(out: Path | None) -> Path:
    """Raises `RolloutFileError` for a file that has something in it: a training run cannot be gone on with."""
    if out is None:
        folder = Path("runs")
        folder.mkdir(exist_ok=True)
        return folder / f"demo-{datetime.now().astimezone():%Y%m%d-%H%M%S}.jsonl"
    if out.exists() and out.stat().st_size:
        raise RolloutFileError(f"{out} has something in it; give the path of a new file")
    return out
