"""What of the ledger and the pending store is one topology's own, or one subscription's: removed, and kept as a record."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa

from stormproof.core.pending.tables import metadata as pending
from stormproof.core.pending.tables import pending_subscription
from stormproof.core.source.files.tables import metadata as files
from stormproof.trident.ledger import control, handed_in
from stormproof.trident.ledger import tables as t

assert all(module.__dict__ for module in (control, handed_in))  # they add their tables to the ledger's


Columns: TypeAlias = sa.ColumnCollection[str, sa.ColumnElement[Any]]


def when(connection: sa.Connection, which: sa.ColumnElement[bool]) -> str | None:
    """Who had a topology forgotten last, and when, in words; None: nobody. `which`: a condition on the table `forgotten`."""
    c = t.forgotten.c
    found = sa.select(c.by, c.at).where(c.what == "topology", which).order_by(c.number.desc()).limit(1)
    row = connection.execute(found).one_or_none()
    return None if row is None else f"forgotten here by {row.by} on {row.at:%F %T} UTC"


def remove_topology(connection: sa.Connection, life: str) -> dict[str, int]:
    """Remove every row of an incarnation; gives their numbers by table, without those of which there were none."""
    own = [(table, table.c.incarnation == life) for table in _leaves_first(t.metadata) if "incarnation" in table.c]
    return _removed(connection, [*_of_source((files, pending), _is_read_by(life)), *own])


def remove_subscription(connection: sa.Connection, kind: str, source: str, subscription: str) -> dict[str, int]:
    """Remove what the pending store has of one subscription of a source, likewise."""

    def mine(c: Columns) -> sa.ColumnElement[bool]:
        return (c.kind == kind) & (c.source == source) & (c.subscription == subscription)

    return _removed(connection, _of_source((pending,), mine))


def subscriptions_of(connection: sa.Connection, life: str) -> list[tuple[str, str, str]]:
    """The kind, source and name of each subscription of an incarnation: one, or one for each of its spouts."""
    c = pending_subscription.c
    found = sa.select(c.kind, c.source, c.subscription).where(_is_read_by(life)(c)).order_by(c.kind, c.source)
    return [(row.kind, row.source, row.subscription) for row in connection.execute(found)]


def checkpoints_of(connection: sa.Connection, life: str) -> tuple[list[str], int]:
    """The streaming queries of an incarnation, and the number of its jobs' keys."""
    c = handed_in.handed_in.c
    queries = connection.execute(
        sa.select(c.query).where(c.incarnation == life, c.query.is_not(None)).distinct().order_by(c.query)
    )
    keys = connection.execute(sa.select(sa.func.count()).where(c.incarnation == life, c.query.is_(None)))
    return list(queries.scalars()), keys.scalar_one()


def _is_read_by(life: str) -> Callable[[Columns], sa.ColumnElement[bool]]:
    return lambda c: (c.subscription == life) | c.subscription.startswith(f"{life}:", autoescape=True)


def _of_source(
    parts: Sequence[sa.MetaData], mine: Callable[[Columns], sa.ColumnElement[bool]]
) -> Generator[tuple[sa.Table, sa.ColumnElement[bool]]]:
    """The tables that name a subscription, each with a condition for the rows of those that are `mine`."""
    numbers = sa.select(pending_subscription.c.id).where(mine(pending_subscription.c))
    for table in (table for part in parts for table in _leaves_first(part)):
        by_number = isinstance(table.c.subscription.type, sa.BigInteger)
        yield table, table.c.subscription.in_(numbers) if by_number else mine(table.c)


def _leaves_first(metadata: sa.MetaData) -> list[sa.Table]:
    return metadata.sorted_tables[::-1]


def _removed(connection: sa.Connection, rows: Iterable[tuple[sa.Table, sa.ColumnElement[bool]]]) -> dict[str, int]:
    counts = {table.name: connection.execute(sa.delete(table).where(mine)).rowcount for table, mine in rows}
    return {name: count for name, count in counts.items() if count}
