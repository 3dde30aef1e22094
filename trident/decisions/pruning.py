"""Removes from the ledger what is older than a horizon and what neither a sink nor the audit needs any more.

A prune removes a prefix of the txids, up to the first that has not ended, or ended within the horizon; the audit then begins
behind it and says so. These rows of the prefix stay: each sink's last committed one (it is PREV of the next one, and the
sink is compared with it), those of a message that waits, is a dead letter or was opened again since, the batches whose
slices say how far the source was read, and every reject and decision of an operator. Of a streaming query's micro-batches
the first and the last stay: see `stormproof.trident.ledger.handed_in.Forgettable`. Of the audit's verdicts the
newest of each kind and scope stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import Json
from stormproof.core.pending.rows import Subscriber
from stormproof.core.source.files import FileSource, entries
from stormproof.trident.audit.evidence import SourceEvidence, place_of
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.message import MESSAGE_EVENTS, EndKind, Records, end_of, traces
from stormproof.trident.audit.source import PendingEvidence, SourceReader, stored_source
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.declarations.decisions import DecisionPreview
from stormproof.trident.ledger import handed_in, sink_records
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.handed_in import Forgettable
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.tables import Run, Txn, to_event, to_txn
from stormproof.trident.terms.transaction_states import EventKind
from stormproof.trident.terms.wording import counted, parse_age

if TYPE_CHECKING:
    import psycopg

FORMS_KEPT: Final = timedelta(days=1)
"""A form of the page that was confirmed stays on record at least so long: longer than anybody may send it again."""

CHUNK_TXIDS: Final = 1_000
"""Batches per prune transaction; bounds how long a lock is held. A kill in between leaves a shorter prune."""

MAX_MESSAGE: Final = 2**63 - 1

_FORGOTTEN: Final = (EventKind.ATTEMPT_FAILED, EventKind.SUPPRESSED, EventKind.HALVED, EventKind.STOPPED)
"""Events of a batch that are removed with it. Operators' decisions, rejects and blocks stay."""

