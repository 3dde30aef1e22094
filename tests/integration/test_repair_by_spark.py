"""Tables that Spark commits to, with keys that come more than once and statistics that exclude rows: `repair` mends both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from support import duck
from support.delta_tables import Made
from support.doubled_keys import LARGE, compared, input_of, of_keys, opened, repaired
from support.typed_rows import IDENTITY, put

from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.failpoint import FailpointReached, watched
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.delta.spark import SparkCommitter
from stormproof.sinks.rows.comparison import RowProblem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
COLUMNS: Final = "k DECIMAL(20,0), n BIGINT, low BIGINT, high BIGINT"
VECTORS, MAPPED = "'delta.enableDeletionVectors' = 'true'", "'delta.columnMapping.mode' = '{}'"
MADE: Final[Mapping[str, Made]] = {
    "deletion vectors": Made(COLUMNS, properties=VECTORS),
    "columns mapped by name": Made(COLUMNS, properties=MAPPED.format("name")),
    "columns mapped by id": Made(COLUMNS, properties=MAPPED.format("id")),
    "both": Made(COLUMNS, properties=f"{VECTORS}, {MAPPED.format('name')}"),
    "a change feed": Made(COLUMNS, properties="'delta.enableChangeDataFeed' = 'true'"),
    "generated columns": Made(f"{COLUMNS}, twice BIGINT GENERATED ALWAYS AS (n * 2)"),
    "row tracking": Made(COLUMNS, properties="'delta.enableRowTracking' = 'true'"),
    "in-commit timestamps": Made(COLUMNS, properties="'delta.enableInCommitTimestamps' = 'true'"),
    "liquid clustering": Made(COLUMNS, "CLUSTER BY (k)"),
    "type widening": Made(COLUMNS, properties="'delta.enableTypeWidening' = 'true'"),
    "a partition that Spark spells": Made(
        f"{COLUMNS}, `größe a` STRING", "PARTITIONED BY (`größe a`)", MAPPED.format("name")
    ),
    "v2 checkpoints": Made(COLUMNS, properties="'delta.checkpointPolicy' = 'v2', 'delta.checkpointInterval' = '2'"),
}
EXPECTED: Final = {"upsert": (3, 3, 3), "fold": (6, 1, 3)}


def made(spark: SparkSession, path: Path, kind: str) -> str:
    """A table in which each key has three rows, and each file but the first a bound that excludes its rows."""
    MADE[kind].make(spark, path)
    for n in (1, 3, 2):
        more = {"größe a": ", 'Zürich'", "twice": f", {2 * n}"}
        extra = "".join(text for name, text in more.items() if name in MADE[kind].columns)
        values = ", ".join(f"({key}, {n}, {n}, {n}{extra})" for key in LARGE)
        spark.sql(f"INSERT INTO delta.`{path}` SELECT /*+ COALESCE(1) */ * FROM VALUES {values}")
    return f"delta.`{path}`"


def spoil(path: Path, version: int) -> None:
    """Have the bounds of a version's files exclude their rows."""
    entry = path / "_delta_log" / f"{version:020}.json"
    actions = [json.loads(line) for line in entry.read_bytes().splitlines()]
    for add in (action["add"] for action in actions if "add" in action):
        stats = json.loads(add["stats"])
        for name, bound in stats["maxValues"].items():
            if bound in (2, 9):
                stats["minValues"][name] = stats["maxValues"][name] = 1
        add["stats"] = json.dumps(stats)
    entry.write_text("\n".join(map(json.dumps, actions)))
    (path / "_delta_log" / f".{entry.name}.crc").unlink(missing_ok=True)


def rows_by_spark(spark: SparkSession, path: Path, where: str = "true") -> list[tuple[Any, ...]]:
    found = spark.newSession().read.format("delta").load(str(path)).where(where)
    return sorted(tuple(row) for row in found.select("k", "n", "low", "high").collect())


