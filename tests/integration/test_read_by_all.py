"""What Spark commits for us is found by all three readers: with filters, and whatever a partition column is called."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable, Field, QueryBuilder, Schema, write_deltalake
from deltalake.schema import PrimitiveType
from support import duck
from support.row_oracle import checkpoint_by_spark
from support.typed_rows import IDENTITY, put

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.delta.statistics import WITH_STATISTICS
from stormproof.sinks.delta.transactional_table import TransactionalTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SMALL: Final = pa.decimal128(10, 8)
ROWS: Final = pa.table(
    {
        "k": pa.array([1, 2, 3], pa.int64()),
        "is": pa.array([True, False, None]),
        "d": pa.array([Decimal("1E-8"), Decimal(0), Decimal("-1E-8")], SMALL),
        "b": pa.array([b"a", b"\x00", None], pa.binary()),
        "n": pa.array([1, 1, 1], pa.int64()),
    }
)
INPUTS: Final = {"append": SinkInput(ROWS.schema), "upsert": SinkInput.for_upsert(ROWS.schema, ("k",), ("n",))}


def opened(sink: DeltaSink, input_: SinkInput, epoch: int = 9) -> DeltaSession:
    session = sink.open(SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, sink.name), input_, epoch)
    assert isinstance(session, DeltaSession)
    return session


def lost(spark: SparkSession, path: Path) -> list[str]:
    """Who finds another number of rows than one by which filter."""
    from pyspark.sql.functions import col, lit

    lake, dataset, wrong = duck.connected(), DeltaTable(path).to_pyarrow_dataset(), list[str]()
    query = QueryBuilder().register("t", DeltaTable(path))
    frame = spark.newSession().read.format("delta").load(str(path))
    for name in ("is", "d", "b"):
        for value in ROWS.column(name).drop_null().to_pylist():
            kind = {"is": "boolean", "d": "decimal(10, 8)", "b": "binary"}[name]
            told = (
                f"'{value.hex()}'"
                if name == "b"
                else f"cast('{value:f}' as {kind})"
                if name == "d"
                else f"cast('{value}' as {kind})"
            )
            in_lake = f"unhex({told})" if name == "b" else told
            in_query = f"decode({told}, 'hex')" if name == "b" else told
            counted = {
                "delta-rs": dataset.count_rows(filter=ds.field(name) == pa.scalar(value, ROWS.schema.field(name).type)),
                "DataFusion": pa.table(query.execute(f'select k from t where "{name}" = {in_query}')).num_rows,
                "DuckDB": lake.execute(
                    f"select count(*) from delta_scan('{path}') where \"{name}\" = {in_lake}"
                ).fetchone()[0],
                "Spark": frame.where(
                    col(name)
                    == (
                        lit(bytearray(value))
                        if name == "b"
                        else lit(f"{value:f}" if name == "d" else str(value)).cast(kind)
                    )
                ).count(),
            }
            wrong += [f"{reader}: {count} by {name} = {value!r}" for reader, count in counted.items() if count != 1]
    return wrong


@pytest.mark.parametrize("how", ["append", "upsert", "compact", "delta-rs"])
def test_each_reader_finds_a_row_by_a_boolean_a_small_decimal_or_bytes(
    spark: SparkSession, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "t"
    if how == "compact":  # of which Spark is asked alone, since a merge of such a table is Spark's
        properties = {"delta.enableChangeDataFeed": "true"}
        sink, input_ = DeltaSink(path, name="t", properties=properties), INPUTS["append"]
    elif how == "delta-rs":
        sink, input_ = DeltaSink(path, name="t"), INPUTS["upsert"]
    else:
        sink, input_ = DeltaSink(path, name="t", committer="spark"), INPUTS[how]
    for at in range(3):
        put(sink, ROWS.slice(at, 1), input_, txid=at + 1)
    if how == "compact":
        with closing(opened(sink, input_)) as session:
            assert session.compact().added == 1
    assert DeltaTable(path).metadata().configuration[WITH_STATISTICS] == "`k`,`n`"
    assert lost(spark, path) == []


@pytest.mark.sampled(0.5)
def test_control_the_bounds_that_spark_takes_lose_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransactionalTable, "narrowed", lambda _, table, *more: table)
    sink = DeltaSink(tmp_path / "t", name="t", committer="spark")
    for at in range(3):
        put(sink, ROWS.slice(at, 1), INPUTS["append"], txid=at + 1)
    assert {wrong.partition(":")[0] for wrong in lost(spark, tmp_path / "t")} == {"delta-rs"}


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.timestamp("us")])
def test_each_reader_finds_a_timestamp_where_spark_cuts_its_bounds_to_milliseconds(
    spark: SparkSession, tmp_path: Path, kind: pa.DataType
) -> None:
    path = tmp_path / "t"
    texts = ["2024-01-01 00:00:00.123456", "1969-12-31 23:59:59.999999", "1500-01-01 00:00:00.000001"]
    moments = pa.array(texts).cast(pa.timestamp("us")).cast(kind)
    for txid in range(1, 4):
        rows = pa.table({"m": moments.slice(txid - 1, 1)})
        put(DeltaSink(path, name="t", committer="spark"), rows, txid=txid)
    entries = "".join(entry.read_text() for entry in (path / "_delta_log").glob("*.json"))
    assert ("00:00:00.123" in entries, "00:00:00.123456" in entries) == (True, False)
    lake, dataset, session = duck.connected(), DeltaTable(path).to_pyarrow_dataset(), spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    of_spark, of_duck = ("timestamp_ntz", "timestamp") if kind.tz is None else ("timestamp", "timestamptz")
    for text, moment in zip(texts, moments, strict=True):
        asked = f"select count(*) from {{}} where m = cast('{text}' as {{}})"
        assert dataset.count_rows(filter=ds.field("m") == moment) == 1
        assert lake.execute(asked.format(f"delta_scan('{path}')", of_duck)).fetchone() == (1,)
        assert session.sql(asked.format(f"delta.`{path}`", of_spark)).collect() == [(1,)]


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("how", ["append", "upsert", "compact"])
@pytest.mark.parametrize(("kind", "ddl"), [(pa.float64(), "double"), (pa.float32(), "float")])
def test_each_reader_finds_a_number_where_spark_has_nan_for_a_bound(
    spark: SparkSession, tmp_path: Path, kind: pa.DataType, ddl: str, how: str
) -> None:
    path = tmp_path / "t"
    values = [-math.inf, 0.5, math.nan, math.inf]
    inner = pa.array([{"y": value} for value in values], pa.struct([("y", kind)]))
    rows = pa.table({"k": range(4), "x": pa.array(values, kind), "s": inner, "n": [1] * 4})
    input_ = SinkInput.for_upsert(rows.schema, ("k",), ("n",)) if how == "upsert" else SinkInput(rows.schema)
    sink = DeltaSink(path, name="t", committer="spark")
    for txid in (1, 2):
        put(sink, rows.slice(2 * txid - 2, 2), input_, txid=txid)
    if how == "compact":
        with closing(opened(sink, input_)) as one:
            assert one.compact().added == 1
    lake, dataset, session = duck.connected(), DeltaTable(path).to_pyarrow_dataset(), spark.newSession()
    for value in (-math.inf, 0.5, math.inf):
        asked = f"select count(*) from {{}} where x = cast('{value}' as {ddl}) and s.y = cast('{value}' as {ddl})"
        number = pa.scalar(value, kind)
        assert dataset.count_rows(filter=(ds.field("x") == number) & (ds.field("s", "y") == number)) == 1
        assert lake.execute(asked.format(f"delta_scan('{path}')")).fetchone() == (1,)
        assert session.sql(asked.format(f"delta.`{path}`")).collect() == [(1,)]


@pytest.mark.sampled(0.5)
def test_control_a_second_checkpoint_of_a_version_loses_partitions(spark: SparkSession, tmp_path: Path) -> None:
    """Spark leaves the one of delta-rs there, and describes one of its own in `_last_checkpoint`, by which DuckDB goes."""
    path = tmp_path / "t"
    for n in (1, 2):
        write_deltalake(path, pa.table({"p": [n], "n": [n]}), mode="append", partition_by=["p"])
    DeltaTable(path).create_checkpoint()
    checkpoint_by_spark(spark, path)
    asked = f"select count(*) from delta_scan('{path}') where p >= 1"
    assert duck.connected().execute(asked).fetchone() == (0,)
    (path / "_delta_log" / "_last_checkpoint").unlink()
    assert duck.connected().execute(asked).fetchone() == (2,)


def test_a_table_of_booleans_alone_takes_its_rows(spark: SparkSession, tmp_path: Path) -> None:
    rows = pa.table({"is": pa.array([True, False])})
    put(DeltaSink(tmp_path / "t", name="t", committer="spark"), rows)
    found = DeltaTable(tmp_path / "t").to_pyarrow_dataset()
    assert found.count_rows(filter=ds.field("is")) == 1
    assert spark.newSession().read.format("delta").load(f"{tmp_path}/t").where("`is`").count() == 1


@pytest.mark.parametrize(
    ("how", "name"),
    [("append", "a.b"), ("append", "a`b"), ("append", "a.b`c"), ("append", "\U00020000"), ("upsert", "a.b")],
)
def test_spark_commits_to_a_table_that_is_partitioned_by_a_column_of_any_name(
    spark: SparkSession, tmp_path: Path, how: str, name: str
) -> None:
    sink = DeltaSink(tmp_path / "t", name="t", partition_by=[name], committer="spark")

    def rows(number: int, values: list[str]) -> pa.Table:
        return pa.table({"k": pa.array([1, 2], pa.int64()), name: values, "n": pa.array([number] * 2, pa.int64())})

    schema = rows(1, ["x", "y"]).schema
    input_ = SinkInput(schema) if how == "append" else SinkInput.for_upsert(schema, ("k",), ("n",))
    put(sink, rows(1, ["x", "y"]), input_)
    put(sink, rows(2, ["x", "\U00020000"]), input_, txid=2)
    with closing(opened(sink, input_)) as session:
        session.compact()
        session.vacuum(0)
    wanted = Counter([(1, "x", 2), (2, "\U00020000", 2)] + ([(1, "x", 1), (2, "y", 1)] if how == "append" else []))
    by_spark = spark.newSession().read.format("delta").load(f"{tmp_path}/t").collect()
    by_duck = duck.connected().execute(f"select * from delta_scan('{tmp_path}/t')").fetchall()
    by_rs: list[dict[str, Any]] = DeltaTable(tmp_path / "t").to_pyarrow_table().to_pylist()
    assert [Counter(map(tuple, by_spark)), Counter(by_duck), Counter(tuple(r.values()) for r in by_rs)] == [wanted] * 3


def test_a_foreign_table_whose_protocol_lacks_the_feature_of_not_null_is_mended_where_spark_commits(
    spark: SparkSession, tmp_path: Path
) -> None:
    path, sink = tmp_path / "t", DeltaSink(tmp_path / "t", name="t", committer="spark")
    fields = [Field("k", PrimitiveType("long"), nullable=False), Field("at", PrimitiveType("timestamp_ntz"))]
    made = DeltaTable.create(path, Schema(fields))
    assert "invariants" not in (made.protocol().writer_features or ())
    schema = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("at", pa.timestamp("us"))])
    put(sink, pa.table({"k": [1], "at": [None]}, schema))
    assert spark.newSession().read.format("delta").load(str(path)).count() == 1
    assert "invariants" in (DeltaTable(path).protocol().writer_features or ())
    version = DeltaTable(path).version()
    opened(sink, SinkInput(schema)).close()
    assert DeltaTable(path).version() == version


def test_wrong_statistics_are_mended_where_columns_are_mapped(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "t"
    spark.sql(
        f"CREATE TABLE delta.`{path}` (`k k` BIGINT, n BIGINT) USING delta "
        "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    )
    spark.sql(f"INSERT INTO delta.`{path}` VALUES (1, 5)")
    require_bounds_mended(spark, path)


def test_wrong_statistics_are_mended_beside_deletion_vectors(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "t"
    spark.sql(
        f"CREATE TABLE delta.`{path}` (`k` BIGINT, n BIGINT) USING delta "
        "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    )
    spark.sql(f"INSERT INTO delta.`{path}` SELECT /*+ COALESCE(1) */ id, 7 FROM range(10)")
    spark.sql(f"DELETE FROM delta.`{path}` WHERE k = 3")
    spark.sql(f"INSERT INTO delta.`{path}` VALUES (11, 5)")
    require_bounds_mended(spark, path)


def test_statistics_that_are_mended_beside_a_deletion_vector_do_not_speak_for_deleted_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "t"
    spark.sql(
        f"CREATE TABLE delta.`{path}` (`k` BIGINT, n BIGINT) USING delta "
        "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    )
    spark.sql(f"INSERT INTO delta.`{path}` SELECT /*+ COALESCE(1) */ id, 5 FROM range(10)")
    spark.sql(f"DELETE FROM delta.`{path}` WHERE k = 9")
    require_bounds_mended(spark, path, rows=9)
    entry = path / "_delta_log" / f"{DeltaTable(path).version():020}.json"
    (add,) = [action["add"] for action in map(json.loads, entry.read_text().splitlines()) if "add" in action]
    assert json.loads(add["stats"])["tightBounds"] is False
    largest = spark.newSession().read.format("delta").load(str(path)).agg({"k": "max"})
    assert [row[0] for row in largest.collect()] == [8]


def require_bounds_mended(spark: SparkSession, path: Path, rows: int = 1) -> None:
    """Of the newest version's file, the only one with n = 5, in so many rows."""
    newest = path / "_delta_log" / f"{DeltaTable(path).version():020}.json"
    actions = [json.loads(line) for line in newest.read_bytes().splitlines()]
    (add,) = [action["add"] for action in actions if "add" in action]
    stats = json.loads(add["stats"])
    (name,) = [name for name, bound in stats["maxValues"].items() if bound == 5]
    stats["minValues"][name] = stats["maxValues"][name] = 4
    add["stats"] = json.dumps(stats)
    newest.write_text("\n".join(map(json.dumps, actions)))
    (path / "_delta_log" / f".{newest.name}.crc").unlink(missing_ok=True)

    def found() -> int:
        return spark.newSession().read.format("delta").load(str(path)).where("n = 5").count()

    assert found() == 0
    key = DeltaTable(path).schema().fields[0].name
    schema = pa.schema([(key, pa.int64()), ("n", pa.int64())])
    with closing(opened(DeltaSink(path, name="t"), SinkInput.for_upsert(schema, (key,), ("n",)))) as session:
        done = session.repair()
        assert len(done.files) == 1
        assert done.left == []
        assert found() == rows
        assert session.repair().files == []


