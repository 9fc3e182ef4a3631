"""What is written of a rollout: one JSON object a line, a header first.

Log-probabilities are float32 values printed as the shortest decimal of the equal float64, so reading them back gives
the same bits. `docs/reference/rollout-format.md` describes every field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from aengine.audit.machine import MachineFacts, machine_facts
from aengine.errors import RolloutFileError
from aengine.model.checkpoint import Checkpoint
from aengine.model.spec import ModelSpec
from aengine.outputs import Alternatives, FinishReason, KVSpan, NumericsLabel, RequestOutput, VersionSpan
from aengine.params import SamplingParams
from aengine.policy.version import PolicyVersion
from aengine.stats import EngineStats

__all__ = [
    "FORMAT_VERSION",
    "PolicyRecord",
    "Record",
    "RolloutHeader",
    "SampleRecord",
    "decode_record",
    "encode_record",
    "rollout_header",
    "rollout_schema",
    "sample_records",
]

FORMAT_VERSION: Final = 2


class RolloutHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What all samples of a file share."""

    format_version: Literal[2] = FORMAT_VERSION
    model: str
    """Name of the checkpoint."""
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]
    """Token ids that end a sample unless `ignore_eos`, and that `min_tokens` bans."""
    max_sequence_len: int
    """Most tokens of one sample, its prompt included; a sample that reaches it ends with reason "length"."""
    policy: PolicyVersion
    """Installed when the file was begun."""
    dtype: str
    """Type of weights, activations and KV."""
    numerics: NumericsLabel
    is_shared: bool
    """Whether the engine computed with a trainer's own parameters, whose products are not fused."""
    products: dict[str, str]
    """The strategy of each shape of matrix product, `"outputs x inputs"` or `"outputs x inputs + bias"`."""
    operators: dict[str, str]
    """What computes each other operator."""
    unverified: tuple[str, ...]
    """Products and operators that do not hold, and what was seen of them; empty but where `numerics` is that."""
    params: SamplingParams
    """`seed` is the one that those of the prompts are derived from."""
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
    numerics: NumericsLabel
    num_cached_tokens: int
    num_preemptions: int
    has_token_mask: bool = False
    """Whether a token mask decided what could be sampled; without it the draws cannot be repeated."""
    top_logprobs: tuple[Alternatives, ...] | None = None
    reward: float | None = None


Record = RolloutHeader | PolicyRecord | SampleRecord

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """One line, newline included. Raises `RolloutFileError` for a number that JSON cannot hold."""
    if isinstance(record, SampleRecord):
        _refuse_non_finite(record)
    return _ENCODER.encode(record) + b"\n"


def decode_record(line: bytes) -> Record:
    """Raises `msgspec.MsgspecError` for anything that is not a record."""
    return _DECODER.decode(line)


def rollout_schema() -> dict[str, Any]:
    """The JSON schema of one line."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Record)}


def rollout_header(
    checkpoint: Checkpoint, policy: PolicyVersion, stats: EngineStats, params: SamplingParams
) -> RolloutHeader:
    """The header for samples of an engine on `checkpoint`, which has `policy` installed and tells `stats` of itself."""
    return RolloutHeader(
        model=checkpoint.name,
        spec=checkpoint.spec,
        eos_token_ids=checkpoint.eos_token_ids,
        max_sequence_len=stats.max_sequence_len,
        policy=policy,
        dtype=stats.dtype,
        numerics=stats.numerics,
        is_shared=stats.is_shared,
        products=stats.products,
        operators=stats.operators,
        unverified=stats.unverified,
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
            numerics=output.numerics,
            num_cached_tokens=output.num_cached_tokens,
            num_preemptions=output.num_preemptions,
            has_token_mask=output.has_token_mask,
            top_logprobs=sample.top_logprobs,
            reward=None if rewards is None else rewards[place],
        )


def _refuse_non_finite(record: SampleRecord) -> None:
    """A sum of float32 values in float64 is finite only if all of them are."""
    numbers = (*record.logprobs, *record.raw_logprobs, record.reward or 0.0)
    if math.isfinite(sum(numbers)):
        return
    wrong = next((number for number in numbers if not math.isfinite(number)), None)
    if wrong is not None:  # else they are no float32 values, and too large to add up
        name = f"sample {record.index} of {record.request_id}"
        raise RolloutFileError(f"{name} cannot be written: {wrong} among its log-probabilities and reward")
