"""An upsert equals a plain fold in order of `order_by`, whatever the cut into batches, the rows' order and the repeats."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import MESSAGE_COLUMNS, SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database, connect
from stormproof.sinks.contract.protocol import CommitOutcome, PreparedTransaction, Sink, SinkIdentity, SinkSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.sinks.rows.by_key import LatestWriter
from stormproof.sinks.stores.memory import MemorySink

SCHEMA = pa.schema(
    [
        pa.field("Id", pa.int64()),
        pa.field("place", pa.string()),
        pa.field("v", pa.int32()),
        pa.field("w", pa.float64()),
        pa.field("gone", pa.bool_()),
        pa.field("name", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("small", pa.float32()),
        pa.field("amount", pa.decimal128(12, 2)),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("raw", pa.binary()),
    ]
)
INPUT = SinkInput.for_upsert(SCHEMA, ("Id", "place"), ("v", "w"), delete_when="gone")
COMPARED = ("v", "w", "gone", "name", "score", "small", "amount", "at", "raw")

Row = tuple[Any, ...]
Batches = list[list[Row]]
_NUMBERS = [math.nan, -0.0, 0.0, -1.5, 2.5, math.inf, -math.inf]
_TIMES = [datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC) + timedelta(microseconds=n) for n in (0, 1, 10**6)]

ROWS = st.tuples(
    st.sampled_from([1, 2]),
    st.sampled_from(["", "a", "A"]),
    st.sampled_from([-1, 0, 1]),
    st.sampled_from(_NUMBERS),
    st.sampled_from([None, False, True]),
    st.sampled_from([None, "", "a", "B", "ä", "z", "\U0001f600", "\uffff"]),
    st.sampled_from([None, *_NUMBERS]),
    st.sampled_from([None, *_NUMBERS]),
    st.sampled_from([None, Decimal("-1.00"), Decimal("0.10"), Decimal("9.99")]),
    st.sampled_from([None, *_TIMES]),
    st.sampled_from([None, b"", b"\0", b"\xff", b"a"]),
)
BATCHES = st.lists(st.lists(ROWS, max_size=12), min_size=1, max_size=4)


def rank(row: Row) -> list[tuple[int, Any]]:
    """The row in the documented order: NULL before NaN before numbers, text by its bytes."""
    found: list[tuple[int, Any]] = []
    for name in COMPARED:
        value = row[SCHEMA.names.index(name)]
        if value is None:
            found.append((0, 0))
        elif isinstance(value, float) and math.isnan(value):
            found.append((1, 0))
        else:
            found.append((2, value.encode() if isinstance(value, str) else value))
    return found


class Model:
    """A plain fold, row by row."""

    def __init__(self) -> None:
        self.held: dict[Row, Row] = {}

    def put(self, rows: Sequence[Row]) -> int:
        """How many rows changed nothing, compared with what was there before the batch."""
        before = dict(self.held)
        for row in rows:
            held = self.held.get(row[:2])
            if held is None or rank(row) > rank(held):
                self.held[row[:2]] = row
        return len(rows) - sum(before.get(key) is not row for key, row in self.held.items())

    def shown(self) -> list[str]:
        return sorted(map(shown, self.held.values()))


def shown(row: Sequence[Any]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return value + 0.0  # -0.0 becomes 0.0
        if isinstance(value, datetime):
            return value.astimezone(UTC).isoformat()
        return bytes(value) if isinstance(value, memoryview) else value

    return repr([plain(value) for value in row])


def prepared(session: SinkSession, txid: int, rows: Sequence[Row], incarnation: str) -> PreparedTransaction:
    writer = session.writer().open_task(TaskContext(incarnation, txid, 1, 0), SCHEMA)
    for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        writer.write(pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, r, strict=True)) for r in part], SCHEMA))
    files = writer.close()
    return PreparedTransaction(
        txid, txid - 1 or None, transaction_digest(files), sum(f.rows for f in files), tuple(files)
    )


def require_fold(sink: Sink, read: Callable[[], list[Row]], batches: Batches, incarnation: str = "life") -> None:
    """Commit the batches, each twice, and compare table and counts with the model."""
    model = Model()
    sink.check(INPUT, Guarantee.EXACTLY_ONCE)
    with closing(sink.open(SinkIdentity("t", incarnation, sink.name), INPUT, 1)) as session:
        for txid, rows in enumerate(batches, start=1):
            transaction = prepared(session, txid, rows, incarnation)
            superseded = model.put(rows)
            done = session.commit(transaction, checked=True)
            assert (done.outcome, done.superseded) == (CommitOutcome.APPLIED, superseded)
            again = session.commit(transaction, checked=True)
            assert (again.outcome, again.superseded) == (CommitOutcome.ALREADY_HELD, superseded)
    assert sorted(map(shown, read())) == model.shown()


def of_table(table: pa.Table) -> list[Row]:
    return [tuple(row[name] for name in SCHEMA.names) for row in table.to_pylist()]


def in_memory(batches: Batches, folder: Path) -> None:
    sink = MemorySink("memory", staging=folder)
    require_fold(sink, lambda: [tuple(row.values()) for row in sink.rows()], batches)


def in_delta(batches: Batches, path: Path) -> None:
    require_fold(DeltaSink(path, name="delta"), lambda: of_table(DeltaTable(path).to_pyarrow_table()), batches)


def in_postgres(batches: Batches, database: Database, folder: Path, number: int) -> None:
    table = f"upserted_{number}"
    sink = PostgresSink(table, name="postgres", database=database, staging=folder)

    def read() -> list[Row]:
        columns = ", ".join(f'"{name}"' for name in SCHEMA.names)
        with connect(database, application_name="test", autocommit=True) as connection:
            return connection.execute(f"select {columns} from {table}".encode()).fetchall()

    require_fold(sink, read, batches, f"life-{number}")


@settings(max_examples=100, deadline=None)
@given(batches=BATCHES)
def test_in_memory(batches: Batches, tmp_path_factory: pytest.TempPathFactory) -> None:
    in_memory(batches, tmp_path_factory.mktemp("staged"))


@settings(max_examples=12, deadline=None)
@given(batches=BATCHES)
def test_in_a_delta_table(batches: Batches, tmp_path_factory: pytest.TempPathFactory) -> None:
    in_delta(batches, tmp_path_factory.mktemp("lake") / "table")


_NUMBER = itertools.count()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=BATCHES)
def test_in_a_postgres_table(batches: Batches, tmp_path: Path, database: Database) -> None:
    in_postgres(batches, database, tmp_path, next(_NUMBER))


@settings(max_examples=100, deadline=None)
@given(batches=BATCHES, seed=st.randoms(use_true_random=False))
def test_the_cut_and_the_order_decide_nothing(batches: Batches, seed: Any) -> None:
    """The model's own promise: it, and so every sink, depends on the set of rows alone."""
    rows = [row for batch in batches for row in batch]
    one, other = Model(), Model()
    one.put(rows)
    seed.shuffle(rows)
    while rows:
        cut = seed.randint(1, len(rows))
        other.put(rows[:cut])
        rows = rows[cut:]
    assert one.shown() == other.shown()