def rows_by_duck(path: Path) -> list[tuple[Any, ...]]:
    return sorted(duck.connected().execute(f"select k, n, low, high from delta_scan('{path}')").fetchall())


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("how", ["upsert", "fold"])
@pytest.mark.parametrize("kind", MADE)
def test_keys_and_statistics_are_mended(spark: SparkSession, tmp_path: Path, kind: str, how: str) -> None:
    path = tmp_path / "tä b"
    made(spark, path, kind)
    spoil(path, 3)
    found, is_read = compared(path, how), kind != "type widening"  # of which delta-rs reads no row
    assert {RowProblem.STATISTICS_WRONG} | ({RowProblem.ROWS_ADDED} if is_read else set()) <= {
        one.problem for one in found.wrong
    }
    assert is_read or "TypeWidening" in found.left_out[0]
    before = DeltaTable(path).version()
    looked = repaired(path, how, dry_run=True)
    assert (len(looked.files), looked.doubled_keys, looked.rows_removed, looked.left) == (1, 2, 4, [])
    assert DeltaTable(path).version() == before
    done = repaired(path, how)
    assert (len(done.files), done.doubled_keys, done.rows_removed, done.left) == (1, 2, 4, [])
    assert done.version == DeltaTable(path).version()
    wanted = [(key, *EXPECTED[how]) for key in LARGE]
    assert [rows_by_spark(spark, path), rows_by_duck(path)] == [wanted] * 2
    assert rows_by_spark(spark, path, f"n = {wanted[0][1]}") == wanted
    assert [one for one in compared(path, how).wrong if not one.by_others] == []
    again = repaired(path, how)
    assert (again.version, again.files, again.rows_removed, again.left) == (None, [], 0, [])
    if kind == "a change feed":
        feed = f"SELECT count(*) FROM table_changes_by_path('{path}', {done.version}) WHERE _change_type = 'delete'"
        assert spark.newSession().sql(feed).collect()[0][0] == 6
    put(DeltaSink(path, name="t"), of_keys(4), input_of(how), txid=1)
    assert [row[1] for row in rows_by_spark(spark, path)] == [4 if how == "upsert" else 10] * 2


BETWEEN: Final[Mapping[str, str]] = {
    "changes a row": "UPDATE {0} SET n = 30, low = 30 WHERE n = 3",
    "adds a row": "INSERT INTO {0} SELECT k, 30, 30, 3 FROM {0} WHERE n = 3",
    "writes the files anew": "OPTIMIZE {0}",
}


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("kind", ["deletion vectors", "columns mapped by name"])
@pytest.mark.parametrize("what", BETWEEN)
def test_another_writer_that_comes_meanwhile_comes_first(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    path, calls = tmp_path / "t", list[int]()
    table, leave_kept = made(spark, path, kind), SparkCommitter.leave_kept

    def and_before(*args: Any) -> None:
        if not calls:
            spark.sql(BETWEEN[what].format(table))
        calls.append(1)
        leave_kept(*args)

    monkeypatch.setattr(SparkCommitter, "leave_kept", and_before)
    done = repaired(path, "upsert")
    assert len(calls) == 2
    assert done.left == []
    newest = (3, 3, 3) if what == "writes the files anew" else (30, 30, 3)
    assert rows_by_spark(spark, path) == rows_by_duck(path) == [(key, *newest) for key in LARGE]


@pytest.mark.parametrize("point", ["repair.before", "repair.after_log_entry", "repair.after_sync"])
def test_a_repair_that_dies_leaves_the_table_as_it_was_or_mended(
    spark: SparkSession, tmp_path: Path, point: str
) -> None:
    path = tmp_path / "t"
    made(spark, path, "both")
    before = rows_by_spark(spark, path)

    def die(name: str) -> None:
        if name == point:
            raise FailpointReached(point)

    with pytest.raises(FailpointReached), watched(die):
        repaired(path, "fold")
    wanted = [(key, *EXPECTED["fold"]) for key in LARGE]
    assert rows_by_spark(spark, path) == (before if point == "repair.before" else wanted)
    assert repaired(path, "fold").rows_removed == (4 if point == "repair.before" else 0)
    assert rows_by_spark(spark, path) == rows_by_duck(path) == wanted


KILLED: Final = """
import os, signal, sys, threading
from pathlib import Path
from support.doubled_keys import opened
from stormproof.sinks.delta.spark import SparkCommitter

where, how, at = sys.argv[1:]
leave_kept, place = SparkCommitter.leave_kept, Path(where, "_delta_log" if at == "entry" else "")
session = opened(where, how)
jvm = session.committers.spark.start()._sc._gateway.proc.pid

def kill(before):
    while at != "call" and set(os.listdir(place)) == before:
        pass
    os.kill(jvm, signal.SIGKILL)

def and_killed(*told):
    threading.Thread(target=kill, args=(set(os.listdir(place)),), daemon=True).start()
    leave_kept(*told)

SparkCommitter.leave_kept = and_killed
session.repair()
"""


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("at", ["call", "file", "entry"])
def test_a_jvm_that_is_killed_inside_the_merge_leaves_the_table_as_it_was_or_mended(
    spark: SparkSession, tmp_path: Path, at: str
) -> None:
    """As the MERGE begins, or at the first new file of the table, or of its log."""
    path = tmp_path / "t"
    made(spark, path, "deletion vectors")
    before, wanted = rows_by_spark(spark, path), [(key, *EXPECTED["fold"]) for key in LARGE]
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), "fold", at],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "STORMPROOF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 1
    assert re.search("Spark is gone: its JVM has died|the table is as it was, or repaired", run.stderr)
    there = rows_by_spark(spark, path)
    assert there in (before, wanted)
    assert repaired(path, "fold").rows_removed == (4 if there == before else 0)
    assert rows_by_spark(spark, path) == rows_by_duck(path) == wanted
    assert [one for one in compared(path, "fold").wrong if not one.by_others] == []


