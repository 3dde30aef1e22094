"""Batches as the ledger keeps them: `txn`, their attempts, and what each writes to each sink.

A batch changes its state only as `MOVES` allows, and only from the state that the caller expects. A batch that cannot go on
by itself is repaired: a sink is skipped, or turns out to hold more than the ledger knew. Both change what a sink must hold
before its next batch (PREV), in one transaction with the events that record it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.base.errors import Fenced, Json, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import files_to_json
from stormproof.core.contract.source import Expectation, Slice
from stormproof.sinks.contract.protocol import CommitResult, Held
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import Statement, Tx, given
from stormproof.trident.ledger.tables import BatchCounts, Event, SinkWork, Txn, to_txn, to_work
from stormproof.trident.terms.transaction_states import (
    MOVES,
    AttemptOutcome,
    EventKind,
    OperatorAction,
    SinkOutcome,
    TxnCause,
    TxnState,
)

_THIS: Final = (t.txn.c.incarnation == given("incarnation"), t.txn.c.txid == given("txid"))
_HIGHEST: Final = Statement(sa.select(sa.func.max(t.txn.c.txid)).where(t.txn.c.incarnation == given("incarnation")))


def next_txid(tx: Tx) -> int:
    """The number after the highest; aborted numbers are gaps, never used again."""
    highest = _HIGHEST.run(tx.connection, incarnation=tx.run.incarnation).scalar_one()
    return 1 if highest is None else int(highest) + 1


def _insert(table: sa.Table, *columns: str) -> sa.Insert:
    return sa.insert(table).values({column: given(column) for column in columns})


_NEW_ATTEMPT: Final = _insert(
    t.attempt,
    *("incarnation", "txid", "attempt", "epoch", "seed", "excluded", "expected_messages", "expected_xor"),
    *("started_at", "outcome"),
)
_NEW_TXN: Final = _insert(
    t.txn,
    *("incarnation", "txid", "state", "guarantee", "epoch", "attempt", "source", "position", "messages", "bytes"),
    *("retry", "opened_at", "tuning"),
)
_OPEN: Final = Statement(_NEW_ATTEMPT, _NEW_TXN)
_ATTEMPT: Final = Statement(_NEW_ATTEMPT)


def open_batch(
    tx: Tx,
    txid: int,
    guarantee: Guarantee,
    source: str,
    slice_: Slice,
    seed: int,
    tuning: Mapping[str, Json] | None = None,
) -> None:
    """Record a batch and its first attempt; `tuning` is the present size and number of batches."""
    _OPEN.run(
        tx.connection,
        **_attempt_values(tx, txid, 1, seed, frozenset(), slice_.expected),
        state=TxnState.OPEN.value,
        guarantee=guarantee.value,
        source=source,
        position=slice_.position,
        messages=slice_.expected.messages,
        bytes=slice_.bytes,
        retry=slice_.retry,
        opened_at=tx.clock.now(),
        tuning=tuning,
    )


def add_attempt(tx: Tx, txid: int, attempt: int, seed: int, excluded: frozenset[int], expected: Expectation) -> None:
    """Record a further attempt, before its job runs."""
    _update_txn(tx, txid, TxnState.OPEN, attempt=attempt)
    _ATTEMPT.run(tx.connection, **_attempt_values(tx, txid, attempt, seed, excluded, expected))


def _attempt_values(
    tx: Tx, txid: int, attempt: int, seed: int, excluded: frozenset[int], expected: Expectation
) -> dict[str, Any]:
    return {
        "incarnation": tx.run.incarnation,
        "txid": txid,
        "attempt": attempt,
        "epoch": tx.run.epoch,
        "seed": seed,
        "excluded": sorted(excluded),
        "expected_messages": expected.messages,
        "expected_xor": expected.xor,
        "started_at": tx.clock.now(),
        "outcome": AttemptOutcome.RUNNING.value,
    }


def end_attempt(tx: Tx, txid: int, attempt: int, outcome: AttemptOutcome, error: str | None = None) -> None:
    """Record how an attempt ended."""
    tx.connection.execute(
        sa.update(t.attempt)
        .where(t.attempt.c.incarnation == tx.run.incarnation, t.attempt.c.txid == txid, t.attempt.c.attempt == attempt)
        .values(outcome=outcome.value, error=error)
    )
    if error is not None:
        tx.record([Event(EventKind.ATTEMPT_FAILED, txid=txid, attempt=attempt, reason=outcome.value, error=error)])


_COMPONENT: Final = ("component", "kind", "executed", "emitted", "acked", "failed", "busy_ms")
_EDGE: Final = ("origin", "stream", "target", "tuples")
_WORK: Final = ("sink", "previous", "rows", "bytes", "digest", "files")


@cache
def _fixing(sinks: int, components: int, edges: int) -> Statement:
    """Ends the attempt, inserts a row for each of so many sinks, components and edges, and changes the batch's."""
    return Statement(
        sa.update(t.attempt)
        .where(
            t.attempt.c.incarnation == given("incarnation"),
            t.attempt.c.txid == given("txid"),
            t.attempt.c.attempt == given("attempt"),
        )
        .values(outcome=AttemptOutcome.COMPLETE.value),
        *(
            sa.insert(t.txn_sink).values(
                incarnation=given("incarnation"),
                txid=given("txid"),
                **{column: given(f"{column}_{place}") for column in _WORK},
            )
            for place in range(sinks)
        ),
        *_counting(components, edges),
        _changing(TxnState.OPEN, "state", "failed", "returned", "tuples", "prepared_at", "steps_ms"),
    )


