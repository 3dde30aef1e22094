"""What the core knows of a sink: its input, and inside an executor its checks and prepared files.

Sinks implement it (`stormproof.sinks`); topology and stage code know no more of them than this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import Json, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.fold import AnyFold, ByOrder, Fold, SetTruncated, SetUnion, fold_to_json
from stormproof.core.contract.source import SourceKind

TXID: Final = "_txid"
MESSAGE: Final = "_message_id"


@dataclass(frozen=True, slots=True)
class Lineage:
    """The names of the columns that a sink stores behind each row's own; None: that one is not stored.

    `txid` is the transaction that wrote the row. `message` is the id, as people see it, of the one message that the row was
    made of; NULL where there were several, or where they are not known one by one (a group's result).
    """

    txid: str | None = TXID
    message: str | None = MESSAGE

    @property
    def columns(self) -> pa.Schema:
        """The columns, in the order in which they are stored."""
        txid = [] if self.txid is None else [pa.field(self.txid, pa.int64())]
        message = [] if self.message is None else [pa.field(self.message, pa.string())]
        return pa.schema([*txid, *message])

    def added_to(self, rows: pa.RecordBatch, txid: int, message: Callable[[], pa.Array]) -> pa.RecordBatch:
        """The rows with these columns behind their own; `message` gives their messages' ids, and is called where these are
        stored.
        """
        made = [] if self.txid is None else [pa.repeat(pa.scalar(txid, pa.int64()), rows.num_rows)]
        if self.message is not None:
            made.append(message())
        return pa.RecordBatch.from_arrays([*rows.columns, *made], schema=pa.schema([*rows.schema, *self.columns]))


class SinkMode(StrEnum):
    """What becomes of a row in the sink's table."""

    APPEND = "append"
    """It is added."""
    UPSERT = "upsert"
    """It replaces the row of its key, or is added where there is none."""
    FOLD = "fold"
    """It is folded into the row of its key, column by column, or added where there is none."""


@dataclass(frozen=True, slots=True)
class SinkInput:
    """What arrives at a sink: the rows' schema, and what becomes of a row. `SinkInput(schema)` is for append.

    `keys` names the key columns of an upsert and of a fold; of an append, the columns by which rows were grouped, if
    any. The rows of one batch hold each key once where there are keys. `folds` says how each other column folds.

    Of an upsert, `order_by` names the columns by which one row of a key is later than another; empty: every row replaces
    the one that is there. `delete_when` is the column that marks a deleted key. `keep` names the columns that an update
    leaves alone.

    The columns of `lineage` are the last ones of `schema`. Rows come without them up to the sink's writer. They are no part
    of what a row says: they decide nothing in an upsert, and no key.
    """

    schema: pa.Schema
    keys: tuple[str, ...] = ()
    folds: Mapping[str, AnyFold] = field(default_factory=dict[str, AnyFold])
    mode: SinkMode = SinkMode.APPEND
    order_by: tuple[str, ...] = ()
    delete_when: str | None = None
    keep: tuple[str, ...] = ()
    lineage: Lineage | None = None

    def __post_init__(self) -> None:
        if bool(self.folds) != (self.mode is SinkMode.FOLD):
            raise ValueError(f"a sink's input of mode {self.mode} has {len(self.folds)} folds: only a fold has any")

    @classmethod
    def for_upsert(
        cls,
        schema: pa.Schema,
        keys: tuple[str, ...],
        order_by: tuple[str, ...] = (),
        *,
        delete_when: str | None = None,
        keep: tuple[str, ...] = (),
    ) -> SinkInput:
        """Each row replaces the one of its key; with `order_by`, unless that one is later."""
        return cls(schema, keys, mode=SinkMode.UPSERT, order_by=order_by, delete_when=delete_when, keep=keep)

    @classmethod
    def for_fold(cls, schema: pa.Schema, keys: tuple[str, ...], folds: Mapping[str, AnyFold]) -> SinkInput:
        """Each row is folded into the one of its key."""
        return cls(schema, keys, folds, SinkMode.FOLD)

    @property
    def is_by_key(self) -> bool:
        """Whether rows change rows that the table has (upsert, fold), rather than being added to them (append)."""
        return self.mode is not SinkMode.APPEND

    @property
    def described_folds(self) -> dict[str, Json]:
        """How each column folds, as ledger and graph keep it."""
        return {name: fold_to_json(fold) for name, fold in self.folds.items()}

    @property
    def upsert_rule(self) -> dict[str, Json]:
        """What an upsert is beyond its key, as ledger and graph keep it; empty for other modes."""
        if self.mode is not SinkMode.UPSERT:
            return {}
        rule: dict[str, Json] = {"order_by": [*self.order_by], "delete_when": self.delete_when, "keep": [*self.keep]}
        return {"mode": self.mode.value, **rule}

    @property
    def described_lineage(self) -> dict[str, Json]:
        """The names of the lineage columns, as ledger and graph keep them; empty where there are none."""
        if self.lineage is None:
            return {}
        return {"lineage": {"txid": self.lineage.txid, "message": self.lineage.message}}


APPEND_AND_FOLD: Final = frozenset({SinkMode.APPEND, SinkMode.FOLD})
"""The modes that a state serves."""
EVERY_MODE: Final = frozenset(SinkMode)
"""The modes that the sinks of this package serve."""
EVERY_FOLD: Final[frozenset[type[AnyFold]]] = frozenset({Fold, ByOrder, SetUnion, SetTruncated})
"""The kinds of folds that the sinks of this package serve."""


TableKey: TypeAlias = tuple[Hashable, ...]
"""Equal for one table, or one store, and for no two; compared, never shown."""


class SinkSpec(Protocol):
    """A sink as a topology names it: a description without a connection; picklable.

    An implementation inherits it, and writes the methods that have no default.
    """

    @property
    def name(self) -> str:
        """Unique within a topology; part of every transaction identifier."""
        ...

    @property
    def target(self) -> str:
        """The table, as people see it; no secrets."""
        ...

    @property
    def dataset(self) -> DatasetName | None:
        """The table, as others call it; None: not known. No connection is made."""
        return None

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        """Raise TopologyError where this sink cannot take such rows or serve this guarantee; no connection is made."""
        ...

    @property
    def modes(self) -> frozenset[SinkMode]:
        """The modes that it serves; a topology that needs another one is refused before `check` is asked."""
        return frozenset({SinkMode.APPEND})

    @property
    def fold_kinds(self) -> frozenset[type[AnyFold]]:
        """The kinds of folds that it serves where it folds; a topology that needs another one is refused likewise."""
        return frozenset({Fold})

    def input_of(self, rows: SinkInput) -> SinkInput:
        """What becomes of a stream's rows here, where the sink itself says so: its mode, key and order.

        Raises:
            TopologyError: the stream cannot be written in that way.
        """
        return rows

    def check_sources(self, sources: Mapping[str, SourceKind], guarantee: Guarantee) -> None:
        """Raise TopologyError where it cannot serve the guarantee behind these spouts."""
        return

    def table_key(self) -> TableKey | None:
        """Equal where two sinks certainly write to one table, by its name; None: only the store can tell. No connection
        is made.
        """
        return None

    @property
    def rejects_misfits(self) -> bool:
        """Whether a row that its columns cannot hold rejects its message, rather than failing it."""
        return False

    @property
    def evolves(self) -> bool:
        """Whether its table gets the columns that its rows have, and wider ones, by itself."""
        return False

    def files_in(self, input_: SinkInput) -> str | None:
        """The folder in which executors write its files; None where it has none, or it is not known before it is opened.
        No connection is made.
        """
        return None


def require_mode(sink: SinkSpec, input_: SinkInput) -> None:
    """Refuse a sink that does not serve the mode of its rows, or a fold of them.

    Raises:
        TopologyError: names the sink, the mode and the modes that it serves; or the column and its fold.
    """
    if input_.mode not in sink.modes:
        served = " and ".join(sorted(sink.modes)) or "none"
        raise TopologyError(
            f"sink {sink.name!r} ({sink.target}) cannot {input_.mode} rows; it serves {served}. Use another sink, or a "
            "state: .persistent_aggregate(..., state=...) folds, .partition_persist(..., MapSetter(), keys=[...]) upserts",
            sink=sink.name,
            mode=input_.mode.value,
        )
    if input_.mode is not SinkMode.FOLD:
        return
    unknown = [name for name, fold in input_.folds.items() if type(fold) not in sink.fold_kinds]
    if unknown:
        raise TopologyError(
            f"sink {sink.name!r} ({sink.target}) cannot fold column {unknown[0]!r} ({input_.folds[unknown[0]]}); it serves "
            "sums, minima and maxima. Use a sink of this package, or another aggregate",
            sink=sink.name,
            column=unknown[0],
        )


AnySink = TypeVar("AnySink", bound=SinkSpec)


def require_tables_apart(
    topology: str,
    sinks: Sequence[AnySink],
    key: Callable[[AnySink], TableKey | None] = lambda sink: sink.table_key(),
) -> None:
    """Refuse two sinks on one table: each counts txids for itself, so every batch would be in the table twice. Without a
    `key`, sinks are compared by their tables' names.

    Raises:
        TopologyError: names both sinks, the table, and what to do.
    """
    first: dict[TableKey, AnySink] = {}
    for sink in sinks:
        found = key(sink)
        other = sink if found is None else first.setdefault(found, sink)
        if other is not sink:
            raise shared_table(topology, other.name, sink.name, (other.target, sink.target))


def shared_table(topology: str, one: str, other: str, targets: tuple[str, str]) -> TopologyError:
    """The error for two sinks of a topology on one table or store."""
    table = targets[0] if targets[0] == targets[1] else f"{targets[0]}, which is {targets[1]}"
    return TopologyError(
        f"topology {topology!r}: sinks {one!r} and {other!r} have one table: {table}. A table has one sink in a topology: "
        f"batches would be in it twice, or not at all. Nothing was written. Give each sink a table of its own; or merge the "
        f"streams, a.merge(b), and end them in one sink",
        sinks=[one, other],
        targets=[*targets],
    )


@dataclass(frozen=True, slots=True)
class PreparedFile:
    """One file that a task wrote and synced for one sink.

    `path` is relative to the sink's place for prepared files; `statistics` is Delta's per-file statistics as a JSON
    string; `digest` is the SHA-256 of the file's bytes, in hex. `partition` has the values of a partitioned table's columns,
    which are then not in the file: a JSON object of texts; "": it was not cut. `superseded` counts rows that are not among
    its `rows`, since a later row of their key is; the file may hold them in row groups before its rows. `discarded` counts
    the values that are NULL in it because their columns cannot hold them (``schema_contract="discard_value"``): a JSON
    object of numbers by column. `misfits` are the rows that are not in it because their columns cannot hold them
    (``schema_contract="discard_row"``), as `stormproof.sinks.prepare.rejected_messages` writes them; "": none. A file may
    have nothing else. `content` is the digest of its rows whatever file they are in, as
    `stormproof.sinks.rows.content` writes it; "": none.
    """

    sink: str
    path: str
    rows: int
    bytes: int
    digest: str
    statistics: str = "{}"
    discarded: str = "{}"
    partition: str = ""
    superseded: int = 0
    misfits: str = ""
    content: str = ""


MESSAGE_COLUMNS: Final = pa.schema(
    [
        pa.field("_stormproof_message", pa.int64()),
        pa.field("_stormproof_origin", pa.int64()),
        pa.field("_stormproof_others", pa.list_(pa.int64())),
    ]
)
"""Columns behind a row's own, in a prepared file whose writer `names_messages`: the message that anchors the row.

Number and origin are those of the row's first message; `others` has number and origin of each further one in turn. Both
are NULL where no message anchors the row. An origin without a number: the row stands for messages that are not known one
by one (a group's result).
"""


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Which task of which attempt writes; goes into the files' names."""

    incarnation: str
    txid: int
    attempt: int
    task: int


class TaskWriter(Protocol):
    """One task's output for one sink."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows of the writer's schema."""
        ...

    def close(self) -> Sequence[PreparedFile]:
        """Finish, fsync files and folder, and say what there is; no rows, no file."""
        ...

    def discard(self) -> None:
        """Remove what was written: the task failed."""
        ...


class SinkWriter(Protocol):
    """A sink's face inside an executor. Picklable; holds no connection."""

    @property
    def sink(self) -> str:
        """The sink's name in its topology."""
        ...

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """The rows that this sink could not hold, with column, value and reason. Only the columns that `rows` has are
        checked, so keys can be checked before they are combined.
        """
        ...

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task."""
        ...

    def files_in(self) -> str | None:
        """The folder of its prepared files; None where it writes none to a folder."""
        ...

    @property
    def names_messages(self) -> bool:
        """Whether its files have the `MESSAGE_COLUMNS`, so that its session can tell whose row a table refuses; by default
        not.
        """
        return False

    def resource(self) -> object | None:
        """What bolts may use in executors, by the name `state:SINK`; picklable. None: nothing."""
        ...


def transaction_digest(files: Sequence[PreparedFile]) -> str:
    """What a txid writes to one sink, as one SHA-256 in hex: its rows, its files' digests, partitions and misfits."""
    hasher = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.path):
        partition = f" {file.partition}" if file.partition else ""
        misfits = f" {file.misfits}" if file.misfits else ""
        hasher.update(f"{file.path} {file.rows} {file.bytes} {file.digest}{partition}{misfits}\n".encode())
    return hasher.hexdigest()


def files_to_json(files: Sequence[PreparedFile]) -> list[Json]:
    """Files as the ledger keeps them."""
    return [asdict(f) for f in files]


def files_of(files: Sequence[PreparedFile], sink: str) -> tuple[PreparedFile, ...]:
    """The files of one sink, in path order."""
    return tuple(sorted((f for f in files if f.sink == sink), key=lambda f: f.path))
