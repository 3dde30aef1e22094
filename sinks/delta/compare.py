"""Compares the files of a Delta table with the prepared files on record.

An added file that is live still is compared by its SHA-256. Files that were rewritten without a change of data (OPTIMIZE,
or a commit by Spark, which copies the prepared files) are compared by content: the rows of all files that went into some
files, with the rows of those.

Of an upsert and a fold the files are the table's own, and hold rows of many txids. It is compared that no key is twice, how
many rows there are, what each summed column sums up to, the content of all rows where the commits say it, other writers'
versions, and with a lineage column how many rows name each txid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import PreparedFile, SinkMode
from stormproof.core.storage.files import files_at
from stormproof.sinks.delta.evidence import Reach, Trail, find_position, our_commits, totals_at
from stormproof.sinks.delta.log import REPAIRS, DeltaLog, LogEntry, OurCommit, live_adds, live_files
from stormproof.sinks.delta.statistics import wrong_statistics
from stormproof.sinks.delta.versions import all_hashable, read_rows
from stormproof.sinks.prepare.staging import file_digest, parse_prepared_name
from stormproof.sinks.rows.by_key import doubled_keys
from stormproof.sinks.rows.comparison import (
    Compared,
    Comparison,
    Progress,
    ReadRecord,
    RowProblem,
    RowsOnRecord,
    Span,
    spans,
    within,
)
from stormproof.sinks.rows.content import (
    NOTHING,
    Content,
    ContentSum,
    Sum,
    Totals,
    added_up,
    content_of_files,
    joined,
    summed_columns,
    sums_of,
)

if TYPE_CHECKING:
    from stormproof.sinks.delta.transactional_table import TransactionalTable

_BATCH_ROWS: Final = 64 * 1024
_MAPPING: Final = "delta.columnMapping.mode"
_STORED_AS: Final = "delta.columnMapping.physicalName"


def compare(ours: TransactionalTable, read: ReadRecord, span: Span, progress: Progress) -> Comparison:
    """See `SupportsCompareRows.compare_rows`."""
    found = Compared()
    table = ours.load()
    entries = [entry for v in ours.log.tail(table.version()) if (entry := ours.log.entry(v)) is not None]
    if ours.input.mode is SinkMode.APPEND:
        one = _Files(ours, table, entries, span, progress, found)
        one.against(read())
    else:
        compare_by_key(ours, table, entries, read, span, found)
    if span[0] <= 1:
        _statistics(ours, table, found)
    return found.comparison


def _statistics(ours: TransactionalTable, table: DeltaTable, found: Compared) -> None:
    """Whether the table's statistics of each live file let its rows be found."""
    try:
        adds = live_adds(ours.log, table.version())
        wrong, unread = wrong_statistics(ours.log, adds)
    except (OSError, ValueError, SinkRefused) as error:
        found.left_out.append(f"the statistics of its files: {error}")
        return
    for path, columns in sorted(wrong.items()):
        text = f"the statistics of {path} exclude rows that it holds, by {', '.join(columns)}; stormproof repair mends them"
        found.add(RowProblem.STATISTICS_WRONG, text)
    if unread:
        found.left_out.append(
            f"the statistics of {len(unread)} of its files, such as {unread[0]}: they are not read here"
        )
    if len(adds) > len(unread) + len(wrong):
        found.compared.append(f"the statistics of {len(adds) - len(unread)} of its files, with their rows")


@dataclass(slots=True)
class _Source:
    """What a txid wrote, as far as it can be told apart in the table: one added file, or all that a commit copied."""

    txid: int
    rows: int
    partition: str
    content: Content | None
    version: int = 0
    """The version that committed it; 0: an older one than the log has."""
    path: str = ""
    digest: str = ""
    files: set[str] = field(default_factory=set[str])
    """The live files that have its rows now."""


