"""A message's payload: how it is decoded to tuples of its stream's schema, and how a broker's message is stored.

With one string column the payload is UTF-8 text, with one binary column the payload itself. With any other schema it is a
JSON object with a key for each column. A message may also be a unit of several tuples: lines of these, or a JSON array.

A broker's message is stored as its payload, as the server sent it, and all that the server says of it beside that. Nothing
of it depends on what a source was made with: fields, decoder and metadata are chosen when it is read.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from types import NoneType
from typing import Any, Final, Literal, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import TopologyError, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.contract.schema import SchemaLike, parse_schema
from stormproof.core.contract.source import Decoded, Decoder
from stormproof.core.user_code.functions import fits_strictly, rows_of_columns, type_text, value_text

ERROR_MAX_CHARACTERS: Final = 500
_NUMBER_MAX_CHARACTERS: Final = 60
_DIGITS_MAX: Final = sys.int_info.default_max_str_digits
_FLOAT_END: Final = 2.0**128 - 2.0**103
"""The least number that a 32-bit float rounds to infinity."""
_DECIMAL: Final = re.compile(r"[-+.0-9eE]+")
_TOO_FINE: Final = re.compile(r"[.,][0-9]{6}[0-9]*[1-9]")
"""Digits behind the microseconds, which Python cuts off."""

Unit: TypeAlias = Literal["lines", "json"]
"""The form of several tuples in one message: one a line, or the rows of a JSON array."""


def decoder_for(schema: SchemaLike, unit: Unit | None = None) -> Decoder:
    """The decoder for a stream with this schema; with a `unit`, a message holds several tuples.

    Raises:
        TopologyError: there is no such unit, or JSON cannot hold a type of the schema: binary beside other columns.
    """
    parsed = parse_schema(schema)
    if unit is None:
        return _of_single(parsed)
    if unit == "lines":
        return LinesDecoder(_of_single(parsed))
    if unit == "json":
        return JsonArrayDecoder(parsed)
    raise TopologyError(f"no message unit {unit!r}; it is 'lines', 'json' or None (a message is one tuple)", unit=unit)


def _of_single(parsed: pa.Schema) -> Decoder:
    if len(parsed) == 1 and pa.types.is_string(parsed.field(0).type):
        return TextDecoder(parsed)
    if len(parsed) == 1 and pa.types.is_binary(parsed.field(0).type):
        return BytesDecoder(parsed)
    return JsonDecoder(parsed)


@dataclass(frozen=True, slots=True)
class TextDecoder:
    """The payload is UTF-8 text, in one string column. Bytes that are not UTF-8 fail their message."""

    schema: pa.Schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Check that payloads are UTF-8; they are copied only where some are not."""
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
    """The payload itself, in one binary column. No message can fail."""

    schema: pa.Schema

    def decode(self, payload: pa.Array) -> Decoded:
        """The payloads as they are."""
        return Decoded(pa.RecordBatch.from_arrays([payload], schema=self.schema), None, ())


class _FieldError(ValueError):
    """A JSON value that its field cannot hold."""


@dataclass(frozen=True, slots=True)
class JsonDecoder:
    """The payload is a JSON object in UTF-8 with a key for each column; other keys are ignored.

    A missing key or null is NULL; of a key that comes twice the last one counts. Dates and timestamps are ISO 8601 text,
    decimals are numbers or text. Numbers are not converted to text, nor text to numbers; docs/sources.md has the table.
    Raises TopologyError where JSON cannot hold a type of the schema.
    """

    schema: pa.Schema

    def __post_init__(self) -> None:
        _readers(self.schema)

    def decode(self, payload: pa.Array) -> Decoded:
        """Read each payload, then make each column at once."""
        errors: dict[int, str] = {}
        values = [_parsed_json(value, row, errors) for row, value in enumerate(payload.to_pylist())]
        # Failed rows may be NULL in a NOT NULL field: they are removed before anything reads them.
        return Decoded(_batch_of(values, self.schema, errors), None, sorted(errors.items()))


