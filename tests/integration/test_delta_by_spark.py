"""Delta tables as Spark makes them, one for each row of the matrix of features: who writes, and what Spark then reads.

One session makes all tables; each test works on a copy of its table's folder. A commit takes seconds: a run draws a sample.
"""

from __future__ import annotations

import datetime as dt
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures
from support import duck
from support.delta_tables import BY_SPARK, Made
from support.doubled_keys import LARGE, compared, input_of, of_keys, opened, repaired
from support.row_oracle import checkpoint_by_spark
from support.sink_harness import SinkHarness
from support.typed_rows import put

from stormproof.core.base.errors import SinkRefused, StormproofError
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.core.engine.spark_lines import spark_line
from stormproof.sinks.contract.protocol import ALREADY_HELD, APPLIED, Held, SinkIdentity
from stormproof.sinks.delta.features import FEATURES, Committer
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.sink import DeltaSink

if TYPE_CHECKING:
    pass
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

BY_NAME = {feature.name: feature for feature in FEATURES}
WORDS = ("word", "n")


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], None]:
    """Puts the table of a row at a path. Each is made once, when a test first asks for it: a run draws a sample."""
    folder = tmp_path_factory.mktemp("tables")

    def put(name: str, path: Path) -> None:
        made = folder / str(list(BY_SPARK).index(name))
        if not made.exists():
            try:
                BY_SPARK[name].make(spark, made)
            except (PySparkException, Py4JError) as error:
                if spark_line().name != "3.5":
                    raise
                pytest.skip(f"Spark 3.5, or its Delta, cannot make it: {error}")
        shutil.copytree(made, path)

    return put


def read(session: SparkSession, path: Path, *columns: str) -> Counter[tuple[Any, ...]]:
    frame = session.newSession().read.format("delta").load(str(path)).selectExpr(*columns)
    return Counter(tuple(row) for row in frame.collect() if row[0] != "old")


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("name", BY_SPARK)
def test_a_table_is_written_by_whom_the_matrix_says(
    spark: SparkSession, tables: Callable[[str, Path], None], name: str, tmp_path: Path
) -> None:
    expected: Counter[tuple[Any, ...]] = Counter()
    path = tmp_path / "lake" / "counts"
    tables(name, path)
    for mode, rows in ((SinkMode.APPEND, {"a": 1, "b": 2}), (SinkMode.FOLD, {"a": 10, "c": 3})):
        harness = SinkHarness(f"delta-{mode}", tmp_path, None)
        harness.identity = SinkIdentity("topology", "inc-1", str(mode))
        way = BY_NAME[name].way(mode)
        if not isinstance(way, Committer):
            with pytest.raises(SinkRefused, match=re.escape(name)):
                harness.open()
            continue
        protocol = DeltaTable(path).protocol()
        session = harness.open()
        assert isinstance(session, DeltaSession)
        assert session.committer() is way
        assert session.claim(["inc-1"]) == ()
        assert DeltaTable(path).protocol() == protocol
        transaction = harness.prepare(session, 1, None, rows)
        assert session.commit(transaction, checked=True) == APPLIED
        assert session.commit(transaction, checked=True) == ALREADY_HELD
        session.finished(transaction)
        expected += Counter(rows.items())
        if mode is SinkMode.FOLD and ("a", 1) in expected:
            expected = Counter({("a", 11): 1, ("b", 2): 1, ("c", 3): 1})
        report = harness.sink.inspect(harness.identity, harness.input).evidence(1, None)
        assert report.problems == ()
        assert [(e.txid, e.digest, e.rows, e.problem, e.gone) for e in report.entries] == [
            (1, transaction.digest, 2, None, False)
        ]
        assert session.held() == Held(1, transaction.digest)
    if expected:
        assert read(spark, path, *WORDS) == expected


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize(
    ("name", "column", "values"),
    [
        ("generated columns", "twice", {2, 4}),
        ("column defaults", "level", {"low"}),
        ("identity columns", "id IS NULL", {False}),
    ],
)
def test_spark_fills_what_the_rows_do_not_have(
    spark: SparkSession,
    tables: Callable[[str, Path], None],
    name: str,
    column: str,
    values: set[Any],
    tmp_path: Path,
) -> None:
    harness = SinkHarness("delta-fold", tmp_path, None)
    tables(name, harness.delta_path)
    session = harness.open()
    session.commit(harness.prepare(session, 1, None, {"a": 1, "b": 2}), checked=True)
    assert {row[0] for row in read(spark, harness.delta_path, column)} == values


