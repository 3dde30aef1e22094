"""A source of your own: the rows of a table in an SQLite file, each exactly once.

The table has a column `id`, an `integer primary key autoincrement`, and a column with the payload. Anyone may append rows.
The ids must have no gaps, and a row must not be changed or deleted while it is pending. Pending messages, retries and dead
letters are in the run's Postgres, under the kind `sqlite`, where `stormproof status`, `audit verify` and `dead-letters`
find them.

sqlite3 lines.db "create table lines (id integer primary key autoincrement, payload blob)"
sqlite3 lines.db "insert into lines (payload) values ('to be or not to be')"
stormproof run examples/sqlite_source.py:topology --param file=lines.db --until-idle
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pyarrow as pa

from stormproof import PostgresSink, Topology, count
from stormproof.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.source import (
    Database,
    Limit,
    NumberedSource,
    PostgresPendingStore,
    SliceReader,
    batches_of,
    decoder_for,
)


@dataclass(frozen=True)
class Rows:
    """The table; each query has a connection of its own. Picklable."""

    file: str
    table: str
    column: str

    def query(self, what: str, parameters: Sequence[int] = ()) -> list[tuple[Any, ...]]:
        """The rows of `select WHAT`, in which {table} is the table and {payload} the payload as bytes."""
        statement = "select " + what.format(table=self.table, payload=f"cast({self.column} as blob)")
        try:
            with closing(sqlite3.connect(f"file:{self.file}?mode=ro", uri=True)) as connection:
                return connection.execute(statement, parameters).fetchall()
        except sqlite3.OperationalError as error:
            raise StoreUnavailable(f"table {self.table} of {self.file}: {error}", file=self.file) from error


@dataclass(frozen=True)
class RowReader:
    """Reads the rows from `first` up to but not including `stop`, inside an executor."""

    rows: Rows
    first: int
    stop: int

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        found = self.rows.query(
            "id, {payload} from {table} where id >= ? and id < ? order by id", (self.first, self.stop)
        )
        kept = [row for row in found if row[0] not in excluded]
        ids, payloads = [row[0] for row in kept], [row[1] for row in kept]
        yield from batches_of(ids, [0] * len(ids), payloads, seed, batch_rows)


class SqliteSource(NumberedSource):
    """The rows of an SQLite table as messages; a message's number is its row's `id`."""

    KIND: ClassVar[str] = "sqlite"

    def __init__(
        self,
        file: str | Path,
        table: str,
        column: str = "payload",
        *,
        schema: str = "line string",
        database: Database | str | None = None,
        max_attempts: int = 5,
        backoff_base_s: float = 1.0,
        backoff_max_s: float = 300.0,
        rng: Random | None = None,
    ) -> None:
        if not (table.isidentifier() and column.isidentifier()):
            raise UsageError(f"SQLite table {table!r}, column {column!r}: use letters, digits and '_'")
        super().__init__(
            table,
            decoder=decoder_for(schema),
            store=PostgresPendingStore(self.NOUN, table, database=database),
            max_attempts=max_attempts,
            backoff_base_s=backoff_base_s,
            backoff_max_s=backoff_max_s,
            rng=rng,
        )
        self._rows = Rows(str(Path(file).absolute()), table, column)

    def first(self, cursor: Any) -> int:
        """The first row's id: SQLite counts from 1."""
        return 1

    def stop(self, cursor: Any) -> int:
        """The id behind the last row. Rows become visible by ascending id, since SQLite has one writer at a time."""
        return int(self._rows.query("coalesce(max(id) + 1, 1) from {table}")[0][0])

    def sizes(self, first: int, stop: int, limit: Limit, cursor: Any) -> Sequence[int]:
        """The payloads' lengths, at each opening: so a missing row is refused before it fails every try at its batch."""
        found = self._rows.query("length({payload}) from {table} where id >= ? and id < ? order by id", (first, stop))
        if len(found) != stop - first:
            raise PositionMismatch(
                f"{self.where}: of the rows {first} to {stop - 1} only {len(found)} are there: rows that are pending must "
                "not be deleted. Put them back, or read the table under another name",
                source=self.name,
            )
        return [size for (size,) in found]

    def reader(self, first: int, stop: int) -> SliceReader:
        """Reads these rows."""
        return RowReader(self._rows, first, stop)


def topology(file: str, table: str = "lines") -> Topology:
    """Count the words of the table's lines, in the Postgres table `sqlite_words`."""
    t = Topology("sqlite-words")
    lines = t.stream("lines", SqliteSource(file, table))
    words = lines.flat_map(str.split, "line", schema="word string")
    words.group_by("word").persistent_aggregate(n=count()).into(PostgresSink("sqlite_words"))
    return t
