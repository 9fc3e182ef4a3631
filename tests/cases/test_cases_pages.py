"""Field cases F4, G, H and I: page accounting, prefix semantics and capacity."""

from __future__ import annotations

import random

import anyio
import pytest
from case_support import (
    GREEDY,
    PAGE,
    WEIGHTS,
    assert_made_by,
    both_backends,
    new_engine,
    same_samples,
    solo,
)

from aengine import Engine, PromptError, RequestOutput, SamplingParams
from aengine.errors import RequestFailedError
from aengine.testing import FaultInjector, until


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages.live) == (0, 0, 0)
    assert stats.pages.cached + stats.pages.free == stats.pages.total


@both_backends
async def test_f4_a_failed_prefill_leaves_nothing_to_match() -> None:
    prompt = list(range(1, 5 * PAGE + 1))
    async with new_engine(max_num_batched_tokens=PAGE) as engine:
        faults = FaultInjector()
        faults.attach(engine)
        faults.fail("forward", at=3)
        with pytest.raises(RequestFailedError, match="injected"):
            await engine.generate(prompt, GREEDY)
        assert_idle(engine)
        again = await engine.generate(prompt, GREEDY)
        assert again.num_cached_tokens <= 2 * PAGE
        assert_made_by(again, weights=0, version=0)


@both_backends
async def test_f4_an_aborted_prefill_publishes_no_more_than_it_computed() -> None:
    prompt = list(range(1, 5 * PAGE + 1))
    async with new_engine(max_num_batched_tokens=PAGE) as engine:

        def abort_in_third_step(call: int) -> None:
            if call == 3:
                anyio.from_thread.run_sync(engine._opened().scheduler.abort, "it", token=engine._token)

        faults = FaultInjector()
        faults.attach(engine)
        faults.call("forward", abort_in_third_step)
        aborted = await engine.generate(prompt, GREEDY, request_id="it")
        assert (aborted.outputs[0].finish_reason, aborted.outputs[0].token_ids) == ("abort", ())
        again = await engine.generate(prompt, GREEDY)
        assert again.num_cached_tokens <= 2 * PAGE
        assert_made_by(again, weights=0, version=0)


@both_backends
async def test_g1_pages_are_conserved_over_a_long_mixed_run() -> None:
    draw = random.Random(1)
    prefixes = [[draw.randrange(64) for _ in range(n)] for n in (PAGE - 1, PAGE, 2 * PAGE, 3 * PAGE + 1)]
    async with new_engine(num_pages=20, max_num_seqs=8) as engine:

        async def run(number: int) -> None:
            prompt = draw.choice(prefixes) + [draw.randrange(64) for _ in range(draw.randrange(1, 2 * PAGE))]
            params = SamplingParams(n=draw.choice([1, 1, 2, 3]), max_tokens=draw.randrange(1, 4 * PAGE), seed=number)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.generate, prompt, params)
                if draw.random() < 0.2:
                    for _ in range(draw.randrange(6)):
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()

        limiter = anyio.CapacityLimiter(20)

        async def limited(number: int) -> None:
            async with limiter:
                await run(number)

        async with anyio.create_task_group() as tasks:
            for number in range(300):
                tasks.start_soon(limited, number)
        await until(lambda: not engine.stats().pages.live)
        assert_idle(engine)
        assert engine.stats().num_preemptions > 0
        await engine.update_weights(WEIGHTS[1])
        pages = engine.stats().pages
        assert pages.free == pages.total


