"""What every sink that folds promises of sums, minima and maxima: NULL, NaN, order, types, any cut into batches."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fold_harness import EVERYTHING, NEGATIVE_NAN, VALUES, Folded, FoldHarness, comparable, rows_of

from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.sinks.contract.protocol import describe_sink
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.sinks.rows.merge_sql import Dialect
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.audit.inspect import open_for_inspection
from stormproof.trident.ledger.sink_records import SinkBinding

STORES = ("memory", "postgres", "delta", "delta-streamed")
FUNCTION_SCOPED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
Row = dict[str, Any]

_lives = itertools.count(1)


@pytest.fixture(params=STORES)
def harness(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FoldHarness:
    store, _, streamed = str(request.param).partition("-")
    if streamed:
        monkeypatch.setattr("stormproof.sinks.delta.session.MERGE_ROWS_IN_MEMORY_MAX", 0)
    database = request.getfixturevalue("database") if store == "postgres" else None
    return FoldHarness(f"{store}-fold", tmp_path, database).take(EVERYTHING)


def rows_strategy(rows_max: int) -> st.SearchStrategy[list[tuple[int, Row]]]:
    """Rows, each with the number of its batch."""
    columns = {name: st.sampled_from([None, *values]) for name, (_, values) in VALUES.items()}
    columns |= {"key": st.integers(0, 2), "n": st.none() | st.integers(-9, 9)}
    row = st.fixed_dictionaries(columns)
    return st.lists(st.tuples(st.integers(0, 3), row), max_size=rows_max)


def require_any_cut(harness: FoldHarness, rows: Sequence[tuple[int, Row]], folded: Folded = EVERYTHING) -> None:
    """Batch by batch into the sink is as all rows in one batch."""
    batches = [folded.batch(rows_of(row for b, row in rows if b == number)) for number in range(4)]
    whole = folded.batch(rows_of(row for _, row in rows), tasks=1)
    assert harness.commit_all(batches) == comparable(whole.to_pylist())


def anew(harness: FoldHarness, folder: Path) -> FoldHarness:
    """The same kind of sink, with an empty table."""
    life = f"inc-{next(_lives)}"
    if harness.store == "postgres":
        harness.sql("drop table if exists counts")
    return FoldHarness(harness.kind, folder / life, harness.database).take(EVERYTHING, life)


@given(rows_strategy(16))
@settings(max_examples=12, deadline=None, suppress_health_check=FUNCTION_SCOPED)
def test_any_cut_into_batches_gives_the_same(harness: FoldHarness, tmp_path: Path, rows: list[tuple[int, Row]]) -> None:
    require_any_cut(anew(harness, tmp_path), rows)


EVERY_PAIR = [
    (batch, {"key": key, "n": 1, **{name: values[(at + key) % len(values)] for name, (_, values) in VALUES.items()}})
    for key in range(10)
    for batch, at in ((0, 0), (1, key), (2, 3), (3, 2 * key + 1))
]


def test_values_whose_order_is_easily_got_wrong(harness: FoldHarness) -> None:
    require_any_cut(harness, EVERY_PAIR)


LIMITS = Folded(
    {"total": ("n", Fold.SUM), "lo": ("n", Fold.MIN), "hi": ("n", Fold.MAX), "first": ("text", Fold.MIN),
     "least": ("float64", Fold.MIN), "most": ("float64", Fold.MAX)}
)  # fmt: skip


def limits(harness: FoldHarness, *batches: list[Row]) -> dict[int, Row]:
    return harness.take(LIMITS).commit_all([LIMITS.batch(rows_of(rows)) for rows in batches])


def test_minima_and_maxima_stand_beside_sums(harness: FoldHarness) -> None:
    one = [{"key": 1, "n": 5, "text": "b", "float64": 0.5}, {"key": 1, "n": 3, "text": "c", "float64": 2.5}]
    two = [{"key": 1, "n": -4, "text": "a", "float64": 9.0}, {"key": 2, "n": 7, "text": "x", "float64": 1.0}]
    assert limits(harness, one, two, one) == {
        1: {"total": 12, "lo": -4, "hi": 5, "first": "a", "least": 0.5, "most": 9.0},
        2: {"total": 7, "lo": 7, "hi": 7, "first": "x", "least": 1.0, "most": 1.0},
    }


def test_a_null_never_wins_and_nulls_alone_are_null(harness: FoldHarness) -> None:
    nothing = {1: {"total": 0, "lo": None, "hi": None, "first": None, "least": None, "most": None}}
    something = {1: {"total": 2, "lo": 2, "hi": 2, "first": "t", "least": 0.5, "most": 0.5}}
    null, value = [{"key": 1}], [{"key": 1, "n": 2, "text": "t", "float64": 0.5}]
    assert limits(harness, null, null) == nothing
    with closing(harness.open()) as session:
        harness.commit(session, 3, LIMITS.batch(rows_of(value)))
        assert harness.content() == something
        harness.commit(session, 4, LIMITS.batch(rows_of(null)))
    assert harness.content() == something


@pytest.mark.parametrize("nan", [math.nan, NEGATIVE_NAN], ids=["nan", "-nan"])
def test_nan_counts_only_where_there_is_no_number(harness: FoldHarness, nan: float) -> None:
    bad, null = [{"key": 1, "float64": nan}], [{"key": 1}]
    held = limits(harness, null, bad, null)[1]
    assert (held["least"], held["most"]) == ("NaN", "NaN")
    with closing(harness.open()) as session:
        for txid, rows in enumerate(([{"key": 1, "float64": 1.5}], bad), start=4):
            harness.commit(session, txid, LIMITS.batch(rows_of(rows)))
            held = harness.content()[1]
            assert (held["least"], held["most"]) == (1.5, 1.5)


@pytest.mark.parametrize("store", ["postgres", "delta"])
def test_the_audit_opens_such_a_sink_by_what_the_ledger_keeps(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = request.getfixturevalue("database") if store == "postgres" else None
    harness = FoldHarness(f"{store}-fold", tmp_path, database)
    limits(harness, [{"key": 1, "n": 5}], [{"key": 1, "n": 3}])
    description = describe_sink(harness.sink, harness.input)
    assert description["folds"] == {name: fold.value for name, (_, fold) in LIMITS.columns.items()}
    binding = SinkBinding("counts", harness.sink.target, "", description, dt.datetime(2026, 1, 1, tzinfo=dt.UTC))
    with closing(
        open_for_inspection(harness.identity, binding, database or Database.from_url("postgresql:///x"))
    ) as reader:
        report = reader.evidence(0, None)
    assert [(entry.txid, entry.rows, entry.problem) for entry in report.entries] == [(1, 1, None), (2, 1, None)]
    assert report.problems == ()


# What a sink refuses, by name


@pytest.mark.parametrize("sink", [MemorySink("x"), PostgresSink("x"), DeltaSink("x")], ids=["memory", "pg", "delta"])
@pytest.mark.parametrize(
    ("kind", "by_all"),
    [
        (pa.list_(pa.int64()), True),
        (pa.struct([("x", pa.int64())]), True),
        (pa.time64("us"), True),
        (pa.duration("us"), True),
        (pa.float16(), True),
        (pa.timestamp("ns"), False),
        (pa.uint64(), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("fold", [Fold.MIN, Fold.MAX])
def test_a_type_that_a_sink_cannot_fold_is_refused(
    sink: MemorySink | PostgresSink | DeltaSink, kind: pa.DataType, by_all: bool, fold: Fold
) -> None:
    input_ = SinkInput.for_fold(pa.schema([("k", pa.string()), ("column", kind)]), ("k",), {"column": fold})
    if isinstance(sink, MemorySink) and not by_all:
        sink.check(input_, Guarantee.EXACTLY_ONCE)
        return
    with pytest.raises(TopologyError, match="'column' is"):
        sink.check(input_, Guarantee.EXACTLY_ONCE)


@pytest.mark.parametrize("sink", [MemorySink("x"), PostgresSink("x"), DeltaSink("x")], ids=["memory", "pg", "delta"])
def test_a_function_of_the_users_is_refused(sink: MemorySink | PostgresSink | DeltaSink) -> None:
    input_ = SinkInput.for_fold(pa.schema([("k", pa.string()), ("best", pa.string())]), ("k",), {"best": Fold.OWN})
    with pytest.raises(TopologyError, match=r"'best' is folded by a function of yours.*state=") as caught:
        sink.check(input_, Guarantee.EXACTLY_ONCE)
    assert caught.value.details["field"] == "best"


# A database with an order of its own


@pytest.fixture
def central(tmp_path: Path, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[FoldHarness]:
    """A database whose own order of text is not that of UTF-8.

    The embedded Postgres has no collations that say so, but other encodings. Those are refused, so the refusal is lifted.
    """
    monkeypatch.setattr("stormproof.core.postgres.database.require_encoding", lambda *_: None)
    name = "test_central"
    with connect(postgres.database, application_name="test", autocommit=True) as connection:
        connection.execute(f"create database {name} template template0 encoding latin2 locale 'C'".encode())
    yield FoldHarness("postgres-fold", tmp_path, postgres.database.with_name(name)).take(WORDS)
    with connect(postgres.database, application_name="test", autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)".encode())


WORDS = Folded({"first": ("text", Fold.MIN), "last": ("text", Fold.MAX)})
A_ACUTE, A_OGONEK = "\u00c1", "\u0104"  # 0xC1 and 0xA1 in Latin-2
CENTRAL_ROWS = [(0, {"key": 1, "text": A_ACUTE}), (1, {"key": 1, "text": A_OGONEK})]


def test_text_goes_by_its_bytes_in_utf8_whatever_the_database_thinks(central: FoldHarness) -> None:
    require_any_cut(central, CENTRAL_ROWS, WORDS)
    assert central.content() == {1: {"first": A_ACUTE, "last": A_OGONEK}}


# Controls: folds that are broken on purpose


@pytest.mark.parametrize(
    "broken", [{"lo": Fold.SUM}, {"lo": Fold.MAX}, {"hi": Fold.SUM}, {"hi": Fold.MIN}, {"total": Fold.MAX}], ids=str
)
def test_control_a_column_that_is_folded_otherwise_is_seen(harness: FoldHarness, broken: dict[str, Fold]) -> None:
    harness.take(LIMITS).with_fold(**broken)
    with pytest.raises(AssertionError):
        require_any_cut(harness, [(0, {"key": 1, "n": 2}), (1, {"key": 1, "n": 3}), (2, {"key": 1, "n": 1})], LIMITS)


def plainly_folded(name: str, schema: pa.Schema, fold: Fold, dialect: Dialect, *, tried: bool = False) -> str:
    functions = {Fold.MIN: "least", Fold.MAX: "greatest"}
    return f"{functions[fold]}({', '.join(dialect.both(name))})"


@pytest.mark.parametrize("store", ["postgres", "delta"])
def test_control_a_database_s_own_order_of_nan_is_seen(
    store: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormproof.sinks.rows.merge_sql.folded", plainly_folded)
    floats = Folded({"most": ("float64", Fold.MAX)})
    database = request.getfixturevalue("database") if store == "postgres" else None
    harness = FoldHarness(f"{store}-fold", tmp_path, database).take(floats)
    with pytest.raises(AssertionError, match="NaN"):
        require_any_cut(harness, [(0, {"key": 1, "float64": 1.0}), (1, {"key": 1, "float64": math.nan})], floats)


def test_control_a_database_s_own_order_of_text_is_seen(central: FoldHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormproof.sinks.rows.merge_sql.folded", plainly_folded)
    with pytest.raises(AssertionError):
        require_any_cut(central, CENTRAL_ROWS, WORDS)
