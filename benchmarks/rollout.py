"""Tokens a second of whole rollouts: one sample, groups of eight, and a long prompt, cold and from the prefix cache.

    python -m benchmarks.rollout [--quick] [--json FILE] [--model NAME]

Greedy samples that ignore the end of text, so that every run computes the same number of tokens. The engine is warmed
up first: compiled kernels are loaded by then. Another busy process on the machine shows in every figure.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import anyio

from aengine import Engine, SamplingParams
from benchmarks.report import Figure, plain, report

PROMPT_LENGTH = 32
LONG_PROMPT = 1024


def prompts(count: int, length: int, first: int) -> list[list[int]]:
    """Token ids that no two prompts of a run share in their first page."""
    return [[1000 + (first + number) * 7 % 1000, *range(100, 99 + length)] for number in range(count)]


async def seconds(engine: Engine, asked: list[list[int]], n: int, max_tokens: int) -> float:
    params = SamplingParams(n=n, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    await engine.generate_batch(asked, params)
    return time.perf_counter() - started


async def measure(model: str, quick: bool) -> list[Figure]:
    groups, tokens = (2, 8) if quick else (8, 32)
    async with Engine.from_pretrained(model) as engine:
        await seconds(engine, prompts(1, PROMPT_LENGTH, 0), 2, 2)
        alone = await seconds(engine, prompts(1, PROMPT_LENGTH, 1), 1, tokens)
        grouped = await seconds(engine, prompts(groups, PROMPT_LENGTH, 2), 8, tokens)
        long = prompts(1, LONG_PROMPT, 100)
        cold = await seconds(engine, long, 1, 1)
        cached = await seconds(engine, long, 1, 1)
    return [
        plain("one_sample", tokens / alone, "tokens/s"),
        plain("groups_of_8", groups * 8 * tokens / grouped, "tokens/s"),
        plain("prefill", LONG_PROMPT / cold, "tokens/s"),
        plain("same_prompt_cached", cached * 1000, "ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parser.parse_args()
    report(anyio.run(partial(measure, arguments.model, arguments.quick)), arguments.json)


if __name__ == "__main__":
    main()