def _counting(components: int, edges: int) -> list[sa.Insert]:
    """Inserts rows for so many components and edges; without any, nothing."""
    this = {"incarnation": given("incarnation"), "txid": given("txid")}
    return [
        sa.insert(table).values(
            [
                {**common, **{column: given(f"{table.name}_{column}_{place}") for column in columns}}
                for place in range(number)
            ]
        )
        for table, common, columns, number in (
            (t.txn_component, {**this, "at": given("prepared_at")}, _COMPONENT, components),
            (t.txn_edge, this, _EDGE, edges),
        )
        if number
    ]


def _counted(counts: BatchCounts) -> dict[str, Any]:
    """The values of `_counting`."""
    values: dict[str, Any] = {}
    for table, columns, rows in (
        (t.txn_component, _COMPONENT, counts.components),
        (t.txn_edge, _EDGE, counts.edges),
    ):
        for place, row in enumerate(rows):
            values |= {f"{table.name}_{column}_{place}": getattr(row, column) for column in columns}
    return values


def add_counts(tx: Tx, txid: int, counts: BatchCounts) -> None:
    """Record in which components the messages of a batch failed, where all of them did."""
    if counts.components:
        this = {"incarnation": tx.run.incarnation, "txid": txid, "at": tx.clock.now()}
        tx.connection.execute(sa.insert(t.txn_component), [this | asdict(row) for row in counts.components])


def remove_counts(tx: Tx, txid: int) -> None:
    """Remove what is recorded of a batch's components: the batch is given up, and its messages come again in another."""
    for table in (t.txn_component, t.txn_edge):
        tx.connection.execute(sa.delete(table).where(table.c.incarnation == tx.run.incarnation, table.c.txid == txid))


def fix_content(
    tx: Tx,
    txid: int,
    attempt: int,
    work: Sequence[SinkWork],
    failures: Sequence[Event],
    tuples: int,
    after: TxnState,
    steps_ms: Mapping[str, Json],
    counts: BatchCounts,
) -> None:
    """Record what a batch writes, what each component did for it, and which of its messages failed; from here on its content
    cannot change.

    `after` is its state from here on: prepared under exactly-once, open under the others. `steps_ms` is how long its steps
    took so far, for a driver that rolls it forward.

    Raises:
        Fenced: it is not open any more.
    """
    tx.record(failures)
    values: dict[str, Any] = {}
    for place, w in enumerate(work):
        row = (w.sink, w.previous, w.rows, w.bytes, w.digest, files_to_json(w.files))
        values |= {f"{column}_{place}": value for column, value in zip(_WORK, row, strict=True)}
    changed = _fixing(len(work), len(counts.components), len(counts.edges)).run(
        tx.connection,
        incarnation=tx.run.incarnation,
        txid=txid,
        attempt=attempt,
        state=after.value,
        tuples=tuples,
        prepared_at=tx.clock.now(),
        steps_ms=dict(steps_ms),
        **counts_of(failures),
        **values,
        **_counted(counts),
    )
    _require_one(tx, txid, TxnState.OPEN, changed.rowcount)


