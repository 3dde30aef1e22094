"""Delta tables by their names in Spark's catalog: written as the tables in their folders are, and refused where that is not
sound.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from support.queues import prepared_database
from support.streams import ArrowFrames, Form, Handout, StreamCell
from support.typed_rows import put
from support.verdicts import verified

from stormproof import CatalogTable, DeltaSink, exactly_once
from stormproof.core.base.errors import (
    PositionMismatch,
    SinkRefused,
    StoreUnavailable,
    StormproofError,
    TopologyError,
    UsageError,
)
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.preview import TableAction
from stormproof.sinks.contract.protocol import Sink, SinkIdentity, SinkProblem
from stormproof.sinks.delta.features import FEATURES, Committer
from stormproof.sinks.delta.session import DeltaSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("v", pa.int64())])
UPSERT = SinkInput.for_upsert(SCHEMA, ("id",), ("v",))
COLUMNS = "(id bigint, v bigint)"
MANAGED = next(feature for feature in FEATURES if feature.name == "managed or catalog commits")
QUERY = str(uuid.UUID(int=7))


class Lake:
    """A schema of the catalog, gone after the test."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark.newSession(), folder
        self.schema = f"lake_{uuid.uuid4().hex}"
        self.sql(f"create schema {self.schema} location '{folder / 'ware house'}'")

    def sql(self, text: str) -> list[Any]:
        return self.spark.sql(text).collect()

    def make(self, table: str, clause: str = "") -> str:
        self.sql(f"create table {self.schema}.{table} {COLUMNS} using delta {clause}")
        return f"{self.schema}.{table}"

    def sink(self, table: str = "orders", **arguments: Any) -> DeltaSink:
        return DeltaSink(CatalogTable(f"{self.schema}.{table}"), **arguments)

    def rows(self, table: str = "orders") -> Counter[tuple[int, int]]:
        self.sql(f"refresh table {self.schema}.{table}")
        return Counter(tuple(row) for row in self.sql(f"select id, v from {self.schema}.{table}"))


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    lake = Lake(spark, tmp_path)
    yield lake
    lake.sql(f"drop schema {lake.schema} cascade")


def rows(*pairs: tuple[int, int]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, pair, strict=True)) for pair in pairs], SCHEMA)


def opened(sink: Sink, input_: SinkInput | None = None) -> DeltaSession:
    session = sink.open(SinkIdentity("topology", "inc-1", sink.name), input_ or SinkInput(SCHEMA), 1)
    assert isinstance(session, DeltaSession)
    return session


@pytest.mark.parametrize("where", ["managed", "external"])
def test_a_table_is_written_by_its_name_and_read_by_it(lake: Lake, tmp_path: Path, where: str) -> None:
    lake.make("orders", "" if where == "managed" else f"location '{tmp_path / 'else where'}'")
    put(lake.sink(), rows((1, 1), (2, 2)))
    assert lake.rows() == {(1, 1): 1, (2, 2): 1}
    lake.sql(f"insert into {lake.schema}.orders values (9, 9)")  # others go on writing by the name
    upsert = lake.sink(name="upsert", mode="upsert", key="id", order_by="v")
    put(upsert, rows((1, 5), (2, 0), (3, 3)), UPSERT)
    assert lake.rows() == {(1, 5): 1, (2, 2): 1, (3, 3): 1, (9, 9): 1}


def test_a_name_is_spelled_as_in_sql(lake: Lake) -> None:
    lake.make("My_Orders")
    sink = DeltaSink(CatalogTable(f"Spark_Catalog.`{lake.schema.upper()}`.`my_orders`"))
    assert sink.target == f"spark_catalog.{lake.schema}.my_orders"
    assert str(CatalogTable("lake.`a ``b.c`")) == "spark_catalog.lake.`a ``b.c`"
    put(sink, rows((1, 1)))
    assert lake.rows("my_orders") == {(1, 1): 1}


def test_spark_commits_where_the_tables_features_ask_for_it(lake: Lake) -> None:
    lake.make("orders", "tblproperties ('delta.enableDeletionVectors' = 'true')")
    sink = lake.sink(mode="upsert", key="id", order_by="v")
    assert opened(sink, UPSERT).committer() is Committer.SPARK
    put(sink, rows((1, 1), (2, 2)), UPSERT)
    put(sink, rows((1, 4), (2, 0)), UPSERT, txid=2)
    assert lake.rows() == {(1, 4): 1, (2, 2): 1}
    assert "deletion vectors" in str(sink.committed_by(UPSERT))