class _Files:
    """The files of an append."""

    def __init__(
        self,
        ours: TransactionalTable,
        table: DeltaTable,
        entries: Sequence[LogEntry],
        span: Span,
        progress: Progress,
        found: Compared,
    ) -> None:
        self._table, self._entries, self._span, self._progress, self._found = ours, entries, span, progress, found
        self._live = live_files(table)
        self._partitions = _partitions(table)
        self._is_partitioned = bool(table.metadata().partition_columns)
        self._operations = {entry.version: entry.operation for entry in entries}
        self._stored_as = stored_names(table)
        self._changed = [entry.version for entry in entries if entry.changes_table]
        self._commits = our_commits(entries, ours.identity.application_id)
        self._trail = Trail()
        self._origins = _Origins()
        for entry in entries:
            self._trail.follow(entry, ours=entry.version in self._commits)
            self._origins.follow(entry, ours=entry.version in self._commits)
        self._unrecorded = set[str]()
        self._rows_done = 0
        self._rows_of = _rows_of(table)

    def against(self, record: RowsOnRecord) -> None:
        """Compare them with what is on record."""
        sources = self._sources(record)
        traced = set[str]()
        plain: list[_Source] = []
        moved: list[_Source] = []
        for source in sources:
            traced |= source.files
            if not within(source.txid, self._span):
                continue
            (plain if source.files == {source.path} else moved).append(source)
        self._plain(plain)
        self._moved(moved, sources)
        self._others(traced, record)

    # -- where the rows are ------------------------------------------------------------------------------------------

    def _sources(self, record: RowsOnRecord) -> list[_Source]:
        """What each txid wrote, and the live files that have its rows."""
        names = {file.path: (txid, file) for txid, files in record.files.items() for file in files if file.rows}
        sources: list[_Source] = []
        unchecked: list[int] = []
        seen = set[str]()
        for entry in self._entries:
            ours = self._commits.get(entry.version)
            if ours is None:
                continue
            seen |= {file.path for file in entry.added}
            own = {file.path: file for file in ours.files}
            copied: list[str] = []
            for file in entry.added:
                prepared = own.get(file.path) or (names[file.path][1] if file.path in names else None)
                if (
                    not ours.checked
                    or ours.txid <= record.given_up
                    or (prepared is None and ours.txid not in record.files)
                ):
                    self._unrecorded |= self._trail.end(file.path, self._live)[0]
                elif prepared is None:
                    copied.append(file.path)
                else:
                    sources.append(self._source(ours.txid, prepared, file.path, entry.version))
            if copied:
                sources.append(self._copied(ours, record.files[ours.txid], copied))
            if not ours.checked and within(ours.txid, self._span):
                unchecked.append(ours.txid)
        # Live files whose entries are older than the log.
        older = [(path, *found) for path, found in names.items() if path in self._live and path not in seen]
        sources += [self._source(txid, prepared, path) for path, txid, prepared in older if txid > record.given_up]
        if unchecked:
            self._found.left_out.append(
                f"txids {spans(unchecked)}: under their guarantee, a row may be in the table more than once, or not at all"
            )
        return sources

    def _source(self, txid: int, file: PreparedFile, path: str, version: int = 0) -> _Source:
        """One added file."""
        partition = _spelled(json.loads(file.partition)) if file.partition and self._partitions else "{}"
        content, (files, _, _) = Content.of_text(file.content), self._trail.end(path, self._live)
        return _Source(txid, file.rows, partition, content, version, file.path, file.digest, files)

    def _copied(self, ours: OurCommit, prepared: Sequence[PreparedFile], paths: Sequence[str]) -> _Source:
        """What a commit of Spark's wrote in place of the prepared files."""
        content = content_of_files(prepared)
        if self._is_partitioned or content is None or content.rows != ours.rows:
            content = None  # its files have fewer columns, or fewer rows, than the prepared ones
        files = set[str]().union(*(self._trail.end(path, self._live)[0] for path in paths))
        return _Source(ours.txid, ours.rows, "{}", content, ours.version, files=files)

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _plain(self, sources: Sequence[_Source]) -> None:
        """Files that are as they were added."""
        good, rows = set[int](), 0
        for source in sources:
            path = self._table.log.local_path(source.path)
            if path is None or files_at(path).stat(path) is None:
                continue  # the log's own check names a file that is missing
            try:
                same = file_digest(path) == source.digest
            except FileNotFoundError:
                continue
            self._told(source.rows)
            if same and self._partitions.get(source.path, "{}") == source.partition:
                good.add(source.txid)
                rows += source.rows
            elif same:
                self._found.add(
                    RowProblem.FILE_CHANGED,
                    f"txid {source.txid}: {path} is as it was written, and in partition {self._partitions.get(source.path)} "
                    f"instead of {source.partition}",
                    source.txid,
                )
            else:
                self._found.add(
                    RowProblem.FILE_CHANGED,
                    f"txid {source.txid}: {path} is not the file that was written: its SHA-256 differs",
                    source.txid,
                )
        self._found.rows += rows
        if good:
            self._found.compared.append(f"{rows} rows of txids {spans(good)}, file by file")

    def _moved(self, moved: Sequence[_Source], sources: Sequence[_Source]) -> None:
        """Rows that were written into other files since, without a change."""
        wanted = [source for source in moved if source.files]
        good, rows = set[int](), 0
        for files, group in _groups(wanted, sources):
            txids = {source.txid for source in group}
            why = self._why_not(group, files)
            if why is not None:
                self._found.left_out.append(f"txids {spans(txids)}: {why}")
                continue
            try:
                same = self._compare_group(group, files, txids)
            except (FileNotFoundError, pa.ArrowException, ValueError) as error:
                self._found.left_out.append(f"txids {spans(txids)}: their rows cannot be read: {error}")
                continue
            if same:
                good |= txids
                rows += sum(source.rows for source in group)
        self._found.rows += rows
        if good:
            self._found.compared.append(
                f"{rows} rows of txids {spans(good)}, which were moved to other files, by content digests of those files"
            )

    def _why_not(self, group: Sequence[_Source], files: set[str]) -> str | None:
        if self._stored_as and self._changed and max(self._changed) >= min(source.version for source in group):
            return "the table's columns were changed since, and files have them by other names (column mapping)"
        if files & self._unrecorded:
            return "their rows were moved into files with rows of txids that are not on record, or not in the range"
        if files & self._trail.mixed:
            return "their rows were moved into files that hold other writers' rows, too"
        if files & self._trail.cut.keys():
            return "rows of their files were deleted"
        if any(source.content is None for source in group):
            return "their rows were moved to other files, and no content digest of them is on record"
        paths = [path for path in files if self._table.log.local_path(path) is None]
        return "their files are not on this machine's file systems" if paths else None

    def _compare_group(self, group: Sequence[_Source], files: set[str], txids: set[int]) -> bool:
        expected: dict[str, Content] = {}
        kinds: tuple[tuple[str, str], ...] = ()
        for source in group:
            assert source.content is not None
            expected[source.partition] = _sum(expected.get(source.partition, NOTHING), source.content)
            kinds = joined(kinds, source.content.kinds)
        found: dict[str, Content] = {}
        for path in sorted(files):
            partition = self._partitions.get(path, "{}")
            found[partition] = _sum(found.get(partition, NOTHING), self._read(path, kinds))
        differs = False
        for partition in sorted({*expected, *found}):
            where = "" if partition == "{}" else f", partition {partition}"
            what = f"txids {spans(txids)}{where}, in files that they were moved to"
            only = next(iter(txids)) if len(txids) == 1 else None
            differs |= self._found.differs(what, expected.get(partition, NOTHING), found.get(partition, NOTHING), only)
        return not differs

    def _read(self, path: str, kinds: Sequence[tuple[str, str]]) -> Content:
        local = self._table.log.local_path(path)
        assert local is not None
        total = ContentSum(kinds)
        with files_at(local).open_native(local) as opened, pq.ParquetFile(opened) as parquet:
            known = {self._stored_as.get(name, name): name for name, _ in kinds}
            stored = [name for name in known if name in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=stored or None):
                names = [known.get(name, name) for name in batch.schema.names]
                total.add(pa.RecordBatch.from_arrays(batch.columns, names=names))
                self._told(batch.num_rows)
        return total.content

    def _told(self, rows: int) -> None:
        self._rows_done += rows
        self._progress(self._rows_done, self._rows_of)

    # -- others' rows ------------------------------------------------------------------------------------------------

    def _others(self, traced: set[str], record: RowsOnRecord) -> None:
        """Live files with rows that no txid of this topology has written."""
        first_ours, since = min(self._commits, default=None), self._since()
        before = unrecorded = 0
        for path in sorted(self._live):
            strangers = self._origins.of(path)
            later = [v for v in strangers if v is not None and first_ours is not None and v > first_ours]
            for version in sorted(v for v in later if v >= since):
                self._found.add(
                    RowProblem.ROWS_ADDED,
                    f"{path} has rows that {self._operations[version]} wrote in version {version}: they are not this "
                    "topology's",
                    by_others=True,
                )
            name = parse_prepared_name(os.path.basename(path))
            mine = name is not None and name.incarnation == self._table.identity.incarnation
            if path in traced or later:
                continue
            if mine or (path in self._trail.known and not strangers):
                unrecorded += 1
            else:
                before += 1
        if self._span[0] > 1:
            return
        if unrecorded:
            self._found.left_out.append(
                f"{unrecorded} files of txids that the ledger has no record of any more (pruned)"
            )
        if before:
            self._found.left_out.append(
                f"{before} files that others wrote before this topology's first version on record"
            )

    def _since(self) -> int:
        """The version from which on other writers' rows are looked for."""
        earlier = [version for version, ours in self._commits.items() if ours.txid < self._span[0]]
        return max(earlier) + 1 if earlier else 0


