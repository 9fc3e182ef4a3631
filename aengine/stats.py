"""A snapshot of what an engine is doing."""

from __future__ import annotations

from attrs import frozen

from aengine.cache.state import PageStats
from aengine.policy.updater import UpdateOutcome, UpdateTotals

__all__ = ["EngineStats", "PrefixStats"]


@frozen
class PrefixStats:
    """Prompt tokens looked up in the prefix index when requests were admitted, and how many of them were found."""

    query_tokens: int
    hit_tokens: int


@frozen
class EngineStats:
    state: str
    policy_version: int | None
    """None while the engine is fenced."""
    num_waiting: int
    """Samples that are to run and do not: of requests in the queue, preempted, or waiting for their group's prompt.
    Those for which a full queue has no place yet are not counted."""
    num_running: int
    num_preemptions: int
    num_sampled_tokens: int
    """Tokens sampled since the engine was opened."""
    num_reprefilled_tokens: int
    """Tokens whose KV was given up, to a preemption or an update, and computed again."""
    num_mixed_policy_samples: int
    """Samples that ended with more than one policy version in their tokens or KV."""
    num_invalidated_pages: int
    """Entries of the prefix index that updates and resets have dropped."""
    updates: dict[UpdateOutcome, UpdateTotals]
    """Updates that have settled, by outcome."""
    pages: PageStats
    prefix: PrefixStats
    numerics: str
    """`"invariant"`: a sample's numbers do not depend on its company, by a probe of this machine. `"unverified"`: some
    product has no strategy for which that holds. `"fast"`: it was not asked for."""
    products: dict[str, str]
    """The strategy chosen for each shape of matrix product, `"outputs x inputs"`."""
