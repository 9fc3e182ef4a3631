"""Records made up by hand."""

from __future__ import annotations

from typing import Any

from aengine.audit.machine import machine_facts
from aengine.audit.record import RolloutHeader, SampleRecord, sample_records
from aengine.outputs import CompletionOutput, KVSpan, RequestOutput, VersionSpan
from aengine.params import SamplingParams
from aengine.policy.version import PolicyVersion
from aengine.testing import tiny_checkpoint

PARAMS = SamplingParams(n=2, temperature=0.7, stop_token_ids=(3,), seed=2**64 - 1)
POLICY = PolicyVersion(4, "d" * 64, 17)
SPEC = tiny_checkpoint().spec


def header(**changes: Any) -> RolloutHeader:
    return RolloutHeader(
        **{
            "model": "tiny",
            "spec": SPEC,
            "eos_token_ids": (3,),
            "max_sequence_len": 64,
            "policy": POLICY,
            "dtype": "float32",
            "numerics": "invariant",
            "is_shared": False,
            "products": {"64 x 32": "onednn"},
            "operators": {"rms_norm": "numba"},
            "unverified": (),
            "params": PARAMS,
            "machine": machine_facts(),
            **changes,
        }
    )


def output(*logprobs: float) -> RequestOutput:
    """Two samples of version 4 that ended by a stop token."""
    size = len(logprobs)
    samples = tuple(
        CompletionOutput(
            index=index,
            token_ids=tuple(range(size)),
            text="ü\n",
            logprobs=logprobs,
            raw_logprobs=logprobs[::-1],
            finish_reason="stop",
            stop_reason=3,
            version_spans=(VersionSpan(4, 0, size),),
            kv_spans=(KVSpan(4, 0, 2 + size, 0, size),),
            seed=2**64 - 1,
        )
        for index in range(2)
    )
    return RequestOutput(
        "r", (1, 2), samples, finished=True, num_cached_tokens=0, num_preemptions=0, numerics="invariant"
    )


def records(prompt_id: str = "p") -> list[SampleRecord]:
    return list(sample_records(prompt_id, output(-0.5, -1.5), PARAMS, (0.0, 1.0)))


def sample_of(made: RequestOutput) -> SampleRecord:
    """Its first sample."""
    return next(sample_records("p", made, PARAMS))


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