@both_backends
async def test_g5_host_memory_stays_bounded() -> None:
    async with new_engine(num_pages=16, check_integrity=False) as engine:
        parts = engine._opened()
        for round_number in range(3):
            prompts = [[i % 64, i // 64 % 64, round_number, 1, 2, 3] for i in range(300)]
            await engine.generate_batch(prompts, SamplingParams(max_tokens=1, seed=0))
            parts.cache.check_integrity()
            assert parts.cache.stats().num_indexed <= 16
            assert not parts.scheduler._requests
            assert_idle(engine)


@pytest.mark.parametrize("length", [PAGE, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
@both_backends
async def test_h1_a_wholly_cached_prompt_gives_the_same_numbers(length: int) -> None:
    prompt = list(range(7, 7 + length))
    params = SamplingParams(max_tokens=6, seed=9)
    async with new_engine() as engine:
        runs = [await engine.generate(prompt, params) for _ in range(3)]
    assert all(same_samples(run, runs[0]) for run in runs)
    assert same_samples(runs[0], await solo(prompt, params))
    for run in runs[1:]:
        assert run.num_cached_tokens == (length - 1) // PAGE * PAGE < length


@both_backends
async def test_h2_twins_in_one_batch_share_one_chain_afterwards() -> None:
    prompt = list(range(40, 40 + 2 * PAGE + 2))
    async with new_engine() as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, list(range(30)), SamplingParams(max_tokens=30, seed=1))
            params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(4)]
            twins = await engine.generate_batch([prompt] * 4, params)
        for twin, own in zip(twins, params, strict=True):
            assert same_samples(twin, await solo(prompt, own))
        cached = await engine.generate(prompt, GREEDY)
        assert cached.num_cached_tokens == 2 * PAGE
        assert_idle(engine)


@both_backends
async def test_h3_the_last_page_of_a_chain_goes_first() -> None:
    chain = list(range(1, 3 * PAGE + 1))
    async with new_engine(num_pages=3) as engine:
        await engine.generate(chain, SamplingParams(max_tokens=1, seed=0))
        assert engine.stats().pages.cached == 3
        await engine.generate([60, 61], SamplingParams(max_tokens=1, seed=0))
        assert engine.stats().pages.cached == 2
        again = await engine.generate([*chain[: 2 * PAGE], 9], SamplingParams(max_tokens=1, seed=0))
        assert again.num_cached_tokens == 2 * PAGE


@both_backends
async def test_h6_a_partly_full_tail_is_copied_on_write() -> None:
    prompt = list(range(11, 11 + 2 * PAGE + 2))
    params = SamplingParams(n=4, seed=21, max_tokens=10)
    async with new_engine() as engine:
        output = await engine.generate(prompt, params)
    assert same_samples(output, await solo(prompt, params))
    assert len({sample.token_ids for sample in output.outputs}) == 4
    assert_made_by(output, weights=0, version=0)


@both_backends
async def test_i1_what_can_never_fit_is_refused_with_need_and_capacity() -> None:
    async with new_engine(num_pages=4) as engine:
        small = [1, 2, 3]
        for length, fits in [(15, True), (16, True), (17, False), (40, False)]:
            prompt = list(range(length))
            if fits:
                output = await engine.generate(prompt, GREEDY)
                assert len(output.outputs[0].token_ids) == 17 - length
            else:
                with pytest.raises(PromptError, match=rf"{length} tokens.*16"):
                    await engine.generate(prompt, GREEDY)
            assert len((await engine.generate(small, GREEDY)).outputs[0].token_ids) == 8
        assert_idle(engine)


@both_backends
async def test_i3_preempted_requests_carry_on_as_if_nothing_had_been() -> None:
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    params = SamplingParams(temperature=0, max_tokens=3 * PAGE)
    async with new_engine(num_pages=9) as engine:
        streamed: dict[int, list[int]] = {}
        outputs: dict[int, RequestOutput] = {}

        async def follow(number: int) -> None:
            async with engine.stream(prompts[number], params) as stream:
                streamed[number] = [token async for delta in stream for token in delta.token_ids]
                outputs[number] = await stream.output()

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(follow, number)
        assert engine.stats().num_preemptions > 0
        assert engine.stats().prefix.hit_tokens == 0
        assert_idle(engine)
    for number, output in outputs.items():
        assert same_samples(output, await solo(prompts[number], params))
        assert streamed[number] == list(output.outputs[0].token_ids)
        assert_made_by(output, weights=0, version=0)
    assert sum(output.num_preemptions for output in outputs.values()) > 0
