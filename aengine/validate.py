"""Checks of values that come from outside, shared by everything that takes them."""

from __future__ import annotations

import math
import operator

__all__ = ["as_integer", "as_number", "refuse_unless", "refuse_unless_integer"]


def as_integer(value: object) -> int | None:
    """`value` as an int if it is one, numpy's and torch's included; None for booleans and everything else."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several, or of floats
        return None


def as_number(value: object) -> float | None:
    """`value` as a finite float if it is a number, None for booleans and everything else."""
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def refuse_unless(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` for an argument that is not one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(map(repr, choices))}")


def refuse_unless_integer(name: str, value: object) -> None:
    """Raise `ValueError` for an argument that is neither an integer nor None."""
    if value is not None and as_integer(value) is None:
        raise ValueError(f"{name} = {value!r}: must be an integer")
