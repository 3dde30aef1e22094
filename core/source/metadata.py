"""What a broker says of a message beside its payload, as fields of its tuple (`metadata`).

A source that was asked for metadata reads a struct: the payload in the field `PAYLOAD`, and a field for each of them. A
message that is stored keeps all of it, whether it was asked for or not: see `stormproof.core.contract.payload`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np
import pyarrow as pa

from stormproof.core.base.arguments import shown
from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import TopologyError
from stormproof.core.contract.payload import all_payloads, all_sealed, all_unsealed, bytes_of, sealed, unsealed
from stormproof.core.contract.source import Decoded, Decoder
from stormproof.core.pending.journal import Delivery
from stormproof.core.user_code.functions import nulls_refused

PAYLOAD: Final = "$payload"
"""The field that has a message's payload."""


_NO_FIELDS: Final = pa.schema([])

Fact: TypeAlias = tuple[pa.DataType, Callable[[Any], object]]
"""Something that a broker knows of a message: its type, and what gives it of a message as the client does."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Which of the things that a broker knows of a message are wanted: by its word for them, and the field's name."""

    KNOWN: ClassVar[Mapping[str, Fact]] = {}
    """All that there are, by the broker's word for them."""

    names: tuple[str, ...] = ()
    fields: pa.Schema = _NO_FIELDS

    @classmethod
    def chosen(cls, where: str, given: Sequence[str] | Mapping[str, str], schema: pa.Schema) -> Self:
        """Those that a source was asked for: names, or a mapping of names to the names of their fields.

        Raises:
            TopologyError: the broker has no such thing, or a field of the schema has the name already.
        """
        if isinstance(given, str) or not isinstance(given, (Sequence, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"{where}: metadata is {shown(given)}; it is a tuple of names, such as {tuple(cls.KNOWN)[:2]}, or a mapping "
                "of names to field names",
                argument="metadata",
            )
        pairs = list(given.items()) if isinstance(given, Mapping) else [(name, name) for name in given]
        taken = set(schema.names)
        for name, own in pairs:
            if name not in cls.KNOWN:
                raise TopologyError(
                    f"{where}: no metadata {name!r}; known: {', '.join(cls.KNOWN)}", argument="metadata"
                )
            if own in taken:
                raise TopologyError(
                    f"{where}: field {own!r} is there already; name the metadata's field: "
                    f"metadata={{{name!r}: {f'message_{name}'!r}}}",
                    argument="metadata",
                )
            taken.add(own)
        names = tuple(name for name, _ in pairs)
        return cls(names, pa.schema([pa.field(own, cls.KNOWN[name][0]) for name, own in pairs]))

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def payload_type(self) -> pa.StructType:
        """What a reader gives: the payload, NULL where the message has none, and the metadata by the fields' names."""
        return pa.struct([pa.field(PAYLOAD, pa.binary()), *self.fields])

    def decoder(self, payloads: Decoder) -> Decoder:
        """Decodes payloads as before, with the metadata behind their fields."""
        return MetadataDecoder(payloads, self.fields) if self else payloads

    def stored(self, payloads: Sequence[bytes | None], messages: Sequence[Any]) -> list[bytes]:
        """Messages as they are stored: with all that is known."""
        return all_sealed(payloads, tuple(self.KNOWN), self._columns(self.KNOWN, messages))

    def kept(self, received: Sequence[tuple[str, Any, bytes]], messages: Sequence[Any]) -> Sequence[Delivery]:
        """Deliveries (stable id, handle, payload) with what is stored of them."""
        stored = self.stored([payload for *_, payload in received], messages)
        return [Delivery(*message, one) for message, one in zip(received, stored, strict=True)]

    def loaded(self, stored: Sequence[bytes]) -> list[pa.Array]:
        """What a reader gives of stored messages: payloads, or the struct where metadata is wanted."""
        if not self:
            return [self._given(all_payloads(stored), ())]
        payloads, messages = all_unsealed(stored)
        columns = [
            [_value_of(facts.get(name), field.type) for facts in messages]
            for name, field in zip(self.names, self.fields, strict=True)
        ]
        return [self._given(payloads, columns)]

    def given(self, payloads: Sequence[bytes | None], messages: Sequence[Any]) -> pa.Array:
        """What a reader gives: payloads alone, empty where there is none; or the struct with what is wanted."""
        return self._given(payloads, self._columns(self.names, messages))

    def _columns(self, names: Iterable[str], messages: Sequence[Any]) -> list[list[object]]:
        return [[self.KNOWN[name][1](message) for message in messages] for name in names]

    def _given(self, payloads: Sequence[bytes | None], columns: Sequence[Sequence[object]]) -> pa.Array:
        if not self:
            return pa.array(payloads, pa.binary()).fill_null(b"")
        arrays = [pa.array(payloads, pa.binary())]
        arrays += [pa.array(column, field.type) for column, field in zip(columns, self.fields, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=list(self.payload_type))


def _value_of(value: Any, type_: pa.DataType) -> Any:
    """A stored fact as Arrow takes it: bytes came back as text."""
    if value is None:
        return None
    if pa.types.is_binary(type_):
        return bytes_of(value)
    if pa.types.is_list(type_):
        return [_value_of(item, type_.value_type) for item in value]
    if pa.types.is_struct(type_):
        return {field.name: _value_of(value[field.name], field.type) for field in type_}
    return value


class KeepsMetadata:
    """What a source with the argument `metadata` does about payloads that are stored."""

    _metadata: Metadata

    def unpack(self) -> Callable[[Sequence[bytes]], Sequence[pa.Array]]:
        """What makes of stored messages what the reader gives."""
        return self._metadata.loaded

    @classmethod
    def edited(cls, old: bytes, payload: bytes) -> bytes:
        """The new payload, with the metadata of the old one."""
        return sealed(payload, unsealed(old)[1])


@dataclass(frozen=True, slots=True)
class MetadataDecoder:
    """Decodes a payload with its metadata: each of the payload's tuples has it. A message without a payload (a tombstone)
    is one tuple whose other fields are NULL.
    """

    payload: Decoder
    fields: pa.Schema

    @property
    def schema(self) -> pa.Schema:
        """The fields of the payload's tuples, then the metadata's."""
        return pa.schema([*self.payload.schema, *self.fields])

    def decode(self, payload: pa.Array) -> Decoded:
        """Decode the payloads that are there, and repeat the metadata for each tuple of a unit."""
        there = dict(zip((field.name for field in payload.type), payload.flatten(), strict=True))
        missing = pc.is_null(there[PAYLOAD]).to_numpy(zero_copy_only=False)
        made = self.payload.decode(there[PAYLOAD] if not missing.any() else there[PAYLOAD].drop_null())
        failed = list(made.failed)
        if missing.any():
            made, failed = _with_tombstones(made, missing)
        columns = [there[field.name] for field in self.fields]
        if made.counts is not None:
            rows = pa.array(np.repeat(np.arange(len(made.counts)), made.counts))
            columns = [column.take(rows) for column in columns]
        rows_made = pa.RecordBatch.from_arrays([*made.rows.columns, *columns], schema=self.schema)
        return Decoded(rows_made, made.counts, failed)


def _with_tombstones(made: Decoded, missing: np.ndarray) -> tuple[Decoded, list[tuple[int, str]]]:
    """What was decoded of the payloads that are there, with a row of NULLs for each of the others."""
    places = np.flatnonzero(~missing)
    counts = np.ones(len(missing), np.int64)
    if made.counts is not None:
        counts[places] = made.counts
    source = np.full(int(counts.sum()), -1, np.int64)
    first = np.cumsum(counts) - counts
    is_null = np.zeros(len(source), np.bool_)
    is_null[first[missing]] = True
    source[~is_null] = np.arange(int((~is_null).sum()))
    taken = pa.array(source, mask=is_null)
    rows = pa.RecordBatch.from_arrays([column.take(taken) for column in made.rows.columns], schema=made.rows.schema)
    failed = {int(places[number]): text for number, text in made.failed}
    for column, field in zip(rows.columns, rows.schema, strict=True):
        for row, text in nulls_refused(column, field):
            number = int(np.searchsorted(first, row, side="right")) - 1
            if missing[number]:
                failed.setdefault(number, f"the message has no payload (a tombstone): {text}")
    return Decoded(rows, None if made.counts is None else counts, ()), sorted(failed.items())


# ---- payloads that were marked as unreadable when they came: their messages fail when they are decoded, and no
# others
#
# A message that lacks what its source needs (an id, a field) is written down all the same, so that it is failed,
# retried and set aside like any other. The mark at its payload's beginning says what it is; see the modules that set
# one.


@dataclass(frozen=True, slots=True)
class MarkedDecoder(ABC):
    """Fails messages whose payload has the mark; the rest is `inner`'s."""

    MARK: ClassVar[bytes]

    inner: Decoder
    wanted: str
    """What such a message lacks."""

    @abstractmethod
    def error(self, rest: bytes) -> str:
        """Why a message failed: `rest` is its payload behind the mark."""

    @property
    def schema(self) -> pa.Schema:
        """The fields of a tuple."""
        return self.inner.schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Decode all payloads at once; those with the mark are named. A unit's tuples go with their message."""
        decoded = self.inner.decode(payload)
        marked = pc.starts_with(payload, self.MARK)
        if not pc.any(marked, min_count=0).as_py():
            return decoded
        failed = dict(decoded.failed)
        for row in pc.indices_nonzero(marked).to_pylist():
            failed[row] = self.error(payload[row].as_py()[len(self.MARK) :])
        rows, counts = decoded.rows, decoded.counts
        if counts is not None:
            kept = [row not in failed for row, times in enumerate(counts) for _ in range(times)]
            rows, counts = rows.filter(pa.array(kept, pa.bool_())), counts.copy()
            counts[list(failed)] = 0
        return Decoded(rows, counts, sorted(failed.items()))
