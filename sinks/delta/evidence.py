"""What a Delta table's log says of one application: the last txid that the table holds and its commit, what may not come any
more, each txid, and what has become of its rows since.

Appended rows are followed from file to file: a compaction moves them unchanged, a RESTORE may bring them back, and every
other removal of one of their files has removed or rewritten rows. Folded rows are in the files that the last MERGE wrote, so
for them the version counts: a RESTORE to a version before it, or another writer's change of data after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deltalake import DeltaTable

from stormproof.core.base.errors import Fenced
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import Evidence, EvidenceReport, Held, PreparedTransaction
from stormproof.sinks.delta.log import (
    APPLICATION,
    OF_TIME,
    REMOVED,
    TOTALS,
    AddedFile,
    DeltaLog,
    LogEntry,
    OurCommit,
    Undo,
    live_files,
)
from stormproof.sinks.delta.power_loss import lost_block, unreadable
from stormproof.sinks.delta.versions import TableHead
from stormproof.sinks.rows.content import NOTHING, Content, Totals, summed_columns, sums_of_files


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
class LogPosition:
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


def find_position(log: DeltaLog, table: TableHead, application: str) -> LogPosition | None:
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
            return LogPosition(txid, ours, restored)
    return LogPosition(txid, None)


def find_commit(log: DeltaLog, application: str, transaction: PreparedTransaction, *, after: int) -> OurCommit | None:
    """The commit of this very transaction in a version later than `after`."""
    for entry in log.on_from(after + 1):
        ours = entry.ours(application)
        if ours is not None and ours.txid == transaction.txid and ours.digest == transaction.digest:
            return ours
    return None


def require_not_given_up(
    log: DeltaLog, table: TableHead, application: str, position: LogPosition | None, txid: int, where: str
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


def totals_at(log: DeltaLog, table: TableHead, position: LogPosition | None, application: str) -> Totals | None:
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
    position: LogPosition | None,
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


def evidence_of(
    delta_log: DeltaLog,
    table: DeltaTable,
    application: str,
    *,
    table_id: str,
    fold: bool,
    first: int,
    last: int | None,
    tail: Sequence[LogEntry] | None = None,
) -> EvidenceReport:
    """The log's entries of one application, as far back as the log has no gap, and what is wrong with the table. With
    `tail`, as `tail_since` gives it, only these versions and their files are looked at.
    """
    newest = table.version()
    entries = tail or [entry for v in delta_log.tail(newest) if (entry := delta_log.entry(v)) is not None]
    commits = our_commits(entries, application)
    disk = _Disk(delta_log, live_files(table))
    fate = _folded(delta_log, entries, commits) if fold else _appended(entries, commits, disk.live)
    found: dict[int, Evidence] = {}
    problems: list[str] = []
    for entry in entries:
        ours = commits.get(entry.version)
        if ours is None or ours.txid < first or (last is not None and ours.txid > last):
            continue
        if found.pop(ours.txid, None) is not None and ours.checked:
            problems.append(f"txid {ours.txid} was committed again in version {ours.version}")
        found[ours.txid] = _evidence(entry, ours, fate, disk, fold=fold)
    if tail is None:
        problems += disk.wrong(disk.live.keys() - disk.looked_at)
    problems += _miscounted(entries)
    guard = table.transaction_version(application)
    if found and (guard is None or guard < max(found)):
        problems.append(f"the transaction identifier says {guard}, the log has txid {max(found)}")
    now = str(table.metadata().id)
    if now != table_id:
        problems.append(f"the table is {now}, it was {table_id} when it was opened")
    return EvidenceReport(
        table_id=now,
        entries=tuple(found.values()),
        last_txid=_last_txid(entries, application, guard),
        truncated=tail is None and (not entries or entries[0].version > 0),
        problems=tuple(problems),
    )


def our_commits(entries: Sequence[LogEntry], application: str) -> dict[int, OurCommit]:
    """Our transactions in these versions, by version, but for those that a RESTORE of our own took back."""
    undone = {undo.version for entry in entries if (undo := entry.undo(application)) is not None}
    found = ((entry.version, entry.ours(application)) for entry in entries if entry.version not in undone)
    return {version: ours for version, ours in found if ours is not None}


def tail_since(delta_log: DeltaLog, newest: int, application: str, first: int) -> list[LogEntry] | None:
    """The versions from the last transaction of ours before txid `first` on; None where those of the whole log are needed.

    They are where the log does not reach back so far, or where a later version changed rows or restored the table: it may
    concern earlier txids.
    """
    tail: list[LogEntry] = []
    for version in range(newest, -1, -1):
        entry = delta_log.entry(version)
        if entry is None:
            return None
        tail.append(entry)
        ours = entry.ours(application)
        if ours is not None:
            if not ours.checked:
                return None
            if ours.txid < first:
                return tail[::-1]
        elif entry.changes_rows or entry.restored_to is not None or entry.undo(application) is not None:
            return None
    return tail[::-1]


def lost_files(delta_log: DeltaLog, entry: LogEntry, log: Sequence[int], *, decode: bool) -> list[str]:
    """What is wrong with the files that a version added and no later version in `log` removed. With `decode`, each file is
    also read to its end.
    """
    later = [e for version in log if version > entry.version and (e := delta_log.entry(version)) is not None]
    removed = {path for e in later for path, _ in e.removed}
    disk = _Disk(delta_log, {file.path: file.bytes for file in entry.added if file.path not in removed})
    lost: list[str] = []
    for file in entry.added:
        wrong = disk.wrong({file.path})
        if file.path in disk.live and file.deletion_file is not None:
            wrong += disk.missing(file.deletion_file)
        lost += wrong
        path = delta_log.local_path(file.path)
        if not decode or wrong or path is None or file.path not in disk.live:
            continue
        if (text := unreadable(path, file.rows)) is not None:
            lost.append(f"{path} cannot be read: {text}")
        elif (at := lost_block(path)) is not None:
            lost.append(f"{path} has lost the block at byte {at}: zeros stand there")
    return lost


@dataclass(slots=True)
class _Disk:
    """The files that the newest version lists, with their sizes, compared with the disk."""

    log: DeltaLog
    live: dict[str, int]
    looked_at: set[str] = field(default_factory=set[str])

    def wrong(self, paths: set[str]) -> list[str]:
        """What is wrong with these files, in the order of their names."""
        found: list[str] = []
        self.looked_at |= paths
        for name in sorted(paths & self.live.keys()):
            path = self.log.local_path(name)
            if path is None:
                continue
            state = self.log.files.stat(path)
            if state is None:
                found.append(f"{path} is missing")
            elif state.size != self.live[name]:
                found.append(f"{path} has {state.size} bytes instead of {self.live[name]}")
        return found

    def missing(self, name: str) -> list[str]:
        """Whether a file that no version lists by itself is missing."""
        path = self.log.local_path(name)
        return [] if path is None or self.log.files.stat(path) is not None else [f"{path} is missing"]


@dataclass(slots=True)
class _Fate:
    """What has become of the rows of our versions, by version."""

    gone: dict[int, str] = field(default_factory=dict[int, str])
    doubtful: dict[int, str] = field(default_factory=dict[int, str])
    files: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """The live files that have rows of the version."""


def _evidence(entry: LogEntry, ours: OurCommit, fate: _Fate, disk: _Disk, *, fold: bool) -> Evidence:
    gone = fate.gone.get(entry.version)
    if gone is not None:
        return Evidence(
            ours.txid, ours.digest, ours.rows, gone, rejected=ours.rejected, reinstated=ours.reinstated, gone=True
        )
    problem: str | None = None
    counted = [file.rows for file in entry.added]
    if not fold and None not in counted and sum(n or 0 for n in counted) != ours.rows:
        problem = f"its files have {sum(n or 0 for n in counted)} rows, the commit says {ours.rows}"
    lost = disk.wrong(fate.files.get(entry.version, set()))
    if problem is None and lost:
        problem = lost[0]
    return Evidence(
        ours.txid,
        ours.digest,
        ours.rows,
        problem,
        rejected=ours.rejected,
        superseded=ours.superseded,
        superseded_about=entry.is_by_spark,
        reinstated=ours.reinstated,
        doubt=fate.doubtful.get(entry.version),
        at=ours.at,
    )


def _folded(delta_log: DeltaLog, entries: Sequence[LogEntry], commits: dict[int, OurCommit]) -> _Fate:
    fate, reach, changed = _Fate(), Reach(delta_log), ""
    removed: set[str] = set()
    for entry in reversed(entries):
        restored = reach.taken_back_by(entry)
        if entry.version in commits:
            if restored is not None:
                fate.gone[entry.version] = _restored(restored, entry.version)
            elif changed:
                fate.gone[entry.version] = changed
            changed = ""
            fate.files[entry.version] = {file.path for file in entry.added} - removed
        elif restored is None and not entry.is_stormproofs and entry.restored_to is None and entry.changes_rows:
            changed = f"rows of it were removed or changed by {entry.operation} in version {entry.version}"
        removed |= {path for path, _ in entry.removed}
    return fate


@dataclass(slots=True)
class Trail:
    """Where the rows of each of our files went: `rewritten` unchanged into other files, or `away` by a version."""

    rewritten: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    away: dict[str, LogEntry] = field(default_factory=dict[str, LogEntry])
    cut: dict[str, LogEntry] = field(default_factory=dict[str, LogEntry])
    """Files of which a deletion vector has deleted rows, and the version that did."""
    known: set[str] = field(default_factory=set[str])
    """Files that hold rows of ours."""
    mixed: set[str] = field(default_factory=set[str])
    """Those of them that hold rows of other writers, too."""

    def follow(self, entry: LogEntry, *, ours: bool) -> None:
        """Take one more version into account."""
        added = {file.path for file in entry.added}
        moved = {path for path, data_change in entry.removed if not data_change}
        if moved & self.known and added - moved:
            into = frozenset(added - moved)
            for path in moved & self.known:
                self.rewritten[path] = into
                self.away.pop(path, None)
            self.known |= into
            if moved - self.known or moved & self.mixed:
                self.mixed |= into
        for path, data_change in entry.removed:
            if data_change and path in self.known:
                self.rewritten.pop(path, None)
                self.away[path] = entry
        for file in entry.added:
            if ours:
                self.known.add(file.path)
            if file.path not in self.known:
                continue
            if file.has_deletions:
                self.cut.setdefault(file.path, entry)
            elif entry.restored_to is not None:
                self.cut.pop(file.path, None)

    def end(self, path: str, live: dict[str, int]) -> tuple[set[str], LogEntry | None, bool]:
        """The live files with this file's rows; else the version that removed rows, and whether they may be others' rows."""
        if path in self.cut:
            return set(), self.cut[path], path in self.mixed
        if path in live:
            return {path}, None, False
        if path not in self.rewritten:
            return set(), self.away.get(path), path in self.mixed
        files: set[str] = set()
        for into in self.rewritten[path]:
            more, by, doubtful = self.end(into, live)
            if by is not None:
                return set(), by, doubtful
            files |= more
        return files, None, False


def _appended(entries: Sequence[LogEntry], commits: dict[int, OurCommit], live: dict[str, int]) -> _Fate:
    fate, trail = _Fate(), Trail()
    for entry in entries:
        trail.follow(entry, ours=entry.version in commits)
    for entry in entries:
        if entry.version not in commits:
            continue
        for file in entry.added:
            files, by, doubtful = trail.end(file.path, live)
            fate.files.setdefault(entry.version, set()).update(files)
            if by is None:
                continue
            if doubtful:
                fate.doubtful[entry.version] = (
                    f"{by.operation} in version {by.version} removed rows from a file that holds others' rows, too: "
                    "whether these were among them cannot be told from the log"
                )
            else:
                fate.gone[entry.version] = _taken(by, file.path, entry.version)
    return fate


def _rows_of(file: AddedFile) -> int | None:
    """How many rows readers find in a file; None where the log does not tell."""
    if file.rows is None or (file.has_deletions and not file.deleted):
        return None
    return file.rows - file.deleted


def _miscounted(entries: Sequence[LogEntry]) -> list[str]:
    """Versions that say that they change no data, and whose new files have more or fewer rows than the old ones."""
    rows: dict[str, int | None] = {}
    gone: dict[str, int] = {}
    found: list[str] = []
    for entry in entries:
        twice = sorted(path for path, data_change in entry.removed if not data_change and path in gone)
        if twice:
            found.append(
                f"{entry.operation} in version {entry.version} replaced {twice[0]}, which version {gone[twice[0]]} had "
                "replaced: two compactions ran at once, and the rows are there twice"
            )
        gone |= {path: entry.version for path, _ in entry.removed}
        for file in entry.added:
            gone.pop(file.path, None)
        before = [rows.get(path) for path, _ in entry.removed]
        rows |= {file.path: _rows_of(file) for file in entry.added}
        if not entry.removed or entry.changes_rows:
            continue
        after = [rows[file.path] for file in entry.added]
        if None in before or None in after:
            continue
        went, came = sum(n or 0 for n in before), sum(n or 0 for n in after)
        if went != came:
            found.append(
                f"{entry.operation} in version {entry.version} says that it changed no data, and wrote {came} rows in place "
                f"of {went}"
            )
    return found


def _taken(by: LogEntry, path: str, version: int) -> str:
    if by.restored_to is not None:
        return _restored(by.version, version)
    return f"file {path} was removed, with its data, by {by.operation} in version {by.version}"


def _restored(by: int, version: int) -> str:
    return f"version {by} restored the table to before version {version}: its rows are gone"


def _last_txid(entries: Sequence[LogEntry], application: str, guard: int | None) -> int | None:
    """The last txid by the transaction identifier, or by a RESTORE of our own that came later."""
    for entry in reversed(entries):
        undo = entry.undo(application)
        if undo is not None:
            return undo.holds
        if entry.info.get(APPLICATION) == application:
            return guard
    return guard
