"""Finds by bisection the rows that a table refuses, each part under a savepoint, and moves all others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Final

import psycopg
import pyarrow as pa

from stormproof.core.errors import SinkRefused
from stormproof.core.message import storable_text
from stormproof.sinks.postgres.refusals import is_of_a_row
from stormproof.sinks.protocol import RefusedRow

REFUSED_MAX: Final = 1_000
"""Rows that one command may give up. More than that is no exception any more, and each one costs some 40 statements."""

_TEXT_MAX: Final = 10_000


class _Dropped(Exception):
    """A trigger dropped rows without an error."""


def move_row_by_row(
    connection: psycopg.Connection,
    batches: Iterable[tuple[str, int, pa.RecordBatch]],
    move: Callable[[Iterable[pa.RecordBatch]], int],
    where: str,
) -> tuple[int, list[RefusedRow]]:
    """Move batches into the table by `move`, which counts the rows; a batch is (file, number of its first row, rows).

    Returns the number of rows that the table took, and the rows that it refused. Of two rows that exclude each other the
    first is taken.

    Raises:
        SinkRefused: more than `REFUSED_MAX` rows are refused.
        psycopg.Error: a statement fails for a reason that lies in no row.
    """
    # A deferred constraint would be checked at the end of the transaction, and its error would name no row.
    connection.execute("set constraints all immediate")
    taken, refused = 0, list[RefusedRow]()
    for file, first, batch in batches:
        todo = [(first, batch)]
        while todo:
            at, part = todo.pop()
            sqlstate, error = None, "the table took it without an error and does not hold it: a trigger drops it"
            try:
                with connection.transaction():
                    if move([part]) != part.num_rows:
                        raise _Dropped
                taken += part.num_rows
                continue
            except _Dropped:
                pass
            except psycopg.Error as refusal:
                if not is_of_a_row(refusal):
                    raise
                sqlstate, error = refusal.sqlstate, refusal.diag.message_primary or str(refusal)
            if part.num_rows > 1:
                half = part.num_rows // 2
                todo += [(at + half, part.slice(half)), (at, part.slice(0, half))]
                continue
            if len(refused) == REFUSED_MAX:
                raise SinkRefused(
                    f"{where}: more than {REFUSED_MAX} rows are refused, the last for: {error}. Nothing was written. "
                    "Repair the table's rules and retry the txid, or give up all of its rows: skip without --rows",
                    sqlstate=sqlstate,
                )
            text = json.dumps(part.to_pylist()[0], default=str, ensure_ascii=True)[:_TEXT_MAX]
            refused.append(RefusedRow(file, at, text, sqlstate, storable_text(error)))
    return taken, refused
