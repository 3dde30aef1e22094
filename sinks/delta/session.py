"""A Delta sink opened by one driver: the check, the commit, its durability, and its evidence."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from stormproof.core.errors import Fenced, PositionMismatch, SinkRefused, StoreUnavailable
from stormproof.core.failpoint import failpoint
from stormproof.core.sink import SinkInput
from stormproof.sinks.delta import claims
from stormproof.sinks.delta.evidence import evidence_of, live_files, lost_files
from stormproof.sinks.delta.failures import may_pass, os_error, panics_as_errors, shown
from stormproof.sinks.delta.folds import fold_expression, quoted
from stormproof.sinks.delta.log import (
    APPLICATION,
    DeltaLog,
    OurCommit,
    Reach,
    Undo,
    commit_metadata,
    undo_metadata,
)
from stormproof.sinks.delta.merged import MERGED_FILES
from stormproof.sinks.delta.table import column_limits, require_table
from stormproof.sinks.delta.torn import put_torn_aside
from stormproof.sinks.folding import require_unique_keys
from stormproof.sinks.protocol import (
    CommitOutcome,
    Decision,
    EvidenceReport,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkProblem,
    SinkSession,
    decide,
)
from stormproof.sinks.staging import (
    FileWriter,
    IsDead,
    prepared_batches,
    remove_staged,
    require_files,
    sweep_folder,
    sync_file,
    sync_folder,
)

COMMIT_RETRIES_MAX: Final = 15
"""How often delta-rs may try again behind other writers' commits; a commit of our own application ends it at once."""

CLAIM_TRIES_MAX: Final = 20
"""So many changes of others may come between a look at the table's properties and our own change of them."""

MERGE_ROWS_IN_MEMORY_MAX: Final = 1_000_000
"""A larger fold is streamed from its files, without pruning the table's files by the range of its keys."""


HOOKS: Final = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
"""Old log entries go only when the checkpoint that stands for them is synced, which is ours to do."""


@dataclass(frozen=True, slots=True)
class _Position:
    """What the table holds for us: `commit` is None where its log entry is gone. `restored`: the version of a RESTORE that
    took its rows back, and kept the transaction identifier.
    """

    txid: int
    commit: OurCommit | None
    restored: int | None = None

    @property
    def held(self) -> Held:
        return Held(self.txid, None if self.commit is None else self.commit.digest)