@dataclass(slots=True)
class _Origins:
    """For each file, the versions of other writers that wrote rows of it; None: not known, or another life's."""

    versions: dict[str, frozenset[int | None]] = field(default_factory=dict[str, frozenset[int | None]])

    def follow(self, entry: LogEntry, *, ours: bool) -> None:
        """Take one more version into account."""
        for file in entry.added:
            if ours:
                self.versions[file.path] = frozenset()
            elif file.path in self.versions:
                continue  # put back by a RESTORE, or listed again with a deletion vector
            elif entry.removed and not entry.changes_rows:
                origins = (self.versions.get(path, _UNKNOWN) for path, _ in entry.removed)
                self.versions[file.path] = frozenset[int | None]().union(*origins)
            else:
                self.versions[file.path] = _UNKNOWN if entry.is_stormproofs else frozenset({entry.version})

    def of(self, path: str) -> frozenset[int | None]:
        """The versions."""
        return self.versions.get(path, _UNKNOWN)


_UNKNOWN: Final = frozenset[int | None]({None})


def _groups(wanted: Sequence[_Source], sources: Sequence[_Source]) -> list[tuple[set[str], list[_Source]]]:
    """The live files with rows of the wanted ones, with those that share a source's rows; and all sources of each."""
    parent: dict[str, str] = {}

    def root(path: str) -> str:
        while (up := parent.setdefault(path, path)) != path:
            parent[path] = path = parent[up]
        return path

    for source in sources:
        first, *others = sorted(source.files) or [""]
        for path in others:
            parent[root(path)] = root(first)
    roots = {root(path) for source in wanted for path in source.files}
    groups: dict[str, tuple[set[str], list[_Source]]] = {one: (set(), []) for one in roots}
    for source in sources:
        found = next((root(path) for path in source.files), "")
        if found in roots:
            groups[found][0].update(source.files)
            groups[found][1].append(source)
    return [groups[one] for one in sorted(groups)]


