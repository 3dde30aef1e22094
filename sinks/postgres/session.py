"""A Postgres sink opened by one driver: fence, guard, rows and evidence in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from datetime import datetime
from functools import partial
from typing import Final, TypeAlias

import psycopg
import pyarrow as pa
from psycopg import sql

from stormproof.core.base.errors import SinkRefused, StoreUnavailable
from stormproof.core.base.failpoint import failpoint
from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import (
    CommitDecision,
    CommitOutcome,
    CommitResult,
    PreparedTransaction,
    SinkIdentity,
)
from stormproof.sinks.contract.row_rule import SchemaContract
from stormproof.sinks.postgres import refusals
from stormproof.sinks.postgres.columns import Kinds, known_content, row_hash, unknown_content
from stormproof.sinks.postgres.compare import compare
from stormproof.sinks.postgres.judge import EXCLUDED, RowsInOrder, is_about_rows, move_in_order, move_without_rejects
from stormproof.sinks.postgres.merge import RowsByKey
from stormproof.sinks.postgres.refusals import CatalogFacts, Moved
from stormproof.sinks.postgres.table import TableName, kept_otherwise, require_table, wire_schema
from stormproof.sinks.postgres.transactional_table import AppendedRows, TransactionalTable, copy_rows, insert_rows
from stormproof.sinks.prepare.rejected_messages import NO_PARENT, REFUSED_MAX, Rejects
from stormproof.sinks.prepare.staging import Misfits, StagedSession, prepared_batches, require_files
from stormproof.sinks.prepare.writer import FileWriter
from stormproof.sinks.rows.by_key import require_unique_keys
from stormproof.sinks.rows.comparison import Comparison, Progress, ReadRecord
from stormproof.sinks.rows.content import (
    MODULUS,
    Content,
    ContentSum,
    Sum,
    Totals,
    added_up,
    content_of_files,
    summed_columns,
    sums_of,
    sums_of_files,
)

log = logging.getLogger("stormproof.sink")

_Put: TypeAlias = Callable[[psycopg.Connection, CatalogFacts, PreparedTransaction, str], tuple[Moved, Rejects | None]]
"""Puts a transaction's rows into the table; with what it leaves out, if it may leave out any."""

PROGRESS_ROWS: Final = 1_000_000
"""A commit says each time it has sent so many rows more."""


