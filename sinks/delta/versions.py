"""A Delta table's versions: the newest one, as it is loaded, and the next one, which delta-rs writes, or which is put here.

What has changed since the last call is loaded, but for appends of our own. A commit that only adds files needs no more than
the `TableHead`. delta-rs lists the log's folder before and after it writes an entry, which takes a millisecond for each
thousand of them. A version that only adds files, right behind the newest one, needs neither: its entry is put under a name
that must be free. That is Delta's own rule for a commit (PROTOCOL.md of delta-io/delta, "Delta Log Entries"), and nothing
that another writer did can lie between the two versions.

delta-rs wraps the operating system's errors into errors of its own, of several classes: a MERGE on a full disk raises a
`DeltaError` about Parquet. The number of the system's error stays in the text, and it decides whether an error comes from
the machine and may pass or is the table's refusal.

Two drivers must not both write one version of the log. In a store this rests on a PUT on the condition that its name is
free. A store that lacks that is refused by name, where it can be told.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from typing import Any, Final, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Metadata, PostCommitHookProperties, QueryBuilder, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.table import ProtocolVersions
from deltalake.transaction import AddAction

from stormproof.core.base.arrow import pc
from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import SinkRefused, StoreUnavailable
from stormproof.core.contract.sink import SinkInput
from stormproof.core.storage.protocol import FileState, is_url, storage_options
from stormproof.core.task.router import hash_keys, is_hashable
from stormproof.sinks.contract.protocol import SinkProblem
from stormproof.sinks.delta.log import LAST_CHECKPOINT, SUPERSEDED, DeltaLog, Label, now_ms
from stormproof.sinks.delta.power_loss import written_for
from stormproof.sinks.rows.merge_sql import DATAFUSION, assignments, later_condition, quoted, same_key

_NUMBER: Final = re.compile(r"\(os error (\d+)\)")
_NO_MEMORY: Final = "Resources exhausted"
"""What DataFusion, which runs a MERGE, says where it gets no memory, or no disk space to spill to."""

_PANIC: Final = "PanicException"
"""What PyO3 raises for a panic in delta-rs, for example where no more files may be opened. Its class cannot be imported."""

_PANIC_NUMBER: Final = re.compile(r"Os \{ code: (\d+)")

_OF_A_STORE: Final = re.compile(
    r"Generic (?:S3|GCS|MicrosoftAzure|HTTP) error|error sending request|Error performing \w+ https?://"
)
"""How the client of an object store begins its errors: the network, the server, an expired credential."""

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")

_OF_THE_TABLE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""A path that does not exist, or is of another kind: waiting brings no file back."""


def may_pass(error: Exception) -> bool:
    """Whether an error that left no log entry may be gone at the next try: a full or failing disk, a missing right, another
    writer's commit that came first. All other errors are the table's own answer, and stay.
    """
    if isinstance(error, CommitFailedError | OSError):
        return True
    text = str(error)
    if _OF_A_STORE.search(text):
        return True
    number = os_error(error)
    return _NO_MEMORY in text if number is None else number not in _OF_THE_TABLE


OTHERS_CHANGED: Final = "another writer changed the table meanwhile"
"""How an OSError begins that stands for such an error of Spark's."""


def is_conflict(error: BaseException | None) -> bool:
    """Whether another writer's commit came first."""
    return isinstance(error, CommitFailedError) or (
        isinstance(error, OSError) and str(error).startswith(OTHERS_CHANGED)
    )


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Around a call of delta-rs: turn a panic, which `except Exception` does not catch, into an error that tells its cause.

    Raises:
        OSError: the operating system refused something, by the panic's text.
        DeltaError: any other panic.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        number = _PANIC_NUMBER.search(str(error))
        if number is None:
            raise DeltaError(f"delta-rs panicked: {error}") from error
        raise OSError(int(number[1]), f"delta-rs panicked: {error}") from error


def os_error(error: Exception) -> int | None:
    """The operating system's error number, which delta-rs has in its text; None where there is none."""
    numbers = _NUMBER.findall(str(error))
    if numbers:
        return int(numbers[-1])
    return error.errno if isinstance(error, OSError) else None


def shown(error: Exception) -> str:
    """An error's text in one line, without the colours that delta-rs puts into some of them."""
    return " ".join(_COLOURS.sub("", str(error)).split())


def load_table(address: str) -> DeltaTable:
    """The table at its newest version. Raises as delta-rs does."""
    return DeltaTable(address, storage_options=options_of(address))


def is_table(address: str) -> bool:
    """Whether there is a Delta table. Raises as delta-rs does."""
    return DeltaTable.is_deltatable(address, storage_options=options_of(address))


def options_of(address: str) -> dict[str, str] | None:
    """What delta-rs takes as `storage_options`; None for a local folder."""
    return dict(storage_options(address)) if is_url(address) else None


