"""Takes out of the ledger what is older than a horizon and what neither a sink nor the audit needs any more.

A prefix of the txids goes, up to the first that has not ended, or ended within the horizon; the audit then begins behind it
and says so. What stays of the prefix: for each sink its last committed row (it is PREV of the next one, and what the sink
is held against), whatever concerns a message that waits, is a dead letter or was opened again since, the batches whose
slices say how far the source was read, and every reject, skip and word of an operator. Of a streaming query's micro-batches
stays what says where it began and where it stands: see `stormproof.trident.ledger.streams.Forgettable`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa

from stormproof.core.errors import Json
from stormproof.core.pending.rows import Subscriber
from stormproof.core.source.files import FileSource, entries
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.lifecycle import MESSAGE_EVENTS, EndKind, Records, end_of, traces
from stormproof.trident.audit.source import PendingEvidence, SourceReader, stored_source
from stormproof.trident.audit.streams import place_of
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.rows import Event, Run, Txn, to_event, to_txn
from stormproof.trident.ledger.streams import Forgettable, forget
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction import EventKind

CHUNK_TXIDS: Final = 1_000
"""Batches per prune transaction; bounds how long a lock is held. A kill in between leaves a shorter prune."""

if TYPE_CHECKING:
    import psycopg

MAX_MESSAGE: Final = 2**63 - 1

_FORGOTTEN: Final = (EventKind.ATTEMPT_FAILED, EventKind.SUPPRESSED, EventKind.HALVED, EventKind.STOPPED)
"""Events of a batch that go with it. What a person decided, what was rejected and what was blocked stays."""

_FORGOTTEN_RUNS: Final = (EventKind.RECOVERY, EventKind.TAKE_OVER, EventKind.START_REFUSED)


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune removed, or under `dry_run` would remove: the record is complete behind txid `upto` only."""

    topology: str
    upto: int
    before: int
    ended_before: datetime
    removed: dict[str, int]
    kept_txids: int
    dry_run: bool
    by: str


@dataclass(frozen=True, slots=True)
class _Files:
    """Where the rows of micro-batches are messages: the subscription, and its lowest message that is in no ended batch."""

    who: Subscriber
    unresolved: int


class _DryRun(Exception):
    """Rolls a chunk back."""


def prune(
    ledger: Ledger,
    audit: AuditLedger,
    topology: str,
    *,
    ended_before: datetime,
    now: datetime,
    by: str,
    dry_run: bool = False,
    source: SourceReader = stored_source,
    chunk_txids: int = CHUNK_TXIDS,
    between: Callable[[int], None] = lambda _: None,
) -> PruneReport:
    """Prune one topology; a driver may run meanwhile. May be killed at any point, and repeated. `between`: after each chunk.

    Raises:
        UsageError: the ledger knows no such topology.
        StoreUnavailable: the ledger's database does not answer; what was removed by then stays removed.
    """
    with audit.snapshot() as snapshot:
        row = snapshot.topology(topology)
        evidence = source(snapshot, row)
        alive = frozenset[str]()
        if evidence is not None:
            alive = frozenset(evidence.waiting()) | {letter.shown_id for letter in evidence.dead()}
        before = snapshot.pruned_upto(row.incarnation)
        target = _target(snapshot.connection, row.incarnation, ended_before)
        files: _Files | None = None
        if isinstance(evidence, PendingEvidence) and evidence.who.kind == FileSource.KIND:
            files = _Files(evidence.who, evidence.lowest_unresolved())
        is_fed = place_of(snapshot.connection, row.incarnation) is not None
    run = Run(topology, row.incarnation, row.epoch)
    removed: Counter[str] = Counter()
    job = _Job(ledger, run, target, alive, evidence, by, ended_before, now, dry_run=dry_run)
    upto = before
    while upto < target:
        low, upto = upto + 1, min(upto + chunk_txids, target)
        job.run = Run(topology, row.incarnation, _epoch(audit, topology))
        try:
            with ledger.transaction(job.run) as tx:
                removed += job.chunk(tx, low, upto, removed)
                if dry_run:
                    raise _DryRun
        except _DryRun:
            pass
        between(upto)
    after: int | None = 0 if is_fed else None
    while after is not None:
        job.run = Run(topology, row.incarnation, _epoch(audit, topology))
        try:
            with ledger.transaction(job.run) as tx:
                after = job.micro_batches(tx, upto, files, after, chunk_txids, removed)
                if dry_run:
                    raise _DryRun
        except _DryRun:
            pass
    return PruneReport(topology, upto, before, ended_before, dict(removed), len(job.kept), dry_run, by)


