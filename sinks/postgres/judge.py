"""Which rows of a batch a Postgres table refuses: found by halves, each part under a savepoint, while all others but those
of the rejected messages are moved.

In a table in which rows of several keys exclude each other the result depends on the order (`RowsInOrder`). Each row is put
after those before it, the superseded ones of an upsert among them, so the table is as if each message came by itself,
however messages are cut into batches. A superseded row is not put where that changes nothing: its key has the columns that
exclude others in common with no other key, and no CHECK refuses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
from psycopg import sql

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import SinkRefused
from stormproof.sinks.postgres.merge import RowsByKey
from stormproof.sinks.postgres.refusals import CatalogFacts, Moved, is_of_a_row, no_message_to_blame, only_checks
from stormproof.sinks.postgres.transactional_table import (
    ADDED,
    PLACE,
    AppendedRows,
    copy_rows,
    identifiers,
    make_added,
    same_columns,
)
from stormproof.sinks.prepare.rejected_messages import FileRows, Rejects


class _Again(Exception):
    """Rows that were taken are to be left out."""


def is_about_rows(refusal: SinkRefused) -> bool:
    """Whether a commit was refused for some of its rows, so that the table may take the others."""
    cause = refusal.__cause__
    return isinstance(cause, psycopg.Error) and is_of_a_row(cause)


def move_without_rejects(
    connection: psycopg.Connection,
    begin: Callable[[], AppendedRows | RowsByKey],
    rejects: Rejects,
    *,
    may_drop: bool,
    waits: Collection[str] = (),
) -> Moved:
    """Move rows into the table, without the messages whose rows the table refuses; `begin` makes what moves them.

    The table's triggers drop rows only if they `may_drop` any. A row that was refused stays so, though it would be taken
    without the rows that are left out later. One that is refused by an SQLSTATE of `waits` is tried again behind the others.

    Raises:
        SinkRefused: more is refused than may be rejected.
        psycopg.Error: a statement fails for a reason that lies in no row.
    """
    # A deferred constraint would be checked at the end of the transaction, and its error would name no row.
    connection.execute("set constraints all immediate")
    while True:
        try:
            with connection.transaction():
                moved = _moved(connection, begin(), rejects, may_drop=may_drop, waits=waits)
                if rejects.close():
                    raise _Again
        except _Again:
            continue
        return moved


def _moved(
    connection: psycopg.Connection,
    rows: AppendedRows | RowsByKey,
    rejects: Rejects,
    *,
    may_drop: bool,
    waits: Collection[str],
) -> Moved:
    sent = taken = 0

    def put(parts: Sequence[FileRows]) -> None:
        nonlocal sent, taken
        given = sum(part.rows.num_rows for part in parts)
        found = rows.put([part.rows for part in parts])
        require_taken(found, given, may_drop=may_drop)
        sent, taken = sent + given, taken + found

    waiting: list[FileRows] = []
    for part in rejects.kept():
        for parts, refusal in settle(connection, [part], _halves, put, waits, leaves=True):
            if refusal.sqlstate in waits:
                waiting += parts
            else:
                rejects.add(parts[0].refused(*said(refusal)))
    for parts, refusal in settle(connection, waiting, _halves, put, waits) if waiting else ():
        rejects.add(parts[0].refused(*said(refusal)))
    return Moved(sent, taken, rows.superseded, rows.inserted, rows.change)


EXCLUDED: Final = frozenset({"23505", "23P01"})
"""The SQLSTATEs of a row that another one excludes: that may change with each row that is put."""

_Rows = TypeVar("_Rows")


def settle(
    connection: psycopg.Connection,
    whole: _Rows,
    halves: Callable[[_Rows], tuple[_Rows, _Rows] | None],
    put: Callable[[_Rows], object],
    waits: Collection[str] = (),
    *,
    in_order: bool = False,
    leaves: bool = False,
) -> Iterator[tuple[_Rows, psycopg.Error]]:
    """Put rows, each part under a savepoint, and by halves what the table refuses. Yields each part that is refused without
    `halves`, and the error. One whose SQLSTATE is of `waits` is tried again behind the others, until none of them is taken
    any more. `in_order`, only a part without halves waits so; `leaves` yields those that wait instead, as they are.
    """
    todo, stuck = deque([whole]), 0
    while todo:
        part = todo.popleft()
        try:
            with connection.transaction():
                put(part)
            stuck = 0
            continue
        except psycopg.Error as error:
            if not is_of_a_row(error):
                raise
            refusal = error
        wait, two = refusal.sqlstate in waits, halves(part)
        if wait and leaves:
            yield part, refusal
        elif two is None and wait and stuck < len(todo):
            stuck += 1
            todo.append(part)
        elif two is None:
            yield part, refusal
        elif wait and not in_order:
            todo.extend(two)  # level by level: parents may be in any part, and children of each in all others
            stuck = 0
        else:
            todo.extendleft(reversed(two))
            stuck = 0


def _halves(parts: list[FileRows]) -> tuple[list[FileRows], list[FileRows]] | None:
    if len(parts) > 1:
        return parts[: len(parts) // 2], parts[len(parts) // 2 :]
    if not parts or parts[0].rows.num_rows <= 1:
        return None
    first, second = parts[0].halves()
    return [first], [second]


_REPLACE: Final = '; append adds rows. To replace the row of a key, give the sink mode="upsert", key= and order_by='


def said(refusal: psycopg.Error, *, appended: bool = False) -> tuple[str | None, str]:
    """The SQLSTATE and the text of a refusal; of a duplicate among `appended` rows, with how to replace the older row."""
    way_on = _REPLACE if appended and isinstance(refusal, psycopg.errors.UniqueViolation) else ""
    return refusal.sqlstate, (refusal.diag.message_primary or str(refusal)) + way_on


def require_taken(taken: int, sent: int, *, may_drop: bool) -> None:
    """Raise SinkRefused where rows are missing that no trigger can have dropped."""
    if taken != sent and not may_drop:
        raise SinkRefused(f"{taken} of {sent} rows reached the table, and no trigger of it drops rows")


_Range = tuple[int, int]
_PLACE = sql.Identifier(PLACE)


class RowsInOrder:
    """All rows of a commit in a temporary table, from which ranges are put: of an upsert, as `rows` does."""

    def __init__(
        self,
        connection: psycopg.Connection,
        facts: CatalogFacts,
        schema: pa.Schema,
        rejects: Rejects,
        rows: AppendedRows | RowsByKey,
        where: str,
    ) -> None:
        self._connection, self._where, self._facts = connection, where, facts
        self._name, self._may_drop = facts.table.name, bool(facts.dropping)
        self._columns, self._schema = identifiers(schema.names), pa.schema([*schema, pa.field(PLACE, pa.int64())])
        self._rejects, self.order = rejects, rejects.order()
        self._by_key = rows if isinstance(rows, RowsByKey) else None
        self.appends = self._by_key is None
        # One that is deferrable is checked at the end of a statement: so each row is a statement.
        self._one_by_one = not all(rival.at_once for rival in facts.rivals)
        self._excluding, self._oid = [rival.columns for rival in facts.rivals], facts.table.oid
        self._there = np.zeros(len(self.order.row), np.bool_)
        self._unfit: dict[int, psycopg.Error] = {}
        self._cuts: Rows = np.empty(0, np.int64)
        self.moved, self._held = Moved(0, 0, 0, 0), (0, 0)

    def copy(self, *, by_halves: bool) -> None:
        """Copy all rows that are not left out into that table; `by_halves`, one that does not fit is refused when it
        is put.

        Raises:
            psycopg.Error: one does not fit.
        """
        # One that is deferred would be checked when all rows are there.
        self._connection.execute("set constraints all immediate")
        make_added(self._connection, self._name, sql.SQL("{}, 0::bigint as {}").format(self._columns, _PLACE))
        if by_halves:
            for rows in self._numbered():
                for row, refusal in settle(
                    self._connection, rows, _half_of_rows, lambda rows: self._copy(iter([rows]))
                ):
                    self._unfit[row.column(PLACE)[0].as_py()] = refusal
        else:
            self._copy(self._numbered())
        crowded = None if by_halves else self._crowded()
        if crowded is not None:
            self._spare(crowded)
        if self._one_by_one:
            self._cuts = np.arange(len(self._there)) if crowded is None else crowded
        else:
            self._cuts = self._repeats()
        self._held = (0, 0) if self._by_key is None else (self._by_key.held(), self._by_key.content())
        if by_halves or len(self._cuts):
            self._connection.execute(sql.SQL("create index on {} ({})").format(ADDED, _PLACE))

    def _copy(self, rows: Iterator[pa.RecordBatch]) -> None:
        copy_rows(self._connection, ADDED, self._schema, rows, self._where)

    def _numbered(self) -> Iterator[pa.RecordBatch]:
        at = np.empty_like(self.order.row)
        at[self.order.row] = np.arange(len(at))
        kept = ~self._out()
        for part, places in self._rejects.all():
            where = at[places]
            self._there[where] = kept[where]
            yield part.only(kept[where]).rows.append_column(PLACE, pa.array(where[kept[where]]))

    def _out(self) -> npt.NDArray[np.bool_]:
        """The rows of each unit of which one is left out."""
        out, begins = self._rejects.left_out()[self.order.row], self.order.begins
        return np.repeat(np.logical_or.reduceat(out, begins[:-1]), np.diff(begins)) if len(out) else out

    def _crowded(self) -> Rows | None:
        """The places of the rows whose key needs an order: one of its rows has the columns that exclude in common with
        another key, in the batch or the table, or a CHECK refuses it. None: all do, or that cannot be known.
        """
        by_key = self._by_key
        if by_key is None or not (self._one_by_one or self._rejects.reinstated):
            return None
        excluding = [columns for columns in self._excluding if columns is not None]
        checks = only_checks(self._connection, self._oid) if len(excluding) == len(self._excluding) else None
        if checks is None or not {*self._schema.names}.issuperset(chain(checks[1], *excluding)):
            return None
        keys = identifiers(by_key.keys)
        refused = sql.SQL("select {} from {} as added where ({}) is false")
        crowded = [
            *(self._in_common(by_key.keys, columns) for columns in excluding),
            *(refused.format(keys, ADDED, sql.SQL(check)) for check in checks[0]),
        ]
        asked = sql.SQL("select {0} from {1} where ({2}) in ({3}) order by 1").format(
            _PLACE, ADDED, keys, sql.SQL(" union ").join(crowded)
        )
        return np.array([place for (place,) in self._connection.execute(asked).fetchall()], np.int64)

    def _in_common(self, keys: Sequence[str], columns: Sequence[str]) -> sql.Composed:
        """The keys that have these columns in common with another one; one with a NULL among them has not."""
        known = identifiers(f"k{number}" for number in range(len(keys)))
        same = identifiers(f"c{number}" for number in range(len(columns)))
        return sql.SQL(
            "(with r ({0}, {1}) as (select {2} from {4} as added union select {3} from {5} as held join {4} as added on {6})"
            " select {0} from r where ({1}) in (select {1} from r group by {1} having count(*) > 1))"
        ).format(
            *(known, same, _of("added", keys, columns), _of("held", keys, columns)),
            *(ADDED, self._name.identifier, same_columns("held", "added", columns)),
        )

    def _spare(self, crowded: Rows) -> None:
        """Take the superseded rows of all keys away that need no order."""
        spared = self._there & self._rejects.superseded[self.order.row]
        spared[crowded] = False
        places = np.flatnonzero(spared)
        taken_away = sql.SQL("delete from {} where {} = any({}::bigint[])").format(
            ADDED, _PLACE, sql.Literal(places.tolist())
        )
        self._connection.execute(taken_away)
        self._there[places] = False
        self._rejects.take_back(self.order.row[places])

    def _repeats(self) -> Rows:
        """Where a range is cut, so that no statement has a key twice."""
        cuts, begin = list[int](), 0
        if self._by_key is not None and self._rejects.reinstated:
            found = self._connection.execute(
                sql.SQL(
                    "select place, before from (select {0} as place, lag({0}) over (partition by {1} order by {0}) "
                    "as before from {2}) as r where before is not null order by place"
                ).format(_PLACE, identifiers(self._by_key.keys), ADDED)
            )
            for place, before in found.fetchall():
                if before >= begin:
                    begin = place
                    cuts.append(place)
        return np.array(cuts, np.int64)

    def put(self, between: _Range) -> None:
        """Put the rows between two places of the order.

        Raises:
            psycopg.Error: the table refuses one.
            SinkRefused: it did not take one, and no trigger can have dropped it.
        """
        first, stop = between
        for place, refusal in self._unfit.items():
            if first <= place < stop:
                raise refusal
        given, superseded = int(np.count_nonzero(self._there[first:stop])), self.moved.superseded
        cuts = self._cuts[np.searchsorted(self._cuts, first, "right") : np.searchsorted(self._cuts, stop)].tolist()
        cursor = self._connection.cursor()
        with no_message_to_blame(self._facts, self._schema.names, self._where):
            cursor.executemany(self._statement(), list(pairwise([first, *cuts, stop])))
        taken = cursor.rowcount
        if self._by_key is not None:
            before = self._by_key.superseded
            taken = self._by_key.taken(_range(sql.Literal(first), sql.Literal(stop)), given, taken)
            superseded += self._by_key.superseded - before
        require_taken(taken, given, may_drop=self._may_drop)
        self.moved = Moved(self.moved.sent + given, self.moved.taken + taken, superseded, 0)

    def all_moved(self) -> Moved:
        """What was put in all, with the keys that the table had not before."""
        if self._by_key is None:
            return self.moved
        held, content = self._held
        return replace(self.moved, inserted=self._by_key.held() - held, change=self._by_key.content() - content)

    def _statement(self) -> bytes:
        """The INSERT of a range. Names of columns may have a `%`, which is psycopg's own in a statement with parameters."""
        parameter = sql.SQL("\0")  # which no name has
        rows = _range(parameter, parameter)
        if self._by_key is not None:
            insert = self._by_key.insert(rows, _PLACE)
        else:
            insert = sql.SQL("insert into {} ({}) select {} from {} as added order by {}").format(
                self._name.identifier, self._columns, self._columns, rows, _PLACE
            )
        return insert.as_string(self._connection).replace("%", "%%").replace("\0", "%s").encode()


