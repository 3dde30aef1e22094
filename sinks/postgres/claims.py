"""Who has claimed a table before anything was committed to it: a guard row without a txid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import psycopg

_MINE: Final = "topology = %(topology)s and incarnation = %(incarnation)s and sink = %(sink)s"


def make(connection: psycopg.Connection, claim: Mapping[str, Any]) -> None:
    """Have the guard row be there; from then on it is only moved."""
    connection.execute(
        "insert into stormproof_sink.guard (topology, incarnation, sink, table_name, table_id, epoch) "
        "values (%(topology)s, %(incarnation)s, %(sink)s, %(table_name)s, %(table_id)s, %(epoch)s) "
        "on conflict (topology, incarnation, sink) do nothing",
        claim,
    )


def is_made(connection: psycopg.Connection, mine: Mapping[str, Any]) -> bool:
    """Whether this life has the table already."""
    return connection.execute(f"select 1 from stormproof_sink.guard where {_MINE}", mine).fetchone() is not None


def follow(connection: psycopg.Connection, mine: Mapping[str, Any], table_id: str | None) -> None:
    """A table that never held a txid was made again: the claim is of the new one."""
    connection.execute(
        f"update stormproof_sink.guard set table_id = %(table_id)s where {_MINE} and last_txid is null",
        {**mine, "table_id": table_id},
    )


def lives(connection: psycopg.Connection, table_id: str | None) -> list[tuple[str, str]]:
    """The topologies and incarnations that have this table."""
    rows = connection.execute(
        "select distinct topology, incarnation from stormproof_sink.guard where table_id = %s order by 1, 2",
        (table_id,),
    ).fetchall()
    return [(str(topology), str(incarnation)) for topology, incarnation in rows]


def remove(connection: psycopg.Connection, mine: Mapping[str, Any]) -> bool:
    """Take the claim back, if nothing was committed under it."""
    removed = connection.execute(f"delete from stormproof_sink.guard where {_MINE} and last_txid is null", mine)
    return removed.rowcount > 0
