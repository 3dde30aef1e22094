"""Writes the rows of a Spark DataFrame through sinks' writers, in one job, for micro-batches and jobs: rows are no messages.

It uses the public DataFrame API only. There are no shares here: each task's one summary row says what it wrote, and Spark
returns the summary of each partition's one successful task.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.taskcontext import TaskContext as SparkTask

from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import SettingsError, UsageError
from stormproof.core.base.machine_faults import classified, unpickled
from stormproof.core.base.message import storable_text
from stormproof.core.contract.schema import parse_schema
from stormproof.core.contract.sink import PreparedFile, SinkWriter, TaskContext, TaskWriter, files_to_json
from stormproof.core.engine.protocol import Engine
from stormproof.core.engine.shipping import packed
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.engine.spark_error import carried, raised_by_job
from stormproof.core.engine.spark_lines import spark_line
from stormproof.core.engine.spark_settings import CHECKSUMS, REQUIRED_BY_QUERIES
from stormproof.core.engine.worker import end_in_silence_when_idle
from stormproof.core.user_code.functions import nulls_refused

PROBLEMS_MAX: Final = 5
QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"
"""Spark sets this local property on the thread that calls `foreachBatch`."""

CHUNK_ROWS: Final = 16 * 1024
"""Rows are checked and written in chunks of at least this many, however small Spark's record batches are."""

_SUMMARY_DDL: Final = "rows bigint, files string, problems string"
_SUMMARY: Final = pa.schema([("rows", pa.int64()), ("files", pa.string()), ("problems", pa.string())])


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """What a job wrote. `problems` has a text for each row that a sink cannot hold; then `files` is empty."""

    rows: int
    files: tuple[PreparedFile, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _FramePart:
    """What every task is given. `context` is that of task 0."""

    writers: Mapping[str, SinkWriter]
    context: TaskContext
    schema: pa.Schema


class Frames(Protocol):
    """What is asked of the engine that hands out micro-batches: Spark, or a stand-in for it in a test."""

    def require(self, frame: Any) -> None:
        """Refuse a session without the settings that exactly-once rests on; raises SettingsError."""
        ...

    def require_batch(self, frame: Any) -> None:
        """Refuse what is no plain DataFrame of this process's session; raises UsageError."""
        ...

    def query_id(self, frame: Any) -> str:
        """The id of the streaming query that hands out this micro-batch; the query's checkpoint keeps it over restarts."""
        ...

    def plan(self, frame: Any, query: str, batch: int) -> str | None:
        """From what the engine planned a micro-batch of the running query: a line with its times, and the offsets at which
        each source ends. Another plan has another text. None where the query's checkpoint does not have the batch.
        """
        ...

    def schema(self, frame: Any) -> pa.Schema:
        """The micro-batch's columns."""
        ...

    def select(self, frame: Any, columns: Sequence[str]) -> Any:
        """The frame with these columns only."""
        ...

    def gathered(self, frame: Any, columns: Sequence[str]) -> Any:
        """The frame with all rows that are equal in these columns in one task; without columns, all rows in one."""
        ...

    def write(
        self, frame: Any, writers: Mapping[str, SinkWriter], context: TaskContext, schema: pa.Schema
    ) -> WrittenRows:
        """Write every row through every writer, as one job; columns are taken by name.

        Guarantee:
            The named files hold each row once, written and synced. Files of failed tasks are not named.

        Raises:
            JobFailed: a task failed for good, or the job was cancelled.
            MachineUnavailable, MachineUnfit: a task met a fault of its machine.
        """
        ...

    def read_in_vain(self, frame: Any) -> None:
        """Compute the rows and drop them: a stateful query writes its state while they are computed."""
        ...

    def engine(self, frame: Any, parallelism: int | None, worker_memory_mb: int | None) -> Engine:
        """The engine that runs a topology's jobs beside this query."""
        ...


def require_settings(session: SparkSession) -> None:
    """Refuse a session without the settings that a query's rows rest on, as far as this Spark has them.

    A setting that is not given has Spark's default.

    Raises:
        SettingsError: names the setting, what it is and what it has to be.
    """
    lacks = () if spark_line().sees_repeated_tasks else CHECKSUMS
    for key, value in REQUIRED_BY_QUERIES.items():
        if key in lacks:
            continue
        found = session.conf.get(key) if key.startswith("spark.sql.") else session.conf.get(key, "false")
        if found != value:
            raise SettingsError(
                f"the Spark session has {key}={found!r}; the rows of a query rest on {value!r}: set it before the session "
                "starts, or let stormproof.core.engine.spark.spark_session make the session",
                setting=key,
            )


class SparkFrames:
    """Micro-batches as Spark DataFrames, by `df.writeStream.foreachBatch`."""

    def require(self, frame: DataFrame) -> None:
        """Raises SettingsError."""
        require_settings(frame.sparkSession)

    def require_batch(self, frame: object) -> None:
        """Raises UsageError for a DataFrame of Spark Connect, a streaming one, and what is none."""
        is_connect = type(frame).__module__.startswith("pyspark.sql.connect.")
        if not isinstance(frame, DataFrame) or is_connect:
            what = "a DataFrame of Spark Connect" if is_connect else f"an object of {type(frame).__name__}"
            raise UsageError(
                f"once() takes a Spark DataFrame of a session in this process, not {what}"
                + ("; Spark Connect is not supported" if is_connect else "")
            )
        if frame.isStreaming:
            raise UsageError(
                "once() takes a DataFrame that ends, and this one is a stream: give the function to "
                "df.writeStream.foreachBatch(...) instead"
            )

    def query_id(self, frame: DataFrame) -> str:
        """Raises UsageError where the caller is no streaming query."""
        found = frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID_PROPERTY)
        if not found:
            raise UsageError(
                "this function is for df.writeStream.foreachBatch(...): Spark calls it, and names the query in the local "
                f"property {QUERY_ID_PROPERTY} of the calling thread. This thread has no such property. Threads must be "
                "pinned (Spark's default: PYSPARK_PIN_THREAD is not 'false'); Spark Connect is not supported"
            )
        return str(found)

    def plan(self, frame: DataFrame, query: str, batch: int) -> str | None:
        """From the offset log of the query's checkpoint, less the session's settings that Spark keeps there."""
        session: Any = frame.sparkSession
        running = session._jsparkSession.sharedState().activeStreamingQueries()
        offsets = running.get(session._jvm.java.util.UUID.fromString(query)).offsetLog()
        entry = offsets.get(batch)
        if not entry.isDefined():
            return None
        out = session._jvm.java.io.ByteArrayOutputStream()
        offsets.serialize(entry.get(), out)
        _, metadata, *ends = str(out.toString("UTF-8")).split("\n")
        times = {name: value for name, value in json.loads(metadata).items() if name != "conf"}
        return "\n".join([json.dumps(times, sort_keys=True), *ends])

    def schema(self, frame: DataFrame) -> pa.Schema:
        """Raises TopologyError where a column has a type that is not supported."""
        return parse_schema(frame.schema)

    def select(self, frame: DataFrame, columns: Sequence[str]) -> DataFrame:
        """A dot in a name is part of the name."""
        return frame.select([frame[f"`{column}`"] for column in columns])

    def gathered(self, frame: DataFrame, columns: Sequence[str]) -> DataFrame:
        """By an exchange; Spark's adaptive execution chooses the number of tasks."""
        return frame.repartition(*(frame[f"`{column}`"] for column in columns)) if columns else frame.repartition(1)

    def write(
        self, frame: DataFrame, writers: Mapping[str, SinkWriter], context: TaskContext, schema: pa.Schema
    ) -> WrittenRows:
        """One Spark job."""
        data = packed(_FramePart(writers, context, schema))
        try:
            summaries = frame.mapInArrow(functools.partial(_run, data), _SUMMARY_DDL).collect()
        except (PySparkException, Py4JError, OSError) as error:
            raise raised_by_job(error) from error
        return written_of([row.asDict() for row in summaries])

    def read_in_vain(self, frame: DataFrame) -> None:
        """By Spark's `noop` sink."""
        frame.write.format("noop").mode("overwrite").save()

    def engine(self, frame: DataFrame, parallelism: int | None, worker_memory_mb: int | None) -> Engine:
        """Its jobs take none of the session's settings for queries."""
        return SparkEngine(frame.sparkSession, parallelism, worker_memory_mb=worker_memory_mb)


