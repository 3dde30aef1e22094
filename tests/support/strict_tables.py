"""Rows that are appended and upserted by key, into tables of which some refuse a few of them; and what they must hold.

A message is one row: its text as `word`, and a key, a version, a deletion marker and a value that follow from the text. Keys
are few, so that a batch has a key several times and later versions come before earlier ones. A table in Postgres takes no
value below zero: there a message with such a value is a reject, and the other tables have its row.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psycopg
from deltalake import DeltaTable
from psycopg import sql

from stormproof import DeltaSink, PostgresSink, Topology
from stormproof.core.postgres.database import Database
from support.crashes import Cell
from support.shapes import Shape
from support.topologies import POISON, Split, source_of

SCHEMA: Final = "word string, key string, version bigint, gone boolean, value bigint"
KEYS: Final = 6
DELTA_APPEND, DELTA_UPSERT, POSTGRES_APPEND, POSTGRES_UPSERT = SINKS = (
    "delta_append",
    "delta_upsert",
    "postgres_append",
    "postgres_upsert",
)
REJECTS: Final = "rejects"
"""What the ledger tells of messages that the table of appended rows rejected, beside the sinks."""


class Row(NamedTuple):
    """What a message becomes."""

    word: str
    key: str
    version: int
    gone: bool
    value: int

    @property
    def is_refused(self) -> bool:
        """By the tables in Postgres."""
        return self.value < 0

    @property
    def shown(self) -> str:
        """As its table's content is compared."""
        return "/".join(map(str, self))


def row_of(text: str) -> Row:
    """The row of a message's text: the same at each attempt, in each process. Of each start's messages the first and the
    fourth are refused, so that it has batches with refused rows and without.
    """
    drawn = zlib.crc32(text.encode())
    refused = text.endswith(("w0", "w3"))
    return Row(text, f"k{drawn % KEYS}", drawn // KEYS % 100_000, drawn % 7 == 0, -1 if refused else drawn % 100)


class Rows:
    """Makes the rows; raises for the poison, and once for the flaky message; an empty one has none."""

    def __init__(self, marks: Path) -> None:
        self._split = Split(marks)

    def __call__(self, line: str) -> list[Row]:
        return [row_of(line)] if self._split(line) else []


def build(cell: Cell) -> Topology:
    """All four sinks; the tables in Postgres are there already."""
    with psycopg.connect(cell.database.conninfo) as connection:
        for name in (POSTGRES_APPEND, POSTGRES_UPSERT):
            connection.execute(
                sql.SQL(
                    "create table if not exists {} (word text, key text {}, version bigint, gone boolean,"
                    " value bigint check (value >= 0))"
                ).format(sql.Identifier(name), sql.SQL("primary key" if name == POSTGRES_UPSERT else ""))
            )
    t = Topology(cell.name)
    rows = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(Rows(cell.folder), "line", schema=SCHEMA)
    lake = cell.folder / "lake"
    rows.into(
        DeltaSink(lake / DELTA_APPEND, name=DELTA_APPEND),
        DeltaSink(
            lake / DELTA_UPSERT, name=DELTA_UPSERT, mode="upsert", key="key", order_by="version", delete_when="gone"
        ),
        PostgresSink(POSTGRES_APPEND, name=POSTGRES_APPEND, database=cell.database),
        PostgresSink(
            POSTGRES_UPSERT,
            name=POSTGRES_UPSERT,
            database=cell.database,
            mode="upsert",
            key="key",
            order_by="version",
            delete_when="gone",
        ),
    )
    return t


def contents(cell: Cell, database: Database) -> Mapping[str, Counter[str]]:
    """The rows of each table, and which message the ledger says was rejected at which sink."""
    found: dict[str, Counter[str]] = {}
    for name in (DELTA_APPEND, DELTA_UPSERT):
        path = cell.folder / "lake" / name
        there = DeltaTable(path).to_pyarrow_table().to_pylist() if DeltaTable.is_deltatable(str(path)) else []
        found[name] = Counter(Row(**row).shown for row in there)
    with psycopg.connect(database.conninfo) as connection:
        for name in (POSTGRES_APPEND, POSTGRES_UPSERT):
            made = connection.execute("select to_regclass(%s)", (name,)).fetchone()
            there = []
            if made is not None and made[0] is not None:
                query = sql.SQL("select word, key, version, gone, value from {}").format(sql.Identifier(name))
                there = connection.execute(query).fetchall()
            found[name] = Counter(Row(*row).shown for row in there)
        rejected = connection.execute(
            "select sink, row::json ->> 'word' from stormproof.reject where state = 'open'"
        ).fetchall()
        rows = {
            sink: Counter(row_of(word) for at, word in rejected if at == sink)
            for sink in (POSTGRES_APPEND, POSTGRES_UPSERT)
        }
        # Of a row that was superseded inside its batch the table never heard: an upsert has some of them.
        assert all(row.is_refused for row in rows[POSTGRES_UPSERT]), f"rejected by mistake: {rows}"
        found[REJECTS] = Counter({row.shown: times for row, times in rows[POSTGRES_APPEND].items()})
    return found


def answer(sink: str, put: Sequence[bytes]) -> Counter[str]:
    """What a sink must hold in the end: from the input alone."""
    return _held(sink, Counter(row_of(payload.decode()) for payload in put if payload not in (POISON, b"")))


def require_part(found: Counter[str], put: Sequence[bytes], sink: str) -> None:
    """Nothing may stand in a table but rows of messages, each once; of a key the latest of some.

    Raises:
        AssertionError: a row too many, or one that no message made.
    """
    if sink in (DELTA_UPSERT, POSTGRES_UPSERT):
        rows = {row_of(payload.decode()) for payload in put}
        should = Counter(row.shown for row in rows if sink == DELTA_UPSERT or not row.is_refused)
        keys = Counter(shown.split("/")[1] for shown in found.elements())
        assert not keys or max(keys.values()) == 1, f"{sink} holds {keys}"
    else:
        should = answer(sink, put)
    assert found <= should, f"{sink} holds {dict(found - should)} too much"


def _held(sink: str, rows: Counter[Row]) -> Counter[str]:
    refused = Counter({row: times for row, times in rows.items() if row.is_refused})
    if sink == REJECTS:
        return Counter({row.shown: times for row, times in refused.items()})
    taken = rows if sink.startswith("delta") else rows - refused
    if sink in (DELTA_APPEND, POSTGRES_APPEND):
        return Counter({row.shown: times for row, times in taken.items()})
    latest: dict[str, Row] = {}
    for row in sorted(taken, key=lambda row: (row.version, row.gone, row.value, row.word)):
        latest[row.key] = row
    return Counter(row.shown for row in latest.values())


STRICT_TABLES: Final = Shape(
    contents,
    {"delta": 2, "postgres": 2, "reject": 1, "commit": len(SINKS)},
    build,
    answer=answer,
    require_part=require_part,
    rejects_max_share=1.0,
)
"""Appends and upserts, and rejects of both tables in Postgres."""
