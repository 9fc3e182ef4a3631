"""`weight_update()` cancelled at each of its waits, before, in and after its body."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from cancel_support import PROMPT, STRIKES, Blow, Ended, call_under, until_idle
from transformers import LlamaConfig, LlamaForCausalLM

from aengine import Engine, EngineConfig, EngineInvalidatedError, RequestFailedError, SamplingParams
from aengine.audit.oracle import oracle_logprobs
from aengine.model.spec import ModelSpec
from aengine.testing import TINY, until
from statemachines.policy import PolicyState

GREEDY = SamplingParams(temperature=0, max_tokens=3)


def new_module() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = {name: value for name, value in TINY.items() if name != "architectures"} | {"num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**config))


async def update_in_body(engine: Engine, module: LlamaForCausalLM, done: list[str]) -> None:
    """A body with waits of its own, one before it writes and one after."""
    async with engine.weight_update():
        await anyio.lowlevel.checkpoint()
        with torch.no_grad():
            module.model.norm.weight.mul_(1.5)
        done.append("written")
        await anyio.lowlevel.checkpoint()
    done.append("left")


async def request(engine: Engine) -> None:
    """A request that finishes, or fails because the engine was fenced."""
    try:
        await engine.generate(PROMPT, GREEDY)
    except RequestFailedError as failed:
        assert isinstance(failed.__cause__, EngineInvalidatedError)


async def assert_recovers(engine: Engine, module: LlamaForCausalLM) -> None:
    """A body that only enters and leaves makes whatever is there the policy; then requests are right."""
    async with engine.weight_update() as update:
        pass
    assert engine.state is PolicyState.SERVING
    output = await engine.generate(PROMPT, GREEDY)
    sample = output.outputs[0]
    assert set(sample.token_versions) == {update.ack.policy_version}
    tensors = {name: tensor for name, tensor in module.state_dict().items() if name != "lm_head.weight"}
    expected = oracle_logprobs(
        ModelSpec.from_config(TINY | {"num_hidden_layers": 1}), tensors, PROMPT, sample.token_ids
    )
    torch.testing.assert_close(torch.tensor(sample.raw_logprobs), expected, atol=1e-4, rtol=0)
    await until_idle(engine)


async def one_blow(kind: str, at: int) -> tuple[Ended, Blow]:
    """Strike the update at its `at`-th wait, while a request is running, and check what is left."""
    module = new_module()
    config = EngineConfig(page_size=4, num_pages=48, check_integrity=True)
    done: list[str] = []
    blow = Blow(at)
    async with Engine(module, config, share=True) as engine:
        before = engine.installed_policy
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request, engine)
            ended = await call_under(kind, blow, partial(update_in_body, engine, module, done))
        # a native cancellation does not wait for the update to end
        await until(lambda: engine.state is not PolicyState.SWAPPING)
        assert engine.state in (PolicyState.SERVING, PolicyState.INVALIDATED)
        if engine.state is PolicyState.INVALIDATED:
            assert done[:1] == ["written"], "only a body that has written may fence"
            assert ended.was_cancelled
        else:
            assert (engine.installed_policy == before) == ("written" not in done)
            assert await engine.weight_checksum() == engine.installed_policy.digest
        await assert_recovers(engine, module)
    return ended, blow


@pytest.mark.parametrize(("backend", "kind"), [(backend, kind) for backend in STRIKES for kind in STRIKES[backend]])
def test_a_body_cancelled_at_any_wait_leaves_the_policy_declared(backend: str, kind: str) -> None:
    async def scenario() -> int:
        at, struck = 0, True
        while struck:
            at += 1
            ended, blow = await one_blow(kind, at)
            struck = blow.has_struck
            outcome: Any = ended.error
            assert outcome is None
        return at - 1

    assert anyio.run(scenario, backend=backend) >= 4  # entering, twice in the body, leaving