# Columns in `keep`: those of the first message of each key, wherever the messages are cut into batches.

KEPT = SinkInput.for_upsert(
    pa.schema(
        [
            *(pa.field("k", pa.int64()), pa.field("v", pa.int64()), pa.field("w", pa.float64())),
            *(pa.field("made", pa.string()), pa.field("tags", pa.list_(pa.int64())), pa.field("n", pa.int64())),
        ]
    ),
    ("k",),
    ("v", "w"),
    keep=("made", "tags"),
)
MESSAGES = st.lists(
    st.tuples(
        *(st.sampled_from([1, 2]), st.sampled_from([0, 1]), st.sampled_from([math.nan, 0.0, 1.0])),
        *(st.sampled_from([None, "a", "b", "ä"]), st.sampled_from([None, [], [1], [2, 3]]), st.sampled_from([None, 1])),
    ),
    min_size=1,
    max_size=10,
)


@st.composite
def cut_messages(draw: st.DrawFn) -> tuple[list[Row], list[int]]:
    """Messages of one row each, and how many of them come in each batch."""
    rows = draw(MESSAGES)
    return rows, [*draw(st.lists(st.integers(1, len(rows)), max_size=3)), len(rows)]


CUT = cut_messages()


def require_kept(
    sink: Sink, read: Callable[[], pa.Table], cut: tuple[list[Row], list[int]], mix: Any, life: str
) -> None:
    """Commit the messages, each batch's rows in any order: what is kept is that of the first message of each key."""
    (rows, cuts), number = cut, 0
    with closing(sink.open(SinkIdentity("t", life, sink.name), KEPT, 1)) as session:
        for txid, size in enumerate(cuts, start=1):
            writer = session.writer()
            schema = pa.schema([*KEPT.schema, *MESSAGE_COLUMNS]) if writer.names_messages else KEPT.schema
            batch = [(*row, number + at, 0, None) for at, row in enumerate(rows[number : number + size])]
            mix.shuffle(batch)
            number += len(batch)
            task = writer.open_task(TaskContext(life, txid, 1, 0), schema)
            for row in batch:
                task.write(pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=False))], schema))
            files = tuple(task.close())
            digest, count = transaction_digest(files), sum(file.rows for file in files)
            session.commit(PreparedTransaction(txid, txid - 1 or None, digest, count, files), checked=True)
    first = {row[0]: (row[3], row[4]) for row in reversed(rows)}
    assert {row["k"]: (row["made"], row["tags"]) for row in read().to_pylist()} == first


