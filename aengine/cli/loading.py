"""Getting a model ready, with a word to the person who waits."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from aengine.cli.models import fetch_model
from aengine.model.checkpoint import Checkpoint, load_checkpoint
from aengine.model.known import KNOWN_MODELS

__all__ = ["load_model"]


def load_model(source: str, console: Console) -> Checkpoint:
    """The checkpoint at `source`, fetched first where it is a known model that is not there yet."""
    if source in KNOWN_MODELS and not Path(source).exists():
        fetch_model(source, console)
    with console.status(f"loading {source}"):
        return load_checkpoint(source)
