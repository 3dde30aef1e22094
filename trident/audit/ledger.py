"""`AuditLedger` and `LedgerSnapshot`: the audit's read-only queries of the ledger, each set from one database snapshot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.sink import PreparedFile
from stormproof.trident.ledger import tables
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import known_error
from stormproof.trident.ledger.graphs import Graph
from stormproof.trident.ledger.missing import Missing, Shape, missing_txids
from stormproof.trident.ledger.other_lives import forgotten_by
from stormproof.trident.ledger.sink_records import Loss, SinkBinding, altered_reject, bindings_of
from stormproof.trident.ledger.tables import Event, Reject, SinkWork, Txn
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction, SinkOutcome, TxnState

T = TypeVar("T")

IDLE_S: Final = 3_600
"""How long a snapshot may wait for the sinks' own records, which are read meanwhile: those of a long Delta log in an object
store take minutes. A driver's transaction, which holds locks, has far less.
"""


@dataclass(frozen=True, slots=True)
class TopologyRow:
    """One topology: its incarnation, its newest epoch, and that epoch's driver."""

    name: str
    incarnation: str
    epoch: int
    guarantee: str
    source: str
    started_at: datetime
    driver_host: str
    driver_pid: int
    driver_started: float
    stopped_at: datetime | None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One attempt at a batch."""

    txid: int
    attempt: int
    epoch: int
    excluded: tuple[int, ...]
    expected_messages: int
    expected_xor: int
    started_at: datetime
    outcome: str
    error: str | None


@dataclass(frozen=True, slots=True)
class Work:
    """What one batch writes to one sink, with the batch's txid."""

    txid: int
    work: SinkWork


