"""Other lives in a sink's table: which topologies wrote there, and which of them an operator adopted."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from stormproof.core.errors import PositionMismatch
from stormproof.trident.ledger import events, forgetting
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction_states import EventKind, OperatorAction


def require_known(tx: Tx, sink: str, target: str, others: Sequence[str]) -> None:
    """Refuse a table that other lives wrote to, unless an operator adopted them.

    A life of this topology's name means that the ledger was lost and made anew; a life of another topology means that this
    one was renamed, or that two share a table. A renamed topology would read its source from the start and double it all.

    Raises:
        PositionMismatch: names the lives, and the command that goes on all the same.
    """
    known_lives = adopted(tx)
    unknown = [other for other in others if other not in known_lives]
    if unknown:
        life = unknown[0]
        known = f"(it has {tx.run.topology}/{tx.run.incarnation})"
        gone = forgetting.when(tx.connection, t.forgotten.c.life == (life.partition("/")[2] or life))
        why = (
            f"of topology {life.partition('/')[0]!r} {known}: this topology is that one under a new name, and would "
            "read its source from the start and write it all again, or two topologies share the table"
            if "/" in life
            else f"of incarnation {life}, which this ledger does not know {known}: the ledger was lost and made anew, "
            "or the table belongs to another ledger"
            if gone is None
            else f"of incarnation {life}, which was {gone}: this one would read its source from the start, and write "
            "beside those rows what they have already"
        )
        raise PositionMismatch(
            f"sink {sink!r} of topology {tx.run.topology!r}: {target} holds transactions {why}. Nothing was written. "
            f"Use another table or the old name; or, to write beside what is there: stormproof ledger adopt "
            f"{tx.run.topology} {life}",
            sink=sink,
            unknown=[*unknown],
            ledger=tx.run.incarnation,
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
