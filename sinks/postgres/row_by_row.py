"""Finds by halves the rows that a table refuses, each part under a savepoint, and moves all others but those of the
rejected messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
import pyarrow as pa

from stormproof.core.errors import SinkRefused
from stormproof.sinks.postgres.refusals import is_of_a_row
from stormproof.sinks.postgres.rows import AppendedRows, RowsByKey
from stormproof.sinks.protocol import RefusedRow
from stormproof.sinks.rejects import Part, Rejects


@dataclass(frozen=True, slots=True)
class Moved:
    """How many rows were sent to the table without an error, how many of them it took, superseded ones among them, and how
    many keys it had not.
    """

    sent: int
    taken: int
    superseded: int
    inserted: int

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
    finds_parents: bool = False,
) -> Moved:
    """Move rows into the table, without the messages whose rows the table refuses; `begin` makes what moves them.

    The table's triggers drop rows only if they `may_drop` any. Of two rows that exclude each other the first is taken. A row
    that was refused stays so, though it would be taken without the rows that are left out later. With `finds_parents` the
    table has a foreign key to itself, and a row that lacks its parent is tried again behind all others.

    Raises:
        SinkRefused: more is refused than may be rejected.
        psycopg.Error: a statement fails for a reason that lies in no row.
    """
    # A deferred constraint would be checked at the end of the transaction, and its error would name no row.
    connection.execute("set constraints all immediate")
    while True:
        try:
            with connection.transaction():
                rows, sent, taken = begin(), 0, 0
                orphans: list[_Refused] = []
                for part in rejects.kept():
                    for found in _move(connection, [part], rows.put, may_drop=may_drop):
                        if not isinstance(found, _Refused):
                            sent, taken = sent + found[0], taken + found[1]
                        elif finds_parents and found.sqlstate == _NO_PARENT and len(orphans) < ORPHANS_MAX:
                            orphans.append(found)
                        else:
                            rejects.add(found.row())
                while orphans:
                    # All at once, since one of them may be the parent of another. Each round takes a generation at least.
                    left: list[_Refused] = []
                    for found in _move(connection, [one.part for one in orphans], rows.put, may_drop=may_drop):
                        if isinstance(found, _Refused):
                            left.append(found)
                        else:
                            sent, taken = sent + found[0], taken + found[1]
                    if len(left) == len(orphans):
                        for one in left:
                            rejects.add(one.row())
                        break
                    orphans = left
                if rejects.close():
                    raise _Again
        except _Again:
            continue
        return Moved(sent, taken, rows.superseded, rows.inserted)


_NO_PARENT: Final = "23503"
ORPHANS_MAX: Final = 2_000
"""Rows of a commit that are tried again since they lack their parents. Each one costs some 40 statements."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """A part with one row, which the table refuses."""

    part: Part
    sqlstate: str | None
    error: str

    def row(self) -> RefusedRow:
        return self.part.refused(self.sqlstate, self.error)


def _move(
    connection: psycopg.Connection,
    whole: Sequence[Part],
    move: Callable[[Iterable[pa.RecordBatch]], int],
    *,
    may_drop: bool,
) -> Iterator[_Refused | tuple[int, int]]:
    """Yields each row that the table refuses; and of each run of rows that it took, how many were sent and taken."""
    todo = [whole]
    while todo:
        parts = todo.pop()
        sent = sum(part.rows.num_rows for part in parts)
        try:
            with connection.transaction():
                taken = move([part.rows for part in parts])
        except psycopg.Error as refusal:
            if not is_of_a_row(refusal):
                raise
            if sent == 1:
                yield _Refused(parts[0], refusal.sqlstate, refusal.diag.message_primary or str(refusal))
            else:
                half = len(parts) // 2
                first, second = (parts[:half], parts[half:]) if half else ([one] for one in parts[0].halves())
                todo += [second, first]
            continue
        if taken != sent and not may_drop:
            raise SinkRefused(f"{taken} of {sent} rows reached the table, and no trigger of it drops rows")
        yield sent, taken