def counts_of(failures: Iterable[Event]) -> dict[str, int]:
    """The numbers of failed and of returned messages among these events, by column of `txn`."""
    found = [event.kind is EventKind.FAILURE for event in failures]
    return {"failed": sum(found), "returned": len(found) - sum(found)}


def replace_content(tx: Tx, txid: int, state: TxnState, work: SinkWork) -> None:
    """Record other content of a batch for a sink that holds nothing of it: its table refused what was prepared.

    Raises:
        Fenced: the batch is not in this state any more, or the sink is known to hold it.
    """
    c = t.txn_sink.c
    changed = tx.connection.execute(
        sa.update(t.txn_sink)
        .where(
            *(c.incarnation == tx.run.incarnation, c.txid == txid, c.sink == work.sink),
            c.committed_at.is_(None),
            c.outcome.is_(None),
            sa.exists().where(
                t.txn.c.incarnation == c.incarnation, t.txn.c.txid == c.txid, t.txn.c.state == state.value
            ),
        )
        .values(
            rows=work.rows,
            bytes=work.bytes,
            digest=work.digest,
            files=files_to_json(work.files),
            left_out=[asdict(one) for one in work.left_out or ()],
        )
    ).rowcount
    _require_one(tx, txid, state, changed)


@cache
def _committing(before: TxnState, sinks: int) -> Statement:
    """Notes that so many sinks hold a batch, and that it is committed."""
    held = (
        sa.update(t.txn_sink)
        .where(
            t.txn_sink.c.incarnation == given("incarnation"),
            t.txn_sink.c.txid == given("txid"),
            t.txn_sink.c.sink == given(f"sink_{place}"),
        )
        .values(
            committed_at=given(f"committed_at_{place}"),
            outcome=given(f"outcome_{place}"),
            superseded=given(f"superseded_{place}"),
            version=given(f"version_{place}"),
        )
        for place in range(sinks)
    )
    return Statement(*held, _changing(before, "state", "ended_at", "steps_ms"))


def commit(
    tx: Tx,
    txid: int,
    before: TxnState,
    results: Mapping[str, CommitResult],
    steps_ms: Mapping[str, Json],
) -> None:
    """Record that every sink holds the batch: since when by its store, how each commit ended, how many rows of it changed
    nothing, and in which versions of the tables it is.

    Raises:
        Fenced: it is not `before` any more.
    """
    assert TxnState.COMMITTED in MOVES[before], before
    values: dict[str, Any] = {}
    ended_at = tx.clock.now()
    for place, (sink, result) in enumerate(results.items()):
        values |= {
            f"sink_{place}": sink,
            f"committed_at_{place}": result.at or ended_at,
            f"outcome_{place}": SinkOutcome(result.outcome.value).value,
            f"superseded_{place}": result.superseded,
            f"version_{place}": result.version,
        }
    changed = _committing(before, len(results)).run(
        tx.connection,
        incarnation=tx.run.incarnation,
        txid=txid,
        state=TxnState.COMMITTED.value,
        ended_at=ended_at,
        steps_ms=dict(steps_ms),
        **values,
    )
    _require_one(tx, txid, before, changed.rowcount)


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


def unblock(tx: Tx, txid: int) -> Txn:
    """Prepare a batch again if it is blocked: the next start commits it to the sinks that do not hold it."""
    txn = find(tx, txid)
    assert txn is not None
    if txn.state is TxnState.BLOCKED:
        move(tx, txid, TxnState.BLOCKED, TxnState.PREPARED)
    return txn


def _update_txn(tx: Tx, txid: int, before: TxnState, **values: Any) -> None:
    changed = tx.connection.execute(
        sa.update(t.txn)
        .where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.txid == txid, t.txn.c.state == before.value)
        .values(**values)
    ).rowcount
    _require_one(tx, txid, before, changed)


def _changing(before: TxnState, *columns: str) -> sa.Update:
    """Changes these columns of a batch's row."""
    values = {column: given(column) for column in columns}
    return sa.update(t.txn).where(*_THIS, t.txn.c.state == before.value).values(values)


def _require_one(tx: Tx, txid: int, before: TxnState, changed: int) -> None:
    if changed != 1:
        raise Fenced(
            f"txid {txid} of topology {tx.run.topology!r} is not {before} any more: another driver moved it",
            topology=tx.run.topology,
            txid=txid,
        )


