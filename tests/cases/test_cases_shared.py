"""A module shared with the engine: written in `weight_update()` bodies, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from case_support import GREEDY, PAGE, both_backends, until_idle
from transformers import LlamaConfig, LlamaForCausalLM

from aengine import Engine, EngineConfig, EngineInvalidatedError, RequestOutput, SamplingParams, WeightUpdateError
from aengine.audit.oracle import oracle_logprobs
from aengine.audit.policies import policies_of_snapshots
from aengine.audit.record import SampleRecord, rollout_header, sample_records
from aengine.audit.replay import Replayer
from aengine.audit.snapshots import SnapshotStore
from aengine.audit.verdict import Reproduced
from aengine.errors import InsideWeightUpdateError, RequestFailedError
from aengine.model.checkpoint import checkpoint_from_module
from aengine.model.spec import ModelSpec
from aengine.rl import PolicyTracker
from aengine.testing import TINY, until
from statemachines.policy import PolicyState

SPEC = ModelSpec.from_config(TINY)


def new_module(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{k: v for k, v in TINY.items() if k != "architectures"}))


def share(module: LlamaForCausalLM, **fields: Any) -> Engine:
    config = EngineConfig(page_size=PAGE, num_pages=64, check_integrity=True, **fields)
    return Engine(module, config, share=True)


def take_step(module: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(input_ids=torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[1, 2, 3, 4]])).loss.backward()
    optimizer.step()


def assert_current(module: LlamaForCausalLM, output: RequestOutput, version: int) -> None:
    sample = output.outputs[0]
    assert set(sample.token_versions) == {version}
    tensors = {name: t for name, t in module.state_dict().items() if name != "lm_head.weight"}
    expected = oracle_logprobs(SPEC, tensors, output.prompt_token_ids, sample.token_ids)
    torch.testing.assert_close(torch.tensor(sample.raw_logprobs), expected, atol=1e-4, rtol=0)


@both_backends
async def test_a1_an_optimizer_step_in_a_body_is_a_version_and_nothing_is_copied() -> None:
    module = new_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    tracker = PolicyTracker(optimizer)
    prompt = list(range(3 * PAGE + 1))
    async with share(module) as engine:
        weights = engine._opened().runner.decoder.weights
        assert weights.embedding.data_ptr() == module.model.embed_tokens.weight.data_ptr()
        assert engine.stats().numerics == "invariant"
        assert_current(module, await engine.generate(prompt, GREEDY), version=0)
        async with engine.weight_update(train_step=lambda: tracker.train_step) as update:
            assert engine.state is PolicyState.SWAPPING
            take_step(module, optimizer)
        assert (update.ack.policy_version, update.ack.train_step) == (1, 1)
        assert update.ack.digest == await engine.weight_checksum()
        fresh = await engine.generate(prompt, GREEDY)
        assert fresh.num_cached_tokens == 0
        assert_current(module, fresh, version=1)
        assert module.training


@both_backends
async def test_a_skipped_step_is_an_acknowledged_no_op() -> None:
    async with share(new_module()) as engine:
        await engine.generate(list(range(2 * PAGE + 1)), GREEDY)
        async with engine.weight_update() as update:
            pass
        assert (update.ack.policy_version, update.ack.pages_invalidated, engine.policy_version) == (0, 0, 0)
        assert (await engine.generate(list(range(2 * PAGE + 1)), GREEDY)).num_cached_tokens == 2 * PAGE


@pytest.mark.parametrize("when", ["before", "after"])
@both_backends
async def test_an_exception_in_a_body_fences_unless_nothing_was_written(when: str) -> None:
    module = new_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    async with share(module) as engine:
        with pytest.raises(ZeroDivisionError):
            async with engine.weight_update():
                if when == "after":
                    take_step(module, optimizer)
                raise ZeroDivisionError
        if when == "before":
            assert (engine.state, engine.policy_version) == (PolicyState.SERVING, 0)
            assert_current(module, await engine.generate([1, 2], GREEDY), version=0)
            return
        assert (engine.state, engine.policy_version) == (PolicyState.INVALIDATED, None)
        with pytest.raises(EngineInvalidatedError):
            await engine.generate([1, 2], GREEDY)
        async with engine.weight_update() as update:
            pass
        assert update.ack.policy_version == 1
        assert_current(module, await engine.generate([1, 2], GREEDY), version=1)


@both_backends
async def test_the_engine_refuses_calls_from_inside_a_body() -> None:
    async with share(new_module()) as engine:
        async with engine.weight_update():
            with pytest.raises(InsideWeightUpdateError):
                await engine.generate([1], GREEDY)
            with pytest.raises(InsideWeightUpdateError):
                await engine.pause_generation()
            with pytest.raises(InsideWeightUpdateError):
                await engine.reset_prefix_cache()
        await engine.generate([1], GREEDY)


@both_backends
async def test_writes_outside_a_body_deliver_no_token_and_are_found_by_digest() -> None:
    module = new_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    async with share(module) as engine:
        take_step(module, optimizer)
        with pytest.raises(RequestFailedError, match="outside of weight_update"):
            await engine.generate([1, 2], GREEDY)
        await until_idle(engine)
    async with share(module) as engine:
        module.model.norm.weight.data.mul_(2)  # no version counter moves
        assert await engine.weight_checksum() != engine.installed_policy.digest
        with pytest.raises(WeightUpdateError, match="changed outside"):
            async with engine.weight_update():
                pass
        assert engine.policy_version is None
        async with engine.weight_update():
            pass
        assert_current(module, await engine.generate([1, 2], GREEDY), version=1)


@both_backends
async def test_a_body_waits_for_running_requests_by_mode() -> None:
    module = new_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    async with share(module) as engine:
        outputs: list[RequestOutput] = []

        async def run() -> None:
            outputs.append(await engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=30)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await until(lambda: engine.stats().num_running)
            async with engine.weight_update(mode="keep"):
                take_step(module, optimizer)
        sample = outputs[0].outputs[0]
        assert (sample.min_policy_version, sample.max_policy_version) == (0, 1)
        await until_idle(engine)


@both_backends
async def test_a_copying_engine_refuses_bodies_and_a_sharing_one_refuses_sources() -> None:
    module = new_module()
    async with Engine(module, EngineConfig(num_pages=8)) as engine:
        with pytest.raises(ValueError, match="share=True"):
            engine.weight_update()
    async with share(module) as engine:
        with pytest.raises(ValueError, match="weight_update"):
            await engine.update_weights(module.state_dict())
    half = new_module().half()
    with pytest.raises(Exception, match="cannot be shared"):
        async with share(half):
            pass


async def test_k3_samples_of_a_shared_module_replay_from_snapshots_with_its_unfused_products(tmp_path: Path) -> None:
    """A wide model: fused, the products of its layers have other bits."""
    torch.manual_seed(0)
    wide = {"hidden_size": 320, "intermediate_size": 864, "num_attention_heads": 5, "num_key_value_heads": 5}
    fields = {k: v for k, v in TINY.items() if k not in ("architectures", "head_dim")} | wide
    module = LlamaForCausalLM(LlamaConfig(**fields))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    store, params = SnapshotStore(tmp_path / "snapshots"), SamplingParams(n=4, max_tokens=24, seed=3, ignore_eos=True)
    records: list[SampleRecord] = []
    async with share(module) as engine:
        checkpoint = checkpoint_from_module(module)
        header = rollout_header(checkpoint, engine.installed_policy, engine.stats(), params)
        for _ in range(2):
            output = await engine.generate(list(range(20)), params)
            records += sample_records(output.request_id, output, params)
            assert all(isinstance(replay.verdict, Reproduced) for replay in await engine.replay([output]))
            await engine.save_snapshot(store)
            async with engine.weight_update():
                take_step(module, optimizer)
    policies = policies_of_snapshots(store, header, {0: header.policy.digest})
    replayer = Replayer(checkpoint.spec, policies, header.max_sequence_len, header.eos_token_ids)
    assert [replay.verdict for replay in replayer.replay(records)] == [Reproduced(num_tokens=24)] * 8
