"""Checks and converters of the fields of `SamplingParams`. Each refusal names the field and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Attribute

from aengine.errors import SamplingParamsError
from aengine.validate import as_integer, as_number

__all__ = [
    "at_least",
    "between",
    "boolean",
    "logit_bias",
    "optional",
    "seed",
    "stop_strings",
    "to_pairs",
    "to_tuple",
    "token_ids",
]

MAX_BIAS = 100.0


def refuse(attribute: Attribute[Any], value: object, reason: str) -> None:
    raise SamplingParamsError(attribute.name, value, reason)


def at_least(low: int) -> Any:
    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        number = as_integer(value)
        if number is None or number < low:
            refuse(attribute, value, f"must be an integer of at least {low}")

    return check


def between(low: float, high: float, *, open_low: bool = False) -> Any:
    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        number = as_number(value)
        if number is None or not low <= number <= high or (open_low and number == low):
            refuse(attribute, value, f"must be a number in {'(' if open_low else '['}{low}, {high}]")

    return check


def optional(check: Any) -> Any:
    def check_unless_none(params: object, attribute: Attribute[Any], value: object) -> None:
        if value is not None:
            check(params, attribute, value)

    return check_unless_none


def token_ids(_: object, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    tokens = [as_integer(token) for token in value]
    if any(token is None or token < 0 for token in tokens):
        refuse(attribute, value, "must hold token ids (integers of at least 0)")


def some_token_ids(params: object, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    if not value:
        refuse(attribute, value, "must not be empty; None allows all")
    token_ids(params, attribute, value)


def logit_bias(_: object, attribute: Attribute[Any], value: object) -> None:
    """The same bounds as vLLM's, which cuts silently; what is beyond is refused here."""
    pairs = value if isinstance(value, tuple) else None
    if pairs is None or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        refuse(attribute, value, "must map token ids to numbers")
        return
    for token, bias in pairs:
        number, token_id = as_number(bias), as_integer(token)
        if token_id is None or token_id < 0 or number is None or abs(number) > MAX_BIAS:
            refuse(
                attribute, value, f"must map token ids to numbers in [-{MAX_BIAS}, {MAX_BIAS}], not {token!r}: {bias!r}"
            )
    if len({token for token, _ in pairs}) != len(pairs):
        refuse(attribute, value, "names a token twice")


def stop_strings(_: object, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    if not all(isinstance(text, str) and text for text in value):
        refuse(attribute, value, "must hold texts that are not empty")


def boolean(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        refuse(attribute, value, "must be True or False")


def seed(_: object, attribute: Attribute[Any], value: object) -> None:
    number = as_integer(value)
    if number is None or not 0 <= number < 2**64:
        refuse(attribute, value, "must be an integer in [0, 2**64)")


def to_tuple(value: Any) -> Any:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return (value,)
    return tuple(value)


def to_tuple_or_none(value: Any) -> Any:
    return None if value is None else to_tuple(value)


def to_pairs(value: Any) -> Any:
    """A mapping, or what looks like its items, as pairs in order of the ids; anything else is left for the check."""
    items = value.items() if isinstance(value, Mapping) else value
    if items is None or isinstance(items, str | bytes) or not hasattr(items, "__iter__"):
        return items
    pairs = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in items)
    try:
        return tuple(sorted(pairs))
    except TypeError:
        return pairs
