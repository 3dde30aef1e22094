"""Rejected messages as the ledger keeps them: recorded with `committed`, and what operators decide about them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from stormproof.core.base.errors import Json
from stormproof.sinks.contract.protocol import RefusedRow
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.tables import Event, Reject, to_reject
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction, RejectState

_V = TypeVar("_V")


_VALUES_MAX: Final = 10_000
"""Values of one statement: a statement of Postgres has 65,535 parameters at most."""


def _chunks(values: Sequence[_V]) -> Iterator[Sequence[_V]]:
    for first in range(0, len(values), _VALUES_MAX):
        yield values[first : first + _VALUES_MAX]


def rejects_of_rows(
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
            rows = int(row.row >= 0)
            found.append(Reject(txid, sink, None, None, None, rows, row.sqlstate, row.error, row.text))
        first = row.messages[:1]
        for message in row.messages:
            reason = reasons.setdefault(message, row)
            if reason.goes_with_others and not row.goes_with_others:
                reasons[message] = row
            # A row of several messages counts once, so that the rows of a txid's rejects are those that the sink left out.
            # A row of a group, and one that does not fit its columns, is in no file, and is none of them.
            counts[message] = counts.get(message, 0) + (message in first and row.row >= 0)
    for (number, origin), row in reasons.items():
        rows, payload = counts[number, origin], payloads.get(number)
        found.append(
            Reject(txid, sink, shown(number, origin), number, origin, rows, row.sqlstate, row.error, row.text, payload)
        )
    return found


def record_rejects(tx: Tx, txid: int, rejects: Sequence[Reject]) -> None:
    """Record a batch's rejects; called in the transaction that records `committed`."""
    if not rejects:
        return
    insert_rejects(tx, rejects)
    numbers = {one.number for one in rejects if one.number is not None}
    tx.connection.execute(
        sa.update(t.txn)
        .where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.txid == txid)
        .values(rejected=len(numbers))
    )


_AS_REJECTED: Final = ["txid", "sink", "message", "number", "origin", "rows", "sqlstate", "error", "row", "payload"]


def insert_rejects(tx: Tx, rejects: Sequence[Reject]) -> None:
    """Add rejects, each with its event."""
    now = tx.clock.now()
    rows: list[dict[str, Any]] = [
        {
            **{name: getattr(one, name) for name in _AS_REJECTED},
            "incarnation": tx.run.incarnation,
            "at": now,
            "state": RejectState.OPEN.value,
            "digest": hashlib.sha256((one.payload or b"") + one.row.encode()).digest(),
        }
        for one in rejects
    ]
    tx.connection.execute(sa.insert(t.reject), rows)
    tx.record([_event(one) for one in rejects])


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


def retried(tx: Tx, txid: int, failed: Collection[str] = ()) -> list[Reject]:
    """Record that a batch of retries has ended: what it replayed is over, but for the messages that failed in it.

    Returns the rejects of sinks to which the batch wrote nothing, since the topology has them no more: they are rejected
    again, in this batch, and are to be recorded.
    """
    c, e, w = t.reject.c, t.event.c, t.txn_sink.c
    replayed = sa.select(e.message).where(
        e.incarnation == tx.run.incarnation, e.txid == txid, e.kind == EventKind.REPLAY.value
    )
    mine = (
        c.incarnation == tx.run.incarnation,
        c.state == RejectState.RETRYING.value,
        c.message.in_(replayed),
        c.message.not_in(list(failed)),
    )
    written = sa.select(w.sink).where(w.incarnation == tx.run.incarnation, w.txid == txid)
    gone = rejects_of(tx, *mine, c.sink.not_in(written))
    tx.connection.execute(sa.update(t.reject).where(*mine).values(state=RejectState.RETRIED.value, retried_in=txid))
    return [_again(one, txid) for one in gone]


def _again(one: Reject, txid: int) -> Reject:
    error = f"when it was retried, the topology had no sink {one.sink!r}; before: {one.error}"
    return replace(one, txid=txid, error=error)


def rejects_of(tx: Tx, *conditions: sa.ColumnElement[bool]) -> list[Reject]:
    """A topology's rejects, oldest first."""
    rows = tx.connection.execute(
        sa.select(t.reject).where(t.reject.c.incarnation == tx.run.incarnation, *conditions).order_by(t.reject.c.id)
    )
    return [to_reject(row) for row in rows]


def altered_reject() -> sa.ColumnElement[bool]:
    """Whether a reject's payload or row is not what was set aside."""
    c = t.reject.c
    payload = sa.func.coalesce(c.payload, sa.literal(b"", sa.LargeBinary))
    return c.digest != sa.func.sha256(payload.op("||")(sa.func.convert_to(c.row, "UTF8")))


def altered_rejects(tx: Tx, ids: Collection[int]) -> set[int]:
    """Those of these rejects whose payload or row is not what was set aside."""
    found: set[int] = set()
    for some in _chunks(sorted(ids)):
        found |= {
            *tx.connection.execute(sa.select(t.reject.c.id).where(t.reject.c.id.in_(some), altered_reject())).scalars()
        }
    return found


def undecided_rejects(tx: Tx, ids: Collection[int]) -> list[Reject]:
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


def decide_rejects(tx: Tx, ids: Collection[int], after: RejectState, *, by: str, why: str) -> None:
    """Record a decision about undecided rejects, which are locked."""
    for some in _chunks(sorted(ids)):
        tx.connection.execute(
            sa.update(t.reject)
            .where(t.reject.c.incarnation == tx.run.incarnation, t.reject.c.id.in_(some))
            .values(state=after.value, decided_by=by, decided_why=why, decided_at=tx.clock.now())
        )


def drop_retrying(tx: Tx, messages: Collection[str], *, by: str, why: str) -> None:
    """Record that retried messages, which failed and were dead letters, are dropped: their rejects are, too."""
    c = t.reject.c
    for some in _chunks(sorted(messages)):
        dropped = tx.connection.execute(
            sa.update(t.reject)
            .where(c.incarnation == tx.run.incarnation, c.state == RejectState.RETRYING.value, c.message.in_(some))
            .values(state=RejectState.DROPPED.value, decided_by=by, decided_why=why, decided_at=tx.clock.now())
            .returning(c.txid, c.sink)
        )
        for (txid, sink), number in Counter((int(row.txid), str(row.sink)) for row in dropped).items():
            detail: dict[str, Json] = {"sink": sink, "rejects": number}
            tx.decided(OperatorAction.DROP_REJECT, by=by, why=why, txid=txid, sink=sink, detail=detail)


def newest_reject(connection: sa.Connection, incarnation: str) -> int:
    """The id of a topology's newest reject; 0: there is none."""
    found = connection.scalar(sa.select(sa.func.max(t.reject.c.id)).where(t.reject.c.incarnation == incarnation))
    return int(found or 0)


def rejected_after(
    connection: sa.Connection, incarnation: str, messages: Collection[str], after: int
) -> frozenset[str]:
    """Those of these messages that a sink rejected after the reject with the id `after`."""
    c = t.reject.c
    found: set[str] = set()
    for some in _chunks(sorted(messages)):
        mine = sa.select(c.message).where(c.incarnation == incarnation, c.id > after, c.message.in_(some))
        found.update(str(message) for message in connection.execute(mine).scalars())
    return frozenset(found)


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
