"""The published description of the rollouts file is what the code writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import msgspec
import numpy as np
import pytest
from audit_support import header, output, records, sample_of

from aengine import Engine, EngineConfig, SamplingParams
from aengine.audit.machine import MachineFacts
from aengine.audit.record import (
    PolicyRecord,
    RolloutHeader,
    SampleRecord,
    decode_record,
    encode_record,
    rollout_header,
    rollout_schema,
    sample_records,
)
from aengine.audit.rollout_file import RolloutFile
from aengine.errors import RolloutFileError
from aengine.model.spec import ModelSpec, RopeScaling
from aengine.outputs import KVSpan, VersionSpan
from aengine.policy.version import PolicyVersion
from aengine.testing import tiny_checkpoint

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
PAGE = (REFERENCE / "rollout-format.md").read_text(encoding="utf-8")
VALIDATOR = jsonschema.Draft202012Validator(rollout_schema())
SECTIONS = {
    "header": RolloutHeader,
    "policy": PolicyRecord,
    "sample": SampleRecord,
    "policy version": PolicyVersion,
    "version span": VersionSpan,
    "KV span": KVSpan,
    "sampling parameters": SamplingParams,
    "spec": ModelSpec,
    "rope scaling": RopeScaling,
    "machine": MachineFacts,
}


def fields_of(kind: Any) -> list[str]:
    if attrs.has(kind):
        return [field.name for field in attrs.fields(kind)]
    return [field.name for field in msgspec.structs.fields(kind)]


def test_every_field_is_described_in_order() -> None:
    described = {
        title: re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
        for title, text in (part.split("\n", 1) for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:])
    }
    assert {title: names for title, names in described.items() if names} == {
        title: fields_of(kind) for title, kind in SECTIONS.items()
    }


def test_every_link_of_the_page_leads_somewhere() -> None:
    anchors = {"#" + title.lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)}
    links = set(re.findall(r"\]\(([^)]+)\)", PAGE))
    assert links - anchors == {"rollout.schema.json"}


def test_the_example_is_a_record_and_fits_the_schema() -> None:
    (example,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    VALIDATOR.validate(json.loads(example))
    record = decode_record(example.encode())
    assert isinstance(record, SampleRecord)
    assert record.logprobs == tuple(float(np.float32(value)) for value in record.logprobs)
    assert decode_record(encode_record(record)) == record


def test_the_published_schema_is_that_of_the_code() -> None:
    assert json.loads((REFERENCE / "rollout.schema.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(rollout_schema())
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def written_file(path: Path) -> list[dict[str, Any]]:
    """A rollout of a tiny model, line by line."""
    model, params = (
        tiny_checkpoint(0, eos_token_ids=(0,)),
        SamplingParams(n=2, max_tokens=4, logprobs=2, seed=2**64 - 1),
    )
    async with Engine(model, EngineConfig(num_pages=16)) as engine:
        with RolloutFile(path) as file:
            file.begin(rollout_header(model, engine.installed_policy, engine.stats(), params))
            done = await engine.generate([1, 2, 3], params)
            policy = PolicyRecord(policy=engine.installed_policy)
            file.append([policy, *sample_records("p", done, params, (0.0, 1.0))])
    return lines_of(path)


async def test_every_line_of_a_written_file_fits_the_schema(tmp_path: Path) -> None:
    lines = await written_file(tmp_path / "rollouts.jsonl")
    assert [line["type"] for line in lines] == ["header", "policy", "sample", "sample"]
    for line in lines:
        VALIDATOR.validate(line)
        assert list(line)[1:] == fields_of(SECTIONS[line["type"]])
    assert lines[0]["eos_token_ids"] == [0]
    assert lines[0]["dtype"] == "float32"
    assert lines[0]["max_sequence_len"] == 257, "16 pages of 16 tokens, and one that needs no KV"
    assert lines[2]["numerics"] == lines[0]["numerics"]
    assert len(lines[2]["top_logprobs"]) == len(lines[2]["token_ids"])


async def test_the_schema_refuses_what_is_missing_or_of_another_type(tmp_path: Path) -> None:
    lines = await written_file(tmp_path / "rollouts.jsonl")
    required = {"seed", "token_ids", "kv_spans", "params", "numerics"}
    for name in required:
        sample = {key: value for key, value in lines[2].items() if key != name}
        assert not VALIDATOR.is_valid(sample)
        with pytest.raises(msgspec.ValidationError, match=name):
            decode_record(json.dumps(sample).encode())
    for changes in ({"seed": "1"}, {"finish_reason": "done"}, {"numerics": "exact"}, {"version_spans": [{}]}):
        assert not VALIDATOR.is_valid(lines[2] | changes)
        with pytest.raises(msgspec.ValidationError):
            decode_record(json.dumps(lines[2] | changes).encode())


def test_a_file_of_another_format_is_refused_by_its_version() -> None:
    line = encode_record(header()).replace(b'"format_version":2', b'"format_version":1')
    with pytest.raises(msgspec.ValidationError, match=r"\$\.format_version"):
        decode_record(line)
    assert not VALIDATOR.is_valid(json.loads(line))


def test_bits_of_any_finite_float32_survive_a_file() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 200_000, dtype=np.uint32)
    special = np.array([0, 1, 2**23 - 1, 2**23, 2**31, 2**31 + 1, 2**31 + 2**23 - 1, 0x7F7FFFFF, 0xFF7FFFFF], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    values = values[np.isfinite(values)]
    assert np.signbit(values[values == 0]).any(), "minus zero is among them"
    assert (np.abs(values[values != 0]) < np.finfo(np.float32).tiny).any(), "and denormal numbers"
    back = decode_record(encode_record(sample_of(output(*values.tolist()))))
    assert isinstance(back, SampleRecord)
    assert np.array_equal(np.array(back.logprobs, np.float32).view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_cannot_hold_is_refused_by_name(wrong: float) -> None:
    for record in (sample_of(output(-0.5, wrong)), msgspec.structs.replace(records()[0], reward=wrong)):
        with pytest.raises(RolloutFileError, match=f"sample 0 of r cannot be written: {wrong}"):
            encode_record(record)
