"""Which table is a sink's own: another one is made so, or one that was claimed and never written to is released. And which
server a queue is in now, once ledger, sinks and queue agree on what was read from it.

After a dump and restore, a fail-over or `pg_upgrade` a queue's database agrees with itself: messages, positions and slices
were copied at one instant. A fault can only lie outside: a sink or the ledger may be ahead of the copy, so that messages
would be read twice, or behind it, so that some would never be read. `audit verify` compares just that.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import psycopg
import sqlalchemy as sa

from stormproof.core.base.errors import Json, PositionMismatch, SinkRefused, UsageError
from stormproof.core.contract.sink import SinkMode
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.store import StoreConnection
from stormproof.core.source.postgres_queue import PostgresQueue, message_table
from stormproof.core.source.postgres_queue.message_table import MessageTable, Numbering, Standing, index_ranges_only
from stormproof.core.source.spouts import sources_in
from stormproof.sinks.contract.protocol import (
    PROBLEM,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkProblem,
    SinkSession,
    SupportsTakeTable,
    least_rows,
)
from stormproof.trident.audit.inspect import described_sink, open_for_inspection, opener_for
from stormproof.trident.audit.ledger import LedgerSnapshot, TopologyRow
from stormproof.trident.audit.report import ViolationKind, ranges
from stormproof.trident.audit.source import PendingEvidence, spout_sources, stored_source
from stormproof.trident.audit.status import DriverState, driver_state, may_be_running
from stormproof.trident.audit.verify import verify
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.declarations.decisions import Look
from stormproof.trident.ledger import sink_records as kept
from stormproof.trident.ledger import txns
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.sink_records import Loss, SinkBinding
from stormproof.trident.ledger.tables import Run
from stormproof.trident.terms.transaction_states import OperatorAction
from stormproof.trident.terms.wording import counted


@dataclass(frozen=True, slots=True)
class _Known:
    """What a sink holds by the ledger: the last txid, and the rows of each txid that were not given up.

    The sink may hold the txid that is `prepared`, too: its driver ended, or the stores were copied, between the sink's
    commit and the ledger's.
    """

    last: Held | None
    rows: Mapping[int, int]
    given_up: int
    prepared: Held | None = None
    prepared_rows: int = 0

    @staticmethod
    def of(tx: Tx, sink: str) -> _Known:
        last, given_up = kept.last_held(tx, sink), kept.given_up(tx, sink)
        rows = {txid: rows for txid, rows in kept.rows_held(tx, sink).items() if txid > given_up}
        found = kept.prepared(tx, sink)
        prepared, prepared_rows = (None, 0) if found is None else (Held(found[0], found[1]), found[2])
        return _Known(None if last is None else Held(*last), rows, given_up, prepared, prepared_rows)

    def beside(self, found: _Found) -> _Known:
        """The same; with the prepared txid, if the sink's own record ends with that."""
        if self.prepared is None or found.last != self.prepared:
            return self
        return replace(self, last=self.prepared, rows={**self.rows, self.prepared.txid: self.prepared_rows})


@dataclass(frozen=True, slots=True)
class _Found:
    """What the sink's own record says: the table's id (None: there is no table), the last txid, and each txid's rows."""

    table_id: str | None
    last: Held | None = None
    entries: Mapping[int, int] | None = None
    kept_from: int = 1
    """The first txid of the record; the table's retention removed the older ones."""
    gone: Mapping[int, str] = field(default_factory=dict[int, str])
    """Txids whose rows the table no longer holds by its own record, and why: a RESTORE, an overwrite, a DELETE."""
    counted: int = 0
    """Rows in the table, counted no further than needed."""