HOOKS: Final = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
"""Old log entries must stay until the checkpoint that replaces them is synced, so we remove them ourselves."""


def read_rows(table: DeltaTable, schema: pa.Schema, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """These columns of all rows, in the types of the schema. No statistics are gone by."""
    asked = f"SELECT {', '.join(map(quoted, names))} FROM t"
    for batch in pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(asked)):
        columns = [pc.cast(batch.column(at), schema.field(name).type) for at, name in enumerate(names)]
        yield pa.RecordBatch.from_arrays(columns, schema=pa.schema([schema.field(name) for name in names]))


def all_hashable(input_: SinkInput) -> bool:
    """Whether `rows_of_keys` can tell the keys apart."""
    return all(is_hashable(input_.schema.field(key).type) for key in input_.keys)


def rows_of_keys(table: DeltaTable, added: pa.Table, input_: SinkInput) -> pa.Table:
    """The rows whose keys `added` has; by an accident of 2^-64 others, too. The whole table is read, in bounded memory."""
    schema, keys, found = input_.schema, input_.keys, list[pa.RecordBatch]()
    wanted = np.unique(np.concatenate([hash_keys(batch, keys) for batch in added.to_batches()]))
    for batch in read_rows(table, schema, schema.names):
        hashes = hash_keys(batch, keys)
        at = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        found.append(batch.filter(pa.array(wanted[at] == hashes)))
    return pa.Table.from_batches(found, schema)


def add_files(table: DeltaTable, files: Sequence[AddAction], properties: CommitProperties) -> None:
    """Add files that are in the table's folder already. Without files the version holds its transaction identifier alone."""
    table.create_write_transaction(
        list(files),
        "append",
        table.schema(),
        table.metadata().partition_columns,
        commit_properties=properties,
        post_commithook_properties=HOOKS,
    )


def merge_rows(
    table: DeltaTable,
    rows: pa.Table | pa.RecordBatchReader,
    input_: SinkInput,
    properties: CommitProperties,
    *,
    streamed: bool = False,
) -> None:
    """MERGE rows by their keys: a column with a fold is folded, every other column is replaced; of an upsert, only where the
    added row is the later one. There must be at least one row.

    A MERGE that changes no row commits nothing, not even its transaction identifier. Then the identifier is committed by
    itself, and with it that all of the rows were superseded.
    """
    added, changed = {quoted(n): DATAFUSION.both(n)[1] for n in input_.schema.names}, assignments(input_, DATAFUSION)
    merge = table.merge(
        rows,
        same_key(input_, DATAFUSION),
        source_alias="s",
        target_alias="t",
        streamed_exec=streamed,
        writer_properties=written_for(table),
        commit_properties=properties,
        post_commithook_properties=HOOKS,
    ).when_not_matched_insert(added)
    if changed:
        merge = merge.when_matched_update(changed, predicate=later_condition(input_, DATAFUSION))
    metrics = merge.execute()
    if not metrics["num_target_rows_inserted"] + metrics["num_target_rows_updated"]:
        add_files(table, [], _with_superseded(properties, int(metrics["num_source_rows"])))


def _with_superseded(properties: CommitProperties, rows: int) -> CommitProperties:
    metadata = dict(properties.custom_metadata or {})
    before = int(metadata.get(SUPERSEDED, 0))
    return CommitProperties(
        custom_metadata={**metadata, SUPERSEDED: str(before + rows)},
        max_commit_retries=properties.max_commit_retries,
        app_transactions=properties.app_transactions,
    )


# ---- the newest version, and an entry behind it


class TableHead(Protocol):
    """One version of a table: a loaded `DeltaTable` is one, and `TableAhead` is."""

    def version(self) -> int:
        """Its number."""
        ...

    def transaction_version(self, app_id: str) -> int | None:
        """The newest version of an application's transaction identifier."""
        ...

    def metadata(self) -> Metadata:
        """Id, partition columns and properties."""
        ...

    def protocol(self) -> ProtocolVersions:
        """The versions and features that it asks of readers and writers."""
        ...

    def schema(self) -> Schema:
        """Its columns."""
        ...


@dataclass(frozen=True, slots=True)
class TableAhead:
    """A version that is known without being loaded: behind the loaded one lie only versions that this process wrote, each
    of which added files under its own identifier and changed nothing else.
    """

    loaded: DeltaTable
    number: int
    identifiers: Mapping[str, int]

    def version(self) -> int:
        """Its number."""
        return self.number

    def transaction_version(self, app_id: str) -> int | None:
        """What this process wrote last, else what is loaded."""
        return self.identifiers[app_id] if app_id in self.identifiers else self.loaded.transaction_version(app_id)

    def metadata(self) -> Metadata:
        """As loaded."""
        return self.loaded.metadata()

    def protocol(self) -> ProtocolVersions:
        """As loaded."""
        return self.loaded.protocol()

    def schema(self) -> Schema:
        """As loaded."""
        return self.loaded.schema()


