"""Running the command line on a tiny model in a directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from aengine.audit.record import RolloutHeader, SampleRecord
from aengine.audit.rollout_file import read_rollouts
from aengine.cli.main import app
from aengine.model.checkpoint import Checkpoint, save_checkpoint
from aengine.testing import tiny_checkpoint


def save_model(directory: Path, checkpoint: Checkpoint | None = None) -> Path:
    save_checkpoint(tiny_checkpoint(0, eos_token_ids=(0,)) if checkpoint is None else checkpoint, directory)
    return directory


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Each line is given as text, or as what is to be written as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def rollout(model: Path, prompts: Path, out: Path, *options: object) -> Result:
    return invoke(
        "rollout", "--model", model, "--prompts", prompts, "--out", out, "--max-tokens", 6, "--seed", 7, *options
    )


def header_of(path: Path) -> RolloutHeader:
    record = next(iter(read_rollouts(path)))
    assert isinstance(record, RolloutHeader)
    return record


def samples_of(path: Path) -> list[SampleRecord]:
    return [record for record in read_rollouts(path) if isinstance(record, SampleRecord)]


def in_order(samples: Sequence[SampleRecord]) -> list[SampleRecord]:
    return sorted(samples, key=lambda sample: (sample.prompt_id, sample.index))
