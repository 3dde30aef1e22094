"""What the core knows of a sink: its input, and inside an executor its checks and prepared files.

Sinks implement it (`stormproof.sinks`); topology and stage code know no more of them than this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from stormproof.core.errors import Json, TopologyError
from stormproof.core.guarantee import Guarantee
from stormproof.core.source.kind import SourceKind


class Fold(StrEnum):
    """How a column's new value is added to what a sink holds for its key."""

    SUM = "sum"
    """Added; counts are sums of ones."""
    MIN = "min"
    """The smaller one; NULL is none."""
    MAX = "max"
    """The greater one; NULL is none."""
    OWN = "own"
    """By a function of the user's, which only a state can call."""


@dataclass(frozen=True, slots=True)
class SinkInput:
    """What arrives at a sink: the rows' schema, and for a fold its keys and how each other column folds.

    `folds` empty is append. The rows of one batch hold each key once where `keys` is not empty.
    """

    schema: pa.Schema
    keys: tuple[str, ...] = ()
    folds: Mapping[str, Fold] = field(default_factory=dict[str, Fold])

    @property
    def is_fold(self) -> bool:
        """Whether rows are folded into what the sink holds, rather than appended."""
        return bool(self.folds)


class SinkSpec(Protocol):
    """A sink as a topology names it: a description without a connection; picklable."""

    @property
    def name(self) -> str:
        """Unique within a topology; part of every transaction identifier."""
        ...

    @property
    def target(self) -> str:
        """The table, as people see it; no secrets."""
        ...

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        """Raise TopologyError where this sink cannot take such rows or serve this guarantee; no connection is made."""
        ...


@runtime_checkable
class ChecksSources(Protocol):
    """A sink that also depends on where its rows come from."""

    def check_sources(self, sources: Mapping[str, SourceKind], guarantee: Guarantee) -> None:
        """Raise TopologyError where it cannot serve the guarantee behind these spouts."""
        ...


TableKey: TypeAlias = tuple[Hashable, ...]
"""Tells one table, or one store, from every other; compared, never shown."""


@runtime_checkable
class NamesTable(Protocol):
    """A sink whose table can be told by its name alone, as far as a name tells."""

    def table_key(self) -> TableKey | None:
        """Equal where two sinks certainly write to one table; None: only the store can tell. No connection is made."""
        ...


def table_by_name(sink: SinkSpec) -> TableKey | None:
    """Which table a sink has, where its name tells."""
    return sink.table_key() if isinstance(sink, NamesTable) else None


def require_tables_apart(
    topology: str, sinks: Sequence[SinkSpec], key: Callable[[SinkSpec], TableKey | None] = table_by_name
) -> None:
    """Refuse two sinks on one table: each counts txids for itself, so every batch would be in the table twice.

    Raises:
        TopologyError: names both sinks, the table, and what to do.
    """
    first: dict[TableKey, SinkSpec] = {}
    for sink in sinks:
        found = key(sink)
        other = sink if found is None else first.setdefault(found, sink)
        if other is not sink:
            raise shared_table(topology, other.name, sink.name, (other.target, sink.target))


def shared_table(topology: str, one: str, other: str, targets: tuple[str, str]) -> TopologyError:
    """The error for two sinks of one topology on one table or store."""
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
    string; `digest` is the SHA-256 of the file's bytes, in hex.
    """

    sink: str
    path: str
    rows: int
    bytes: int
    digest: str
    statistics: str = "{}"


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


@runtime_checkable
class WritesFiles(Protocol):
    """A sink that knows, before it is opened, the folder in which executors write its files."""

    def files_in(self, input_: SinkInput) -> str | None:
        """The folder; None where it is not known yet. No connection is made."""
        ...


@runtime_checkable
class OffersResource(Protocol):
    """A sink's writer that also brings what bolts may use in executors, by the name `state:SINK`. Picklable."""

    @property
    def resource(self) -> object:
        """What bolts get."""
        ...


def transaction_digest(files: Sequence[PreparedFile]) -> str:
    """What a txid writes to one sink, as one SHA-256 in hex: its rows and the digests of its files, in path order."""
    hasher = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.path):
        hasher.update(f"{file.path} {file.rows} {file.bytes} {file.digest}\n".encode())
    return hasher.hexdigest()


def files_to_json(files: Sequence[PreparedFile]) -> list[Json]:
    """Files as the ledger keeps them."""
    return [
        {
            "sink": f.sink,
            "path": f.path,
            "rows": f.rows,
            "bytes": f.bytes,
            "digest": f.digest,
            "statistics": f.statistics,
        }
        for f in files
    ]


def files_of(files: Sequence[PreparedFile], sink: str) -> tuple[PreparedFile, ...]:
    """The files of one sink, in path order."""
    return tuple(sorted((f for f in files if f.sink == sink), key=lambda f: f.path))
