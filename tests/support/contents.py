"""What the sinks' tables hold, read by their own readers and not by the code under test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import LiteralString

import psycopg
from deltalake import DeltaTable
from psycopg import sql

from stormproof.core.postgres.database import Database
from support.topologies import SinkMode, table_of


def content(mode: SinkMode, name: str, folder: Path, database: Database) -> Counter[str]:
    """How often each word stands in a sink's table; empty where the table was never made."""
    table = table_of(mode, name)
    if mode.store == "delta":
        rows = in_delta(folder / "lake" / table, "n" if mode.folds else None)
    else:
        rows = in_postgres(database, table, "n" if mode.folds else "1")
    return counted(rows, once=mode if mode.folds else None)


def counted(rows: Iterable[tuple[str, int]], *, once: str | None = None) -> Counter[str]:
    """How often each word; with `once`, a sink's name, each may have one row only."""
    counts: Counter[str] = Counter()
    for word, n in rows:
        assert once is None or word not in counts, f"{once}: two rows for key {word!r}"
        counts[word] += n
    return counts


def in_delta(path: Path, n: str | None) -> list[tuple[str, int]]:
    """A Delta table's words with a number of theirs (None: 1); none where there is no such table."""
    if not DeltaTable.is_deltatable(str(path)):
        return []
    table = DeltaTable(str(path)).to_pyarrow_table()
    ns = [1] * len(table) if n is None else table.column(n).to_pylist()
    return list(zip(table.column("word").to_pylist(), ns, strict=True))


def in_postgres(database: Database, table: str, n: LiteralString) -> list[tuple[str, int]]:
    """A Postgres table's words with a number of theirs; none where there is no such table."""
    with psycopg.connect(database.conninfo) as connection:
        found = connection.execute("select to_regclass(%s)", (table,)).fetchone()
        if found is None or found[0] is None:
            return []
        query = sql.SQL("select word, {} from {}").format(sql.SQL(n), sql.Identifier(table))
        return [(str(word), int(number)) for word, number in connection.execute(query).fetchall()]
