"""The weights of a Hugging Face directory: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from aengine.errors import CheckpointError

__all__ = ["read_json", "read_safetensors"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_safetensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the directory in its stored dtype; memory-mapped, so valid while the files stay as they are."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        loaded = read_file(path)
        if repeated := sorted(tensors.keys() & loaded.keys()):
            raise CheckpointError(f"{path} repeats the tensor {repeated[0]!r} of another file in {directory}")
        tensors.update(loaded)
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """In the order of preference of transformers; other names are taken only when neither usual one is there."""
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if (directory / INDEX_FILE).is_file():
        return indexed_files(directory / INDEX_FILE)
    if paths := sorted(directory.glob("*.safetensors")):
        return paths
    raise CheckpointError(f"{directory} has no *.safetensors file; other weight formats are not read from a directory")


def indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names the file {name!r}, which is not in {index.parent}")
    return [index.parent / name for name in names]


def read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is truncated or not a safetensors file: {error}") from error
