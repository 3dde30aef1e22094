"""A driver of a real streaming query on Spark, as a process of its own.

``python stream_driver.py CELL SOURCE`` with the cell as JSON; failpoints come by the environment. SOURCE is ``files`` (a
file of the input folder each micro-batch, until all are done), ``two`` (the same, with a second function for some of the
rows) or ``rate`` (rows by the clock, so many micro-batches).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stormproof.core.failpoint import ENV
from stormproof.core.postgres.database import Database
from support.streams import Form, StreamCell, clean_environment, function_of, input_folder, settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TIMEOUT_S = 240
RATE_BATCHES = 3
ROWS_PER_SECOND = 40
Kind = Literal["files", "two", "rate"]


def run_files_on_spark(cell: StreamCell, armed: str = "") -> int:
    """Run one driver over all files to its end; 0, or the negative number of the signal that killed it."""
    return _run(cell, "files", armed)


def run_two_on_spark(cell: StreamCell, armed: str = "") -> int:
    """The same, where one query calls two functions, one after the other."""
    return _run(cell, "two", armed)


def run_rate_on_spark(cell: StreamCell, armed: str = "") -> int:
    """Run one driver over some micro-batches of rows that come by the clock."""
    return _run(cell, "rate", armed)


def _run(cell: StreamCell, kind: Kind, armed: str) -> int:
    fields = {
        "name": cell.name,
        "form": cell.form.value,
        "folder": str(cell.folder),
        "database": cell.database.sqlalchemy_url.render_as_string(hide_password=False),
        "adopt": cell.adopt,
        "query": cell.query,
    }
    environment: dict[str, str] = {**os.environ, ENV: armed, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(fields), kind],
        env=environment,
        timeout=TIMEOUT_S,
        start_new_session=True,
        check=False,
        capture_output=True,
    )
    if done.returncode > 0:
        print(done.stderr.decode(errors="replace")[-3000:], file=sys.stderr)
    return done.returncode


class EnoughError(Exception):
    """The query has done what it should."""


def main() -> None:
    from pyspark.errors import StreamingQueryException

    from stormproof.core.engine.spark import spark_session

    fields = json.loads(sys.argv[1])
    cell = StreamCell(
        name=fields["name"],
        form=Form(fields["form"]),
        folder=Path(fields["folder"]),
        database=Database.from_url(fields["database"]),
        adopt=fields["adopt"],
        query=fields["query"],
    )
    clean_environment(os.environ.get(ENV, ""))
    session = spark_session(cell.settings())
    done: list[int] = []
    function = function_of(cell, None, lambda result: done.append(result.rows))

    def some(frame: DataFrame, batch: int) -> None:
        if sum(rows > 0 for rows in done) >= RATE_BATCHES:
            raise EnoughError
        function(frame, batch)

    other = function_of(cell.even, None) if sys.argv[2] == "two" else None

    def both(frame: DataFrame, batch: int) -> None:
        function(frame, batch)
        if other is not None:
            other(frame.where("length(value) % 2 = 0"), batch)

    if sys.argv[2] != "rate":
        stream = session.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(input_folder(cell.folder)))
        chosen = function if other is None else both
        writer = stream.selectExpr("value", "uuid() as id").writeStream.foreachBatch(chosen).trigger(availableNow=True)
    else:
        stream = session.readStream.format("rate").option("rowsPerSecond", ROWS_PER_SECOND).load()
        writer = stream.selectExpr("cast(value as string) as value", "uuid() as id").writeStream.foreachBatch(some)
    query = writer.option("checkpointLocation", str(cell.checkpoint)).start()
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        if "EnoughError" not in str(error):
            raise
    function.close()
    if other is not None:
        other.close()
    settle(cell)


if __name__ == "__main__":
    main()