@dataclass(frozen=True, slots=True)
class LinesDecoder:
    r"""The payload is a message unit of lines, split at ``\n`` only; the decoder `line` decodes each.

    A ``\n`` at the end of the payload ends the last line; it does not begin another. An empty payload has no line. Where a
    line does not decode, its message fails.
    """

    line: Decoder

    @property
    def schema(self) -> pa.Schema:
        """The fields of a line's tuple."""
        return self.line.schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Split all payloads at once, then decode all lines at once."""
        parts = pc.split_pattern(payload, "\n")
        lines = parts.flatten()
        counts = pc.list_value_length(parts).to_numpy(zero_copy_only=False).astype(np.int64)
        last = np.cumsum(counts) - 1  # every payload has at least one part
        ends = last[pc.binary_length(lines).to_numpy(zero_copy_only=False)[last] == 0] if len(last) else last
        if len(ends):
            kept = np.ones(len(lines), np.bool_)
            kept[ends] = False
            counts[np.searchsorted(last, ends)] -= 1
            lines = lines.filter(pa.array(kept))
        made = self.line.decode(lines)
        return _unit(made.rows, counts, dict(made.failed), {})


@dataclass(frozen=True, slots=True)
class JsonArrayDecoder:
    """The payload is a message unit: a JSON array in UTF-8 whose rows are objects as `JsonDecoder` reads them.

    Where the schema is one string column, a row may be the text itself. Where a row cannot be read, its message fails.
    Raises TopologyError where JSON cannot hold a type of the schema.
    """

    schema: pa.Schema

    def __post_init__(self) -> None:
        _readers(self.schema)

    def decode(self, payload: pa.Array) -> Decoded:
        """Read each payload, then make each column at once, from the rows of all payloads."""
        bare = self.schema.names[0] if len(self.schema) == 1 and pa.types.is_string(self.schema.field(0).type) else None
        broken: dict[int, str] = {}
        values: list[object] = []
        counts = np.zeros(len(payload), np.int64)
        for number, value in enumerate(payload.to_pylist()):
            parts = _parsed_json(value, number, broken)
            if isinstance(parts, list):
                counts[number] = len(parts)
                values.extend({bare: part} if bare is not None and isinstance(part, str) else part for part in parts)
            else:
                broken.setdefault(number, f"the payload is JSON, but not an array: {type(parts).__name__}")
        errors: dict[int, str] = {}
        return _unit(_batch_of(values, self.schema, errors), counts, errors, broken)


def _unit(rows: pa.RecordBatch, counts: Rows, errors: Mapping[int, str], broken: Mapping[int, str]) -> Decoded:
    """What was decoded of units: a row that failed (`errors`, by row) fails its message, whose rows are removed.

    `broken` has the messages that have failed already.
    """
    if not errors:
        return Decoded(rows, counts, sorted(broken.items()))
    ends = np.cumsum(counts)
    failed = dict(broken)
    for row in sorted(errors):
        number = int(np.searchsorted(ends, row, side="right"))
        place = row - int(ends[number] - counts[number]) + 1
        text = f"row {place} of {counts[number]} in the message: {errors[row]}"
        failed.setdefault(number, storable_text(text, ERROR_MAX_CHARACTERS))
    good = np.ones(len(counts), np.bool_)
    good[list(failed)] = False
    kept = rows.filter(pa.array(np.repeat(good, counts)))
    return Decoded(kept, np.where(good, counts, 0), sorted(failed.items()))


def _parsed_json(value: bytes, row: int, errors: dict[int, str]) -> object:
    """The payload's JSON; where it cannot be read, None, and the error is added to `errors`."""
    try:
        return json.loads(value.decode("utf-8"), parse_float=decimal.Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError, OverflowError, decimal.DecimalException) as error:
        errors[row] = storable_text(_told(error, value), ERROR_MAX_CHARACTERS)
        return None


def _batch_of(values: Sequence[object], schema: pa.Schema, errors: dict[int, str]) -> pa.RecordBatch:
    """JSON objects as rows; the errors of those that do not fit are added to `errors`, which may have some already."""
    readers = _readers(schema)
    columns: list[list[object]] = [[] for _ in readers]
    for row, parts in enumerate(values):
        cells: list[object] = [None] * len(readers)
        if isinstance(parts, dict):
            try:
                cells = [None if (cell := parts.get(name)) is None else read(cell) for name, read in readers]
            except (ValueError, RecursionError, OverflowError, decimal.DecimalException) as error:
                errors[row] = storable_text(_told(error), ERROR_MAX_CHARACTERS)
        elif row not in errors:
            errors[row] = f"the payload is JSON, but not an object: {type(parts).__name__}"
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    return rows_of_columns(columns, schema, errors)


