"""What an engine is doing, for Prometheus. Needs the extra `metrics` (`prometheus-client`).

Everything comes from one `Engine.stats()` snapshot, taken when the metrics are read; the engine itself keeps no
Prometheus objects and knows of no registry. `docs` lists the names, all of which begin with `aengine_`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from aengine.stats import EngineStats
from statemachines.policy import PolicyState

if TYPE_CHECKING:
    from aengine.engine import Engine

__all__ = ["EngineCollector", "prometheus_text"]


class EngineCollector(Collector):
    """`registry.register(EngineCollector(engine))` adds an engine to a registry of your own.

    Read it in the engine's thread: a snapshot taken while a step is planned may be of two moments.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from _gauges(stats)
        yield from _counters(stats)
        yield _updates(stats)
        yield _state(stats)

    def describe(self) -> list[Metric]:
        """Nothing: an engine may be registered before it is opened."""
        return []


def prometheus_text(engine: Engine) -> str:
    """The metrics of an open engine in the Prometheus text format. Raises `EngineClosedError` before it is opened."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return generate_latest(registry).decode()


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("aengine_requests_waiting", "Samples that wait to run", value=stats.num_waiting)
    yield GaugeMetricFamily("aengine_requests_running", "Samples that run", value=stats.num_running)
    yield GaugeMetricFamily("aengine_kv_pages_used", "KV pages held by running samples", value=stats.pages.live)
    if stats.policy_version is not None:  # while the engine is fenced there is none, and no number would be true
        yield GaugeMetricFamily(
            "aengine_policy_version", "Number of the installed policy version", value=stats.policy_version
        )


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, meaning, value in (
        ("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix index", stats.prefix.query_tokens),
        ("prefix_cache_hit_tokens", "Prompt tokens whose KV was found there", stats.prefix.hit_tokens),
        ("pages_invalidated", "Index entries dropped by updates and resets", stats.num_invalidated_pages),
        ("tokens_reprefilled", "Tokens whose KV was given up and computed again", stats.num_reprefilled_tokens),
        ("mixed_policy_samples", "Ended samples with more than one policy version", stats.num_mixed_policy_samples),
    ):
        yield CounterMetricFamily(f"aengine_{name}", meaning, value=value)  # `_total` is appended in the text


def _updates(stats: EngineStats) -> Metric:
    family = SummaryMetricFamily("aengine_weight_update_seconds", "Weight updates, by outcome", labels=["outcome"])
    for outcome, totals in stats.updates.items():
        family.add_metric([outcome], count_value=totals.count, sum_value=totals.seconds)
    return family


def _state(stats: EngineStats) -> Metric:
    family = GaugeMetricFamily("aengine_engine_state", "1 for the state the engine is in", labels=["engine_state"])
    for state in PolicyState:
        family.add_metric([state.value], float(state.value == stats.state))
    return family
