"""Versions of two small tensors, and what a store has of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from aengine.audit.snapshots import SnapshotStore
from aengine.model.spec import ModelSpec
from aengine.policy.digest import digest_tensors
from aengine.policy.version import PolicyVersion
from aengine.testing import TINY

SPEC = ModelSpec.from_config(TINY)
FROZEN = torch.arange(12.0).view(3, 4)


def policy_of(number: int, tensors: dict[str, Tensor]) -> PolicyVersion:
    return PolicyVersion(number, digest_tensors(tensors.items()), train_step=10 * number)


def few(number: int) -> dict[str, Tensor]:
    """Two tensors of which one is the same in every version."""
    return {"frozen": FROZEN, "trained": torch.full((2, 2), float(number))}


def save(store: SnapshotStore, number: int, tensors: dict[str, Tensor] | None = None) -> PolicyVersion:
    tensors = few(number) if tensors is None else tensors
    policy = policy_of(number, tensors)
    store.save(policy, SPEC, tensors)
    return policy


def files(store: SnapshotStore) -> list[Path]:
    return sorted((store.path / "tensors").iterdir())


def file_of(store: SnapshotStore, name: str) -> Path:
    (path,) = (path for path in files(store) if name in load_file(path))
    return path
