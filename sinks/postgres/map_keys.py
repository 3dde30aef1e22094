"""The keys of a map that are text in the stream: as what type the table compares them, and which text is the type's own."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from ipaddress import IPv6Address
from typing import Final

import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.core.errors import SinkRefused
from stormproof.core.sink import SinkInput
from stormproof.sinks.limits import Limits, is_string, plain
from stormproof.sinks.postgres.columns import Column, cast_name
from stormproof.sinks.postgres.table import KEY_FORMS, TEXTS, Table
from stormproof.sinks.postgres.wire import column_type

_BYTE: Final = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_WORD: Final = "[1-9a-f][0-9a-f]{0,3}"
_NOT_FFFF: Final = "(?:[1-9a-f][0-9a-f]{0,2}|[1-9a-e][0-9a-f]{3}|f[0-9a-e][0-9a-f]{2}|ff[0-9a-e][0-9a-f]|fff[0-9a-e])"


@dataclass(frozen=True, slots=True)
class MapKey:
    """As what type a key is compared. Only text that matches `pattern` is the type's own; `form` says so, for messages."""

    type: str
    pattern: str | None = None
    form: str = ""

    def own(self, keys: pa.Array) -> list[object]:
        """The keys, with None for each text that no row of the table can have as its key."""
        if self.pattern is None:
            return list(keys.to_pylist())
        texts = plain(keys)
        found = pc.match_substring_regex(texts, self.pattern)
        return list(pc.if_else(found, texts, pa.scalar(None, texts.type)).to_pylist())


def map_keys(table: Table, input_: SinkInput, where: str) -> dict[str, MapKey]:
    """How the table compares each key. A map finds its rows by comparing keys of the stream with those of the table.

    Raises:
        SinkRefused: a key is text in the stream, and of a type in the table that no map compares with text.
    """
    keys: dict[str, MapKey] = {}
    for column in table.columns:
        if column.name not in input_.keys:
            continue
        kind = input_.schema.field(column.name).type
        key = key_of_text(column) if is_string(kind) else MapKey(column_type(kind) or "")
        if key is None:
            raise SinkRefused(
                f"{where}: key column {column.name!r} is {column.type} in the table and text in the stream; a map's key of "
                "text is text, varchar, char(n), uuid, inet or an enum in the table",
                column=column.name,
            )
        keys[column.name] = key
    return keys


def with_keys(limits: Limits, keys: dict[str, MapKey]) -> Limits:
    """The limits of the table's columns, with the texts that its keys are written as."""
    return Limits(
        tuple(
            limit
            if (key := keys.get(limit.name)) is None or key.pattern is None
            else replace(limit, pattern=key.pattern, form=key.form)
            for limit in limits.columns
        )
    )


def key_of_text(column: Column) -> MapKey | None:
    """How a column compares a key that is text in the stream; None where a map has no such key."""
    if column.base in TEXTS:
        return MapKey("text")
    kind = cast_name(column.base)
    if column.base in KEY_FORMS:
        return MapKey(kind, *KEY_FORMS[column.base])
    if column.labels is not None:
        return MapKey(kind, f"^(?:{'|'.join(map(re.escape, column.labels))})$")
    return MapKey(kind, _inet(), ", as a key is written: as Postgres shows it") if column.base == "inet" else None


@cache
def _inet() -> str:
    """The texts that Postgres gives back of addresses; those that begin with :: and IPv4 (of ffff, or of nothing) apart."""
    # Where the longest run of zeros is, is the same for all addresses with a zero in the same words.
    masks = [str(IPv6Address(sum((mask >> at & 1) << 16 * at for at in range(8)))) for mask in range(4, 256)]
    forms = "|".join(re.sub("^::W(?=:.:.$)", "::N", text.replace("1", "W")) for text in masks)
    ipv6 = forms.replace("W", _WORD).replace("N", _NOT_FFFF)
    mapped = f"::ffff:{_IPV4}"
    return rf"^(?:{_IPV4}(?:/(?:[12]?\d|3[01]))?|(?:::|::{_WORD}|{mapped}|{ipv6})(?:/(?:1[01]\d|12[0-7]|[1-9]?\d))?)$"
