"""Greedy continuation on SmolLM2 is that of `transformers.generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from aengine import Engine, EngineConfig, RequestOutput, SamplingParams
from aengine.model.checkpoint import Checkpoint, load_checkpoint
from aengine.model.known import get_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPTS: list[str] = json.loads(Path(__file__).with_name("greedy_prompts.json").read_text(encoding="utf-8"))
NEW_TOKENS = 64
PAGE_SIZE = 4
TIE = 1e-4
"""Where theirs and ours part, the two best logits are no further apart: rounding decides."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, two threads that wait for each other in every product are slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    get_model("smollm2-135m")
    return load_checkpoint("smollm2-135m")


@pytest.fixture(scope="module")
def their_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """On our tensors; that they are those that transformers reads has a test of its own."""
    spec = checkpoint.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_word_embeddings,
    )
    model = LlamaForCausalLM(config).eval()
    assert model.load_state_dict(dict(checkpoint.tensors), strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def token_ids(checkpoint: Checkpoint) -> list[list[int]]:
    assert checkpoint.tokenizer is not None
    return [checkpoint.tokenizer.encode(prompt) for prompt in PROMPTS]


def continue_theirs(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """All in one batch, padded on the left; EOS does not end a row."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    return [row[width:] for row in out.tolist()]


def continue_ours(checkpoint: Checkpoint, prompts: list[list[int]]) -> list[list[RequestOutput]]:
    """Cold, then again with what the cache has by then."""

    async def run() -> list[list[RequestOutput]]:
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        config = EngineConfig(page_size=PAGE_SIZE, max_model_len=256, num_pages=1024)
        async with Engine(checkpoint, config) as engine:
            return [await engine.generate_batch(prompts, params) for _ in range(2)]

    return anyio.run(run)


def test_64_tokens_of_20_prompts_are_those_of_transformers_cold_and_cached(
    checkpoint: Checkpoint, their_model: PreTrainedModel, token_ids: list[list[int]]
) -> None:
    assert len(PROMPTS) == 20
    theirs = continue_theirs(their_model, token_ids)
    cold, cached = continue_ours(checkpoint, token_ids)
    for prompt, expected, first, second in zip(token_ids, theirs, cold, cached, strict=True):
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert first.outputs[0].logprobs == second.outputs[0].logprobs
        assert_greedy(their_model, prompt, list(first.outputs[0].token_ids), expected)


def assert_greedy(model: PreTrainedModel, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    assert len(ours) == len(theirs) == NEW_TOKENS
    parted = next((place for place in range(NEW_TOKENS) if ours[place] != theirs[place]), None)
    if parted is not None:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ours[:parted]]])).logits[0, -1]
        best = logits.topk(2)
        assert {ours[parted], theirs[parted]} == set(best.indices.tolist())
        assert float(best.values[0] - best.values[1]) <= TIE
