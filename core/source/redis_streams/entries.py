"""How an entry of a stream is stored, and how its fields become a message's payload when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import pyarrow as pa

from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.contract.payload import bytes_of
from stormproof.core.source.redis_streams.group import Entry
from stormproof.core.source.stable_ids import MarkedDecoder

_UNREADABLE: Final = b"\0stormproof: no such field\0"
"""Begins the payload of an entry that has not the field; what follows are the names of those that it has."""

Fields = Mapping[bytes, bytes]
Payload = Callable[[Fields], bytes]


def stored_entry(fields: Fields) -> tuple[bytes, str | None]:
    """Payload to be stored, and the name of its field: a single field's value, or a JSON object of all fields, as they came.

    Bytes that are no UTF-8 stay as they are.
    """
    if len(fields) == 1:
        ((name, value),) = fields.items()
        return value, _readable(name)
    text = {_readable(name): _readable(value) for name, value in fields.items()}
    return bytes_of(json.dumps(text, ensure_ascii=False)), None


def fields_in(payload: bytes, facts: Mapping[str, str | None]) -> Fields:
    """The fields again.

    Raises:
        UsageError: it is no JSON object of texts.
    """
    field = facts.get("field")
    if field is not None:
        return {bytes_of(field): payload}
    try:
        found = json.loads(_readable(payload))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found or not all(isinstance(value, str) for value in found.values()):
        raise UsageError("an entry of several fields is given as a JSON object of its fields, each of them a text")
    return {bytes_of(name): bytes_of(value) for name, value in found.items()}


def _readable(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def payload_by(schema: pa.Schema, field: str | None, *, unit: bool) -> Payload:
    """What makes payloads of entries: of one field, if it is named; else of the fields that the schema's columns name.

    Of an entry with a single field that no column is named after, it is that field.
    """
    if field is not None:
        return partial(_field, field.encode())
    if unit or (len(schema) == 1 and not _is_json(schema.field(0).type)):
        return partial(_field_of_column, schema.names[0].encode())
    quoted = {column.name.encode(): _is_quoted(column.type) for column in schema}
    return partial(_object, quoted)


def _is_json(type_: pa.DataType) -> bool:
    """Whether the decoder takes a single column of the type as a key of a JSON object, and not as the whole payload."""
    return not (pa.types.is_string(type_) or pa.types.is_binary(type_))


def _field(name: bytes, fields: Fields) -> bytes:
    value = fields.get(name)
    return _unreadable(fields) if value is None else value


def _field_of_column(name: bytes, fields: Fields) -> bytes:
    if len(fields) == 1:
        return next(iter(fields.values()))
    return _field(name, fields)


def _object(quoted: Mapping[bytes, bool], fields: Fields) -> bytes:
    if len(fields) == 1 and not fields.keys() & quoted.keys():
        return next(iter(fields.values()))
    parts = [
        json.dumps(name.decode()).encode() + b": " + _json(fields[name], quotes=is_quoted)
        for name, is_quoted in quoted.items()
        if name in fields
    ]
    return b"{" + b", ".join(parts) + b"}" if parts else _unreadable(fields)


def _is_quoted(type_: pa.DataType) -> bool:
    """Whether the decoder takes the type's values as JSON text, and not as a JSON literal."""
    return bool(pa.types.is_string(type_) or pa.types.is_decimal(type_) or pa.types.is_temporal(type_))


def _json(value: bytes, *, quotes: bool) -> bytes:
    if not quotes:
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            pass  # as text, which the decoder refuses by the column's name
        else:
            return value
    # Bytes that are no UTF-8 stay as they are: the decoder says where.
    return bytes_of(json.dumps(_readable(value), ensure_ascii=False))


def _unreadable(fields: Fields) -> bytes:
    names = ", ".join(storable_text(name.decode("utf-8", "replace")) for name in list(fields)[:20])
    return _UNREADABLE + names.encode()


class EntryDecoder(MarkedDecoder):
    """Fails messages whose entry has not the field; the rest is `inner`'s."""

    __slots__ = ()
    MARK = _UNREADABLE

    def error(self, rest: bytes) -> str:
        """Names the field, and those that the entry has."""
        return f"the entry has no field {self.wanted}; it has: {rest.decode()}"


# ---- what Redis knows of an entry beside its payload

ENTRY: Final[Mapping[str, pa.DataType]] = {
    "id": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
    "fields": pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])),
}
"""`timestamp` is the first part of the id: the server's time in milliseconds, where the producer gave no id of its own."""

_YEAR_10000_MS: Final = 253_402_300_800_000


def _timestamp(entry: Entry) -> int | None:
    """Microseconds; None where an id of the producer's own is no time."""
    found = int(entry.id.partition("-")[0])
    return found * 1_000 if found < _YEAR_10000_MS else None


def _fields(entry: Entry) -> list[dict[str, str | bytes]]:
    return [{"name": name.decode("utf-8", "replace"), "value": value} for name, value in entry.fields.items()]


_OF: Final[Mapping[str, Callable[[Entry], object]]] = {
    "id": lambda entry: entry.id,
    "timestamp": _timestamp,
    "fields": _fields,
}


def columns_of(names: Sequence[str], entries: Sequence[Entry]) -> list[list[object]]:
    """A column for each name."""
    return [[_OF[name](entry) for entry in entries] for name in names]
