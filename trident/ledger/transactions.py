"""Batches as the ledger keeps them: `txn`, their attempts, and what each writes to each sink.

A batch changes its state only as `MOVES` allows, and only from the state that the caller expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from stormproof.core.errors import Fenced, Json
from stormproof.core.guarantee import Guarantee
from stormproof.core.sink import files_to_json
from stormproof.core.source.protocol import Expectation, Slice
from stormproof.trident.ledger import events
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.rows import Event, SinkWork, Txn, to_txn, to_work
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction import MOVES, AttemptOutcome, EventKind, SinkOutcome, TxnCause, TxnState


def next_txid(tx: Tx) -> int:
    """The number after the highest; aborted numbers are gaps, never used again."""
    highest = tx.connection.execute(
        sa.select(sa.func.max(t.txn.c.txid)).where(t.txn.c.incarnation == tx.run.incarnation)
    ).scalar_one()
    return 1 if highest is None else int(highest) + 1


def open_batch(
    tx: Tx,
    txid: int,
    guarantee: Guarantee,
    source: str,
    slice_: Slice,
    seed: int,
    tuning: Mapping[str, Json] | None = None,
) -> None:
    """Record a batch and its first attempt; `tuning` is how batches are to be at present."""
    now = tx.clock.now()
    tx.connection.execute(
        sa.insert(t.txn).values(
            incarnation=tx.run.incarnation,
            txid=txid,
            state=TxnState.OPEN.value,
            guarantee=guarantee.value,
            epoch=tx.run.epoch,
            attempt=1,
            source=source,
            position=slice_.position,
            messages=slice_.expected.messages,
            bytes=slice_.bytes,
            retry=slice_.retry,
            opened_at=now,
            tuning=tuning,
        )
    )
    _insert_attempt(tx, txid, 1, seed, frozenset(), slice_.expected)


def add_attempt(tx: Tx, txid: int, attempt: int, seed: int, excluded: frozenset[int], expected: Expectation) -> None:
    """Record a further attempt, before its job runs."""
    _update_txn(tx, txid, TxnState.OPEN, attempt=attempt)
    _insert_attempt(tx, txid, attempt, seed, excluded, expected)


def _insert_attempt(
    tx: Tx, txid: int, attempt: int, seed: int, excluded: frozenset[int], expected: Expectation
) -> None:
    tx.connection.execute(
        sa.insert(t.attempt).values(
            incarnation=tx.run.incarnation,
            txid=txid,
            attempt=attempt,
            epoch=tx.run.epoch,
            seed=seed,
            excluded=sorted(excluded),
            expected_messages=expected.messages,
            expected_xor=expected.xor,
            started_at=tx.clock.now(),
            outcome=AttemptOutcome.RUNNING.value,
        )
    )


def end_attempt(tx: Tx, txid: int, attempt: int, outcome: AttemptOutcome, error: str | None = None) -> None:
    """Record how an attempt ended."""
    tx.connection.execute(
        sa.update(t.attempt)
        .where(t.attempt.c.incarnation == tx.run.incarnation, t.attempt.c.txid == txid, t.attempt.c.attempt == attempt)
        .values(outcome=outcome.value, error=error)
    )
    if error is not None:
        events.record(
            tx, [Event(EventKind.ATTEMPT_FAILED, txid=txid, attempt=attempt, reason=outcome.value, error=error)]
        )


def fix_content(
    tx: Tx, txid: int, attempt: int, work: Sequence[SinkWork], failures: Sequence[Event], tuples: int
) -> None:
    """Record what a batch writes and which of its messages failed; from here on its content cannot change."""
    end_attempt(tx, txid, attempt, AttemptOutcome.COMPLETE)
    tx.connection.execute(
        sa.insert(t.txn_sink),
        [
            {
                "incarnation": tx.run.incarnation,
                "txid": txid,
                "sink": w.sink,
                "previous": w.previous,
                "rows": w.rows,
                "bytes": w.bytes,
                "digest": w.digest,
                "files": files_to_json(w.files),
            }
            for w in work
        ],
    )
    events.record(tx, failures)
    _update_txn(tx, txid, TxnState.OPEN, **events.counts_of(failures), tuples=tuples, prepared_at=tx.clock.now())


def move(
    tx: Tx,
    txid: int,
    before: TxnState,
    after: TxnState,
    *,
    cause: TxnCause | None = None,
    reason: str | None = None,
    **values: Json,
) -> None:
    """Change a batch's state, only as `MOVES` allows.

    Raises:
        Fenced: it is not `before` any more.
    """
    assert after in MOVES[before], (before, after)
    ended: dict[str, Any] = {"ended_at": tx.clock.now()} if after.ended else {}
    why = {"cause": None if cause is None else cause.value, "reason": reason}
    _update_txn(tx, txid, before, state=after.value, **why, **ended, **values)


def unblock(tx: Tx, txid: int) -> None:
    """Have a blocked batch wait for its sinks again: the next start commits it."""
    move(tx, txid, TxnState.BLOCKED, TxnState.PREPARED)


def _update_txn(tx: Tx, txid: int, before: TxnState, **values: Any) -> None:
    changed = tx.connection.execute(
        sa.update(t.txn)
        .where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.txid == txid, t.txn.c.state == before.value)
        .values(**values)
    ).rowcount
    if changed != 1:
        raise Fenced(
            f"txid {txid} of topology {tx.run.topology!r} is not {before} any more: another driver moved it",
            topology=tx.run.topology,
            txid=txid,
        )


def sinks_hold(tx: Tx, txid: int, outcomes: Mapping[str, SinkOutcome]) -> None:
    """Record that these sinks hold the batch, and how each commit ended."""
    for sink, outcome in outcomes.items():
        tx.connection.execute(
            sa.update(t.txn_sink)
            .where(t.txn_sink.c.incarnation == tx.run.incarnation, t.txn_sink.c.txid == txid, t.txn_sink.c.sink == sink)
            .values(committed_at=tx.clock.now(), outcome=outcome.value)
        )


def unresolved(tx: Tx) -> list[Txn]:
    """Batches without an end, in txid order."""
    rows = tx.connection.execute(
        sa.select(t.txn)
        .where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.ended_at.is_(None))
        .order_by(t.txn.c.txid)
    )
    return [to_txn(row) for row in rows]


def find(tx: Tx, txid: int) -> Txn | None:
    """One batch."""
    row = tx.connection.execute(
        sa.select(t.txn).where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.txid == txid)
    ).one_or_none()
    return None if row is None else to_txn(row)


def work(tx: Tx, txid: int) -> dict[str, SinkWork]:
    """What a batch writes, by sink; empty before its content was fixed."""
    rows = tx.connection.execute(
        sa.select(t.txn_sink).where(t.txn_sink.c.incarnation == tx.run.incarnation, t.txn_sink.c.txid == txid)
    )
    return {row.sink: to_work(row) for row in rows}


def owed_work(tx: Tx, txid: int) -> tuple[dict[str, SinkWork], bool]:
    """What a batch still writes, by sink, and whether it has any such row at all: skipped sinks are left out."""
    found = work(tx, txid)
    return {sink: item for sink, item in found.items() if item.outcome is not SinkOutcome.SKIPPED}, bool(found)


def last_committed(tx: Tx, limit: int) -> list[tuple[int, SinkWork]]:
    """What the last committed batches wrote, newest first, for each sink that holds it."""
    rows = tx.connection.execute(
        sa.select(t.txn_sink)
        .where(
            t.txn_sink.c.incarnation == tx.run.incarnation,
            t.txn_sink.c.committed_at.is_not(None),
            t.txn_sink.c.txid.in_(
                sa.select(t.txn.c.txid)
                .where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.state == TxnState.COMMITTED.value)
                .order_by(t.txn.c.txid.desc())
                .limit(limit)
            ),
        )
        .order_by(t.txn_sink.c.txid.desc())
    )
    return [(row.txid, to_work(row)) for row in rows]


def unfinished_work(tx: Tx, sink: str) -> list[tuple[int, str]]:
    """(txid, digest) of batches whose content was fixed, which were given up, and which the sink may hold all the same.

    Those that ended without it, under at-least-once and at-most-once; and those for which it was skipped.
    """
    rows = tx.connection.execute(
        sa.select(t.txn_sink.c.txid, t.txn_sink.c.digest)
        .join(t.txn, sa.and_(t.txn.c.incarnation == t.txn_sink.c.incarnation, t.txn.c.txid == t.txn_sink.c.txid))
        .where(
            t.txn_sink.c.incarnation == tx.run.incarnation,
            t.txn_sink.c.sink == sink,
            t.txn_sink.c.committed_at.is_(None),
            sa.or_(
                t.txn.c.state.in_((TxnState.ABORTED.value, TxnState.ABANDONED.value)),
                t.txn_sink.c.outcome == SinkOutcome.SKIPPED.value,
            ),
        )
        .order_by(t.txn_sink.c.txid)
    )
    return [(row.txid, row.digest) for row in rows]


def pruned_upto(tx: Tx) -> int:
    """Up to which txid the record was cut; 0 where it never was."""
    return int(
        tx.connection.execute(
            sa.select(sa.func.coalesce(sa.func.max(t.prune.c.upto), 0)).where(
                t.prune.c.incarnation == tx.run.incarnation
            )
        ).scalar_one()
    )


def live_attempts(tx: Tx) -> tuple[int, frozenset[tuple[int, int]]]:
    """The highest txid, and the (txid, attempt) pairs whose files a sink may hold or may still come to hold."""
    rows = tx.connection.execute(
        sa.select(t.txn.c.txid, t.txn.c.attempt).where(
            t.txn.c.incarnation == tx.run.incarnation,
            sa.exists().where(t.txn_sink.c.incarnation == t.txn.c.incarnation, t.txn_sink.c.txid == t.txn.c.txid),
        )
    )
    live = frozenset((row.txid, row.attempt) for row in rows)
    return next_txid(tx) - 1, live