@pytest.mark.parametrize("how", [b"", b'{"commitInfo":', None], ids=["empty", "half", "zeros"])
def test_a_torn_log_is_repaired_by_name_too(lake: Lake, tmp_path: Path, how: bytes | None) -> None:
    """The catalog's entry is read, and not the table: Spark could not open it."""
    lake.make("orders", f"location '{tmp_path / 'orders'}'")
    put(lake.sink(), rows((1, 1)))
    entries = sorted((tmp_path / "orders" / "_delta_log").glob("*.json"))
    entries[-1].write_bytes(bytes(entries[-1].stat().st_size) if how is None else how)
    session = opened(lake.sink())
    assert session.held() is None  # the commit that the power loss took is to be made again


# ---- what is refused, by name


@pytest.mark.parametrize("feature", sorted(MANAGED.protocol))
@pytest.mark.parametrize("by", ["name", "path"])
def test_a_table_whose_catalog_takes_the_commits_is_refused(lake: Lake, tmp_path: Path, feature: str, by: str) -> None:
    path = tmp_path / "orders"
    lake.make("orders", f"location '{path}'")
    entry = path / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            both = [feature] if feature.startswith("catalog") else []
            action["protocol"] = {
                "minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": both, "writerFeatures": [feature]
            }  # fmt: skip
    entry.write_text("".join(json.dumps(action) + "\n" for action in actions))
    (path / "_delta_log" / f"{0:020}.crc").unlink(missing_ok=True)
    before = sorted(p.name for p in (path / "_delta_log").iterdir())
    sink = lake.sink() if by == "name" else DeltaSink(path)
    with pytest.raises(SinkRefused, match=rf"managed or catalog commits.*{feature}.*its catalog takes the commits"):
        opened(sink)
    assert sorted(p.name for p in (path / "_delta_log").iterdir()) == before


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "is not there, and is not made: this Spark's catalog is in memory and begins empty"),
        ("create table {} (id bigint, v bigint) using parquet", "is a table of parquet, and no Delta table"),
        ("create view {} as select 1 id, 2 v", "is a view, and no Delta table"),
    ],
    ids=["missing", "parquet", "view"],
)
def test_what_is_no_delta_table_is_refused(lake: Lake, made: str | None, said: str) -> None:
    if made is not None:
        lake.sql(made.format(f"{lake.schema}.orders"))
    with pytest.raises(SinkRefused, match=said) as refused:
        opened(lake.sink())
    assert (refused.value.details.get("problem") == SinkProblem.TABLE_GONE) is (made is None)
    preview = lake.sink().preview(SinkIdentity("topology", "inc-1", "s"), SinkInput(SCHEMA))
    assert preview.action is TableAction.REFUSE


def test_a_schema_that_is_missing_is_named(spark: SparkSession) -> None:
    with pytest.raises(
        SinkRefused, match=r"table spark_catalog\.nowhere\.orders is not there, .* CREATE SCHEMA nowhere"
    ):
        opened(DeltaSink(CatalogTable("nowhere.orders")))


def test_a_session_catalog_that_may_commit_by_itself_is_refused(
    lake: Lake, spark: SparkSession, tmp_path: Path
) -> None:
    lake.make("orders", f"location '{tmp_path / 'orders'}'")
    name = "spark.sql.catalog.spark_catalog"
    before = str(spark.conf.get(name))
    spark.conf.set(name, "io.unitycatalog.spark.UCSingleCatalog")
    try:
        with pytest.raises(SinkRefused, match=r"catalog is io\.unitycatalog\.spark\.UCSingleCatalog, which may take"):
            opened(lake.sink())
    finally:
        spark.conf.set(name, before)
    assert [p.name for p in (tmp_path / "orders").iterdir()] == ["_delta_log"]


def test_the_place_of_a_table_is_checked_when_it_is_known(lake: Lake, tmp_path: Path) -> None:
    lake.make("orders", f"location '{tmp_path / 'a%20b'}'")
    sink = lake.sink()
    sink.check(SinkInput(SCHEMA), Guarantee.EXACTLY_ONCE)  # nothing is asked of the catalog
    with pytest.raises(TopologyError, match="rename the folder"):
        opened(sink)


