"""The append-only record of what happened: failures, replays, take-overs, what operators decided."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.rows import Event, to_event
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction import EventKind


def record(tx: Tx, events: Iterable[Event]) -> None:
    """Append events."""
    now = tx.clock.now()
    rows = [
        {
            "incarnation": tx.run.incarnation,
            "at": now,
            "kind": e.kind.value,
            "action": None if e.action is None else e.action.value,
            "txid": e.txid,
            "attempt": e.attempt,
            "sink": e.sink,
            "message": e.message,
            "number": e.number,
            "origin": e.origin,
            "token": e.token,
            "reason": e.reason,
            "component": e.component,
            "error": e.error,
            "input": e.input,
            "detail": e.detail,
        }
        for e in events
    ]
    if rows:
        tx.connection.execute(sa.insert(t.event), rows)


def failures(tx: Tx, txid: int) -> list[Event]:
    """The messages that failed in a batch, or were returned, in whichever attempt; recorded once, at its end."""
    rows = tx.connection.execute(
        sa.select(t.event)
        .where(
            t.event.c.incarnation == tx.run.incarnation,
            t.event.c.txid == txid,
            t.event.c.kind.in_((EventKind.FAILURE.value, EventKind.RETURNED.value)),
        )
        .order_by(t.event.c.id)
    )
    return [to_event(row) for row in rows]


def counts_of(failures: Iterable[Event]) -> dict[str, int]:
    """How many of these are failures, and how many are messages that were merely returned, by column of `txn`."""
    found = [event.kind is EventKind.FAILURE for event in failures]
    return {"failed": sum(found), "returned": len(found) - sum(found)}


def blocking_sink(tx: Tx, txid: int) -> str | None:
    """The sink at which a batch was blocked last."""
    return tx.connection.execute(
        sa.select(t.event.c.sink)
        .where(
            t.event.c.incarnation == tx.run.incarnation,
            t.event.c.txid == txid,
            t.event.c.kind == EventKind.BLOCKED.value,
        )
        .order_by(t.event.c.id.desc())
        .limit(1)
    ).scalar_one_or_none()


def dead_letters_in(tx: Tx, txid: int) -> list[str]:
    """The messages that became dead letters with a batch, as far as that is recorded."""
    rows = tx.connection.execute(
        sa.select(t.event.c.message).where(
            t.event.c.incarnation == tx.run.incarnation,
            t.event.c.txid == txid,
            t.event.c.kind == EventKind.DEAD_LETTER.value,
        )
    )
    return [str(message) for message in rows.scalars()]
