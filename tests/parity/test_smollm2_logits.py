"""SmolLM2's logits: those of transformers, and the same bits step by step as all at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity_support import decoder_logits, make_decoder
from transformers import AutoConfig, AutoModelForCausalLM

from aengine.model.checkpoint import Checkpoint, load_checkpoint
from aengine.model.decoder import Decoder
from aengine.model.known import get_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = [
    "The capital of France is Paris. " * 8,
    "Reinforcement learning trains a language model by sampling several answers to each question.",
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    get_model("smollm2-135m")
    return load_checkpoint("smollm2-135m")


@pytest.fixture(scope="module")
def decoder(checkpoint: Checkpoint) -> Decoder:
    return make_decoder(checkpoint, 128)


def encode(checkpoint: Checkpoint, text: str) -> np.ndarray:
    assert checkpoint.tokenizer is not None
    return np.array(checkpoint.tokenizer.encode(text))


def test_logits_agree_with_transformers(checkpoint: Checkpoint, decoder: Decoder) -> None:
    """Logits reach 40, where 1e-4 is a few roundings: transformers itself is up to 9e-5 away from float64."""
    config = checkpoint.spec.to_config()
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    module.load_state_dict(dict(checkpoint.tensors), strict=False)
    module.tie_weights()
    for text in TEXTS:
        ids = encode(checkpoint, text)
        with torch.no_grad():
            expected = module(torch.from_numpy(ids)[None]).logits[0]
        torch.testing.assert_close(decoder_logits(decoder, ids), expected, atol=1e-4, rtol=1e-5)


def test_steps_and_chunks_give_the_bits_of_a_whole_prefill(checkpoint: Checkpoint, decoder: Decoder) -> None:
    ids = encode(checkpoint, TEXTS[1])
    expected = decoder_logits(decoder, ids)
    assert torch.equal(decoder_logits(decoder, ids, step=1), expected)
    assert torch.equal(decoder_logits(decoder, ids, step=5), expected)
