"""Rollout records on disk."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from audit_support import PARAMS, POLICY, header, output, records
from hypothesis import given
from hypothesis import strategies as st

from aengine.audit.record import (
    PolicyRecord,
    SampleRecord,
    decode_record,
    encode_record,
    sample_records,
)
from aengine.audit.rollout_file import RolloutFile, read_rollouts
from aengine.errors import RolloutFileError
from aengine.params import SamplingParams
from aengine.policy.version import PolicyVersion


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.jsonl"


@pytest.mark.parametrize("record", [header(), PolicyRecord(policy=POLICY), *records()])
def test_a_record_is_one_line_and_reads_back_equal(record: object) -> None:
    line = encode_record(record)  # type: ignore[arg-type]
    assert line.count(b"\n") == 1
    assert decode_record(line) == record


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=0.0), min_size=1))
def test_logprobs_read_back_to_the_same_float32_bits(logprobs: list[float]) -> None:
    (record, _) = sample_records("p", output(*logprobs), PARAMS)
    back = decode_record(encode_record(record))
    assert isinstance(back, SampleRecord)
    assert np.array(back.logprobs, np.float32).tobytes() == np.array(logprobs, np.float32).tobytes()


def test_the_header_names_machine_and_libraries() -> None:
    facts = header().machine
    assert facts.cpu_count >= 1
    assert facts.processor
    assert set(facts.libraries) >= {"aengine-rollout", "torch", "numba"}


def test_what_was_appended_is_read_back_in_order(path: Path) -> None:
    with RolloutFile(path) as file:
        file.begin(header())
        file.append([PolicyRecord(policy=POLICY), *records()])
    assert list(read_rollouts(path)) == [header(), PolicyRecord(policy=POLICY), *records()]


def test_a_file_made_for_nothing_is_removed(path: Path) -> None:
    with RolloutFile(path):
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("cut", range(1, 400, 57))
def test_a_torn_last_line_is_left_out_and_cut_off(path: Path, cut: int) -> None:
    with RolloutFile(path) as file:
        file.begin(header())
        file.append(records())
    whole = path.read_bytes()
    os.truncate(path, len(whole) - cut)
    assert list(read_rollouts(path)) == [header(), records()[0]]
    with RolloutFile(path) as file:
        assert file.made("p", (1, 2)) == {0}
        file.append(records()[1:])
        assert file.made("p", (1, 2)) == {0, 1}
    assert path.read_bytes() == whole


def test_a_torn_header_is_begun_again(path: Path) -> None:
    path.write_bytes(encode_record(header())[:50])
    with RolloutFile(path) as file:
        assert file.header is None
        file.begin(header())
    assert list(read_rollouts(path)) == [header()]


def test_another_model_name_or_machine_or_version_number_does_not_matter(path: Path) -> None:
    with RolloutFile(path) as file:
        file.begin(header())
        file.begin(header(model="elsewhere", policy=PolicyVersion(0, POLICY.digest)))
    assert list(read_rollouts(path)) == [header()]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"policy": PolicyVersion(4, "e" * 64)}, "policy digest: 'dddddddddddd' in the file, 'eeeeeeeeeeee' now"),
        ({"numerics": "fast"}, "numerics: 'invariant' in the file, 'fast' now"),
        (
            {"params": SamplingParams(n=3, temperature=0.7, stop_token_ids=(3,), seed=1)},
            "n: 2 in the file, 3 now; seed",
        ),
    ],
)
def test_a_header_that_disagrees_is_refused_by_name(path: Path, changes: dict[str, object], named: str) -> None:
    with RolloutFile(path) as file:
        file.begin(header())
        with pytest.raises(RolloutFileError) as error:
            file.begin(header(**changes))
    assert named in str(error.value)


def test_samples_of_another_prompt_under_one_id_are_refused(path: Path) -> None:
    with RolloutFile(path) as file:
        file.begin(header())
        file.append(records())
        assert file.made("other", (9,)) == set()
        with pytest.raises(RolloutFileError, match="another prompt under the id 'p'"):
            file.made("p", (1, 3))


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([encode_record(header()), b"{}\n"], "line 2 is not a record"),
        ([encode_record(header()), b"\xff\n"], "line 2 is not a record"),
        ([encode_record(records()[0])], "has no header in its first line"),
        ([encode_record(header()), encode_record(header())], "has a second header in line 2"),
    ],
)
def test_a_damaged_file_is_refused_and_left_as_it_is(path: Path, lines: list[bytes], sentence: str) -> None:
    path.write_bytes(b"".join(lines))
    with pytest.raises(RolloutFileError, match=sentence):
        RolloutFile(path)
    with pytest.raises(RolloutFileError, match=sentence):
        list(read_rollouts(path))
    assert path.read_bytes() == b"".join(lines)


def test_a_second_writer_is_refused_until_the_first_is_done(path: Path) -> None:
    with RolloutFile(path) as file:
        file.begin(header())
        with pytest.raises(RolloutFileError, match="written by another run"):
            RolloutFile(path)
    with RolloutFile(path) as file:
        assert file.header == header()


def test_nothing_but_a_record_decodes() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_record(b'{"type": "sample"}')
