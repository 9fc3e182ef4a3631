"""`aengine audit` on rollouts of a tiny model: what it says, writes, leaves out, goes on with and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from cli_support import invoke, rollout, save_model, write_lines

from aengine import Engine, EngineConfig, SamplingParams
from aengine.audit.job import plan_audit
from aengine.audit.policies import recorded_numerics
from aengine.audit.record import (
    PolicyRecord,
    Record,
    RolloutHeader,
    SampleRecord,
    decode_record,
    encode_record,
    rollout_header,
    sample_records,
)
from aengine.audit.replay import Replayer
from aengine.audit.rollout_file import RolloutFile, read_rollouts
from aengine.audit.snapshots import SnapshotStore
from aengine.audit.verdict import Unauditable
from aengine.errors import RolloutFileError
from aengine.outputs import KVSpan, VersionSpan
from aengine.testing import random_tensors, tiny_checkpoint

NUM_SAMPLES = 10


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and rollouts of it."""
    directory = tmp_path_factory.mktemp("audit")
    model = save_model(directory / "model")
    lines = [{"prompt_token_ids": [number, 2, 3], "id": f"p{number}"} for number in range(1, 6)]
    result = rollout(model, write_lines(directory / "prompts.jsonl", lines), directory / "r.jsonl", "--n", 2)
    assert result.exit_code == 0, result.output
    return directory


def rewritten(made: Path, target: Path, change: Callable[[int, Record], Record]) -> Path:
    """The rollouts with each record changed; headers and policies have number -1."""
    number, records = 0, []
    for record in read_rollouts(made / "r.jsonl"):
        is_sample = isinstance(record, SampleRecord)
        records.append(change(number if is_sample else -1, record))
        number += is_sample
    target.write_bytes(b"".join(map(encode_record, records)))
    return target


def with_sample(made: Path, target: Path, place: int, **changes: Any) -> Path:
    def change(number: int, record: Record) -> Record:
        return msgspec.structs.replace(record, **changes) if number == place else record

    return rewritten(made, target, change)


def sample_at(made: Path, place: int) -> SampleRecord:
    return [record for record in read_rollouts(made / "r.jsonl") if isinstance(record, SampleRecord)][place]


def audit(rollouts: Path, made: Path, *options: object) -> Any:
    return invoke("audit", rollouts, "--model", made / "model", *options)


def report_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_sample_is_reproduced(made: Path, tmp_path: Path) -> None:
    result = audit(made / "r.jsonl", made, "--report", tmp_path / "report.jsonl", "--json")
    assert result.exit_code == 0, result.output
    assert f"{NUM_SAMPLES} of {NUM_SAMPLES} samples reproduced bit for bit" in result.stderr
    summary = json.loads(result.stdout)
    assert (summary["samples"], summary["reproduced"], summary["oracle_checked"]) == (NUM_SAMPLES, NUM_SAMPLES, 1)
    assert 0 < summary["oracle_largest_difference"] < 1e-4
    header, *lines = report_lines(tmp_path / "report.jsonl")
    assert (header["type"], header["rollouts"]) == ("audit", "r.jsonl")
    assert [line["place"] for line in lines] == list(range(NUM_SAMPLES))
    assert {line["verdict"]["type"] for line in lines} == {"reproduced"}


