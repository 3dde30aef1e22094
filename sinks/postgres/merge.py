"""How rows by key get into a Postgres table, which upserts or folds them.

By COPY into a temporary table and one INSERT ... ON CONFLICT, where `held` is the table's row, and `excluded` the added one:
see `sinks.rows.merge_sql`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import psycopg
import pyarrow as pa
from psycopg import sql

from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.postgres.table import TableName
from stormproof.sinks.postgres.transactional_table import ADDED, copy_rows, identifiers, make_added, same_columns
from stormproof.sinks.rows.merge_sql import POSTGRES, assignments, later_condition, written_where_held


class RowsByKey:
    """Upserts or folds rows into a table, within one transaction of the connection; a key comes once in a call.

    `superseded` counts the rows so far that changed nothing, since the table has a later one of their key, and `inserted`
    those whose key the table did not have; `change` is by how much the sum of `hashed` over the table is more, where that
    is given. `may_drop`: the table has triggers that may drop rows without an error; then the rows that changed nothing
    are looked at. `undecided` columns do not tell which of two rows is later. `passes_over`: such a row is not given to
    the table at all, which would ask its rules about it: of a row that changes nothing they say nothing.
    """

    def __init__(
        self,
        connection: psycopg.Connection,
        name: TableName,
        input_: SinkInput,
        schema: pa.Schema,
        where: str,
        *,
        may_drop: bool = False,
        undecided: Sequence[str] = (),
        partitioned: bool = False,
        passes_over: bool = False,
        hashed: sql.Composable | None = None,
    ) -> None:
        self._connection = connection
        self._name = name
        self._input = input_
        self._schema = schema
        self._where = where
        self._is_made = False
        self._may_drop = may_drop
        self._passes_over = passes_over
        later = later_condition(input_, POSTGRES, undecided)
        self._later = None if later is None else sql.SQL(later)  # pyright: ignore[reportArgumentType]
        self._partitioned = partitioned
        self._hash = hashed
        self.superseded = self.inserted = self.change = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The key's columns."""
        return self._input.keys

    def held(self) -> int:
        """How many of the added rows' keys the table has."""
        counted = sql.SQL(
            "select count(*) from (select distinct {} from {}) as added where exists (select from {} as held where {})"
        )
        keys = counted.format(
            *(identifiers(self.keys), ADDED, self._name.identifier, same_columns("held", "added", self.keys))
        )
        (found,) = self._connection.execute(keys).fetchone() or (0,)
        return int(found)

    def content(self) -> int:
        """The sum of the hashes of those rows of the table whose keys were added; 0 where there is no hash."""
        if self._hash is None:
            return 0
        asked = sql.SQL("select coalesce(sum({}), 0) from {} as held where exists (select from {} as added where {})")
        query = asked.format(self._hash, self._name.identifier, ADDED, same_columns("held", "added", self.keys))
        found = self._connection.execute(query).fetchone() or (0,)
        return int(found[0])

    def put(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Upsert or fold these rows by way of a temporary table. Returns how many were taken: all, superseded ones among
        them, but for those that triggers dropped.
        """
        make_added(self._connection, self._name, identifiers(self._schema.names))
        if self._is_made:
            self._connection.execute(sql.SQL("truncate {}").format(ADDED))
        self._is_made = True
        copied = copy_rows(self._connection, ADDED, self._schema, batches, self._where)
        # In key order: the index is walked along (a third faster at 100,000 rows), and two writers lock in one order.
        insert, before = self.insert(ADDED, identifiers(self._input.keys)), self.content()
        changed = self._changed(insert)
        self.change += self.content() - before
        return self.taken(ADDED, copied, changed)

    def insert(self, added: sql.Composable, order: sql.Composable) -> sql.Composed:
        """The statement that puts the rows of `added` in this order."""
        columns = identifiers(self._schema.names)
        return sql.SQL(
            "insert into {} as held ({}) select {} from {} as excluded{} order by {} on conflict ({}) do {}"
        ).format(
            *(self._name.identifier, columns, columns, added, self._but_superseded, order),
            *(identifiers(self._input.keys), self._update()),
        )

    def taken(self, added: sql.Composable, given: int, changed: int) -> int:
        """How many rows of `added` were taken, superseded ones among them, which are counted; the others were dropped."""
        if self._later is None and self._updates:
            return changed
        dropped = self._dropped(added) if self._may_drop and changed < given else 0
        self.superseded += given - changed - dropped
        return given - dropped

    def _changed(self, insert: sql.Composed) -> int:
        """Run the statement. Returns how many rows it changed, and counts those that it inserted."""
        if not self._partitioned:
            # A row that was there is locked by this transaction before it is updated, which its new version shows.
            counted = sql.SQL(
                "with done as ({} returning held.xmax = 0 as new) select count(*), count(*) filter (where new) from done"
            )
            changed, new = self._connection.execute(counted.format(insert)).fetchone() or (0, 0)
        else:  # a partitioned table does not return a row's xmax
            asked = sql.SQL(
                "select count(*) from {} as added where not exists (select from {} as held where {})"
            ).format(ADDED, self._name.identifier, same_columns("held", "added", self._input.keys))
            (new,) = self._connection.execute(asked).fetchone() or (0,)
            changed = self._connection.execute(insert).rowcount
        self.inserted += int(new)
        return int(changed)

    @property
    def _but_superseded(self) -> sql.Composable:
        if not self._passes_over or (self._later is None and self._updates):
            return sql.SQL("")
        return sql.SQL(" where not exists (select from {} as held where {}{})").format(
            self._name.identifier,
            same_columns("held", "excluded", self._input.keys),
            sql.SQL("") if self._later is None else sql.SQL(" and not ({})").format(self._later),
        )

    def _dropped(self, added: sql.Composable) -> int:
        """The rows that should have changed the table and did not: it lacks their key, or has an earlier row of it."""
        keys = same_columns("held", "excluded", self._input.keys)
        row = self._connection.execute(
            sql.SQL("select count(*) from {} as excluded left join {} as held on {} where held.{} is null{}").format(
                added,
                self._name.identifier,
                keys,
                sql.Identifier(self._input.keys[0]),
                sql.SQL("") if self._later is None else sql.SQL(" or {}").format(self._later),
            )
        ).fetchone()
        return 0 if row is None else int(row[0])

    @property
    def _updates(self) -> bool:
        return bool(written_where_held(self._input))

    def _update(self) -> sql.Composable:
        if not self._updates:
            return sql.SQL("nothing")
        changed = ", ".join(f"{name} = {value}" for name, value in assignments(self._input, POSTGRES).items())
        update = sql.SQL("update set {}").format(sql.SQL(changed))  # pyright: ignore[reportArgumentType]
        return update if self._later is None else sql.SQL("{} where {}").format(update, self._later)
