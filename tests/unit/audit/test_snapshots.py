"""Snapshots of weights: kept once, whole or not at all, and proved when they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from snapshot_support import FROZEN, SPEC, few, file_of, files, policy_of, save
from torch import Tensor

from aengine.audit.snapshots import SnapshotStore
from aengine.errors import SnapshotError
from aengine.testing import random_tensors


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", keep=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_version_is_loaded_as_it_was_saved(store: SnapshotStore, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(SPEC, 3).items()}
    policy = save(store, 3, tensors)
    loaded = store.load(3)
    assert (loaded.policy, loaded.spec) == (policy, SPEC)
    assert loaded.tensors.keys() == tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in tensors.items())
    assert {tensor.dtype for tensor in loaded.tensors.values()} == {dtype}


def test_slices_and_parameters_are_saved_by_what_they_show(store: SnapshotStore) -> None:
    whole = torch.randn(4, 6)
    tensors: dict[str, Tensor] = {"slice": whole[:, 1:4], "parameter": torch.nn.Parameter(whole.clone())}
    save(store, 0, tensors)
    assert torch.equal(store.load(0).tensors["slice"], whole[:, 1:4])


def test_a_tensor_that_did_not_change_is_kept_once_and_not_written_again(store: SnapshotStore) -> None:
    save(store, 0)
    before = file_of(store, "frozen").stat()
    save(store, 1)
    assert len(files(store)) == 3
    after = file_of(store, "frozen").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_last_versions_are_kept_and_their_tensors_alone(store: SnapshotStore) -> None:
    for number in (0, 1, 5, 7):
        save(store, number)
    assert store.versions() == [5, 7]
    assert len(files(store)) == 3
    assert [store.load(number).tensors["trained"][0, 0].item() for number in (5, 7)] == [5.0, 7.0]
    with pytest.raises(SnapshotError, match=r"version 1 is not there \(there: 5, 7\)"):
        store.load(1)


def test_what_was_loaded_stays_when_its_version_is_dropped(store: SnapshotStore) -> None:
    save(store, 0)
    loaded = store.load(0)
    for number in (1, 2, 3):
        save(store, number)
    assert torch.equal(loaded.tensors["trained"], few(0)["trained"])


def test_writing_to_what_was_loaded_changes_no_file(store: SnapshotStore) -> None:
    save(store, 0)
    store.load(0).tensors["trained"].fill_(9.0)
    assert torch.equal(store.load(0).tensors["trained"], few(0)["trained"])


def test_saving_a_version_again_changes_nothing(store: SnapshotStore) -> None:
    save(store, 0)
    manifest = store.path / "versions" / "00000000.json"
    before = manifest.stat().st_mtime_ns
    save(store, 0)
    assert manifest.stat().st_mtime_ns == before


def test_other_weights_under_a_number_that_is_taken_are_refused(store: SnapshotStore) -> None:
    policy, other = save(store, 1), few(2)
    with pytest.raises(SnapshotError, match=f"version 1 is there with digest {policy.digest}, not"):
        save(store, 1, other)
    assert torch.equal(store.load(1).tensors["trained"], few(1)["trained"])


def test_tensors_that_do_not_have_the_digest_of_their_policy_are_refused(store: SnapshotStore) -> None:
    with pytest.raises(SnapshotError, match="the tensors given as version 1 have digest"):
        store.save(policy_of(1, few(1)), SPEC, few(2))
    assert store.versions() == []


def test_a_version_older_than_all_that_are_kept_is_refused(store: SnapshotStore) -> None:
    save(store, 5)
    save(store, 6)
    with pytest.raises(SnapshotError, match="version 4 is older than the 2 versions that are kept"):
        save(store, 4)
    assert store.versions() == [5, 6]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def hold_another(path: Path) -> None:
    save_file({"other": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (flip_bit, "'trained' has digest"),
        (cut_off, "truncated or not a safetensors file"),
        (hold_another, r"holds \['other'\] instead of 'trained'"),
        (Path.unlink, "the file of 'trained' is missing"),
    ],
)
def test_a_damaged_tensor_is_named_with_its_file(
    store: SnapshotStore, damage: Callable[[Path], object], sentence: str
) -> None:
    save(store, 0)
    path = file_of(store, "trained")
    damage(path)
    with pytest.raises(SnapshotError, match=sentence) as error:
        store.load(0)
    assert error.value.path == path


def test_a_truncated_tensor_is_written_again_by_the_next_version_that_has_it(store: SnapshotStore) -> None:
    save(store, 0)
    path = file_of(store, "frozen")
    cut_off(path)
    save(store, 1)
    assert path.is_file()
    assert torch.equal(store.load(1).tensors["frozen"], FROZEN)


def edit(store: SnapshotStore, old: str, new: str) -> Path:
    path = store.path / "versions" / "00000004.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"number": 4', '"number": 3', "it is of version 3"),
        ('"format_version": 1', '"format_version": 9', "it is not a manifest"),
        ('"policy"', '"policies"', "it is not a manifest"),
        ('"digest": "', '"digest": "0', "is missing"),
    ],
)
def test_a_manifest_that_was_edited_is_refused(store: SnapshotStore, old: str, new: str, sentence: str) -> None:
    save(store, 4)
    edit(store, old, new)
    with pytest.raises(SnapshotError, match=sentence):
        store.load(4)


def test_a_manifest_that_leaves_out_a_tensor_is_refused(store: SnapshotStore) -> None:
    policy = save(store, 4, {"a": FROZEN, "b": FROZEN + 1})
    path = store.path / "versions" / "00000004.json"
    manifest = msgspec.json.decode(path.read_bytes())
    del manifest["tensors"]["b"]
    path.write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(SnapshotError, match=f"its tensors have digest .*, its policy {policy.digest}"):
        store.load(4)


def test_there_is_nothing_in_a_store_that_was_never_made(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "none")
    assert store.versions() == []
    with pytest.raises(SnapshotError, match="there is no snapshot store"):
        store.load(0)
    assert not store.path.exists()


def test_a_path_that_cannot_be_used_is_a_snapshot_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(SnapshotError, match="cannot be read or written"):
        save(SnapshotStore(tmp_path / "file"), 0)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_a_store_that_keeps_nothing_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ValueError, match="keep"):
        SnapshotStore(tmp_path, keep=keep)