SEEN_MAX_S: Final = 600.0
"""How long after it was seen as the newest, a version may be taken for it because there is none behind it."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """How the log was when a version was the newest: its entry, and the file that names the last checkpoint.

    A loaded table that wrote a version itself, as by a MERGE, is at that version since.
    """

    head: DeltaTable | TableAhead
    version: int
    entry: FileState
    checkpoint: FileState | None
    at_s: float


class NewestTable:
    """Keeps one table loaded, and brings it up to date at each call.

    Versions have no gaps. So a version whose entry is the same file as before is still the newest one where the next
    version's entry is missing, and delta-rs need not list the log's folder to find that out, which takes about a millisecond
    for each thousand entries in it. But a clean-up removes entries, in any order, and may have taken the next one and left
    this one. It needs a checkpoint of a later version first, and removes only entries that are older than the log's
    retention: where either may be so, the table is loaded anew.
    """

    def __init__(self, log: DeltaLog, where: str, clock: Clock | None = None) -> None:
        self._log = log
        self._where = where
        self._clock = clock or SystemClock()
        self._loaded: _Seen | None = None
        self._ahead: _Seen | None = None

    def forget(self) -> None:
        """Load it anew the next time."""
        self._loaded = self._ahead = None

    def head(self) -> DeltaTable | TableAhead:
        """The newest version without its files: not loaded where it is one that `follow` was told of, else as by `load`."""
        ahead = self._ahead
        try:
            if (
                ahead is not None
                and self._is_unchanged(ahead, self._checkpoint_state())
                and self._entry_state(ahead.head.version() + 1) is None
            ):
                return ahead.head
        except OSError as error:
            raise self._unreadable(error) from error
        return self.load()

    def is_as_seen(self, head: TableHead) -> bool:
        """Whether `head` was the newest version not long ago, its entry is still the same, and no clean-up can have removed
        the next one.

        Raises:
            OSError: the log cannot be read.
        """
        seen = self._seen(head)
        return seen is not None and self._is_unchanged(seen, self._checkpoint_state())

    def follow(self, head: TableHead, label: Label) -> None:
        """This process wrote the version behind `head`, which adds files under this label and changes nothing else."""
        seen, self._ahead = self._seen(head), None
        if seen is None:
            return
        number = head.version() + 1
        try:
            entry = self._entry_state(number)
        except OSError:
            return  # it is in the log, and the next call asks again
        if entry is None:
            return
        known = seen.head if isinstance(seen.head, TableAhead) else TableAhead(seen.head, number, {})
        ahead = TableAhead(known.loaded, number, {**known.identifiers, label.application: label.version})
        # The checkpoint as it was when the version before was seen as the newest: one made since is noticed.
        self._ahead = _Seen(ahead, number, entry, seen.checkpoint, self._clock.monotonic_s())

    def load(self) -> DeltaTable:
        """The table at its newest version.

        Loading a table anew reads its whole state. So the loaded one is updated, as long as the log is as it was seen; a log
        that was cut or replaced is loaded anew.

        Raises:
            SinkRefused: the table is gone.
            StoreUnavailable: it cannot be read.
        """
        seen, self._loaded, self._ahead = self._loaded, None, None
        at_s = self._clock.monotonic_s()
        try:
            # Looked at before the table is loaded: a checkpoint that is made meanwhile is noticed the next time.
            checkpoint = self._checkpoint_state()
            if seen is not None and isinstance(seen.head, DeltaTable) and self._is_unchanged(seen, checkpoint):
                table = seen.head
                if self._entry_state(table.version() + 1) is not None:
                    with panics_as_errors():
                        table.update_incremental()
                elif table.version() == seen.version:
                    self._loaded = seen
                    return table
            else:
                with panics_as_errors():
                    table = load_table(self._log.table)
            entry = self._entry_state(table.version())
        except TableNotFoundError as error:
            raise SinkRefused(
                f"{self._where}: the table is gone: {shown(error)}", problem=SinkProblem.TABLE_GONE
            ) from error
        except (DeltaError, OSError) as error:
            raise self._unreadable(error) from error
        self._loaded = None if entry is None else _Seen(table, table.version(), entry, checkpoint, at_s)
        return table

    def _seen(self, head: TableHead) -> _Seen | None:
        return next((seen for seen in (self._ahead, self._loaded) if seen is not None and seen.head is head), None)

    def _is_unchanged(self, seen: _Seen, checkpoint: FileState | None) -> bool:
        return (
            self._clock.monotonic_s() - seen.at_s < SEEN_MAX_S
            and self._entry_state(seen.version) == seen.entry
            and checkpoint == seen.checkpoint
        )

    def _unreadable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self._where}: the table cannot be read: {shown(error)}")

    def _entry_state(self, version: int) -> FileState | None:
        return self._log.files.stat(self._log.entry_path(version))

    def _checkpoint_state(self) -> FileState | None:
        return self._log.files.stat(os.path.join(self._log.folder, LAST_CHECKPOINT))


_BY_VERSION: Final[Mapping[int, list[str]]] = {5: ["columnMapping"], 6: ["columnMapping", "identityColumns"]}
_LISTS_FEATURES: Final = 7
"""Writer versions of the protocol: what a version has that does not list its features, and the one that lists them."""
_PLAIN: Final = frozenset(
    {"appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "deletionVectors"}
    | {"timestampNtz", "vacuumProtocolCheck"}
)
"""The features that ask nothing of an added file's action, nor of its entry. The rows were checked before."""
_CHECKPOINT_INTERVAL: Final = "delta.checkpointInterval"
_CHECKPOINT_INTERVAL_OF_DELTA_RS: Final = 100
_NAMES: Final = "/="
"""Beside letters, digits, "_", ".", "-" and "~", what a path may have that every writer spells alike."""


