"""Who has claimed a table before anything was committed to it: a guard row without a txid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import psycopg

_MINE: Final = "topology = %(topology)s and incarnation = %(incarnation)s and sink = %(sink)s"


def make(connection: psycopg.Connection, claim: Mapping[str, Any]) -> None:
    """Have the guard row be there, and speak of this table where no txid is in it; from then on it is only moved."""
    connection.execute(
        "insert into stormproof_sink.guard as held (topology, incarnation, sink, table_name, table_id, epoch) "
        "values (%(topology)s, %(incarnation)s, %(sink)s, %(table_name)s, %(table_id)s, %(epoch)s) "
        "on conflict (topology, incarnation, sink) do update "
        "set table_name = excluded.table_name, table_id = excluded.table_id "
        "where held.last_txid is null and held.table_id is distinct from excluded.table_id",
        claim,
    )


def is_made(connection: psycopg.Connection, mine: Mapping[str, Any], table_id: str) -> bool:
    """Whether this life has the table already: it committed, or it claimed this very one.

    A claim of a table that was dropped says nothing of the one that was made in its place: another life may have it.
    """
    found = connection.execute(
        f"select 1 from stormproof_sink.guard where {_MINE} and (last_txid is not null or table_id = %(table_id)s)",
        {**mine, "table_id": table_id},
    )
    return found.fetchone() is not None


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
