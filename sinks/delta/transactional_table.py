"""One driver's Delta table: the commit under the check of the table's log, its claim, what power losses took."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError

from stormproof.core.base.errors import Fenced, PositionMismatch, SinkRefused, StoreUnavailable, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import (
    ALREADY_HELD,
    APPLIED,
    CommitDecision,
    CommitResult,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkProblem,
    decide,
)
from stormproof.sinks.contract.row_rule import BY_DELTA_RS, SchemaContract
from stormproof.sinks.delta import power_loss, schema_changes, versions
from stormproof.sinks.delta.evidence import LogPosition, find_commit, lost_files, require_not_given_up, totals_with
from stormproof.sinks.delta.features import AskedCommitter, Committer
from stormproof.sinks.delta.judge import Judge, LeftOut, may_reject, refused_rows
from stormproof.sinks.delta.log import COMPACTS, Label, OurCommit, Undo, commit_metadata, live_files, undo_metadata
from stormproof.sinks.delta.opening import Claims, Committers
from stormproof.sinks.delta.power_loss import put_torn_aside
from stormproof.sinks.delta.rewrite import COMPACTED
from stormproof.sinks.delta.spark import SparkCommitter
from stormproof.sinks.delta.statistics import WITH_STATISTICS, by_delta_rs, by_spark, narrowed
from stormproof.sinks.delta.table import TableRecord, column_limits, require_more_than_partitions, require_table
from stormproof.sinks.delta.versions import OTHERS_CHANGED, TableAhead, TableHead
from stormproof.sinks.prepare.staging import Misfits
from stormproof.sinks.rows.content import Content

log = logging.getLogger("stormproof.sink")

CONFLICT_TRIES_MAX: Final = 5
"""How often a commit is tried before it is an outage: a MERGE loses against each commit that comes before its own."""


class TransactionalTable(TableRecord):
    """What a Delta sink and a map in a Delta table have in common. The rows that a transaction writes are their own: a sink
    has them in prepared files, a map in memory.

    `reading`: for reading only, so a table that cannot be written to is not refused. `committer` is who shall write.
    """

    def __init__(
        self,
        path: str,
        *,
        identity: SinkIdentity,
        input_: SinkInput,
        epoch: int,
        reading: bool,
        contract: SchemaContract = SchemaContract.FREEZE,
        committer: AskedCommitter = "auto",
    ) -> None:
        super().__init__(path, identity, input_)
        self.contract = contract
        self._asked: AskedCommitter = committer
        self._epoch = epoch
        self.committers = Committers(self.log, self.where, input_, committer)
        self._claims = Claims(self.log, self._newest, identity, self.where, self.committers)
        table = versions.load_table(path)
        if not reading and self.require_fit(table) is Committer.SPARK:
            self.committers.spark.start()
            self._make_readable(table)
        self.limits = column_limits(table, input_, path)
        self._table_id = str(table.metadata().id)

    def require_fit(self, table: DeltaTable) -> Committer:
        """Refuse a table that cannot hold the rows, but for columns that it is going to get; returns who is to write.

        Raises:
            SinkRefused: names the column, or the feature, and what to do.
        """
        evolves = self.contract is SchemaContract.EVOLVE
        known = schema_changes.known_part(table, self.input) if evolves else self.input
        committer = require_table(table, known, self.where, self._asked)
        if committer is Committer.SPARK:
            self._require_frozen(self.contract)
            return self.committers.require_served(committer)
        require_more_than_partitions(table, self.input, self.where)
        if evolves:
            schema_changes.require_kept(table, self.input, self.log, self.where)
        return committer

    def _make_readable(self, table: DeltaTable) -> None:
        """Have the protocol list the feature of NOT NULL, without which Spark reads no table that has it."""
        if schema_changes.lists_not_null(table):
            return
        with self.committers.alone(Committer.SPARK):
            schema_changes.list_not_null(table, CommitProperties(max_commit_retries=0))
        power_loss.sync_version(self.log, versions.load_table(self.log.table).version())
        log.info("%s: its protocol lists the feature of NOT NULL now, which Spark asks for", self.where)

    # -- the rows of a transaction -------------------------------------------------------------------------------------

    @abstractmethod
    def check_rows(self, table: TableHead, transaction: PreparedTransaction, where: str) -> None:
        """Check that all rows are there, and that the table can hold them.

        Raises:
            SinkRefused: rows are missing or changed, or the table cannot hold them.
        """

    def judge(
        self, table: DeltaTable, transaction: PreparedTransaction, spark: SparkCommitter | None, where: str
    ) -> Judge | None:
        """Who tells which of them the table refuses; None: nobody, and the table takes all or none.

        `spark` is who writes to it; None: delta-rs.
        """
        return None

    def change(self, table: DeltaTable, transaction: PreparedTransaction) -> Content | None:
        """What they add to the content of a table by key, less what they replace in it; None: it is not known."""
        return None

    def put_next(self, table: TableHead, transaction: PreparedTransaction, label: Label) -> bool:
        """Write them in the version behind `table`'s by a log entry of our own; whether that was done: see
        `versions.put_next`. Only rows that are appended, and that the table need not be asked about, are given to it.
        """
        return False

    @abstractmethod
    def put(self, table: DeltaTable, transaction: PreparedTransaction, properties: CommitProperties) -> None:
        """Write them to the table, in one version."""

    def put_by_spark(self, transaction: PreparedTransaction, label: Label) -> None:
        """The same through Spark."""
        raise UsageError(f"{self.where}: its rows are written by delta-rs alone")

    # -- the commit ----------------------------------------------------------------------------------------------------

    def claim(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Put this life's name among the table's properties; see the protocol."""
        return self._claims.put(accepted)

    def release(self) -> bool:
        """Mark that property as released."""
        return self._claims.release()

    def committer(self) -> Committer:
        """Who writes to the table, by its features at its newest version."""
        return self.committers.of(self._newest.head())

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Commit one transaction, by the table of `decide`; see the protocol.

        After a commit that another writer's came before, the table is asked anew what it holds, and the transaction is
        tried again at once, `CONFLICT_TRIES_MAX` times in all.
        """
        for left in reversed(range(CONFLICT_TRIES_MAX)):
            committer = self.committer()
            try:
                with self.committers.alone(committer):
                    return self._commit(transaction, committer, checked=checked)
            except StoreUnavailable as error:
                if not left or not versions.is_conflict(error.__cause__):
                    raise
                log.info("%s; tried again", error)
                self._newest.forget()
        raise AssertionError("unreachable")

    def _commit(
        self, transaction: PreparedTransaction, committer: Committer, *, checked: bool, here: bool = True
    ) -> CommitResult:
        """Commit once; `here`: by a log entry of our own where that is enough, which needs no loaded table."""
        where = f"{self.where}, txid {transaction.txid}"
        head = self._newest.head()
        whole: DeltaTable | None = None
        if not (here and self._is_plain(head, committer, transaction)):
            whole = self._newest.load() if isinstance(head, TableAhead) else head
        table = head if whole is None else whole
        position = self.position(table, same_table=checked)
        if (
            checked
            and decide(self.identity, transaction, self._known(whole, transaction, position)) is CommitDecision.SKIP
        ):
            self._require_live(position)
            commit = None if position is None else position.commit
            self._sync(commit, after=None)
            return ALREADY_HELD if commit is None else self._result(ALREADY_HELD, commit)
        if position is not None and position.commit is not None and position.commit.epoch > self._epoch:
            raise Fenced(
                f"{where}: epoch {position.commit.epoch} has committed here, this is epoch {self._epoch}",
                epoch=self._epoch,
            )
        require_not_given_up(self.log, table, self._application, position, transaction.txid, where)
        if self.committers.of(table) is not committer:
            raise StoreUnavailable(
                f"{where}: the table's features changed meanwhile, and nothing was written; try again"
            )
        if whole is not None:
            as_found = whole.version()
            table = whole = self.narrowed(self._evolved(whole, transaction, where), committer, where)
            if whole.version() != as_found and self.position(whole, same_table=checked) != position:
                # Another driver has committed meanwhile.
                return self._commit(transaction, committer, checked=checked, here=here)
        self.check_rows(table, transaction, where)
        spark = self.committers.spark if committer is Committer.SPARK else None
        judge = None if whole is None else self.judge(whole, transaction, spark, where)
        left_out = None if judge is None else judge.refused()
        failpoint("delta.after_check")
        read_version = table.version()
        if whole is not None:
            commit, problem = self._put(committer, whole, transaction, left_out, position, checked=checked)
        elif (put := self._put_here(table, transaction, position, checked=checked)) is not None:
            commit, problem = put
        else:
            return self._commit(transaction, committer, checked=checked, here=False)
        if commit is None:
            if problem is None and self._was_cleaned(transaction, after=read_version):
                failpoint("delta.after_sync")
                return APPLIED if left_out is None else replace(APPLIED, refused=left_out.refused)
            refusal = self._refusal(problem, where)
            if isinstance(refusal, StoreUnavailable) or whole is None:
                raise refusal from problem
            left_out = None if judge is None else judge.refused_since()
            if left_out is not None:
                commit, problem = self._put(committer, whole, transaction, left_out, position, checked=checked)
            if commit is None:
                hint = "" if judge is None else judge.untold()
                raise self._refusal(problem, where, hint) from problem
        synced = read_version if whole is None else _last_of_ours(position, read_version)
        self._sync(commit, after=min(synced, commit.version - 1))
        self._clean(commit)
        failpoint("delta.after_sync")
        # Another driver may have committed the same transaction meanwhile.
        return self._result(APPLIED if commit.epoch == self._epoch else ALREADY_HELD, commit)

    def _is_plain(self, table: TableHead, committer: Committer, transaction: PreparedTransaction) -> bool:
        """Whether a transaction only adds files, all of whose rows the table takes unasked."""
        return (
            committer is Committer.DELTA_RS
            and not self.input.is_by_key
            and self.contract is not SchemaContract.EVOLVE
            and not may_reject(table, self.input)
            and not Misfits.of(transaction.files)
            and versions.is_ours(table, [file.path for file in transaction.files if file.rows])
        )

    def _put_here(
        self, table: TableHead, transaction: PreparedTransaction, position: LogPosition | None, *, checked: bool
    ) -> tuple[OurCommit | None, OSError | ValueError | None] | None:
        """As `_put`, by `put_next`. None: nothing was written, and delta-rs is to write it.

        Raises:
            StoreUnavailable: the entry was written where no reader finds it.
        """
        label = self._label(transaction, position, table, None, None, checked=checked)
        problem: OSError | ValueError | None = None
        put = is_sure = False
        try:
            # Our entry is synced before it gets its name: in a power loss it must not outlive a version before it, and with
            # no commit of ours before, not the one that was read.
            power_loss.sync_versions(self.log, _last_of_ours(position, table.version() - 1) + 1, table.version())
            put = self.put_next(table, transaction, label)
            is_sure = put and self._newest.is_as_seen(table)
        except (OSError, ValueError) as error:
            problem = error
        if put:
            failpoint("delta.after_log_entry")
        # Where the name was taken, it may be by this very entry, whose answer was lost or came late.
        commit = find_commit(self.log, self._application, transaction, after=table.version())
        if is_sure and commit is not None and commit.version == table.version() + 1:
            self._newest.follow(table, label)
        elif put:
            self._newest.forget()
        if commit is not None and not is_sure:
            self._require_reached(label)
        return (commit, problem) if put or problem is not None or commit is not None else None

    def _require_reached(self, label: Label) -> None:
        """Refuse a log entry that no reader reaches, since a clean-up had removed the one that was of its version.

        Raises:
            StoreUnavailable: it is one.
        """
        self._newest.forget()
        reached = self._newest.load().transaction_version(label.application)
        if reached is None or reached < label.version:
            raise StoreUnavailable(
                f"{self.where}: the table's log was cleaned up meanwhile, and the entry that was written is no part of it; "
                "the batch is committed again",
                identifier=reached,
            )

    def _put(
        self,
        committer: Committer,
        table: DeltaTable,
        transaction: PreparedTransaction,
        left_out: LeftOut | None,
        position: LogPosition | None,
        *,
        checked: bool,
    ) -> tuple[OurCommit | None, DeltaError | OSError | ValueError | None]:
        """Write the rows but those left out. Returns what the log has of that, and the error of the write."""
        read_version = table.version()
        problem: DeltaError | OSError | ValueError | None = None
        try:
            with versions.panics_as_errors():
                put = transaction if left_out is None else left_out.put
                change = self.change(table, put) if committer is Committer.DELTA_RS else None
                label = self._label(transaction, position, table, left_out, change, checked=checked)
                if committer is Committer.SPARK:
                    self.put_by_spark(put, label)
                else:
                    self.put(table, put, label.for_delta_rs())
        except (DeltaError, OSError, ValueError) as error:
            problem = error
        if problem is None:
            failpoint("delta.after_log_entry")
        # Whatever the answer was, only the log says whether the entry is there, and in which version.
        return find_commit(self.log, self._application, transaction, after=read_version), problem

    def _result(self, outcome: CommitResult, commit: OurCommit) -> CommitResult:
        changed: tuple[str, ...] = ()
        if self.contract is SchemaContract.EVOLVE:
            changed = schema_changes.changes_of(self.log, self._application, commit.txid, before=commit.version)
        return replace(
            outcome,
            superseded=commit.superseded,
            refused=refused_rows(commit.refused),
            changed=changed,
            version=commit.version,
            at=commit.at,
        )

    def _require_frozen(self, contract: SchemaContract) -> None:
        if contract in BY_DELTA_RS:
            instead = "add the columns with ALTER TABLE, and use" if contract is SchemaContract.EVOLVE else "use"
            raise SinkRefused(
                f"{self.where}: Spark commits to this table, and schema_contract={contract.value!r} is served by delta-rs "
                f"alone; {instead} schema_contract='freeze'"
            )

    def _evolved(self, table: DeltaTable, transaction: PreparedTransaction, where: str) -> DeltaTable:
        """The table with the columns that this transaction's rows have, where the contract lets it have them."""
        if self.contract is not SchemaContract.EVOLVE:
            return table
        try:
            with versions.panics_as_errors():
                if not schema_changes.add_columns(table, self.input, self._application, transaction.txid):
                    return table
        except (DeltaError, OSError) as error:
            raise StoreUnavailable(
                f"{where}: the table's columns cannot be changed: {versions.shown(error)}"
            ) from error
        finally:
            self._newest.forget()
        return self._newest.load()

    def narrowed(self, table: DeltaTable, committer: Committer, where: str) -> DeltaTable:
        """The table without bounds of the columns of which this committer takes some that mislead; see `bounds`.

        An append of ours by delta-rs brings bounds of its own, which are right.

        Raises:
            StoreUnavailable: the table's property cannot be set.
        """
        if committer is Committer.DELTA_RS and not self.input.is_by_key:
            return table
        doubtful = by_spark(self.input.keys) if committer is Committer.SPARK else by_delta_rs
        schema, metadata = pa.schema(table.schema().to_arrow()), table.metadata()
        columns = narrowed(schema, metadata.partition_columns, metadata.configuration, doubtful)
        if columns is None:
            return table
        try:
            self._claims.set_property(table, WITH_STATISTICS, columns)
        except FileExistsError as error:
            raise StoreUnavailable(f"{where}: {OTHERS_CHANGED}") from OSError(f"{OTHERS_CHANGED}: {error}")
        except (DeltaError, OSError, ValueError) as error:
            raise StoreUnavailable(f"{where}: {WITH_STATISTICS} cannot be set: {versions.shown(error)}") from error
        log.info("%s: %s is %r now: by other columns' bounds rows could be missed", where, WITH_STATISTICS, columns)
        return self._newest.load()

    def keep_held(self) -> None:
        """Check that the files of the last commit are there, and sync it."""
        position = self.position(self._newest.load(), same_table=True)
        self._require_live(position)
        self._sync(None if position is None else position.commit, after=None)

    def restore_lost(self, transaction: PreparedTransaction) -> str | None:
        """Undo a fold whose commit is the table's newest version and lost files; see the protocol."""
        where = f"{self.where}, txid {transaction.txid}"
        if not self.input.is_by_key and self.has_added(transaction):
            return None  # its files are the prepared ones: they must be put back
        put_torn_aside(self.log, where)
        table = self._newest.load()
        position = self.position(table, same_table=True)
        if position is None or position.commit is None or position.held != Held(transaction.txid, transaction.digest):
            return None
        lost = self._lost_of(position.commit)
        if not lost:
            return None
        version, newest = position.commit.version, table.version()
        if version != newest:
            raise SinkRefused(
                f"{where}: version {version} lost {lost[0]}, and versions up to {newest} came after it: they would be taken "
                f"back, too. Put the file back, or RESTORE the table to version {version - 1} and write the later "
                "versions' rows again; then retry",
                problem=SinkProblem.FILE_LOST,
                files=list(lost),
            )
        self.check_rows(table, transaction, where)
        self.restore_before(table, version, transaction.previous, where)
        return (
            f"version {version} had lost {'; '.join(lost[:5])}; the table is as in version {version - 1} again, and the "
            "batch is merged from its prepared files"
        )

    def restore_before(self, table: DeltaTable, version: int, txid: int | None, where: str) -> None:
        """Set the table, which is at `version`, back to the one before, which holds `txid` for this sink; and sync that.

        Raises:
            StoreUnavailable: it may pass, such as a store that is away.
            SinkRefused: the version before cannot be restored.
        """
        undo = undo_metadata(self._application, Undo(version, txid))
        committer = self.committer()
        try:
            with self.committers.alone(committer):
                self.committers.restore(committer, table, version - 1, undo)
        except (DeltaError, OSError, ValueError) as error:
            kind = StoreUnavailable if versions.may_pass(error) else SinkRefused
            raise kind(f"{where}: version {version - 1} cannot be restored: {versions.shown(error)}") from error
        power_loss.sync_version(self.log, self._newest.load().version())

    def take_table(self, last: PreparedTransaction | None) -> None:
        """Where the log does not hold `last`, or a RESTORE took its rows back, write its identifier into the log, with those
        rows that are left.
        """
        position = self.position(self._newest.load(), same_table=False)
        ledger = None if last is None else last.txid
        if position is not None and (ledger is None or position.txid > ledger):
            raise PositionMismatch(
                f"{self.where}: the table holds txid {position.txid}, the ledger says {ledger}; inspect with: stormproof "
                f"audit verify {self.identity.topology}",
                held=position.txid,
                ledger=ledger,
            )
        if last is not None and (position is None or position.txid < last.txid or position.restored is not None):
            self.commit(last, checked=False)

    def _label(
        self,
        transaction: PreparedTransaction,
        position: LogPosition | None,
        table: TableHead,
        left_out: LeftOut | None,
        change: Content | None,
        *,
        checked: bool,
    ) -> Label:
        # An unchecked commit may come late; the identifier never goes back.
        version = transaction.txid if checked or position is None else max(position.txid, transaction.txid)
        metadata = commit_metadata(self._application, transaction, self._epoch, checked=checked)
        metadata |= {} if left_out is None else left_out.metadata()
        if checked and self.input.is_by_key:
            put = transaction if left_out is None else left_out.put
            metadata |= totals_with(self.log, table, position, put, self.input, self._application, change)
        return Label(self._application, version, metadata, known=table.transaction_version(self._application))

    def _known(
        self, table: DeltaTable | None, transaction: PreparedTransaction, position: LogPosition | None
    ) -> Held | None:
        """What the table holds, also where a clean-up has removed the log entry that says it.

        The identifier and the list of files are then in the checkpoint. No two prepared files have one name: where all of
        this transaction's files are the table's, it holds this very transaction. For a MERGE this cannot be told.
        """
        if position is None or position.commit is not None:
            return None if position is None else position.held
        if position.txid != transaction.txid or self.input.is_by_key or not transaction.rows:
            return position.held
        live = live_files(self._newest.load() if table is None else table)
        whole = all(live.get(file.path) == file.bytes for file in transaction.files if file.rows)
        return Held(position.txid, transaction.digest if whole else None)

    def _was_cleaned(self, transaction: PreparedTransaction, *, after: int) -> bool:
        """Whether another writer's clean-up removed the entry of a confirmed commit before it was read. The checkpoint that
        replaces the entry is then synced in its place.
        """
        table = self._newest.load()
        version = table.version()
        cleaned = [c for c in self.log.checkpoints() if after < c <= version]
        if table.transaction_version(self._application) != transaction.txid or not cleaned:
            return False
        power_loss.sync_checkpoints(self.log, table, cleaned, live=self.input.is_by_key)
        return True

    def _refusal(self, problem: Exception | None, where: str, hint: str = "") -> SinkRefused | StoreUnavailable:
        """The error for a commit that left no log entry: transient where its cause may pass by itself, else permanent."""
        if problem is None:
            return StoreUnavailable(f"{where}: the commit was answered, and the table's log does not have it")
        if versions.may_pass(problem):
            what = (
                "nothing was written"
                if self.log.files.is_local
                else "the table's log does not have it; should it still arrive, the next try finds it there"
            )
            return StoreUnavailable(
                f"{where}: the commit failed, and {what}: {versions.shown(problem)}", errno=versions.os_error(problem)
            )
        return SinkRefused(f"{where}: the table refuses it, and nothing was written: {versions.shown(problem)}{hint}")

    def _sync(self, commit: OurCommit | None, *, after: int | None) -> None:
        """Make a commit survive a power loss, with all versions since `after`, our last one (None: it is looked up)."""
        if commit is None or not self.log.files.is_local:
            return  # its entry is older than the log's retention; or a store's answer to a PUT was the sync
        if after is None:
            older = self.log.back_from(commit.version - 1)
            after = next((e.version for e in older if e.ours(self._application) is not None), commit.version - 1)
        if self.contract is SchemaContract.EVOLVE:
            # A version that changed the schema is synced with its batch's own, also where that is the first one of ours.
            changing = schema_changes.versions_for(self.log, self._application, commit.txid, before=commit.version)
            after = min([after, *(entry.version - 1 for entry in changing)])
        power_loss.sync_versions(self.log, after + 1, commit.version)

    def _clean(self, commit: OurCommit) -> None:
        """Have delta-rs remove log entries beyond their retention, once the checkpoint that replaces them is synced. Spark
        removes them by itself, and keeps an older checkpoint.
        """
        if self.committer() is Committer.SPARK or self.log.files.stat(self.log.checkpoint_path(commit.version)) is None:
            return
        table = self._newest.load()
        if table.metadata().configuration.get("delta.enableExpiredLogCleanup", "true") != "false":
            table.cleanup_metadata()