def _epoch(audit: AuditLedger, topology: str) -> int:
    """Read before each chunk: a driver may start meanwhile."""
    with audit.snapshot() as snapshot:
        return snapshot.topology(topology).epoch


def _target(connection: sa.Connection, incarnation: str, ended_before: datetime) -> int:
    """The last txid of the prefix that may go. The highest of all stays: the next one is counted from it."""
    c = t.txn.c
    first_needed = connection.execute(
        sa.select(sa.func.min(c.txid)).where(
            c.incarnation == incarnation, sa.or_(c.ended_at.is_(None), c.ended_at >= ended_before)
        )
    ).scalar_one()
    highest = connection.execute(sa.select(sa.func.max(c.txid)).where(c.incarnation == incarnation)).scalar_one() or 1
    return int(highest) - 1 if first_needed is None else min(int(first_needed), int(highest)) - 1


class _Job:
    """One prune of one topology, chunk by chunk."""

    def __init__(
        self,
        ledger: Ledger,
        run: Run,
        target: int,
        alive: frozenset[str],
        evidence: SourceEvidence | None,
        by: str,
        ended_before: datetime,
        now: datetime,
        *,
        dry_run: bool,
    ) -> None:
        self.run = run
        self.kept: set[int] = set()
        self._ledger = ledger
        self._target = target
        self._dry_run = dry_run
        self._alive = alive
        self._evidence = evidence
        self._by = by
        self._ended_before = ended_before
        self._now = now
        self._recorded: int | None = None
        self._gone: set[str] = set()

    def chunk(self, tx: Tx, low: int, high: int, so_far: Counter[str]) -> Counter[str]:
        """Remove what may go of the txids from `low` to `high`, and record how far the prune has come."""
        removed: Counter[str] = Counter()
        within = sa.between(t.txn.c.txid, low, high)
        gone = self._messages(tx, low, high)
        furthest = self._furthest_of(tx, low, high)
        outrun = self._outrun(tx, low, furthest)
        needed = self._needed(tx, low, high, gone) | furthest
        removed["event"] = self._delete(
            tx, t.event, t.event.c.message.in_(sorted(gone)), t.event.c.kind.in_([k.value for k in MESSAGE_EVENTS])
        )
        removed["event"] += self._delete(
            tx, t.event, sa.between(t.event.c.txid, low, high), t.event.c.kind.in_([k.value for k in _FORGOTTEN])
        )
        if self._recorded is None:
            removed["event"] += self._delete(
                tx,
                t.event,
                t.event.c.txid.is_(None),
                t.event.c.at < self._ended_before,
                t.event.c.kind.in_([k.value for k in _FORGOTTEN_RUNS]),
            )
        removed["attempt"] = self._delete(tx, t.attempt, sa.between(t.attempt.c.txid, low, high))
        not_anchors = [
            sa.not_(sa.and_(t.txn_sink.c.sink == sink, t.txn_sink.c.txid == txid))
            for sink, txid in self._anchors(tx, high)
        ]
        removed["txn_sink"] = self._delete(tx, t.txn_sink, sa.between(t.txn_sink.c.txid, low, high), *not_anchors)
        if not self._dry_run:  # the anchors of earlier chunks and prunes, where this one has others
            removed["txn_sink"] += self._delete(tx, t.txn_sink, t.txn_sink.c.txid < low, *not_anchors)
        removed["txn"] = self._delete(
            tx, t.txn, sa.or_(within, t.txn.c.txid.in_(outrun)), t.txn.c.txid.not_in(sorted(needed))
        )
        self.kept = (self.kept | needed) - set(outrun)
        self._gone |= gone
        self._record(tx, high, so_far + removed)
        return removed

    def micro_batches(
        self, tx: Tx, upto: int, files: _Files | None, after: int, limit: int, removed: Counter[str]
    ) -> int | None:
        """Remove some micro-batches that may go, with the rows of their files; after which to look on, or None."""
        stop_id = 0 if files is None else min(files.unresolved, self._lowest_message_behind(tx, upto))
        forgettable = Forgettable(upto, self._ended_before, stop_id, self._told(tx))
        found, after_these = forgettable.find(tx, after, limit)
        if not found:
            return after_these
        counts = Counter(stream_batch=len(found))
        forget(tx, found)
        ranges = [(one.first, one.stop) for one in found if one.first is not None and one.stop is not None]
        if files is not None and ranges:
            cursor = cast("psycopg.Connection[Any]", tx.raw).cursor()
            counts["file_entry"] = entries.forget(cursor, files.who, ranges)
        self._add_to_record(tx, upto, counts)
        removed += counts
        return after_these

    def _lowest_message_behind(self, tx: Tx, upto: int) -> int:
        """The lowest message in the batches that the ledger still has whole."""
        c = t.txn.c
        first = sa.cast(c.position[("range", 0)].as_string(), sa.BigInteger)
        lowest = tx.connection.execute(
            sa.select(sa.func.min(first)).where(c.incarnation == self.run.incarnation, c.txid > upto)
        ).scalar_one_or_none()
        return MAX_MESSAGE if lowest is None else int(lowest)

    def _told(self, tx: Tx) -> list[int]:
        """The numbers of the messages whose stories stay."""
        c = t.event.c
        rows = self._select(tx, [c.number, c.message], c.number.is_not(None))
        return sorted({int(row.number) for row in rows if row.message not in self._gone})

    def _delete(self, tx: Tx, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> int:
        return tx.connection.execute(
            sa.delete(table).where(table.c.incarnation == self.run.incarnation, *conditions)
        ).rowcount

    def _messages(self, tx: Tx, low: int, high: int) -> set[str]:
        """The messages with events in the chunk whose story is over: committed or lost, and opened no more since."""
        names = self._select(tx, [t.event.c.message], sa.between(t.event.c.txid, low, high))
        events = self._events(tx, [str(row.message) for row in names])
        found = traces(events)
        txids = {txid for trace in found.values() for txid in trace.txids}
        records = Records.of(self._txns(tx, sorted(txids)), None)
        return {
            name
            for name, trace in found.items()
            if name not in self._alive
            and max(trace.txids, default=0) <= self._target
            and end_of(trace, records).kind in (EndKind.COMMITTED, EndKind.LOST)
        }

    def _needed(self, tx: Tx, low: int, high: int, gone: Collection[str]) -> set[int]:
        """Txids of the chunk whose rows a message's story still needs."""
        rows = self._select(tx, [t.event.c.txid, t.event.c.message], sa.between(t.event.c.txid, low, high))
        return {int(row.txid) for row in rows if row.message not in gone}

    def _furthest_of(self, tx: Tx, low: int, high: int) -> set[int]:
        """Which of the rows up to `high` say how far the source was read."""
        if self._evidence is None:
            return set()
        known = self._txns(tx, [*self._kept_below(tx, low), *range(low, high + 1)])
        return set(self._evidence.furthest(known))

    def _kept_below(self, tx: Tx, low: int) -> list[int]:
        """Txids whose rows were left by earlier chunks and prunes."""
        c = t.txn.c
        rows = tx.connection.execute(sa.select(c.txid).where(c.incarnation == self.run.incarnation, c.txid < low))
        return sorted(int(txid) for txid in rows.scalars())

    def _outrun(self, tx: Tx, low: int, now: Collection[int]) -> list[int]:
        """Txids below the chunk whose rows only said how far the source was read, and do so no more."""
        if self._evidence is None:
            return []
        before = set(self._evidence.furthest(self._txns(tx, self._kept_below(tx, low))))
        return sorted(txid for txid in before - set(now) if not self._has_events(tx, txid))

    def _has_events(self, tx: Tx, txid: int) -> bool:
        return bool(self._select(tx, [t.event.c.txid], t.event.c.txid == txid))

    def _anchors(self, tx: Tx, high: int) -> list[tuple[str, int]]:
        """For each sink the last txid up to here that it holds."""
        c = t.txn_sink.c
        rows = tx.connection.execute(
            sa.select(c.sink, sa.func.max(c.txid))
            .where(c.incarnation == self.run.incarnation, c.txid <= high, c.committed_at.is_not(None))
            .group_by(c.sink)
        )
        return [(str(sink), int(txid)) for sink, txid in rows]

    def _select(
        self, tx: Tx, columns: Sequence[sa.ColumnElement[Any]], condition: sa.ColumnElement[bool]
    ) -> Sequence[Any]:
        """Distinct values of message events."""
        c = t.event.c
        return tx.connection.execute(
            sa.select(*columns)
            .distinct()
            .where(
                c.incarnation == self.run.incarnation,
                condition,
                c.message.is_not(None),
                c.kind.in_([kind.value for kind in MESSAGE_EVENTS]),
            )
        ).all()

    def _events(self, tx: Tx, messages: Sequence[str]) -> list[Event]:
        c = t.event.c
        found: list[Event] = []
        for part in _parts(messages):
            rows = tx.connection.execute(
                sa.select(t.event)
                .where(
                    c.incarnation == self.run.incarnation,
                    c.message.in_(part),
                    c.kind.in_([kind.value for kind in MESSAGE_EVENTS]),
                )
                .order_by(c.id)
            )
            found += [to_event(row) for row in rows]
        return found

    def _txns(self, tx: Tx, txids: Sequence[int]) -> list[Txn]:
        c = t.txn.c
        found: list[Txn] = []
        for part in _parts(txids):
            rows = tx.connection.execute(
                sa.select(t.txn).where(c.incarnation == self.run.incarnation, c.txid.in_(part)).order_by(c.txid)
            )
            found += [to_txn(row) for row in rows]
        return found

    def _record(self, tx: Tx, upto: int, removed: Counter[str]) -> None:
        mine = t.prune.c.incarnation == self.run.incarnation
        if self._recorded is not None:
            tx.connection.execute(sa.delete(t.prune).where(mine, t.prune.c.upto == self._recorded))
        counts: dict[str, Json] = {**removed}
        tx.connection.execute(
            sa.insert(t.prune).values(
                incarnation=self.run.incarnation,
                upto=upto,
                at=self._now,
                by=self._by,
                ended_before=self._ended_before,
                removed=counts,
            )
        )
        self._recorded = upto

    def _add_to_record(self, tx: Tx, upto: int, more: Counter[str]) -> None:
        """To this prune's row, or where it had no txids to remove, to that of the prune before."""
        mine = sa.and_(t.prune.c.incarnation == self.run.incarnation, t.prune.c.upto == upto)
        found = tx.connection.execute(sa.select(t.prune.c.removed).where(mine)).scalar_one_or_none()
        if found is None:
            self._record(tx, upto, more)
            return
        tx.connection.execute(sa.update(t.prune).where(mine).values(removed={**(Counter(found) + more)}))


def _parts(items: Sequence[Any], size: int = 5_000) -> Iterable[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))