class DeltaSession(SinkSession):
    """One driver's side of a Delta table."""

    def __init__(
        self, path: str, directory: str, *, identity: SinkIdentity, input_: SinkInput, epoch: int, reading: bool
    ) -> None:
        self._path = path
        self._directory = directory
        self._identity = identity
        self._input = input_
        self._epoch = epoch
        self._application = identity.application_id
        self._opened_ns = time.time_ns()
        self._log = DeltaLog(path)
        self._where = f"sink {identity.sink!r} ({path})"
        self._table: DeltaTable | None = None
        self._table_entry: tuple[int, ...] | None = None
        table = DeltaTable(path)
        if not reading:
            require_table(table, input_, self._where)
        self._limits = column_limits(table, input_)
        self._table_id = str(table.metadata().id)

    @property
    def identity(self) -> SinkIdentity:
        """Under what name it keeps its evidence."""
        return self._identity

    @property
    def table_id(self) -> str:
        """The table's own id, made when it is created."""
        return self._table_id

    def writer(self) -> FileWriter:
        """Parquet files in the table's folder (append) or in the staging folder (fold)."""
        return FileWriter(self._identity.sink, self._directory, self._limits, private=self._input.is_by_key)

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed here, as far back as the log goes."""
        entries = self._log.back_from(self._load().version())
        found = (self._identity.other_life(str(entry.info.get(APPLICATION))) for entry in entries)
        return tuple(sorted({incarnation for incarnation in found if incarnation is not None}))

    def claim(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Put this life's name among the table's properties; see the protocol."""
        for _ in range(CLAIM_TRIES_MAX):
            table = self._load()
            if claims.is_claimed(table, self._identity):
                self._sync_version(table.version())
                return ()
            strangers = tuple(life for life in claims.lives(table, self._identity) if life not in accepted)
            if strangers:
                return strangers
            self._put_claim(table, claims.CLAIMED)
        raise StoreUnavailable(f"{self._where}: others change the table's properties all the time; tried again")

    def release(self) -> bool:
        """Mark that property as released."""
        for _ in range(CLAIM_TRIES_MAX):
            table = self._load()
            if not claims.is_claimed(table, self._identity):
                return False
            if self._put_claim(table, claims.RELEASED):
                return True
        raise StoreUnavailable(f"{self._where}: others change the table's properties all the time; try again")

    def _put_claim(self, table: DeltaTable, value: str) -> bool:
        """Whether it was put; not so where another writer came first."""
        try:
            with panics_as_errors():
                claims.put(table, self._identity, value)
        except CommitFailedError:
            return False
        except (DeltaError, OSError) as error:
            raise StoreUnavailable(f"{self._where}: the table cannot be claimed: {shown(error)}") from error
        finally:
            self._table = None
        self._sync_version(self._load().version())
        return True

    def held(self) -> Held | None:
        """The last transaction in the table's log, read afresh.

        Raises:
            PositionMismatch: the table was restored to a state from before it, or is another table.
            SinkRefused: the table is gone.
            StoreUnavailable: it cannot be read.
        """
        position = self._position(self._load(), same_table=True)
        return None if position is None else position.held

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitOutcome:
        """Adopt one transaction, by the table of `decide`; see the protocol."""
        where = f"{self._where}, txid {transaction.txid}"
        table = self._load()
        position = self._position(table, same_table=checked)
        if checked and decide(self._identity, transaction, self._known(table, transaction, position)) is Decision.SKIP:
            self._require_live(position)
            self._sync(position.commit if position is not None else None, after=None)
            return CommitOutcome.ALREADY_HELD
        if position is not None and position.commit is not None and position.commit.epoch > self._epoch:
            raise Fenced(
                f"{where}: epoch {position.commit.epoch} has committed here, this is epoch {self._epoch}",
                epoch=self._epoch,
            )
        self._require_prepared(table, transaction, where)
        read_version = table.version()
        properties = self._properties(transaction, position, checked=checked)
        failpoint("delta.after_check")
        problem: DeltaError | OSError | ValueError | None = None
        try:
            with panics_as_errors():
                self._put(table, transaction, properties)
        except (DeltaError, OSError, ValueError) as error:
            problem = error
        failpoint("delta.after_log_entry")
        # Read again, whatever was answered: only the log says whether the entry is there, and in which version.
        commit = self._find(transaction, after=read_version)
        if commit is None:
            if problem is None and self._was_cleaned(transaction, after=read_version):
                failpoint("delta.after_sync")
                return CommitOutcome.APPLIED
            raise self._refusal(problem, where) from problem
        known = read_version if position is None or position.commit is None else position.commit.version
        self._sync(commit, after=min(known, commit.version - 1))
        self._clean(commit)
        failpoint("delta.after_sync")
        return CommitOutcome.APPLIED

    def sweep(self, is_dead: IsDead) -> int:
        """Remove prepared files of dead attempts; never one that the table's log holds."""
        return sweep_folder(self._directory, self._identity.incarnation, is_dead, self._adopted)

    def finished(self, transaction: PreparedTransaction) -> None:
        """A fold's staging files may go; appended files are the table's own."""
        if self._input.is_by_key:
            remove_staged(self._directory, self._identity.incarnation, transaction.txid, transaction.files)

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """What the table's log says of each txid, and what it says happened to its files since."""
        return evidence_of(
            self._log,
            self._load(),
            self._application,
            table_id=self._table_id,
            fold=self._input.is_by_key,
            first=first,
            last=last,
        )

    def keep_held(self) -> None:
        """See that the files of the last commit are there, and sync it."""
        position = self._position(self._load(), same_table=True)
        self._require_live(position)
        self._sync(None if position is None else position.commit, after=None)

    def restore_lost(self, transaction: PreparedTransaction) -> str | None:
        """Take a fold back whose commit is the table's newest version and whose files were lost; see the protocol."""
        where = f"{self._where}, txid {transaction.txid}"
        if not self._input.is_by_key:
            return None  # its files are the prepared ones: they must be put back
        put_torn_aside(self._log, where)
        table = self._load()
        position = self._position(table, same_table=True)
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
        self._require_prepared(table, transaction, where)
        undo = Undo(version, transaction.previous)
        try:
            table.restore(
                version - 1,
                commit_properties=CommitProperties(custom_metadata=undo_metadata(self._application, undo)),
                post_commithook_properties=HOOKS,
            )
        except (DeltaError, OSError, ValueError) as error:
            kind = StoreUnavailable if may_pass(error) else SinkRefused
            raise kind(f"{where}: version {version - 1} cannot be restored: {shown(error)}") from error
        self._sync_version(self._load().version())
        return (
            f"version {version} had lost {'; '.join(lost[:5])}; the table is as in version {version - 1} again, and the "
            "batch is merged from its prepared files"
        )

    def count_rows(self, limit: int) -> int:
        """The rows of the newest version by the statistics of its files; `limit` where a file has none."""
        counted = self._load().get_add_actions(flatten=True).column("num_records").to_pylist()
        return limit if None in counted else min(sum(counted), limit)

    def take_table(self, last: PreparedTransaction | None) -> None:
        """Where the log does not hold `last`, or a RESTORE took it back, put its identifier there, with the rows that there
        are.
        """
        position = self._position(self._load(), same_table=False)
        ledger = None if last is None else last.txid
        if position is not None and (ledger is None or position.txid > ledger):
            raise PositionMismatch(
                f"{self._where}: the table holds txid {position.txid}, the ledger says {ledger}; inspect with: stormproof "
                f"audit verify {self._identity.topology}",
                held=position.txid,
                ledger=ledger,
            )
        if last is not None and (position is None or position.txid < last.txid or position.restored is not None):
            self.commit(last, checked=False)

    def close(self) -> None:
        """Nothing to let go."""
        self._table = None

    def _load(self) -> DeltaTable:
        """The table at its newest version.

        The one that is known is brought up to date where the entry of its version is still the very file that it was,
        since loading anew costs a table's whole state; a log that was cut or made anew is loaded anew. Versions have no
        gaps: where the next one's entry is not there, it is the newest, and delta-rs need not list the log's folder to
        find that out, which takes about a millisecond for each thousand entries in it.
        """
        try:
            if (
                self._table is not None
                and self._table_entry is not None
                and self._entry_state(self._table.version()) == self._table_entry
            ):
                if self._entry_state(self._table.version() + 1) is None:
                    return self._table
                with panics_as_errors():
                    self._table.update_incremental()
            else:
                with panics_as_errors():
                    self._table = DeltaTable(self._path)
            self._table_entry = self._entry_state(self._table.version())
        except TableNotFoundError as error:
            self._table = None
            raise SinkRefused(
                f"{self._where}: the table is gone: {shown(error)}", problem=SinkProblem.TABLE_GONE
            ) from error
        except (DeltaError, OSError) as error:
            self._table = None
            raise StoreUnavailable(f"{self._where}: the table cannot be read: {shown(error)}") from error
        return self._table

    def _entry_state(self, version: int) -> tuple[int, ...] | None:
        try:
            state = os.stat(self._log.entry_path(version))
        except FileNotFoundError:
            return None
        return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns

    def _position(self, table: DeltaTable, *, same_table: bool) -> _Position | None:
        if same_table and str(table.metadata().id) != self._table_id:
            raise PositionMismatch(
                f"{self._where}: the table is now {table.metadata().id}, it was {self._table_id} when it was opened; "
                f"inspect with: stormproof audit verify {self._identity.topology}",
                table_id=str(table.metadata().id),
                expected=self._table_id,
            )
        txid = table.transaction_version(self._application)
        if txid is None:
            return None
        reach = Reach()
        undone: Undo | None = None
        for entry in self._log.back_from(table.version()):
            undo = entry.undo(self._application)
            if undo is not None and undone is None:
                # The identifier still names what was taken back.
                undone = undo
                if undo.holds is None:
                    return None
                txid = undo.holds
            restored = reach.taken_back_by(entry)
            ours = entry.ours(self._application)
            if ours is not None and ours.txid == txid and (undone is None or ours.version < undone.version):
                if same_table and restored is not None:
                    raise PositionMismatch(
                        f"{self._where}: version {restored} restored the table to before version {ours.version}, "
                        f"which holds txid {txid}: its rows are gone; inspect with: stormproof audit verify "
                        f"{self._identity.topology}. RESTORE the table to version {restored - 1}; or give the rows up, on "
                        f"record: stormproof ledger adopt-table {self._identity.topology} {self._identity.sink} "
                        "--accept-loss",
                        txid=txid,
                        version=restored,
                    )
                return _Position(txid, ours, restored)
        return _Position(txid, None)

    def _require_prepared(self, table: DeltaTable, transaction: PreparedTransaction, where: str) -> None:
        require_table(table, self._input, where)
        # Files to be adopted are not read again by the driver under which they were written. Those of a fold are read
        # anyway, and those that outlived their driver may be anything by now: their bytes are compared.
        digests = self._input.is_by_key or self._outlived_its_driver(transaction)
        require_files(self._directory, transaction.files, where=where, digests=digests)
        counted = sum(file.rows for file in transaction.files)
        if counted != transaction.rows:
            raise SinkRefused(f"{where}: {counted} rows in the prepared files instead of {transaction.rows}")
        if self._input.is_by_key:
            keys = list(prepared_batches(self._directory, transaction.files, self._input.keys))
            read = sum(batch.num_rows for batch in keys)
            if read != transaction.rows:
                raise SinkRefused(f"{where}: {read} rows read from the prepared files instead of {transaction.rows}")
            require_unique_keys(keys, self._input.keys, where)

    def _outlived_its_driver(self, transaction: PreparedTransaction) -> bool:
        """Whether this session was opened after one of the files was written last."""
        for file in transaction.files:
            try:
                written_ns = os.stat(os.path.join(self._directory, file.path)).st_mtime_ns
            except FileNotFoundError:
                return True
            if written_ns < self._opened_ns:
                return True
        return False

    def _properties(
        self, transaction: PreparedTransaction, position: _Position | None, *, checked: bool
    ) -> CommitProperties:
        # Unchecked commits may come late; the identifier never goes back.
        version = transaction.txid if checked or position is None else max(position.txid, transaction.txid)
        return CommitProperties(
            custom_metadata=commit_metadata(self._application, transaction, self._epoch, checked=checked),
            max_commit_retries=COMMIT_RETRIES_MAX,
            # Without a time the engines disagree on when an identifier expires.
            app_transactions=[Transaction(self._application, version, time.time_ns() // 1_000_000)],
        )

    def _put(self, table: DeltaTable, transaction: PreparedTransaction, properties: CommitProperties) -> None:
        if (
            not self._input.is_by_key or transaction.rows == 0
        ):  # an empty MERGE commits nothing, not even its identifier
            table.create_write_transaction(
                [self._add_action(file.path, file.bytes, file.statistics) for file in transaction.files if file.rows],
                "append",
                table.schema(),
                commit_properties=properties,
                post_commithook_properties=HOOKS,
            )
            return
        columns = self._input.schema.names
        batches = prepared_batches(self._directory, transaction.files, columns)
        streamed = transaction.rows > MERGE_ROWS_IN_MEMORY_MAX
        schema, folds = self._input.schema, self._input.folds
        source: pa.Table | pa.RecordBatchReader = (
            pa.RecordBatchReader.from_batches(schema, (batch.cast(schema) for batch in batches))
            if streamed
            else pa.Table.from_batches(list(batches)).cast(schema)
        )
        (
            table.merge(
                source,
                " AND ".join(f"t.{quoted(key)} = s.{quoted(key)}" for key in self._input.keys),
                source_alias="s",
                target_alias="t",
                streamed_exec=streamed,
                writer_properties=MERGED_FILES,
                commit_properties=properties,
                post_commithook_properties=HOOKS,
            )
            .when_matched_update({quoted(n): fold_expression(n, schema.field(n).type, f) for n, f in folds.items()})
            .when_not_matched_insert({quoted(name): f"s.{quoted(name)}" for name in columns})
            .execute()
        )

    def _add_action(self, path: str, size: int, statistics: str) -> AddAction:
        modified_ms = os.stat(os.path.join(self._directory, path)).st_mtime_ns // 1_000_000
        return AddAction(path, size, {}, modified_ms, data_change=True, stats=statistics)

    def _known(self, table: DeltaTable, transaction: PreparedTransaction, position: _Position | None) -> Held | None:
        """What the table holds, where a clean-up has taken the log entry that says it: the identifier is in the checkpoint,
        and so are the files. Prepared files have names that nobody else's have, so where all of them are the table's own,
        it holds this very transaction. Of a MERGE nothing is left to tell.
        """
        if position is None or position.commit is not None:
            return None if position is None else position.held
        if position.txid != transaction.txid or self._input.is_by_key or not transaction.rows:
            return position.held
        live = live_files(table)
        whole = all(live.get(file.path) == file.bytes for file in transaction.files if file.rows)
        return Held(position.txid, transaction.digest if whole else None)

    def _was_cleaned(self, transaction: PreparedTransaction, *, after: int) -> bool:
        """Whether a foreign clean-up took the entry of a commit that was answered for, before it was read: then a checkpoint
        stands for it, which is synced in its place.
        """
        table = self._load()
        version = table.version()
        cleaned = [c for c in self._log.checkpoints() if after < c <= version]
        if table.transaction_version(self._application) != transaction.txid or not cleaned:
            return False
        for checkpoint in cleaned:
            sync_file(self._log.checkpoint_path(checkpoint))
        for path in live_files(table):
            local = self._log.local_path(path)
            if self._input.is_by_key and local is not None:
                sync_file(local)
        sync_folder(self._path)
        sync_folder(self._log.folder)
        return True

    def _find(self, transaction: PreparedTransaction, *, after: int) -> OurCommit | None:
        for entry in self._log.on_from(after + 1):
            ours = entry.ours(self._application)
            if ours is not None and ours.txid == transaction.txid and ours.digest == transaction.digest:
                return ours
        return None

    def _refusal(self, problem: Exception | None, where: str) -> SinkRefused | StoreUnavailable:
        """What a commit that left no log entry is: what may pass by itself is transient, all else is for good."""
        if problem is None:
            return StoreUnavailable(f"{where}: the commit was answered, and the table's log does not have it")
        if may_pass(problem):
            return StoreUnavailable(
                f"{where}: the commit failed, and nothing was written: {shown(problem)}", errno=os_error(str(problem))
            )
        return SinkRefused(f"{where}: the table refuses it, and nothing was written: {shown(problem)}")

    def _sync(self, commit: OurCommit | None, *, after: int | None) -> None:
        """Make a commit survive a power loss: nobody else syncs the files of a MERGE, nor any log entry.

        Of other writers' versions between our last one (`after`; None: look for it) and this one, too: a log with a hole
        cannot be read, and they may have rewritten our rows.
        """
        if commit is None:
            return  # its entry is older than the log's retention
        if after is None:
            older = self._log.back_from(commit.version - 1)
            after = next((e.version for e in older if e.ours(self._application) is not None), commit.version - 1)
        for version in range(after + 1, commit.version + 1):
            self._sync_version(version)

    def _sync_version(self, version: int) -> None:
        entry = self._log.entry(version)
        if entry is None:
            return
        folders = {self._path}
        for file in entry.added:
            path = self._log.local_path(file.path)
            if path is None:
                continue
            try:
                sync_file(path)
            except FileNotFoundError:
                continue  # removed since by a later version; `_require_live` has looked at those that are not
            folders.add(os.path.dirname(path))
        sync_file(self._log.entry_path(version))
        for path in (self._log.checkpoint_path(version), os.path.join(self._log.folder, "_last_checkpoint")):
            if os.path.exists(path):
                sync_file(path)
        for folder in (*sorted(folders), self._log.folder):
            sync_folder(folder)

    def _clean(self, commit: OurCommit) -> None:
        """Have delta-rs remove log entries beyond their retention, once the checkpoint that stands for them is synced."""
        if not os.path.exists(self._log.checkpoint_path(commit.version)):
            return
        table = self._load()
        if table.metadata().configuration.get("delta.enableExpiredLogCleanup", "true") != "false":
            table.cleanup_metadata()

    def _require_live(self, position: _Position | None) -> None:
        """A commit that is found counts only if its live files are on disk: a power loss may take them, not the log."""
        if position is None or position.commit is None:
            return
        lost = self._lost_of(position.commit)
        if lost:
            way_on = (
                f"`retry` takes version {position.commit.version} back, as long as it is the newest, and merges the batch "
                "again from its prepared files"
                if self._input.is_by_key
                else "put the file back"
            )
            raise SinkRefused(
                f"{self._where}: file lost: version {position.commit.version} holds txid {position.txid}, but "
                f"{'; '.join(lost[:5])}; it was lost after the commit; {way_on}",
                problem=SinkProblem.FILE_LOST,
                files=list(lost),
            )

    def _lost_of(self, commit: OurCommit) -> list[str]:
        entry = self._log.entry(commit.version)
        if entry is None:
            return []
        # Adopted files were synced before they were prepared; those of a MERGE by nobody, until its commit is.
        return lost_files(self._log, entry, self._log.tail(self._load().version()), decode=self._input.is_by_key)

    def _adopted(self) -> frozenset[str]:
        """Files that a version still in the log has added: those are the table's, whatever the ledger says."""
        if self._input.is_by_key:
            return frozenset()
        live = {os.path.relpath(uri, self._path) for uri in self._load().file_uris()}
        logged = {file.path for v in self._log.versions() if (e := self._log.entry(v)) is not None for file in e.added}
        return frozenset(live | logged)