def test_the_other_columns_of_a_kept_row_and_nested_ones_stay(spark: SparkSession, tmp_path: Path) -> None:
    path, table = tmp_path / "t", f"delta.`{tmp_path}/t`"
    columns = "k STRING, at BIGINT, `a b` ARRAY<INT>, theirs STRUCT<x: MAP<STRING, INT>>, gone BOOLEAN"
    Made(columns, properties=MADE["both"].properties).make(spark, path)
    for at in (1, 2):
        spark.sql(
            f"INSERT INTO {table} SELECT /*+ COALESCE(1) */ k, {at}, array({at}), named_struct('x', map('y', {at})), true "
            "FROM VALUES ('a'), ('b`ü'), ('') t (k)"
        )
    spark.sql(f"DELETE FROM {table} WHERE k = '' AND at = 1")
    schema = pa.schema([("k", pa.string()), ("at", pa.int64()), ("a b", pa.list_(pa.int32()))])
    input_ = SinkInput.for_upsert(schema, ("k",), ("at",))
    with closing(DeltaSink(path, name="t").open(IDENTITY, input_, 9)) as session:
        assert isinstance(session, DeltaSession)
        assert session.repair().rows_removed == 2
    rows = spark.newSession().read.format("delta").load(str(path)).collect()
    expected = [(k, 2, [2], {"y": 2}, True) for k in ("", "a", "b`ü")]
    assert sorted((row.k, row.at, row["a b"], row.theirs.x, row.gone) for row in rows) == expected
    assert len(duck.connected().execute(f"select * from delta_scan('{path}')").fetchall()) == 3


def test_a_table_that_only_takes_appends_is_left_with_the_way_on(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "t"
    Made(COLUMNS).make(spark, path)
    for n in (1, 2):
        spark.sql(f"INSERT INTO delta.`{path}` VALUES (1, {n}, {n}, {n})")
    session = opened(path, "upsert")
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
    with closing(session):
        with pytest.raises(SinkRefused, match=r"table is as it was.*only allow appends"):
            session.repair()
        spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.appendOnly' = 'false')")
        assert session.repair().rows_removed == 1
    assert rows_by_spark(spark, path) == [(1, 2, 2, 2)]


def test_rows_whose_numbers_spark_alone_gives_are_left(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "t"
    Made(f"{COLUMNS}, id BIGINT GENERATED ALWAYS AS IDENTITY").make(spark, path)
    for n in (1, 2):
        spark.sql(f"INSERT INTO delta.`{path}` (k, n, low, high) VALUES (1, {n}, {n}, {n})")
    with pytest.raises(SinkRefused, match=r"table is as it was.*IDENTITY"):
        repaired(path, "upsert")
    assert [row[1] for row in rows_by_spark(spark, path)] == [1, 2]