@dataclass(frozen=True, slots=True)
class TableAdopted:
    """The table `was` is the sink's no more, and the table `is_` is; `lost` is what was given up."""

    topology: str
    sink: str
    was: str
    is_: str
    lost: Loss | None
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        if self.lost is None and self.is_ == self.was:
            return [
                f"{self.topology}: table {self.is_} is that of sink {self.sink} already; there was nothing to adopt"
            ]
        if self.lost is None:
            return [
                f"{self.topology}: table {self.is_} is that of sink {self.sink} now. Its record agrees with the ledger, and "
                "it has enough rows; whether they are those of the old table was not checked"
            ]
        return [
            f"{self.topology}: table {self.is_} is that of sink {self.sink} now, with {counted(self.lost.found, 'row')}. "
            f"What {_named(self.lost)} wrote there ({counted(self.lost.rows, 'row')}) is given up, on record; their "
            "messages are not handed out again"
        ]


def look(stores: Stores, topology: str, sink: str, *, accept_loss: bool = False) -> Look:
    """The table, and what its adoption would give up."""
    row = stores.topology(topology)
    binding = stores.binding(row, sink)
    loss = _examined(stores, row, binding, accept_loss=accept_loss)[2]
    facts = {"sink": sink, "table": binding.target, "known as": binding.table_id}
    if loss is None:
        return Look(facts, said=("nothing is lost, as far as can be told",))
    facts = {**facts, "gives up txids": loss.txids}
    return Look(facts, loss.rows, "row", said=(f"the table has {counted(loss.found, 'row')} now",))


def adopt_table(stores: Stores, topology: str, sink: str, *, accept_loss: bool, by: str, why: str) -> TableAdopted:
    """Make the table that has the sink's name now the sink's own.

    Raises:
        PositionMismatch: it holds another txid than the ledger says, other content, or too few rows.
        SinkRefused: there is no table, or it cannot hold the sink's rows.
    """
    row = stores.topology(topology)
    binding, run = stores.binding(row, sink), Run(topology, row.incarnation, row.epoch)
    before, found, loss = _examined(stores, row, binding, accept_loss=accept_loss)
    known = before.beside(found)
    if loss is not None:
        loss = replace(loss, by=by, why=why)
    makes = found.table_id is None or loss is not None or bool(found.gone)
    with closing(_opened(stores.database, run, binding, makes=makes)) as session, stores.transaction(row) as tx:
        if _Known.of(tx, sink) != before:
            raise UsageError(
                f"a driver of {topology!r} committed meanwhile: stop it, and run this command again", sink=sink
            )
        assert isinstance(session, SupportsTakeTable)
        session.take_table(_standing_in(known.last))
        kept.rebind(tx, sink, session.table_id, by=by, why=why, loss=loss)
        table_id = session.table_id
    return TableAdopted(topology, sink, binding.table_id, table_id, loss, by, why)


def _examined(
    stores: Stores, row: TopologyRow, binding: SinkBinding, *, accept_loss: bool
) -> tuple[_Known, _Found, Loss | None]:
    run = Run(row.name, row.incarnation, row.epoch)
    with stores.transaction(row) as tx:
        known = _Known.of(tx, binding.sink)
    # Outside of the ledger's transaction, since counting rows may take long.
    found = _look(stores.database, run, binding, known)
    held = known.beside(found)
    loss = _loss_of(binding, held, found)
    _require_acceptable(run, binding, held, found, loss, accept_loss=accept_loss)
    return known, found, loss


def _opened(database: Database, run: Run, binding: SinkBinding, *, makes: bool) -> SinkSession:
    sink, input_ = described_sink(binding, database)
    identity = SinkIdentity(run.topology, run.incarnation, binding.sink)
    return sink.open(identity, input_, run.epoch) if makes else sink.inspect(identity, input_)


def _look(database: Database, run: Run, binding: SinkBinding, known: _Known) -> _Found:
    try:
        with closing(_opened(database, run, binding, makes=False)) as session:
            report = session.evidence(1, None)
            if not isinstance(session, SupportsTakeTable):
                raise UsageError(
                    f"sink {binding.sink!r} ({binding.target}) cannot take another table", sink=binding.sink
                )
            entries = {e.txid: e.rows for e in report.entries}
            digests = {e.txid: e.digest for e in report.entries}
            last = None if report.last_txid is None else Held(report.last_txid, digests.get(report.last_txid))
            kept_from = min(entries, default=1) if report.truncated else 1
            if report.table_id is None:
                return _Found(None, last, entries, kept_from)
            gone = {e.txid: e.problem or "" for e in report.entries if e.gone and e.txid > known.given_up}
            counted = session.count_rows(max(_least(binding, {**entries, **known.rows}), 1))
            return _Found(report.table_id, last, entries, kept_from, gone, counted)
    except SinkRefused as error:
        if error.details.get(PROBLEM) != SinkProblem.TABLE_GONE:
            raise
        return _Found(None)