# ---- a table that is missing


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog counts as one that outlasts the process, so that a missing table is made."""
    monkeypatch.setattr("stormproof.sinks.delta.catalog._forgets", lambda _: False)


@pytest.mark.usefixtures("lasting")
def test_a_missing_table_is_made_where_the_catalog_has_it(lake: Lake) -> None:
    sink = lake.sink(partition_by="v", properties={"delta.appendOnly": "true"})
    identity = SinkIdentity("topology", "inc-1", sink.name)
    shown = sink.preview(identity, SinkInput(SCHEMA))
    assert shown.action is TableAction.CREATE
    assert "partitioned by v" in shown.changes[0]
    assert lake.sql(f"show tables in {lake.schema}") == []  # a look makes nothing
    assert not (lake.folder / "ware house" / "orders").exists()
    put(sink, rows((1, 1), (2, 2)))
    (detail,) = lake.sql(f"describe detail {lake.schema}.orders")
    assert detail["location"].removeprefix("file:").replace("%20", " ") == str(lake.folder / "ware house" / "orders")
    assert detail["partitionColumns"] == ["v"]
    assert detail["properties"]["delta.appendOnly"] == "true"
    lake.sql(f"insert into {lake.schema}.orders values (9, 9)")
    put(lake.sink(), rows((3, 3)), txid=2)
    assert lake.rows() == {(1, 1): 1, (2, 2): 1, (3, 3): 1, (9, 9): 1}


@pytest.mark.usefixtures("lasting")
@pytest.mark.parametrize("torn", [False, True])
def test_a_table_that_was_made_and_not_registered_is_registered_by_the_next_start(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CatalogTable, "register", dies)
        with pytest.raises(KeyboardInterrupt):
            opened(lake.sink())
    if torn:  # by a power loss
        (lake.folder / "ware house" / "orders" / "_delta_log" / f"{0:020}.json").write_bytes(b"")
    shown = lake.sink().preview(SinkIdentity("topology", "inc-1", "s"), SinkInput(SCHEMA))
    assert shown.action is (TableAction.CANNOT_TELL if torn else TableAction.REFUSE), "by another life it is refused"
    assert lake.sql(f"show tables in {lake.schema}") == []
    put(lake.sink(), rows((1, 1)))
    assert lake.rows() == {(1, 1): 1}


@pytest.mark.usefixtures("lasting")
def test_a_table_in_the_place_of_a_missing_one_is_not_taken(lake: Lake) -> None:
    path = lake.folder / "ware house" / "orders"
    write_deltalake(str(path), rows((7, 7)))
    identity = SinkIdentity("topology", "inc-1", "s")
    shown = lake.sink().preview(identity, SinkInput(SCHEMA))
    with pytest.raises(SinkRefused, match=r"has a Delta table already.*(CREATE TABLE .*)$") as refused:
        opened(lake.sink())
    assert shown.action is TableAction.REFUSE
    assert lake.sql(f"show tables in {lake.schema}") == []
    assert DeltaTable(path).version() == 0
    lake.sql(refused.value.message[refused.value.message.index("CREATE TABLE") :])  # as the message says
    put(lake.sink(), rows((1, 1)))
    assert lake.rows() == {(1, 1): 1, (7, 7): 1}


@pytest.mark.usefixtures("lasting")
def test_a_folder_with_files_of_another_kind_is_not_taken(lake: Lake) -> None:
    """They would be no files of the table: a VACUUM removes them."""
    path = lake.folder / "ware house" / "orders"
    path.mkdir(parents=True)
    (path / "part-0.parquet").write_bytes(b"theirs")
    shown = lake.sink().preview(SinkIdentity("topology", "inc-1", "s"), SinkInput(SCHEMA))
    with pytest.raises(SinkRefused, match=r"is not empty \('part-0\.parquet', say\): a VACUUM"):
        opened(lake.sink())
    assert shown.action is TableAction.REFUSE
    assert [one.name for one in path.iterdir()] == ["part-0.parquet"]


@pytest.mark.usefixtures("lasting")
def test_a_table_that_somebody_makes_meanwhile_is_not_taken_for_ours(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registers = CatalogTable.register

    def late(table: CatalogTable, folder: str, where: str) -> None:
        lake.make("orders", f"location '{tmp_path / 'theirs'}'")
        registers(table, folder, where)

    monkeypatch.setattr(CatalogTable, "register", late)
    with pytest.raises(SinkRefused, match=r"was made by somebody else meanwhile, in .*theirs"):
        opened(lake.sink())
    assert DeltaTable(tmp_path / "theirs").version() == 0


@pytest.mark.usefixtures("lasting")
def test_a_catalog_that_refuses_leaves_a_start_that_can_be_made_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = CatalogTable._statement  # pyright: ignore[reportPrivateUsage] - what the catalog is told
    with monkeypatch.context() as patched:
        patched.setattr(CatalogTable, "_statement", lambda table, folder: statement(table, folder) + " no such clause")
        with pytest.raises(StoreUnavailable, match="the next start registers it, and so does: CREATE TABLE"):
            opened(lake.sink())
    put(lake.sink(), rows((1, 1)))
    assert lake.rows() == {(1, 1): 1}


# ---- runs of a topology


class Query:
    """Micro-batches into one sink, by the ledger."""

    def __init__(self, database: Database, folder: Path, *sinks: DeltaSink) -> None:
        self.database = database
        cell = StreamCell("named", Form.SINKS, folder, database)
        self._function = exactly_once(*sinks, name="named", settings=cell.settings(), frames=ArrowFrames())

    def put(self, number: int, *pairs: tuple[int, int]) -> None:
        self._function(Handout(QUERY, lambda: rows(*pairs), SCHEMA), number)

    def close(self) -> None:
        self._function.close()


@pytest.fixture
def ledger(database: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return prepared_database(database)


@pytest.mark.postgres
def test_a_table_by_name_is_written_once_and_audited_without_the_catalog(
    lake: Lake, ledger: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.make("orders", f"location '{tmp_path / 'orders'}'")
    for number in (0, 1, 1):  # each by a start of its own
        query = Query(ledger, tmp_path, lake.sink())
        query.put(number, (number, number))
        query.close()
    assert lake.rows() == {(0, 0): 1, (1, 1): 1}

    def no_catalog(*_: object) -> str:
        raise AssertionError

    monkeypatch.setattr(CatalogTable, "place", no_catalog)
    report = verified("named", ledger)
    assert report.clean, report


@pytest.mark.postgres
@pytest.mark.parametrize("how", ["dropped and made again", "at another place"])
def test_another_table_under_the_name_is_found(lake: Lake, ledger: Database, tmp_path: Path, how: str) -> None:
    lake.make("orders", f"location '{tmp_path / 'orders'}'")
    query = Query(ledger, tmp_path, lake.sink())
    query.put(0, (0, 0))
    query.close()
    if how == "at another place":
        lake.make("other", f"location '{tmp_path / 'other'}'")
        lake.sql(f"alter table {lake.schema}.orders set location '{tmp_path / 'other'}'")
    else:
        lake.sql(f"drop table {lake.schema}.orders")
        (tmp_path / "orders").rename(tmp_path / "old")
        lake.make("orders", f"location '{tmp_path / 'orders'}'")
    with pytest.raises((PositionMismatch, SinkRefused), match="orders"):
        Query(ledger, tmp_path, lake.sink()).put(1, (1, 1))
    assert lake.rows() == {}


@pytest.mark.postgres
@pytest.mark.usefixtures("lasting")
def test_a_table_whose_folder_is_gone_is_not_made_again(lake: Lake, ledger: Database, tmp_path: Path) -> None:
    query = Query(ledger, tmp_path, lake.sink())
    query.put(0, (0, 0))
    query.close()
    lake.sql(f"drop table {lake.schema}.orders")
    shutil.rmtree(lake.folder / "ware house" / "orders")
    with pytest.raises(PositionMismatch, match=r"the table spark_catalog\..*\.orders is gone"):
        Query(ledger, tmp_path, lake.sink()).put(1, (1, 1))
    assert not (lake.folder / "ware house" / "orders").exists()


@pytest.mark.postgres
@pytest.mark.usefixtures("lasting")
def test_a_table_that_was_made_and_dropped_is_not_made_again(lake: Lake, ledger: Database, tmp_path: Path) -> None:
    query = Query(ledger, tmp_path, lake.sink())
    query.put(0, (0, 0))
    query.close()
    path = lake.folder / "ware house" / "orders"
    lake.sql(f"drop table {lake.schema}.orders")  # an external one: its folder stays
    with pytest.raises(SinkRefused, match=rf"was dropped.*register it again: CREATE TABLE .*{path}'") as refused:
        Query(ledger, tmp_path, lake.sink()).put(1, (1, 1))
    assert lake.sql(f"show tables in {lake.schema}") == []
    statement = refused.value.message[refused.value.message.index("CREATE TABLE") :]
    lake.sql(statement[: statement.index(f"{path}'") + len(f"{path}'")])
    query = Query(ledger, tmp_path, lake.sink())
    query.put(1, (1, 1))
    query.close()
    assert lake.rows() == {(0, 0): 1, (1, 1): 1}
    assert verified("named", ledger).clean


@pytest.mark.postgres
def test_one_table_by_path_and_by_name_is_one_table(lake: Lake, ledger: Database, tmp_path: Path) -> None:
    lake.make("orders", f"location '{tmp_path / 'orders'}'")
    with pytest.raises(StormproofError, match=r"'a'.*'b'|'b'.*'a'"):
        Query(ledger, tmp_path, lake.sink(name="a"), DeltaSink(tmp_path / "orders", name="b")).put(0, (0, 0))
    with pytest.raises(StormproofError, match=r"'a'.*'b'|'b'.*'a'"):
        Query(ledger, tmp_path, lake.sink(name="a"), lake.sink("ORDERS", name="b")).put(0, (0, 0))
    assert lake.rows() == {}


# ---- a catalog that lasts


PROGRAM = """
import sys
from pathlib import Path
import pyarrow as pa
from stormproof import CatalogTable, DeltaSink
from stormproof.core.engine.spark import spark_session
from stormproof.core.start.settings import Settings
from support.typed_rows import put

