"""How to sample: `SamplingParams`, with vLLM's names and meanings."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from aengine.errors import SamplingParamsError
from aengine.validate import as_integer, as_number

__all__ = ["SamplingParams"]


def _refuse(attribute: Attribute[Any], value: object, reason: str) -> None:
    raise SamplingParamsError(attribute.name, value, reason)


def _at_least(low: int) -> Any:
    def check(_: SamplingParams, attribute: Attribute[Any], value: object) -> None:
        number = as_integer(value)
        if number is None or number < low:
            _refuse(attribute, value, f"must be an integer of at least {low}")

    return check


def _between(low: float, high: float, *, open_low: bool = False) -> Any:
    def check(_: SamplingParams, attribute: Attribute[Any], value: object) -> None:
        number = as_number(value)
        if number is None or not low <= number <= high or (open_low and number == low):
            _refuse(attribute, value, f"must be a number in {'(' if open_low else '['}{low}, {high}]")

    return check


def _optional(check: Any) -> Any:
    def check_unless_none(params: SamplingParams, attribute: Attribute[Any], value: object) -> None:
        if value is not None:
            check(params, attribute, value)

    return check_unless_none


def _token_ids(_: SamplingParams, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    tokens = [as_integer(token) for token in value]
    if any(token is None or token < 0 for token in tokens):
        _refuse(attribute, value, "must hold token ids (integers of at least 0)")


def _bool(_: SamplingParams, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        _refuse(attribute, value, "must be True or False")


def _to_tuple(value: Any) -> Any:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return (value,)
    return tuple(value)


def _seed(_: SamplingParams, attribute: Attribute[Any], value: object) -> None:
    seed = as_integer(value)
    if seed is None or not 0 <= seed < 2**64:
        _refuse(attribute, value, "must be an integer in [0, 2**64)")


MAX_TEMPERATURE = 1e4


@frozen(kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, validated when made; a bad value raises `SamplingParamsError`.

    The defaults truncate nothing, so that the behaviour policy is the model's own distribution.
    """

    n: int = field(default=1, validator=_at_least(1))
    """Samples per prompt. Sample j does not depend on n."""
    temperature: float = field(default=1.0, validator=_between(0.0, MAX_TEMPERATURE))
    """Divides the logits; 0 is greedy (the lowest id wins a tie)."""
    top_p: float = field(default=1.0, validator=_between(0.0, 1.0, open_low=True))
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all."""
    top_k: int = field(default=0, validator=_at_least(-1))
    """Keep this many most likely tokens; 0 and -1 keep all."""
    min_p: float = field(default=0.0, validator=_between(0.0, 1.0))
    """Drop tokens less likely than this times the likeliest; 0 drops none."""
    max_tokens: int | None = field(default=None, validator=_optional(_at_least(1)))
    """New tokens, not total length. None, or more than fits, means: as many as model and page pool allow."""
    min_tokens: int = field(default=0, validator=_at_least(0))
    """EOS and stop tokens cannot be sampled before this many new tokens."""
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_to_tuple, validator=_token_ids)
    """Tokens that end a sample, beside the model's EOS; the ending token is kept."""
    ignore_eos: bool = field(default=False, validator=_bool)
    """Go on past EOS."""
    seed: int | None = field(default=None, validator=_optional(_seed))
    """Seed of the draws; None lets the engine choose one. The seed used is in every result."""

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError("min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})")