def held_unfinished(tx: Tx, txid: int, sink: str, at: datetime | None) -> None:
    """Record that a sink holds a batch that was given up, since `at` by its store."""
    tx.connection.execute(
        sa.update(t.txn_sink)
        .where(t.txn_sink.c.incarnation == tx.run.incarnation, t.txn_sink.c.txid == txid, t.txn_sink.c.sink == sink)
        .values(committed_at=at or tx.clock.now(), outcome=SinkOutcome.HELD_UNFINISHED.value)
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
    """What a batch writes, by sink, without skipped sinks; and whether it has any row of this kind at all."""
    found = work(tx, txid)
    return {sink: item for sink, item in found.items() if item.outcome is not SinkOutcome.SKIPPED}, bool(found)


def last_committed(tx: Tx, limit: int) -> list[tuple[int, SinkWork]]:
    """What the last `limit` committed batches wrote to each sink, with their txids, newest first."""
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

    They ended without this sink under at-least-once or at-most-once, or the sink was skipped for them.
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
    """The txid up to which the record was pruned; 0 where it never was."""
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
    txn = find(tx, txid)
    if txn is None or txn.state not in (TxnState.BLOCKED, TxnState.PREPARED):
        now = "does not exist" if txn is None else f"is {txn.state}"
        raise UsageError(f"{where} {now}; a sink is skipped for a batch that is blocked or prepared", txid=txid)
    works = work(tx, txid)
    if sink not in works:
        raise UsageError(
            f"{where} writes nothing to sink {sink!r}; it writes to {', '.join(sorted(works)) or 'no sink'}",
            txid=txid,
            sink=sink,
        )
    if works[sink].outcome is SinkOutcome.SKIPPED:
        raise UsageError(
            f"{where}: sink {sink!r} was skipped already, there is nothing to do; `stormproof status` shows what the batch "
            "waits for",
            txid=txid,
            sink=sink,
        )
    if works[sink].committed_at is not None:
        raise UsageError(f"{where}: sink {sink!r} holds it already, there is nothing to skip", txid=txid, sink=sink)
    return works[sink]


def skip(
    tx: Tx,
    txid: int,
    work: SinkWork,
    rejected: Sequence[RejectedRow],
    *,
    by: str,
    why: str,
    detail: dict[str, Json],
) -> None:
    """Turn a batch's rows at one sink into rejects; the sink goes on from what it holds.

    The batch is prepared again: the next start commits it to its other sinks and confirms its messages. At this sink,
    batches that were prepared behind it now follow the txid that it would have followed.
    """
    txn = unblock(tx, txid)
    mine = (t.txn_sink.c.incarnation == tx.run.incarnation, t.txn_sink.c.sink == work.sink)
    tx.connection.execute(
        sa.update(t.txn_sink).where(*mine, t.txn_sink.c.txid == txid).values(outcome=SinkOutcome.SKIPPED.value)
    )
    tx.connection.execute(
        sa.update(t.txn_sink)
        .where(*mine, t.txn_sink.c.previous == txid, t.txn_sink.c.committed_at.is_(None))
        .values(previous=work.previous)
    )
    reason = txn.reason or why
    detail = {"sink": work.sink, "rows": work.rows, "listed": len(rejected), **detail}
    tx.decided(OperatorAction.SKIP, by=by, why=why, txid=txid, sink=work.sink, error=reason, detail=detail)
    tx.record(
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


def take_late_commit(tx: Tx, sink: str, held: Held, *, waiting: int | None = None) -> bool:
    """Whether a sink's last txid is a batch that was given up and written after all; if so, the ledger records that.

    A driver that was suspended inside its commit can do so, where the store has no fence. `waiting` is the txid that is to
    follow in the sink: its PREV becomes the late one. Without a digest the sink's evidence of the content has expired.
    """
    txid, known = held.txid, dict(unfinished_work(tx, sink)).get(held.txid)
    if known is None or held.digest not in (None, known) or (waiting is not None and txid >= waiting):
        return False
    held_unfinished(tx, txid, sink, held.at)
    detail: dict[str, Json] = {} if waiting is None else {"followed_by": waiting}
    tx.record([Event(EventKind.LATE_COMMIT, txid=txid, sink=sink, detail=detail)])
    if waiting is not None:
        c: Any = t.txn_sink.c
        tx.connection.execute(
            sa.update(t.txn_sink)
            .where(c.incarnation == tx.run.incarnation, c.sink == sink, c.txid == waiting, c.committed_at.is_(None))
            .values(previous=txid)
        )
    return True