def _last_of_ours(position: LogPosition | None, otherwise: int) -> int:
    """The version of our last commit, before which everything is synced."""
    return otherwise if position is None or position.commit is None else position.commit.version


def settle_compactions(ours: TransactionalTable, application: str) -> None:
    """Check the files of compactions, and sync what no commit has synced; take one back that a power loss left without.

    Raises:
        SinkRefused: files are lost, and other versions came after it.
        StoreUnavailable: the table cannot be restored now.
    """
    newest = ours.load().version()
    for version, lost in _compactions(ours, application):
        if not lost:
            power_loss.sync_version(ours.log, version)
        elif version != newest:
            raise _lost(
                f"{ours.where}: version {version}, a compaction, lost {lost[0]}, and versions up to {newest} came after it. "
                "Put the file back. Where there is none, the rows are still in the files that the version replaced, until a "
                f"VACUUM: RESTORE the table to version {version - 1}, and write the later versions' rows again",
                lost,
            )
        else:
            _take_back(ours, version, lost[0])


def _compactions(ours: TransactionalTable, application: str) -> Iterator[tuple[int, list[str]]]:
    """The versions of compactions, each with what is wrong with its live files, newest first: those that may not be synced,
    since they came after our last commit but one, and any further back whose files have gone.
    """
    table, files = ours.load(), ours.log.files
    live = {name for uri in table.file_uris() if (name := uri.rpartition("/")[2]).startswith(COMPACTED)}
    gone = live.difference(files.list(ours.log.table, COMPACTED)) if live else set[str]()
    newest, commits, undone = table.version(), 0, set[int]()
    for entry in ours.log.back_from(newest):
        undo = entry.undo(application)
        if undo is not None:
            undone.add(undo.version)
        commits += entry.ours(application) is not None
        if commits > 1 and not gone:
            return
        whole = ours.log.entry(entry.version) if COMPACTS in entry.info and entry.version not in undone else None
        if whole is not None:
            gone.difference_update(file.path for file in whole.added)
            yield entry.version, lost_files(ours.log, whole, ours.log.tail(newest), decode=commits < 2)
    if gone:
        lost = [f"{os.path.join(ours.log.table, name)} is missing" for name in sorted(gone)]
        raise _lost(
            f"{ours.where}: {lost[0]}, which a compaction wrote whose log entry has gone; put the file back", lost
        )


def require_settled(ours: TransactionalTable, application: str) -> None:
    """Refuse where a compaction lost its files: their rows are in the old ones alone.

    Raises:
        SinkRefused: names the version and the way on.
    """
    for version, lost in _compactions(ours, application):
        if lost:
            raise _lost(
                f"{ours.where}: version {version}, a compaction, lost {lost[0]}, and its rows are only in the files that it "
                "replaced. Start the topology, which takes it back or says what to do",
                lost,
            )


def _lost(text: str, lost: list[str]) -> SinkRefused:
    return SinkRefused(text, problem=SinkProblem.FILE_LOST, files=[*lost])


def _take_back(ours: TransactionalTable, version: int, lost: str) -> None:
    table = ours.load()
    position = ours.position(table, same_table=True)
    ours.restore_before(table, version, None if position is None else position.txid, ours.where)
    log.warning(
        "%s: a power loss took %s, which a compaction wrote in version %d; the table is as in version %d again, with all of "
        "its rows",
        *(ours.where, lost, version, version - 1),
    )
