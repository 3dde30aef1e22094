"""Rows of Parquet files as payloads: columns where they are read, an Arrow stream of one row where one is stored."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import starmap
from typing import Final, cast

import pyarrow as pa

from stormproof.core.base.arrow import cast_within, pc
from stormproof.core.base.errors import UsageError
from stormproof.core.contract.payload import JsonDecoder, payload_in
from stormproof.core.contract.source import Decoded
from stormproof.core.user_code.functions import nulls_refused

_ARROW_STREAM: Final = b"\xff\xff\xff\xff"
"""How an Arrow stream begins."""


@dataclass(frozen=True, slots=True)
class RowDecoder:
    """The payload is a row with the schema's columns (a struct). Nothing is copied where the types are the same.

    A value that its field cannot hold (NULL, too large, too precise) fails its message. Numbers of another size are
    converted, and a date is the midnight of a timestamp (`converts`); docs/sources.md has the table.
    """

    schema: pa.Schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Take the columns by name, and convert those that have another type in the file."""
        columns: list[pa.Array] = []
        errors: dict[int, str] = {}
        there = dict(zip((field.name for field in payload.type), payload.flatten(), strict=True))
        for field in self.schema:
            column = there.get(field.name)
            if column is None:
                text = f"it was stored before field {field.name!r} was read, and its file's other columns were not kept"
                errors = dict.fromkeys(range(len(payload)), text)
                columns.append(pa.nulls(len(payload), field.type))
                continue
            failed: list[tuple[int, str]] = []
            if column.type != field.type:
                try:
                    column = _converted(column, field.type)
                except pa.ArrowInvalid:
                    column, failed = _one_by_one(column, field)
            for row, text in (*failed, *nulls_refused(column, field)):
                errors.setdefault(row, text)
            columns.append(column)
        return Decoded(pa.RecordBatch.from_arrays(columns, schema=self.schema), None, sorted(errors.items()))


_KINDS: Final = (
    ("integer", pa.types.is_integer),
    ("decimal", pa.types.is_decimal),
    ("real", pa.types.is_floating),
    ("date", pa.types.is_date),
    ("timestamp", pa.types.is_timestamp),
    ("text", lambda type_: type_ in (pa.string(), pa.large_string(), pa.string_view())),
    ("bytes", lambda type_: pa.types.is_fixed_size_binary(type_) or type_ in (pa.binary(), pa.large_binary())),
)
_WIDER: Final = ("integer decimal", "integer real", "decimal real", "date timestamp", "text bytes", "bytes text")
"""Pairs of kinds of which the second takes the first."""


