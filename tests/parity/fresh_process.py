"""Run as a program: 64 samples of a small random model, and a digest of their ids and the bits of both logprobs.

    python fresh_process.py NUM_THREADS

The model is wide enough for kernels and products to be spread over threads.
"""

from __future__ import annotations

import hashlib
import struct
import sys

import anyio
import torch

from aengine import Engine, EngineConfig, SamplingParams
from aengine.testing import tiny_checkpoint

WIDE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
PARAMS = SamplingParams(n=8, max_tokens=6, temperature=0.8, top_p=0.95, seed=3)


async def digest() -> str:
    prompts = [[number, *range(7, 7 + 5 * number)] for number in range(8)]
    async with Engine(tiny_checkpoint(5, **WIDE), EngineConfig(num_pages=128)) as engine:
        outputs = await engine.generate_batch(prompts, PARAMS)
        assert engine.stats().numerics == "invariant", engine.stats().unverified
    samples = [sample for output in outputs for sample in output.outputs]
    assert len(samples) == 64
    sha = hashlib.sha256()
    for sample in samples:
        size = len(sample.token_ids)
        sha.update(struct.pack(f"<{size}q{2 * size}d", *sample.token_ids, *sample.logprobs, *sample.raw_logprobs))
    return sha.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(anyio.run(digest))
