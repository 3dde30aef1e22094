"""How the fields of a stream's entry become a message's payload."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.core.message import storable_text
from stormproof.core.source.protocol import Decoded, Decoder

_UNREADABLE: Final = b"\0stormproof: no such field\0"
"""Begins the payload of an entry that has not the field; what follows are the names of those that it has."""

Fields = Mapping[bytes, bytes]
Payload = Callable[[Fields], bytes]


def payload_by(schema: pa.Schema, field: str | None, *, unit: bool) -> Payload:
    """What makes payloads of entries: of one field, if it is named; else of the fields that the schema's columns name.

    Of an entry with a single field that no column is named after, it is that field.
    """
    if field is not None:
        return partial(_field, field.encode())
    if unit or len(schema) == 1:
        return partial(_field_of_column, schema.names[0].encode())
    quoted = {column.name.encode(): _is_quoted(column.type) for column in schema}
    return partial(_object, quoted)


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
    text = json.dumps(value.decode("utf-8", "surrogateescape"), ensure_ascii=False)
    return text.encode("utf-8", "surrogateescape")


def _unreadable(fields: Fields) -> bytes:
    names = ", ".join(storable_text(name.decode("utf-8", "replace")) for name in list(fields)[:20])
    return _UNREADABLE + names.encode()


@dataclass(frozen=True, slots=True)
class EntryDecoder:
    """Fails messages whose entry has not the field; the rest is `inner`'s."""

    inner: Decoder
    wanted: str

    @property
    def schema(self) -> pa.Schema:
        """The fields of a tuple."""
        return self.inner.schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Decode all payloads at once; those that are none are named."""
        decoded = self.inner.decode(payload)
        missing = pc.starts_with(payload, _UNREADABLE)
        if not pc.any(missing).as_py():
            return decoded
        failed = dict(decoded.failed)
        for row in pc.indices_nonzero(missing).to_pylist():
            has = payload[row].as_py()[len(_UNREADABLE) :].decode()
            failed[row] = f"the entry has no field {self.wanted}; it has: {has}"
        if decoded.counts is None:
            return Decoded(decoded.rows, None, sorted(failed.items()))
        return _without(decoded, failed)


def _without(decoded: Decoded, failed: Mapping[int, str]) -> Decoded:
    """A decoded unit without the rows of messages that failed."""
    assert decoded.counts is not None
    counts = decoded.counts.copy()
    kept = pa.array([row not in failed for row, times in enumerate(counts) for _ in range(times)], pa.bool_())
    counts[list(failed)] = 0
    return Decoded(decoded.rows.filter(kept), counts, sorted(failed.items()))