def _of(table: str, *names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(table, name) for some in names for name in some)


def _range(first: sql.Composable, stop: sql.Composable) -> sql.Composed:
    return sql.SQL("(select * from {} where {} >= {} and {} < {})").format(ADDED, _PLACE, first, _PLACE, stop)


def move_in_order(connection: psycopg.Connection, rows: RowsInOrder, rejects: Rejects, waits: Collection[str]) -> Moved:
    """Move the rows into the table message by message, without the messages whose rows it refuses. The rows of one message
    have no order: they are tried until no more of them are taken. So are groups. A message that is refused by an SQLSTATE
    of `waits` is tried again behind the others.

    Raises:
        SinkRefused: more is refused than may be rejected.
        psycopg.Error: a statement fails for a reason that lies in no row.
    """
    rows.copy(by_halves=True)
    begins: list[int] = rows.order.begins.tolist()
    in_any_order = {*waits, *EXCLUDED}
    blamed: dict[int, list[tuple[_Range, psycopg.Error]]] = {}

    def put(units: _Range) -> None:
        between, before = (begins[units[0]], begins[units[1]]), rows.moved
        if units[1] - units[0] > 1 or between[1] - between[0] == 1:
            rows.put(between)
            return
        blamed[units[0]] = list(settle(connection, between, _half, rows.put, in_any_order))
        if blamed[units[0]]:
            rows.moved = before
            raise blamed[units[0]][0][1]

    refused, units = dict[int, psycopg.Error](), 0
    whole, groups = (0, len(begins) - 1), rejects.of_groups
    if len(begins) > 1:
        for (unit, _), error in settle(
            connection, whole, _half, put, in_any_order if groups else waits, in_order=not groups
        ):
            found = blamed.get(unit) or [((begins[unit], 0), error)]
            refused |= {int(rows.order.row[first]): refusal for (first, _), refusal in found}
            units += 1
            if rejects.is_full(units):
                break
    for part, places in rejects.all() if refused else ():
        for at in np.flatnonzero(np.isin(places, list(refused))).tolist():
            rejects.add(part.row(at).refused(*said(refused[int(places[at])], appended=rows.appends)))
    rejects.close()
    return rows.all_moved()


def _half(between: _Range) -> tuple[_Range, _Range] | None:
    middle = sum(between) // 2
    return None if between[1] - between[0] <= 1 else ((between[0], middle), (middle, between[1]))


def _half_of_rows(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch] | None:
    half = rows.num_rows // 2
    return (rows.slice(0, half), rows.slice(half)) if half else None
