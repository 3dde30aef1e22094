"""What the tests' JVMs are started with: most drivers on Spark live for seconds here.

``python tests/support/jvm.py`` archives the classes that a short driver on Spark loads. JVMs that start later map the
archive into memory, instead of reading, parsing and verifying each class again: a third of such a driver's processor time.
A JVM of another version, or with other jars, ignores the archive.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

VARIABLE = "SPARK_SUBMIT_OPTS"
ARCHIVE = Path(__file__).parents[2] / "build" / "tests.jsa"
# Code that is compiled once, and less well; a garbage collector without threads of its own. Such code has 48 MiB by default:
# a JVM that has run a hundred tests stops to compile.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
MAKING_S = 600


def options() -> str:
    """The options of a JVM of the tests, for Spark's variable."""
    return f"{SHORT_LIVED} -XX:SharedArchiveFile={ARCHIVE} {QUIET}" if ARCHIVE.exists() else SHORT_LIVED


def archive() -> None:
    """Make the archive: in a child, do what drivers do, and have its JVM write at its end what it loaded."""
    ARCHIVE.parent.mkdir(exist_ok=True)
    new = ARCHIVE.with_suffix(f".{os.getpid()}")
    environment = {**os.environ, VARIABLE: f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={new} {QUIET}"}
    with tempfile.TemporaryDirectory() as folder:
        # The JVM has the child's outputs, and ends after it: they are read to their ends.
        done = subprocess.run(
            [sys.executable, __file__, folder], env=environment, capture_output=True, timeout=MAKING_S, check=False
        )
    if done.returncode != 0 or not new.exists():
        sys.exit(f"no archive of classes: {done.stderr.decode(errors='replace')[-1000:]}")
    new.rename(ARCHIVE)


def stop(session: SparkSession, folder: Path) -> str | None:
    """Stop the session, whose JVM works in this folder. Gives what went wrong where its JVM has ended before."""
    from py4j.protocol import Py4JError

    process: subprocess.Popen[bytes] = session.sparkContext._gateway.proc  # type: ignore[union-attr]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # PySpark's own word of it
            session.stop()
    except (Py4JError, OSError) as error:
        crashes = [path.read_text(errors="replace")[:3_000] for path in sorted(folder.glob("hs_err*"))]
        end = f"Spark's JVM (process {process.pid}) did not stop its session: {error}; its status is {process.poll()}"
        return "\n".join([end, *crashes])
    return None


def drive(folder: Path) -> None:
    """A job, a Delta table, and a streaming query."""
    from stormproof.core.engine.spark import spark_session
    from stormproof.core.start.settings import Settings

    session = spark_session(Settings(master="local[2,4]", home=folder / "home"))
    table, lines = str(folder / "table"), folder / "lines"
    session.range(100).repartition(2).mapInArrow(_same, "id long").write.format("delta").save(table)
    assert session.read.format("delta").load(table).count() == 100
    lines.mkdir()
    (lines / "1").write_text("a\nb\n")
    stream = session.readStream.format("text").load(str(lines)).selectExpr("value", "uuid() as id")
    writer = stream.writeStream.foreachBatch(_collect).option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    session.stop()


def _same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _collect(frame: DataFrame, _: int) -> None:
    frame.mapInArrow(_same, "value string, id string").collect()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        archive()
    else:
        drive(Path(sys.argv[1]))
