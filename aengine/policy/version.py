"""`PolicyVersion`: which policy is installed."""

from __future__ import annotations

from attrs import frozen

from aengine.errors import StaleVersionError

__all__ = ["PolicyVersion", "next_number"]


@frozen
class PolicyVersion:
    """What is installed: a monotonic number and the SHA-256 of the tensors (`policy.digest`).

    `train_step` is the trainer's count of optimizer steps, where the update carried it.
    """

    number: int
    digest: str
    train_step: int | None = None


def next_number(current: int, version: int | None, expected_version: int | None) -> int:
    """The number an update gets when its turn comes: `version`, or one more than `current`.

    Raises `StaleVersionError` if `version` is not greater than `current` or `expected_version` differs from it.
    """
    if expected_version is not None and expected_version != current:
        raise StaleVersionError(f"expected_version is {expected_version}, but version {current} is installed")
    if version is None:
        return current + 1
    if version <= current:
        raise StaleVersionError(f"version {version} is not greater than version {current}, which is installed")
    return version