def _sum(one: Content, other: Content) -> Content:
    return other if one is NOTHING else one + other


def _spelled(values: Mapping[str, Any]) -> str:
    """A partition's values, in order of the columns' names."""
    return json.dumps(dict(sorted(values.items())))


def _partitions(table: DeltaTable) -> dict[str, str]:
    """The partition of each live file; empty where writers may spell one value in several ways."""
    columns = table.metadata().partition_columns
    actions = table.get_add_actions(flatten=True)
    values = [pa.chunked_array(actions.column(f"partition.{name}")).combine_chunks() for name in columns]
    spelled_alike = (pa.types.is_string, pa.types.is_integer, pa.types.is_date)
    if not columns or not all(any(test(value.type) for test in spelled_alike) for value in values):
        return {}
    texts = [value.cast(pa.string()).to_pylist() for value in values]
    paths = map(unquote, actions.column("path").to_pylist())
    rows = zip(*texts, strict=True)
    return {path: _spelled(dict(zip(columns, row, strict=True))) for path, row in zip(paths, rows, strict=True)}


def stored_names(table: DeltaTable) -> dict[str, str]:
    """How columns are called in the table's files, where that is not their name in the table (column mapping)."""
    if table.metadata().configuration.get(_MAPPING, "none") == "none":
        return {}
    return {field.name: str(field.metadata.get(_STORED_AS, field.name)) for field in table.schema().fields}


def _rows_of(table: DeltaTable) -> int | None:
    counted = table.get_add_actions(flatten=True).column("num_records").to_pylist()
    return None if None in counted else sum(counted)


def compare_by_key(
    ours: TransactionalTable,
    table: DeltaTable,
    entries: Sequence[LogEntry],
    read: ReadRecord,
    span: Span,
    found: Compared,
) -> None:
    """Compare the table as a whole, and count the rows of an upsert or a fold by txid."""
    lineage, application = ours.input.lineage, ours.identity.application_id
    column = None if lineage is None else lineage.txid
    _foreign_versions(ours.log, application, entries, span, found)
    if span[1] is None:
        _against_totals(ours, table, found, entries)
    else:
        found.not_in_part(ours.input)
    if column is None:
        return
    if any(_is_another_lifes(entry, application) for entry in entries):
        found.left_out.append("its table holds rows of other lives, too")
        return
    name = '"' + column.replace('"', '""') + '"'
    try:
        query = f"SELECT {name} AS txid, count(*) AS n FROM t GROUP BY 1"
        counted = pa.table(QueryBuilder().register("t", table).execute(query)).to_pylist()
    except (DeltaError, OSError, ValueError) as error:
        found.left_out.append(f"its rows: they cannot be counted by txid: {error}")
        return
    written = {mine.txid: mine.rows for entry in entries if (mine := entry.ours(application)) is not None}
    record = read()
    for txid, files in record.files.items():
        written.setdefault(txid, sum(file.rows for file in files))
    found.by_txid(
        {one["txid"]: int(one["n"]) for one in counted},
        written,
        span,
        given_up=record.given_up,
        pruned=record.pruned,
        began_empty=_began_empty(entries, application),
    )


