"""What a weight update costs: how long nothing can run, and how long the call takes.

    python -m benchmarks.update [--quick] [--json FILE]

`pause_ms`: from entering Swapping to Serving again, on an idle engine. `call_to_ack_ratio`: the call, against a plain
copy, a packing and a SHA-256 of the same bytes, one after the other in the same run. `ack_ms_...`: the call on a tiny
model with nothing and with a million pages cached; dropping them must not show.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import anyio
import torch
from torch import Tensor

from aengine import Engine, EngineConfig, load_checkpoint
from aengine.events import EventStream
from aengine.model.known import get_model
from aengine.model.weights import repack_weights
from aengine.policy.ledger_records import TransitionRecord
from aengine.testing import random_tensors, tiny_checkpoint
from benchmarks.report import Figure, at_most, plain, report
from statemachines.policy import PolicyState

MODEL = "smollm2-135m"
PAGE_SIZE = 4
CHAIN = 100  # pages of one prefix that fills the tiny model's pool


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_work(engine: Engine, tensors: dict[str, Tensor]) -> float:
    """Seconds for one copy, one packing and one SHA-256 of the model's bytes."""
    weights = engine._opened().runner.decoder.weights
    copies: list[Tensor] = []
    copying = timed(lambda: copies.extend(tensor.clone() for tensor in tensors.values()))
    packing = timed(lambda: repack_weights(weights))

    def hash_all() -> None:
        digest = hashlib.sha256()
        for tensor in copies:
            digest.update(tensor.view(torch.uint8).numpy().data)

    return copying + packing + timed(hash_all)


async def measure_smollm2(rounds: int) -> tuple[float, float]:
    """Median pause in ms, and median ratio of the call to the plain work timed beside it."""
    get_model(MODEL)
    checkpoint = load_checkpoint(MODEL)
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    pauses, ratios = [], []
    async with Engine(checkpoint, EngineConfig(max_num_seqs=8)) as engine:
        events = engine.events()
        for _ in range(rounds):
            plain = plain_work(engine, tensors)
            start = time.perf_counter()
            await engine.update_weights(tensors)
            ratios.append((time.perf_counter() - start) / plain)
            pauses.append(await pause_of(events))
    return 1e3 * median(pauses), median(ratios)


async def pause_of(events: EventStream) -> float:
    """Seconds between the transitions into Swapping and back to Serving."""
    begin = 0.0
    async for event in events:
        if isinstance(event.record, TransitionRecord):
            if event.record.dest is PolicyState.SWAPPING:
                begin = event.time
            elif event.record.dest is PolicyState.SERVING:
                return float(event.time - begin)
    raise AssertionError("the update left no transitions")


async def measure_tiny(num_pages: int, cached: bool, rounds: int) -> float:
    """Median milliseconds of an update on a tiny model, with all pages cached or none."""
    model = tiny_checkpoint(0, num_hidden_layers=1, num_key_value_heads=1, hidden_size=8, head_dim=2)
    config = EngineConfig(num_pages=num_pages, page_size=PAGE_SIZE, max_num_seqs=4, max_model_len=512)
    tensors = random_tensors(model.spec, 1)
    spans = []
    async with Engine(model, config) as engine:
        for _ in range(rounds):
            if cached:
                fill(engine, num_pages)
            start = time.perf_counter()
            ack = await engine.update_weights(tensors)
            spans.append(time.perf_counter() - start)
            assert ack.pages_invalidated == (num_pages // CHAIN * CHAIN if cached else 0)
    return 1e3 * median(spans)


def fill(engine: Engine, num_pages: int) -> None:
    """Index chains of pages until the pool is full, as if so many prompts had been computed."""
    parts = engine._opened()
    lease = parts.gate.try_lease()
    assert lease is not None
    with lease:
        for chain in range(num_pages // CHAIN):
            tokens = [chain % 64, chain // 64 % 64, chain // 4096 % 64, 0] + [1] * (PAGE_SIZE * CHAIN - 4)
            state = parts.cache.alloc(lease, f"fill {chain}", tokens)
            parts.cache.publish(lease, state, tokens, len(tokens))
            parts.cache.free(lease, state)


def measure(quick: bool) -> list[Figure]:
    rounds = 3 if quick else 10
    pause_ms, ratio = anyio.run(measure_smollm2, rounds)
    pages = 100_000 if quick else 1_000_000
    empty_ms = anyio.run(measure_tiny, pages, False, rounds)
    full_ms = anyio.run(measure_tiny, pages, True, 3)
    return [
        at_most("pause_ms", pause_ms, "ms", 10.0),
        at_most("call_to_ack_ratio", ratio, "", 2.0),
        plain("ack_ms_0_pages", empty_ms, "ms"),
        plain("ack_ms_1m_pages", full_ms, "ms"),
        at_most("ack_ms_difference", abs(full_ms - empty_ms), "ms", 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, 100,000 pages")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    report(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