def test_readers_find_the_first_and_the_last_timestamp_that_spark_writes(spark: SparkSession, tmp_path: Path) -> None:
    """As microseconds: Arrow takes Spark's older form, of 96 bits, for nanoseconds, which reach from 1677 to 2262."""
    edges = [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC)]
    kind = pa.timestamp("us", "UTC")
    rows = pa.table({"moment": pa.array(edges, kind), "all": pa.array([edges, edges[:1]], pa.list_(kind))})
    put(DeltaSink(tmp_path / "t", name="t", committer="spark"), rows)
    assert DeltaTable(tmp_path / "t").to_pyarrow_table().cast(rows.schema).sort_by("moment").equals(rows)
    found = duck.connected().execute(f"select * from delta_scan('{tmp_path / 't'}') order by moment").arrow()
    assert pa.table(found).cast(rows.schema).equals(rows)


def test_sums_are_exact_whatever_session_of_the_user_is_active(spark: SparkSession, tmp_path: Path) -> None:
    """One whose sums wrap, and lose digits: with the settings of Spark 3, and with its default of decimals."""
    users = spark.newSession()
    users.conf.set("spark.sql.ansi.enabled", "false")
    value, schema = Decimal("12345678901234567.0123456789"), pa.schema({"w": "string", "n": "int64"})
    schema = schema.append(pa.field("total", pa.decimal128(38, 10)))
    input_ = SinkInput(schema, ("w",), {"n": Fold.SUM, "total": Fold.SUM}, SinkMode.FOLD)
    sink = DeltaSink(tmp_path / "t", name="t", committer="spark")

    def fold(n: int, txid: int) -> None:
        users.createDataFrame([(1,)], "a int")  # makes their session the active one
        put(sink, pa.table({"w": ["a"], "n": [n], "total": [value]}, schema=schema), input_, txid=txid)

    try:
        fold(2**62, 1)
        fold(1, 2)
        with pytest.raises(StormproofError):
            fold(2**62, 3)
        active = type(spark).getActiveSession()
        assert active is not None
        assert active.conf.get("spark.sql.ansi.enabled") == "false"  # theirs again
    finally:
        spark.createDataFrame([(1,)], "a int")
    found = DeltaTable(tmp_path / "t").to_pyarrow_table().select(schema.names).to_pylist()
    assert found == [{"w": "a", "n": 2**62 + 1, "total": 2 * value}]


STRUCT = pa.struct([("a", pa.int64()), ("in", pa.struct([("c", pa.string())]))])
STRUCTS: dict[str, tuple[str, pa.DataType, Callable[[Any], Any]]] = {
    "a struct": ("{}", STRUCT, lambda value: value),
    "a list of structs": ("ARRAY<{}>", pa.list_(STRUCT), lambda value: [value, None]),
    "a map of structs": ("MAP<STRING, {}>", pa.map_(pa.string(), STRUCT), lambda value: [("k", value)]),
}


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("mapping", ["none", "name", "id"])
@pytest.mark.parametrize("column", STRUCTS)
def test_what_a_table_notes_of_fields_inside_of_a_column_is_no_part_of_its_type(
    spark: SparkSession, tmp_path: Path, column: str, mapping: str
) -> None:
    sql, kind, of = STRUCTS[column]
    path, struct = tmp_path / "t", "STRUCT<a: BIGINT COMMENT 'theirs', `in`: STRUCT<c: STRING COMMENT 'theirs, too'>>"
    spark.sql(
        f"CREATE TABLE delta.`{path}` (k BIGINT, v {sql.format(struct)}) USING delta "
        f"TBLPROPERTIES ('delta.columnMapping.mode' = '{mapping}')"
    )
    values = [of({"a": n, "in": {"c": f"c{n}"}}) for n in range(3)]
    schema = pa.schema([("k", pa.int64()), ("v", kind)])
    sink, input_ = DeltaSink(path, name="t"), SinkInput.for_upsert(schema, ("k",))
    put(sink, pa.table({"k": [1, 2], "v": values[:2]}, schema), input_)
    put(sink, pa.table({"k": [2], "v": values[2:]}, schema), input_, txid=2)
    expected = pa.table({"k": [1, 2], "v": [values[0], values[2]]}, schema).to_pylist()
    by_duck = pa.table(duck.connected().execute(f"select * from delta_scan('{path}') order by k").arrow())
    assert by_duck.cast(schema).to_pylist() == expected
    by_spark = spark.newSession().read.format("delta").load(str(path)).orderBy("k").collect()
    assert pa.Table.from_pylist([row.asDict(recursive=True) for row in by_spark], schema).to_pylist() == expected


