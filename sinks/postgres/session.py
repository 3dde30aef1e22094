"""A Postgres sink opened by one driver: fence, guard, rows and evidence in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from functools import partial
from typing import Final

import psycopg
import pyarrow as pa

from stormproof.core.errors import SinkRefused
from stormproof.core.failpoint import failpoint
from stormproof.core.postgres.database import Database
from stormproof.core.sink import PreparedFile, SinkInput, SinkMode
from stormproof.sinks.comparison import Comparison, Progress, ReadRecord, content_of_files
from stormproof.sinks.content import Content, ContentSum
from stormproof.sinks.contract import SchemaContract
from stormproof.sinks.misfits import Misfits
from stormproof.sinks.postgres import bookkeeping
from stormproof.sinks.postgres.compare import compare
from stormproof.sinks.postgres.copying import copy_rows
from stormproof.sinks.postgres.durable import require_durable
from stormproof.sinks.postgres.hashed import known_content, unknown_content
from stormproof.sinks.postgres.hold import TableHold
from stormproof.sinks.postgres.parallel import Loads
from stormproof.sinks.postgres.refusals import (
    has_row_security,
    is_empty,
    refers_to_itself,
    triggers_that_change,
    triggers_that_drop,
)
from stormproof.sinks.postgres.row_by_row import is_about_rows, move_without_rejects
from stormproof.sinks.postgres.rows import AppendedRows, RowsByKey, insert_rows
from stormproof.sinks.postgres.table import Table, TableName, kept_otherwise, wire_schema
from stormproof.sinks.protocol import (
    CommitOutcome,
    CommitResult,
    Decision,
    PreparedTransaction,
    RefusedRow,
    SinkIdentity,
    SinkSession,
)
from stormproof.sinks.rejects import REFUSED_MAX, Rejects
from stormproof.sinks.staging import IsDead, prepared_batches, remove_staged, require_files, sweep_folder, unreached
from stormproof.sinks.unique_keys import require_unique_keys
from stormproof.sinks.writer import FileWriter

log = logging.getLogger("stormproof.sink")

PROGRESS_ROWS: Final = 1_000_000
"""A commit says each time it has sent so many rows more."""


class PostgresSession(TableHold, SinkSession):
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
        parallel_load_rows: int | None = None,
        contract: SchemaContract = SchemaContract.FREEZE,
        content_digests: bool = True,
    ) -> None:
        super().__init__(database, name, identity, input_, epoch, contract)
        self._staging = staging
        self._content_digests = content_digests
        self._loads = Loads(identity, database, parallel_load_rows)

    def take_over(self, *, create: bool) -> None:
        """As `TableHold.take_over`; and see whether tasks may load."""
        super().take_over(create=create)
        if self.input.mode is SinkMode.UPSERT:
            with self.link.transaction() as connection:
                # Not with the first such row: a role that may make none would block a batch long after its start.
                bookkeeping.make_superseded(connection)
        if self.contract is SchemaContract.EVOLVE:
            return  # the table may lack columns that only the first batch adds; such a sink has no loads of tasks
        with self.link.transaction() as connection:
            table = self.checked_table(connection, self.where)
            self._loads = self._loads.prepared(connection, table, self.input, self.where)

    def writer(self) -> FileWriter:
        """Parquet files in the staging folder; large ones are copied into staging tables, too, where the sink is told to."""
        files = FileWriter(
            *(self.identity.sink, self._staging, self.limits),
            input=self.input,
            discards=self.contract is SchemaContract.DISCARD_VALUE,
            leaves_out=self.contract is SchemaContract.DISCARD_ROW,
            names_messages=True,
            undecided=self.undecided,
            hashed=self.hashed if self._content_digests else (),
        )
        return self._loads.writer(files)

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Adopt one transaction, by the table of `decide`; see the protocol.

        All rows are moved at once. Where the table refuses one of them, and messages may be rejected, they are moved again
        by halves, in another transaction.
        """
        if Misfits.of(transaction.files):
            return self._commit_some(transaction, transaction.rejects_max, checked=checked)
        try:
            return self._commit_all(transaction, checked=checked)
        except SinkRefused as refusal:
            if transaction.rejects_max is None or not is_about_rows(refusal):
                raise
        return self._commit_some(transaction, transaction.rejects_max, checked=checked)

    def _commit_all(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        where = self._where(transaction)
        with self.link.transaction(where) as connection:
            table = self._begin(connection, transaction, where, checked=checked)
            if table is None:
                return self._held(connection, transaction)
            began_empty = transaction.previous is None and is_empty(connection, table.oid, self.name)
            rows = self._rows(connection, table, wire_schema(table, self.input), where)
            taken = self._move_rows(rows, connection, table, transaction, where)
            dropped = transaction.rows - taken
            superseded = transaction.superseded + rows.superseded
            content = content_of_files(transaction.files)
            said = self._said(connection, table, content, checked=checked, dropped=dropped, began_empty=began_empty)
            self.guard.add_evidence(connection, transaction, taken, again=not checked, dropped=dropped, content=said)
            self.guard.add_rejected(connection, transaction.txid, (), again=not checked)
            self.guard.add_superseded(connection, transaction.txid, superseded, again=not checked)
            changed = self.changed(connection, transaction.txid)
            self.require_same(connection, table, where)
            require_durable(connection, table.oid, where)
            failpoint("postgres.after_rows")
        failpoint("postgres.after_commit")
        return CommitResult(CommitOutcome.APPLIED, superseded, dropped=dropped, changed=changed)

    def commit_without_refused(self, transaction: PreparedTransaction) -> CommitResult:
        """Commit one transaction without the messages whose rows the table refuses; see `SupportsSkipRows`.

        Raises:
            SinkRefused: the table refuses more than rows, or too many of them; nothing was written.
            Otherwise as `commit`.
        """
        return self._commit_some(transaction, REFUSED_MAX, checked=True, row_by_row=True)

    def _commit_some(
        self, transaction: PreparedTransaction, most: int | None, *, checked: bool, row_by_row: bool = False
    ) -> CommitResult:
        """Commit without the messages whose rows the table refuses; these rows are kept in the table `reject`."""
        where, guard = self._where(transaction), self.guard
        with self.link.transaction(where) as connection:
            bookkeeping.make_rejects(connection)
            table = self._begin(connection, transaction, where, checked=checked)
            if table is None:
                return self._held(connection, transaction)
            # All rows are read from the files, those that a task loaded too.
            require_files(self._staging, transaction.files, where=where, digests=True)
            schema = wire_schema(table, self.input)
            began_empty = transaction.previous is None and is_empty(connection, table.oid, self.name)
            rejects = Rejects(
                *(self._staging, transaction, most, where, self.input, schema.names),
                undecided=kept_otherwise(table, self.input),
                row_by_row=row_by_row,
            )
            may_drop = bool(triggers_that_drop(connection, table.oid, self.input))
            moved = move_without_rejects(
                connection,
                lambda: self._rows(connection, table, schema, where),
                rejects,
                may_drop=may_drop,
                finds_parents=refers_to_itself(connection, table.oid),
            )
            refused, back = rejects.rows(), rejects.reinstated
            superseded = transaction.superseded - back + moved.superseded
            _require_all(moved.sent + len(refused), transaction.rows + back, transaction.rows + back, where)
            content = self._content_of(transaction, rejects)
            said = self._said(
                connection, table, content, checked=checked, dropped=moved.dropped, began_empty=began_empty
            )
            guard.add_evidence(
                connection, transaction, moved.taken, again=not checked, dropped=moved.dropped, content=said
            )
            guard.add_rejected(connection, transaction.txid, refused, again=not checked)
            guard.add_superseded(connection, transaction.txid, superseded, back, again=not checked)
            changed = self.changed(connection, transaction.txid)
            self.require_same(connection, table, where)
            require_durable(connection, table.oid, where)
            failpoint("postgres.after_rejects")
        failpoint("postgres.after_commit")
        return CommitResult(CommitOutcome.APPLIED, superseded, refused, moved.dropped, changed)

    def _said(
        self,
        connection: psycopg.Connection,
        table: Table,
        content: Content | None,
        *,
        checked: bool,
        dropped: int,
        began_empty: bool,
    ) -> str | None:
        """What the evidence says of the rows' content, for a later comparison with the table; None: nothing."""
        if self.input.mode is not SinkMode.APPEND:
            return unknown_content("rows are overwritten by key", began_empty=True) if began_empty else None
        if not checked:
            return unknown_content("under its guarantee, a row may be in the table more than once, or not at all")
        if dropped:
            return unknown_content(f"triggers of the table dropped {dropped} of its rows", began_empty=began_empty)
        changing = triggers_that_change(connection, table.oid)
        if changing:
            return unknown_content(
                f"trigger {changing[0]!r} of the table may have changed its rows", began_empty=began_empty
            )
        return None if content is None else known_content(content, began_empty=began_empty)

    def _content_of(self, transaction: PreparedTransaction, rejects: Rejects) -> Content | None:
        """The content of the rows that are not rejected."""
        prepared = content_of_files(transaction.files)
        if prepared is None or self.input.mode is not SinkMode.APPEND:
            return None
        total = ContentSum(prepared.kinds)
        for part in rejects.kept():
            total.add(part.rows)
        return total.content

    def _held(self, connection: psycopg.Connection, transaction: PreparedTransaction) -> CommitResult:
        """The result for a transaction that the sink holds, with what was refused and dropped then."""
        dropped, refused = self.guard.dropped(connection, transaction.txid), tuple[RefusedRow, ...]()
        if bookkeeping.has_rejects(connection):
            refused = self.guard.rejected(connection, transaction.txid)
        superseded = self.guard.superseded(connection, transaction.txid)
        changed = self.changed(connection, transaction.txid)
        return CommitResult(CommitOutcome.ALREADY_HELD, superseded, refused, dropped, changed)

    def compare_rows(self, read: ReadRecord, first: int, last: int | None, progress: Progress) -> Comparison:
        """See `SupportsCompareRows`."""
        return compare(self, self.database, read, (first, last), progress)

    def sweep(self, is_dead: IsDead) -> int:
        """Remove prepared files and staging tables of dead attempts."""
        swept = sweep_folder(self._staging, self.identity.incarnation, is_dead)
        with self.link.transaction() as connection:
            return swept + self._loads.sweep(connection, is_dead)

    def unreached(self, files: Sequence[PreparedFile]) -> Sequence[str]:
        """Of the prepared files in the staging folder."""
        return unreached(self._staging, files)

    def finished(self, transaction: PreparedTransaction) -> None:
        """The rows are in the table: the files may go, and what tasks of other attempts loaded."""
        remove_staged(self._staging, self.identity.incarnation, transaction.txid)
        if self._loads.load is not None:
            with self.link.transaction() as connection:
                self._loads.sweep(connection, lambda txid, _attempt, _file: txid == transaction.txid)

    def _where(self, transaction: PreparedTransaction) -> str:
        return f"{self.where}, txid {transaction.txid}"

    def _begin(
        self, connection: psycopg.Connection, transaction: PreparedTransaction, where: str, *, checked: bool
    ) -> Table | None:
        """Lock the fence and move the guard. Returns the table to write to; None where the sink holds the transaction."""
        if self.begin(connection, transaction, checked=checked) is Decision.SKIP:
            return None
        self.evolve(connection, transaction.txid)
        table = self.checked_table(connection, where)
        # Those that a task loaded were compared when it did.
        staged, others = self._loads.split(connection, transaction.files, table, self.input)
        require_files(self._staging, staged, where=where)
        require_files(self._staging, others, where=where, digests=True)
        require_durable(connection, table.oid, where)
        self.guard.move(connection, transaction, checked=checked)
        failpoint("postgres.after_guard")
        return table

    def _move_rows(
        self,
        rows: AppendedRows | RowsByKey,
        connection: psycopg.Connection,
        table: Table,
        transaction: PreparedTransaction,
        where: str,
    ) -> int:
        """Move the prepared rows into the table. Returns how many it took: all, but for those that its triggers drop.

        Raises:
            SinkRefused: rows are missing that no trigger can have dropped.
        """
        if not transaction.files:
            _require_all(0, 0, transaction.rows, where)
            return 0
        if self.input.is_by_key:
            keys = self.input.keys
            read = partial(prepared_batches, self._staging, transaction.files, keys)
            require_unique_keys(read, transaction.rows, keys, where)
        staged, others = self._loads.split(connection, transaction.files, table, self.input)
        taken, sent = self._loads.move(connection, table, staged, self.input.schema.names)

        def counted() -> Generator[pa.RecordBatch]:
            nonlocal sent
            for batch in prepared_batches(self._staging, others, self.input.schema.names):
                before, sent = sent, sent + batch.num_rows
                yield batch
                if before // PROGRESS_ROWS < sent // PROGRESS_ROWS:
                    log.info("%s: %s of %s rows sent", where, f"{sent:,}", f"{transaction.rows:,}")

        if others:
            taken += rows.put(counted())
        # Met here, an error of a deferred constraint names the constraint; at the COMMIT the outcome would be in question.
        connection.execute("set constraints all immediate")
        may_drop = taken < sent and bool(triggers_that_drop(connection, table.oid, self.input))
        _require_all(sent if may_drop else taken, sent, transaction.rows, where)
        if may_drop:
            log.info("%s: the table's triggers dropped %d of %d rows", where, sent - taken, sent)
        return taken

    def _rows(
        self, connection: psycopg.Connection, table: Table, schema: pa.Schema, where: str
    ) -> AppendedRows | RowsByKey:
        """What moves rows into the table."""
        if self.input.is_by_key:
            may_drop = bool(triggers_that_drop(connection, table.oid, self.input))
            return RowsByKey(
                *(connection, table.name, self.input, schema, where),
                may_drop=may_drop,
                undecided=kept_otherwise(table, self.input),
            )
        if has_row_security(connection, table.oid):
            return AppendedRows(lambda batches: insert_rows(connection, table.name, schema, batches, where))
        return AppendedRows(lambda batches: copy_rows(connection, table.name.identifier, schema, batches, where))


def _require_all(taken: int, sent: int, prepared: int, where: str) -> None:
    if not taken == sent == prepared:
        raise SinkRefused(
            f"{where}: {taken} rows reached the table instead of the {prepared} prepared ({sent} were read from the "
            "prepared files), and no trigger of the table drops rows; nothing was written",
            moved=taken,
            sent=sent,
            prepared=prepared,
        )
