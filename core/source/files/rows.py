"""Rows of Parquet files as payloads: columns on the way that goes well, an Arrow stream of one row where one is stored."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from stormproof.core.compute import pc
from stormproof.core.convert import nulls_refused
from stormproof.core.errors import UsageError
from stormproof.core.source.protocol import Decoded


@dataclass(frozen=True, slots=True)
class RowDecoder:
    """The payload is a row with the schema's columns (a struct); nothing is copied where the types are the same.

    A value that its field cannot hold (NULL, too large, too precise) fails its message.
    """

    schema: pa.Schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Take the columns by name, and convert them where the file's types are others."""
        columns: list[pa.Array] = []
        errors: dict[int, str] = {}
        there = dict(zip((field.name for field in payload.type), payload.flatten(), strict=True))
        for field in self.schema:
            column = there[field.name]
            failed: list[tuple[int, str]] = []
            if column.type != field.type:
                try:
                    column = pc.cast(column, field.type)
                except pa.ArrowInvalid:
                    column, failed = _one_by_one(column, field)
            for row, text in (*failed, *nulls_refused(column, field)):
                errors.setdefault(row, text)
            columns.append(column)
        return Decoded(pa.RecordBatch.from_arrays(columns, schema=self.schema), None, sorted(errors.items()))


def _one_by_one(column: pa.Array, field: pa.Field) -> tuple[pa.Array, list[tuple[int, str]]]:
    values: list[pa.Array] = []
    errors: list[tuple[int, str]] = []
    nothing = pa.nulls(1, field.type)
    for row in range(len(column)):
        try:
            values.append(pc.cast(column.slice(row, 1), field.type))
        except pa.ArrowInvalid as error:
            values.append(nothing)
            errors.append((row, f"field {field.name!r} is {field.type}: {error}"))
    return pa.concat_arrays(values), errors


def as_struct(batch: pa.RecordBatch) -> pa.StructArray:
    """Rows as one column."""
    return pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))


def pack(rows: pa.StructArray) -> list[bytes]:
    """Each row as an Arrow stream, to be stored."""
    packed: list[bytes] = []
    for place in range(len(rows)):
        # Taken, not sliced: a slice would carry the whole column's buffers along.
        batch = pa.RecordBatch.from_struct_array(rows.take(pa.array([place])))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        packed.append(sink.getvalue().to_pybytes())
    return packed


def unpack(payloads: list[bytes]) -> list[pa.StructArray]:
    """Stored rows as columns: one array for each run of rows with the same columns.

    Raises:
        UsageError: one is no stored row.
    """
    runs: list[list[pa.StructArray]] = []
    for payload in payloads:
        try:
            with pa.ipc.open_stream(payload) as reader:
                row = as_struct(reader.read_all().combine_chunks().to_batches()[0])
        except (pa.ArrowInvalid, IndexError) as error:
            raise UsageError(
                f"a stored payload of {len(payload)} bytes is no row of a Parquet file: {error}"
            ) from error
        if runs and runs[-1][0].type == row.type:
            runs[-1].append(row)
        else:
            runs.append([row])
    return [pa.concat_arrays(run) for run in runs]


def shown_payload(payload: bytes) -> str:
    """A stored row as text for people; a payload that is none as it is."""
    if payload[:4] != b"\xff\xff\xff\xff":
        return payload.decode("utf-8", "backslashreplace")
    try:
        (row,) = unpack([payload])
    except UsageError:
        return payload.decode("utf-8", "backslashreplace")
    return repr(row[0].as_py())
