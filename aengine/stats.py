"""A snapshot of what an engine is doing."""

from __future__ import annotations

from attrs import frozen

from aengine.cache.state import PageStats
from aengine.outputs import NumericsLabel
from aengine.policy.updater import UpdateOutcome, UpdateTotals

__all__ = ["AuditTotals", "EngineStats", "PrefixStats"]


@frozen
class PrefixStats:
    """Prompt tokens looked up in the prefix index when requests were admitted, and how many of them were found."""

    query_tokens: int
    hit_tokens: int


@frozen
class AuditTotals:
    """Samples that the audit in the engine chose, by what became of them."""

    reproduced: int = 0
    """Bit for bit; where the engine's numerics promise no bits, closely."""
    failed: int = 0
    """Each has an `AuditRecord` among the events, which says why."""
    unaudited: int = 0
    """Left when their policy version was replaced or the engine closed, made under several versions, or not replayable
    for another reason."""
    queued: int = 0


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
    numerics: NumericsLabel
    """`"invariant"`: a sample's numbers do not depend on its company, by a probe of this machine. `"unverified"`: for
    some product or operator that does not hold. `"fast"`: it was not asked for, and nothing was probed."""
    dtype: str
    """Type of weights, activations and KV."""
    max_sequence_len: int
    """Most tokens of one sample, its prompt included, that model, settings and page pool allow."""
    is_shared: bool
    """Whether it computes with a trainer's own parameters (`share=True`), whose products are not fused."""
    products: dict[str, str]
    """The strategy chosen for each shape of matrix product, `"outputs x inputs"` or `"outputs x inputs + bias"`."""
    operators: dict[str, str]
    """What computes each other operator; empty where nothing was probed."""
    unverified: tuple[str, ...]
    """Which products and operators do not hold, and what was seen of them."""
    audits: AuditTotals
    """Of `EngineConfig.audit_fraction`."""