def converts(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of a file is read as a field of another type. No text is a number, no number a boolean or a date."""
    try:
        pa.array([], found).cast(wanted)
    except pa.ArrowNotImplementedError:
        return False
    return all(starmap(_converts, zip(_leaves(found), _leaves(wanted), strict=False)))


def _leaves(type_: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_dictionary(type_):
        return [type_.value_type]
    if not pa.types.is_nested(type_):
        return [type_]
    return [leaf for place in range(type_.num_fields) for leaf in _leaves(type_.field(place).type)]


def _converts(found: pa.DataType, wanted: pa.DataType) -> bool:
    one, other = (next((kind for kind, is_kind in _KINDS if is_kind(type_)), str(type_)) for type_ in (found, wanted))
    return one in (other, "null") or f"{one} {other}" in _WIDER


def _converted(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """Raises pa.ArrowInvalid where a value would be changed. A number in a float or a double is rounded, as everywhere."""
    if pa.types.is_integer(column.type) and pa.types.is_decimal(type_):
        column = pc.cast(
            column, pa.decimal128(38, type_.scale)
        )  # else Arrow asks for all digits that an integer may have
    return cast_within(column, type_, safe=not (pa.types.is_integer(column.type) and pa.types.is_floating(type_)))


def _one_by_one(column: pa.Array, field: pa.Field) -> tuple[pa.Array, list[tuple[int, str]]]:
    values: list[pa.Array] = []
    errors: list[tuple[int, str]] = []
    nothing = pa.nulls(1, field.type)
    for row in range(len(column)):
        try:
            values.append(_converted(column.take(pa.array([row])), field.type))  # a slice has all of its list's items
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


def unpack(payloads: Sequence[bytes]) -> list[pa.StructArray]:
    """Stored rows as columns: one array for each run of rows with the same columns.

    Raises:
        UsageError: a payload is not a stored row.
    """
    runs: list[list[pa.StructArray]] = []
    for payload in payloads:
        try:
            with pa.ipc.open_stream(payload) as reader:
                row = as_struct(reader.read_all().combine_chunks().to_batches()[0])
        except (pa.ArrowInvalid, IndexError) as error:
            raise UsageError(
                f"a stored payload of {len(payload)} bytes is not a row of a Parquet file: {error}"
            ) from error
        if runs and runs[-1][0].type == row.type:
            runs[-1].append(row)
        else:
            runs.append([row])
    return [pa.concat_arrays(run) for run in runs]


def shown_payload(payload: bytes) -> str:
    """A stored payload as text for people: a Parquet row as in `editable`; bytes that are not UTF-8 are escaped."""
    return editable(payload).decode("utf-8", "backslashreplace")


def editable(payload: bytes) -> bytes:
    """A stored payload in the form that a person edits: a Parquet row as a JSON object, any other payload as it came.

    A row with a single column of text or bytes is that text or those bytes. Columns whose value JSON cannot hold, such as
    bytes that are not UTF-8, are left out; `edited` keeps them as they are.
    """
    row = _row_of(payload)
    if row is None:
        return payload_in(payload)
    only = _bare_column(row.type)
    if only is not None:
        value = row.field(only)[0].as_py()
        return b"" if value is None else value.encode() if isinstance(value, str) else bytes(value)
    shown: dict[str, object] = {}
    for field in row.type:
        with suppress(_NotJson, UnicodeDecodeError):
            value = row.field(field.name)[0].as_py()
            shown[field.name] = value.decode() if isinstance(value, bytes) else _json_of(value)
    return json.dumps(shown, ensure_ascii=False).encode()


def edited(stored: bytes, given: bytes) -> bytes:
    """The payload to store in place of `stored`, from the edited form of `editable`.

    Raises:
        UsageError: the row has several columns, and `given` is not a JSON object, names another column, or has a value
            that its column cannot hold.
    """
    row = _row_of(stored)
    if row is None:
        return given
    only = _bare_column(row.type)
    if only is not None:
        try:
            value: object = given.decode() if pa.types.is_string(row.type.field(only).type) else given
        except UnicodeDecodeError as error:
            raise UsageError(f"column {only!r} is text, and the payload is not UTF-8: {error}", column=only) from error
        return pack(pa.StructArray.from_arrays([pa.array([value], row.type.field(only).type)], fields=list(row.type)))[
            0
        ]
    try:
        parts: object = json.loads(given)
    except ValueError as error:
        raise UsageError(f"the payload is a row of a Parquet file, so it is given as a JSON object: {error}") from error
    names = [field.name for field in row.type]
    if not isinstance(parts, dict):
        raise UsageError(
            f"the payload is a row of a Parquet file, so it is given as a JSON object with the columns "
            f"{', '.join(names)}, not as a {type(parts).__name__}"
        )
    unknown = sorted(set(cast("dict[str, object]", parts)) - set(names))
    if unknown:
        raise UsageError(f"the row has no column {', '.join(unknown)}; it has {', '.join(names)}", columns=[*unknown])
    columns: list[pa.Array] = []
    for field in row.type:
        column = row.field(field.name)
        if field.name in parts:
            as_text = pa.field(field.name, pa.string()) if pa.types.is_binary(field.type) else field
            made = JsonDecoder(pa.schema([as_text])).decode(pa.array([given], pa.binary()))
            if made.failed:
                raise UsageError(f"column {field.name!r}: {made.failed[0][1]}", column=field.name)
            column = made.rows.column(0).cast(field.type)
        columns.append(column)
    return pack(pa.StructArray.from_arrays(columns, fields=list(row.type)))[0]


class _NotJson(ValueError):
    """A value that JSON cannot hold."""


def _row_of(payload: bytes) -> pa.StructArray | None:
    """A stored row; None where the payload is not one."""
    if payload[:4] != _ARROW_STREAM:
        return None
    try:
        (row,) = unpack([payload])
    except UsageError:
        return None
    return row


def _bare_column(type_: pa.StructType) -> str | None:
    """The column of a row that has a single column, of text or bytes; else None."""
    if type_.num_fields != 1:
        return None
    field = type_.field(0)
    return field.name if pa.types.is_string(field.type) or pa.types.is_binary(field.type) else None


def _json_of(value: object) -> object:
    """A value in JSON's types, which `JsonDecoder` reads back as the same value."""
    match value:
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case Decimal() if value.is_finite():
            return str(value)
        case datetime.date():  # a datetime is one
            return value.isoformat()
        case dict():
            return {str(name): _json_of(item) for name, item in cast("dict[str, object]", value).items()}
        case list():
            items = cast("list[object]", value)
            if any(isinstance(item, tuple) for item in items):  # a map's entries
                pairs = cast("list[tuple[object, object]]", items)
                if not all(isinstance(key, str) for key, _ in pairs):
                    raise _NotJson
                return {str(key): _json_of(item) for key, item in pairs}
            return [_json_of(item) for item in items]
        case _:
            raise _NotJson
