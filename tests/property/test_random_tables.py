"""Random schemas and batches: what each reader finds in a table is what pandas makes of the batches."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pandas as pd
import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from psycopg.types.json import set_json_loads
from support import duck
from support.random_tables import Made, as_json, batches, made_tables, shown
from support.typed_rows import put

from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.columns import column_type
from stormproof.sinks.postgres.sink import PostgresSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOME, ALL = 8, 300


@dataclass(frozen=True)
class Written:
    """A table that was written, and its rows by pandas."""

    folder: Path
    schema: pa.Schema
    wanted: list[tuple[Any, ...]]

    def check(self, reader: str, found: pa.Table) -> None:
        """Compare with what a reader found, in any order."""
        names = self.schema.names
        there = found.select(names).cast(self.schema).sort_by("i")
        columns = [there[name].to_pylist() for name in names]
        rows = [tuple(shown(value) for value in row) for row in zip(*columns, strict=True)]
        assert rows == self.wanted, f"{reader}: {self.schema}"


def by_pandas(given: list[pa.Table]) -> list[tuple[Any, ...]]:
    """The batches one behind the other."""
    frames = [table.to_pandas(types_mapper=pd.ArrowDtype) for table in given]
    whole = pa.Table.from_pandas(pd.concat(frames, ignore_index=True), given[0].schema, preserve_index=False)
    columns = [whole[name].to_pylist() for name in whole.schema.names]
    return [tuple(shown(value) for value in row) for row in zip(*columns, strict=True)]


def check_postgres(connection: psycopg.Connection, table: str, given: list[pa.Table]) -> None:
    whole = pa.concat_tables(given)
    found = connection.execute(f'select * from "{table}" order by i'.encode()).fetchall()
    for number, field in enumerate(whole.schema):
        wanted, got = whole[field.name].to_pylist(), [row[number] for row in found]
        if column_type(field.type) == "jsonb":
            assert got == [as_json(value, field.type) for value in wanted], field
            continue
        if "float" in str(field.type):  # Postgres's text of a real is its shortest one
            kind = field.type
            got, wanted = pa.array(got, kind).to_pylist(), pa.array(wanted, kind).to_pylist()
        assert [shown(value) for value in got] == [shown(value) for value in wanted], field


@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.timeout(900)  # with --all Spark reads 300 tables
def test_every_reader_finds_what_pandas_computes(
    tmp_path: Path, database: Database, spark: SparkSession, seed: int, request: pytest.FixtureRequest
) -> None:
    examples = ALL if request.config.getoption("--all") else SOME
    written: list[Written] = []
    connection = psycopg.connect(database.conninfo, autocommit=True)
    connection.execute("set timezone = 'UTC'")
    set_json_loads(partial(json.loads, parse_float=Decimal, parse_int=Decimal), connection)
    lake = duck.connected()
    lake.execute("set timezone = 'UTC'")

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(batches())
    def check(given: list[pa.Table]) -> None:
        name = f"t{len(written)}"
        try:
            DeltaSink(tmp_path / name).check(SinkInput(given[0].schema), Guarantee.EXACTLY_ONCE)
        except TopologyError:  # a map of timestamps without a zone
            hypothesis.reject()
        table = Written(tmp_path / name, given[0].schema, by_pandas(given))
        written.append(table)
        for txid, rows in enumerate(given, start=1):
            put(DeltaSink(table.folder, name=name), rows, txid=txid)
            put(PostgresSink(name, name=name, database=database, staging=tmp_path / "staged"), rows, txid=txid)
        table.check("delta-rs", DeltaTable(table.folder).to_pyarrow_table())
        table.check("duckdb", pa.table(lake.execute(f"select * from delta_scan('{table.folder}')").arrow()))
        check_postgres(connection, name, given)

    check()
    connection.close()

    def check_spark(table: Written) -> None:
        table.check("spark", spark.read.format("delta").load(str(table.folder)).toArrow())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check_spark, written))
    assert len(written) >= examples


@pytest.mark.spark
@pytest.mark.timeout(900)  # with --all Spark reads 300 tables
def test_every_reader_reads_every_table_that_can_be_made(
    tmp_path: Path, spark: SparkSession, seed: int, request: pytest.FixtureRequest
) -> None:
    examples = ALL if request.config.getoption("--all") else SOME
    written: list[Written] = []
    lake = duck.connected()
    lake.execute("set timezone = 'UTC'")

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(made_tables())
    def check(made: Made) -> None:
        folder = tmp_path / f"t{len(written)}"
        by_key: dict[str, Any] = {"mode": "upsert", "key": "i", "order_by": "any"} if made.by_key else {}
        sink = DeltaSink(folder, partition_by=made.partitions, properties=made.properties, **by_key)
        try:
            sink.check(sink.input_of(SinkInput(made.batches[0].schema)), Guarantee.EXACTLY_ONCE)
        except TopologyError:  # a map of timestamps without a zone
            hypothesis.reject()
        table = Written(folder, made.batches[0].schema, by_pandas(made.batches))
        written.append(table)
        for txid, rows in enumerate(made.batches, start=1):
            put(sink, rows, sink.input_of(SinkInput(rows.schema)), txid=txid)
            if made.constrained and txid == 1:
                DeltaTable(folder).alter.add_constraint({"few": "i < 1000"})
        by_delta_rs = QueryBuilder().register("t", DeltaTable(folder)).execute("select * from t")
        table.check("delta-rs", pa.table(by_delta_rs))
        table.check("duckdb", pa.table(lake.execute(f"select * from delta_scan('{folder}')").arrow()))

    check()

    def check_spark(table: Written) -> None:
        table.check("spark", spark.read.format("delta").load(str(table.folder)).toArrow())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check_spark, written))
    assert len(written) >= examples
