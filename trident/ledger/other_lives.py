"""Other lives: which topologies wrote to a sink's table, and which of them an operator adopted.

And what of the ledger and the pending store is one life's own, or one subscription's: removed, and kept as a record.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import sqlalchemy as sa

from stormproof.core.base.errors import PositionMismatch
from stormproof.core.pending.tables import metadata as pending
from stormproof.core.pending.tables import pending_subscription
from stormproof.core.source.files.entries import metadata as files
from stormproof.trident.ledger import control, handed_in
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.tables import Run
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction


def require_known(tx: Tx, sink: str, target: str, holds: Sequence[str], claims: Sequence[str] = ()) -> None:
    """Refuse a table that `holds` transactions of other lives, or has `claims` of theirs, unless an operator adopted them.

    Raises:
        PositionMismatch: names the lives, and the command that goes on all the same.
    """
    known = adopted(tx)
    holds, claims = ([life for life in lives if life not in known] for lives in (holds, claims))
    if holds or claims:
        raise unknown(tx.run, sink, target, holds, claims, forgotten_lives(tx.connection))


def unknown(
    run: Run, sink: str, target: str, holds: Sequence[str], claims: Sequence[str], forgotten: Mapping[str, str]
) -> PositionMismatch:
    """The error for such a table; `forgotten`: see `forgotten_lives`."""
    life = [*holds, *claims][0]
    topology = life.partition("/")[0] if "/" in life else run.topology
    said = _holds(run, life, forgotten.get(life.partition("/")[2] or life)) if holds else _claimed(topology, life)
    return PositionMismatch(
        f"sink {sink!r} of topology {run.topology!r}: {target} {said}; or, to write beside what is there: stormproof ledger "
        f"adopt {run.topology} {life}",
        sink=sink,
        unknown=list(dict.fromkeys([*holds, *claims])),
        ledger=run.incarnation,
    )


def _holds(run: Run, life: str, gone: str | None) -> str:
    """A life of this topology's name means that the ledger was lost and made anew. A life of another topology means that
    this one was renamed, or that two share a table: renamed it would read its source from the start and double it all.
    """
    mine = f"(it has {run.topology}/{run.incarnation})"
    why = (
        f"of topology {life.partition('/')[0]!r} {mine}: this topology is that one under a new name, and would "
        "read its source from the start and write it all again, or two topologies share the table"
        if "/" in life
        else f"of incarnation {life}, which this ledger does not know {mine}: the ledger was lost and made anew, "
        "or the table belongs to another ledger"
        if gone is None
        else f"of incarnation {life}, which was {gone}: this one would read its source from the start, and write "
        "beside those rows what they have already"
    )
    return f"holds transactions {why}. Nothing was written. Use another table or the old name"


def _claimed(topology: str, life: str) -> str:
    return (
        f"was claimed by topology {topology!r} (life {life}), which may write to it at any time, and by this topology's "
        "ledger it is not that one. Nothing was written. Use another table; or, where that topology never wrote to it and "
        f"is not to: stormproof ledger release-table {topology} SINK, in its database"
    )


def adopt(tx: Tx, life: str, *, by: str, why: str) -> None:
    """Let the topology write beside the rows of another life, by an operator's decision."""
    tx.decided(OperatorAction.ADOPT, by=by, why=why, about=life, message=life)


def adopted(tx: Tx) -> frozenset[str]:
    """The other lives beside whose rows this topology may write, by an operator's decision."""
    return adopted_by(tx.connection, tx.run.incarnation)


def adopted_by(connection: sa.Connection, incarnation: str) -> frozenset[str]:
    """The same, for a reader."""
    return frozenset(
        connection.execute(
            sa.select(t.event.c.message).where(
                t.event.c.incarnation == incarnation,
                t.event.c.kind == EventKind.OPERATOR.value,
                t.event.c.action == OperatorAction.ADOPT.value,
            )
        ).scalars()
    )


assert all(module.__dict__ for module in (control, handed_in))  # they add their tables to the ledger's


Columns: TypeAlias = sa.ColumnCollection[str, sa.ColumnElement[Any]]


def forgotten_by(connection: sa.Connection, which: sa.ColumnElement[bool]) -> str | None:
    """Who had a topology forgotten last, and when, in words; None: nobody. `which`: a condition on the table `forgotten`."""
    c = t.forgotten.c
    found = sa.select(c.by, c.at).where(c.what == "topology", which).order_by(c.number.desc()).limit(1)
    row = connection.execute(found).one_or_none()
    return None if row is None else _forgotten(row.by, row.at)


def forgotten_lives(connection: sa.Connection) -> dict[str, str]:
    """Who had each life forgotten, and when, in words."""
    c = t.forgotten.c
    found = sa.select(c.life, c.by, c.at).where(c.what == "topology").order_by(c.number)
    return {row.life: _forgotten(row.by, row.at) for row in connection.execute(found)}


def _forgotten(by: str, at: datetime) -> str:
    return f"forgotten here by {by} on {at:%F %T} UTC"


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
