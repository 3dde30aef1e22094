"""What a Delta table holds for one application by its log: the last txid, its commit, what took its rows back; and what may
not come any more.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from deltalake import DeltaTable

from stormproof.core.errors import Fenced
from stormproof.core.sink import SinkInput
from stormproof.sinks.content import NOTHING, Content
from stormproof.sinks.delta.log import OF_TIME, REMOVED, TOTALS, DeltaLog, LogEntry, OurCommit, Undo
from stormproof.sinks.delta.newest_version import TableHead
from stormproof.sinks.protocol import Held, PreparedTransaction
from stormproof.sinks.totals import Totals, summed_columns, sums_of_files


class Reach:
    """Follows a log back from its newest version, and finds the versions whose rows a RESTORE has removed.

    A RESTORE keeps the transaction identifiers and drops the rows. The versions between its target and itself no longer
    count, and neither do the RESTOREs among them.
    """

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._reach: int | None = None
        self._by: int = -1

    def taken_back_by(self, entry: LogEntry) -> int | None:
        """The version of the RESTORE that removed this entry's rows, if any. To be called for each entry, newest first."""
        if self._reach is not None and entry.version > self._reach:
            return self._by
        target = entry.restored_to
        if target is not None:
            self._reach, self._by = self._of_time(entry) if target == OF_TIME else target, entry.version
        return None

    def _of_time(self, restore: LogEntry) -> int:
        """The version that a RESTORE to a time went back to: the newest one that lists the files which it left.

        The time does not tell: Spark writes it as a text without its zone. Where a file was listed again with other
        deletions, or the log does not reach back so far, no version before is known to be left: -1.
        """
        differ: set[str] = set()
        for version in range(restore.version, 0, -1):
            entry = self._log.entry(version)
            toggled = None if entry is None else _toggled(entry)
            if toggled is None:
                return -1
            differ ^= toggled
            if not differ:
                return version - 1
        return -1


def _toggled(entry: LogEntry) -> set[str] | None:
    """The files that are listed either before a version or behind it; None where one is listed anew."""
    added, removed = {file.path for file in entry.added}, {path for path, _ in entry.removed}
    return None if added & removed else added | removed


@dataclass(frozen=True, slots=True)
class Position:
    """The last txid that a table holds. `commit` is None where retention has removed its log entry.

    `restored` is the version of a RESTORE that took its rows back and kept the transaction identifier.
    """

    txid: int
    commit: OurCommit | None
    restored: int | None = None

    @property
    def held(self) -> Held:
        """The same as the protocol says it."""
        if self.commit is None:
            return Held(self.txid, None)
        return Held(self.txid, self.commit.digest, self.commit.at, self.commit.rejected)


def find_position(log: DeltaLog, table: TableHead, application: str) -> Position | None:
    """The last txid of an application in a table; None where it holds none."""
    txid = table.transaction_version(application)
    if not txid:  # 0: only what was given up was ever on its way; see `DeltaSession.keep_out`
        return None
    reach = Reach(log)
    undone: Undo | None = None
    for entry in log.back_from(table.version()):
        undo = entry.undo(application)
        if undo is not None and undone is None:
            # The transaction identifier still names the txid that our own RESTORE took back.
            undone = undo
            if undo.holds is None:
                return None
            txid = undo.holds
        restored = reach.taken_back_by(entry)
        ours = entry.ours(application)
        if ours is not None and ours.txid == txid and (undone is None or ours.version < undone.version):
            return Position(txid, ours, restored)
    return Position(txid, None)


def find_commit(log: DeltaLog, application: str, transaction: PreparedTransaction, *, after: int) -> OurCommit | None:
    """The commit of this very transaction in a version later than `after`."""
    for entry in log.on_from(after + 1):
        ours = entry.ours(application)
        if ours is not None and ours.txid == transaction.txid and ours.digest == transaction.digest:
            return ours
    return None


def require_not_given_up(
    log: DeltaLog, table: TableHead, application: str, position: Position | None, txid: int, where: str
) -> None:
    """Refuse a transaction that a version of `DeltaSession.keep_out` keeps out; `position` is what the table holds.

    Raises:
        Fenced: an operator gave its rows up.
    """
    after = -1 if position is None or position.commit is None else position.commit.version
    if after == table.version() or table.transaction_version(application) is None:
        return
    for entry in log.back_from(table.version()):
        if entry.version <= after:
            return
        if entry.given_up(application) == txid:
            raise Fenced(
                f"{where}: an operator gave its rows up, and version {entry.version} keeps them out; another driver goes on",
                txid=txid,
                version=entry.version,
            )


def totals_at(log: DeltaLog, table: TableHead, position: Position | None, application: str) -> Totals | None:
    """What a table by key must hold at a version, by the record of the commits; None: it is not on record. Before the first
    one its rows are those of its files.
    """
    if position is None:
        if not isinstance(table, DeltaTable):
            return None
        counted = table.get_add_actions(flatten=True).column("num_records").to_pylist()
        rows = None if None in counted else sum(counted)
        return Totals(rows, content=NOTHING if rows == 0 else None)
    commit = position.commit
    if commit is None or commit.totals is None:
        return None
    later = itertools.takewhile(lambda entry: entry.version > commit.version, log.back_from(table.version()))
    removed = [entry.info[REMOVED] for entry in later if REMOVED in entry.info]
    totals = commit.totals.with_rows(None if "" in removed else -sum(map(int, removed)))
    if totals.content is not None and (removed or _others_changed(log, table.version(), commit, application)):
        return replace(totals, content=None)
    return totals


def _others_changed(log: DeltaLog, version: int, commit: OurCommit, application: str) -> bool:
    """Whether another writer has changed rows up to this version since our commit before `commit`: it may have come between
    what that was computed from and its version.
    """
    for entry in log.back_from(version):
        ours = entry.ours(application)
        if ours is not None and ours.version < commit.version:
            return False
        if ours is not None or entry.undo(application) is not None:
            continue
        whole = log.entry(entry.version)
        if whole is None or whole.changes_content:  # None: a clean-up has removed it meanwhile
            return True
    return False


def totals_with(
    log: DeltaLog,
    table: TableHead,
    position: Position | None,
    put: PreparedTransaction,
    input_: SinkInput,
    application: str,
    change: Content | None,
) -> dict[str, str]:
    """For a commit's metadata: the same with this transaction, but for the rows that it inserts, which its metrics have."""
    before = totals_at(log, table, position, application)
    if before is None:
        return {}
    return {TOTALS: before.after(sums_of_files(put.files, summed_columns(input_.folds)), 0, change).to_text()}