@dataclass(frozen=True, slots=True)
class Skipped:
    """Rows of one batch at one sink, all of them, that an operator gave up; the sink does not hold the batch."""

    txid: int
    sink: str
    target: str
    rows: int
    at: datetime | None
    by: str | None
    why: str | None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row with content that the ledger never writes."""

    table: str
    txid: int | None
    text: str


_MAY_HOLD: Final = sa.text(
    "(position -> 'range' is null or (position -> 'range' -> 0 <= to_jsonb(cast(:number as bigint))"
    " and position -> 'range' -> 1 > to_jsonb(cast(:number as bigint))))"
)
"""Compared as JSON, so that a position which the library did not write is left out, and is no error."""


class LedgerSnapshot:
    """The ledger at one instant. A row that cannot be read is left out, and added to `unreadable`."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self.unreadable: list[Unreadable] = []

    @property
    def is_postgres(self) -> bool:
        """Whether the pending store's tables can be in the same database."""
        return self.connection.dialect.name == "postgresql"

    def topologies(self) -> tuple[TopologyRow, ...]:
        """All topologies, by name."""
        rows = self.connection.execute(sa.select(t.topology).order_by(t.topology.c.name))
        return tuple(tables.record_of(TopologyRow, row) for row in rows)

    def topology(self, name: str) -> TopologyRow:
        """One topology.

        Raises:
            UsageError: the ledger knows none of that name.
        """
        row = self.connection.execute(sa.select(t.topology).where(t.topology.c.name == name)).one_or_none()
        if row is None:
            known = ", ".join(topology.name for topology in self.topologies()) or "none; it was never run here"
            gone = forgotten_by(self.connection, t.forgotten.c.name == name)
            why = "" if gone is None else f" (it was {gone})"
            raise UsageError(f"the ledger knows no topology {name!r}{why}; known: {known}", topology=name)
        return tables.record_of(TopologyRow, row)

    def sinks(self, incarnation: str) -> tuple[SinkBinding, ...]:
        """The tables behind a topology's sinks, by the sinks' names."""
        return bindings_of(self.connection, incarnation)

    def txns(self, incarnation: str, first: int = 1, last: int | None = None) -> list[Txn]:
        """Batches from `first` to `last`, in txid order."""
        return self._txns(incarnation, *_between(t.txn.c.txid, first, last))

    def new_slices(self, incarnation: str, number: int | None = None) -> list[tuple[int, dict[str, Json]]]:
        """(txid, position) of the batches that read new messages, in txid order.

        With a message's `number`, positions that are ranges of numbers without it are left out: reading 100,000 of them
        takes seconds.
        """
        c = t.txn.c
        conditions: list[sa.ColumnElement[bool]] = [c.incarnation == incarnation, c.retry.is_(False)]
        if number is not None and self.is_postgres:
            conditions.append(sa.and_(_MAY_HOLD.bindparams(number=number)))
        query = sa.select(c.txid, c.position).where(*conditions).order_by(c.txid)
        return [(row.txid, row.position) for row in self.connection.execute(query)]

    def some_txns(self, incarnation: str, txids: Collection[int]) -> list[Txn]:
        """These batches, as far as the ledger has them, in txid order."""
        return self._txns(incarnation, t.txn.c.txid.in_(sorted(txids)))

    def unresolved(self, incarnation: str) -> list[Txn]:
        """Batches that have not ended, in txid order."""
        return self._txns(incarnation, t.txn.c.ended_at.is_(None))

    def last_committed(self, incarnation: str, epoch: int, number: int) -> list[Txn]:
        """An epoch's last committed batches, at most `number` of them, in txid order."""
        c = t.txn.c
        return self._newest(incarnation, number, c.epoch == epoch, c.state == TxnState.COMMITTED.value)[::-1]

    def newest_opened(self, incarnation: str, epoch: int) -> Txn | None:
        """The batch that an epoch opened last."""
        return next(iter(self._newest(incarnation, 1, t.txn.c.epoch == epoch)), None)

    def _txns(self, incarnation: str, *conditions: sa.ColumnElement[bool]) -> list[Txn]:
        query = sa.select(t.txn).where(t.txn.c.incarnation == incarnation, *conditions).order_by(t.txn.c.txid)
        return self._read("txn", tables.to_txn, query)

    def _newest(self, incarnation: str, number: int, *conditions: sa.ColumnElement[bool]) -> list[Txn]:
        query = sa.select(t.txn).where(t.txn.c.incarnation == incarnation, *conditions)
        return self._read("txn", tables.to_txn, query.order_by(t.txn.c.txid.desc()).limit(number))

    def attempts(self, incarnation: str, first: int = 1, last: int | None = None) -> list[AttemptRow]:
        """Attempts at those batches, in order."""
        c = t.attempt.c
        query = sa.select(t.attempt).where(c.incarnation == incarnation, *_between(c.txid, first, last))
        return self._read("attempt", _to_attempt, query.order_by(c.txid, c.attempt))

    def work(self, incarnation: str, first: int = 1, last: int | None = None) -> list[Work]:
        """What those batches write to each sink, in txid order."""
        c = t.txn_sink.c
        query = sa.select(t.txn_sink).where(c.incarnation == incarnation, *_between(c.txid, first, last))
        return self._read("txn_sink", lambda row: Work(row.txid, tables.to_work(row)), query.order_by(c.txid))

    def files(self, incarnation: str, sink: str, first: int, last: int | None) -> dict[int, tuple[PreparedFile, ...]]:
        """The prepared files of those batches at one sink by txid, without their statistics; not of skipped batches."""
        c = t.txn_sink.c
        query = sa.select(c.txid, c.files).where(
            c.incarnation == incarnation,
            c.sink == sink,
            c.outcome.is_distinct_from(SinkOutcome.SKIPPED.value),
            *_between(c.txid, first, last),
        )
        rows = self.connection.execute(query, execution_options={"yield_per": 1000})
        return {row.txid: tuple(replace(PreparedFile(**file), statistics="{}") for file in row.files) for row in rows}

    def rejects(
        self,
        incarnation: str,
        *,
        message: str | None = None,
        first: int | None = None,
        last: int | None = None,
        sink: str | None = None,
        conditions: Sequence[sa.ColumnElement[bool]] = (),
        payloads: bool = False,
        texts: bool = True,
    ) -> list[Reject]:
        """What sinks rejected, in the order in which it was recorded; without the messages' `payloads` unless asked for.

        Without `texts`, errors and rows are empty.
        """
        c = t.reject.c
        left_out = {*(() if payloads else ("payload",)), *(() if texts else ("error", "row"))}
        columns: list[sa.ColumnElement[Any]] = [column for column in c if column.name not in left_out]
        columns += [(sa.literal("") if name != "payload" else sa.null()).label(name) for name in sorted(left_out)]
        conditions = [c.incarnation == incarnation, *_between(c.txid, first, last), *conditions]
        if sink is not None:
            conditions.append(c.sink == sink)
        if message is not None:
            conditions.append(c.message == message)
        return self._read("reject", tables.to_reject, sa.select(*columns).where(*conditions).order_by(c.id))

    def skipped(self, incarnation: str, txids: Collection[int] | None = None) -> dict[int, list[Skipped]]:
        """What operators gave up of these batches (None: of all) at whole sinks, by txid; not what a sink then held all the
        same, and not batches that had no row there.
        """
        k, b, e = t.txn_sink.c, t.topology_sink.c, t.event.c
        bound = sa.and_(b.incarnation == k.incarnation, b.sink == k.sink)
        decided = sa.and_(
            e.incarnation == k.incarnation,
            e.txid == k.txid,
            e.sink == k.sink,
            e.kind == EventKind.OPERATOR.value,
            e.action == OperatorAction.SKIP.value,
        )
        query = (
            sa.select(k.txid, k.sink, b.target, k.rows, e.at, e.detail)
            .select_from(t.txn_sink.outerjoin(t.topology_sink, bound).outerjoin(t.event, decided))
            .where(k.incarnation == incarnation, k.outcome == SinkOutcome.SKIPPED.value, k.rows > 0)
            .order_by(k.txid, k.sink)
        )
        if txids is not None:
            query = query.where(k.txid.in_(sorted(txids)))
        found: dict[int, list[Skipped]] = {}
        for row in self.connection.execute(query):
            said = row.detail or {}
            one = Skipped(
                row.txid, row.sink, row.target or "", row.rows, tables.aware(row.at), said.get("by"), said.get("why")
            )
            found.setdefault(row.txid, []).append(one)
        return found

    def reject_counts(self, incarnation: str) -> dict[str, int]:
        """How many rejects there are, by state."""
        return self._by_state(t.reject, incarnation)

    def events(
        self,
        incarnation: str,
        kinds: Sequence[EventKind] = (),
        *,
        message: str | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> list[Event]:
        """Events in the order in which they were written; of all kinds if none is named."""
        c = t.event.c
        conditions = [c.incarnation == incarnation, *_between(c.txid, first, last)]
        if kinds:
            conditions.append(c.kind.in_([kind.value for kind in kinds]))
        if message is not None:
            conditions.append(c.message == message)
        return self._read("event", tables.to_event, sa.select(t.event).where(*conditions).order_by(c.id))

    def events_of(self, incarnation: str, messages: Collection[str]) -> list[Event]:
        """All events of these messages, in the order in which they were written."""
        c = t.event.c
        found: list[Event] = []
        names = sorted(messages)
        for at in range(0, len(names), 1000):
            query = sa.select(t.event).where(c.incarnation == incarnation, c.message.in_(names[at : at + 1000]))
            found += self._read("event", tables.to_event, query.order_by(c.id))
        return found

    def altered_rejects(self, incarnation: str) -> list[tuple[int, int, str, str | None]]:
        """The rejects whose payload or row is not what was set aside; their id, txid, sink and message."""
        c = t.reject.c
        query = sa.select(c.id, c.txid, c.sink, c.message).where(c.incarnation == incarnation, altered_reject())
        found = self.connection.execute(query.order_by(c.id)) if self.is_postgres else ()
        return [(row.id, row.txid, row.sink, row.message) for row in found]

    def newest_event(self, incarnation: str, kind: EventKind) -> Event | None:
        """The last event of a kind."""
        c = t.event.c
        row = self.connection.execute(
            sa.select(t.event).where(c.incarnation == incarnation, c.kind == kind.value).order_by(c.id.desc()).limit(1)
        ).one_or_none()
        return None if row is None else tables.to_event(row)

    def losses(self, incarnation: str) -> dict[str, Loss]:
        """The rows that operators gave up with a sink's table, by sink: the newest such decision of each."""
        accepted = self._accepted_losses(incarnation)
        return {event.sink: Loss.of(event.detail or {}) for event in accepted if event.sink is not None}

    def accepted(self, incarnation: str) -> dict[str, str]:
        """What operators accepted of what a source's server removed, or may have: the record, and who accepted it."""
        details: list[dict[str, Any]] = [
            event.detail or {} for event in self._accepted_losses(incarnation) if event.sink is None
        ]
        return {
            record: f"accepted by {detail['by']}: {detail['why'] or 'no reason given'}"
            for detail in details
            for record in detail["records"]
        }

    def _accepted_losses(self, incarnation: str) -> list[Event]:
        c = t.event.c
        query = sa.select(t.event).where(c.incarnation == incarnation, c.action == OperatorAction.ACCEPT_LOSS.value)
        return self._read("event", tables.to_event, query.order_by(c.id))

    def held_before(self, incarnation: str, sink: str, txid: int) -> int | None:
        """The last txid below `txid` that a sink is known to hold."""
        return self.last_held(incarnation, sink, t.txn_sink.c.txid < txid)

    def last_held(self, incarnation: str, sink: str, *conditions: sa.ColumnElement[bool]) -> int | None:
        """The last txid that a sink is known to hold."""
        c = t.txn_sink.c
        held = (c.incarnation == incarnation, c.sink == sink, c.committed_at.is_not(None))
        return self._max(sa.select(sa.func.max(c.txid)).where(*held, *conditions))

    def superseded(self, incarnation: str, sink: str) -> int:
        """How many rows of an upsert changed nothing at a sink, over the batches of which there are rows."""
        c = t.txn_sink.c
        found = sa.select(sa.func.sum(c.superseded))
        return int(
            self.connection.execute(
                found.where(c.incarnation == incarnation, c.sink == sink, c.superseded > 0)
            ).scalar_one()
            or 0
        )

    def dropped(self, incarnation: str, sink: str) -> int:
        """How many rows the triggers of a sink's table dropped."""
        c = t.event.c
        found = sa.select(sa.func.sum(c.detail["rows"].as_integer()))
        here = (c.incarnation == incarnation, c.kind == EventKind.DROPPED.value, c.sink == sink)
        return int(self.connection.execute(found.where(*here)).scalar_one() or 0)

    def counts(self, incarnation: str) -> dict[str, int]:
        """The number of batches in each state."""
        return self._by_state(t.txn, incarnation)

    def _by_state(self, table: sa.Table, incarnation: str) -> dict[str, int]:
        state = table.c.state
        query = sa.select(state, sa.func.count()).where(table.c.incarnation == incarnation)
        return {row[0]: row[1] for row in self.connection.execute(query.group_by(state).order_by(state))}

    def last_txid(self, incarnation: str) -> int | None:
        """The newest txid of which the ledger has a row."""
        return self._max(sa.select(sa.func.max(t.txn.c.txid)).where(t.txn.c.incarnation == incarnation))

    def graphs(self, incarnation: str) -> tuple[Shape, ...]:
        """The topology's graphs, oldest first."""
        rows = self.connection.execute(
            sa.select(t.graph).where(t.graph.c.incarnation == incarnation).order_by(t.graph.c.epoch)
        )
        return tuple(Shape(row.epoch, row.after_txid, frozenset(Graph(row.description).sinks)) for row in rows)

    def missing(self, incarnation: str) -> dict[str, tuple[Missing, ...]]:
        """The committed txids that each sink lacks because it was not part of the topology then."""
        upto = self.pruned_upto(incarnation)
        return missing_txids(self.connection, incarnation, self.graphs(incarnation), pruned_upto=upto)

    def pruned_upto(self, incarnation: str) -> int:
        """The txid up to which the topology's record was pruned; 0: never."""
        return self._max(sa.select(sa.func.max(t.prune.c.upto)).where(t.prune.c.incarnation == incarnation)) or 0

    def strangers(self) -> list[Unreadable]:
        """Rows of incarnations that no topology has, in tables that outlive their batches; others have a foreign key."""
        known = sa.select(t.topology.c.incarnation)
        found: list[Unreadable] = []
        for table in (t.txn_sink, t.txn_component, t.txn_edge, t.event, t.reject):
            rows = self.connection.execute(
                sa.select(table.c.incarnation, sa.func.count())
                .where(table.c.incarnation.not_in(known))
                .group_by(table.c.incarnation)
            )
            found.extend(
                Unreadable(table.name, None, f"{count} rows of incarnation {incarnation!r}, which no topology has")
                for incarnation, count in rows
            )
        return found

    def _max(self, query: sa.Select[Any]) -> int | None:
        found: int | None = self.connection.scalar(query)
        return found

    def _read(self, table: str, convert: Callable[[Any], T], query: sa.Select[Any]) -> list[T]:
        """The query's rows, converted."""
        found: list[T] = []
        for row in self.connection.execute(query):
            try:
                found.append(convert(row))
            except (ValueError, TypeError, KeyError, AssertionError) as error:
                self.unreadable.append(Unreadable(table, row.txid, f"{type(error).__name__}: {error}"))
        return found


class AuditLedger:
    """The ledger, for reading.

    Guarantee: nothing is written, no epoch is raised and no driver is held up; each `snapshot` is of one instant.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._is_postgres = engine.dialect.name == "postgresql"

    @contextmanager
    def snapshot(self) -> Generator[LedgerSnapshot]:
        """Read from one instant. The server ends a snapshot that nobody has asked for `IDLE_S`.

        Raises:
            StoreUnavailable: the database does not answer.
            SettingsError: the ledger's tables are missing or of an older version.
        """
        options: dict[str, Any] = (
            {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            if self._is_postgres
            else {"schema_translate_map": {t.SCHEMA: None}}
        )
        try:
            with self._engine.connect() as connection:
                reading = connection.execution_options(**options)
                if self._is_postgres:
                    reading.execute(sa.text(f"set local idle_in_transaction_session_timeout = '{IDLE_S}s'"))
                yield LedgerSnapshot(reading)
                connection.rollback()
        except DBAPIError as error:
            known = known_error(error)
            if known is None:
                raise
            raise known from error


def _between(column: sa.ColumnElement[int], first: int | None, last: int | None) -> list[sa.ColumnElement[bool]]:
    conditions: list[sa.ColumnElement[bool]] = []
    if first is not None and first > 1:
        conditions.append(column >= first)
    if last is not None:
        conditions.append(column <= last)
    return conditions


def _to_attempt(row: Any) -> AttemptRow:
    return tables.record_of(AttemptRow, row, excluded=tuple(row.excluded))