def written_of(summaries: Sequence[Mapping[str, Any]]) -> WrittenRows:
    """What one job wrote, from its tasks' summary rows."""
    files = [PreparedFile(**file) for row in summaries for file in json.loads(row["files"])]
    problems = [text for row in summaries for text in json.loads(row["problems"])]
    rows = sum(row["rows"] for row in summaries)
    return WrittenRows(rows, () if problems else tuple(files), tuple(problems[:PROBLEMS_MAX]))


def _run(data: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One task, inside a worker."""
    end_in_silence_when_idle()
    task = SparkTask.get()
    if task is None:
        raise RuntimeError("not inside a Spark task")
    try:
        part: _FramePart = unpickled(data)
        yield write_part(batches, part.writers, replace(part.context, task=task.partitionId()), part.schema)
    except Exception as error:
        raise RuntimeError(carried(classified(error, "a task that writes a micro-batch"))) from error


def write_part(
    batches: Iterator[pa.RecordBatch], writers: Mapping[str, SinkWriter], context: TaskContext, schema: pa.Schema
) -> pa.RecordBatch:
    """One task: write these rows; returns its summary row."""
    rows, problems, files = 0, list[str](), list[PreparedFile]()
    with ExitStack() as undo:
        open_tasks: dict[str, TaskWriter] = {}
        for name, writer in writers.items():
            open_tasks[name] = writer.open_task(context, schema)
            undo.callback(open_tasks[name].discard)
        for chunk in _chunks(batches):
            problems += _write(_conformed(chunk, schema, problems), writers, open_tasks)
            rows += chunk.num_rows
            if problems:
                break
        else:
            files = [file for writer in open_tasks.values() for file in writer.close()]
            undo.pop_all()
    texts = json.dumps(problems[:PROBLEMS_MAX])
    return pa.RecordBatch.from_arrays(
        [pa.array([rows]), pa.array([json.dumps(files_to_json(files))]), pa.array([texts])], schema=_SUMMARY
    )


def _write(rows: pa.RecordBatch, writers: Mapping[str, SinkWriter], tasks: Mapping[str, TaskWriter]) -> list[str]:
    problems = [
        f"sink {name!r}: {text}; the row: {storable_text(repr(rows.slice(row, 1).to_pylist()[0]))[:500]}"
        for name, writer in writers.items()
        for row, text in writer.check(rows)[:PROBLEMS_MAX]
    ]
    if not problems:
        for task in tasks.values():
            task.write(rows)
    return problems


def _conformed(rows: pa.RecordBatch, schema: pa.Schema, problems: list[str]) -> pa.RecordBatch:
    """The rows with the schema's columns and types; NULLs that the schema refuses are added to `problems`."""
    columns: list[pa.Array] = []
    for field in schema:
        column = rows.column(field.name)
        if column.type != field.type:
            column = pc.cast(column, field.type)
        problems += [text for _, text in nulls_refused(column, field)[:PROBLEMS_MAX]]
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            rows += batch.num_rows
        if rows >= CHUNK_ROWS:
            yield _joined(held)
            held, rows = [], 0
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    (one,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return one
