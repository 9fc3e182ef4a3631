from __future__ import annotations

import anyio
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from aengine import Engine, EngineClosedError, EngineConfig, SamplingParams, WeightUpdateError
from aengine.metrics import EngineCollector, prometheus_text
from aengine.testing import random_tensors, tiny_checkpoint

MODEL = tiny_checkpoint()
NAMES = {
    "requests_waiting",
    "requests_running",
    "prefix_cache_hit_tokens_total",
    "prefix_cache_query_tokens_total",
    "kv_pages_used",
    "policy_version",
    "weight_update_seconds_count",
    "weight_update_seconds_sum",
    "pages_invalidated_total",
    "tokens_reprefilled_total",
    "mixed_policy_samples_total",
    "engine_state",
}


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values by name without the prefix, and by the value of the one label there may be."""
    return {
        (sample.name.removeprefix("aengine_"), "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_every_metric_has_the_name_of_the_naming_sheet_and_tells_what_happened() -> None:
    async with Engine(MODEL, EngineConfig(page_size=4, num_pages=16)) as engine:
        prompt = list(range(9))
        for _ in range(2):
            await engine.generate(prompt, SamplingParams(max_tokens=1, seed=0))
        with pytest.raises(WeightUpdateError):
            await engine.update_weights({})
        before = samples(prometheus_text(engine))
        await engine.update_weights(random_tensors(MODEL.spec, 1))
        after = samples(prometheus_text(engine))
    assert {name for name, _ in after} == NAMES
    assert (after["prefix_cache_query_tokens_total", ""], after["prefix_cache_hit_tokens_total", ""]) == (18, 8)
    assert (before["policy_version", ""], after["policy_version", ""]) == (0, 1)
    assert ("weight_update_seconds_count", "committed") not in before
    assert after["weight_update_seconds_count", "committed"] == after["weight_update_seconds_count", "failed"] == 1
    assert after["weight_update_seconds_sum", "committed"] > 0
    assert (before["pages_invalidated_total", ""], after["pages_invalidated_total", ""]) == (0, 2)
    states = {label: value for (name, label), value in after.items() if name == "engine_state"}
    assert states == {"Serving": 1, "Draining": 0, "Swapping": 0, "Invalidated": 0}


async def test_running_and_preempted_work_is_counted() -> None:
    async with Engine(MODEL, EngineConfig(page_size=4, num_pages=9, prefix_caching=False)) as engine:
        async with engine.stream([1, 2, 3], SamplingParams(max_tokens=12, n=4, seed=0)) as stream:
            await stream.__anext__()
            running = samples(prometheus_text(engine))
            await stream.output()
        idle = samples(prometheus_text(engine))
    assert running["requests_running", ""] + running["requests_waiting", ""] == 4
    assert running["kv_pages_used", ""] > 0
    assert idle["requests_running", ""] == idle["requests_waiting", ""] == idle["kv_pages_used", ""] == 0
    assert idle["tokens_reprefilled_total", ""] > 0, "the pool is too small for all four"


async def test_a_sample_of_two_versions_is_counted_once() -> None:
    async with Engine(MODEL, EngineConfig(page_size=4, num_pages=64)) as engine:
        async with engine.stream([1, 2, 3], SamplingParams(max_tokens=150, seed=0)) as stream:
            await stream.__anext__()
            await engine.update_weights(random_tensors(MODEL.spec, 1), mode="keep")
            output = await stream.output()
        counted = samples(prometheus_text(engine))
    assert not output.outputs[0].is_single_policy
    assert counted["mixed_policy_samples_total", ""] == 1
    assert counted["tokens_reprefilled_total", ""] > 0


async def test_an_engine_joins_a_registry_of_ones_own_before_it_is_opened() -> None:
    registry, engine = CollectorRegistry(), Engine(MODEL, EngineConfig(num_pages=4))
    registry.register(EngineCollector(engine))
    with pytest.raises(EngineClosedError):
        prometheus_text(engine)
    async with engine:
        await anyio.lowlevel.checkpoint()
        assert registry.get_sample_value("aengine_policy_version") == 0
