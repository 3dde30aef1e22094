"""Finds by halves the rows that a table refuses, each part under a savepoint, and moves all others but those of the
rejected messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psycopg
import pyarrow as pa

from stormproof.core.errors import SinkRefused
from stormproof.sinks.postgres.refusals import is_of_a_row
from stormproof.sinks.postgres.rows import AppendedRows, RowsByKey
from stormproof.sinks.protocol import RefusedRow
from stormproof.sinks.rejects import Part, Rejects


@dataclass(frozen=True, slots=True)
class Moved:
    """How many rows were sent to the table without an error, and how many of them it took, superseded ones among them."""

    sent: int
    taken: int
    superseded: int

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
) -> Moved:
    """Move rows into the table, without the messages whose rows the table refuses; `begin` makes what moves them.

    The table's triggers drop rows only if they `may_drop` any. Of two rows that exclude each other the first is taken. A row
    that was refused stays so, though it would be taken without the rows that are left out later.

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
                for part in rejects.kept():
                    for found in _move(connection, part, rows.put, may_drop=may_drop):
                        if isinstance(found, RefusedRow):
                            rejects.add(found)
                        else:
                            sent, taken = sent + found[0], taken + found[1]
                if rejects.close():
                    raise _Again
        except _Again:
            continue
        return Moved(sent, taken, rows.superseded)


def _move(
    connection: psycopg.Connection, whole: Part, move: Callable[[Iterable[pa.RecordBatch]], int], *, may_drop: bool
) -> Iterator[RefusedRow | tuple[int, int]]:
    """Yields each row that the table refuses; and of each run of rows that it took, how many were sent and taken."""
    todo = [whole]
    while todo:
        part = todo.pop()
        sent = part.rows.num_rows
        try:
            with connection.transaction():
                taken = move([part.rows])
        except psycopg.Error as refusal:
            if not is_of_a_row(refusal):
                raise
            if sent == 1:
                yield part.refused(refusal.sqlstate, refusal.diag.message_primary or str(refusal))
            else:
                first, second = part.halves()
                todo += [second, first]
            continue
        if taken != sent and not may_drop:
            raise SinkRefused(f"{taken} of {sent} rows reached the table, and no trigger of it drops rows")
        yield sent, taken