def _least(binding: SinkBinding, rows: Mapping[int, int]) -> int:
    """How many rows a table has at least, to which the txids wrote so many, unless somebody deletes some."""
    description = binding.description or {}
    if str(description.get("kind")).endswith("-map"):
        return min(sum(rows.values()), 1)  # a txid may write a key several times
    return least_rows([*rows.values()], fold=description.get("mode") != SinkMode.APPEND.value)


def _loss_of(binding: SinkBinding, known: _Known, found: _Found) -> Loss | None:
    """The rows that are missing; None if none are, as far as can be told."""
    if known.last is None:
        return None
    entries = found.entries or {}
    # After a prune of the ledger the sink's own record goes back further.
    older = {txid: rows for txid, rows in entries.items() if known.given_up < txid <= known.last.txid}
    written = {**older, **known.rows}
    missing = {t: rows for t, rows in written.items() if (t not in entries and t >= found.kept_from) or t in found.gone}
    there = {txid: rows for txid, rows in written.items() if txid not in missing}
    if found.table_id is None or found.counted < _least(binding, there):
        missing = written
    if not any(missing.values()) and not (_is_behind(found, known) and missing):
        return None
    return Loss(known.last.txid, ranges(missing), sum(missing.values()), found.counted)


def _require_acceptable(
    run: Run, binding: SinkBinding, known: _Known, found: _Found, loss: Loss | None, *, accept_loss: bool
) -> None:
    where = f"sink {binding.sink!r} of topology {run.topology!r}"
    give_up = f"stormproof ledger adopt-table {run.topology} {binding.sink} --accept-loss"
    lost = "" if loss is None else f"what {_named(loss)} wrote there ({loss.rows} rows)"
    if found.table_id is None and not accept_loss:
        raise SinkRefused(
            f"{where}: there is no table {binding.target}. Put it back; or go on in an empty one"
            f"{f', and give up {lost}' if lost else ''}, on record: {give_up}",
            sink=binding.sink,
            problem=SinkProblem.TABLE_GONE,
        )
    behind = _is_behind(found, known)
    if (
        found.last != known.last
        and not (behind and accept_loss)
        and not (found.table_id is None and found.last is None)
    ):
        shown = [_shown(held) for held in (found.last, known.last)]
        way_on = f" Or give up {lost}, on record: {give_up}" if behind and lost else ""
        raise PositionMismatch(
            f"{where} holds {shown[0]}, the ledger says {shown[1]}: it is not the table as the ledger left it. Restore both "
            f"to one moment; inspect with: stormproof audit verify {run.topology}.{way_on}",
            sink=binding.sink,
            held=None if found.last is None else found.last.txid,
            ledger=None if known.last is None else known.last.txid,
        )
    if loss is not None and not accept_loss:
        text = (
            f"no longer holds {lost}: {found.gone[max(found.gone)]}. RESTORE it to before that; or give the rows up"
            if found.gone
            else f"has {found.counted} rows, which is too few for {lost}: it is not the table as the ledger left it. "
            "Put that in its place; or give them up"
        )
        raise PositionMismatch(
            f"{where}: the table {binding.target} {text}, on record: {give_up}",
            sink=binding.sink,
            txids=loss.txids,
            rows=loss.rows,
            found=loss.found,
        )


def _is_behind(found: _Found, known: _Known) -> bool:
    return known.last is not None and (found.last is None or found.last.txid < known.last.txid)


