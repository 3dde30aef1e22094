"""Which columns of a table give values back as they came, and what the evidence of a txid says of its rows' content."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeAlias

import pyarrow as pa
from psycopg import sql

from stormproof.sinks.content import Content, kind_of
from stormproof.sinks.postgres.columns import Column, text_form
from stormproof.sinks.postgres.table import step_us
from stormproof.sinks.totals import Totals

Kinds: TypeAlias = tuple[tuple[str, str], ...]
"""The columns of a content, with their kinds."""

_BASES: Final[Mapping[str, frozenset[str]]] = {
    "integer": frozenset({"smallint", "integer", "bigint", "boolean"}),
    "float": frozenset({"real", "double precision"}),
    "text": frozenset({"text", "character varying"}),
    "bytes": frozenset({"bytea"}),
    "date": frozenset({"date"}),
    "timestamp": frozenset({"timestamp without time zone", "timestamp with time zone"}),
    "decimal": frozenset({"numeric"}),
}
"""The types, by the kind of the rows' column, that keep a value as it came."""


_BY_VALUE: Final = frozenset().union(*(_BASES[kind] for kind in _BASES if kind != "text"), {"uuid"})
_BY_TEXT: Final = frozenset({"text", "character varying", "character", "citext", "json", "jsonb"})
_POSTGRES: Final = "postgres "
"""Before the type of a column that the server itself hashed, in the kinds of a content."""


def row_hash(columns: Sequence[Column], names: Collection[str]) -> tuple[sql.Composed, Kinds]:
    """The server's own hash of a row of `held`, a bigint that dumps and major versions keep as they keep partitions by hash;
    and the columns that it covers. Text is hashed by its bytes, whatever its collation.
    """
    covered = list[tuple[str, str, sql.Composable]]()
    for column in sorted(columns, key=lambda column: column.name):
        value = sql.SQL("held.{}").format(sql.Identifier(column.name))
        form = text_form(column)
        is_text = column.base.rpartition(".")[2] in _BY_TEXT or (form is not None and form.is_fixed)
        if column.name in names and is_text and column.base not in _BY_VALUE:
            covered.append((column.name, column.type, sql.SQL('{}::text collate "C"').format(value)))
        elif column.name in names and column.base in _BY_VALUE:
            covered.append((column.name, column.type, value))
    hashed = sql.SQL("hash_record_extended(row({}), 0)").format(sql.SQL(", ").join(one for _, _, one in covered))
    return hashed, tuple((name, _POSTGRES + kind) for name, kind, _ in covered)


def is_by_server(kinds: Kinds) -> bool:
    """Whether a content of these kinds is a sum of `row_hash`."""
    return any(kind.startswith(_POSTGRES) for _, kind in kinds)


def hashed_columns(columns: Sequence[Column], schema: pa.Schema) -> tuple[str, ...]:
    """The rows' columns whose values the table gives back as they came."""
    there = {column.name: column for column in columns}
    kinds = {field.name: kind_of(field.type) for field in schema}
    return tuple(n for n, kind in kinds.items() if kind is not None and n in there and keeps(there[n], kind))


def keeps(column: Column, kind: str) -> bool:
    """Whether a column gives values of this kind back as they came."""
    if kind == "timestamp" and step_us(column) > 1:
        return False
    citext = kind == "text" and (column.is_enum or column.base.rpartition(".")[2] == "citext")
    return citext or column.base in _BASES[kind.partition("(")[0]]


def known_content(content: Content | Totals, *, began_empty: bool) -> str:
    """The evidence's `content` of a txid; `began_empty`: it is the first one, and the table was empty before it."""
    return json.dumps({**json.loads(content.to_text()), **({"began_empty": True} if began_empty else {})})


def unknown_content(why: str, *, began_empty: bool = False) -> str:
    """The evidence's `content` of a txid whose rows cannot be compared."""
    return json.dumps({"v": 0, "why": why, **({"began_empty": True} if began_empty else {})})
