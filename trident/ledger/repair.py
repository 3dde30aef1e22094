"""Repairs of a batch that cannot go on by itself: a sink is skipped, or turns out to hold more than the ledger knew.

Both change what a sink must hold before its next batch (PREV), in one transaction with the events that record it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from stormproof.core.errors import Json, UsageError
from stormproof.sinks.protocol import Held
from stormproof.trident.ledger import events, txns
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.rows import Event, SinkWork
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction_states import EventKind, OperatorAction, SinkOutcome, TxnState


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that a skipped sink will not hold: its file, its place there, and the row as JSON."""

    file: str
    row: int
    text: str


def skippable(tx: Tx, txid: int, sink: str) -> SinkWork:
    """What a batch writes to a sink, where the sink may be skipped for it.

    Raises:
        UsageError: there is no such batch, it does not wait for its sinks, or the sink holds it or was skipped already.
    """
    where = f"txid {txid} of topology {tx.run.topology!r}"
    txn = txns.find(tx, txid)
    if txn is None or txn.state not in (TxnState.BLOCKED, TxnState.PREPARED):
        now = "does not exist" if txn is None else f"is {txn.state}"
        raise UsageError(f"{where} {now}; a sink is skipped for a batch that is blocked or prepared", txid=txid)
    work = txns.work(tx, txid)
    if sink not in work:
        raise UsageError(
            f"{where} writes nothing to sink {sink!r}; it writes to {', '.join(sorted(work)) or 'no sink'}",
            txid=txid,
            sink=sink,
        )
    if work[sink].outcome is SinkOutcome.SKIPPED:
        raise UsageError(
            f"{where}: sink {sink!r} was skipped already, there is nothing to do; `stormproof status` shows what the batch "
            "waits for",
            txid=txid,
            sink=sink,
        )
    if work[sink].committed_at is not None:
        raise UsageError(f"{where}: sink {sink!r} holds it already, there is nothing to skip", txid=txid, sink=sink)
    return work[sink]


def skip(
    tx: Tx,
    txid: int,
    work: SinkWork,
    rejected: Sequence[RejectedRow],
    *,
    by: str,
    why: str,
    detail: dict[str, Json],
) -> TxnState:
    """Turn a batch's rows at one sink into rejects; the sink goes on from what it holds. Returns the batch's state.

    The batch is prepared again: the next start commits it to its other sinks and confirms its messages. At this sink,
    batches that were prepared behind it now follow the txid that it would have followed.
    """
    txn = txns.find(tx, txid)
    assert txn is not None
    mine = (t.txn_sink.c.incarnation == tx.run.incarnation, t.txn_sink.c.sink == work.sink)
    tx.connection.execute(
        sa.update(t.txn_sink).where(*mine, t.txn_sink.c.txid == txid).values(outcome=SinkOutcome.SKIPPED.value)
    )
    tx.connection.execute(
        sa.update(t.txn_sink)
        .where(*mine, t.txn_sink.c.previous == txid, t.txn_sink.c.committed_at.is_(None))
        .values(previous=work.previous)
    )
    if txn.state is TxnState.BLOCKED:
        txns.unblock(tx, txid)
    reason = txn.reason or why
    detail = {"sink": work.sink, "rows": work.rows, "listed": len(rejected), **detail}
    events.decided(tx, OperatorAction.SKIP, by=by, why=why, txid=txid, sink=work.sink, error=reason, detail=detail)
    events.record(
        tx,
        [
            Event(
                EventKind.REJECT,
                txid=txid,
                sink=work.sink,
                number=row.row,
                reason="skipped",
                error=reason,
                input=row.text,
                detail={"file": row.file, "row": row.row},
            )
            for row in rejected
        ],
    )
    return TxnState.PREPARED


def take_late_commit(tx: Tx, sink: str, held: Held, *, waiting: int | None = None) -> bool:
    """Whether a sink's last txid is a batch that was given up and written after all; if so, the ledger records that.

    A driver that was suspended inside its commit can do so, where the store has no fence. `waiting` is the txid that is to
    follow in the sink: its PREV becomes the late one. Without a digest the sink's evidence of the content has expired.
    """
    txid, known = held.txid, dict(txns.unfinished_work(tx, sink)).get(held.txid)
    if known is None or held.digest not in (None, known) or (waiting is not None and txid >= waiting):
        return False
    txns.held_unfinished(tx, txid, sink, held.at)
    detail: dict[str, Json] = {} if waiting is None else {"followed_by": waiting}
    events.record(tx, [Event(EventKind.LATE_COMMIT, txid=txid, sink=sink, detail=detail)])
    if waiting is not None:
        c: Any = t.txn_sink.c
        tx.connection.execute(
            sa.update(t.txn_sink)
            .where(c.incarnation == tx.run.incarnation, c.sink == sink, c.txid == waiting, c.committed_at.is_(None))
            .values(previous=txid)
        )
    return True


def decide_rows(tx: Tx, txid: int, sink: str, *, by: str, why: str) -> None:
    """Record that the rows of a batch that a sink refuses are given up; called before the sink is touched."""
    events.decided(tx, OperatorAction.SKIP_ROWS, by=by, why=why, txid=txid, sink=sink, detail={"sink": sink})


def rows_given_up(tx: Tx, txid: int) -> TxnState:
    """Note that a sink holds a batch without the rows that its table refuses. Returns the batch's state.

    The batch is prepared again: the next start finds it in this sink, commits it to the others, confirms its messages, and
    records the rejects.
    """
    txn = txns.find(tx, txid)
    assert txn is not None
    if txn.state is TxnState.BLOCKED:
        txns.unblock(tx, txid)
    return TxnState.PREPARED