def test_an_entry_of_statistics_has_its_time_where_the_table_asks_for_it(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "t"
    spark.sql(
        f"CREATE TABLE delta.`{path}` (k BIGINT, n BIGINT) USING delta "
        "TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true')"
    )
    spark.sql(f"INSERT INTO delta.`{path}` VALUES (1, 5)")
    require_bounds_mended(spark, path)
    spark.sql(f"INSERT INTO delta.`{path}` VALUES (2, 6)")
    history = spark.sql(f"DESCRIBE HISTORY delta.`{path}`").collect()
    assert [row.version for row in sorted(history, key=lambda row: row.timestamp)] == [0, 1, 2, 3]


def test_a_table_with_features_that_are_not_known_is_refused_by_their_names_and_left(tmp_path: Path) -> None:
    path = tmp_path / "t"
    wrong = pa.table({"k": [1], "n": [5]})
    put(DeltaSink(path, name="t"), wrong)
    session = opened(DeltaSink(path, name="t"), SinkInput(wrong.schema))
    entry = path / "_delta_log" / f"{DeltaTable(path).version():020}.json"
    actions = [json.loads(line) for line in entry.read_bytes().splitlines()]
    for add in (action["add"] for action in actions if "add" in action):
        add["stats"] = add["stats"].replace("5", "4")
    features = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["featureOfTheFuture"]}
    entry.write_text("\n".join(map(json.dumps, [*actions, {"protocol": features}])))
    with closing(session), pytest.raises(SinkRefused, match=r"feature \(featureOfTheFuture\).*nothing was written"):
        session.repair()
    assert len([*(path / "_delta_log").glob("*.json")]) == DeltaTable(path).version() + 1
