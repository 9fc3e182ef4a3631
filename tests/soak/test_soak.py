"""Everything at once, for long: mixed lengths, priorities, aborts, faults and updates, in a pool too small for it.

A tenth of it runs by default; `AENGINE_SOAK=full` runs all of it, 20,000 requests.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
from collections import Counter

import anyio
import pytest
from attrs import Factory, define

from aengine import Engine, EngineConfig, RequestOutput, SamplingParams
from aengine.errors import RequestFailedError
from aengine.signal import Signal
from aengine.testing import FaultInjector, random_tensors, tiny_checkpoint, until

NUM_REQUESTS, NUM_UPDATES = (20_000, 40) if os.environ.get("AENGINE_SOAK") == "full" else (2_000, 4)
NUM_CALLERS = 150
MODEL = tiny_checkpoint(0)
WEIGHTS = [dict(MODEL.tensors), random_tensors(MODEL.spec, 1)]
CONFIG = EngineConfig(
    page_size=4,
    num_pages=40,
    max_num_seqs=24,
    max_num_batched_tokens=48,
    max_num_queued_reqs=100,
    check_integrity=True,  # pages are conserved at every step, or the engine dies
)
PREFIXES = [[7] * 5, [8] * 9, list(range(20, 32)), []]


@define(eq=False)
class Soak:
    engine: Engine
    draw: random.Random
    outcomes: Counter[str] = Factory(Counter)
    versions: set[int] = Factory(set)
    ended: Signal = Factory(Signal)
    num_begun: int = 0
    num_updates: int = 0

    async def run(self, num_requests: int, num_updates: int) -> None:
        """`num_requests` requests from many callers, updates spread evenly among them; returns when all is idle."""
        last = self.num_begun + num_requests
        async with anyio.create_task_group() as tasks:
            for _ in range(NUM_CALLERS):
                tasks.start_soon(self._call, last)
            for number in range(num_updates):
                await self._update_after(last - num_requests + (number + 1) * num_requests // (num_updates + 1))
        await until(lambda: not self.engine.stats().pages.live)

    async def _update_after(self, begun: int) -> None:
        while self.num_begun < begun:
            await self.ended.wait()
        mode = ("wait", "keep", "abort")[self.num_updates % 3]
        self.num_updates += 1
        await self.engine.update_weights(WEIGHTS[self.num_updates % 2], mode=mode)  # type: ignore[arg-type]

    async def _call(self, last: int) -> None:
        while self.num_begun < last:
            self.num_begun += 1
            self.outcomes[await self._one()] += 1
            self.ended.set()

    async def _one(self) -> str:
        """One request, by one of the ways to make it and perhaps one of the ways to leave it; returns how it ended."""
        draw = self.draw
        prompt = draw.choice(PREFIXES) + [draw.randrange(64) for _ in range(draw.randrange(1, 10))]
        params = SamplingParams(n=draw.choice([1, 1, 1, 2, 3]), max_tokens=draw.randrange(1, 13))
        leave = draw.choice(["abort", "cancel", "break"]) if draw.random() < 0.2 else None
        try:
            if leave == "break" or draw.random() < 0.3:
                return await self._stream(prompt, params, draw.randrange(3), leave)
            return await self._generate(prompt, params, draw.randrange(3), leave)
        except RequestFailedError as failed:
            return self._account_for_failure(failed)

    async def _generate(self, prompt: list[int], params: SamplingParams, priority: int, leave: str | None) -> str:
        request_id = f"own-{self.num_begun}-{self.draw.random()}"
        outcome = "left"
        async with anyio.create_task_group() as tasks:
            if leave is not None:
                tasks.start_soon(self._leave, tasks.cancel_scope, leave, request_id, self.draw.randrange(40))
            try:
                output = await self.engine.generate(prompt, params, request_id=request_id, priority=priority)
                outcome = self._account(output, params)
            except RequestFailedError as failed:
                outcome = self._account_for_failure(failed)
            tasks.cancel_scope.cancel()
        return outcome

    async def _leave(self, scope: anyio.CancelScope, leave: str, request_id: str, turns: int) -> None:
        for _ in range(turns):
            await self.ended.wait()
        if leave == "cancel":
            scope.cancel()
        else:
            await self.engine.abort(request_id)

    async def _stream(self, prompt: list[int], params: SamplingParams, priority: int, leave: str | None) -> str:
        counts: Counter[int] = Counter()
        async with self.engine.stream(prompt, params, priority=priority) as stream:
            async for delta in stream:
                counts[delta.index] += len(delta.token_ids)
                if leave is not None and counts.total() >= 3:
                    return "left"
            output = await stream.output()
        assert [counts[sample.index] for sample in output.outputs] == [len(s.token_ids) for s in output.outputs]
        return self._account(output, params)

    def _account_for_failure(self, failed: RequestFailedError) -> str:
        assert "injected" in failed.reason
        return "failed"

    def _account(self, output: RequestOutput, params: SamplingParams) -> str:
        for sample in output.outputs:
            assert len(sample.logprobs) == len(sample.token_versions) == len(sample.token_ids)
            assert len(sample.token_ids) == params.max_tokens or sample.finish_reason == "abort"
            self.versions |= set(sample.token_versions)
        return "aborted" if any(sample.finish_reason == "abort" for sample in output.outputs) else "finished"


def memory() -> tuple[int, int]:
    """Objects that are alive, and the most bytes the process has held."""
    gc.collect()
    return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_every_request_is_accounted_for_after_a_long_time_of_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="aengine")  # what pytest captures it keeps
    async with Engine(MODEL, CONFIG) as engine:
        faults = FaultInjector(seed=5)
        faults.attach(engine)
        faults.fail_some("forward", share=0.003)
        faults.fail_some("allocation", share=0.004)
        soak = Soak(engine, random.Random(11))
        await soak.run(NUM_REQUESTS // 2, NUM_UPDATES // 2)
        half = memory()
        await soak.run(NUM_REQUESTS // 2, NUM_UPDATES // 2)
        whole = memory()

        assert soak.outcomes.total() == NUM_REQUESTS
        shares = {outcome: count / NUM_REQUESTS for outcome, count in soak.outcomes.items()}
        print(shares, engine.stats())
        assert shares["finished"] > 0.5 and 0.05 < shares["left"] + shares["aborted"] < 0.35
        assert 0.01 < shares["failed"] < 0.15, "faults strike about one request in twenty"
        assert soak.versions == set(range(NUM_UPDATES + 1)), "requests ran under every version"

        stats = engine.stats()
        assert stats.updates["committed"].count == NUM_UPDATES == engine.policy_version
        assert stats.num_preemptions > 0 and stats.prefix.hit_tokens > 0 and stats.num_reprefilled_tokens > 0
        assert (stats.num_running, stats.num_waiting, stats.pages.live) == (0, 0, 0)
        assert stats.pages.cached + stats.pages.free == stats.pages.total
        assert not engine._opened().scheduler._requests
        await engine.check_health()

        assert whole[0] - half[0] < 1000, "no object is left behind by a request"
        assert whole[1] - half[1] < 16 * 2**20, "nor any memory"
        faults.clear()
        ours = await engine.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=0))
    async with Engine(MODEL, CONFIG) as fresh:
        await fresh.update_weights(WEIGHTS[NUM_UPDATES % 2])
        theirs = await fresh.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=0))
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs
