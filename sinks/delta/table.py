"""What a Delta table must be for us to write to it: its columns' types, its protocol, its settings; and which folder a path
stands for, since two sinks of one topology must not share one. `TableRecord` is what its log holds for one sink: its
position, its evidence, and the files of its last commit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, Field, Schema
from deltalake.schema import PrimitiveType

from stormproof.core.base.errors import PositionMismatch, SinkRefused, StoreUnavailable, TopologyError
from stormproof.core.contract.sink import SinkInput, TableKey
from stormproof.core.storage.protocol import is_url
from stormproof.sinks.contract.protocol import (
    EvidenceReport,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkProblem,
    StoreRecord,
)
from stormproof.sinks.contract.row_rule import require_lineage_takes_null
from stormproof.sinks.delta.evidence import LogPosition, evidence_of, find_position, lost_files, tail_since
from stormproof.sinks.delta.features import (
    DEFAULT,
    GENERATED,
    IDENTITY,
    TEXT_TYPE,
    AskedCommitter,
    Committer,
    TableFacts,
    characters_max,
    choose,
    refusal,
)
from stormproof.sinks.delta.judge import dividing
from stormproof.sinks.delta.log import APPLICATION, DeltaLog, OurCommit, live_files
from stormproof.sinks.delta.versions import NewestTable, TableHead
from stormproof.sinks.rows.limits import ColumnLimit, Limits, is_list, is_string

FOLDER_NAME_BYTES_MAX: Final = 255
PATH_BYTES_MAX: Final = 4_096
OBJECT_KEY_BYTES_MAX: Final = 1_024
FILE_NAME_BYTES: Final = 100
"""The longest names that file systems and object stores take, and what the name of a table's file takes, with a margin."""

CHECKPOINT_INTERVAL: Final = 100
"""Delta's default of 10 writes the table's whole state at every tenth commit, which is too often for small batches."""


def require_table(table: TableHead, input_: SinkInput, where: str, asked: AskedCommitter = "auto") -> Committer:
    """Refuse a table that cannot hold such rows, or to which nobody writes them safely; returns who is to write.

    `asked` is who shall write: "auto" is delta-rs where it can.

    Raises:
        SinkRefused: names the column and both types, or the feature, and what to do.
    """
    _require_columns(table, input_, where)
    return _require_features(table, input_, where, asked)


def committer_of(table: TableHead, input_: SinkInput, asked: AskedCommitter) -> Committer:
    """Who is to write to the table; it may refuse the rows all the same."""
    return choose(TableFacts.of(table, input_.mode), input_.mode).committer if asked == "auto" else Committer(asked)


def require_plain_files(table: TableHead, where: str) -> None:
    """Refuse a table whose files do not have all of its columns: a map reads the files as they are.

    Raises:
        SinkRefused: names the partition columns.
    """
    columns = table.metadata().partition_columns
    if columns:
        raise SinkRefused(
            f"{where}: the table is partitioned by {', '.join(columns)}, and a map reads no partitions; use another table"
        )


def require_more_than_partitions(table: DeltaTable, input_: SinkInput, where: str) -> None:
    """Refuse rows of partition columns alone: a file without a column holds no row. Spark says so at the commit.

    Raises:
        SinkRefused: names the partition columns.
    """
    columns = table.metadata().partition_columns
    if not input_.is_by_key and set(input_.schema.names) <= set(columns):
        raise SinkRefused(
            f"{where}: the table is partitioned by {', '.join(columns)}, and the rows have no other column: a file "
            "of such a table could hold no row of them. Give the rows one more column of the table",
            columns=[*columns],
        )


def column_limits(table: DeltaTable, input_: SinkInput, address: str) -> Limits:
    """What the writer stage checks: keys, columns of `order_by` and NOT NULL columns hold no NULL, text is no longer than
    its `varchar(n)`, and text by which a table is partitioned fits a file's path.
    """
    fields = table.schema().fields
    lengths = {f.name: characters_max(f.metadata.get(TEXT_TYPE)) for f in fields}
    return _limits(
        input_, {f.name for f in fields if not f.nullable}, table.metadata().partition_columns, lengths, address
    )


def limits_of_new(input_: SinkInput, partitions: Sequence[str], address: str) -> Limits:
    """The same for a table that is made for such rows."""
    return _limits(input_, {f.name for f in input_.schema if not f.nullable}, partitions, {}, address)


def _limits(
    input_: SinkInput,
    not_null: Set[str],
    partitions: Collection[str],
    lengths: Mapping[str, int | None],
    address: str,
) -> Limits:
    required = {*not_null, *input_.keys, *input_.order_by}
    return Limits(
        tuple(
            ColumnLimit(
                f.name,
                "a partition column" if f.name in partitions else str(f.type),
                not_null=f.name in required,
                path_bytes_max=_path_share(f.name, address, len(partitions)) if f.name in partitions else None,
                chars_max=lengths.get(f.name),
            )
            for f in input_.schema
        )
    )


def _path_share(name: str, address: str, partitions: int) -> int:
    """How many bytes a partition column's value may take: a folder's name ``name=value`` 255, and the whole path of a file,
    or the key of an object, what the system takes.
    """
    whole = OBJECT_KEY_BYTES_MAX if is_url(address) else PATH_BYTES_MAX
    folder = (whole - len(address.encode()) - FILE_NAME_BYTES) // partitions - 1
    return min(FOLDER_NAME_BYTES_MAX, folder) - len(name.encode()) - 1


def _require_columns(table: TableHead, input_: SinkInput, where: str) -> None:
    there = {f.name: f for f in table.schema().fields}
    for asked in Schema.from_arrow(input_.schema).fields:
        found = there.pop(asked.name, None)
        if found is None:
            raise SinkRefused(f"{where}: the table has no column {asked.name!r}", column=asked.name)
        if _arrow(found) != _arrow(asked):
            raise SinkRefused(
                f"{where}: column {asked.name!r} is {_type_name(found)} in the table and {_type_name(asked)} in the rows",
                column=asked.name,
                table_type=_type_name(found),
                rows_type=_type_name(asked),
            )
    require_lineage_takes_null(input_, {f.name for f in table.schema().fields if not f.nullable}, where)
    for name, field in there.items():
        if not field.nullable and not _is_filled(field):
            raise SinkRefused(
                f"{where}: the table's column {name!r} is NOT NULL, and the rows do not have it", column=name
            )


def _is_filled(field: Field) -> bool:
    """Whether Spark fills a column that the rows do not have."""
    return any(key in (GENERATED, DEFAULT) or key.startswith(IDENTITY) for key in field.metadata)


def _arrow(field: Field) -> pa.DataType:
    """Its type without what the table notes of fields inside of it, such as a comment, or their name in its files."""
    return pa.field(field.to_arrow()).type


def _type_name(field: Field) -> str:
    return str(field.type.type) if isinstance(field.type, PrimitiveType) else str(_arrow(field))


def _require_features(table: TableHead, input_: SinkInput, where: str, asked: AskedCommitter) -> Committer:
    choice = choose(TableFacts.of(table, input_.mode), input_.mode)
    if choice.refused:
        raise SinkRefused(
            f"{where}: {refusal(choice.refused[0], input_.mode)}",
            features=[found.feature.name for found in choice.refused],
        )
    if choice.needs_spark and asked == "delta-rs":
        raise SinkRefused(
            f"{where}: the table has {'; '.join(f.text for f in choice.needs_spark)}, which delta-rs does not write; a sink "
            "with committer='auto' or 'spark' does",
            features=[f.feature.name for f in choice.needs_spark],
        )
    divide = dividing(table.metadata().configuration)
    if divide and asked != "spark" and choice.committer is Committer.DELTA_RS:
        raise SinkRefused(
            f"{where}: the table's CHECK constraint {divide[0]!r} divides, and delta-rs leaves out the remainder where "
            "Spark does not: it could let rows in that violate the constraint. Give DeltaSink committer='spark'",
            constraint=divide[0],
        )
    return choice.committer if asked == "auto" else Committer(asked)


def key_of_path(path: str) -> TableKey:
    """Equal for paths that are spelled alike."""
    return "delta by path", path


def locate(path: str, where: str) -> TableKey:
    """The folder's device and inode, by whatever path it is reached; where it is not made yet, those of the nearest folder
    above it, and the names from there. In an object store, the URL.

    Raises:
        StoreUnavailable: the file system does not answer.
    """
    if is_url(path):
        return "delta", path.replace("s3a://", "s3://", 1).rstrip("/")
    there, down = os.path.realpath(path), list[str]()
    while True:
        try:
            found = os.stat(there)
            return "delta", found.st_dev, found.st_ino, *reversed(down)
        except FileNotFoundError:
            there, name = os.path.split(there)
            down.append(name)
        except OSError as error:
            raise StoreUnavailable(f"{where}: {error}; nothing was written") from error


_HINTS: Final = (
    (pa.types.is_unsigned_integer, "; cast it to the next wider signed integer"),
    (
        pa.types.is_timestamp,
        "; Delta holds microseconds without a zone or in UTC: timestamp[us] or timestamp[us, tz=UTC]",
    ),
    (pa.types.is_time, "; send it as text or as a number of microseconds"),
    (pa.types.is_duration, "; send it as a number of microseconds"),
    (pa.types.is_decimal, "; write decimal128 with at most 38 digits"),
    (pa.types.is_date64, "; write date32"),
    (pa.types.is_fixed_size_binary, "; write binary"),
)
_ZONES: Final = (None, "UTC")


def check_types(schema: pa.Schema, where: str) -> None:
    """Refuse columns that no Delta table can hold, also inside of structs, arrays and maps.

    Raises:
        TopologyError: names the column, the place inside of it, and the type.
    """
    for field in schema:
        for path, kind in _refused(field.type, ""):
            hint = next((text for matches, text in _HINTS if matches(kind)), "")
            inside = f" (in {field.name}{path})" if path else ""
            raise TopologyError(
                f"{where}: column {field.name!r} is {kind}{inside}, which Delta cannot hold{hint}", field=field.name
            )


def _refused(kind: pa.DataType, path: str, *, in_map: bool = False) -> list[tuple[str, pa.DataType]]:
    """The types at the leaves of a type that Delta lacks, each with its path."""
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        found = [_refused(f.type, f"{path}.{f.name}", in_map=in_map) for f in fields]
        return list(chain.from_iterable(found)) if fields else [(path, kind)]
    if is_list(kind):
        return _refused(kind.value_type, f"{path}[]", in_map=in_map)
    if pa.types.is_map(kind):
        keys = _refused(kind.key_type, f"{path}{{key}}", in_map=True)
        return keys + _refused(kind.item_type, f"{path}{{value}}", in_map=True)
    # delta-rs overlooks it there when it makes a table: nobody could read the table, for its protocol lacks timestampNtz.
    unreadable = in_map and pa.types.is_timestamp(kind) and kind.tz is None
    return [] if _holds(kind) and not unreadable else [(path, kind)]


def _holds(kind: pa.DataType) -> bool:
    if pa.types.is_timestamp(kind):
        return kind.unit == "us" and kind.tz in _ZONES
    if pa.types.is_dictionary(kind):
        return is_string(kind.value_type)
    return bool(
        is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_signed_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_date32(kind)
    )


# ---- what the log holds for one sink


class TableRecord(StoreRecord):
    """A Delta table's log as one sink or map reads it."""

    def __init__(self, path: str, identity: SinkIdentity, input_: SinkInput) -> None:
        self._identity = identity
        self.input = input_
        self.log = DeltaLog(path)
        self.where = f"sink {identity.sink!r} ({path})"
        self._application = identity.application_id
        self._newest = NewestTable(self.log, self.where)
        self._table_id = ""

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

    def position(self, table: TableHead, *, same_table: bool) -> LogPosition | None:
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
        return self.identity.other_lives(self.writers())

    def held(self) -> Held | None:
        """The last transaction in the table's log, read afresh.

        Raises:
            PositionMismatch: a RESTORE took its rows back, or this is another table.
            SinkRefused: the table is gone.
            StoreUnavailable: it cannot be read.
        """
        position = self.position(self._newest.load(), same_table=True)
        return None if position is None else position.held

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

    def count_rows(self, limit: int) -> int:
        """The number of rows in the newest version by the statistics of its files; `limit` where a file has none."""
        counted = self._newest.load().get_add_actions(flatten=True).column("num_records").to_pylist()
        return limit if None in counted else min(sum(counted), limit)

    def _require_live(self, position: LogPosition | None) -> None:
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
        # Added files were synced before they were prepared, a committer's own only after its commit: so these are decoded.
        decode = self.log.files.is_local and self._is_copied(commit)
        return lost_files(self.log, entry, self.log.tail(self._newest.load().version()), decode=decode)

    def _is_copied(self, commit: OurCommit) -> bool:
        """Whether a committer wrote files of its own, instead of adding the prepared ones."""
        entry = self.log.entry(commit.version)
        return self.input.is_by_key or (entry is not None and entry.is_by_spark)

    def has_added(self, transaction: PreparedTransaction) -> bool:
        """Whether the files of a transaction are the table's own; True where its commit is not the last one, or is gone."""
        position = self.position(self._newest.load(), same_table=False)
        if position is None or position.commit is None or position.txid != transaction.txid:
            return True
        entry = self.log.entry(position.commit.version)
        return entry is None or not {f.path for f in entry.added}.isdisjoint(f.path for f in transaction.files)

    def added_files(self) -> frozenset[str]:
        """The files that are live, or that a version still in the log has added: they are the table's, whatever the ledger
        says.
        """
        if self.input.is_by_key:
            return frozenset()
        logged = {file.path for v in self.log.versions() if (e := self.log.entry(v)) is not None for file in e.added}
        return frozenset(live_files(self._newest.load()).keys() | logged)
