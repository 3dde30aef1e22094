"""Rejected messages as the ledger keeps them: recorded with `committed`, and what operators decide about them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from stormproof.sinks.protocol import RefusedRow
from stormproof.trident.ledger import events
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.rows import Event, Reject, to_reject
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction_states import EventKind, RejectState

_V = TypeVar("_V")


_VALUES_MAX: Final = 10_000
"""Values of one statement: a statement of Postgres has 65,535 parameters at most."""


def _chunks(values: Sequence[_V]) -> Iterator[Sequence[_V]]:
    for first in range(0, len(values), _VALUES_MAX):
        yield values[first : first + _VALUES_MAX]


def of_rows(
    txid: int,
    sink: str,
    refused: Sequence[RefusedRow],
    shown: Callable[[int, int], str],
    payloads: Mapping[int, bytes],
) -> list[Reject]:
    """One reject for each message of these rows, and one for each row without a message.

    Where several rows of a message are refused, the first gives the reason; rows that only go with others give none.
    """
    found: list[Reject] = []
    reasons: dict[tuple[int, int], RefusedRow] = {}
    counts: dict[tuple[int, int], int] = {}
    for row in refused:
        if not row.messages:
            found.append(Reject(txid, sink, None, None, None, 1, row.sqlstate, row.error, row.text))
        first = row.messages[:1]
        for message in row.messages:
            reason = reasons.setdefault(message, row)
            if reason.goes_with_others and not row.goes_with_others:
                reasons[message] = row
            # A row of several messages counts once, so that the rows of a txid's rejects are those that the sink left out.
            counts[message] = counts.get(message, 0) + (message in first)
    for (number, origin), row in reasons.items():
        rows, payload = counts[number, origin], payloads.get(number)
        found.append(
            Reject(txid, sink, shown(number, origin), number, origin, rows, row.sqlstate, row.error, row.text, payload)
        )
    return found


def record(tx: Tx, txid: int, rejects: Sequence[Reject]) -> None:
    """Record a batch's rejects; called in the transaction that records `committed`.

    Rows that a version before recorded already, when an operator gave them up, are not recorded again.
    """
    if not rejects:
        return
    c = t.reject.c
    known = set(
        tx.connection.execute(
            sa.select(c.sink).distinct().where(c.incarnation == tx.run.incarnation, c.txid == txid)
        ).scalars()
    )
    rejects = [one for one in rejects if one.sink not in known]
    if not rejects:
        return
    insert(tx, rejects)
    numbers = {one.number for one in rejects if one.number is not None}
    tx.connection.execute(
        sa.update(t.txn)
        .where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.txid == txid)
        .values(rejected=len(numbers))
    )


def insert(tx: Tx, rejects: Sequence[Reject]) -> None:
    """Add rejects, each with its event."""
    now = tx.clock.now()
    rows: list[dict[str, Any]] = [
        {
            "incarnation": tx.run.incarnation,
            "txid": one.txid,
            "sink": one.sink,
            "message": one.message,
            "number": one.number,
            "origin": one.origin,
            "rows": one.rows,
            "sqlstate": one.sqlstate,
            "error": one.error,
            "row": one.row,
            "payload": one.payload,
            "at": now,
            "state": RejectState.OPEN.value,
        }
        for one in rejects
    ]
    tx.connection.execute(sa.insert(t.reject), rows)
    events.record(tx, [_event(one) for one in rejects])


def _event(one: Reject) -> Event:
    return Event(
        EventKind.REJECT,
        txid=one.txid,
        sink=one.sink,
        message=one.message,
        number=one.number,
        origin=one.origin,
        reason="refused",
        error=one.error,
        input=one.row,
        detail={"sqlstate": one.sqlstate, "rows": one.rows},
    )


def retrying(tx: Tx, messages: Collection[str]) -> dict[str, frozenset[str]]:
    """Those of these messages that were opened again as rejects, and the sinks that are to get their rows."""
    c = t.reject.c
    found: dict[str, set[str]] = {}
    for some in _chunks(sorted(messages)):
        rows = tx.connection.execute(
            sa.select(c.message, c.sink).where(
                c.incarnation == tx.run.incarnation, c.state == RejectState.RETRYING.value, c.message.in_(some)
            )
        )
        for message, sink in rows:
            found.setdefault(str(message), set()).add(str(sink))
    return {message: frozenset(sinks) for message, sinks in found.items()}


def retried(tx: Tx, txid: int, sinks: Collection[str], failed: Collection[str]) -> None:
    """Record that a batch of retries is committed to the sinks that it was limited to: what it replayed is over there, but
    for the messages that failed in it.
    """
    c, e = t.reject.c, t.event.c
    replayed = sa.select(e.message).where(
        e.incarnation == tx.run.incarnation, e.txid == txid, e.kind == EventKind.REPLAY.value
    )
    tx.connection.execute(
        sa.update(t.reject)
        .where(
            c.incarnation == tx.run.incarnation,
            c.state == RejectState.RETRYING.value,
            c.sink.in_(list(sinks)),
            c.message.in_(replayed),
            c.message.not_in(list(failed)),
        )
        .values(state=RejectState.RETRIED.value, retried_in=txid)
    )


def of_topology(tx: Tx, *conditions: sa.ColumnElement[bool]) -> list[Reject]:
    """A topology's rejects, oldest first."""
    rows = tx.connection.execute(
        sa.select(t.reject).where(t.reject.c.incarnation == tx.run.incarnation, *conditions).order_by(t.reject.c.id)
    )
    return [to_reject(row) for row in rows]


def undecided(tx: Tx, ids: Collection[int]) -> list[Reject]:
    """Those of these rejects about which nobody has decided, locked until the transaction ends."""
    c = t.reject.c
    found: list[Reject] = []
    for some in _chunks(sorted(ids)):
        rows = tx.connection.execute(
            sa.select(t.reject)
            .where(c.incarnation == tx.run.incarnation, c.id.in_(some), c.state == RejectState.OPEN.value)
            .order_by(c.id)
            .with_for_update()
        )
        found += [to_reject(row) for row in rows]
    return found


def decide(tx: Tx, ids: Collection[int], after: RejectState, *, by: str, why: str) -> None:
    """Record a decision about undecided rejects, which are locked."""
    for some in _chunks(sorted(ids)):
        tx.connection.execute(
            sa.update(t.reject)
            .where(t.reject.c.incarnation == tx.run.incarnation, t.reject.c.id.in_(some))
            .values(state=after.value, decided_by=by, decided_why=why, decided_at=tx.clock.now())
        )


def sinks_of_batch(tx: Tx, txid: int) -> frozenset[str] | None:
    """The sinks to which a batch of retries is limited: its messages were rejected there; None: it is not limited."""
    e = t.event.c
    replayed = tx.connection.execute(
        sa.select(e.message).where(
            e.incarnation == tx.run.incarnation, e.txid == txid, e.kind == EventKind.REPLAY.value
        )
    )
    found = set(retrying(tx, [str(message) for message in replayed.scalars()]).values())
    return found.pop() if len(found) == 1 else None
