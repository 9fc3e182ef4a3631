"""Rollouts as Arrow tables, Parquet files and Hugging Face datasets. Needs the extra `arrow` (`pyarrow`).

One row a sample. Nothing is lost: log-probabilities are float32 columns, and the header and the policy records, which
are not of any one sample, travel in the metadata of the table's schema. The JSON Lines file stays the file of record;
these are for analysis and for training pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attrs import asdict

from aengine.audit.record import PolicyRecord, Record, RolloutHeader, SampleRecord
from aengine.errors import RolloutFileError
from aengine.params import SamplingParams

__all__ = ["SCHEMA", "from_arrow", "read_parquet", "to_arrow", "to_dataset", "write_parquet"]

HEADER, POLICIES = b"aengine.header", b"aengine.policies"
ROWS_AT_ONCE = 1024

_SPAN = [("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())]
_ALTERNATIVE = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])

SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "request_id": pa.string(),
        "index": pa.int32(),
        "prompt_token_ids": pa.list_(pa.int32()),
        "token_ids": pa.list_(pa.int32()),
        "text": pa.string(),
        "logprobs": pa.list_(pa.float32()),
        "raw_logprobs": pa.list_(pa.float32()),
        "finish_reason": pa.string(),
        "stop_token_id": pa.int32(),
        "stop_string": pa.string(),
        "version_spans": pa.list_(pa.struct(_SPAN)),
        "kv_spans": pa.list_(pa.struct([*_SPAN, ("first_token", pa.int32()), ("last_token", pa.int32())])),
        "seed": pa.uint64(),
        "params": pa.string(),
        "numerics": pa.string(),
        "num_cached_tokens": pa.int32(),
        "num_preemptions": pa.int32(),
        "has_token_mask": pa.bool_(),
        "top_logprobs": pa.list_(pa.list_(_ALTERNATIVE)),
        "reward": pa.float64(),
    }
)
"""The columns: those of `SampleRecord`, with `stop_reason` in two of them and `params` as JSON."""


class _PlacedPolicy(msgspec.Struct, frozen=True):
    """A policy record, and how many samples come before it."""

    row: int
    record: PolicyRecord


def to_arrow(records: Iterable[Record]) -> pa.Table:
    """The samples of a rollouts file (`read_rollouts`), or of any records that begin with a header.

    Raises `RolloutFileError` if there is no header, and, naming the sample, for a log-probability that is not a
    float32 value.
    """
    rest = iter(records)
    header = next(rest, None)
    if not isinstance(header, RolloutHeader):
        raise RolloutFileError("the records do not begin with a header")
    policies: list[_PlacedPolicy] = []
    batches: list[pa.RecordBatch] = []
    rows = _rows(rest, policies)
    while several := list(islice(rows, ROWS_AT_ONCE)):
        batches.append(pa.RecordBatch.from_pylist(several, schema=SCHEMA))
    metadata = {HEADER: msgspec.json.encode(header), POLICIES: msgspec.json.encode(policies)}
    return pa.Table.from_batches(batches, SCHEMA).replace_schema_metadata(metadata)


def from_arrow(table: pa.Table) -> Iterator[Record]:
    """The records that `to_arrow` was given, header first. Raises `RolloutFileError` for a table that is not of it."""
    metadata = table.schema.metadata or {}
    if HEADER not in metadata or POLICIES not in metadata:
        raise RolloutFileError("the table has no header of rollouts in its metadata; `to_arrow` makes one that has")
    try:
        yield msgspec.json.decode(metadata[HEADER], type=RolloutHeader)
        policies = msgspec.json.decode(metadata[POLICIES], type=list[_PlacedPolicy])
        yield from _in_order(_samples(table), policies)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise RolloutFileError(f"the table does not hold rollouts as `to_arrow` writes them: {error}") from error


def write_parquet(records: Iterable[Record], path: str | Path) -> int:
    """Write the samples as a Parquet file, which appears whole or not at all; returns how many there are.

    Raises as `to_arrow` does, and `OSError`.
    """
    table, path = to_arrow(records), Path(path)
    part = path.with_name(path.name + ".part")
    try:
        pq.write_table(table, part, compression="zstd")
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return int(table.num_rows)


def read_parquet(path: str | Path) -> Iterator[Record]:
    """The records that `write_parquet` was given, header first. Raises `RolloutFileError` for another file, and
    `OSError`."""
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise RolloutFileError(f"{path} is not a Parquet file: {error}") from error
    yield from from_arrow(table)


def to_dataset(records: Iterable[Record]) -> Any:
    """The samples as a `datasets.Dataset`, columns as in `SCHEMA`; it does not keep the header and the policy records.
    Needs the extra `datasets`."""
    import datasets

    return datasets.Dataset(to_arrow(records))


def _rows(records: Iterable[Record], policies: list[_PlacedPolicy]) -> Iterator[dict[str, Any]]:
    """Samples as rows; policy records are put into `policies`."""
    row = 0
    for record in records:
        if isinstance(record, SampleRecord):
            yield _row(record)
            row += 1
        elif isinstance(record, PolicyRecord):
            policies.append(_PlacedPolicy(row, record))
        else:
            raise RolloutFileError("the records have a second header")


def _row(record: SampleRecord) -> dict[str, Any]:
    top = record.top_logprobs
    for name, values in (("logprobs", record.logprobs), ("raw_logprobs", record.raw_logprobs)):
        _refuse_wider(record, name, values)
    _refuse_wider(record, "top_logprobs", [logprob for kept in top or () for _, logprob in kept])
    reason = record.stop_reason
    return {
        **{name: getattr(record, name) for name in SCHEMA.names if hasattr(record, name)},
        "stop_token_id": reason if isinstance(reason, int) else None,
        "stop_string": reason if isinstance(reason, str) else None,
        "version_spans": [asdict(span) for span in record.version_spans],
        "kv_spans": [asdict(span) for span in record.kv_spans],
        "params": msgspec.json.encode(record.params).decode(),
        "top_logprobs": None if top is None else [[_alternative(*pair) for pair in kept] for kept in top],
    }


def _alternative(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": logprob}


def _refuse_wider(record: SampleRecord, name: str, values: Sequence[float]) -> None:
    wide = np.asarray(values, np.float64)
    if len(wrong := np.flatnonzero(wide.astype(np.float32) != wide)):
        raise RolloutFileError(
            f"sample {record.index} of {record.prompt_id}: {name} has {wide[wrong[0]]!r}, which is not a float32 value"
        )


def _samples(table: pa.Table) -> Iterator[SampleRecord]:
    for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        yield from map(_sample, batch.to_pylist())


def _sample(row: dict[str, Any]) -> SampleRecord:
    token_id, string, top = row.pop("stop_token_id"), row.pop("stop_string"), row.pop("top_logprobs")
    fields = row | {
        "stop_reason": token_id if string is None else string,
        "params": msgspec.json.decode(row["params"], type=SamplingParams),
        "top_logprobs": top and [[(pair["token_id"], pair["logprob"]) for pair in kept] for kept in top],
    }
    return msgspec.convert({"type": "sample", **fields}, SampleRecord)


def _in_order(samples: Iterator[SampleRecord], policies: Iterable[_PlacedPolicy]) -> Iterator[Record]:
    at = 0
    for policy in policies:
        yield from islice(samples, policy.row - at)
        at = policy.row
        yield policy.record
    yield from samples
