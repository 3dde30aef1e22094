"""A driver of a real streaming query on Spark, as a process of its own.

``python stream_driver.py CELL SOURCE`` with the cell as JSON; failpoints come by the environment. SOURCE is ``files`` (a
file of the input folder each micro-batch, until all are done), ``two`` (the same, with a second function, a topology, for
some of the rows), ``renamed`` (``two``, and then the first one's renamed function over one more file) or ``rate`` (rows
by the clock, so many micro-batches).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stormproof.core.base.failpoint import ENV
from stormproof.core.postgres.database import Database
from support.streams import Form, StreamCell, clean_environment, function_of, input_folder, put_file, settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TIMEOUT_S = 240
RATE_BATCHES = 3
ROWS_PER_SECOND = 40
Kind = Literal["files", "two", "renamed", "rate"]
MORE_LINES = ["eee", "ff"]


def run_files_on_spark(cell: StreamCell, armed: str = "") -> int:
    """Run one driver over all files to its end; 0, or the negative number of the signal that killed it."""
    return _run(cell, "files", armed)


def run_two_on_spark(cell: StreamCell, armed: str = "") -> int:
    """The same, where one query calls two functions, one after the other."""
    return _run(cell, "two", armed)


def run_two_and_rename_one_on_spark(cell: StreamCell) -> int:
    """The same; then a renamed function is refused, and takes one more file by the way out that it is told."""
    return _run(cell, "renamed", "")


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
    print(done.stderr.decode(errors="replace")[-3000:], file=sys.stderr)
    return done.returncode


class EnoughError(Exception):
    """The query has done what it should."""


def over_files(session: SparkSession, *cells: StreamCell) -> None:
    """One query over all files: the first cell's function, and the second cell's for rows with a text of even length."""
    first, *others = cells
    functions = [function_of(cell, None) for cell in cells]

    def each(frame: DataFrame, batch: int) -> None:
        functions[0](frame, batch)
        for function in functions[1:]:
            function(frame.where("length(value) % 2 = 0"), batch)

    stream = session.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(input_folder(first.folder)))
    rows = stream.selectExpr("value", "uuid() as id")
    writer = rows.writeStream.foreachBatch(each if others else functions[0]).trigger(availableNow=True)
    writer.option("checkpointLocation", str(first.checkpoint)).start().awaitTermination()
    for cell, function in zip(cells, functions, strict=True):
        function.close()
        settle(cell)


def rename(session: SparkSession, cell: StreamCell) -> None:
    """One more file for a function of another name: it is refused, and goes on by `adopt` as it is told."""
    from pyspark.errors import StreamingQueryException

    put_file(cell.folder, MORE_LINES)
    renamed = replace(cell, name="renamed", query=cell.name)
    try:
        over_files(session, renamed)
    except StreamingQueryException as error:
        print(error, file=sys.stderr)
        adopt = re.search(r"adopt='(\S+:1)'", str(error))
        assert adopt is not None
        over_files(session, replace(renamed, adopt=adopt[1]))


def by_clock(session: SparkSession, cell: StreamCell) -> None:
    """Some micro-batches with rows."""
    from pyspark.errors import StreamingQueryException

    done: list[int] = []
    function = function_of(cell, None, lambda result: done.append(result.rows))

    def some(frame: DataFrame, batch: int) -> None:
        if sum(rows > 0 for rows in done) >= RATE_BATCHES:
            raise EnoughError
        function(frame, batch)

    stream = session.readStream.format("rate").option("rowsPerSecond", ROWS_PER_SECOND).load()
    writer = stream.selectExpr("cast(value as string) as value", "uuid() as id").writeStream.foreachBatch(some)
    try:
        writer.option("checkpointLocation", str(cell.checkpoint)).start().awaitTermination()
    except StreamingQueryException as error:
        if "EnoughError" not in str(error):
            raise
    function.close()
    settle(cell)


def main() -> None:
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
    match sys.argv[2]:
        case "rate":
            by_clock(session, cell)
        case "files":
            over_files(session, cell)
        case kind:
            over_files(session, cell, replace(cell.even, form=Form.TOPOLOGY))
            if kind == "renamed":
                rename(session, cell)


if __name__ == "__main__":
    main()
