"""What the case tests share: one tiny model, three independent sets of weights, an oracle, and solo runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest
import torch

from aengine import CompletionOutput, Engine, EngineConfig, RequestOutput, SamplingParams
from aengine.audit.oracle import oracle_logprobs
from aengine.testing import random_tensors, tiny_checkpoint, until

PAGE = 4
MODEL = tiny_checkpoint(0)
WEIGHTS = {0: dict(MODEL.tensors), 1: random_tensors(MODEL.spec, 1), 2: random_tensors(MODEL.spec, 2)}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def new_engine(model: Any = MODEL, **fields: Any) -> Engine:
    """An engine on the tiny model that proves its page accounting after every step."""
    return Engine(model, EngineConfig(**{"page_size": PAGE, "num_pages": 64, "check_integrity": True, **fields}))


def expected_logprobs(
    sample: CompletionOutput, prompt: Sequence[int], weights: int, temperature: float = 1.0
) -> torch.Tensor:
    return oracle_logprobs(MODEL.spec, WEIGHTS[weights], prompt, sample.token_ids, temperature=temperature)


def assert_made_by(output: RequestOutput, weights: int, version: int) -> None:
    """Every token is labelled with `version` and has the log-probability that those weights give it."""
    for sample in output.outputs:
        assert set(sample.token_versions) == {version} and sample.is_single_policy
        expected = expected_logprobs(sample, output.prompt_token_ids, weights)
        torch.testing.assert_close(torch.tensor(sample.raw_logprobs), expected, atol=1e-4, rtol=0)


async def solo(prompt: Sequence[int], params: SamplingParams, weights: int = 0) -> RequestOutput:
    """The same request alone in a fresh engine with a big pool and the prefix cache off."""
    async with new_engine(num_pages=256, prefix_caching=False) as engine:
        if weights:
            await engine.update_weights(WEIGHTS[weights])
        return await engine.generate(prompt, params)


def same_samples(a: RequestOutput, b: RequestOutput) -> bool:
    """Equal ids and equal bits in both log-probabilities."""
    return [(s.token_ids, s.logprobs, s.raw_logprobs) for s in a.outputs] == [
        (s.token_ids, s.logprobs, s.raw_logprobs) for s in b.outputs
    ]


async def until_idle(engine: Engine) -> None:
    """Wait until all pages are given back; a leak would run into the test's timeout."""
    await until(lambda: not engine.stats().pages.live)
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)


async def until_running(engine: Engine, count: int = 1) -> None:
    await until(lambda: engine.stats().num_running >= count)


def both_backends(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test under asyncio and under trio."""

    @pytest.mark.parametrize("backend", ["asyncio", "trio"])
    def run(backend: str, **arguments: Any) -> None:
        anyio.run(functools.partial(test, **arguments), backend=backend)

    own = inspect.signature(test)
    backend = inspect.Parameter("backend", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = own.replace(parameters=[backend, *own.parameters.values()])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class HookedRunner:
    """Calls `hook(number)` before each step in the worker thread, counted from 1; the hook may raise."""

    def __init__(self, engine: Engine, hook: Callable[[int], None]) -> None:
        scheduler = engine._opened().scheduler
        self._runner, self._hook, self._calls = scheduler._runner, hook, 0
        scheduler._runner = self  # type: ignore[assignment]

    def step(self, *arguments: Any) -> Any:
        self._calls += 1
        self._hook(self._calls)
        return self._runner.step(*arguments)


def raise_at(number: int, error: Exception) -> Callable[[int], None]:
    def hook(call: int) -> None:
        if call == number:
            raise error

    return hook
