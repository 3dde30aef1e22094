"""Finds by halves the rows that a table refuses, each part under a savepoint, and moves all others but those of the
rejected messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import psycopg

from stormproof.core.errors import SinkRefused
from stormproof.sinks.postgres.refusals import is_of_a_row
from stormproof.sinks.postgres.rows import AppendedRows, RowsByKey
from stormproof.sinks.rejects import Part, Rejects


@dataclass(frozen=True, slots=True)
class Moved:
    """How many rows were sent to the table without an error, how many of them it took, superseded ones among them, how many
    keys it had not, and by how much the sum of its rows' hashes is more.
    """

    sent: int
    taken: int
    superseded: int
    inserted: int
    change: int = 0

    @property
    def dropped(self) -> int:
        """How many its triggers dropped."""
        return self.sent - self.taken


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

    def put(parts: Sequence[Part]) -> None:
        nonlocal sent, taken
        given = sum(part.rows.num_rows for part in parts)
        found = rows.put([part.rows for part in parts])
        require_taken(found, given, may_drop=may_drop)
        sent, taken = sent + given, taken + found

    waiting: list[Part] = []
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


def _halves(parts: list[Part]) -> tuple[list[Part], list[Part]] | None:
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