def _named(loss: Loss) -> str:
    return f"txid{'' if loss.txids.isdecimal() else 's'} {loss.txids}"


def _shown(held: Held | None) -> str:
    return "no txid" if held is None else f"txid {held.txid} (digest {(held.digest or '')[:12]})"


def _standing_in(last: Held | None) -> PreparedTransaction | None:
    """An empty transaction in place of the last one, whose rows are gone."""
    return None if last is None else PreparedTransaction(last.txid, None, last.digest or "", 0, ())


@dataclass(frozen=True, slots=True)
class TableReleased:
    """A table that is free for another topology; `claim_removed`: the table itself had recorded the claim."""

    topology: str
    sink: str
    table: str
    claim_removed: bool
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [f"{self.topology}: sink {self.sink} no longer has a table; {self.table} is free for another topology"]


def require_releasable(stores: Stores, topology: str, sink: str) -> tuple[TopologyRow, SinkBinding]:
    """The sink's table, where no driver runs and nothing was written to it.

    Raises:
        UsageError: a driver may be running, or a batch was written to the sink or is about to be.
    """
    row = stores.topology(topology)
    binding = stores.binding(row, sink)
    if may_be_running(row):
        raise UsageError(
            f"topology {topology!r}: its driver {row.driver_host}:{row.driver_pid} may be running: stop it first "
            f"(stormproof status {topology})",
            sink=sink,
        )
    with stores.transaction(row) as tx:
        _require_unused(tx, topology, sink)
    return row, binding


def look_at_release(stores: Stores, topology: str, sink: str) -> Look:
    """The table that would be free."""
    _, binding = require_releasable(stores, topology, sink)
    return Look({"sink": sink, "table": binding.target, "known as": binding.table_id})


def release_table(stores: Stores, topology: str, sink: str, *, by: str, why: str) -> TableReleased:
    """Remove the topology's claim from the table, and the table from the ledger.

    Raises:
        UsageError: as `require_releasable`.
    """
    row, binding = require_releasable(stores, topology, sink)
    return release_unused(stores, row, binding, by=by, why=why)


def release_unused(stores: Stores, row: TopologyRow, binding: SinkBinding, *, by: str, why: str) -> TableReleased:
    """The same, of a topology whose driver is known to have ended.

    Raises:
        UsageError: something was written to the table, or is about to be.
    """
    released = _release(stores, row, binding)
    with stores.transaction(row) as tx:
        _require_unused(tx, row.name, binding.sink)
        kept.unbind(tx, binding.sink, by=by, why=why)
    return TableReleased(row.name, binding.sink, binding.target, released, by, why)


def _require_unused(tx: Tx, topology: str, sink: str) -> None:
    held = kept.last_held(tx, sink)
    if held is not None:
        raise UsageError(
            f"topology {topology!r}: sink {sink!r} holds txid {held[0]}: its table is in use; the sink is given "
            "another one by `stormproof ledger adopt-table`",
            sink=sink,
        )
    for txn in txns.unresolved(tx):
        if sink in txns.work(tx, txn.txid):
            raise UsageError(
                f"topology {topology!r}: txid {txn.txid} is {txn.state} and writes to sink {sink!r}: its table is in use",
                sink=sink,
                txid=txn.txid,
            )


def _release(stores: Stores, row: TopologyRow, binding: SinkBinding) -> bool:
    """Remove the claim from the table itself; whether there was one."""
    identity = SinkIdentity(row.name, row.incarnation, binding.sink)
    try:
        with closing(open_for_inspection(identity, binding, stores.database)) as session:
            held = session.held()
            if held is not None:
                raise UsageError(
                    f"topology {row.name!r}: by the table's own record sink {binding.sink!r} holds txid {held.txid}",
                    sink=binding.sink,
                )
            return session.release()
    except SinkRefused as error:
        if error.details.get(PROBLEM) != SinkProblem.TABLE_GONE:
            raise
        return False


