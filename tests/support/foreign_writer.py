"""A writer that is not ours, in a process of its own: it appends to Delta tables and optimizes them, and inserts by psycopg.

``python foreign_writer.py KIND FOLDER DATABASE SEED`` writes until a file ``stop`` is in FOLDER, at random moments, and
then prints how many rows it has written to each table. Its rows have ids from `FIRST` on, one after the other.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST: Final = 1_000_000
SCHEMA: Final = pa.schema([pa.field("id", pa.int64()), pa.field("day", pa.int64()), pa.field("v", pa.int64())])
TABLES: Final = ("delta_append", "delta_upsert")
PAUSE_S: Final = 0.3
"""Its longest pause; without any, a MERGE of ours would lose against it each time."""

Write = Callable[[Path, int], None]
Optimize = Callable[[Path], None]


def main() -> None:
    kind, folder, database, seed = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    append, optimize = _spark(folder) if kind == "spark" else (_append, _optimize)
    rng, written = random.Random(seed), dict.fromkeys((*TABLES, "pg_append", "pg_upsert"), 0)
    optimized = 0
    # Two compactions at once by delta-rs double the rows: it leaves the table alone that we compact.
    optimizes = {"spark": TABLES, "delta-rs": ("delta_upsert",)}
    (folder / "ready").touch()
    with psycopg.connect(database, autocommit=True) as connection:
        while not (folder / "stop").exists():
            table = rng.choice(list(written))
            if table in optimizes[kind] and rng.random() < 0.3:
                _again(partial(optimize, folder / "lake" / table))
                optimized += 1
                continue
            row = FIRST + written[table]
            if table in TABLES:
                _again(partial(append, folder / "lake" / table, row))
            else:
                connection.execute(f"insert into {table} (id, day, v) values (%s, %s, %s)", (row, 0, row))  # pyright: ignore
            written[table] += 1
            time.sleep(rng.random() * PAUSE_S)
    print(json.dumps({"written": written, "optimized": optimized}))


def _again(write: Callable[[], None]) -> None:
    """Another's commit came first, and nothing was written."""
    for _ in range(100):
        try:
            return write()
        except CommitFailedError:
            continue
    raise AssertionError("another writer came first a hundred times")


def _append(path: Path, row: int) -> None:
    write_deltalake(path, pa.table([[row], [0], [row]], schema=SCHEMA), mode="append")


def _optimize(path: Path) -> None:
    DeltaTable(path).optimize.compact()


def _spark(folder: Path) -> tuple[Write, Optimize]:
    from delta.tables import DeltaTable as OfSpark

    from stormproof.core.engine.spark import spark_session
    from stormproof.core.start.settings import Settings

    session: SparkSession = spark_session(Settings(home=folder / "spark", master="local[2]"))
    session.conf.set("spark.databricks.delta.snapshotPartitions", "2")

    def append(path: Path, row: int) -> None:
        frame = session.createDataFrame([(row, 0, row)], "id long, day long, v long")
        frame.write.format("delta").mode("append").save(str(path))

    def optimize(path: Path) -> None:
        try:
            OfSpark.forPath(session, str(path)).optimize().executeCompaction()
        except Exception as error:
            if "oncurrent" not in str(error):
                raise

    return append, optimize


if __name__ == "__main__":
    main()
