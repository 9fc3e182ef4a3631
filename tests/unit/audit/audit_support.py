"""Records made up by hand."""

from __future__ import annotations

from typing import Any

from aengine.audit.record import SampleRecord
from aengine.outputs import KVSpan, VersionSpan
from aengine.params import SamplingParams


def new_record(num_prompt: int = 5, tokens: tuple[int, ...] = (1, 2, 3, 4), **fields: Any) -> SampleRecord:
    """A sample of version 0 that ended by length."""
    count = len(tokens)
    return SampleRecord(
        **{
            "prompt_id": "p",
            "request_id": "r",
            "index": 0,
            "prompt_token_ids": tuple(range(num_prompt)),
            "token_ids": tokens,
            "text": None,
            "logprobs": (-0.5,) * count,
            "raw_logprobs": (-0.25,) * count,
            "finish_reason": "length",
            "stop_reason": None,
            "version_spans": (VersionSpan(0, 0, count),),
            "kv_spans": (KVSpan(0, 0, num_prompt + count - 1, 0, count),),
            "seed": 1,
            "params": SamplingParams(max_tokens=count, seed=1),
            "numerics": "invariant",
            "num_cached_tokens": 0,
            "num_preemptions": 0,
            **fields,
        }
    )