@settings(max_examples=60, deadline=None)
@given(cut=CUT, mix=st.randoms(use_true_random=False))
def test_what_is_kept_in_memory(cut: Any, mix: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    sink = MemorySink("memory", staging=tmp_path_factory.mktemp("staged"))
    require_kept(sink, lambda: pa.Table.from_pylist(sink.rows()), cut, mix, "life")


@settings(max_examples=8, deadline=None)
@given(cut=CUT, mix=st.randoms(use_true_random=False))
def test_what_is_kept_in_a_delta_table(cut: Any, mix: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lake") / "table"
    require_kept(DeltaSink(path, name="delta"), lambda: DeltaTable(path).to_pyarrow_table(), cut, mix, "life")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=CUT, mix=st.randoms(use_true_random=False))
def test_what_is_kept_in_a_postgres_table(cut: Any, mix: Any, tmp_path: Path, database: Database) -> None:
    table = f"kept_{next(_NUMBER)}"

    def read() -> pa.Table:
        with connect(database, application_name="test", autocommit=True) as connection:
            found = connection.execute(f"select k, made, tags from {table}".encode()).fetchall()
        return pa.Table.from_pylist([dict(zip(("k", "made", "tags"), row, strict=True)) for row in found])

    require_kept(PostgresSink(table, name="p", database=database, staging=tmp_path), read, cut, mix, f"life-{table}")


def test_a_task_that_compacts_keeps_what_the_first_message_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that was first is gone by then, and the one that was last may be superseded in its turn."""
    monkeypatch.setattr("stormproof.sinks.rows.by_key.COMPACTED_ROWS_MIN", 2)
    sink = MemorySink("memory", staging=tmp_path)
    rows: list[Row] = [(1, v, 0.0, f"row {v}", [v], None) for v in (3, 1, 5, 2, 4, 9, 0, 7)]
    for seed in range(8):
        mix = random.Random(seed)
        sink.store.drop()
        sink.store.logs.clear()
        require_kept(sink, lambda: pa.Table.from_pylist(sink.rows()), (rows, [len(rows)]), mix, "life")
        assert [row["v"] for row in sink.rows()] == [9]


def test_control_what_the_last_row_of_a_batch_would_keep_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatestWriter, "_with_first", lambda _writer, table, last: table.take(pa.array(last)))
    sink = MemorySink("memory", staging=tmp_path)
    rows: list[Row] = [(1, v, 0.0, f"row {v}", [v], None) for v in (1, 2)]
    with pytest.raises(AssertionError):
        require_kept(sink, lambda: pa.Table.from_pylist(sink.rows()), (rows, [2]), random.Random(1), "life")


# Negative controls: a newer row, then an older one; a deletion, then an older row.

REST: Row = (None, None, None, None, None, None)
LATE: Batches = [[(1, "a", 1, 0.0, False, *REST)], [(1, "a", 0, 0.0, False, *REST)]]
DEAD: Batches = [[(1, "a", 1, 0.0, True, *REST)], [(1, "a", 0, 0.0, False, *REST)]]


@pytest.mark.parametrize("batches", [LATE, DEAD], ids=["late", "dead"])
def test_control_the_scenarios_hold_as_they_are(batches: Batches, tmp_path: Path, database: Database) -> None:
    in_memory(batches, tmp_path / "memory")
    in_delta(batches, tmp_path / "lake")
    in_postgres(batches, database, tmp_path / "staged", next(_NUMBER))


def test_control_no_condition_on_the_order_is_caught(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormproof.sinks.delta.versions.later_condition", lambda *_: None)
    monkeypatch.setattr("stormproof.sinks.postgres.merge.later_condition", lambda *_: None)
    with pytest.raises(AssertionError):
        in_delta(LATE, tmp_path / "lake")
    with pytest.raises(AssertionError):
        in_postgres(LATE, database, tmp_path / "staged", next(_NUMBER))


def test_control_a_deletion_that_leaves_nothing_behind_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stormproof.sinks.rows import by_key

    def removing(held: pa.Table, added: pa.Table, input_: SinkInput) -> tuple[pa.Table, int]:
        made, superseded = by_key.put_rows(held, added, input_)
        return made.filter(pa.array([not gone for gone in made.column("gone").to_pylist()])), superseded

    monkeypatch.setattr("stormproof.sinks.stores.memory.put_rows", removing)
    with pytest.raises(AssertionError):
        in_memory(DEAD, tmp_path)
