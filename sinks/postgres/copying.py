"""Rows on their way into a Postgres table: COPY, and the temporary table from which they are upserted or folded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, LiteralString

import psycopg
import pyarrow as pa
from pgpq import ArrowToPostgresBinaryEncoder
from psycopg import sql

from stormproof.core.errors import SinkRefused
from stormproof.sinks.postgres.table import TableName
from stormproof.sinks.postgres.wire import cast_of, sent_type, to_wire

ADDED: Final = sql.Identifier("pg_temp", "stormproof_added")
"""With its schema: the user's own table of this name must be neither hidden by it nor taken for it."""

_TEXTS: Final = sql.Identifier("pg_temp", "stormproof_texts")

PLACE: Final = "stormproof place"
"""A column of the temporary table that numbers its rows, where they are put in an order, or merged one by one."""


def identifiers(names: Iterable[str]) -> sql.Composed:
    """Column names, with commas between them."""
    return sql.SQL(", ").join(map(sql.Identifier, names))


def copy_rows(
    connection: psycopg.Connection,
    into: sql.Identifier,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    where: str,
) -> int:
    """COPY rows into a table, in the forms of the wire schema `schema`; returns how many it took. Texts that are cast go
    through a temporary table.

    Raises:
        SinkRefused: a value does not fit its column.
    """
    values = [(field, cast_of(field, sql.Identifier(field.name))) for field in schema]
    if not any(cast for _, cast in values):
        return _copy(connection, into, schema, batches, where)
    columns = [
        sql.SQL("{} {}").format(sql.Identifier(f.name), sql.SQL(sent_type(f)))  # pyright: ignore[reportArgumentType]
        for f in schema
    ]
    connection.execute(sql.SQL("drop table if exists {}").format(_TEXTS))
    made = sql.SQL("create temporary table {} ({}) on commit drop")
    connection.execute(made.format(_TEXTS, sql.SQL(", ").join(columns)))
    _copy(connection, _TEXTS, schema, batches, where)
    cast_values = sql.SQL(", ").join(cast or sql.Identifier(field.name) for field, cast in values)
    moved = sql.SQL("insert into {} ({}) select {} from {}").format(
        into, identifiers(schema.names), cast_values, _TEXTS
    )
    return connection.execute(moved).rowcount


def _copy(
    connection: psycopg.Connection,
    into: sql.Identifier,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    where: str,
) -> int:
    encoder = ArrowToPostgresBinaryEncoder(schema)
    cursor = connection.cursor()
    statement = sql.SQL("copy {} ({}) from stdin with (format binary)").format(into, identifiers(schema.names))
    with cursor.copy(statement) as copy:
        copy.write(encoder.write_header())
        for batch in batches:
            try:
                copy.write(encoder.write_batch(to_wire(batch, schema)))
            except pa.ArrowInvalid as error:
                raise SinkRefused(f"{where}: a value does not fit its column: {error}") from error
        copy.write(encoder.finish())
    return cursor.rowcount


def make_added(connection: psycopg.Connection, name: TableName, columns: sql.Composed) -> None:
    """Make the temporary table for rows on their way into a table, where it is missing."""
    # Each time, since a savepoint that was rolled back may have taken the temporary table with it.
    connection.execute(
        sql.SQL("create temporary table if not exists {} on commit drop as select {} from {} with no data").format(
            ADDED, columns, name.identifier
        )
    )


def same_columns(one: LiteralString, other: LiteralString, names: Iterable[str]) -> sql.Composed:
    """That these columns are equal in two tables of a query."""
    return sql.SQL(" and ").join(
        sql.SQL("{0}.{2} = {1}.{2}").format(sql.SQL(one), sql.SQL(other), sql.Identifier(name)) for name in names
    )