def test_an_audit_goes_on_with_its_report(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.jsonl"
    assert audit(made / "r.jsonl", made, "--report", report).exit_code == 0
    whole = report.read_bytes()
    lines = whole.splitlines(keepends=True)
    report.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    replayed = []
    replay = Replayer.replay
    monkeypatch.setattr(
        Replayer, "replay", lambda self, records: (replayed.append(len(records)), replay(self, records))[1]
    )
    result = audit(made / "r.jsonl", made, "--report", report, "--json")
    assert (result.exit_code, sum(replayed)) == (0, NUM_SAMPLES - 3)
    assert json.loads(result.stdout)["reproduced"] == NUM_SAMPLES
    assert report.read_bytes() == whole


def test_a_report_does_not_speak_for_a_record_that_was_changed_since(made: Path, tmp_path: Path) -> None:
    report, rollouts = tmp_path / "report.jsonl", tmp_path / "r.jsonl"
    rollouts.write_bytes((made / "r.jsonl").read_bytes())
    assert audit(rollouts, made, "--report", report).exit_code == 0
    with_sample(made, rollouts, 3, seed=5)
    result = audit(rollouts, made, "--report", report, "--json")
    assert (result.exit_code, json.loads(result.stdout)["not_reproduced"]) == (3, 1)


def test_a_changed_token_is_named_and_ends_with_status_3(made: Path, tmp_path: Path) -> None:
    record = sample_at(made, 4)
    tokens = (*record.token_ids[:2], (record.token_ids[2] + 1) % 64, *record.token_ids[3:])
    changed = with_sample(made, tmp_path / "r.jsonl", 4, token_ids=tokens)
    result = audit(changed, made, "--report", tmp_path / "report.jsonl")
    assert result.exit_code == 3
    assert f"token 2 was {record.token_ids[2]} and is recorded as {tokens[2]}" in result.stderr
    assert "9 of 10 samples reproduced" in result.stderr
    (line,) = [line for line in report_lines(tmp_path / "report.jsonl")[1:] if line["verdict"]["type"] != "reproduced"]
    assert (line["place"], line["prompt_id"], line["explanation"]["type"]) == (4, record.prompt_id, "edited_tokens")
    quiet = audit(changed, made, "--explain", 0)
    assert quiet.exit_code == 3
    assert "token 2" in quiet.stderr and "was" not in quiet.stderr


def last_bit(record: SampleRecord) -> dict[str, Any]:
    return {"logprobs": (float(np.nextafter(np.float32(record.logprobs[0]), np.float32(0))), *record.logprobs[1:])}


def test_another_bit_ends_with_status_4(made: Path, tmp_path: Path) -> None:
    result = audit(with_sample(made, tmp_path / "r.jsonl", 0, **last_bit(sample_at(made, 0))), made)
    assert result.exit_code == 4
    assert "only logprobs of token 0 differs" in result.stderr


def test_a_version_that_is_not_at_hand_ends_with_status_5(made: Path, tmp_path: Path) -> None:
    labels = {"version_spans": (VersionSpan(9, 0, 6),), "kv_spans": (KVSpan(9, 0, 8, 0, 6),)}
    result = audit(with_sample(made, tmp_path / "r.jsonl", 1, **labels), made)
    assert result.exit_code == 5
    assert "1 x nothing names the digest of version 9" in result.stderr


def test_another_machine_is_consistent_and_ends_with_status_6(made: Path, tmp_path: Path) -> None:
    def change(number: int, record: Record) -> Record:
        if isinstance(record, RolloutHeader):
            return msgspec.structs.replace(record, machine=msgspec.structs.replace(record.machine, processor="Z80"))
        return msgspec.structs.replace(record, **last_bit(record)) if isinstance(record, SampleRecord) else record

    result = audit(rewritten(made, tmp_path / "r.jsonl", change), made)
    assert result.exit_code == 6
    assert "made on another machine: processor: Z80 there" in result.stderr
    assert "10 of 10 samples are consistent; 0 bit for bit" in result.stderr


def test_the_oracle_is_another_witness(made: Path, tmp_path: Path) -> None:
    record = sample_at(made, 0)
    changed = with_sample(made, tmp_path / "r.jsonl", 0, raw_logprobs=(-20.0, *record.raw_logprobs[1:]))
    result = audit(changed, made, "--json")
    assert (result.exit_code, json.loads(result.stdout)["oracle_failed"]) == (3, 1)


def test_a_share_of_the_samples_is_the_same_share_every_time(made: Path) -> None:
    places = plan_audit(made / "r.jsonl", 0.5).places
    assert places == plan_audit(made / "r.jsonl", 0.5).places
    assert set(places) < set(range(NUM_SAMPLES))
    assert set(plan_audit(made / "r.jsonl", 0.2).places) <= set(places)
    assert plan_audit(made / "r.jsonl", 1e-9).places == [0]
    result = audit(made / "r.jsonl", made, "--sample", "50%")
    assert result.exit_code == 0
    assert f"{NUM_SAMPLES - len(places)} samples were left out" in result.stderr
    assert f"{len(places)} of {len(places)} samples reproduced" in result.stderr


@pytest.mark.parametrize("share", ["0", "101%", "-1%", "half"])
def test_a_share_that_is_none_is_refused(made: Path, share: str) -> None:
    result = audit(made / "r.jsonl", made, f"--sample={share}")
    assert result.exit_code == 2
    assert "is not a share" in result.output


def test_weights_come_from_one_place(made: Path, tmp_path: Path) -> None:
    assert invoke("audit", made / "r.jsonl").exit_code == 2
    assert audit(made / "r.jsonl", made, "--snapshots", tmp_path).exit_code == 2


def test_other_weights_than_the_files_are_refused_with_both_digests(made: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", tiny_checkpoint(1, eos_token_ids=(0,)))
    result = invoke("audit", made / "r.jsonl", "--model", other)
    digest = plan_audit(made / "r.jsonl").header.policy.digest
    assert result.exit_code == 1
    assert f"version 0 with {digest}" in result.stderr and "have digest" in result.stderr
    third = save_model(tmp_path / "third", tiny_checkpoint(0, hidden_size=64))
    assert "their specs differ" in invoke("audit", made / "r.jsonl", "--model", third).stderr


def test_a_report_on_something_else_is_refused(made: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    assert audit(made / "r.jsonl", made, "--report", report, "--sample", "20%").exit_code == 0
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((made / "r.jsonl").read_bytes())
    result = audit(copy, made, "--report", report)
    assert (result.exit_code, "is the report on r.jsonl" in result.stderr) == (1, True)
    report.write_text(
        report.read_text(encoding="utf-8").replace('"processor":"', '"processor":"Z80 '), encoding="utf-8"
    )
    result = audit(made / "r.jsonl", made, "--report", report)
    assert (result.exit_code, "begun on another machine" in result.stderr) == (1, True)
    result = audit(made / "r.jsonl", made, "--report", copy)
    assert (result.exit_code, "line 1 is not of an audit's report" in result.stderr) == (1, True)


def test_a_file_without_samples_is_refused(made: Path, tmp_path: Path) -> None:
    lines = (made / "r.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "r.jsonl").write_bytes(lines[0])
    with pytest.raises(RolloutFileError, match="holds no samples"):
        plan_audit(tmp_path / "r.jsonl")


def test_the_recorded_products_are_used(made: Path) -> None:
    header = plan_audit(made / "r.jsonl").header
    tiles = msgspec.structs.replace(header, products=dict.fromkeys(header.products, "tiles"))
    assert {choice.strategy for choice in recorded_numerics(tiles).choices} == {"tiles"}
    unknown = msgspec.structs.replace(header, products=dict.fromkeys(header.products, "quantum"))
    assert "quantum" not in {choice.strategy for choice in recorded_numerics(unknown).choices}
    assert recorded_numerics(msgspec.structs.replace(header, numerics="fast")).mode == "fast"


def two_versions(directory: Path, dtype: Any = "float32") -> Path:
    """Rollouts under two versions, and snapshots of both."""
    model, params = tiny_checkpoint(0), SamplingParams(n=2, seed=3, max_tokens=12)
    store, path = SnapshotStore(directory / "snapshots"), directory / "r.jsonl"

    async def sample() -> None:
        async with Engine(model, EngineConfig(page_size=4, num_pages=64, dtype=dtype)) as engine:
            with RolloutFile(path) as out:
                out.begin(rollout_header(model, engine.installed_policy, engine.stats(), params))
                for version in range(2):
                    await engine.save_snapshot(store)
                    out.append([PolicyRecord(policy=engine.installed_policy)])
                    for number in range(3):
                        output = await engine.generate([5, 6, 7, 8, 9, number], params)
                        out.append(sample_records(f"{version}-{number}", output, params))
                    await engine.update_weights(random_tensors(model.spec, 1))

    anyio.run(sample)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_snapshots_serve_every_version_in_every_type(tmp_path: Path, dtype: str) -> None:
    path = two_versions(tmp_path, dtype)
    result = invoke("audit", path, "--snapshots", tmp_path / "snapshots")
    assert result.exit_code == 0, result.output
    assert "12 of 12 samples reproduced bit for bit" in result.stderr


def test_snapshots_that_are_damaged_missing_or_of_another_run_prove_nothing(tmp_path: Path) -> None:
    path = two_versions(tmp_path)
    none = invoke("audit", path, "--snapshots", tmp_path / "none")
    assert (none.exit_code, "there are no snapshots" in none.stderr) == (1, True)
    other = SnapshotStore(tmp_path / "other")

    async def save() -> None:
        async with Engine(tiny_checkpoint(4), EngineConfig(num_pages=8)) as engine:
            await engine.save_snapshot(other)

    anyio.run(save)
    result = invoke("audit", path, "--snapshots", other.path)
    assert result.exit_code == 5
    assert "version 0 has digest" in result.stderr and "version 1 are not at hand" in result.stderr
    tensor = max((tmp_path / "snapshots" / "tensors").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    content = bytearray(tensor.read_bytes())
    content[-1] ^= 1
    tensor.write_bytes(content)
    result = invoke("audit", path, "--snapshots", tmp_path / "snapshots", "--json")
    assert (result.exit_code, json.loads(result.stdout)["unauditable"]) == (5, 6)
    assert "has digest" in result.stderr


EXTREMES = {
    "a seed at the end": {"seed": 2**64 - 1},
    "a seed beyond": {"seed": 10**30},
    "a negative index": {"index": -3},
    "many alternatives": {"params": SamplingParams(logprobs=10**9, max_tokens=6), "top_logprobs": ((),) * 6},
    "any top_k": {"params": SamplingParams(top_k=2**70, max_tokens=6)},
    "huge numbers": {"logprobs": (-1.7e308,) * 6},
}


@pytest.mark.parametrize("edit", EXTREMES)
def test_whatever_one_line_says_the_others_are_audited(made: Path, tmp_path: Path, edit: str) -> None:
    """The neighbour has another seed, so that the edited line is among the suspects."""
    extreme = with_sample(made, tmp_path / "one.jsonl", 4, **EXTREMES[edit])
    (tmp_path / "r.jsonl").write_bytes(extreme.read_bytes())
    rollouts = with_sample(tmp_path, tmp_path / "two.jsonl", 5, seed=77)
    result = audit(rollouts, made, "--json")
    assert result.exit_code in (3, 5), result.output
    assert json.loads(result.stdout)["reproduced"] >= NUM_SAMPLES - 2


def test_a_header_that_no_engine_writes_is_refused(made: Path, tmp_path: Path) -> None:
    lines = (made / "r.jsonl").read_bytes().splitlines(keepends=True)
    header = decode_record(lines[0])
    lines[0] = encode_record(msgspec.structs.replace(header, max_sequence_len=2**40))
    (tmp_path / "r.jsonl").write_bytes(b"".join(lines))
    result = audit(tmp_path / "r.jsonl", made)
    assert result.exit_code == 1
    assert f"max_sequence_len {2**40}" in result.stderr


def test_a_report_does_not_speak_for_another_header(made: Path, tmp_path: Path) -> None:
    report, rollouts = tmp_path / "report.jsonl", tmp_path / "r.jsonl"
    lines = (made / "r.jsonl").read_bytes().splitlines(keepends=True)
    rollouts.write_bytes(b"".join(lines))
    assert audit(rollouts, made, "--report", report).exit_code == 0
    header = decode_record(lines[0])
    assert isinstance(header, RolloutHeader)
    lines[0] = encode_record(msgspec.structs.replace(header, max_sequence_len=header.max_sequence_len - 1))
    rollouts.write_bytes(b"".join(lines))
    result = audit(rollouts, made, "--report", report)
    assert result.exit_code == 1
    assert "with another header" in result.stderr


def test_what_was_not_at_hand_is_audited_again(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Replayer, "_ask", lambda self, record: Unauditable(reason="the weights are elsewhere"))
        assert audit(made / "r.jsonl", made, "--report", report).exit_code == 5
    result = audit(made / "r.jsonl", made, "--report", report, "--json")
    assert (result.exit_code, json.loads(result.stdout)["reproduced"]) == (0, NUM_SAMPLES)


def test_the_oracle_looks_at_one_sample_though_none_was_drawn(made: Path) -> None:
    result = audit(made / "r.jsonl", made, "--sample", "0.0001%", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["samples"], summary["oracle_checked"]) == (1, 1)