@pytest.mark.parametrize(("text", "refused"), [("VARCHAR(3)", "nested varchar"), ("CHAR(3)", "char")])
@pytest.mark.parametrize("mapping", ["none", "name"])
def test_a_bounded_text_inside_of_a_struct_is_refused_by_its_name(
    spark: SparkSession, tmp_path: Path, text: str, refused: str, mapping: str
) -> None:
    path, schema = tmp_path / "t", pa.schema([("k", pa.int64()), ("v", pa.struct([("c", pa.string())]))])
    spark.sql(
        f"CREATE TABLE delta.`{path}` (k BIGINT, v STRUCT<c: {text}>) USING delta "
        f"TBLPROPERTIES ('delta.columnMapping.mode' = '{mapping}')"
    )
    with pytest.raises(SinkRefused, match=rf"the table has .*{refused}.*ALTER COLUMN"):
        put(DeltaSink(path, name="t"), pa.table({"k": [1], "v": [{"c": "long text"}]}, schema))


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("how", ["append", "upsert", "fold"])
def test_a_v2_checkpoint_with_no_entry_before_it_is_read_by_all_that_reads_a_table(
    spark: SparkSession, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "t"
    made = Made("k DECIMAL(20, 0), n BIGINT, low BIGINT, high BIGINT", properties="'delta.checkpointPolicy' = 'v2'")
    replace(made, then=BY_SPARK["CHECK constraints"].then).make(spark, path)
    for txid in (1, 2):
        put(DeltaSink(path, name="t"), of_keys(txid), input_of(how), txid=txid)
    log = DeltaLog(str(path))
    checkpoint_by_spark(spark, path)
    assert log.checkpoints() == frozenset()
    assert log.checkpoints(of_all=True) == {DeltaTable(path).version()}
    for version in log.versions()[:-1]:
        Path(log.entry_path(version)).unlink()
    put(DeltaSink(path, name="t"), of_keys(3), input_of(how), txid=3)
    with pytest.raises(SinkRefused, match="CHECK constraint 'few'"):
        put(DeltaSink(path, name="t"), of_keys(1000), input_of(how), txid=4)
    with closing(opened(path, how)) as session:
        session.compact()
        session.vacuum(0)
    assert len(DeltaTable(path).file_uris()) == 1
    assert compared(path, how).wrong == ()
    done = repaired(path, how)
    assert (done.files, done.doubled_keys, done.left) == ([], 0, [])
    numbers = {"append": (1, 2, 3), "upsert": (3,), "fold": (6,)}[how]
    expected = Counter((key, n) for key in LARGE for n in numbers)
    assert read(spark, path, "k", "n") == expected
    assert Counter(duck.connected().execute(f"select k, n from delta_scan('{path}')").fetchall()) == expected


def test_a_table_that_spark_cannot_read_blocks_its_batch_by_name(spark: SparkSession, tmp_path: Path) -> None:
    """delta-rs adds the feature without the one that it needs."""
    harness = SinkHarness("delta-append", tmp_path, None)
    with closing(harness.open()) as session:
        session.commit(harness.prepare(session, 1, None, {"a": 1}), checked=True)
    DeltaTable(harness.delta_path).alter.add_feature(TableFeatures.RowTracking, allow_protocol_versions_increase=True)
    with closing(harness.open()) as session:
        second = harness.prepare(session, 2, 1, {"b": 1})
        with pytest.raises(SinkRefused, match="DELTA_FEATURES_PROTOCOL_METADATA_MISMATCH"):
            session.commit(second, checked=True)
