"""A store survives a crash at any moment, and several users at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_support import few, files, save

from aengine.audit import snapshots
from aengine.audit.snapshots import SnapshotStore


class PowerCut(BaseException):
    pass


class Disk:
    """Every act on the disk is counted; from the last that is allowed on, none happens any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int | None) -> None:
        self.count, self.allowed = 0, allowed
        for owner, name in (
            (snapshots, "_sync"),
            (snapshots, "save_file"),
            (Path, "write_bytes"),
            (Path, "replace"),
            (Path, "unlink"),
        ):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name), name))

    def _watched(self, act: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            self.count += 1
            if self.allowed is not None and self.count > self.allowed:
                if name == "save_file" and self.count == self.allowed + 1:
                    Path(arguments[1]).touch()  # it came to be, and nothing more
                raise PowerCut
            return act(*arguments)

        return watched


def two_versions(path: Path) -> SnapshotStore:
    store = SnapshotStore(path, keep=2)
    save(store, 0)
    save(store, 1)
    return store


def test_a_crash_at_any_moment_leaves_versions_that_load_and_the_next_save_cleans_up(tmp_path: Path) -> None:
    store = two_versions(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, None)
        save(store, 2)
    assert disk.count > 8
    for allowed in range(disk.count):
        store = two_versions(tmp_path / str(allowed))
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, allowed)
            with pytest.raises(PowerCut):
                save(store, 2)
        assert {1} <= set(store.versions()) <= {0, 1, 2}
        for number in store.versions():
            assert torch.equal(store.load(number).tensors["trained"], few(number)["trained"])
        save(store, 2)
        assert store.versions() == [1, 2]
        assert len(files(store)) == 3
        assert len(list((store.path / "versions").iterdir())) == 2
        assert torch.equal(store.load(2).tensors["trained"], few(2)["trained"])


def test_writers_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "snapshots"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: save(SnapshotStore(path), number), range(8)))
    store = SnapshotStore(path)
    assert store.versions() == list(range(8))
    assert all(torch.equal(store.load(number).tensors["trained"], few(number)["trained"]) for number in range(8))


def test_a_writer_waits_for_a_reader_and_a_reader_for_a_writer(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    save(store, 0)
    lock = os.open(store.path / "lock", os.O_RDWR)
    with ThreadPoolExecutor(2) as pool:
        fcntl.flock(lock, fcntl.LOCK_SH)
        loaded, saved = pool.submit(store.load, 0), pool.submit(save, store, 1)
        assert loaded.result(60).policy.number == 0
        with pytest.raises(TimeoutError):
            saved.result(0.1)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert saved.result(60).number == 1
        fcntl.flock(lock, fcntl.LOCK_EX)
        loaded = pool.submit(store.load, 1)
        with pytest.raises(TimeoutError):
            loaded.result(0.1)
        os.close(lock)
        assert loaded.result(60).policy.number == 1
