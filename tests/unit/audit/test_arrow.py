"""Rollouts as tables: nothing is lost on the way there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audit_support import PARAMS, POLICY, header, output, records, sample_of
from hypothesis import given
from hypothesis import strategies as st

from aengine.audit.arrow import SCHEMA, from_arrow, read_parquet, to_arrow, to_dataset, write_parquet
from aengine.audit.record import PolicyRecord, Record, SampleRecord
from aengine.errors import RolloutFileError
from aengine.outputs import KVSpan, VersionSpan
from aengine.params import SamplingParams
from aengine.policy.version import PolicyVersion

SECOND = PolicyRecord(policy=PolicyVersion(5, "e" * 64))
FULL = msgspec.structs.replace(
    sample_of(output(-0.5, -1.5)),
    prompt_id="full",
    text=None,
    stop_reason="\n\n",
    version_spans=(VersionSpan(4, 0, 1), VersionSpan(2**40, 1, 2)),
    kv_spans=(KVSpan(4, 0, 3, 0, 1), KVSpan(2**40, 0, 4, 1, 2)),
    params=SamplingParams(logit_bias={3: -1.5}, stop=("\n\n",), allowed_token_ids=(1, 2), logprobs=1, seed=2**64 - 1),
    has_token_mask=True,
    top_logprobs=(((1, -0.25), (0, -0.5)), ()),
    reward=0.1,
)
EMPTY = msgspec.structs.replace(
    FULL,
    prompt_id="empty",
    token_ids=(),
    logprobs=(),
    raw_logprobs=(),
    version_spans=(),
    kv_spans=(),
    stop_reason=None,
    finish_reason=None,
    top_logprobs=None,
    reward=None,
)


def everything() -> list[Record]:
    """Policy records before, between, side by side and behind the samples."""
    first = PolicyRecord(policy=POLICY)
    return [header(), first, *records("p"), first, SECOND, FULL, EMPTY, *records("q"), SECOND]


def test_every_field_of_a_sample_has_its_column() -> None:
    fields = {field.name for field in msgspec.structs.fields(SampleRecord)}
    assert set(SCHEMA.names) == fields - {"stop_reason"} | {"stop_token_id", "stop_string"}


def test_records_come_back_as_they_went() -> None:
    table = to_arrow(everything())
    assert table.num_rows == 6
    assert list(from_arrow(table)) == everything()


def test_records_come_back_from_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.parquet"
    assert write_parquet(iter(everything()), path) == 6
    assert list(read_parquet(path)) == everything()
    assert list(tmp_path.iterdir()) == [path]
    assert pq.read_schema(path).remove_metadata().equals(SCHEMA)


def test_a_run_without_samples_is_a_table_without_rows(tmp_path: Path) -> None:
    for some in ([header()], [header(), SECOND]):
        write_parquet(some, tmp_path / "empty.parquet")
        assert list(read_parquet(tmp_path / "empty.parquet")) == some


def test_many_samples_are_taken_batch_by_batch() -> None:
    samples = [msgspec.structs.replace(records()[0], prompt_id=str(number)) for number in range(2500)]
    rows: list[Record] = [header(), *samples[:2000], SECOND, *samples[2000:]]
    table = to_arrow(rows)
    assert table.column("logprobs").num_chunks == 3
    assert list(from_arrow(table)) == rows


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_bits_of_any_float32_survive_a_table(logprobs: list[float]) -> None:
    (_, back) = from_arrow(to_arrow([header(), sample_of(output(*logprobs))]))
    assert isinstance(back, SampleRecord)
    for ours, theirs in ((back.logprobs, logprobs), (back.raw_logprobs, logprobs[::-1])):
        assert np.array(ours, np.float32).tobytes() == np.array(theirs, np.float32).tobytes()


def test_columns_are_what_a_program_wants_to_compute_with() -> None:
    table = to_arrow(everything())
    assert table.schema.field("logprobs").type == pa.list_(pa.float32())
    assert table.column("seed").to_pylist() == [2**64 - 1] * 6
    assert table.column("kv_spans").to_pylist()[0] == [
        {"version": 4, "start": 0, "end": 4, "first_token": 0, "last_token": 2}
    ]
    assert table.column("stop_token_id").to_pylist() == [3, 3, None, None, 3, 3]
    assert table.column("stop_string").to_pylist()[2] == "\n\n"
    assert msgspec.json.decode(table.column("params").to_pylist()[0], type=SamplingParams) == PARAMS


@pytest.mark.parametrize("name", ["logprobs", "raw_logprobs"])
def test_a_number_that_is_no_float32_is_refused_and_not_rounded(name: str) -> None:
    sample: Any = msgspec.structs.replace(FULL, **{name: (-0.5, -0.1)})
    with pytest.raises(RolloutFileError, match=rf"sample 0 of full: {name} has .*-0\.1.*, which is not a float32"):
        to_arrow([header(), sample])


def test_an_alternative_that_is_no_float32_is_refused_too() -> None:
    sample = msgspec.structs.replace(FULL, top_logprobs=(((1, -0.25),), ((2, -0.3),)))
    with pytest.raises(RolloutFileError, match="top_logprobs"):
        to_arrow([header(), sample])


@pytest.mark.parametrize("some", [[], [FULL], [header(), header()]])
def test_records_need_one_header(some: list[Record]) -> None:
    with pytest.raises(RolloutFileError, match="header"):
        to_arrow(some)


def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RolloutFileError, match="no header of rollouts"):
        list(from_arrow(pa.table({"a": [1]})))
    metadata = to_arrow(everything()).schema.metadata
    with pytest.raises(RolloutFileError, match="does not hold rollouts"):
        list(from_arrow(pa.table({"a": [1]}).replace_schema_metadata(metadata)))
    (tmp_path / "text").write_text("not a table", encoding="utf-8")
    with pytest.raises(RolloutFileError, match="text is not a Parquet file"):
        list(read_parquet(tmp_path / "text"))
    with pytest.raises(FileNotFoundError):
        list(read_parquet(tmp_path / "missing"))


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_parquet(everything(), tmp_path / "taken")
    assert list(tmp_path.iterdir()) == [tmp_path / "taken"]


def test_a_dataset_has_the_samples_as_rows_and_keeps_their_bits() -> None:
    pytest.importorskip("datasets")
    dataset = to_dataset(everything())
    assert dataset.num_rows == 6
    assert dataset.column_names == SCHEMA.names
    assert dataset[2]["prompt_id"] == "full"
    assert dataset[2]["logprobs"] == list(FULL.logprobs)
    assert dataset.filter(lambda row: row["reward"] == 1.0).num_rows == 2
    table = dataset.data.table.replace_schema_metadata(to_arrow(everything()).schema.metadata)
    assert list(from_arrow(table)) == everything()