home, step = Path(sys.argv[1]), sys.argv[2]
session = spark_session(
    Settings(master="local[1]", home=home),
    spark__sql__catalogImplementation="hive",
    spark__sql__warehouse__dir=str(home / "warehouse"),
    spark__hadoop__javax__jdo__option__ConnectionURL=f"jdbc:derby:;databaseName={home}/metastore;create=true",
)
if step == "make":
    session.sql("create schema lake")
    session.sql("create table lake.orders (id bigint, v bigint) using delta")
else:
    rows = pa.table({"id": pa.array([1], pa.int64()), "v": pa.array([2], pa.int64())})
    for name in ("orders", "made_by_us"):
        put(DeltaSink(CatalogTable(f"lake.{name}")), rows, txid=int(step))
        print(name, [tuple(row) for row in session.sql(f"select id, v from lake.{name}").collect()])
session.stop()
"""


@pytest.mark.spark(own=True)
@pytest.mark.timeout(900)  # three JVMs, each of which opens a metastore
@pytest.mark.sampled(0.2)
def test_a_catalog_in_a_database_outlasts_the_process(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    said = [
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{PROGRAM}", str(tmp_path), step],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        for step in ("make", "1", "2")
    ]
    assert [one.returncode for one in said] == [0, 0, 0], said
    for name in ("orders", "made_by_us"):
        assert f"{name} [(1, 2)]\n" in said[1].stdout
        assert f"{name} [(1, 2), (1, 2)]\n" in said[2].stdout
        assert DeltaTable(tmp_path / "warehouse" / "lake.db" / name).to_pyarrow_table().num_rows == 2


# ---- names


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("orders", "a table is named as 'SCHEMA.TABLE'"),
        ("", "a table is named as 'SCHEMA.TABLE'"),
        ("lake.", "a table is named as 'SCHEMA.TABLE'"),
        ("lake.my orders", "in backquotes"),
        ("a.b.c.d", "a table is named as 'SCHEMA.TABLE'"),
        (3, "a table is named as 'SCHEMA.TABLE'"),
        ("unity.lake.orders", "the name is of catalog 'unity'.*only Spark's session catalog.*Unity Catalog"),
        ("delta.`/tmp/orders`", "the name stands for a path"),
    ],
)
def test_other_names_are_refused(name: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CatalogTable(name)
