"""A MERGE finds the row of each key, whatever the key's type, whoever wrote the file and its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from support.queues import prepared_database
from support.typed_rows import EDGES, decimals, put

from stormproof import MemorySource, Topology
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.sinks.delta.features import AskedCommitter
from stormproof.sinks.delta.log import DeltaLog, live_adds
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.delta.statistics import WITH_STATISTICS, wrong_statistics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS: Final[Mapping[str, pa.Array]] = {
    **{
        name: column
        for name, column in EDGES.items()
        if not (pa.types.is_nested(column.type) or pa.types.is_floating(column.type))
    },
    **{f"decimal({p},{s})": decimals(p, s) for p, s in ((15, 3), (16, 3), (18, 2), (19, 4), (20, 0), (28, 10))},
    "timestamps of one millisecond": pa.array([1, 2, 999, 1_001, None], pa.timestamp("us", "UTC")),
    "long text": pa.array(["a" * 63 + "\U0010ffff", "a" * 70, "\U0010ffff" * 33, "é" * 40, None]),
}
LARGE: Final = [Decimal("12345678901234567891"), Decimal("98765432109876543219")]


def of_keys(keys: pa.Array, n: int) -> pa.Table:
    return pa.table({"k": keys, "n": pa.array([n] * len(keys), pa.int64()), "x": pa.array([0.5] * len(keys))})


def inputs(schema: pa.Schema) -> Mapping[str, SinkInput]:
    return {
        "upsert": SinkInput.for_upsert(schema, ("k",), ("n",)),
        "fold": SinkInput.for_fold(schema, ("k",), {"n": Fold.SUM, "x": Fold.SUM}),
    }


@pytest.mark.parametrize("how", ["upsert", "fold"])
@pytest.mark.parametrize("kind", KEYS)
def test_each_key_of_any_type_has_one_row(tmp_path: Path, kind: str, how: str) -> None:
    keys, sink = KEYS[kind].unique().drop_null(), DeltaSink(tmp_path / "t", name="t")
    txid = 0
    for n in (1, 2):
        for at in range(len(keys)):
            txid += 1
            rows = of_keys(keys.slice(at, 1), n)
            put(sink, rows, inputs(rows.schema)[how], txid=txid)
    found = DeltaTable(tmp_path / "t").to_pyarrow_table()
    assert sorted(found["k"].to_pylist()) == sorted(keys.to_pylist())
    assert found["n"].to_pylist() == [2 if how == "upsert" else 3] * len(keys)


@pytest.mark.postgres
def test_versions_of_an_invoice_with_a_long_number_leave_the_newest(tmp_path: Path, database: Database) -> None:
    prepared_database(database)
    settings = Settings(database_url=database.adbc_uri, home=tmp_path)
    for n in range(3):
        source = MemorySource(
            "invoices", [b'{"invoice": "%d", "version": %d}' % (LARGE[0], n)], schema="invoice string, version long"
        )
        topology = Topology("invoices")
        topology.stream("s", source).map(
            lambda number, version: (Decimal(number), version),
            "invoice",
            "version",
            schema="invoice decimal(20,0), version long",
        ).into(DeltaSink(tmp_path / "t", mode="upsert", key="invoice", order_by="version"))
        topology.run(engine="inline", until_idle=True, settings=settings)
    rows = DeltaTable(tmp_path / "t").to_pyarrow_table().to_pylist()
    assert rows == [{"invoice": LARGE[0], "version": 2}]


def foreign_table(path: Path, properties: Mapping[str, str]) -> pa.Table:
    """A file for each key, with the bounds that delta-rs takes when it merges."""
    rows = of_keys(pa.array(LARGE, pa.decimal128(20, 0)), 1)
    DeltaTable.create(path, rows.schema, configuration=dict(properties))
    for at in range(len(LARGE)):
        merge = DeltaTable(path).merge(rows.slice(at, 1), "t.k = s.k", source_alias="s", target_alias="t")
        merge.when_not_matched_insert_all().execute()
    return rows


OF_OTHERS: Final = {
    "by default": {},
    "with statistics of all columns by name": {WITH_STATISTICS: "n,`k`, x"},
    "with statistics of the first column": {"delta.dataSkippingNumIndexedCols": "1"},
}


@pytest.mark.parametrize("behind_checkpoint", [False, True])
@pytest.mark.parametrize("properties", OF_OTHERS.values(), ids=OF_OTHERS.keys())
def test_a_key_is_found_in_a_file_whose_bounds_exclude_it(
    tmp_path: Path, properties: dict[str, str], behind_checkpoint: bool
) -> None:
    rows = foreign_table(tmp_path / "t", properties)
    if behind_checkpoint:
        DeltaTable(tmp_path / "t").create_checkpoint()
    sink, input_ = DeltaSink(tmp_path / "t", name="t"), inputs(rows.schema)["fold"]
    put(sink, rows, input_)
    # The owner wants them back: the next commit is right all the same.
    DeltaTable(tmp_path / "t").alter.set_table_properties({WITH_STATISTICS: "k,n,x"})
    put(sink, rows, input_, txid=2)
    found = DeltaTable(tmp_path / "t")
    assert found.to_pyarrow_table().sort_by("k")["n"].to_pylist() == [3, 3]
    assert found.metadata().configuration[WITH_STATISTICS] == "`n`"


@pytest.mark.parametrize("first", [None, "3"])
def test_no_bounds_exclude_a_key_behind_a_struct_of_many_fields(tmp_path: Path, first: str | None) -> None:
    """delta-rs takes statistics of as many columns, Spark of as many fields."""
    struct = pa.array([{f"f{at}": at for at in range(33)}], pa.struct([(f"f{at}", pa.int64()) for at in range(33)]))
    sink = DeltaSink(tmp_path / "t", name="t")
    for txid, key in enumerate(LARGE * 2, start=1):
        rows = pa.table({"s": struct, "k": pa.array([key], pa.decimal128(20, 0)), "n": pa.array([txid], pa.int64())})
        if txid == 1 and first is not None:
            properties = {"delta.dataSkippingNumIndexedCols": first}
            DeltaTable.create(tmp_path / "t", rows.schema, configuration=properties)
        put(sink, rows, SinkInput.for_upsert(rows.schema, ("k",), ("n",)), txid=txid)
    log = DeltaLog(str(tmp_path / "t"))
    assert wrong_statistics(log, live_adds(log, DeltaTable(tmp_path / "t").version())) == ({}, [])


def test_properties_of_a_table_without_such_columns_stay(tmp_path: Path) -> None:
    rows = pa.table({"k": pa.array([1], pa.int64()), "n": pa.array([1], pa.int64())})
    put(DeltaSink(tmp_path / "t", name="t"), rows, SinkInput.for_upsert(rows.schema, ("k",)))
    assert WITH_STATISTICS not in DeltaTable(tmp_path / "t").metadata().configuration


@pytest.mark.spark
@pytest.mark.sampled(0.34)
@pytest.mark.usefixtures("spark")  # which writes tables with such partitions
def test_a_partition_by_a_large_decimal_keeps_one_row_for_a_key(tmp_path: Path) -> None:
    rows = of_keys(pa.array(LARGE, pa.decimal128(20, 0)), 1)
    sink = DeltaSink(tmp_path / "t", name="t", partition_by=["k"])
    for txid in (1, 2):
        put(sink, rows, inputs(rows.schema)["fold"], txid=txid)
    assert DeltaTable(tmp_path / "t").to_pyarrow_table()["n"].to_pylist() == [2, 2]
    assert DeltaTable(tmp_path / "t").metadata().configuration[WITH_STATISTICS] == "`n`"


@pytest.mark.spark
@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("asked", ["spark", "auto"])
def test_spark_finds_a_key_in_a_file_whose_bounds_exclude_it(
    tmp_path: Path, spark: SparkSession, asked: AskedCommitter
) -> None:
    rows = foreign_table(tmp_path / "t", {})
    if asked == "auto":
        spark.sql(f"ALTER TABLE delta.`{tmp_path}/t` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    put(DeltaSink(tmp_path / "t", name="t", committer=asked), rows, inputs(rows.schema)["fold"])
    found = spark.read.format("delta").load(f"{tmp_path}/t").orderBy("k").collect()
    assert [row["n"] for row in found] == [2, 2]
    properties = DeltaTable(tmp_path / "t").metadata().configuration
    assert properties[WITH_STATISTICS] == "`n`"


def test_others_bounds_of_a_table_that_is_appended_to_stay(tmp_path: Path) -> None:
    rows = of_keys(pa.array(LARGE, pa.decimal128(20, 0)), 1)
    write_deltalake(tmp_path / "t", rows)
    put(DeltaSink(tmp_path / "t", name="t"), rows)
    assert WITH_STATISTICS not in DeltaTable(tmp_path / "t").metadata().configuration
