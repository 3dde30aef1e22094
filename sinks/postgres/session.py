"""A Postgres sink opened by one driver: fence, guard, rows and evidence in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator

import psycopg
import pyarrow as pa

from stormproof.core.errors import SinkRefused
from stormproof.core.failpoint import failpoint
from stormproof.core.postgres.database import Database
from stormproof.core.sink import SinkInput
from stormproof.sinks.abilities import RefusedRow
from stormproof.sinks.folding import require_unique_keys
from stormproof.sinks.postgres import bookkeeping
from stormproof.sinks.postgres.durable import require_durable
from stormproof.sinks.postgres.hold import TableHold
from stormproof.sinks.postgres.row_by_row import move_row_by_row
from stormproof.sinks.postgres.rows import RowsByKey, copy_rows
from stormproof.sinks.postgres.table import Table, TableName, wire_schema
from stormproof.sinks.protocol import (
    CommitOutcome,
    Decision,
    EvidenceReport,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkSession,
)
from stormproof.sinks.staging import FileWriter, IsDead, prepared_batches, remove_staged, require_files, sweep_folder


class PostgresSession(SinkSession):
    """One driver's side of a Postgres table. `epoch` None: for reading only."""

    def __init__(
        self,
        database: Database,
        name: TableName,
        *,
        staging: str,
        identity: SinkIdentity,
        input_: SinkInput,
        epoch: int | None,
    ) -> None:
        self._hold = TableHold(database, name, identity, input_, epoch)
        self._input = input_
        self._staging = staging

    @property
    def identity(self) -> SinkIdentity:
        """Under what name it keeps its evidence."""
        return self._hold.identity

    @property
    def table_id(self) -> str:
        """Server, database and oid: another after DROP and CREATE, and after dump and restore."""
        return self._hold.table_id

    def writer(self) -> FileWriter:
        """Parquet files in the staging folder."""
        return FileWriter(self.identity.sink, self._staging, self._hold.limits)

    def take_over(self, *, create: bool) -> None:
        """Fence older epochs out, make what is missing, and check the table; see `TableHold`."""
        self._hold.take_over(create=create)

    def claim(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Have a guard row without a txid speak of the table; see the protocol."""
        return self._hold.claim(accepted)

    def release(self) -> bool:
        """Remove that row again, if no txid is in it."""
        return self._hold.release()

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed here, by their guards."""
        return self._hold.other_incarnations()

    def held(self) -> Held | None:
        """The last transaction by the guard row, read afresh; see `TableHold`."""
        return self._hold.held()

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """The sink's own evidence rows, and whether guard and table agree with them: all of one instant."""
        return self._hold.evidence(first, last)

    def count_rows(self, limit: int) -> int:
        """The rows that are visible now."""
        return self._hold.count_rows(limit)

    def take_table(self, last: PreparedTransaction | None) -> None:
        """Have the guard speak of this table and `last`."""
        self._hold.take_table(last)

    def close(self) -> None:
        """Let the connection go."""
        self._hold.close()

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitOutcome:
        """Adopt one transaction, by the table of `decide`; see the protocol."""
        where = self._where(transaction)
        with self._hold.link.transaction(where) as connection:
            table = self._begin(connection, transaction, where, checked=checked)
            if table is None:
                return CommitOutcome.ALREADY_HELD
            self._hold.guard.add_evidence(connection, transaction, transaction.rows, again=not checked)
            moved = self._move_rows(connection, wire_schema(table, self._input), transaction, where)
            if moved != transaction.rows:
                raise SinkRefused(
                    f"{where}: {moved} rows reached the table instead of the {transaction.rows} prepared; nothing was "
                    "written; look for a trigger or rule that drops rows",
                    moved=moved,
                    prepared=transaction.rows,
                )
            require_durable(connection, table.oid, where)
            failpoint("postgres.after_rows")
        failpoint("postgres.after_commit")
        return CommitOutcome.APPLIED

    def commit_without_refused(self, transaction: PreparedTransaction) -> list[RefusedRow]:
        """Adopt one transaction but for the rows that the table refuses, which are given up and kept in `reject`.

        Where the sink holds the transaction already, the rows that were given up then.

        Raises:
            SinkRefused: the table refuses more than rows, or too many of them; nothing was written.
            Else as `commit`.
        """
        where, guard = self._where(transaction), self._hold.guard
        with self._hold.link.transaction(where) as connection:
            bookkeeping.make_rejects(connection)
            table = self._begin(connection, transaction, where, checked=True)
            if table is None:
                return guard.rejected(connection, transaction.txid)
            schema = wire_schema(table, self._input)
            move = self._mover(connection, schema, where)
            moved, refused = move_row_by_row(connection, self._numbered(transaction, schema), move, where)
            if moved + len(refused) != transaction.rows:
                raise SinkRefused(f"{where}: {moved} rows and {len(refused)} refused ones are not {transaction.rows}")
            guard.add_evidence(connection, transaction, moved, again=False)
            guard.add_rejected(connection, transaction.txid, refused)
            require_durable(connection, table.oid, where)
        return refused

    def sweep(self, is_dead: IsDead) -> int:
        """Remove prepared files of dead attempts."""
        return sweep_folder(self._staging, self.identity.incarnation, is_dead)

    def finished(self, transaction: PreparedTransaction) -> None:
        """The rows are in the table: the files may go."""
        remove_staged(self._staging, self.identity.incarnation, transaction.txid, transaction.files)

    def _where(self, transaction: PreparedTransaction) -> str:
        return f"{self._hold.where}, txid {transaction.txid}"

    def _begin(
        self, connection: psycopg.Connection, transaction: PreparedTransaction, where: str, *, checked: bool
    ) -> Table | None:
        """Take the fence and move the guard; the table to write to, or None where the sink holds the transaction."""
        if self._hold.begin(connection, transaction, checked=checked) is Decision.SKIP:
            return None
        require_files(self._staging, transaction.files, where=where, digests=True)
        table = self._hold.checked_table(connection, where)
        require_durable(connection, table.oid, where)
        self._hold.guard.move(connection, transaction, checked=checked)
        failpoint("postgres.after_guard")
        return table

    def _numbered(
        self, transaction: PreparedTransaction, schema: pa.Schema
    ) -> Generator[tuple[str, int, pa.RecordBatch]]:
        """The prepared rows, with their file and the number of the first one there."""
        for file in sorted(transaction.files, key=lambda f: f.path):
            at = 0
            for batch in prepared_batches(self._staging, [file], schema.names):
                yield file.path, at, batch
                at += batch.num_rows

    def _move_rows(
        self, connection: psycopg.Connection, schema: pa.Schema, transaction: PreparedTransaction, where: str
    ) -> int:
        if not transaction.files:
            return 0
        batches = prepared_batches(self._staging, transaction.files, schema.names)
        if not self._input.is_by_key:
            return copy_rows(connection, self._hold.name.identifier, schema, batches, where)
        keys = self._input.keys
        require_unique_keys(prepared_batches(self._staging, transaction.files, keys), keys, where)
        rows = RowsByKey(connection, self._hold.name, self._input, schema, where)
        copied = rows.add(batches)
        return copied if copied != transaction.rows else rows.merge()

    def _mover(self, connection: psycopg.Connection, schema: pa.Schema, where: str) -> Callable[[pa.RecordBatch], int]:
        """Moves some rows into the table; returns how many it took."""
        if not self._input.is_by_key:
            return lambda rows: copy_rows(connection, self._hold.name.identifier, schema, [rows], where)
        by_key = RowsByKey(connection, self._hold.name, self._input, schema, where)

        def merge(rows: pa.RecordBatch) -> int:
            by_key.add([rows])
            return by_key.merge()

        return merge
