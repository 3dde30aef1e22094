"""No reader loses a row by the statistics of adopted files: each answers alike with them and without them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.transaction import AddAction
from support import duck
from support.typed_rows import EDGES, IDENTITY, decimals, put

from stormproof.core.contract.fold import ByOrder, End
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.delta.sink import DeltaSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TOP: Final = "\U0010ffff"
COLUMNS: Final[Mapping[str, tuple[str, pa.Array]]] = {
    **{
        name: (name, EDGES[name])
        for name in ("string", "boolean", "tinyint", "bigint", "date", "timestamp", "timestamp_ntz", "decimal(5,2)")
    },
    "wide": ("decimal(38,0)", EDGES["decimal(38,0)"]),
    "fine": ("decimal(38,38)", EDGES["decimal(38,38)"]),
    **{f"d{p}_{s}": (f"decimal({p},{s})", decimals(p, s)) for p, s in ((15, 3), (16, 3), (18, 2), (20, 0), (28, 10))},
    "float": ("float", pa.array([math.inf, -math.inf, -0.0, 0.1, None], pa.float32())),
    "double": ("double", pa.array([math.inf, -math.inf, -0.0, 5e-324, None])),
    "long text": ("string", pa.array(["a" * 32 + _TOP, "a" * 32 + "b", "a" * 32, "a" * 31, _TOP * 33])),
    "zeros": ("double", pa.array([0.0, -0.0, 1.0, -1.0, None])),
}
"""Five rows of each; a row is a file of its own, so that a wrong bound loses it."""

_SQL: Final = {
    "duckdb": {"string": "varchar", "timestamp": "timestamptz", "timestamp_ntz": "timestamp"},
    "delta-rs": {"string": "varchar"},
    "spark": {},
}
_COMPARISONS: Final = ("=", "<", "<=", ">", ">=")


def literal(engine: str, ddl: str, value: Any) -> str:
    """A value in an engine's SQL."""
    match value:
        case datetime():
            text = value.replace(tzinfo=None).isoformat(sep=" ")
        case Decimal():
            text = f"{value:f}"
        case _:
            text = str(value).replace("\\", "\\\\") if engine == "spark" else str(value)
    if engine == "delta-rs" and ddl.startswith("timestamp"):  # its own TIMESTAMP has nanoseconds, and no year 1
        zone = "None" if ddl.endswith("ntz") else 'Some("UTC")'
        return f"arrow_cast('{text}', 'Timestamp(Microsecond, {zone})')"
    zone = "+00:00" if ddl == "timestamp" else ""
    return f"cast('{text}{zone}' as {_SQL[engine].get(ddl, ddl)})"


def predicates(engine: str) -> Iterator[str]:
    """Each column against each of its own values, and against NULL."""
    quote = "`" if engine == "spark" else '"'
    for name, (ddl, values) in COLUMNS.items():
        column = f"{quote}{name}{quote}"
        yield f"{column} is null"
        yield f"{column} is not null"
        for value in values.to_pylist():
            if value is not None:
                shown = literal(engine, ddl, value)
                yield from (f"{column} {comparison} {shown}" for comparison in _COMPARISONS)
    for name, value in (("x", "1"), ("d", "cast('12345678901234567891' as decimal(20,0))")):
        inner = f"s.{name}" if engine == "spark" else f"s['{name}']" if engine == "delta-rs" else f'"s"."{name}"'
        yield from (f"{inner} {comparison} {value}" for comparison in _COMPARISONS)
        yield f"{inner} is null"


HOW: Final = ("append", "merge", "fold", "compact")


def write(folder: Path, how: str = "append") -> Path:
    """The rows, each one committed by itself, by delta-rs where it merges or compacts; where it folds, each twice."""
    rows = pa.table({name: column for name, (_, column) in COLUMNS.items()})
    inner = pa.struct([("x", pa.int64()), ("d", pa.decimal128(20, 0))])
    large = Decimal("12345678901234567891")
    struct = [{"x": 1, "d": large}, {"x": 0, "d": None}, None, {"x": None, "d": -large}, {"x": 2, "d": Decimal(1)}]
    rows = rows.append_column("s", pa.array(struct, inner))
    # NaN beside a number, in a file of its own: it takes all bounds from a file.
    nothing = pa.table({f.name: pa.nulls(2, f.type) for f in rows.schema})
    nan = nothing.set_column(rows.schema.get_field_index("double"), "double", pa.array([1.0, math.nan]))
    rows = pa.concat_tables([rows, nan]).append_column("i", pa.array(range(7), pa.int64()))
    newest = dict.fromkeys(rows.schema.names[:-1], ByOrder(End.LAST, ("bigint",)))
    inputs = {
        "merge": SinkInput.for_upsert(rows.schema, ("i",)),
        "fold": SinkInput.for_fold(rows.schema, ("i",), newest),
    }
    input_ = inputs.get(how, SinkInput(rows.schema))
    sink, commits = DeltaSink(folder, name="t"), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]
    for txid, (first, number) in enumerate(commits * (2 if how == "fold" else 1), 1):
        put(sink, rows.take(pa.array(range(first, first + number))), input_, txid=txid)
    if how == "compact":
        with closing(sink.open(SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, "t"), input_, 9)) as session:
            assert session.compact().added == 1
    return folder


def copied(table: Path, into: Path, statistics: Callable[[str], str]) -> Path:
    """A table over the same files with other statistics."""
    source = DeltaTable(table)
    live = {unquote(path) for path in source.get_add_actions(flatten=True).column("path").to_pylist()}
    into.mkdir()
    copy = DeltaTable.create(into, source.schema())
    actions: list[AddAction] = []
    for entry in sorted((table / "_delta_log").glob("*.json")):
        for line in entry.read_bytes().split(b"\n"):
            add = json.loads(line or b"{}").get("add")
            if add is not None and add["path"] in live:
                os.link(table / add["path"], into / add["path"])
                stats = statistics(add["stats"])
                actions.append(AddAction(add["path"], add["size"], {}, 0, data_change=True, stats=stats))
    copy.create_write_transaction([*actions], "append", copy.schema())
    return into


