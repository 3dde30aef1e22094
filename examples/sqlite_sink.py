"""A sink of your own: rows appended to a table in an SQLite file, exactly once.

The store's own part is here; guard, evidence, fence and staged files are those of `TransactionalSink`. With
`plugins = "examples/sqlite_sink.py"` in stormproof.toml, the command line knows it, too.
"""

import sqlite3
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from stormproof.sink import TransactionalSink, register_sink


class SqliteSink(TransactionalSink[sqlite3.Connection]):
    """Appends to a table of an SQLite file; creates the table if it is missing."""

    places = ("file", "table")
    types: ClassVar = {"int64": "integer", "double": "real", "string": "text", "binary": "blob", "bool": "integer"}
    transient = (sqlite3.OperationalError,)
    row_errors = (sqlite3.IntegrityError,)

    def __init__(self, file: str | Path, table: str, *, name: str | None = None, staging: str | Path | None = None):
        super().__init__(name or table, staging)
        self.file, self.table = Path(file).absolute(), table

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.file, timeout=10, isolation_level=None)) as connection:
            connection.execute("pragma synchronous = full")
            connection.execute("begin immediate")
            yield connection
            connection.execute("commit")

    def execute(self, connection: sqlite3.Connection, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        return connection.execute(statement, values).fetchall()

    def found_table(self, connection: sqlite3.Connection) -> str | None:
        found = self.execute(connection, "select sql from sqlite_master where name = ?", [self.table])
        return found[0][0].rpartition("/* ")[2].partition(" */")[0] if found else None

    def create(self, connection: sqlite3.Connection, columns: str, table_id: str) -> None:
        connection.execute(f'create table "{self.table}" ({columns} /* {table_id} */)')  # SQLite keeps the comment

    def insert(self, connection: sqlite3.Connection, rows: pa.RecordBatch) -> None:
        names, marks = ", ".join(f'"{name}"' for name in rows.schema.names), ", ".join("?" * rows.num_columns)
        values = zip(*(column.to_pylist() for column in rows.columns), strict=True)
        connection.executemany(f'insert into "{self.table}" ({names}) values ({marks})', values)

    def count_rows(self, connection: sqlite3.Connection) -> int:
        return int(self.execute(connection, f'select count(*) from "{self.table}"')[0][0])


register_sink("SqliteSink", SqliteSink.described)
