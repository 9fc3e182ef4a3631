"""What is written of a rollout: one JSON object a line, a header first.

Log-probabilities are float32 values printed as the shortest decimal of the equal float64, so reading them back gives
the same bits.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from attrs import asdict

from aengine.model.checkpoint import Checkpoint
from aengine.outputs import FinishReason, KVSpan, RequestOutput, VersionSpan
from aengine.params import SamplingParams
from aengine.policy.version import PolicyVersion
from aengine.stats import EngineStats

__all__ = [
    "FORMAT_VERSION",
    "MachineFacts",
    "PolicyRecord",
    "Record",
    "RolloutHeader",
    "SampleRecord",
    "decode_record",
    "encode_record",
    "machine_facts",
    "rollout_header",
    "sample_records",
]

FORMAT_VERSION = 1
LIBRARIES = ("aengine-rollout", "torch", "numba", "numpy")


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where samples were made: equal bits are promised on one machine only."""

    system: str
    processor: str
    cpu_count: int
    python: str
    libraries: dict[str, str]


class RolloutHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What all samples of a file share. `params.seed` is the seed that those of the prompts are derived from."""

    format_version: int = FORMAT_VERSION
    model: str
    spec: dict[str, Any]
    policy: PolicyVersion
    numerics: str
    products: dict[str, str]
    params: SamplingParams
    machine: MachineFacts


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True, tag="policy"):
    """The policy version that was installed when the lines after this one were written."""

    policy: PolicyVersion


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    """One sample; fields as in `RequestOutput` and `CompletionOutput`, `params` as it was submitted with."""

    prompt_id: str
    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    version_spans: tuple[VersionSpan, ...]
    kv_spans: tuple[KVSpan, ...]
    seed: int
    params: SamplingParams
    reward: float | None = None


Record = RolloutHeader | PolicyRecord | SampleRecord

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """One line, newline included."""
    return _ENCODER.encode(record) + b"\n"


def decode_record(line: bytes) -> Record:
    """Raises `msgspec.MsgspecError` for anything that is not a record."""
    return _DECODER.decode(line)


def rollout_header(
    checkpoint: Checkpoint, policy: PolicyVersion, stats: EngineStats, params: SamplingParams
) -> RolloutHeader:
    """The header for samples of an engine on `checkpoint`, which has `policy` installed and tells `stats` of itself."""
    return RolloutHeader(
        model=checkpoint.name,
        spec=asdict(checkpoint.spec),
        policy=policy,
        numerics=stats.numerics,
        products=stats.products,
        params=params,
        machine=machine_facts(),
    )


def sample_records(
    prompt_id: str, output: RequestOutput, params: SamplingParams, rewards: tuple[float, ...] | None = None
) -> Iterator[SampleRecord]:
    """One record for each sample of `output`, in order of index."""
    for place, sample in enumerate(output.outputs):
        yield SampleRecord(
            prompt_id=prompt_id,
            request_id=output.request_id,
            index=sample.index,
            prompt_token_ids=output.prompt_token_ids,
            token_ids=sample.token_ids,
            text=sample.text,
            logprobs=sample.logprobs,
            raw_logprobs=sample.raw_logprobs,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            version_spans=sample.version_spans,
            kv_spans=sample.kv_spans,
            seed=sample.seed,
            params=params,
            reward=None if rewards is None else rewards[place],
        )


def machine_facts() -> MachineFacts:
    return MachineFacts(
        system=platform.platform(),
        processor=_processor(),
        cpu_count=os.cpu_count() or 0,
        python=platform.python_version(),
        libraries={name: importlib.metadata.version(name) for name in LIBRARIES},
    )


def _processor() -> str:
    """Linux names the model only in `/proc/cpuinfo`."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