PROVES: Final = (
    "ledger, sinks and queue agree: every message that is in a sink was read from the queue, once; and every message that "
    "was read is in the sinks, is a dead letter, was dropped, or waits. Nothing that is in the queue is skipped or doubled "
    "by the adoption"
)
NOT_PROVABLE: Final = (
    "messages that a producer put after this copy was made, and that no sink holds, left no trace here: compare the newest "
    "message with the producers' own record"
)


# ---- a queue's server


@dataclass(frozen=True, slots=True)
class NewestMessage:
    """The message that was put last."""

    id: str
    put_at: datetime


@dataclass(frozen=True, slots=True)
class QueueAdoption:
    """What was found of a queue, and what was done.

    `unproven` says what speaks against an adoption, or could not be compared. `adopted`: the queue is bound to this server
    now; `changed`: this call has bound it.
    """

    queue: str
    adopted: bool
    changed: bool
    was: Numbering
    now: Numbering
    subscriptions: Mapping[str, str | None]
    """The topology of each subscription; None where the ledger knows none."""
    unreachable: int
    newest: NewestMessage | None
    unproven: tuple[str, ...]
    by: str
    why: str
    proves: str = PROVES
    not_provable: str = NOT_PROVABLE

    def lines(self) -> list[str]:
        """The answer for people, line by line."""
        if self.adopted and not self.changed:
            return [f"{self.queue}: it is of this server ({self.now}) already; there was nothing to adopt"]
        newest = self.newest
        lines = [
            f"{self.queue}: was of {self.was}; this is {self.now}",
            *(
                f"  read by {topology or 'no topology of this ledger'} ({s})"
                for s, topology in self.subscriptions.items()
            ),
            f"  {self.unreachable} messages lie above this server's transaction numbers",
            "  it is empty"
            if newest is None
            else f"  newest message: {newest.id}, put at {newest.put_at.isoformat(sep=' ', timespec='seconds')}",
            *(f"NOT PROVEN {text}" for text in self.unproven),
        ]
        if not self.unproven:
            lines.append(f"proven: {self.proves}")
        lines.append(f"not provable by anybody: {self.not_provable}")
        if self.changed:
            return [*lines, f"{self.queue}: adopted by {self.by}; readers and producers may go on"]
        return [
            *lines,
            f"{self.queue}: nothing was changed. Mend what is named, or accept it, on record: stormproof queue adopt "
            f"{self.queue} --accept-unproven --why REASON",
        ]

    @property
    def exit_status(self) -> int:
        """0: adopted, or there was nothing to adopt; 4: something is neither proven nor accepted."""
        return 0 if self.adopted else 4


@dataclass(frozen=True, slots=True)
class _Store:
    """One queue in the ledger's database."""

    database: Database
    table: MessageTable

    @contextmanager
    def cursor(self, connection: sa.Connection | None = None) -> Generator[psycopg.Cursor[Any]]:
        """In the ledger's transaction, or in one of its own."""
        store = StoreConnection(
            "queue", self.table.queue, application="adopt", missing="run: stormproof ledger migrate"
        )
        tx = None if connection is None else connection.connection.driver_connection
        try:
            with store.transaction(lambda: self.database, tx) as cursor, index_ranges_only(cursor):
                yield cursor
        finally:
            store.close()


