"""Other lives in a sink's table: which topologies wrote there, and which of them an operator adopted."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from stormproof.core.errors import PositionMismatch
from stormproof.trident.ledger import events, forgetting
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.rows import Run
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction_states import EventKind, OperatorAction


def require_known(tx: Tx, sink: str, target: str, holds: Sequence[str], claims: Sequence[str] = ()) -> None:
    """Refuse a table that `holds` transactions of other lives, or has `claims` of theirs, unless an operator adopted them.

    Raises:
        PositionMismatch: names the lives, and the command that goes on all the same.
    """
    known = adopted(tx)
    holds, claims = ([life for life in lives if life not in known] for lives in (holds, claims))
    if holds or claims:
        life = [*holds, *claims][0]
        gone = forgetting.when(tx.connection, t.forgotten.c.life == (life.partition("/")[2] or life))
        raise unknown(tx.run, sink, target, holds, claims, gone)


def unknown(
    run: Run, sink: str, target: str, holds: Sequence[str], claims: Sequence[str], gone: str | None = None
) -> PositionMismatch:
    """The error for such a table; `gone` says who had the first of these lives forgotten."""
    life = [*holds, *claims][0]
    topology = life.partition("/")[0] if "/" in life else run.topology
    said = _holds(run, life, gone) if holds else _claimed(topology, life)
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
    events.decided(tx, OperatorAction.ADOPT, by=by, why=why, about=life, message=life)


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
