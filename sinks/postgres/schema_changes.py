"""How a Postgres table follows its rows' schema: columns are added and widened in the first batch that needs them."""

from __future__ import annotations

from typing import Final

import psycopg
import pyarrow as pa
from psycopg import sql

from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.contract.row_rule import SchemaChange
from stormproof.sinks.postgres.columns import Column, column_type
from stormproof.sinks.postgres.connection import MINE, mine_of
from stormproof.sinks.postgres.table import Table

_WIDER: Final = ("smallint", "integer", "bigint")


def changes_for(table: Table, input_: SinkInput) -> tuple[SchemaChange, ...]:
    """What has to change before the table can hold such rows; a type that cannot be widened is left to `require_table`.

    Integers, `real` and `numeric` are widened to what holds both the rows' values and the table's. A key column is never
    added: rows that are there would have none.
    """
    there = {column.name: column for column in table.columns}
    found: list[SchemaChange] = []
    for field in input_.schema:
        made = column_type(field.type)
        column = there.get(field.name)
        if made is None:
            continue
        if column is None:
            if field.name not in input_.keys:
                found.append(SchemaChange(field.name, None, made))
            continue
        wider = _wider(field.type, column, made)
        if wider is not None and not column.generated:
            found.append(SchemaChange(field.name, column.type, wider))
    return tuple(found)


def _wider(kind: pa.DataType, column: Column, made: str) -> str | None:
    """The type that the column is to be widened to; None where it is wide enough, or of another kind."""
    if column.type != column.base and not column.type.startswith("numeric("):
        return None  # a domain, or a length
    if made in _WIDER and column.base in _WIDER:
        return made if _WIDER.index(made) > _WIDER.index(column.base) else None
    if made == "double precision" and column.base == "real":
        return made
    if pa.types.is_decimal128(kind) and column.base == "numeric" and column.modifier >= 4:
        precision, scale = (column.modifier - 4) >> 16, (column.modifier - 4) & 0x7FF
        digits, fraction = max(precision - scale, kind.precision - kind.scale), max(scale, kind.scale)
        return (
            f"numeric({digits + fraction},{fraction})" if (digits + fraction, fraction) != (precision, scale) else None
        )
    return None


def change(
    connection: psycopg.Connection, table: Table, changes: tuple[SchemaChange, ...], identity: SinkIdentity, txid: int
) -> None:
    """Change the table, and record it with the txid, in the caller's transaction."""
    if not changes:
        return
    parts = [
        sql.SQL("add column {} {}" if one.was is None else "alter column {} type {}").format(
            sql.Identifier(one.column),
            sql.SQL(one.becomes),  # pyright: ignore[reportArgumentType]
        )
        for one in changes
    ]
    connection.execute(sql.SQL("alter table {} {}").format(table.name.identifier, sql.SQL(", ").join(parts)))
    mine = {**mine_of(identity), "txid": txid}
    # Unchecked, a later attempt may write a txid again, and need further changes.
    (first,) = connection.execute(
        f"select coalesce(max(number) + 1, 0) from stormproof_sink.schema_change where {MINE} and txid = %(txid)s", mine
    ).fetchone() or (0,)
    connection.cursor().executemany(
        "insert into stormproof_sink.schema_change (topology, incarnation, sink, txid, number, change) "
        "values (%s, %s, %s, %s, %s, %s)",
        [(*mine.values(), n, str(one)) for n, one in enumerate(changes, start=first)],
    )


def changes_of(connection: psycopg.Connection, identity: SinkIdentity, txid: int) -> tuple[str, ...]:
    """What a txid changed, by the sink's own record."""
    rows = connection.execute(
        f"select change from stormproof_sink.schema_change where {MINE} and txid = %(txid)s order by number",
        {**mine_of(identity), "txid": txid},
    ).fetchall()
    return tuple(str(text) for (text,) in rows)
