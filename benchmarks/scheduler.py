"""Cost of everything around the model: planning, applying, events, and the hand-over to the engine's thread.

    python -m benchmarks.scheduler [--quick] [--json FILE]

`overhead_share` is the part of a step of SmolLM2 at batch 64 in which nothing computes. `flatness` is the same time per
request, with a tiny model, 10,000 requests queued against 100. `ticker_gap` is how late a task that sleeps 5 ms wakes
at worst, beside a long prefill and 200 decode steps. Another busy process on the machine shows in the last one first.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from attrs import Factory, define

from aengine import Engine, EngineConfig, SamplingParams
from aengine.testing import tiny_checkpoint
from benchmarks.report import Figure, at_most, plain, report

BATCH = 64
TICK = 0.005


@define(eq=False)
class Clock:
    """Stands in front of the runner, and notes when each step began and ended in the engine's thread."""

    runner: Any
    begun: list[float] = Factory(list)
    ended: list[float] = Factory(list)
    num_draws: list[int] = Factory(list)

    @classmethod
    def of(cls, engine: Engine) -> Clock:
        scheduler = engine._opened().scheduler
        scheduler._runner = clock = cls(scheduler._runner)
        return clock

    def step(self, inputs: Any, copies: Any, rows: Any, draws: Any) -> Any:
        self.begun.append(time.perf_counter())
        self.num_draws.append(len(draws))
        try:
            return self.runner.step(inputs, copies, rows, draws)
        finally:
            self.ended.append(time.perf_counter())

    def seconds(self) -> float:
        return sum(self.ended) - sum(self.begun)


async def overhead(steps: int) -> list[Figure]:
    config = EngineConfig(max_num_seqs=BATCH, max_model_len=256, prefix_caching=False)
    async with Engine.from_pretrained("smollm2-135m", config) as engine:
        clock = Clock.of(engine)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(1000, size=16).tolist() for _ in range(BATCH)]
        await engine.generate_batch(prompts, SamplingParams(max_tokens=steps, seed=0, ignore_eos=True))
    full = [at for at in range(len(clock.begun) - 1) if clock.num_draws[at] == clock.num_draws[at + 1] == BATCH]
    computing = np.array([clock.ended[at] - clock.begun[at] for at in full])
    between = np.array([clock.begun[at + 1] - clock.ended[at] for at in full])
    return [
        plain("step_at_batch_64", float(np.median(computing)) * 1e3, "ms"),
        plain("overhead_per_step", float(np.median(between)) * 1e3, "ms"),
        at_most("overhead_share", float(between.sum() / (between.sum() + computing.sum())), "", 0.03),
    ]


async def seconds_per_request(num_requests: int, rounds: int) -> float:
    """The least of some rounds, without what the model computes."""
    config = EngineConfig(page_size=16, num_pages=256, max_num_seqs=BATCH, prefix_caching=False)
    best = float("inf")
    async with Engine(tiny_checkpoint(), config) as engine:
        clock = Clock.of(engine)
        prompts = [[1 + at % 60, at // 60 % 60, at % 7] for at in range(num_requests)]
        for _ in range(rounds):
            gc.collect()
            computed, begun = clock.seconds(), time.perf_counter()
            await engine.generate_batch(prompts, SamplingParams(max_tokens=1, seed=0))
            spent = time.perf_counter() - begun - (clock.seconds() - computed)
            best = min(best, spent / num_requests)
    return best


async def flatness(many: int) -> list[Figure]:
    few_cost = await seconds_per_request(100, rounds=30)
    many_cost = await seconds_per_request(many, rounds=3)
    return [
        plain("request_of_100", few_cost * 1e6, "us"),
        plain(f"request_of_{many}", many_cost * 1e6, "us"),
        at_most("flatness", many_cost / few_cost, "", 1.3),
    ]


async def ticker_gap() -> list[Figure]:
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            begun = time.perf_counter()
            await anyio.sleep(TICK)
            gaps.append(time.perf_counter() - begun - TICK)

    async with Engine(tiny_checkpoint(), EngineConfig(max_num_seqs=8)) as engine:
        await engine.generate([1, 2], SamplingParams(max_tokens=2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            await engine.generate([at % 64 for at in range(300)], SamplingParams(max_tokens=200, seed=0))
            tasks.cancel_scope.cancel()
    return [at_most("ticker_gap", max(gaps) * 1e3, "ms", 50.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, and 2,000 requests in place of 10,000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures = [
        *anyio.run(overhead, 12 if options.quick else 64),
        *anyio.run(flatness, 2_000 if options.quick else 10_000),
        *anyio.run(ticker_gap),
    ]
    report(figures, options.json)


if __name__ == "__main__":
    main()
