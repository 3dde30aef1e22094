"""The append-only record of what happened: failures, replays, take-overs, operators' decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from stormproof.core.base.errors import Json
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.rows import Event, names_of, to_event
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction


def record(tx: Tx, events: Iterable[Event]) -> None:
    """Append events."""
    now = tx.clock.now()
    rows = [
        {
            **{name: getattr(e, name) for name in names_of(Event)},
            "incarnation": tx.run.incarnation,
            "at": now,
            "kind": e.kind.value,
            "action": None if e.action is None else e.action.value,
        }
        for e in events
    ]
    if rows:
        tx.connection.execute(sa.insert(t.event), rows)


def decided(
    tx: Tx,
    action: OperatorAction,
    *,
    by: str,
    why: str,
    about: str = "",
    txid: int | None = None,
    sink: str | None = None,
    message: str | None = None,
    error: str | None = None,
    detail: Mapping[str, Json] | None = None,
) -> None:
    """Record what an operator decided, who and why. The event's prose is the action, what it is `about`, and who decided.

    Raises:
        ConfirmedBefore: it was decided by a form of the page that was acted on before.
    """
    tx.confirm()
    words = " ".join([*action.value.split("_"), *([about] if about else []), "by", by])
    whole: dict[str, Json] = {"action": action.value, "by": by, "why": why, **(detail or {})}
    event = Event(
        EventKind.OPERATOR, action, txid=txid, sink=sink, message=message, reason=words, error=error, detail=whole
    )
    record(tx, [event])


def failures(tx: Tx, txid: int) -> list[Event]:
    """The messages that failed in a batch or were returned, in any of its attempts; recorded once, at its end."""
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
    """The numbers of failed and of returned messages among these events, by column of `txn`."""
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


def kept_messages(tx: Tx, txid: int) -> dict[str, str]:
    """The sinks at which an operator gave up a batch's rows and kept its messages; with who decided, and why."""
    c = t.event.c
    rows = tx.connection.execute(
        sa.select(c.sink, c.detail).where(
            c.incarnation == tx.run.incarnation, c.txid == txid, c.kind == EventKind.OPERATOR.value
        )
    )
    return {
        row.sink: f"skipped by {row.detail['by']}: {row.detail['why']}"
        for row in rows
        if row.detail.get("messages") is True
    }


def dead_letters_in(tx: Tx, txid: int) -> list[str]:
    """The messages that are recorded as dead letters of a batch."""
    rows = tx.connection.execute(
        sa.select(t.event.c.message).where(
            t.event.c.incarnation == tx.run.incarnation,
            t.event.c.txid == txid,
            t.event.c.kind == EventKind.DEAD_LETTER.value,
        )
    )
    return [str(message) for message in rows.scalars()]