def put_next(log: DeltaLog, table: TableHead, files: Sequence[AddAction], label: Label) -> bool:
    """Put the entry of the version behind `table`'s, which adds files and holds the label; whether it was put.

    False, and nothing was written: another writer's version came first, or the version is delta-rs's to write, since the
    table has other features, a checkpoint is due with it, or the log is no longer the one that was loaded.

    Raises:
        OSError: the place refuses, or does not answer. The entry may be there, or arrive yet.
    """
    read = table.version()
    if not is_ours(table, [file.path for file in files]) or log.files.stat(log.entry_path(read)) is None:
        return False
    try:
        log.files.put_new(log.entry_path(read + 1), _adding(table, files, label))
    except FileExistsError:
        return False
    return True


def is_ours(table: TableHead, paths: Iterable[str]) -> bool:
    """Whether, by the table and these paths, the version behind `table`'s that adds the files may be put here."""
    checkpoint_is_due = (table.version() + 2) % _checkpoint_interval(table) == 0
    return has_plain_features(table) and not checkpoint_is_due and all(quote(p, safe=_NAMES) == p for p in paths)


def entry_of(operation: str, parameters: Mapping[str, str], actions: Iterable[Any], more: Mapping[str, Any]) -> bytes:
    """A log entry: its `commitInfo`, with `more` in it, and the other actions.

    Raises:
        UnicodeEncodeError: a text has half of a surrogate pair, for which the log would be unreadable.
    """
    info = {
        "timestamp": now_ms(),
        "operation": operation,
        "operationParameters": dict(parameters),
        "engineInfo": "stormproof",
        **more,
    }
    # Without a line's end at the end: a power loss that takes it leaves a whole entry, and every other part is torn.
    return "\n".join(_compact(action) for action in ({"commitInfo": info}, *actions)).encode()


def _adding(table: TableHead, files: Sequence[AddAction], label: Label) -> bytes:
    adds = [
        {
            "add": {
                "path": file.path,
                "partitionValues": file.partition_values,
                "size": file.size,
                "modificationTime": file.modification_time,
                "dataChange": file.data_change,
                "stats": file.stats,
            }
        }
        for file in files
    ]
    identifiers = [
        {"txn": {"appId": one.app_id, "version": one.version, "lastUpdated": one.last_updated}}
        for one in label.identifiers()
    ]
    parameters = {"mode": "Append", "partitionBy": _compact(table.metadata().partition_columns)}
    return entry_of("WRITE", parameters, [*adds, *identifiers], label.metadata)


def _compact(value: Any) -> str:
    """As JSON without spaces, like the entries of other writers."""
    return dumps(value, ensure_ascii=False, separators=(",", ":"))


def has_plain_features(table: TableHead) -> bool:
    """Whether none of the table's features asks anything of an added file's action, nor of its entry."""
    return not other_features(table)


def other_features(table: TableHead) -> list[str]:
    """The features of the table that may ask something of an added file's action, or of its entry."""
    protocol = table.protocol()
    version = protocol.min_writer_version
    if version > _LISTS_FEATURES:
        return [f"writer version {version}"]
    if version == _LISTS_FEATURES:
        return sorted({*(protocol.writer_features or ())} - _PLAIN)
    return _BY_VERSION.get(version, [])


def _checkpoint_interval(table: TableHead) -> int:
    """How many versions lie between two checkpoints; 1, which leaves each of them to delta-rs, where that cannot be read."""
    asked = table.metadata().configuration.get(_CHECKPOINT_INTERVAL)
    if asked is None:
        return _CHECKPOINT_INTERVAL_OF_DELTA_RS
    return int(asked) if asked.isdecimal() and int(asked) > 0 else 1
