"""A topology whose function gives something else at each run: each row has a mark of the very call that made it."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import psycopg
from deltalake import DeltaTable
from psycopg import sql

from stormproof import Topology, count
from stormproof.core.postgres.database import Database
from support.crashes import Cell
from support.shapes import SINK_HITS, Shape
from support.topologies import SinkMode, Split, sink_of, source_of, table_of


class Marked:
    """Splits lines; each call marks its words by the clock and a random number, and gives them in an order of its own."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __call__(self, line: str) -> list[tuple[str, str]]:
        mark = f"{time.time_ns()}-{secrets.token_hex(8)}"
        words = [(word, mark) for word in self._split(line)]
        secrets.SystemRandom().shuffle(words)
        return words


def build(cell: Cell) -> Topology:
    """Rows (word, mark) and counts by word and mark, into all four sinks."""
    t = Topology(cell.name)
    lines = t.stream("lines", source_of(cell.queue, cell.database))
    marked_words = lines.flat_map(Marked(Split(cell.folder)), "line", schema="word string, mark string")
    sinks = {mode: sink_of(mode, cell.name, cell.folder, cell.database) for mode in SinkMode}
    marked_words.into(*(sink for mode, sink in sinks.items() if not mode.folds))
    folded = marked_words.group_by("word", "mark").persistent_aggregate(n=count())
    folded.into(*(sink for mode, sink in sinks.items() if mode.folds))
    return t


def marks(cell: Cell, database: Database, mode: SinkMode) -> Counter[tuple[str, str]]:
    """How often a sink holds each word with each mark."""
    table = table_of(mode, cell.name)
    rows = (
        _delta(cell.folder / "lake" / table) if mode.store == "delta" else _postgres(database, table, folds=mode.folds)
    )
    counts: Counter[tuple[str, str]] = Counter()
    for word, mark, n in rows:
        counts[word, mark] += n
    return counts


def _delta(path: Path) -> list[tuple[str, str, int]]:
    if not DeltaTable.is_deltatable(str(path)):
        return []
    rows = DeltaTable(str(path)).to_pyarrow_table().to_pylist()
    return [(row["word"], row["mark"], row.get("n", 1)) for row in rows]


def _postgres(database: Database, table: str, *, folds: bool) -> list[tuple[str, str, int]]:
    n = sql.SQL("n") if folds else sql.SQL("1")
    with psycopg.connect(database.conninfo) as connection:
        found = connection.execute("select to_regclass(%s)", (table,)).fetchone()
        if found is None or found[0] is None:
            return []
        rows = connection.execute(sql.SQL("select word, mark, {} from {}").format(n, sql.Identifier(table))).fetchall()
    return [(str(word), str(mark), int(number)) for word, mark, number in rows]


def words(cell: Cell, database: Database) -> dict[str, Counter[str]]:
    """How often each sink holds each word, whatever its mark."""
    held: dict[str, Counter[str]] = {}
    for mode in SinkMode:
        counts = held[mode] = Counter[str]()
        for (word, _), n in marks(cell, database, mode).items():
            counts[word] += n
    return held


SHAPE = Shape(words, SINK_HITS, build)


def require_one_call(cell: Cell, database: Database, put: Sequence[bytes]) -> None:
    """Each message is in all sinks what one call of the function has made of it.

    Raises:
        AssertionError: two sinks hold a message from two calls, or one holds rows of two calls.
    """
    first, *others = list(SinkMode)
    held = marks(cell, database, first)
    for mode in others:
        found = marks(cell, database, mode)
        assert found == held, f"{mode} holds {dict(found - held)}, {first} holds {dict(held - found)} instead"
    calls: defaultdict[str, set[str]] = defaultdict(set)
    for word, mark in held:
        calls[word].add(mark)
    times = Counter(word for payload in put for word in set(payload.decode().split()))
    for word, of in calls.items():
        assert len(of) == times[word], f"{word!r} is from {len(of)} calls, {times[word]} messages have it"