_FORGOTTEN_RUNS: Final = (EventKind.RECOVERY, EventKind.TAKE_OVER, EventKind.START_REFUSED)
"""Events of a run, which belong to no batch: removed where they are older than the horizon."""


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune removed, or with `dry_run` would remove, as rows by table. The record is complete behind txid `upto`."""

    topology: str
    upto: int
    before: int
    ended_before: datetime
    removed: dict[str, int]
    kept_txids: int
    dry_run: bool
    by: str

    def lines(self) -> list[str]:
        """What was or would be removed, for people."""
        rows = ", ".join(f"{counted(count, 'row')} of {table}" for table, count in self.removed.items() if count)
        done, verb = ("would be pruned", "would remove") if self.dry_run else ("pruned", "removed")
        kept = f"; kept some of {counted(self.kept_txids, 'txid')}: still needed" if self.kept_txids else ""
        return [
            f"{self.topology}: {done} up to txid {self.upto} (before: {self.before}); {verb} {rows or 'nothing'}{kept}"
        ]


@dataclass(frozen=True, slots=True)
class _MicroBatchSource:
    """Of a topology whose messages are the rows of micro-batches: the subscription, and its lowest unresolved message."""

    who: Subscriber
    unresolved: int


class DryRunEnds(Exception):
    """Rolls a transaction back."""


def prune(
    ledger: Ledger,
    audit: AuditLedger,
    topology: str,
    *,
    ended_before: datetime,
    now: datetime,
    by: str,
    why: str = "",
    dry_run: bool = False,
    source: SourceReader = stored_source,
    chunk_txids: int = CHUNK_TXIDS,
    between: Callable[[int], None] = lambda _: None,
) -> PruneReport:
    """Prune one topology; a driver may run meanwhile. A prune may be killed at any point, and repeated.

    `between` is called after each chunk of `chunk_txids` batches, with the last txid that is pruned.

    Raises:
        UsageError: the ledger knows no such topology.
        StoreUnavailable: the ledger's database does not answer; the chunks before stay removed.
    """
    with audit.snapshot() as snapshot:
        row = snapshot.topology(topology)
        evidence = source(snapshot, row)
        alive = frozenset[str]()
        if evidence is not None:
            alive = frozenset(evidence.waiting()) | {letter.shown_id for letter in evidence.dead()}
        before = snapshot.pruned_upto(row.incarnation)
        target = _target(snapshot.connection, row.incarnation, ended_before)
        files: _MicroBatchSource | None = None
        if isinstance(evidence, PendingEvidence) and evidence.who.kind == FileSource.KIND:
            files = _MicroBatchSource(evidence.who, evidence.lowest_unresolved())
        is_fed = place_of(snapshot.connection, row.incarnation) is not None
    removed: Counter[str] = Counter()
    job = _Job(ledger, audit, topology, row.incarnation, target, alive, evidence, by, why, ended_before, now, dry_run)
    upto = before
    while upto < target:
        low, upto = upto + 1, min(upto + chunk_txids, target)
        with job.transaction() as tx:
            removed += job.chunk(tx, low, upto, removed)
        between(upto)
    after: int | None = 0 if is_fed else None
    while after is not None:
        with job.transaction() as tx:
            after = job.micro_batches(tx, upto, files, after, chunk_txids, removed)
    with job.transaction() as tx:
        job.verdicts(tx, upto, removed)
    return PruneReport(topology, upto, before, ended_before, dict(removed), len(job.kept), dry_run, by)


def _target(connection: sa.Connection, incarnation: str, ended_before: datetime) -> int:
    """The last txid of the prefix that may be removed. The highest txid stays, since the next one is counted from it."""
    c = t.txn.c
    first_needed = connection.execute(
        sa.select(sa.func.min(c.txid)).where(
            c.incarnation == incarnation, sa.or_(c.ended_at.is_(None), c.ended_at >= ended_before)
        )
    ).scalar_one()
    highest = connection.execute(sa.select(sa.func.max(c.txid)).where(c.incarnation == incarnation)).scalar_one() or 1
    return int(highest) - 1 if first_needed is None else min(int(first_needed), int(highest)) - 1


@dataclass
class _Job:
    """One prune of one topology, chunk by chunk."""

    ledger: Ledger
    audit: AuditLedger
    topology: str
    incarnation: str
    target: int
    alive: frozenset[str]
    evidence: SourceEvidence | None
    by: str
    why: str
    ended_before: datetime
    now: datetime
    dry_run: bool
    kept: set[int] = field(default_factory=set[int])
    recorded: int | None = None
    gone: set[str] = field(default_factory=set[str])

    @contextmanager
    def transaction(self) -> Generator[Tx]:
        """A transaction under the present driver's epoch, since one may start meanwhile; a dry run rolls it back."""
        with self.audit.snapshot() as snapshot:
            run = Run(self.topology, self.incarnation, snapshot.topology(self.topology).epoch)
        with suppress(DryRunEnds), self.ledger.transaction(run) as tx:
            yield tx
            if self.dry_run:
                raise DryRunEnds

    def chunk(self, tx: Tx, low: int, high: int, so_far: Counter[str]) -> Counter[str]:
        """Remove what may go of the txids from `low` to `high`, and record how far the prune has come."""
        removed: Counter[str] = Counter()
        within = sa.between(t.txn.c.txid, low, high)
        gone, needed = self._messages(tx, low, high)
        furthest = self._furthest(tx, t.txn.c.txid <= high)
        outrun = self._outrun(tx, low, furthest)
        needed |= furthest
        removed["event"] = self._delete(tx, t.event, self._of_messages(_among(t.event.c.message, gone)))
        removed["event"] += self._delete(
            tx, t.event, sa.between(t.event.c.txid, low, high), t.event.c.kind.in_([k.value for k in _FORGOTTEN])
        )
        if self.recorded is None:
            removed["event"] += self._delete(
                tx,
                t.event,
                t.event.c.txid.is_(None),
                t.event.c.at < self.ended_before,
                t.event.c.kind.in_([k.value for k in _FORGOTTEN_RUNS]),
            )
        removed["attempt"] = self._delete(tx, t.attempt, sa.between(t.attempt.c.txid, low, high))
        not_anchors = [
            sa.not_(sa.and_(t.txn_sink.c.sink == sink, t.txn_sink.c.txid == txid))
            for sink, txid in self._anchors(tx, high)
        ]
        removed["txn_sink"] = self._delete(tx, t.txn_sink, sa.between(t.txn_sink.c.txid, low, high), *not_anchors)
        if not self.dry_run:  # the anchors of earlier chunks and prunes that are anchors no more
            removed["txn_sink"] += self._delete(tx, t.txn_sink, t.txn_sink.c.txid < low, *not_anchors)
        for table in (t.txn_component, t.txn_edge):
            removed[table.name] = self._delete(tx, table, sa.between(table.c.txid, low, high))
        removed["txn"] = self._delete(
            tx, t.txn, sa.or_(within, _among(t.txn.c.txid, outrun)), sa.not_(_among(t.txn.c.txid, needed))
        )
        self.kept = (self.kept | needed) - outrun
        self.gone |= gone
        self._record(tx, high, so_far + removed)
        return removed

    def micro_batches(
        self, tx: Tx, upto: int, files: _MicroBatchSource | None, after: int, limit: int, removed: Counter[str]
    ) -> int | None:
        """Remove some micro-batches that may go, with the rows of their files. The number after which to go on, or None."""
        stop_id = 0 if files is None else min(files.unresolved, self._lowest_message_behind(tx, upto))
        forgettable = Forgettable(upto, self.ended_before, stop_id, self._numbers_with_events(tx))
        found, after_these = forgettable.find(tx, after, limit)
        if not found:
            return after_these
        counts = Counter(handed_in=len(found))
        handed_in.forget(tx, found)
        ranges = [(one.first, one.stop) for one in found if one.first is not None and one.stop is not None]
        if files is not None and ranges:
            cursor = cast("psycopg.Connection[Any]", tx.raw).cursor()
            counts["file_entry"] = entries.forget(cursor, files.who, ranges)
        self._add_to_record(tx, upto, counts)
        removed += counts
        return after_these

    def verdicts(self, tx: Tx, upto: int, removed: Counter[str]) -> None:
        """Remove verdicts that were given, and forms of the page that were confirmed, before the horizon.

        The newest verdict of each kind and scope stays: the next check with `--since last` may continue it.
        """
        c = t.verdict.c
        scope = (c.deep, sa.cast(c.tables, sa.Text), c.verdict, c.settled_upto.is_(None))
        newest = sa.select(sa.func.max(c.id)).where(c.incarnation == self.incarnation).group_by(*scope)
        forms = min(self.ended_before, self.now - FORMS_KEPT)
        counts = +Counter(
            verdict=self._delete(tx, t.verdict, c.at < self.ended_before, c.id.not_in(newest)),
            confirmation=self._delete(tx, t.confirmation, t.confirmation.c.at < forms),
        )
        if counts:
            self._add_to_record(tx, upto, counts)
            removed += counts

    def _lowest_message_behind(self, tx: Tx, upto: int) -> int:
        """The lowest message of the batches whose record is complete."""
        c = t.txn.c
        first = sa.cast(c.position[("range", 0)].as_string(), sa.BigInteger)
        lowest = tx.connection.execute(
            sa.select(sa.func.min(first)).where(c.incarnation == self.incarnation, c.txid > upto)
        ).scalar_one_or_none()
        return MAX_MESSAGE if lowest is None else int(lowest)

    def _numbers_with_events(self, tx: Tx) -> list[int]:
        """The numbers of the messages whose events stay."""
        c = t.event.c
        rows = tx.connection.execute(
            sa.select(c.number, c.message).distinct().where(self._of_messages(c.number.is_not(None)))
        )
        return sorted({int(row.number) for row in rows if row.message not in self.gone})

    def _delete(self, tx: Tx, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> int:
        return tx.connection.execute(
            sa.delete(table).where(table.c.incarnation == self.incarnation, *conditions)
        ).rowcount

    def _messages(self, tx: Tx, low: int, high: int) -> tuple[set[str], set[int]]:
        """The messages with events in the chunk whose history is over: committed or lost, and not opened again since.

        Also the txids of the chunk that the other messages' histories still need.
        """
        c = t.event.c
        here = sa.select(c.message).where(self._of_messages(sa.between(c.txid, low, high)))
        rows = tx.connection.execute(sa.select(t.event).where(self._of_messages(c.message.in_(here))).order_by(c.id))
        events = [to_event(row) for row in rows]
        found = traces(events)
        txids = {txid for trace in found.values() for txid in trace.txids}
        rejected = sink_records.rejects_of(tx, _among(t.reject.c.message, found))
        records = Records.of(self._txns(tx, _among(t.txn.c.txid, txids)), None, rejected)
        gone = {
            name
            for name, trace in found.items()
            if name not in self.alive
            and max(trace.txids, default=0) <= self.target
            and end_of(trace, records).kind in (EndKind.COMMITTED, EndKind.LOST)
        }
        needed = {e.txid for e in events if e.txid is not None and low <= e.txid <= high and e.message not in gone}
        return gone, needed

    def _furthest(self, tx: Tx, condition: sa.ColumnElement[bool]) -> set[int]:
        """Which of these batches say how far the source was read."""
        return set() if self.evidence is None else set(self.evidence.furthest(self._txns(tx, condition)))

    def _outrun(self, tx: Tx, low: int, furthest: Collection[int]) -> set[int]:
        """Txids below the chunk whose rows were kept only since they said how far the source was read, and do so no more."""
        c = t.event.c
        outrun = self._furthest(tx, t.txn.c.txid < low).difference(furthest)
        with_events = tx.connection.execute(sa.select(c.txid).where(self._of_messages(_among(c.txid, outrun))))
        return outrun.difference(with_events.scalars())

    def _anchors(self, tx: Tx, high: int) -> list[tuple[str, int]]:
        """For each sink the last txid up to here that it holds."""
        c = t.txn_sink.c
        rows = tx.connection.execute(
            sa.select(c.sink, sa.func.max(c.txid))
            .where(c.incarnation == self.incarnation, c.txid <= high, c.committed_at.is_not(None))
            .group_by(c.sink)
        )
        return [(str(sink), int(txid)) for sink, txid in rows]

    def _of_messages(self, *conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
        """The topology's events of messages."""
        c, kinds = t.event.c, [kind.value for kind in MESSAGE_EVENTS]
        return sa.and_(c.incarnation == self.incarnation, c.message.is_not(None), c.kind.in_(kinds), *conditions)

    def _txns(self, tx: Tx, condition: sa.ColumnElement[bool]) -> list[Txn]:
        c = t.txn.c
        rows = tx.connection.execute(
            sa.select(t.txn).where(c.incarnation == self.incarnation, condition).order_by(c.txid)
        )
        return [to_txn(row) for row in rows]

    def _record(self, tx: Tx, upto: int, removed: Counter[str]) -> None:
        tx.confirm()
        mine = t.prune.c.incarnation == self.incarnation
        if self.recorded is not None:
            tx.connection.execute(sa.delete(t.prune).where(mine, t.prune.c.upto == self.recorded))
        counts: dict[str, Json] = {**removed}
        tx.connection.execute(
            sa.insert(t.prune).values(
                incarnation=self.incarnation,
                upto=upto,
                at=self.now,
                by=self.by,
                why=self.why,
                ended_before=self.ended_before,
                removed=counts,
            )
        )
        self.recorded = upto

    def _add_to_record(self, tx: Tx, upto: int, more: Counter[str]) -> None:
        """Add to this prune's row; where it had no txids to remove, to that of the prune before."""
        mine = sa.and_(t.prune.c.incarnation == self.incarnation, t.prune.c.upto == upto)
        found = tx.connection.execute(sa.select(t.prune.c.removed).where(mine)).scalar_one_or_none()
        if found is None:
            self._record(tx, upto, more)
            return
        tx.connection.execute(sa.update(t.prune).where(mine).values(removed={**(Counter(found) + more)}))


def _among(column: sa.ColumnElement[Any], values: Collection[Any]) -> sa.ColumnElement[bool]:
    """Whether a column has one of these values. They are one parameter: a statement has 65,535 at most."""
    return column == sa.any_(sa.literal(sorted(values), ARRAY(column.type)))


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed of each topology, or with a dry run would be."""

    topologies: tuple[PruneReport, ...]

    def lines(self) -> list[str]:
        """What was or would be removed, for people."""
        return [line for one in self.topologies for line in one.lines()] or ["no topology was run here yet"]


def look(stores: Stores, topology: str, older_than: str) -> DecisionPreview:
    """What is old enough now."""
    now = SystemClock().now()
    (report,) = prune_ledger(stores, topology, older_than, dry_run=True, by="", why="", now=now).topologies
    rows = sum(report.removed.values())
    return DecisionPreview(
        {},
        rows,
        "row",
        {"now": now},
        (f"batches that ended more than {older_than} ago", *report.lines()),
        nothing=None if rows else "Nothing is old enough to be pruned.",
    )


def prune_ledger(
    stores: Stores,
    topology: str | None,
    older_than: str,
    *,
    dry_run: bool = False,
    by: str,
    why: str,
    now: datetime | None = None,
) -> Pruned:
    """Prune one topology, or all, of batches that ended more than an age before `now`.

    Raises:
        UsageError: that is no age, or there is no such topology.
    """
    now = now or SystemClock().now()
    before = now - parse_age(older_than)
    with stores.audit.snapshot() as snapshot:
        names = [row.name for row in snapshot.topologies()] if topology is None else [topology]
    return Pruned(
        tuple(
            prune(stores.ledger, stores.audit, name, ended_before=before, now=now, by=by, why=why, dry_run=dry_run)
            for name in names
        )
    )
