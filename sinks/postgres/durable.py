"""Whether all of a table's rows survive a crash of the server: each partition has a storage of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import psycopg

from stormproof.core.errors import SinkRefused

# From the catalog alone: `pg_partition_tree` would lock every partition.
TREE: Final = """
    with recursive tree as (
        select c.oid, c.relkind, c.relpersistence from pg_class c where c.oid = {oid}
        union all
        select c.oid, c.relkind, c.relpersistence
        from tree t
        join pg_inherits i on i.inhparent = t.oid
        join pg_class c on c.oid = i.inhrelid
        where t.relkind = 'p'
    )"""
"""The table with this oid, and its partitions, at any depth."""
VOLATILE: Final = """
    select oid::regclass::text,
           case when relkind = 'f' then 'a foreign table' when relpersistence = 't' then 'temporary'
                when relpersistence = 'u' then 'unlogged' else 'no table (relkind ' || relkind::text || ')' end
    from tree where relkind not in ('r', 'p') or relpersistence <> 'p' order by 1
"""
"""Those of `TREE` whose rows a crash may lose."""
_VOLATILE: Final = (TREE + VOLATILE).replace("{oid}", "%s").encode()


def volatile_relations(connection: psycopg.Connection, oid: int) -> list[tuple[str, str]]:
    """Those of the table and its partitions, at any depth, whose rows a crash may lose: (name, what it is).

    Children by inheritance are left out: rows that are inserted into their parent stay there.
    """
    return [(str(name), str(what)) for name, what in connection.execute(_VOLATILE, (oid,)).fetchall()]


def require_durable(connection: psycopg.Connection, oid: int, where: str) -> None:
    """Refuse a table that keeps some of its rows where a crash loses them, while the guard would say that they are there.

    Where the transaction has written its rows before the call, the answer holds until the transaction ends: each partition
    that got a row is locked against ALTER TABLE by then.

    Raises:
        SinkRefused: names the first such relation.
    """
    require_no_volatile(volatile_relations(connection, oid), where)


def require_no_volatile(found: Sequence[tuple[str, str]], where: str) -> None:
    """The same by what `volatile_relations` found."""
    if found:
        name, what = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise SinkRefused(
            f"{where}: {name} is {what}{more}: a crash of the server loses its rows, while the sink's own record says that "
            f"they are there. Nothing was written. {_way_on(name, what)}",
            relation=name,
            relations=[relation for relation, _ in found],
        )


def _way_on(name: str, what: str) -> str:
    if what == "unlogged":
        return f"Run: alter table {name} set logged"
    return f"Move its rows into a permanent table, and detach {name}"
