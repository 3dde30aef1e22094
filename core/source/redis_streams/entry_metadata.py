"""What Redis knows of an entry beside its payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyarrow as pa

from stormproof.core.source.redis_streams.group import Entry

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
