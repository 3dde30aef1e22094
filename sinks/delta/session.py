"""A Delta sink opened by one driver: its prepared files are added to the table's log, or merged into the table."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

from stormproof.core.base.errors import PositionMismatch, SinkRefused, StoreUnavailable
from stormproof.core.contract.sink import PreparedFile, SinkInput, SinkMode
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import FileState
from stormproof.sinks.contract.protocol import (
    PROBLEM,
    CommitResult,
    Compaction,
    PreparedTransaction,
    Repair,
    SinkIdentity,
    SinkProblem,
    SinkSession,
)
from stormproof.sinks.contract.row_rule import SchemaContract
from stormproof.sinks.delta import power_loss, versions
from stormproof.sinks.delta.compare import compare
from stormproof.sinks.delta.evidence import find_position
from stormproof.sinks.delta.features import AskedCommitter, Committer
from stormproof.sinks.delta.judge import Judge, lacking, may_reject, refused_rows
from stormproof.sinks.delta.log import GIVEN_UP, Label, Undo, undo_metadata
from stormproof.sinks.delta.repair import repair
from stormproof.sinks.delta.spark import SparkCommitter, spark_errors
from stormproof.sinks.delta.table import require_table
from stormproof.sinks.delta.transactional_table import TransactionalTable, settle_compactions
from stormproof.sinks.delta.upkeep import commits_since_compaction, compact, vacuum
from stormproof.sinks.delta.versions import TableHead
from stormproof.sinks.prepare import staging
from stormproof.sinks.prepare.staging import IsDead
from stormproof.sinks.prepare.writer import FileWriter, partition_values
from stormproof.sinks.rows.by_key import fold_tables, put_rows, require_unique_keys
from stormproof.sinks.rows.comparison import Comparison, Progress, ReadRecord
from stormproof.sinks.rows.content import NOTHING, Content, content_of, kinds_of

log = logging.getLogger("stormproof.sink")

KEEP_OUT_TRIES_MAX: Final = 20
"""How often the table is looked at anew because other writers' commits came in between."""

MERGE_ROWS_IN_MEMORY_MAX: Final = 1_000_000
"""A fold of more rows is streamed from its files; the table's files are then not pruned by the range of its keys."""


