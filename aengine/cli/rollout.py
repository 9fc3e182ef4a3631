"""`aengine rollout`: samples of many prompts into a JSON Lines file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import anyio
import typer
from attrs import asdict

from aengine.cli.report import DebugOption, JsonOption, errors_in_one_sentence, new_console
from aengine.cli.rollout_run import RolloutJob, run_rollout
from aengine.errors import EngineError, SamplingParamsError
from aengine.params import SamplingParams

__all__ = ["rollout"]


def rollout(
    model: Annotated[str, typer.Option(help="A checkpoint directory, a GGUF file, a known model or a Hub id.")],
    prompts: Annotated[
        Path,
        typer.Option(help='One JSON object a line: "prompt", "prompt_token_ids" or "messages", and if you like "id".'),
    ],
    out: Annotated[Path, typer.Option(help="JSON Lines file to write; what is in it already is not made again.")],
    n: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="New tokens per sample. Default: what context and page pool allow.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1 keeps all tokens.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=-1, help="0 keeps all tokens.")] = 0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The seed of each prompt is derived from it and the prompt's id.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that cannot be used.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Sample every prompt of a file; run the same command again to go on where it stopped."""
    try:
        params = SamplingParams(
            n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
    except SamplingParamsError as error:
        raise typer.BadParameter(str(error)) from error
    with errors_in_one_sentence(debug):
        console = new_console()
        summary = anyio.run(run_rollout, RolloutJob(model, prompts, out, params, skip_bad), console)
        if as_json:
            typer.echo(json.dumps(asdict(summary)))
        else:
            console.print(summary.sentence(out))
        if summary.failed:
            raise EngineError(f"{len(summary.failed)} of the prompts failed; the first: {summary.failed[0]}")