def unindexed(table: Path, into: Path) -> Path:
    """A table with the same rows, in a file without statistics of any kind."""
    source = DeltaTable(table)
    rows = source.to_pyarrow_table()
    into.mkdir()
    pq.write_table(rows, into / "rows.parquet", write_statistics=False)
    size = (into / "rows.parquet").stat().st_size
    copy = DeltaTable.create(into, source.schema())
    copy.create_write_transaction(
        [AddAction("rows.parquet", size, {}, 0, data_change=True, stats='{"numRecords":7}')], "append", copy.schema()
    )
    return into


def without(statistics: str) -> str:
    return json.dumps({"numRecords": json.loads(statistics)["numRecords"]})


Count = Callable[[Path, str], int]


def by_duckdb() -> Count:
    connection = duck.connected()
    connection.execute("set timezone = 'UTC'")
    return lambda table, where: int(
        connection.execute(f"select count(*) from delta_scan('{table}') where {where}").fetchone()[0]
    )


def by_delta_rs() -> Count:
    opened: dict[Path, QueryBuilder] = {}

    def count(table: Path, where: str) -> int:
        if table not in opened:
            opened[table] = QueryBuilder().register("t", DeltaTable(table))
        found = pa.RecordBatchReader.from_stream(opened[table].execute(f"select count(*) as n from t where {where}"))
        return int(found.read_all()["n"][0].as_py())

    return count


READERS: Final[Mapping[str, Callable[[], Count]]] = {"duckdb": by_duckdb, "delta-rs": by_delta_rs}


def lost(count: Count, table: Path, plain: Path, asked: Iterable[str]) -> list[str]:
    """The predicates for which the statistics change the answer."""
    return [where for where in asked if count(table, where) != count(plain, where)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("engine", READERS)
def test_statistics_change_no_answer(tmp_path: Path, engine: str, how: str, seed: int) -> None:
    table = write(tmp_path / "t", how)
    plain = unindexed(table, tmp_path / "plain")
    count, asked = READERS[engine](), list(predicates(engine))
    if engine == "duckdb":  # which takes 10 ms for each
        asked = Random(seed).sample(asked, 130)
    assert lost(count, table, plain, asked) == []
    # The files' own statistics are the same in both tables. To these readers NaN is above infinity.
    nan = "cast('NaN' as double)"
    of_nan = (f"double = {nan}", "double > 1", f"double < {nan}")
    assert [count(table, where) for where in of_nan] == [1, 2, 5]
    DeltaTable(table).create_checkpoint()  # from here on the statistics are read from there
    assert lost(READERS[engine](), table, plain, asked[::4]) == []


@pytest.mark.parametrize("engine", READERS)
def test_control_bounds_that_are_cut_wrongly_lose_rows(tmp_path: Path, engine: str) -> None:
    def cut(statistics: str) -> str:
        read = json.loads(statistics)
        for name in ("long text", "timestamp_ntz", "timestamp"):
            if name in read.get("maxValues", {}):
                read["maxValues"][name] = read["minValues"][name]
        return json.dumps(read)

    table = write(tmp_path / "t")
    broken = copied(table, tmp_path / "broken", cut)
    asked = [where for where in predicates(engine) if '"long text" =' in where]
    assert lost(READERS[engine](), broken, copied(table, tmp_path / "plain", without), asked) != []


@pytest.mark.parametrize("how", HOW)
def test_pyarrow_skips_no_row(tmp_path: Path, how: str) -> None:
    """A dataset of delta-rs hands the statistics to pyarrow as guarantees of its fragments."""
    table = write(tmp_path / "t", how)
    dataset = DeltaTable(table).to_pyarrow_dataset()
    whole = dataset.to_table()
    for name, (ddl, values) in COLUMNS.items():
        if how in ("merge", "fold") and ddl == "string":
            continue  # delta-rs writes string_view, for which Arrow has no comparison
        for value in values:
            if (
                value.is_valid and str(value) != "nan"
            ):  # an expression of Arrow with NaN is not what its own filter says
                for compared in ("__eq__", "__lt__", "__ge__"):
                    where = getattr(ds.field(name), compared)(value)
                    assert dataset.count_rows(filter=where) == whole.filter(where).num_rows, (name, compared, value)


@pytest.mark.spark
@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("how", HOW)
def test_spark_skips_no_row(tmp_path: Path, spark: SparkSession, seed: int, how: str) -> None:
    table = write(tmp_path / "t", how)
    plain = unindexed(table, tmp_path / "plain")
    asked = ["`zeros` = 0.0D", *Random(seed).sample(list(predicates("spark")), 12)]
    for name, folder in (("with_statistics", table), ("plain", plain)):
        spark.read.format("delta").load(str(folder)).createOrReplaceTempView(name)
    counts = [
        spark.sql(
            " union all ".join(f"select {i} as i, count(*) as n from {view} where {p}" for i, p in enumerate(asked))
        )
        for view in ("with_statistics", "plain")
    ]
    found, wanted = ({row["i"]: row["n"] for row in frame.collect()} for frame in counts)
    assert [asked[i] for i in found if found[i] != wanted[i]] == []
    nan = "select count(*) as n from with_statistics where double > 1 union all select count(*) from with_statistics "
    assert [row["n"] for row in spark.sql(nan + "where double = double('NaN')").collect()] == [2, 1]
