"""`EngineConfig`: how one engine is set up. Every field has a default and works at small values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from attrs import Attribute, field, frozen

from aengine.errors import ConfigError
from aengine.validate import as_integer

__all__ = ["EngineConfig"]

MIB = 1024 * 1024


def _one_of(*choices: object) -> Any:
    def check(_: EngineConfig, attribute: Attribute[Any], value: object) -> None:
        if value not in choices:
            raise ConfigError(attribute.name, value, f"must be one of {', '.join(map(repr, choices))}")

    return check


def _positive(_: EngineConfig, attribute: Attribute[Any], value: object) -> None:
    number = as_integer(value)
    if number is None or number < 1:
        raise ConfigError(attribute.name, value, "must be an integer of at least 1")


def _optional_positive(config: EngineConfig, attribute: Attribute[Any], value: object) -> None:
    if value is not None:
        _positive(config, attribute, value)


def _seed(_: EngineConfig, attribute: Attribute[Any], value: object) -> None:
    seed = as_integer(value)
    if seed is None or not 0 <= seed < 2**64:
        raise ConfigError(attribute.name, value, "must be an integer in [0, 2**64)")


def _fraction(_: EngineConfig, attribute: Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(attribute.name, value, "must be a number in [0, 1]")


@frozen(kw_only=True)
class EngineConfig:
    """Settings of one engine, validated when made; a bad value raises `ConfigError`."""

    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", validator=_one_of("float32", "bfloat16", "float16")
    )
    """Type of weights, activations and KV. Checkpoints in other float types are converted, once. The 16-bit types halve
    the KV; sums are float32 in any case, and so are log-probabilities."""
    page_size: int = field(default=16, validator=_positive)
    """Tokens per KV page; only full pages are shared, so 1 turns prefix caching off."""
    num_pages: int | None = field(default=None, validator=_optional_positive)
    """Size of the page pool; None takes what `kv_cache_memory` holds."""
    kv_cache_memory: int = field(default=1024 * MIB, validator=_positive)
    """Bytes for the page pool where `num_pages` is None; never more than `max_num_seqs` full sequences need."""
    max_model_len: int | None = field(default=None, validator=_optional_positive)
    """Longest sequence, prompt and new tokens together; None takes the model's own limit."""
    max_num_seqs: int = field(default=256, validator=_positive)
    """Samples that may run at once; `max_num_batched_tokens` bounds it too."""
    max_num_batched_tokens: int = field(default=512, validator=_positive)
    """Tokens computed in one step; longer prompts are prefilled in chunks."""
    max_num_queued_reqs: int | None = field(default=None, validator=_optional_positive)
    """Requests that may wait in the queue, preempted ones not counted. None does not bound it."""
    when_queue_full: Literal["wait", "raise"] = field(default="wait", validator=_one_of("wait", "raise"))
    """`"wait"`: whoever submits more waits for a place, which are given by priority, then arrival; cancelling gives the
    turn to the next. `"raise"`: more is refused with `QueueFullError`."""
    cache: Literal["paged", "contiguous"] = field(default="paged", validator=_one_of("paged", "contiguous"))
    """`"contiguous"` gives each sample one fixed range and shares nothing."""
    prefix_caching: bool = field(default=True, validator=_one_of(True, False))
    """Keep the KV of finished prompts and samples for later requests of the same policy version."""
    numerics: Literal["invariant", "fast"] = field(default="invariant", validator=_one_of("invariant", "fast"))
    """`"invariant"`: the numbers of a sample do not depend on its company."""
    staging: Literal["copy", "none"] = field(default="copy", validator=_one_of("copy", "none"))
    """`"copy"` stages new weights beside the installed ones, so an update that fails changes nothing. `"none"` writes
    over them as it reads, for models that do not fit twice: an update that fails while it writes fences the engine."""
    ledger: str | Path | None = None
    """File that records every version, update and invalidation (`policy.ledger`); continued if it exists."""
    seed: int = field(default=0, validator=_seed)
    """Seeds the seeds of requests that give none."""
    audit_fraction: float = field(default=0.0, validator=_fraction)
    """Share of the samples that end to replay when there is nothing else to do, before their version is replaced
    (`auditor`); one that does not reproduce is among the events. `seed` decides which."""
    check_integrity: bool = field(default=False, validator=_one_of(True, False))
    """Prove the page accounting after every step; for tests, it is linear in the pool."""
