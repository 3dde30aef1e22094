"""What a Postgres table holds for the keys of a batch, merged with the batch's rows, without keeping other writers out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final, LiteralString

import psycopg
import pyarrow as pa
from psycopg import sql

from stormproof.core.sink import SinkInput
from stormproof.sinks.merging import ROWS_AT_ONCE, columns_by_function, merged_columns
from stormproof.sinks.postgres.copying import ADDED, PLACE, copy_rows, identifiers, same_columns
from stormproof.sinks.postgres.table import TableName

MERGED: Final = sql.Identifier("pg_temp", "stormproof_merged")
READ: Final = sql.Identifier("pg_temp", "stormproof_read")
"""The keys that were read, with an index: a list of them, once larger than `work_mem`, is searched through for each row."""


class MergedPut:
    """Folds the rows of `pg_temp.stormproof_added` into a table, some columns of which only functions of ours merge.

    The table's rows of these keys are locked while they are read, so they stay as read until the commit. A key that the
    table lacks cannot be locked: another writer may insert it before we do. The INSERT leaves such a row as it is, since its
    key is not among those that were read (`was_read`), but it locks it, so a second round reads and folds it. The table as a
    whole is not locked: that would keep all writers out, and would end each autovacuum.
    """

    def __init__(
        self, connection: psycopg.Connection, name: TableName, input_: SinkInput, schema: pa.Schema, where: str
    ) -> None:
        self._connection = connection
        self._name = name
        self._input = input_
        self._where = where
        self._names = columns_by_function(input_)
        self._schema = pa.schema([pa.field(PLACE, pa.int64()), *(schema.field(name) for name in self._names)])

    @property
    def was_read(self) -> sql.Composed:
        """Whether the row that stands in an INSERT's way is one of those that were read."""
        return sql.SQL("exists (select from {} as read where {})").format(
            READ, same_columns("read", "excluded", self._input.keys)
        )

    def put(self, insert: sql.Composed) -> int:
        """Run `insert`, which upserts the added rows where `was_read` holds. Returns how many rows it changed; the others
        were dropped by triggers.

        Raises:
            SinkRefused: a held value cannot be merged.
        """
        execute, keys = self._connection.execute, self._input.keys
        execute(
            sql.SQL("alter table {} add column if not exists {} bigint generated always as identity").format(
                ADDED, sql.Identifier(PLACE)
            )
        )
        self._merge()
        done = sql.SQL("with done as ({} returning {}) delete from {} as added using done where {}").format(
            insert, self._columns("held", keys), ADDED, same_columns("added", "done", keys)
        )
        changed = execute(done).rowcount
        # What was read and is left, and what is not in the table, was dropped.
        execute(
            sql.SQL("delete from {} as added using {} as merged where {}").format(
                ADDED, MERGED, same_columns("merged", "added", [PLACE])
            )
        )
        execute(
            sql.SQL("delete from {} as added where not exists (select from {} as held where {})").format(
                ADDED, self._name.identifier, same_columns("held", "added", keys)
            )
        )
        if execute(sql.SQL("select exists (select from {})").format(ADDED)).fetchone() == (True,):
            self._merge()
            changed += execute(done).rowcount
        return changed

    def _merge(self) -> None:
        """Lock and read the table's rows of the added keys; put the merged columns among the added rows."""
        # Each time, since a savepoint that was rolled back may have taken the temporary table with it.
        self._connection.execute(
            sql.SQL("create temporary table if not exists {} on commit drop as select {} from {} with no data").format(
                MERGED, identifiers(self._schema.names), ADDED
            )
        )
        self._connection.execute(sql.SQL("truncate {}").format(MERGED))
        keys = [sql.SQL("added.{}::text").format(sql.Identifier(key)) for key in self._input.keys]
        read = sql.SQL(
            "select added.{}, {}, {}, {} from {} as added join {} as held on {} order by {} for no key update of held"
        ).format(
            sql.Identifier(PLACE),
            sql.SQL(", ").join(keys),
            self._columns("held", self._names),
            self._columns("added", self._names),
            ADDED,
            self._name.identifier,
            same_columns("held", "added", self._input.keys),
            self._columns("added", self._input.keys),
        )
        with closing(self._connection.cursor("stormproof_held", binary=True)) as cursor:
            cursor.execute(read)
            while found := cursor.fetchmany(ROWS_AT_ONCE):
                copy_rows(self._connection, MERGED, self._schema, self._merged(found), self._where)
        values = [sql.SQL("{0} = merged.{0}").format(sql.Identifier(name)) for name in self._names]
        self._connection.execute(
            sql.SQL("update {} as added set {} from {} as merged where {}").format(
                ADDED, sql.SQL(", ").join(values), MERGED, same_columns("merged", "added", [PLACE])
            )
        )
        self._connection.execute(sql.SQL("drop table if exists {}").format(READ))
        self._connection.execute(
            sql.SQL(
                "create temporary table {} on commit drop as select {} from {} as added join {} as merged on {}"
            ).format(
                READ,
                self._columns("added", self._input.keys),
                ADDED,
                MERGED,
                same_columns("merged", "added", [PLACE]),
            )
        )
        self._connection.execute(sql.SQL("create index on {} ({})").format(READ, identifiers(self._input.keys)))

    def _merged(self, found: Sequence[tuple[Any, ...]]) -> list[pa.RecordBatch]:
        """The merged columns of these rows, behind their places."""
        places, *columns = zip(*found, strict=True)
        keys, names = self._input.keys, self._names
        fields = [pa.field(key, pa.string()) for key in keys]  # for errors alone
        fields += 2 * [self._input.schema.field(name) for name in names]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
        middle = len(keys) + len(names)
        held = pa.table(arrays[len(keys) : middle], names=names)
        added = pa.table([*arrays[: len(keys)], *arrays[middle:]], names=[*keys, *names])
        merged = merged_columns(held, added, self._input, self._where)
        made = pa.table([pa.array(places, pa.int64()), *merged.columns], names=self._schema.names)
        batches: list[pa.RecordBatch] = made.combine_chunks().to_batches()
        return batches

    @staticmethod
    def _columns(table: LiteralString, names: Sequence[str]) -> sql.Composed:
        return sql.SQL(", ").join(sql.SQL("{}.{}").format(sql.SQL(table), sql.Identifier(name)) for name in names)
