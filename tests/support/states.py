"""Words counted in states: maps in Postgres and Delta, maps over a key-value store, and bolts that read them meanwhile."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from stormproof import DeltaMap, PostgresMap, PostgresSink, Topology, count
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import SinkIdentity, SinkSession
from stormproof.state import OpaqueMap, StateFactory, StateSink, TransactionalMap
from stormproof.trident.audit.inspect import SinkOpener, opener_for
from stormproof.trident.ledger.sink_records import SinkBinding
from support.blows import Action
from support.chain import Ordeal
from support.contents import counted, in_delta, in_postgres
from support.crashes import Cell
from support.shapes import Shape
from support.topologies import Split, source_of, table_of


class StateMode(StrEnum):
    """One state of the topology, in the order in which they commit."""

    POSTGRES_OPAQUE = "postgres-opaque"
    POSTGRES_TRANSACTIONAL = "postgres-transactional"
    DELTA_OPAQUE = "delta-opaque"
    DELTA_TRANSACTIONAL = "delta-transactional"
    OWN_OPAQUE = "own-opaque"
    OWN_TRANSACTIONAL = "own-transactional"

    @property
    def store(self) -> str:
        return self.value.partition("-")[0]

    @property
    def kind(self) -> str:
        return self.value.partition("-")[2]


OWN: Final = tuple(mode for mode in StateMode if mode.store == "own")
MAPS: Final = tuple(mode for mode in StateMode if mode not in OWN)

NEWS, FOUND = "news", "found"
"""What two bolts read: the new value of each key of a batch, and what was there before for each word of it."""


class Sqlite:
    """A key-value store in which each key is durable on its own."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("pragma synchronous = off")  # nobody cuts the power here
        self._connection.execute("create table if not exists items (key blob primary key, value blob)")

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        found = (self._connection.execute("select value from items where key = ?", (key,)).fetchone() for key in keys)
        return [None if row is None else row[0] for row in found]

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        for item in items.items():
            self._connection.execute("insert or replace into items values (?, ?)", item)

    def close(self) -> None:
        self._connection.close()


def build(modes: Sequence[StateMode], cell: Cell, *, readers: bool = False) -> Topology:
    """Word counts in each of these states; with `readers`, what is read of the first in Postgres, and in Delta."""
    t = Topology(cell.name)
    lines = t.stream("lines", source_of(cell.queue, cell.database))
    words = lines.flat_map(Split(cell.folder), "line", schema="word string")
    counts = words.group_by("word").persistent_aggregate(n=count())
    counts.into(*(StateSink(mode, _factory(mode, cell)) for mode in modes))
    if readers:
        read = words.state_query(StateMode.DELTA_OPAQUE, "word", schema="before long")
        counts.new_values_stream().into(PostgresSink(_table(NEWS, cell), name=NEWS, database=cell.database))
        read.into(PostgresSink(_table(FOUND, cell), name=FOUND, database=cell.database))
    return t


def _factory(mode: StateMode, cell: Cell) -> StateFactory:
    match mode.store:
        case "postgres":
            return PostgresMap(table_of(mode, cell.name), mode.kind, database=cell.database)
        case "delta":
            return DeltaMap(cell.folder / "lake" / table_of(mode, cell.name), mode.kind)
        case _:
            map_ = OpaqueMap if mode.kind == "opaque" else TransactionalMap
            return map_(partial(Sqlite, str(_file(mode, cell))), name=mode.value)


def _file(mode: StateMode, cell: Cell) -> Path:
    return cell.folder / f"{mode}.db"


def _table(name: str, cell: Cell) -> str:
    return f"{cell.name}_{name}"


def contents(
    modes: Sequence[StateMode], cell: Cell, database: Database, *, readers: bool = False
) -> dict[str, Counter[str]]:
    """How often each word was counted, by each state's own rows, and by what the readers were told of them.

    Raises:
        AssertionError: a state has a key twice, or a reader was told what no state held between two batches.
    """
    held: dict[str, Counter[str]] = {mode: _held(mode, cell, database) for mode in modes}
    if readers:
        held[FOUND], sums = _sums_before(in_postgres(database, _table(FOUND, cell), "coalesce(before, 0)"))
        held[NEWS] = Counter()
        for word, values in _by_word(in_postgres(database, _table(NEWS, cell), "n")).items():
            told, others = sorted(values), sums.get(word, [])
            assert len(set(told)) == len(told), f"{NEWS}: {word!r} came to {told}"
            common = min(len(told), len(others))  # one of the two may have a batch that the other has yet to get
            assert told[:common] == others[:common], f"{word!r} came to {told} by {NEWS}, to {others} by {FOUND}"
            held[NEWS][word] = told[-1]
    return held


def _held(mode: StateMode, cell: Cell, database: Database) -> Counter[str]:
    match mode.store:
        case "postgres":
            rows = in_postgres(database, table_of(mode, cell.name), "n")
        case "delta":
            rows = in_delta(cell.folder / "lake" / table_of(mode, cell.name), "n")
        case _:
            rows = _in_store(_file(mode, cell))
    return counted(rows, once=mode)


def _in_store(path: Path) -> list[tuple[str, int]]:
    if not path.exists():
        return []
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "select json_extract(cast(key as text), '$[0]'), json_extract(cast(value as text), '$.n') from items"
            " where cast(key as text) like '[%'"
        ).fetchall()
    connection.close()
    return rows


def _by_word(rows: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for word, n in rows:
        found.setdefault(word, []).append(n)
    return found


def _sums_before(rows: Iterable[tuple[str, int]]) -> tuple[Counter[str], dict[str, list[int]]]:
    """How often each word came, and to what it had come after each batch: what was read before each must say so."""
    sums: dict[str, list[int]] = {}
    for word, read in _by_word(rows).items():
        came = sums[word] = []
        for before, times in sorted(Counter(read).items()):
            assert before == (came[-1] if came else 0), f"{FOUND}: {word!r} had come to {came}, and {before} was read"
            came.append(before + times)
    return Counter({word: came[-1] for word, came in sums.items()}), sums


def opener(cell: Cell, database: Database) -> SinkOpener:
    """Opens the key-value stores, too, of which the ledger knows only the names."""
    others = opener_for(database)
    rows = SinkInput(pa.schema([("word", pa.string()), ("n", pa.int64())]), ("word",))

    def open_sink(identity: SinkIdentity, binding: SinkBinding) -> SinkSession:
        if binding.sink not in OWN:
            return others(identity, binding)
        return StateSink(binding.sink, _factory(StateMode(binding.sink), cell), keys=rows.keys).inspect(identity, rows)

    return open_sink


# A key-value store's log ends with its last transaction.
_UNTOLD: Final = frozenset[str](OWN)

IN_MAPS: Final = Shape(
    partial(contents, MAPS),
    {"delta": 2, "state": len(MAPS), "commit": len(MAPS)},
    partial(build, MAPS),
)
"""Maps in Postgres and Delta: they hold whatever befalls their driver."""

IN_ALL: Final = Shape(
    partial(contents, tuple(StateMode)),
    {"delta": 2, "state": len(StateMode), "commit": 2},
    partial(build, tuple(StateMode)),
    opener,
    _UNTOLD,
)
"""Key-value stores beside them: for all but a take-over from a driver that stands still in their commit."""

READ: Final = Shape(
    partial(contents, tuple(StateMode), readers=True),
    {"delta": 2, "state": len(StateMode), "postgres": 1, "commit": 2},
    partial(build, tuple(StateMode), readers=True),
    opener,
    _UNTOLD,
)
"""And bolts that read two of the states, so that one batch runs at a time."""


def promised(ordeal: Ordeal) -> bool:
    """Whether a key-value store outlives it: it cannot refuse who stood still in its commit while another went on.

    For one batch in flight. With several, a driver may stand still in a commit wherever it is stopped.
    """
    return not any(
        blow.action is Action.TAKE_OVER
        and blow.point in ("state.after_begin", "state.after_rows")
        and blow.at > len(MAPS)
        for blow in (blow for blows in ordeal.starts for blow in blows)
    )
