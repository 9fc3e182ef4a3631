"""Tokens a second of whole rollouts, as a share of the reference pass (`benchmarks.reference`) timed in between.

    python -m benchmarks.throughput [--quick] [--json FILE] [--model NAME] [--dtype float32]

`ratio_1`, `ratio_32`, `ratio_128`: one sample; 4 and 16 prompts of 60 tokens, 40 of them shared, with 8 samples each.
128 new tokens, temperature 1, both log-probabilities; from submit to the last token, prefill included. Every few steps
a reference pass over as many rows runs in the engine's thread; its time is taken out, and its median is the yardstick.
So both see the same machine. Bits do not depend on company in any of these runs.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
from attrs import Factory, define, evolve, frozen

from aengine import Engine, EngineConfig, RequestOutput, SamplingParams
from aengine.audit.oracle import oracle_logprobs
from aengine.kernels.formats import FLOAT_TYPES
from aengine.model.checkpoint import Checkpoint
from aengine.model.matching import match_tensors
from benchmarks.reference import ReferencePass
from benchmarks.report import Figure, at_least, at_most, plain, report

GOALS = {1: 0.92, 32: 1.0, 128: 0.9}
PAGE_SIZE = 16


@define(eq=False)
class Interleaved:
    """Stands in front of the runner, and runs a reference pass after every few steps."""

    runner: Any
    reference: ReferencePass
    num_rows: int
    every: int
    passes: list[float] = Factory(list)
    spent: float = 0.0
    num_steps: int = 0

    @classmethod
    def of(cls, engine: Engine, reference: ReferencePass, num_rows: int, every: int) -> Interleaved:
        scheduler = engine._opened().scheduler
        scheduler._runner = interleaved = cls(scheduler._runner, reference, num_rows, every)
        return interleaved

    def step(self, *arguments: Any) -> Any:
        result = self.runner.step(*arguments)
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            begun = time.perf_counter()
            self.passes.append(self.reference.seconds(self.num_rows))
            self.spent += time.perf_counter() - begun
        return result


@frozen
class Bench:
    checkpoint: Checkpoint
    dtype: str
    quick: bool

    @property
    def num_tokens(self) -> int:
        return 16 if self.quick else 128

    def params(self, **changes: Any) -> SamplingParams:
        return evolve(SamplingParams(max_tokens=self.num_tokens, ignore_eos=True, seed=0), **changes)

    def engine(self, **fields: Any) -> Engine:
        config = {"page_size": PAGE_SIZE, "max_model_len": 2048, "dtype": self.dtype, **fields}
        return Engine(self.checkpoint, EngineConfig(**config))

    def prompts(self, count: int, length: int, shared: int) -> list[list[int]]:
        rng = np.random.default_rng(length)
        vocabulary = self.checkpoint.spec.vocab_size
        beginning = rng.integers(vocabulary, size=shared).tolist()
        return [beginning + rng.integers(vocabulary, size=length - shared).tolist() for _ in range(count)]

    async def shapes(self) -> list[Figure]:
        reference = ReferencePass(self.checkpoint.spec, FLOAT_TYPES[self.dtype])
        figures = []
        for num_prompts, n in ((1, 1), (4, 8), (16, 8)):
            figures += await self.shape(reference, num_prompts, n)
        return figures

    async def shape(self, reference: ReferencePass, num_prompts: int, n: int) -> list[Figure]:
        rows = num_prompts * n
        async with self.engine() as engine:
            await engine.generate_batch(self.prompts(num_prompts, 8, 0), self.params(n=n, max_tokens=2))
            interleaved = Interleaved.of(engine, reference, rows, every=max(1, self.num_tokens // 16))
            begun = time.perf_counter()
            outputs = await engine.generate_batch(self.prompts(num_prompts, 60, 40), self.params(n=n))
            seconds = time.perf_counter() - begun - interleaved.spent
        one_pass = statistics.median(interleaved.passes)
        ratio = self.num_tokens * one_pass / seconds
        goal = GOALS[rows]
        figures = [
            plain(f"tokens_{rows}", rows * self.num_tokens / seconds, "tokens/s"),
            plain(f"reference_{rows}", rows / one_pass, "tokens/s"),
            at_least(f"ratio_{rows}", ratio, "", goal)
            if self.dtype == "float32"
            else plain(f"ratio_{rows}", ratio, ""),
        ]
        return [*figures, *self.accuracy(outputs[0])] if rows == 1 and self.dtype == "float32" else figures

    def accuracy(self, output: RequestOutput) -> list[Figure]:
        """Of raw log-probabilities, from a plain float32 forward pass."""
        tensors = match_tensors(self.checkpoint.spec, self.checkpoint.tensors)
        (sample,) = output.outputs
        expected = oracle_logprobs(self.checkpoint.spec, tensors, output.prompt_token_ids, sample.token_ids)
        difference = (torch.tensor(sample.raw_logprobs) - expected).abs().max()
        return [at_most("logprob_difference", float(difference), "nats", 1e-4)]

    async def long_prompts(self) -> list[Figure]:
        """Time to the first token of prompts of 1,024 tokens, 768 of them shared with one that was there before."""
        first, *others = self.prompts(3 if self.quick else 6, 1024, 768)
        seconds = {}
        for caching in (True, False):
            async with self.engine(prefix_caching=caching) as engine:
                await engine.generate(first, self.params(max_tokens=1))
                begun = time.perf_counter()
                for prompt in others:
                    await engine.generate(prompt, self.params(max_tokens=1))
                seconds[caching] = (time.perf_counter() - begun) / len(others)
        return [
            plain("first_token_cached", seconds[True] * 1e3, "ms"),
            plain("first_token_cold", seconds[False] * 1e3, "ms"),
            at_least("prefix_cache_gain", seconds[False] / seconds[True], "x", 3.0),
        ]

    async def mixed(self) -> list[Figure]:
        """Prompts and samples of many lengths, as where most samples end by themselves."""
        rng = np.random.default_rng(7)
        count = 16 if self.quick else 128
        prompts = [self.prompts(1, int(length), 0)[0] for length in rng.integers(8, 200, size=count)]
        params = [self.params(max_tokens=int(limit)) for limit in rng.integers(4, self.num_tokens, size=count)]
        async with self.engine() as engine:
            await engine.generate(prompts[0], self.params(max_tokens=2))
            begun = time.perf_counter()
            outputs = await engine.generate_batch(prompts, params)
            seconds = time.perf_counter() - begun
        sampled = sum(len(output.outputs[0].token_ids) for output in outputs)
        return [plain("mixed", sampled / seconds, "tokens/s")]

    async def under_pressure(self) -> list[Figure]:
        """128 samples at once: alone, with ten times as many in the queue, and in a pool that is too small for them."""
        tokens = max(8, self.num_tokens // 4)
        shared = 60 // PAGE_SIZE
        own = -(-(60 + tokens) // PAGE_SIZE) - shared
        rounds = 2 if self.quick else 10
        alone = await self.rate(1, tokens)
        queued = await self.rate(rounds, tokens)
        num_pages = 16 * shared + 128 * own * 4 // 5  # a fifth of the samples has no room at the end
        small = await self.rate(1, tokens, num_pages=num_pages, prefix_caching=False)
        return [
            plain("tokens_undisturbed", alone[0], "tokens/s"),
            at_least("long_queue", queued[0] / alone[0], "", 0.9),
            plain("preempted_share", small[1] / 128, ""),
            at_least("small_pool", small[0] / alone[0], "", 0.7),
        ]

    async def rate(self, rounds: int, tokens: int, **fields: Any) -> tuple[float, int]:
        """Tokens a second, and preemptions."""
        async with self.engine(max_num_seqs=128, **fields) as engine:
            await engine.generate([1, 2], self.params(max_tokens=2))
            begun = time.perf_counter()
            prompts = self.prompts(16 * rounds, 60, 40)
            await engine.generate_batch(prompts, self.params(n=8, max_tokens=tokens))
            seconds = time.perf_counter() - begun
            return 128 * rounds * tokens / seconds, engine.stats().num_preemptions

    async def run(self) -> list[Figure]:
        parts = (self.shapes, self.long_prompts, self.mixed, self.under_pressure)
        figures = [figure for part in parts for figure in await part()]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return [*figures, plain("peak_memory", peak / 2**30, "GiB")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute instead of many")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=sorted(FLOAT_TYPES))
    options = parser.parse_args()
    bench = Bench(Engine.read_pretrained(options.model), options.dtype, options.quick)
    report(anyio.run(partial(Bench.run, bench)), options.json)


if __name__ == "__main__":
    main()