def adopt_queue(stores: Stores, queue: str, *, accept_unproven: bool = False, by: str, why: str) -> QueueAdoption:
    """Bind a queue to this server, with all its subscriptions; where something is unproven, only if that is accepted.

    Guarantee:
        Nothing is changed unless `adopted` and `changed` are both true in the answer. No message is touched. The
        transaction that adopts records the decision, who took it and what was not proven: in `stormproof.queue_adoption`,
        and as an event of each topology that reads the queue.

    Not guaranteed:
        What `NOT_PROVABLE` says, and that nobody uses the old server any more.

    Raises:
        UsageError: no such queue; a proof is waived without a reason; the queue changed meanwhile.
        StoreUnavailable: the database does not answer.
    """
    if accept_unproven and not why:
        raise UsageError("what is accepted without a proof needs a reason: give --why", argument="why")
    store = _Store(stores.database, MessageTable(queue))
    with store.cursor() as cursor:
        found = message_table.standing(cursor, queue, store.table.sql)
    with stores.audit.snapshot() as snapshot:
        readers = _readers(snapshot, queue)
    by_subscription = {name: row.name if (row := readers.get(name)) else None for name in found.subscriptions}
    answer = _answer(found, by_subscription, by, why)
    if found.is_adopted:
        return answer
    unproven = tuple(_unproven(stores, found, readers))
    if unproven and not accept_unproven:
        return replace(answer, unproven=unproven)
    with stores.ledger.unfenced() as tx:
        with store.cursor(tx.connection) as cursor:
            now = message_table.standing(cursor, queue, store.table.sql, locked=True)
            if (now.was, now.subscriptions) != (found.was, found.subscriptions):
                raise UsageError(f"queue {queue} was changed meanwhile by somebody else: run this again", queue=queue)
            message_table.adopt(cursor, store.table.sql, now, by=by, why=why, unproven=unproven)
        detail: dict[str, Json] = {
            "queue": queue,
            "was": now.was.to_json(),
            "now": now.now.to_json(),
            "unproven": list(unproven),
        }
        for row in {row.name: row for row in readers.values()}.values():
            of_topology = tx.of(Run(row.name, row.incarnation, row.epoch))
            of_topology.decided(OperatorAction.ADOPT_QUEUE, by=by, why=why, about=queue, detail=detail)
    return replace(_answer(now, by_subscription, by, why), unproven=unproven, adopted=True, changed=True)


def _answer(found: Standing, subscriptions: Mapping[str, str | None], by: str, why: str) -> QueueAdoption:
    newest = found.newest
    return QueueAdoption(
        queue=found.queue,
        adopted=found.is_adopted,
        changed=False,
        was=found.was,
        now=found.now,
        subscriptions=subscriptions,
        unreachable=found.above,
        newest=None if newest is None else NewestMessage(PostgresQueue.shown_id(newest.id, newest.xid), newest.put_at),
        unproven=(),
        by=by,
        why=why,
    )


def _readers(snapshot: LedgerSnapshot, queue: str) -> dict[str, TopologyRow]:
    """The topologies that read the queue, by subscription."""
    readers: dict[str, TopologyRow] = {}
    for row in snapshot.topologies():
        if sources_in(row.source):
            found = list(spout_sources(snapshot, row).values())
        else:
            source = stored_source(snapshot, row)
            found = [source] if isinstance(source, PendingEvidence) else []
        whose = [one.who for one in found]
        readers |= {who.subscription: row for who in whose if (who.kind, who.source) == (PostgresQueue.KIND, queue)}
    return readers


def _unproven(stores: Stores, found: Standing, readers: Mapping[str, TopologyRow]) -> Generator[str]:
    """What speaks against the adoption, or could not be compared, one by one."""
    for subscription in found.subscriptions:
        if subscription not in readers:
            yield (
                f"subscription {subscription} is of no topology in this ledger: what it has read cannot be compared with "
                "anything"
            )
    for row in {row.name: row for row in readers.values()}.values():
        if found.was.server != found.now.server and driver_state(row) is DriverState.RUNNING:
            yield (
                f"topology {row.name}: its driver {row.driver_host}:{row.driver_pid} runs, and may still work on the old "
                "server: stop it first"
            )
        report = verify(stores.audit, row.name, opener_for(stores.database))
        for violation in report.violations:
            if violation.kind is not ViolationKind.UNREACHABLE:  # which is what the adoption mends
                yield f"topology {row.name}: {violation.text}{_way_on(row.name, violation.kind, violation.sink)}"
        for unknown in report.unknowns:
            yield f"topology {row.name}: cannot tell: {unknown.text}"


def _way_on(topology: str, kind: ViolationKind, sink: str | None) -> str:
    replaced = kind is ViolationKind.TABLE_REPLACED
    return f"; first run: stormproof ledger adopt-table {topology} {sink}" if replaced else ""
