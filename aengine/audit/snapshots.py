"""Weights on disk by policy version, so that a version named in a rollout can be loaded again.

A store is a directory. `tensors/` has one safetensors file for each tensor, named by the tensor's digest
(`policy.digest`), so what does not change between versions is kept once. `versions/` has one JSON manifest for each
version, which names the digests. Files appear whole, by a rename after they have reached the disk: tensors first, then
the manifest; and they go in the other order. So at any moment every manifest that is there can be loaded.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from attrs import Attribute, define, field, frozen
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from aengine.errors import SnapshotError
from aengine.model.spec import ModelSpec
from aengine.policy.digest import combine_digests, digest_each
from aengine.policy.version import PolicyVersion
from aengine.validate import as_integer

__all__ = ["Snapshot", "SnapshotStore"]

LOCK, TENSORS, VERSIONS = "lock", "tensors", "versions"
PART = ".part"
"""What ends the name of a file that is not whole yet."""


@frozen(eq=False)
class Snapshot:
    """One policy version. The tensors are memory-mapped: valid also after the store has dropped them, not writable for
    keeps (what is written to them never reaches the disk)."""

    policy: PolicyVersion
    spec: ModelSpec
    tensors: dict[str, Tensor] = field(repr=False)


class TensorEntry(msgspec.Struct, frozen=True):
    digest: str
    dtype: str
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format_version: Literal[1] = 1
    policy: PolicyVersion
    spec: ModelSpec
    tensors: dict[str, TensorEntry]


def _at_least_one(_: SnapshotStore, attribute: Attribute[int], value: object) -> None:
    if (as_integer(value) or 0) < 1:
        raise ValueError(f"{attribute.name} = {value!r}: must be an integer of at least 1")


@define(eq=False)
class SnapshotStore:
    """The last `keep` versions of one run in a directory, which the first `save` makes.

    Any number of threads and processes may use a directory at once; a writer waits for the others. All methods block
    on the disk and raise `SnapshotError` for a store that is missing, damaged, or cannot be read or written.
    """

    path: Path = field(converter=Path)
    keep: int = field(default=8, validator=_at_least_one)

    def versions(self) -> list[int]:
        """Numbers of the versions that can be loaded, ascending; none where there is no store yet."""
        with self._disk_errors():
            return sorted(int(path.stem) for path in (self.path / VERSIONS).glob("*.json") if path.stem.isdecimal())

    def save(self, policy: PolicyVersion, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
        """Keep the weights of `policy`, whose digest they must have, and drop the versions before the last `keep`.

        Saving a version again changes nothing. Raises `SnapshotError` if the digest differs, if its number is taken by
        other weights (use one directory for each run), or if it is older than all versions of a full store.
        """
        digests = digest_each(sorted(tensors.items()))
        if (digest := combine_digests(digests)) != policy.digest:
            raise SnapshotError(
                self.path, f"the tensors given as version {policy.number} have digest {digest}, not {policy.digest}"
            )
        entries = {
            name: TensorEntry(part.hex(), str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape))
            for name, part in digests.items()
        }
        with self._disk_errors():
            self._make()
            with self._locked(fcntl.LOCK_EX):
                if self._is_new(policy):
                    self._write(Manifest(policy=policy, spec=spec, tensors=entries), tensors)
                self._prune()

    def load(self, number: int) -> Snapshot:
        """The version with this number, with every tensor hashed and compared.

        Raises `SnapshotError`, naming file and tensor, for what differs from the manifest, and for an unknown number.
        """
        with self._disk_errors(), self._locked(fcntl.LOCK_SH):
            manifest = self._read(number)
            tensors = {name: self._read_tensor(name, entry) for name, entry in manifest.tensors.items()}
        digests = digest_each(tensors.items())
        for name, entry in manifest.tensors.items():
            if (found := digests[name].hex()) != entry.digest:
                raise SnapshotError(self._tensor_path(entry), f"{name!r} has digest {found}, not the one of its name")
        if (digest := combine_digests(digests)) != manifest.policy.digest:
            reason = f"its tensors have digest {digest}, its policy {manifest.policy.digest}"
            raise SnapshotError(self._manifest_path(number), reason)
        return Snapshot(manifest.policy, manifest.spec, tensors)

    def _make(self) -> None:
        if not (self.path / VERSIONS).is_dir():
            for directory in (self.path / TENSORS, self.path / VERSIONS):
                directory.mkdir(parents=True, exist_ok=True)
            for directory in (self.path, self.path.parent):
                _sync(directory)

    # ---- under the lock

    def _is_new(self, policy: PolicyVersion) -> bool:
        versions = self.versions()
        if policy.number in versions:
            there = self._read(policy.number).policy.digest
            if there != policy.digest:
                reason = f"version {policy.number} is there with digest {there}, not {policy.digest}"
                raise SnapshotError(self.path, f"{reason}; keep the versions of each run in a directory of their own")
            return False
        if len(versions) >= self.keep and policy.number < versions[-self.keep]:
            reason = f"version {policy.number} is older than the {self.keep} versions that are kept"
            raise SnapshotError(self.path, f"{reason} (from {versions[-self.keep]} on)")
        return True

    def _write(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        for name, entry in manifest.tensors.items():
            tensor, path = tensors[name].detach().contiguous(), self._tensor_path(entry)
            if not (path.is_file() and _holds(path, tensor)):
                _write_whole(path, partial(save_file, {name: tensor}))
        _sync(self.path / TENSORS)
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
        _write_whole(self._manifest_path(manifest.policy.number), lambda part: part.write_bytes(content))
        _sync(self.path / VERSIONS)

    def _prune(self) -> None:
        """Drop manifests first, then every tensor that none names, and what killed writers have left."""
        versions = self.versions()
        for number in versions[: -self.keep]:
            self._manifest_path(number).unlink()
        _sync(self.path / VERSIONS)
        manifests = [self._read(number) for number in versions[-self.keep :]]
        wanted = {self._tensor_path(entry) for manifest in manifests for entry in manifest.tensors.values()}
        for path in (self.path / TENSORS).iterdir():
            if path not in wanted:
                path.unlink()
        for path in (self.path / VERSIONS).glob(f"*{PART}"):
            path.unlink()

    def _read(self, number: int) -> Manifest:
        path = self._manifest_path(number)
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            there = ", ".join(map(str, self.versions())) or "none"
            raise SnapshotError(self.path, f"version {number} is not there (there: {there})") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SnapshotError(path, f"it is not a manifest: {error}") from error
        if manifest.policy.number != number:
            raise SnapshotError(path, f"it is of version {manifest.policy.number}")
        return manifest

    def _read_tensor(self, name: str, entry: TensorEntry) -> Tensor:
        path = self._tensor_path(entry)
        try:
            found = load_file(path)
        except FileNotFoundError:
            raise SnapshotError(path, f"the file of {name!r} is missing") from None
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise SnapshotError(path, f"it is truncated or not a safetensors file: {error}") from error
        if found.keys() != {name}:
            raise SnapshotError(path, f"it holds {sorted(found)} instead of {name!r}")
        return found[name]

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """`LOCK_EX` to write, which makes the lock's file; `LOCK_SH` to read."""
        flags = os.O_RDWR | os.O_CREAT if kind == fcntl.LOCK_EX else os.O_RDONLY
        try:
            descriptor = os.open(self.path / LOCK, flags | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            raise SnapshotError(self.path, "there is no snapshot store") from None
        try:
            fcntl.flock(descriptor, kind)
            yield
        finally:
            os.close(descriptor)  # which ends the lock

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise SnapshotError(self.path, f"it cannot be read or written: {error}") from error

    def _tensor_path(self, entry: TensorEntry) -> Path:
        return self.path / TENSORS / f"{entry.digest}.safetensors"

    def _manifest_path(self, number: int) -> Path:
        return self.path / VERSIONS / f"{number:08d}.json"


def _holds(path: Path, tensor: Tensor) -> bool:
    """Whether a file has the size of this tensor; loading looks at its content."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size == 8 + header + tensor.nbytes


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """`path` comes to be with all that `write` puts into the file it is given, which is on the disk by then."""
    part = path.with_name(path.name + PART)
    try:
        write(part)
        _sync(part)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _sync(path: Path) -> None:
    """Of a file its content, of a directory its names: they survive a loss of power from now on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
