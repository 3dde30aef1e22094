"""Decoders: a message's bytes to the tuple that its stream's schema names.

One string column: the payload is UTF-8 text. One binary column: the payload itself. Anything else: a JSON object a
message, with a key for each column.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

import pyarrow as pa

from stormproof.core.compute import pc
from stormproof.core.convert import column_of
from stormproof.core.errors import TopologyError
from stormproof.core.message import storable_text
from stormproof.core.schema import SchemaLike, parse_schema
from stormproof.core.source.protocol import Decoded, Decoder

ERROR_MAX_CHARACTERS: Final = 500


def decoder_for(schema: SchemaLike) -> Decoder:
    """The decoder of a stream with this schema.

    Raises:
        TopologyError: JSON cannot hold one of its types (binary beside other columns).
    """
    parsed = parse_schema(schema)
    if len(parsed) == 1 and pa.types.is_string(parsed.field(0).type):
        return TextDecoder(parsed)
    if len(parsed) == 1 and pa.types.is_binary(parsed.field(0).type):
        return BytesDecoder(parsed)
    for field in parsed:
        _from_json(field)
    return JsonDecoder(parsed)


@dataclass(frozen=True, slots=True)
class TextDecoder:
    """The payload is UTF-8 text, in one string column. Bytes that are no UTF-8 fail their message."""

    schema: pa.Schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Check and pass on; no copy where all of it is good."""
        errors: list[tuple[int, str]] = []
        try:
            text = pc.cast(payload, pa.string())
        except pa.ArrowInvalid:
            kept: list[str] = []
            for row, value in enumerate(payload.to_pylist()):
                try:
                    kept.append(value.decode("utf-8"))
                except UnicodeDecodeError as error:
                    kept.append("")
                    errors.append(
                        (row, f"field {self.schema.names[0]!r} is text, and the payload is not UTF-8: {error}")
                    )
            text = pa.array(kept, pa.string())
        return Decoded(pa.RecordBatch.from_arrays([text], schema=self.schema), None, errors)


@dataclass(frozen=True, slots=True)
class BytesDecoder:
    """The payload itself, in one binary column; nothing can fail."""

    schema: pa.Schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Pass on."""
        return Decoded(pa.RecordBatch.from_arrays([payload], schema=self.schema), None, ())


class _FieldError(ValueError):
    """A JSON value that its field cannot hold."""


@dataclass(frozen=True, slots=True)
class JsonDecoder:
    """The payload is a JSON object in UTF-8 with a key a column; other keys are left out.

    A missing key or null is NULL. Dates and timestamps are ISO 8601 text, decimals are numbers or text. A number is not
    taken for text, nor text for a number.
    """

    schema: pa.Schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Read each payload, then make each column at once."""
        readers = [(field.name, _from_json(field)) for field in self.schema]
        columns: list[list[object]] = [[] for _ in readers]
        errors: dict[int, str] = {}
        for row, value in enumerate(payload.to_pylist()):
            try:
                parts: object = json.loads(
                    value.decode("utf-8"), parse_float=decimal.Decimal, parse_constant=_no_constant
                )
                if not isinstance(parts, dict):
                    raise _FieldError(f"the payload is JSON, but no object: {type(parts).__name__}")
                cells = [None if (cell := parts.get(name)) is None else read(cell) for name, read in readers]
            except (ValueError, RecursionError, OverflowError, decimal.DecimalException) as error:
                errors[row] = storable_text(_told(error), ERROR_MAX_CHARACTERS)
                cells = [None] * len(readers)
            for column, cell in zip(columns, cells, strict=True):
                column.append(cell)
        arrays: list[pa.Array] = []
        for column, field in zip(columns, self.schema, strict=True):
            array, failed = column_of(column, field)
            arrays.append(array)
            for row, text in failed:
                errors.setdefault(row, text)
        # Failed rows may be NULL in a NOT NULL field: they are removed before anybody looks at them.
        return Decoded(pa.RecordBatch.from_arrays(arrays, schema=self.schema), None, sorted(errors.items()))


def _told(error: Exception) -> str:
    if isinstance(error, _FieldError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"the payload is not UTF-8: {error}"
    return f"the payload is not JSON: {type(error).__name__}: {error}"


def _no_constant(name: str) -> NoReturn:
    raise _FieldError(f"the payload has {name}, which is not JSON")


def _from_json(field: pa.Field) -> Callable[[object], object]:
    """What turns a JSON value (floats read as Decimal) into what the field's column is made of."""
    return _reader(field.type, field.name)


def _reader(type_: pa.DataType, name: str) -> Callable[[object], object]:
    if pa.types.is_floating(type_):
        return lambda v: float(v) if isinstance(v, decimal.Decimal) else v
    if pa.types.is_decimal(type_):
        return lambda v: decimal.Decimal(v) if isinstance(v, str) else v
    if pa.types.is_timestamp(type_):
        return lambda v: _parsed(datetime.datetime.fromisoformat, v, name)
    if pa.types.is_date(type_):
        return lambda v: _parsed(datetime.date.fromisoformat, v, name)
    if pa.types.is_list(type_):
        item = _reader(type_.value_type, name)
        return lambda v: [None if x is None else item(x) for x in v] if isinstance(v, list) else v
    if pa.types.is_map(type_):
        item = _reader(type_.item_type, name)
        return lambda v: [(k, None if x is None else item(x)) for k, x in v.items()] if isinstance(v, dict) else v
    if pa.types.is_struct(type_):
        inner = {f.name: _reader(f.type, f.name) for f in (type_.field(i) for i in range(type_.num_fields))}
        return lambda v: (
            {k: None if v.get(k) is None else read(v[k]) for k, read in inner.items()} if isinstance(v, dict) else v
        )
    if pa.types.is_binary(type_):
        raise TopologyError(
            f"field {name!r} is binary, which JSON can't hold; use one binary column for the whole payload, or string",
            field=name,
        )
    return lambda v: v


def _parsed(parse: Callable[[str], object], value: object, name: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise _FieldError(f"field {name!r}: {error}") from error
