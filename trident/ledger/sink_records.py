"""What the ledger keeps of a topology's sinks: the table behind each, and what they rejected.

The ledger knows which table a sink's is, and the last txid that it holds; another table is refused. Rejected messages are
recorded with `committed`, and with what operators decide about them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from pydantic import TypeAdapter

from stormproof.core.base.errors import Json, PositionMismatch
from stormproof.sinks.contract.protocol import RefusedRow
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.tables import Event, Reject, record_of, to_reject
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction, RejectState, TxnState


@dataclass(frozen=True, slots=True)
class Bound:
    """The table behind a sink, as the ledger knows it: its name, its id, and the last txid that it holds."""

    topology: str
    sink: str
    target: str
    table_id: str
    last_txid: int | None

    @property
    def _where(self) -> str:
        return f"sink {self.sink!r} of topology {self.topology!r}"

    @property
    def _held(self) -> str:
        return "no txid" if self.last_txid is None else f"txid {self.last_txid}"

    def is_gone(self, target: str) -> PositionMismatch:
        """The error where there is no table of the name that the sink has now."""
        if target != self.target:
            return self._renamed(target, f"there is no table {target}")
        return PositionMismatch(
            f"{self._where}: the table {target} is gone. By the ledger it holds {self._held} (id {self.table_id}). Nothing "
            f"was made or written; inspect with: stormproof audit verify {self.topology}. Put it back "
            "(mount it, rename it back, restore it) and start again; restored from a dump it is another table: "
            f"stormproof ledger adopt-table {self.topology} {self.sink}. Or give its rows up, on "
            f"record, for an empty table: stormproof ledger adopt-table {self.topology} {self.sink} --accept-loss",
            sink=self.sink,
            ledger=self.table_id,
            found=None,
            txid=self.last_txid,
        )

    def is_another(self, target: str, table_id: str) -> PositionMismatch:
        """The error where the table of the name that the sink has now is not the known one."""
        if target != self.target:
            return self._renamed(target, f"the table {target} is another one (id {table_id})", table_id)
        return PositionMismatch(
            f"{self._where}: the table {target} is not the one that the ledger knows (id {self.table_id}, which holds "
            f"{self._held}; now id {table_id}): it was dropped and made again, or replaced. Nothing was written. Inspect "
            f"with: stormproof audit verify {self.topology}. If it is the same table, restored from a dump: stormproof "
            f"ledger adopt-table {self.topology} {self.sink}",
            sink=self.sink,
            ledger=self.table_id,
            found=table_id,
            txid=self.last_txid,
        )

    def _renamed(self, target: str, there: str, table_id: str | None = None) -> PositionMismatch:
        return PositionMismatch(
            f"{self._where} wrote to table {self.target} so far (id {self.table_id}, which holds {self._held}); now it "
            f"names {target}, and {there}. Nothing was made or written; inspect with: "
            f"stormproof audit verify {self.topology}. Name {self.target} again; or, to go on in a table "
            "of that name, give the sink a new name, too (name=...): it begins behind the newest txid, and the old table "
            "keeps what it holds. If it is the old table, moved by a dump: give it its old name, then stormproof ledger "
            f"adopt-table {self.topology} {self.sink}",
            sink=self.sink,
            ledger=self.table_id,
            found=table_id,
            txid=self.last_txid,
            was=self.target,
            now=target,
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows that an operator gave up with a table: txids up to `upto` had written them, and no table holds them now."""

    upto: int
    txids: str
    """The txids of these rows, as ranges."""
    rows: int
    """The number of rows that those txids wrote."""
    found: int
    """The number of rows in the table that took its place."""
    by: str = ""
    why: str = ""

    @staticmethod
    def of(detail: dict[str, Json]) -> Loss:
        """From the detail of the event that records it."""
        return _LOSS.validate_python(detail)


_LOSS: Final = TypeAdapter(Loss)


def bind(tx: Tx, sink: str, target: str, table_id: str, description: dict[str, Json] | None = None) -> None:
    """Record which table is behind a sink, and how the audit can open it again by name alone.

    Raises:
        PositionMismatch: the ledger knows another table there: see `Bound.is_another`.
    """
    row = _sink_row(tx, sink)
    known = _in_use(tx, row)
    if known is not None and known.table_id != table_id:
        raise known.is_another(target, table_id)
    now: dict[str, Any] = {"target": target, "table_id": table_id, "description": description}
    mine = (t.topology_sink.c.incarnation == tx.run.incarnation) & (t.topology_sink.c.sink == sink)
    if row is None:
        first = {"incarnation": tx.run.incarnation, "sink": sink, "first_at": tx.clock.now()}
        tx.connection.execute(sa.insert(t.topology_sink).values(**first, **now))
    elif description is not None and now != {name: getattr(row, name) for name in now}:
        # Under another path or another schema: the next inspection needs the present one.
        tx.connection.execute(sa.update(t.topology_sink).where(mine).values(**now))


