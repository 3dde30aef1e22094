"""One driver's hold on a Delta table: the commit under the check of the table's log, its evidence, its claim, lost files."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError

from stormproof.core.errors import Fenced, PositionMismatch, SinkRefused, StoreUnavailable
from stormproof.core.failpoint import failpoint
from stormproof.core.sink import SinkInput
from stormproof.sinks.content import Content
from stormproof.sinks.delta import power_loss
from stormproof.sinks.delta.bounds import WITH_STATISTICS, by_delta_rs, by_spark, narrowed
from stormproof.sinks.delta.claims import Claims
from stormproof.sinks.delta.committers import Committers
from stormproof.sinks.delta.delta_rs import (
    OTHERS_CHANGED,
    is_conflict,
    load_table,
    may_pass,
    os_error,
    panics_as_errors,
    shown,
)
from stormproof.sinks.delta.evidence import (
    Position,
    evidence_of,
    find_commit,
    find_position,
    lost_files,
    require_not_given_up,
    tail_since,
    totals_with,
)
from stormproof.sinks.delta.features import AskedCommitter, Committer
from stormproof.sinks.delta.judge import LeftOut, may_reject, refused_rows
from stormproof.sinks.delta.log import (
    APPLICATION,
    DeltaLog,
    Label,
    OurCommit,
    Undo,
    commit_metadata,
    live_files,
    undo_metadata,
)
from stormproof.sinks.delta.newest_version import NewestTable, TableAhead, TableHead, is_ours
from stormproof.sinks.delta.opening import (
    add_columns,
    changes_of,
    known_part,
    list_not_null,
    lists_not_null,
    require_kept,
    versions_for,
)
from stormproof.sinks.delta.power_loss import put_torn_aside
from stormproof.sinks.delta.rows import RowsToPut
from stormproof.sinks.delta.table import column_limits, require_more_than_partitions, require_table
from stormproof.sinks.misfits import Misfits
from stormproof.sinks.protocol import (
    ALREADY_HELD,
    APPLIED,
    CommitDecision,
    CommitResult,
    EvidenceReport,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkProblem,
    StoreRecord,
    decide,
)
from stormproof.sinks.row_rule import BY_DELTA_RS, SchemaContract

log = logging.getLogger("stormproof.sink")

CONFLICT_TRIES_MAX: Final = 5
"""How often a commit is tried before it is an outage: a MERGE loses against each commit that comes before its own."""


class TableHold(StoreRecord):
    """What a Delta sink and a map in a Delta table have in common; `rows` is what they write.

    `reading`: for reading only, so a table that cannot be written to is not refused.
    """

    def __init__(
        self,
        path: str,
        rows: RowsToPut,
        *,
        identity: SinkIdentity,
        input_: SinkInput,
        epoch: int,
        reading: bool,
        contract: SchemaContract = SchemaContract.FREEZE,
        committer: AskedCommitter = "auto",
    ) -> None:
        self.contract = contract
        self._identity = identity
        self.input = input_
        self.log = DeltaLog(path)
        self.where = f"sink {identity.sink!r} ({path})"
        self._rows = rows
        self._epoch = epoch
        self._application = identity.application_id
        self._newest = NewestTable(self.log, self.where)
        self.committers = Committers(self.log, self.where, input_, committer)
        self._claims = Claims(self.log, self._newest, identity, self.where, self.committers)
        table = load_table(path)
        if not reading:
            evolves = contract is SchemaContract.EVOLVE
            known = known_part(table, input_) if evolves else input_
            if require_table(table, known, self.where, committer) is Committer.SPARK:
                self._require_frozen(contract)
                self.committers.require_served(Committer.SPARK)
                self.committers.spark.start()
                self._make_readable(table)
            else:
                require_more_than_partitions(table, input_, self.where)
                if evolves:
                    require_kept(table, input_, self.log, self.where)
        self.limits = column_limits(table, input_, path)
        self._table_id = str(table.metadata().id)

    def _make_readable(self, table: DeltaTable) -> None:
        """Have the protocol list the feature of NOT NULL, without which Spark reads no table that has it."""
        if lists_not_null(table):
            return
        with self.committers.alone(Committer.SPARK):
            list_not_null(table, CommitProperties(max_commit_retries=0))
        power_loss.sync_version(self.log, load_table(self.log.table).version())
        log.info("%s: its protocol lists the feature of NOT NULL now, which Spark asks for", self.where)

    @property
    def identity(self) -> SinkIdentity:
        """Under what name it keeps its evidence."""
        return self._identity

    @property
    def table_id(self) -> str:
        """The table's own id, made when it is created."""
        return self._table_id

    def load(self) -> DeltaTable:
        """The table at its newest version; see `NewestTable.load`."""
        return self._newest.load()

    def head(self) -> TableHead:
        """The newest version without its files; see `NewestTable.head`."""
        return self._newest.head()

    def close(self) -> None:
        """Load the table anew the next time: there is no connection to let go."""
        self._newest.forget()

    def writers(self) -> Iterator[str]:
        """The application of each version, newest first, as far back as the log goes; empty for other writers' versions."""
        for entry in self.log.back_from(self._newest.load().version()):
            yield str(entry.info.get(APPLICATION, ""))

    def position(self, table: TableHead, *, same_table: bool) -> Position | None:
        """What the table holds for this sink; None: no txid.

        Raises:
            PositionMismatch: `same_table` is asked for, and it is another table than the one that was opened, or a RESTORE
                took its last txid's rows back.
        """
        if same_table and str(table.metadata().id) != self._table_id:
            raise PositionMismatch(
                f"{self.where}: the table is now {table.metadata().id}, it was {self._table_id} when it was opened; "
                f"inspect with: stormproof audit verify {self.identity.topology}",
                table_id=str(table.metadata().id),
                expected=self._table_id,
            )
        found = find_position(self.log, table, self._application)
        if same_table and found is not None and found.commit is not None and found.restored is not None:
            raise PositionMismatch(
                f"{self.where}: version {found.restored} restored the table to before version {found.commit.version}, "
                f"which holds txid {found.txid}: its rows are gone; inspect with: stormproof audit verify "
                f"{self.identity.topology}. RESTORE the table to version {found.restored - 1}; or give the rows up, on "
                f"record: stormproof ledger adopt-table {self.identity.topology} {self.identity.sink} --accept-loss",
                txid=found.txid,
                version=found.restored,
            )
        return found

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed to the table, as far back as the log goes."""
        found = (self.identity.other_life(application) for application in self.writers())
        return tuple(sorted({incarnation for incarnation in found if incarnation is not None}))

    def claim(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Put this life's name among the table's properties; see the protocol."""
        return self._claims.put(accepted)

    def release(self) -> bool:
        """Mark that property as released."""
        return self._claims.release()

    def held(self) -> Held | None:
        """The last transaction in the table's log, read afresh.

        Raises:
            PositionMismatch: a RESTORE took its rows back, or this is another table.
            SinkRefused: the table is gone.
            StoreUnavailable: it cannot be read.
        """
        position = self.position(self._newest.load(), same_table=True)
        return None if position is None else position.held

    def committer(self) -> Committer:
        """Who writes to the table, by its features at its newest version."""
        return self.committers.of(self._newest.head())

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Adopt one transaction, by the table of `decide`; see the protocol.

        After a commit that another writer's came before, the table is asked anew what it holds, and the transaction is
        tried again at once, `CONFLICT_TRIES_MAX` times in all.
        """
        for left in reversed(range(CONFLICT_TRIES_MAX)):
            committer = self.committer()
            try:
                with self.committers.alone(committer):
                    return self._commit(transaction, committer, checked=checked)
            except StoreUnavailable as error:
                if not left or not is_conflict(error.__cause__):
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
            seen = whole.transaction_version(self._application)
            table = whole = self.narrowed(self._evolved(whole, transaction, where), committer, where)
            if whole.transaction_version(self._application) != seen:  # another driver has committed meanwhile
                return self._commit(transaction, committer, checked=checked, here=here)
        self._rows.check(table, transaction, where)
        spark = self.committers.spark if committer is Committer.SPARK else None
        judge = None if whole is None else self._rows.judge(whole, transaction, spark, where)
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
            and is_ours(table, [file.path for file in transaction.files if file.rows])
        )

    def _put_here(
        self, table: TableHead, transaction: PreparedTransaction, position: Position | None, *, checked: bool
    ) -> tuple[OurCommit | None, OSError | ValueError | None] | None:
        """As `_put`, by `RowsToPut.put_next`. None: nothing was written, and delta-rs is to write it.

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
            put = self._rows.put_next(self.log, table, transaction, label)
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
        position: Position | None,
        *,
        checked: bool,
    ) -> tuple[OurCommit | None, DeltaError | OSError | ValueError | None]:
        """Write the rows but those left out. Returns what the log has of that, and the error of the write."""
        read_version = table.version()
        problem: DeltaError | OSError | ValueError | None = None
        try:
            with panics_as_errors():
                put = transaction if left_out is None else left_out.put
                change = self._rows.change(table, put) if committer is Committer.DELTA_RS else None
                label = self._label(transaction, position, table, left_out, change, checked=checked)
                self.committers.put(committer, self._rows, table, put, label)
        except (DeltaError, OSError, ValueError) as error:
            problem = error
        if problem is None:
            failpoint("delta.after_log_entry")
        # Whatever the answer was, only the log says whether the entry is there, and in which version.
        return find_commit(self.log, self._application, transaction, after=read_version), problem

    def _result(self, outcome: CommitResult, commit: OurCommit) -> CommitResult:
        changed: tuple[str, ...] = ()
        if self.contract is SchemaContract.EVOLVE:
            changed = changes_of(self.log, self._application, commit.txid, before=commit.version)
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
            with panics_as_errors():
                if not add_columns(table, self.input, self._application, transaction.txid):
                    return table
        except (DeltaError, OSError) as error:
            raise StoreUnavailable(f"{where}: the table's columns cannot be changed: {shown(error)}") from error
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
            raise StoreUnavailable(f"{where}: {WITH_STATISTICS} cannot be set: {shown(error)}") from error
        log.info("%s: %s is %r now: by other columns' bounds rows could be missed", where, WITH_STATISTICS, columns)
        return self._newest.load()

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """What the table's log says of each txid, and of its files since."""
        return evidence_of(
            self.log,
            self._newest.load(),
            self._application,
            table_id=self._table_id,
            fold=self.input.is_by_key,
            first=first,
            last=last,
        )

    def evidence_since(self, first: int) -> EvidenceReport:
        """What the log says of the txids from `first` on, read back to the one before."""
        table = self._newest.load()
        tail = tail_since(self.log, table.version(), self._application, first)
        if tail is None:
            return replace(self.evidence(first, None), looks_back=True)
        return evidence_of(
            self.log,
            table,
            self._application,
            table_id=self._table_id,
            fold=self.input.is_by_key,
            first=first,
            last=None,
            tail=tail,
        )

    def keep_held(self) -> None:
        """Check that the files of the last commit are there, and sync it."""
        position = self.position(self._newest.load(), same_table=True)
        self._require_live(position)
        self._sync(None if position is None else position.commit, after=None)

    def restore_lost(self, transaction: PreparedTransaction) -> str | None:
        """Undo a fold whose commit is the table's newest version and lost files; see the protocol."""
        where = f"{self.where}, txid {transaction.txid}"
        if not self.input.is_by_key and self.has_adopted(transaction):
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
        self._rows.check(table, transaction, where)
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
            kind = StoreUnavailable if may_pass(error) else SinkRefused
            raise kind(f"{where}: version {version - 1} cannot be restored: {shown(error)}") from error
        power_loss.sync_version(self.log, self._newest.load().version())

    def count_rows(self, limit: int) -> int:
        """The number of rows in the newest version by the statistics of its files; `limit` where a file has none."""
        counted = self._newest.load().get_add_actions(flatten=True).column("num_records").to_pylist()
        return limit if None in counted else min(sum(counted), limit)

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
        position: Position | None,
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
        self, table: DeltaTable | None, transaction: PreparedTransaction, position: Position | None
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
        if may_pass(problem):
            what = (
                "nothing was written"
                if self.log.files.is_local
                else "the table's log does not have it; should it still arrive, the next try finds it there"
            )
            return StoreUnavailable(
                f"{where}: the commit failed, and {what}: {shown(problem)}", errno=os_error(problem)
            )
        return SinkRefused(f"{where}: the table refuses it, and nothing was written: {shown(problem)}{hint}")

    def _sync(self, commit: OurCommit | None, *, after: int | None) -> None:
        """Make a commit survive a power loss, with all versions since `after`, our last one (None: it is looked up)."""
        if commit is None or not self.log.files.is_local:
            return  # its entry is older than the log's retention; or a store's answer to a PUT was the sync
        if after is None:
            older = self.log.back_from(commit.version - 1)
            after = next((e.version for e in older if e.ours(self._application) is not None), commit.version - 1)
        if self.contract is SchemaContract.EVOLVE:
            # A version that changed the schema is synced with its batch's own, also where that is the first one of ours.
            changing = versions_for(self.log, self._application, commit.txid, before=commit.version)
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

    def _require_live(self, position: Position | None) -> None:
        """Refuse a commit whose live files are not all on disk: a power loss may take them and leave the log."""
        if position is None or position.commit is None:
            return
        lost = self._lost_of(position.commit)
        if lost:
            way_on = (
                f"`retry` takes version {position.commit.version} back, as long as it is the newest, and merges the batch "
                "again from its prepared files"
                if self._is_copied(position.commit)
                else "put the file back"
            )
            raise SinkRefused(
                f"{self.where}: file lost: version {position.commit.version} holds txid {position.txid}, but "
                f"{'; '.join(lost[:5])}; it was lost after the commit; {way_on}",
                problem=SinkProblem.FILE_LOST,
                files=list(lost),
            )

    def _lost_of(self, commit: OurCommit) -> list[str]:
        entry = self.log.entry(commit.version)
        if entry is None:
            return []
        # Adopted files were synced before they were prepared, a committer's own only after its commit: so these are decoded.
        decode = self.log.files.is_local and self._is_copied(commit)
        return lost_files(self.log, entry, self.log.tail(self._newest.load().version()), decode=decode)

    def _is_copied(self, commit: OurCommit) -> bool:
        """Whether a committer wrote files of its own, instead of adopting the prepared ones."""
        entry = self.log.entry(commit.version)
        return self.input.is_by_key or (entry is not None and entry.is_by_spark)

    def has_adopted(self, transaction: PreparedTransaction) -> bool:
        """Whether the files of a transaction are the table's own; True where its commit is not the last one, or is gone."""
        position = self.position(self._newest.load(), same_table=False)
        if position is None or position.commit is None or position.txid != transaction.txid:
            return True
        entry = self.log.entry(position.commit.version)
        return entry is None or not {f.path for f in entry.added}.isdisjoint(f.path for f in transaction.files)

    def adopted(self) -> frozenset[str]:
        """The files that are live, or that a version still in the log has added: they are the table's, whatever the ledger
        says.
        """
        if self.input.is_by_key:
            return frozenset()
        logged = {file.path for v in self.log.versions() if (e := self.log.entry(v)) is not None for file in e.added}
        return frozenset(live_files(self._newest.load()).keys() | logged)


def _last_of_ours(position: Position | None, otherwise: int) -> int:
    """The version of our last commit, before which everything is synced."""
    return otherwise if position is None or position.commit is None else position.commit.version