def _is_another_lifes(entry: LogEntry, application: str) -> bool:
    """Whether Stormproof wrote the version, and neither for this sink nor to mend what it wrote."""
    return (
        entry.is_stormproofs
        and entry.ours(application) is None
        and entry.undo(application) is None
        and entry.info.get(REPAIRS) != application
    )


def _against_totals(ours: TransactionalTable, table: DeltaTable, found: Compared, entries: Sequence[LogEntry]) -> None:
    """The table's keys, its number of rows and its sums, with the record of its commits. Where this sink was renamed, the
    record that goes on is that of its newest name.
    """
    keys, schema, there_now = ours.input.keys, ours.input.schema, table.schema().to_arrow().names
    sums = [name for name in summed_columns(ours.input.folds) if name in there_now]
    application = ours.identity.application_id
    expected = totals_at(ours.log, table, find_position(ours.log, table, application), application)
    newest = max((entry.version for entry in entries if entry.ours(application) is not None), default=-1)
    if any(entry.version > newest and _is_another_lifes(entry, application) for entry in entries):
        expected = None
    if expected is not None and expected.content is not None:
        known = {name for name, _ in expected.content.kinds}
        if _others_changed(entries, application) or not known.issubset(schema.names) or not known.issubset(there_now):
            expected = replace(expected, content=None)
    kinds = () if expected is None or expected.content is None else expected.content.kinds
    there, content = Totals(0, dict.fromkeys(sums, Sum())), ContentSum(kinds)
    try:
        for batch in read_rows(table, schema, [*dict.fromkeys((*keys, *sums, *dict(kinds)))]):
            there = Totals(batch.num_rows + (there.rows or 0), added_up(there.sums, sums_of(batch, sums)))
            content.add(batch)
        keyed = partial(read_rows, table, schema, keys)
        doubled = doubled_keys(keyed, there.rows or 0, keys) if all_hashable(ours.input) else None
    except (DeltaError, OSError, ValueError) as error:
        found.left_out.append(f"its rows: they cannot be read: {error}")
        return
    found.by_key(ours.input, expected, replace(there, content=content.content), doubled)


def _foreign_versions(
    delta_log: DeltaLog, application: str, entries: Sequence[LogEntry], span: Span, found: Compared
) -> None:
    """Versions of other writers that added rows after the first of ours; those that changed rows are in the evidence."""
    began, reach = False, Reach(delta_log)
    taken_back = {entry.version for entry in reversed(entries) if reach.taken_back_by(entry) is not None}
    for entry in entries:
        ours = entry.ours(application)
        began = began or (ours is not None and ours.txid + 1 >= span[0])
        if not began or ours is not None or entry.is_stormproofs or not entry.added or entry.removed:
            continue
        if entry.version not in taken_back:
            found.add(
                RowProblem.ROWS_ADDED,
                f"{entry.operation} in version {entry.version} added {_said_rows(entry)} rows: they are not this topology's",
                by_others=True,
            )


def _said_rows(entry: LogEntry) -> str:
    counted = [file.rows for file in entry.added]
    return "some" if None in counted else str(sum(n or 0 for n in counted))


def _others_changed(entries: Sequence[LogEntry], application: str) -> bool:
    """Whether another writer changed rows behind the first transaction of ours."""
    ours = [entry.ours(application) is not None or entry.undo(application) is not None for entry in entries]
    behind = entries[ours.index(True) :] if True in ours else []
    return any(e.ours(application) is None and e.undo(application) is None and e.changes_content for e in behind)


def _began_empty(entries: Sequence[LogEntry], application: str) -> bool:
    """Whether the table was made and had no row before the first transaction of ours."""
    if not entries or entries[0].version > 0:
        return False
    for entry in entries:
        if entry.ours(application) is not None:
            return True
        if entry.added:
            return False
    return True
