"""Checkpoints: a spec, its tensors and its tokenizer, wherever they come from."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from attrs import field, frozen
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from aengine.errors import CheckpointError, ModelUnavailableError, UnsupportedModelError
from aengine.model.gguf import read_gguf
from aengine.model.hub import is_hub_id, snapshot
from aengine.model.matching import match_tensors
from aengine.model.model_cache import KNOWN_MODELS, find_model
from aengine.model.spec import ModelSpec
from aengine.model.tensor_files import SINGLE_FILE, read_json, read_safetensors
from aengine.model.tokenizer import TOKENIZER_FILE, Tokenizer

__all__ = ["Checkpoint", "checkpoint_from_module", "load_checkpoint", "match_tensors", "save_checkpoint"]


@frozen(eq=False, kw_only=True)
class Checkpoint:
    """One model as loaded. `tensors` has exactly the names of `spec.tensor_shapes()`, in their stored dtypes.

    The tensors may be backed by a file or by the module they came from: who keeps them copies them. `eos_token_ids`
    lists the ids that end a sample, without those outside the vocabulary.
    """

    spec: ModelSpec
    tensors: Mapping[str, Tensor] = field(repr=False)
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    name: str


class PretrainedModule(Protocol):
    """What is asked of a `transformers.PreTrainedModel`."""

    @property
    def config(self) -> Any: ...

    def state_dict(self) -> Mapping[str, Tensor]: ...


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Load a directory with `config.json` and `*.safetensors`, a `.gguf` file, a known model's name or a Hub id.

    A known model is only looked for in the cache (`ModelUnavailableError` when it is not there); a Hub id is fetched
    by `huggingface_hub`. Raises `CheckpointError` for files that are missing, damaged or contradict each other,
    `UnsupportedModelError` for models the decoder does not compute, `WeightsMismatchError` for tensors that do not
    fit the config.
    """
    path = Path(source)
    if path.is_dir():
        return load_directory(path, name=path.resolve().name)
    if path.is_file():
        return load_gguf(path, name=path.stem)
    if str(source) in KNOWN_MODELS:
        return load_known(str(source))
    if isinstance(source, str) and path.suffix.lower() != ".gguf" and is_hub_id(source):
        return load_directory(snapshot(source), name=source)
    raise CheckpointError(
        f"{str(source)!r} is neither a directory, nor a file, nor a known model ({', '.join(KNOWN_MODELS)})"
    )


def load_directory(directory: Path, *, name: str) -> Checkpoint:
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json")
    config = read_json(directory / "config.json")
    spec = ModelSpec.from_config(config)
    tokenizer = Tokenizer.from_directory(directory) if (directory / TOKENIZER_FILE).is_file() else None
    generation = directory / "generation_config.json"
    return Checkpoint(
        spec=spec,
        tensors=match_tensors(spec, read_safetensors(directory)),
        tokenizer=tokenizer,
        eos_token_ids=merge_eos(
            spec,
            read_json(generation).get("eos_token_id") if generation.is_file() else None,
            config.get("eos_token_id"),
            tokenizer.eos_token_ids if tokenizer else None,
        ),
        name=name,
    )


def load_gguf(path: Path, *, name: str) -> Checkpoint:
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{path} is not a .gguf file; for safetensors give the directory with its config.json")
    loaded = read_gguf(path)
    return Checkpoint(
        spec=loaded.spec,
        tensors=match_tensors(loaded.spec, loaded.tensors),
        tokenizer=loaded.tokenizer,
        eos_token_ids=merge_eos(loaded.spec, loaded.eos_token_ids),
        name=name,
    )


def load_known(name: str) -> Checkpoint:
    path = find_model(name)
    if path is None:
        raise ModelUnavailableError(f"{name} is not in the cache; run: aengine models get {name}")
    return load_gguf(path, name=name)


def checkpoint_from_module(module: PretrainedModule) -> Checkpoint:
    """The weights of a live `transformers` model, aliased, without a tokenizer.

    Raises as `load_checkpoint` does; a module without a config is an `UnsupportedModelError`.
    """
    if not hasattr(getattr(module, "config", None), "to_dict"):
        raise UnsupportedModelError(f"{type(module).__name__} is not a transformers model: it has no config")
    config = module.config.to_dict()
    spec = ModelSpec.from_config(config)
    generation = getattr(module, "generation_config", None)
    return Checkpoint(
        spec=spec,
        tensors=match_tensors(spec, module.state_dict()),
        tokenizer=None,
        eos_token_ids=merge_eos(spec, getattr(generation, "eos_token_id", None), config.get("eos_token_id")),
        name=type(module).__name__,
    )


def merge_eos(spec: ModelSpec, *sources: int | Iterable[int] | None) -> tuple[int, ...]:
    """Each source is an id, several, or none, as in the `eos_token_id` of a config."""
    merged: dict[int, None] = {}
    for source in sources:
        ids = [] if source is None else [source] if isinstance(source, int) else list(source)
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise CheckpointError(f"eos_token_id must be a token id or a list of them, got {source!r}")
            if 0 <= token_id < spec.vocab_size:
                merged[token_id] = None
    return tuple(merged)


def save_checkpoint(checkpoint: Checkpoint, directory: str | Path) -> None:
    """Write a directory that `load_checkpoint` and `transformers` both read; files of the same names are replaced.

    The weights file appears whole or not at all. Raises `CheckpointError` when the directory cannot be written.
    """
    directory = Path(directory)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.tensors.items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config = {**checkpoint.spec.to_config(), "eos_token_id": list(checkpoint.eos_token_ids) or None, "dtype": dtype}
    unfinished = directory / f"{SINGLE_FILE}.{os.getpid()}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(directory / SINGLE_FILE)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(directory)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise CheckpointError(f"{directory} cannot be written: {error}") from error