def _told(error: Exception, payload: bytes = b"") -> str:
    if isinstance(error, _FieldError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"the payload is not UTF-8: {error}"
    if isinstance(error, json.JSONDecodeError):
        return f"the payload is not JSON: {error}"
    if isinstance(error, RecursionError):
        return "the payload is not JSON that can be read: its arrays or objects are nested too deeply"
    return _unreadable_number(payload) or f"the payload is not JSON that can be read: {type(error).__name__}: {error}"


def _unreadable_number(payload: bytes) -> str | None:
    """The error of the first number that Python cannot read, in a payload that is otherwise JSON."""
    try:
        json.loads(payload, parse_float=_number, parse_int=_number)
    except _FieldError as error:
        return str(error)
    except (ValueError, RecursionError):
        return None
    return None


def _number(text: str) -> None:
    try:
        is_readable = decimal.Decimal(text).is_finite() and len(text) <= _DIGITS_MAX
    except decimal.DecimalException:
        is_readable = False
    if not is_readable:
        known = storable_text(text, _NUMBER_MAX_CHARACTERS)
        raise _FieldError(f"the payload has the number {known}, which is too large to be read")


def _no_constant(name: str) -> NoReturn:
    raise _FieldError(f"the payload has {name}, which is not JSON")


def _readers(schema: pa.Schema) -> list[tuple[str, Callable[[object], object]]]:
    """For each field, its name and what turns a JSON value (floats read as Decimal) into a value of its column.

    Raises:
        TopologyError: JSON cannot hold the field's type.
    """
    return [(field.name, _reader(field.type, field.name)) for field in schema]


def _reader(type_: pa.DataType, name: str) -> Callable[[object], object]:
    """The reader of one type; `name` is the field's with the names of the structs around it: ``order.price``."""
    if pa.types.is_floating(type_):
        return lambda v: _real(v, type_, name) if type(v) in (decimal.Decimal, int) else v
    if pa.types.is_decimal(type_):
        return lambda v: _decimal(v, type_, name) if isinstance(v, str) else v
    if pa.types.is_timestamp(type_):
        return lambda v: _parsed(_timestamp, v, type_, name)
    if pa.types.is_date(type_):
        return lambda v: _parsed(datetime.date.fromisoformat, v, type_, name)
    if pa.types.is_list(type_):
        item = _inner(type_.value_field, name)
        return lambda v: [item(x) for x in v] if isinstance(v, list) else v
    if pa.types.is_map(type_):
        item = _inner(type_.item_field, name)
        return lambda v: [(k, item(x)) for k, x in v.items()] if isinstance(v, dict) else v
    if pa.types.is_struct(type_):
        inner = {f.name: _inner(f, f"{name}.{f.name}") for f in (type_.field(i) for i in range(type_.num_fields))}
        return lambda v: {k: read(v.get(k)) for k, read in inner.items()} if isinstance(v, dict) else v
    if pa.types.is_binary(type_):
        raise TopologyError(
            f"field {name!r} is binary, which JSON can't hold; use one binary column for the whole payload, or string",
            field=name,
        )
    return lambda v: v


def _inner(field: pa.Field, name: str) -> Callable[[object], object]:
    """The reader of a value in an array, a map or a struct. Arrow checks no type in there: it makes 1 of 1.5."""
    read = _reader(field.type, name)

    def checked(value: object) -> object:
        made = None if value is None else read(value)
        if made is None and not field.nullable:
            raise _FieldError(f"field {name!r} is NOT NULL and got None")
        if not fits_strictly(made, field.type):
            shown = f"{value_text(value)} ({type(value).__name__})"
            raise _FieldError(f"field {name!r} is {type_text(field.type)}, got {shown}")
        return made

    return checked


def _real(value: Any, type_: pa.DataType, name: str) -> float:
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if math.isinf(found) or (pa.types.is_float32(type_) and abs(found) >= _FLOAT_END):
        raise _FieldError(f"field {name!r} is {type_text(type_)}, and {storable_text(value)} is too large for it")
    return found


def _decimal(value: str, type_: pa.DataType, name: str) -> decimal.Decimal:
    try:  # Python takes 1_000, " 1" and the digits of every script, too
        found = decimal.Decimal(value if _DECIMAL.fullmatch(value) else "NaN")
    except decimal.DecimalException:
        found = decimal.Decimal("NaN")
    if not found.is_finite():
        raise _FieldError(f"field {name!r} is {type_text(type_)}, and {value_text(value)} is not a decimal number")
    return found


def _timestamp(text: str) -> datetime.datetime:
    found = datetime.datetime.fromisoformat(text)
    if _TOO_FINE.search(text):
        raise ValueError("it has digits behind the microseconds; keep it as a string")
    return found


def _parsed(parse: Callable[[str], object], value: object, type_: pa.DataType, name: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as error:
        what = "date" if pa.types.is_date(type_) else "timestamp"
        raise _FieldError(
            f"field {name!r} is {type_text(type_)}, and {value_text(value)} is not an ISO 8601 {what}: {error}"
        ) from error


# ---- a broker's message as it is stored

_BEGIN: Final = b"\xff\xff\xff\xfe"
"""No text begins so, and no Arrow stream."""
_BEGIN_EMPTY: Final = b"\xff\xff\xff\xfd"
"""Of a message without a payload (a tombstone)."""
_HEAD: Final = struct.Struct(">4sI")
"""The beginning, and the length of the facts."""
PAYLOAD_SQL: Final = (
    "case substr({0}, 1, 4)"
    f" when '\\x{_BEGIN.hex()}' then substr({{0}}, {_HEAD.size + 1} + least(octet_length({{0}}),"
    " ('x' || encode(substr({0}, 5, 4), 'hex'))::bit(32)::bigint)::int)"
    f" when '\\x{_BEGIN_EMPTY.hex()}' then '' else {{0}} end"
)
"""The payload of what a column has, in Postgres; of what was not stored so, the whole."""


def _text(value: object) -> str:
    assert isinstance(value, bytes)
    return value.decode("utf-8", "surrogateescape")


_encode: Final = json.JSONEncoder(default=_text, separators=(",", ":"), check_circular=False).encode
_ENCODERS: Final[Mapping[type, Any]] = {str: encode_basestring_ascii, int: repr}
"""What does the same as `_encode` for a column of one type, in a fifth of the time."""
_SAME_IF_EQUAL: Final = {str, bytes, int, bool, NoneType}


def all_sealed(
    payloads: Sequence[bytes | None], names: Sequence[str], columns: Sequence[Sequence[object]]
) -> list[bytes]:
    """What is stored of messages: a column of values of one type for each fact's name. None: it is not known.

    What all of them have in common is encoded once.
    """
    parts, varying = list[str](), list[Iterator[str]]()
    for name, column in zip(names, columns, strict=True):
        start, first, types = _encode(name) + ":", column[0] if column else None, set(map(type, column))
        # Equal is not the same of other types, nor inside of containers: 1 equals True, and 0.0 equals -0.0.
        is_same = (
            len(types) <= 1
            and (types <= _SAME_IF_EQUAL or first in ((), [], {}))
            and column.count(first) == len(column)
        )
        if not is_same:
            varying.append(map(_ENCODERS.get(types.pop(), _encode) if len(types) == 1 else _encode, column))
            parts.append(start.replace("%", "%%") + "%s")
        elif first is not None:
            parts.append((start + _encode(first)).replace("%", "%%"))
    form = "{" + ",".join(parts) + "}"
    rows = zip(*varying, strict=True) if varying else [()] * len(payloads)
    return [
        _HEAD.pack(_BEGIN_EMPTY if payload is None else _BEGIN, len(facts)) + facts.encode() + (payload or b"")
        for payload, facts in zip(payloads, map(form.__mod__, rows), strict=True)
    ]


def sealed(payload: bytes | None, facts: Mapping[str, object]) -> bytes:
    """The same of one message."""
    return all_sealed([payload], list(facts), [[value] for value in facts.values()])[0]


def _require(is_so: bool, stored: Sequence[bytes]) -> None:
    if not is_so:
        raise UsageError(f"one of {len(stored)} stored messages has not what its server said of it")


def _facts_ends(stored: Sequence[bytes]) -> list[int]:
    _require({one[:4] for one in stored} <= {_BEGIN, _BEGIN_EMPTY}, stored)
    _require(min(map(len, stored), default=_HEAD.size) >= _HEAD.size, stored)
    return [_HEAD.size + length for _, length in map(_HEAD.unpack_from, stored)]


def all_payloads(stored: Sequence[bytes]) -> list[bytes | None]:
    """The payloads alone, of messages that were stored so.

    Raises:
        UsageError: one was not stored so.
    """
    return _behind(stored, _facts_ends(stored))


def _behind(stored: Sequence[bytes], ends: Sequence[int]) -> list[bytes | None]:
    return [None if one.startswith(_BEGIN_EMPTY) else one[end:] for one, end in zip(stored, ends, strict=True)]


def all_unsealed(stored: Sequence[bytes]) -> tuple[list[bytes | None], list[dict[str, Any]]]:
    """Payloads and facts again.

    Raises:
        UsageError: one was not stored so.
    """
    ends = _facts_ends(stored)
    texts = [one[_HEAD.size : end] for one, end in zip(stored, ends, strict=True)]
    found: list[Any] = []
    with suppress(ValueError):
        found = json.loads(b"[%b]" % b",".join(texts))
    _require(len(found) == len(stored) and set(map(type, found)) <= {dict}, stored)
    return _behind(stored, ends), found


def unsealed(stored: bytes) -> tuple[bytes | None, dict[str, Any]]:
    """The same of one message."""
    (payload,), (facts,) = all_unsealed([stored])
    return payload, facts


def payload_in(stored: bytes) -> bytes:
    """The payload of a message that was stored so; of any other the whole."""
    try:
        return unsealed(stored)[0] or b""
    except UsageError:
        return stored


def bytes_of(text: str) -> bytes:
    """Bytes that were a fact."""
    return text.encode("utf-8", "surrogateescape")