class DeltaSession(TransactionalTable, SinkSession):
    """One driver's side of a Delta table: its hold on the table, and the folder with the prepared files."""

    def __init__(
        self,
        path: str,
        directory: str,
        *,
        identity: SinkIdentity,
        input_: SinkInput,
        epoch: int,
        reading: bool,
        contract: SchemaContract = SchemaContract.FREEZE,
        committer: AskedCommitter = "auto",
        compact_every: int | None = None,
        content_digests: bool = False,
    ) -> None:
        super().__init__(
            path,
            identity=identity,
            input_=input_,
            epoch=epoch,
            reading=reading,
            contract=contract,
            committer=committer,
        )
        self._directory = directory
        self._opened_ns = time.time_ns()
        self._reading = reading
        self._compact_every = compact_every
        self._content_digests = content_digests
        self._uncompacted: int | None = None
        self._replaced: dict[int, frozenset[str]] = {}
        self._names_groups = False  # until the table refuses a group: most folds need no messages in their files

    def writer(self) -> FileWriter:
        """Parquet files in the table's folder (append) or in the staging folder (fold)."""
        added = not self.input.is_by_key and self.committer() is Committer.DELTA_RS
        partitions = tuple(self.head().metadata().partition_columns) if added else ()
        leaves_out = self.contract is SchemaContract.DISCARD_ROW
        rejects = leaves_out or self._names_groups or may_reject(self.head(), self.input)
        return FileWriter(
            self.identity.sink,
            self._directory,
            self.limits,
            private=not added,
            partitions=partitions,
            input=self.input,
            discards=self.contract is SchemaContract.DISCARD_VALUE,
            leaves_out=leaves_out,
            names_messages=rejects or bool(self.input.keep),  # which tell the first row of a key
            keeps_messages=rejects,
            guarded=not self.input.is_by_key,
            hashed=tuple(self.input.schema.names) if self._content_digests and not self.input.is_by_key else (),
        )

    def keep_out(self, transaction: PreparedTransaction) -> int | None:
        """By a version of the log, which is synced; returns its number. It says that the sink holds what it held before.

        A transaction that was given up may still be on its way: a store may carry out a PUT long after it was asked, and a
        driver that was paused inside its commit goes on when it wakes. Either writes the version behind the one that it had
        read, or, where that is taken, asks what took it. So a version with this application's transaction identifier, and
        nothing else, keeps both out: the PUT finds its name taken, and delta-rs and Spark give up a commit when they find
        another one under their own identifier before it. It names the txid, so that a driver which then looks again does
        not begin anew.

        Raises:
            PositionMismatch: the table holds the transaction.
            SinkRefused: the table cannot be written to.
            StoreUnavailable: the store does not answer, or other writers kept coming first.
        """
        where, application = f"{self.where}, txid {transaction.txid}", self.identity.application_id
        for _ in range(KEEP_OUT_TRIES_MAX):
            committer = self.committer()
            with self.committers.alone(committer):
                table = self.load()
                position = find_position(self.log, table, application)
                held = None if position is None else position.txid
                if held == transaction.txid:
                    raise PositionMismatch(f"{where}: the table holds it; it arrived after all", txid=held)
                read, known = table.version(), table.transaction_version(application)
                # Nothing is in this version: as an undo of itself it says what the table holds from here on.
                metadata = {**undo_metadata(application, Undo(read + 1, held)), GIVEN_UP: str(transaction.txid)}
                label = Label(application, max(known or 0, held or 0), metadata, known=known, retries=0)
                try:
                    with versions.panics_as_errors():
                        self.committers.put_label(committer, table, label)
                except (DeltaError, OSError, ValueError) as error:
                    if not versions.is_conflict(error):
                        kind = StoreUnavailable if versions.may_pass(error) else SinkRefused
                        raise kind(
                            f"{where}: what may still arrive cannot be kept out: {versions.shown(error)}"
                        ) from error
                    continue
                finally:
                    self.close()
                written = (e.version for e in self.log.on_from(read + 1) if e.given_up(application) is not None)
                if (version := next(written, None)) is not None:
                    power_loss.sync_version(self.log, self.load().version())
                    return version
        raise StoreUnavailable(f"{where}: other writers keep coming first, or the store does not answer; try again")

    def check_rows(self, table: TableHead, transaction: PreparedTransaction, where: str) -> None:
        """The files are as prepared, and of such rows and partitions as the table has."""
        if not self.input.is_by_key:
            staging.put_back(self._directory, transaction.files)
        by = require_table(table, self.input, where, self._asked)
        adds = by is Committer.DELTA_RS and not self.input.is_by_key
        if adds:
            self._require_partitions(table, transaction, where)
        states = staging.states_of(self._directory, transaction.files)
        # The driver under which files to add were written need not read them again. Files that are not added are read
        # anyway, and files that outlived their driver may have changed: in both cases their digests are compared.
        digests = not adds or any(state is None or state.modified_ns < self._opened_ns for state in states)
        staging.require_files(self._directory, transaction.files, where=where, digests=digests, states=states)
        counted = sum(file.rows for file in transaction.files)
        if counted != transaction.rows:
            raise SinkRefused(f"{where}: {counted} rows in the prepared files instead of {transaction.rows}")
        if adds and not may_reject(table, self.input):
            self._require_no_nulls(table, transaction, where)
        if self.input.is_by_key:
            read = partial(staging.prepared_batches, self._directory, transaction.files, self.input.keys)
            require_unique_keys(read, transaction.rows, self.input.keys, where)

    def judge(
        self, table: DeltaTable, transaction: PreparedTransaction, spark: SparkCommitter | None, where: str
    ) -> Judge:
        """By the table's rules."""
        return Judge(table, self._directory, transaction, self.input, spark, where)

    def change(self, table: DeltaTable, transaction: PreparedTransaction) -> Content | None:
        """By the rules of an upsert and a fold in memory, from the rows that the table has of these keys."""
        input_ = self.input
        if not input_.is_by_key or input_.lineage is None:
            return None
        if not versions.all_hashable(input_) or transaction.rows > MERGE_ROWS_IN_MEMORY_MAX:
            return None
        if not transaction.rows:
            return NOTHING
        batches = staging.prepared_batches(self._directory, transaction.files, input_.schema.names)
        added = pa.Table.from_batches(list(batches)).cast(input_.schema)
        held, kinds = versions.rows_of_keys(table, added, input_), kinds_of(input_.schema)
        folds = input_.mode is SinkMode.FOLD
        try:
            after = fold_tables(held, added, input_, self.where) if folds else put_rows(held, added, input_)[0]
        except SinkRefused:  # a sum does not fit: the MERGE refuses it, too, and is asked for which groups
            return None
        return content_of(after, kinds) + -content_of(held, kinds)

    def _require_partitions(self, table: TableHead, transaction: PreparedTransaction, where: str) -> None:
        columns = sorted(table.metadata().partition_columns)
        filled = [file for file in transaction.files if file.rows]
        wrong = [file.path for file in filled if sorted(partition_values(file)) != columns]
        if wrong:
            raise SinkRefused(
                f"{where}: the table is partitioned by {', '.join(columns) or 'nothing'}, and {wrong[0]} was written for "
                "other partitions: another table has taken its place since the batch was prepared",
                files=list(wrong),
            )

    def _require_no_nulls(self, table: TableHead, transaction: PreparedTransaction, where: str) -> None:
        for file in transaction.files:
            wrong = lacking(table, file)
            if wrong:
                raise SinkRefused(
                    f"{where}: the table's column {wrong[0]!r} is NOT NULL, and {file.path} has NULL in it: the table was "
                    "changed since the batch was prepared; nothing was written. Let the column take NULL again, then retry "
                    "the txid",
                    column=wrong[0],
                )

    def put_next(self, table: TableHead, transaction: PreparedTransaction, label: Label) -> bool:
        """Add the files."""
        with self._files_there(transaction) as files:
            return versions.put_next(self.log, table, files, label)

    @contextmanager
    def _files_there(self, transaction: PreparedTransaction) -> Generator[list[AddAction]]:
        """Around the commit of the files: up to the log entry a VACUUM may take them, and here they are put back."""
        staging.put_back(self._directory, transaction.files)
        filled = [file for file in transaction.files if file.rows]
        try:
            yield [*map(_add_action, filled, staging.states_of(self._directory, filled))]
        finally:
            staging.put_back(self._directory, transaction.files)

    def put(self, table: DeltaTable, transaction: PreparedTransaction, properties: CommitProperties) -> None:
        """Add the files, or merge their rows."""
        if not self.input.is_by_key:
            with self._files_there(transaction) as files:
                versions.add_files(table, files, properties)
            return
        if transaction.rows == 0:
            versions.add_files(table, [], properties)
            return
        schema = self.input.schema
        batches = staging.prepared_batches(self._directory, transaction.files, schema.names)
        streamed = transaction.rows > MERGE_ROWS_IN_MEMORY_MAX
        rows: pa.Table | pa.RecordBatchReader = (
            pa.RecordBatchReader.from_batches(schema, (batch.cast(schema) for batch in batches))
            if streamed
            else pa.Table.from_batches(list(batches)).cast(schema)
        )
        versions.merge_rows(table, rows, self.input, properties, streamed=streamed)

    def put_by_spark(self, transaction: PreparedTransaction, label: Label) -> None:
        """Have Spark read the files, and append or merge their rows."""
        spark, names = self.committers.spark, self.input.schema.names
        filled = [file for file in transaction.files if file.rows]
        with spark_errors():
            frame = spark.prepared_rows(self._directory, filled, names) if transaction.rows else spark.no_rows(names)
        if self.input.is_by_key and transaction.rows:
            spark.merge(frame, self.input, label)
        else:
            spark.append(frame, label)

    def sweep(self, is_dead: IsDead) -> int:
        """Remove prepared files of dead attempts; never one that the table's log has added."""
        swept = staging.sweep_folder(self._directory, self.identity.incarnation, is_dead, self.added_files)
        if not self.input.is_by_key:
            staging.sweep_guards(self._directory, self.identity.incarnation, is_dead)
        return swept

    def unreached(self, files: Sequence[PreparedFile]) -> Sequence[str]:
        """Of the prepared files, in the table's folder or the staging folder."""
        return staging.unreached(self._directory, files)

    def finished(self, transaction: PreparedTransaction) -> None:
        """The files of a fold may go, and those that Spark has copied; added files are the table's own."""
        copied = self.committer() is Committer.SPARK and not self.has_added(transaction)
        if self.input.is_by_key or copied:
            staging.remove_staged(self._directory, self.identity.incarnation, transaction.txid)
        else:
            self._remove_replaced(transaction)
            for file in transaction.files:
                if not file.rows:  # it named misfits, and no more
                    files_at(self._directory).remove(os.path.join(self._directory, file.path))
        if not self.input.is_by_key:
            staging.remove_guards(self._directory, transaction.files)
        if self._compact_every is not None:
            self._compact_at_times(self._compact_every)

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """See `TransactionalTable.commit`."""
        try:
            result = super().commit(transaction, checked=checked)
        except SinkRefused as error:
            self._names_groups |= error.details.get(PROBLEM) == SinkProblem.MESSAGES_UNKNOWN
            raise
        if not self.input.is_by_key:
            self._replaced[transaction.txid] = frozenset(row.file for row in result.refused)
        return result

    def compare_rows(self, read: ReadRecord, first: int, last: int | None, progress: Progress) -> Comparison:
        """See `SupportsCompareRows`."""
        return compare(self, read, (first, last), progress)

    def _remove_replaced(self, transaction: PreparedTransaction) -> None:
        """Remove the prepared files in whose place others were added, without the rows that the table refused."""
        replaced = self._replaced.pop(transaction.txid, None)
        if replaced is None:
            files, paths = files_at(self._directory), [os.path.join(self._directory, f.path) for f in transaction.files]
            if all(files.stat(staging.guard_of(path)) is None for path in paths):
                return  # an earlier driver has done it, and has removed their second names then
            position = self.position(self.load(), same_table=False)
            commit = None if position is None else position.commit
            if commit is None or commit.txid != transaction.txid:
                return
            replaced = frozenset(row.file for row in refused_rows(commit.refused))
        for path in sorted(replaced - self.added_files()) if replaced else ():
            files_at(self._directory).remove(os.path.join(self._directory, path))

    def compact(self, target_bytes: int | None = None) -> Compaction:
        """See `compaction.compact`."""
        epoch = None if self._reading else self._epoch
        return compact(self, self.identity.application_id, epoch, target_bytes)

    def repair(self, *, dry_run: bool = False) -> Repair:
        """See `repair.repair`."""
        return repair(self, self.identity.application_id, dry_run=dry_run)

    def vacuum(self, retained_hours: int | None = None, *, dry_run: bool = False) -> Sequence[str]:
        """See `vacuum.vacuum`."""
        return vacuum(self, self.identity.application_id, retained_hours, dry_run=dry_run)

    def settle(self) -> None:
        """Put back prepared files that a VACUUM took, and see `settle_compactions`."""
        if not self.input.is_by_key:
            staging.put_back_all(self._directory, self.identity.incarnation)
        settle_compactions(self, self.identity.application_id)

    def _compact_at_times(self, every: int) -> None:
        """Compact after so many commits; those of earlier drivers count. A failure is logged, and costs no batch."""
        if self._uncompacted is None:
            self._uncompacted = commits_since_compaction(self, self.identity.application_id, every)
        else:
            self._uncompacted += 1
        if self._uncompacted < every:
            return
        self._uncompacted = 0
        try:
            done = self.compact()
        except (StoreUnavailable, SinkRefused) as error:
            log.warning("%s; tried again after %d commits", error, every)
            return
        if done.version is not None:
            log.info("%s: %d files are %d now, in version %d", self.where, done.removed, done.added, done.version)


def _add_action(file: PreparedFile, state: FileState | None) -> AddAction:
    if state is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file.path)
    return AddAction(
        file.path,
        file.bytes,
        partition_values(file),
        state.modified_ns // 1_000_000,
        data_change=True,
        stats=file.statistics,
    )