def rebind(tx: Tx, sink: str, table_id: str, *, by: str, why: str, loss: Loss | None = None) -> None:
    """Take the table that is there now for the sink's, by an operator's decision, and record what is given up with it."""
    known = _sink_row(tx, sink)
    tx.connection.execute(
        sa.update(t.topology_sink)
        .where(t.topology_sink.c.incarnation == tx.run.incarnation, t.topology_sink.c.sink == sink)
        .values(table_id=table_id)
    )
    was = None if known is None else known.table_id
    detail: dict[str, Json] = {"was": was, "is": table_id}
    tx.decided(OperatorAction.ADOPT_TABLE, by=by, why=why, sink=sink, detail=detail)
    if loss is not None:
        tx.decided(OperatorAction.ACCEPT_LOSS, by=by, why=why, sink=sink, detail=asdict(loss))


def unbind(tx: Tx, sink: str, *, by: str, why: str) -> None:
    """Forget the table behind a sink that never held a txid: the next start binds the one that it finds."""
    known = _sink_row(tx, sink)
    tx.connection.execute(
        sa.delete(t.topology_sink).where(
            t.topology_sink.c.incarnation == tx.run.incarnation, t.topology_sink.c.sink == sink
        )
    )
    was = None if known is None else known.table_id
    tx.decided(OperatorAction.RELEASE_TABLE, by=by, why=why, sink=sink, detail={"was": was})


def bound(tx: Tx, sink: str) -> Bound | None:
    """The table behind a sink of this incarnation; None where no batch wrote to it, nor is about to: it may have another."""
    return _in_use(tx, _sink_row(tx, sink))


def _in_use(tx: Tx, row: Any) -> Bound | None:
    if row is None:
        return None
    held = last_held(tx, row.sink)
    if held is None and prepared(tx, row.sink) is None:
        return None
    return Bound(tx.run.topology, row.sink, row.target, row.table_id, None if held is None else held[0])


def _sink_row(tx: Tx, sink: str) -> Any:
    return tx.connection.execute(
        sa.select(t.topology_sink).where(
            t.topology_sink.c.incarnation == tx.run.incarnation, t.topology_sink.c.sink == sink
        )
    ).one_or_none()


def last_held(tx: Tx, sink: str) -> tuple[int, str] | None:
    """The highest txid that a sink is known to hold, with its digest: PREV for the next one."""
    row = tx.connection.execute(
        sa.select(t.txn_sink.c.txid, t.txn_sink.c.digest)
        .where(
            t.txn_sink.c.incarnation == tx.run.incarnation,
            t.txn_sink.c.sink == sink,
            t.txn_sink.c.committed_at.is_not(None),
        )
        .order_by(t.txn_sink.c.txid.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else (row.txid, row.digest)


def rows_held(tx: Tx, sink: str) -> dict[int, int]:
    """The number of rows of each txid that the sink is known to hold and that the ledger still has."""
    rows = tx.connection.execute(
        sa.select(t.txn_sink.c.txid, t.txn_sink.c.rows).where(
            t.txn_sink.c.incarnation == tx.run.incarnation,
            t.txn_sink.c.sink == sink,
            t.txn_sink.c.committed_at.is_not(None),
        )
    )
    return {row.txid: row.rows for row in rows}


def prepared(tx: Tx, sink: str) -> tuple[int, str, int] | None:
    """The txid whose content is fixed for a sink, and which the ledger does not know to be held; its digest and rows."""
    row = tx.connection.execute(
        sa.select(t.txn_sink.c.txid, t.txn_sink.c.digest, t.txn_sink.c.rows)
        .join(t.txn, (t.txn.c.incarnation == t.txn_sink.c.incarnation) & (t.txn.c.txid == t.txn_sink.c.txid))
        .where(
            t.txn_sink.c.incarnation == tx.run.incarnation,
            t.txn_sink.c.sink == sink,
            t.txn_sink.c.committed_at.is_(None),
            t.txn_sink.c.outcome.is_(None),
            t.txn.c.state.in_([TxnState.PREPARED.value, TxnState.BLOCKED.value]),
        )
        .order_by(t.txn_sink.c.txid)
        .limit(1)
    ).one_or_none()
    return None if row is None else (row.txid, row.digest, row.rows)


def given_up(tx: Tx, sink: str) -> int:
    """The txid up to which an operator gave up what the sink's table lacks; 0 where nobody did."""
    details = tx.connection.execute(
        sa.select(t.event.c.detail).where(
            t.event.c.incarnation == tx.run.incarnation,
            t.event.c.kind == EventKind.OPERATOR.value,
            t.event.c.action == OperatorAction.ACCEPT_LOSS.value,
            t.event.c.sink == sink,
        )
    ).scalars()
    return max((Loss.of(detail).upto for detail in details), default=0)


@dataclass(frozen=True, slots=True)
class SinkBinding:
    """The table behind a sink; `description` says how to open it, None where that was not recorded."""

    sink: str
    target: str
    table_id: str
    description: dict[str, Json] | None
    first_at: datetime


def bindings_of(connection: sa.Connection, incarnation: str) -> tuple[SinkBinding, ...]:
    """The tables behind a topology's sinks, by the sinks' names."""
    c = t.topology_sink.c
    rows = connection.execute(sa.select(t.topology_sink).where(c.incarnation == incarnation).order_by(c.sink))
    return tuple(record_of(SinkBinding, row) for row in rows)


_V = TypeVar("_V")


# ---- rejected messages

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
