"""What the sinks' tables hold, read by their own readers and not by the code under test."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psycopg
from deltalake import DeltaTable
from psycopg import sql

from stormproof.core.postgres.database import Database
from support.topologies import SinkMode, table_of


def content(mode: SinkMode, name: str, folder: Path, database: Database) -> Counter[str]:
    """How often each word stands in a sink's table; empty where the table was never made."""
    table = table_of(mode, name)
    rows = _delta(folder / "lake" / table) if mode.store == "delta" else _postgres(database, table, folds=mode.folds)
    counts: Counter[str] = Counter()
    for word, n in rows:
        counts[word] += n
        if mode.folds:
            assert counts[word] == n, f"{mode}: two rows for key {word!r}"
    return counts


def _delta(path: Path) -> list[tuple[str, int]]:
    if not DeltaTable.is_deltatable(str(path)):
        return []
    table = DeltaTable(str(path)).to_pyarrow_table()
    ns = table.column("n").to_pylist() if "n" in table.column_names else [1] * len(table)
    return list(zip(table.column("word").to_pylist(), ns, strict=True))


def _postgres(database: Database, table: str, *, folds: bool) -> list[tuple[str, int]]:
    with psycopg.connect(database.conninfo) as connection:
        found = connection.execute("select to_regclass(%s)", (table,)).fetchone()
        if found is None or found[0] is None:
            return []
        n = sql.SQL("n") if folds else sql.SQL("1")
        rows = connection.execute(sql.SQL("select word, {} from {}").format(n, sql.Identifier(table))).fetchall()
    return [(str(word), int(count)) for word, count in rows]