class PostgresSession(TransactionalTable, StagedSession):
    """One driver's side of a Postgres table: its hold on the table, and the folder with the prepared files."""

    def __init__(
        self,
        database: Database,
        name: TableName,
        *,
        staging: str,
        identity: SinkIdentity,
        input_: SinkInput,
        epoch: int | None,
        contract: SchemaContract = SchemaContract.FREEZE,
        content_digests: bool = True,
    ) -> None:
        super().__init__(database, name, identity, input_, epoch, contract)
        self.staging = staging
        self._content_digests = content_digests
        self._known: CatalogFacts | None = None
        """The table as the last commit found it."""

    def writer(self) -> FileWriter:
        """Parquet files in the staging folder."""
        return FileWriter(
            sink=self.identity.sink,
            directory=self.staging,
            limits=self.limits,
            input=self.input,
            discards=self.contract is SchemaContract.DISCARD_VALUE,
            leaves_out=self.contract is SchemaContract.DISCARD_ROW,
            names_messages=True,
            undecided=self.undecided,
            hashed=self.hashed if self._content_digests else (),
        )

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Commit one transaction, by the table of `decide`; see the protocol.

        All rows are moved at once. Where the table refuses one of them, they are moved again by halves, in another
        transaction: messages may be rejected, or the row would change nothing.
        """
        put_some = partial(self._put_some, transaction.rejects_max, False)
        if Misfits.of(transaction.files):
            return self._commit_by(None, transaction, put_some, checked=checked)
        try:
            return self._commit_all(transaction, checked=checked)
        except SinkRefused as refusal:
            none = transaction.rejects_max is None and self.input.mode is not SinkMode.UPSERT
            if none or not is_about_rows(refusal):
                raise
        return self._commit_by(None, transaction, put_some, checked=checked)

    def commit_without_refused(self, transaction: PreparedTransaction) -> CommitResult:
        """Commit one transaction without the messages whose rows the table refuses; see `SupportsSkipRows`.

        Raises:
            SinkRefused: the table refuses more than rows, or too many of them; nothing was written.
            Otherwise as `commit`.
        """
        return self._commit_by(None, transaction, partial(self._put_some, REFUSED_MAX, True), checked=True)

    def _commit_all(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Commit by the facts of the commit before; where they are no longer true, which undoes it, by new ones."""
        known = self._known if checked else None  # unchecked, another table may have the name, and gets the rows
        if known is not None:
            try:
                return self._commit_by(known, transaction, self._put_all, checked=checked)
            except _TableChanged:
                log.debug("%s: the table was changed since the last commit", self.where)
            except StoreUnavailable:  # it may be bytes of another width than the column's now
                self._known = None
                raise
            except SinkRefused:
                with self.link.transaction() as connection:
                    if refusals.facts_of(refusals.ask_facts(connection, self.name, self.input)) == known:
                        raise
            self._known = None
        return self._commit_by(None, transaction, self._put_all, checked=checked)

    def _commit_by(
        self, known: CatalogFacts | None, transaction: PreparedTransaction, put: _Put, *, checked: bool
    ) -> CommitResult:
        """Commit the rows that `put` puts, in one database transaction, with evidence and guard behind them."""
        where, guard, txid = f"{self.where}, txid {transaction.txid}", self.guard, transaction.txid
        with self.link.transaction(where) as connection:
            facts = self._begin(connection, transaction, where, known, checked=checked)
            if facts is None:
                return self._held(connection, transaction)
            began_empty = transaction.previous is None and refusals.is_empty(connection, facts.table.oid, self.name)
            moved, rejects = put(connection, facts, transaction, where)
            refused, back = ((), 0) if rejects is None else (rejects.rows(), rejects.reinstated)
            _require_all(moved.sent + len(refused), transaction.rows + back, transaction.rows + back, where)
            superseded = transaction.superseded - back + moved.superseded
            content = self._content_of(transaction, rejects, facts, moved)
            said = self._said(facts, content, checked=checked, dropped=moved.dropped, began_empty=began_empty)
            at = self._record(connection, facts, transaction, moved, said, where, checked=checked)
            guard.add_rejected(connection, txid, refused, again=not checked)
            guard.add_superseded(connection, txid, superseded, back, again=not checked)
            changed = self.changed(connection, txid)
            failpoint("postgres.after_rows")
        self._known = facts if self._goes_by_known else None
        failpoint("postgres.after_commit")
        return CommitResult(CommitOutcome.APPLIED, superseded, refused, moved.dropped, changed, at=at)

    def _put_all(
        self, connection: psycopg.Connection, facts: CatalogFacts, transaction: PreparedTransaction, where: str
    ) -> tuple[Moved, Rejects | None]:
        """All rows at once."""
        schema = wire_schema(facts.table, self.input)
        rows = self._rows(connection, facts, schema, where)
        if not (facts.rivals and self.input.mode is SinkMode.UPSERT and transaction.files):
            return self._move_rows(rows, connection, facts, transaction, where), None
        rejects = self._rejects(facts, transaction, None, where)
        in_order = RowsInOrder(connection, facts, schema, rejects, rows, where)
        in_order.copy(by_halves=False)
        in_order.put((0, len(in_order.order.row)))
        return in_order.all_moved(), rejects

    @property
    def _goes_by_known(self) -> bool:
        """Where a batch may change the table, each commit looks first."""
        return self.contract is not SchemaContract.EVOLVE

    def _record(
        self,
        connection: psycopg.Connection,
        facts: CatalogFacts,
        transaction: PreparedTransaction,
        moved: Moved,
        said: str | None,
        where: str,
        *,
        checked: bool,
    ) -> datetime:
        """Behind the rows: move the guard, add the evidence, and look at the table once more. The rows that were written
        lock it against changes until the transaction ends, so what is seen now stays true. Returns the evidence's time.

        Raises:
            SinkRefused: a deferred constraint refuses; another table has the name; a part of it loses its rows in a crash.
            PositionMismatch: the guard is not at the transaction before this one.
            _TableChanged: it is no longer as `facts` say.
        """
        table_id = self.guard.id_of(connection, facts.table.oid)
        with self.guard.evidence_is_new(transaction), connection.pipeline():
            # Met here, an error of a deferred constraint names it; at the COMMIT the outcome would be in question.
            connection.execute("set constraints all immediate")
            # With its schema: the user's table may have the name of our temporary one, which hides it.
            asked = refusals.ask_facts(connection, facts.table.name, self.input)
            guard = self.guard.ask_move(connection, transaction, table_id, checked=checked)
            self.guard.add_evidence(
                connection, transaction, moved.taken, again=not checked, dropped=moved.dropped, content=said
            )
        now = refusals.facts_of(asked)
        fresh = self._known is not facts
        # Facts of this transaction: a trigger of the table's may have made a partition, with triggers, for our very rows.
        same = now == facts or (fresh and now is not None and now.table == facts.table and not now.volatile)
        if same:
            return self.guard.require_moved(transaction, guard)
        if now is not None and now.table.oid == facts.table.oid:
            refusals.require_no_volatile(now.volatile, where)
        elif fresh:  # else the table may have had another name before this commit began
            raise SinkRefused(
                f"{where}: another table took the name {facts.table.name} during the commit; nothing was written. Retry the "
                "txid once the tables have their names"
            )
        raise _TableChanged(f"{where}: the table was changed during the commit; nothing was written. Retry the txid")

    def _put_some(
        self,
        most: int | None,
        row_by_row: bool,
        connection: psycopg.Connection,
        facts: CatalogFacts,
        transaction: PreparedTransaction,
        where: str,
    ) -> tuple[Moved, Rejects]:
        """All but the rows of at most so many messages, of which the table refuses one; these are kept in `reject`."""
        # All rows are read from the files, those that a task loaded too.
        require_files(self.staging, transaction.files, where=where, digests=True)
        schema = wire_schema(facts.table, self.input)
        rejects = self._rejects(facts, transaction, most, where, row_by_row=row_by_row)
        waits = {NO_PARENT} if refusals.refers_to_itself(connection, facts.table.oid) else set[str]()
        begin = partial(self._rows, connection, facts, schema, where, passes_over=True)
        if facts.rivals and self.input.mode is not SinkMode.FOLD:
            in_order = RowsInOrder(connection, facts, schema, rejects, begin(), where)
            moved = move_in_order(connection, in_order, rejects, waits)
        else:
            waits = waits | EXCLUDED if facts.rivals else waits
            moved = move_without_rejects(connection, begin, rejects, may_drop=bool(facts.dropping), waits=waits)
        failpoint("postgres.after_rejects")
        return moved, rejects

    def _said(
        self,
        facts: CatalogFacts,
        content: Content | Totals | None,
        *,
        checked: bool,
        dropped: int,
        began_empty: bool,
    ) -> str | None:
        """What the evidence says of the rows' content, for a later comparison with the table; None: nothing."""
        if not checked:
            return unknown_content("under its guarantee, a row may be in the table more than once, or not at all")
        if dropped:
            return unknown_content(f"triggers of the table dropped {dropped} of its rows", began_empty=began_empty)
        if facts.changing:
            return unknown_content(
                f"trigger {facts.changing[0]!r} of the table may have changed its rows", began_empty=began_empty
            )
        return None if content is None else known_content(content, began_empty=began_empty)

    def _row_hash(self, facts: CatalogFacts) -> tuple[sql.Composed, Kinds] | None:
        """How a commit by key hashes rows; None: rows do not name who wrote them, or triggers may change other rows."""
        if self.input.lineage is None or facts.reaching:
            return None
        return row_hash(facts.table.columns, self.input.schema.names)

    def _change(self, facts: CatalogFacts, moved: Moved) -> Content | None:
        """What a commit by key added to the table's content, less what it replaced; None where rows are not hashed."""
        hashed = self._row_hash(facts)
        return None if hashed is None else Content(moved.inserted, moved.change % MODULUS, hashed[1])

    def _content_of(
        self, transaction: PreparedTransaction, rejects: Rejects | None, facts: CatalogFacts, moved: Moved
    ) -> Content | Totals | None:
        """The content of the rows that are not rejected."""
        kept = () if rejects is None else rejects.kept()
        if self.input.is_by_key:
            summed = summed_columns(self.input.folds)
            sums = sums_of_files(transaction.files, summed) if rejects is None else dict.fromkeys(summed, Sum())
            for part in kept if sums else ():
                sums = added_up(sums, sums_of(part.rows, sums))
            return Totals(moved.inserted, sums, 1, self._change(facts, moved))
        prepared = content_of_files(transaction.files)
        if prepared is None or rejects is None:
            return prepared
        total = ContentSum(prepared.kinds)
        for part in kept:
            total.add(part.rows)
        return total.content

    def _held(self, connection: psycopg.Connection, transaction: PreparedTransaction) -> CommitResult:
        """The result for a transaction that the sink holds, with what was refused and dropped then."""
        entries = self.guard.entries(connection, transaction.txid, transaction.txid)
        dropped = sum(entry.dropped for entry in entries)
        refused = self.guard.rejected(connection, transaction.txid)
        superseded = self.guard.superseded(connection, transaction.txid)
        changed = self.changed(connection, transaction.txid)
        at = entries[0].at if entries else None
        return CommitResult(CommitOutcome.ALREADY_HELD, superseded, refused, dropped, changed, at=at)

    def compare_rows(self, read: ReadRecord, first: int, last: int | None, progress: Progress) -> Comparison:
        """See `SupportsCompareRows`."""
        return compare(self, self.database, read, (first, last), progress)

    def _begin(
        self,
        connection: psycopg.Connection,
        transaction: PreparedTransaction,
        where: str,
        known: CatalogFacts | None,
        *,
        checked: bool,
    ) -> CatalogFacts | None:
        """Lock fence and guard. Returns the table to write to, by the facts that are `known` or as it is now; None where the
        sink holds the transaction.
        """
        if self.begin(connection, transaction, checked=checked) is CommitDecision.SKIP:
            return None
        self.evolve(connection, transaction.txid)
        facts = known
        if facts is None:
            facts = refusals.facts_of(refusals.ask_facts(connection, self.name, self.input))
            if facts is None:
                raise self.guard.gone(connection)
            require_table(facts.table, self.input, where)
            refusals.require_no_volatile(facts.volatile, where)
        require_files(self.staging, transaction.files, where=where, digests=True)
        failpoint("postgres.after_guard")
        return facts

    def _move_rows(
        self,
        rows: AppendedRows | RowsByKey,
        connection: psycopg.Connection,
        facts: CatalogFacts,
        transaction: PreparedTransaction,
        where: str,
    ) -> Moved:
        """Move the prepared rows into the table. It takes all, but for those that its triggers drop.

        Raises:
            SinkRefused: rows are missing that no trigger can have dropped.
        """
        if not transaction.files:
            _require_all(0, 0, transaction.rows, where)
            return Moved(0, 0, 0, 0)
        if self.input.is_by_key:
            keys = self.input.keys
            read = partial(prepared_batches, self.staging, transaction.files, keys)
            require_unique_keys(read, transaction.rows, keys, where)
        sent = 0

        def counted() -> Generator[pa.RecordBatch]:
            nonlocal sent
            for batch in prepared_batches(self.staging, transaction.files, self.input.schema.names):
                before, sent = sent, sent + batch.num_rows
                yield batch
                if before // PROGRESS_ROWS < sent // PROGRESS_ROWS:
                    log.info("%s: %s of %s rows sent", where, f"{sent:,}", f"{transaction.rows:,}")

        with refusals.no_message_to_blame(facts, self.input.schema.names, where):
            taken = rows.put(counted())
        may_drop = taken < sent and bool(facts.dropping)
        _require_all(sent if may_drop else taken, sent, transaction.rows, where)
        if may_drop:
            log.info("%s: the table's triggers dropped %d of %d rows", where, sent - taken, sent)
        return Moved(sent, taken, rows.superseded, rows.inserted, rows.change)

    def _rejects(
        self,
        facts: CatalogFacts,
        transaction: PreparedTransaction,
        most: int | None,
        where: str,
        *,
        row_by_row: bool = False,
    ) -> Rejects:
        """What a commit leaves out."""
        return Rejects(
            directory=self.staging,
            transaction=transaction,
            most=most,
            where=where,
            input_=self.input,
            columns=self.input.schema.names,
            undecided=kept_otherwise(facts.table, self.input),
            row_by_row=row_by_row,
        )

    def _rows(
        self,
        connection: psycopg.Connection,
        facts: CatalogFacts,
        schema: pa.Schema,
        where: str,
        *,
        passes_over: bool = False,
    ) -> AppendedRows | RowsByKey:
        """What moves rows into the table."""
        name = facts.table.name
        if self.input.is_by_key:
            hashed = self._row_hash(facts)
            return RowsByKey(
                connection=connection,
                name=name,
                input_=self.input,
                schema=schema,
                where=where,
                may_drop=bool(facts.dropping),
                undecided=kept_otherwise(facts.table, self.input),
                partitioned=facts.table.kind == "p",
                passes_over=passes_over,
                hashed=hashed and hashed[0],
            )
        if facts.row_security:
            return AppendedRows(lambda batches: insert_rows(connection, name, schema, batches, where))
        return AppendedRows(lambda batches: copy_rows(connection, name.identifier, schema, batches, where))


class _TableChanged(StoreUnavailable):
    """The table is not as a commit took it to be: the next try goes by what is true then."""


def _require_all(taken: int, sent: int, prepared: int, where: str) -> None:
    if not taken == sent == prepared:
        raise SinkRefused(
            f"{where}: {taken} rows reached the table instead of the {prepared} prepared ({sent} were read from the "
            "prepared files), and no trigger of the table drops rows; nothing was written",
            moved=taken,
            sent=sent,
            prepared=prepared,
        )
