"""Spark as committer: for tables that delta-rs cannot write. Position, evidence and claims stay with the table's log.

Each table has a session of its own on the process's Spark: the settings by which Delta knows a transaction belong to a
session, and any other write in it would be taken for a repeat.

One commits at a time to such a table: see `opening`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from stormproof.core.base.errors import FatalError, SinkRefused
from stormproof.core.contract.sink import PreparedFile, SinkInput
from stormproof.core.engine.spark_error import condition_of, fault_told_by_spark, what_happened
from stormproof.sinks.delta.features import GENERATED
from stormproof.sinks.delta.log import COMMIT_RETRIES_MAX, DeltaLog, Label
from stormproof.sinks.delta.versions import OTHERS_CHANGED
from stormproof.sinks.prepare.staging import open_prepared
from stormproof.sinks.prepare.writer import partition_values
from stormproof.sinks.rows import merge_sql
from stormproof.sinks.rows.by_key import compared_columns
from stormproof.sinks.rows.merge_sql import SPARK

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


log = logging.getLogger("stormproof.sink")

EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
_TXN_APPLICATION: Final = "spark.databricks.delta.write.txnAppId"
_TXN_VERSION: Final = "spark.databricks.delta.write.txnVersion"
METADATA: Final = "spark.databricks.delta.commitInfo.userMetadata"

_SETTINGS: Final = {
    "spark.databricks.delta.formatCheck.enabled": "false",  # prepared files may lie in a table's folder
    "spark.databricks.delta.maxCommitAttempts": str(COMMIT_RETRIES_MAX),
    "spark.databricks.delta.snapshotPartitions": "2",  # with the default of 50 a commit takes ten times as long
    "spark.sql.ansi.enabled": "true",  # a sum that overflows is an error
    "spark.sql.storeAssignmentPolicy": "ANSI",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.inferTimestampNTZ.enabled": "true",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",  # before Spark 4.0 it refuses dates before 1582 by default
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # Arrow reads the default, INT96, as 1677 to 2262
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.decimalOperations.allowPrecisionLoss": "false",  # a sum keeps its digits behind the point
}

_REPARTITIONS: Final = "spark.databricks.delta.merge.repartitionBeforeWrite.enabled"
"""A MERGE then names the partition columns without quotes."""
_SKIPS_EMPTY: Final = "spark.databricks.delta.skipRecordingEmptyCommits"
_RETENTION_CHECK: Final = "spark.databricks.delta.retentionDurationCheck.enabled"
_LISTING_TASKS: Final = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
"""VACUUM lists folders in so many tasks, however few folders there are; by default in 10,000."""
_SHUFFLE_TASKS: Final = "spark.sql.shuffle.partitions"
_SIZES: Final = ("spark.databricks.delta.optimize.minFileSize", "spark.databricks.delta.optimize.maxFileSize")

_ROWS: Final = "_stormproof_rows"
"""The view of the rows that a MERGE takes, in its table's own session."""
_PLACED: Final = "_stormproof_placed"
_TO_PUT: Final = "_stormproof_to_put"
"""Those of the table's rows with their files, and of the rows that a repair puts."""
KEPT: Final = "_stormproof_kept"
_GONE: Final = "_stormproof_gone"
_RANK: Final = "_stormproof_rank"
_NAME: Final = "_stormproof_name"
_ROW: Final = "_stormproof_number"
_SUPERSEDED: Final = "_stormproof_superseded"

_GLOB: Final = re.compile(r"[\\*?\[\]{}]")
"""What Hadoop takes for a pattern in a path."""

_PASSING: Final = ("DELTA_CONCURRENT", "DELTA_METADATA_CHANGED", "DELTA_PROTOCOL_CHANGED", "DELTA_MAX_COMMIT_RETRIES")
"""How the conditions of errors begin that another writer's commit caused: the next try may go through."""


class SparkCommitter:
    """Writes to one table through Spark."""

    def __init__(self, delta_log: DeltaLog, where: str) -> None:
        self._log = delta_log
        self._where = where
        self._session: SparkSession | None = None
        self._before: dict[str, str | None] = {}
        """The settings that the last use has changed, as they were."""

    def start(self) -> SparkSession:
        """This table's session; Spark is started where the process has none yet, which takes 5 to 25 seconds.

        Raises:
            SettingsError: Spark does not start.
            SinkRefused: the process's Spark was started without Delta.
        """
        if self._session is None:
            with spark_errors():
                self._session = _new_session(self._where)
        return self._session

    def append(self, frame: DataFrame, label: Label) -> None:
        """Append rows, as one version; of an empty frame the version holds the label alone.

        Spark asks for the columns by which the table is partitioned: those that the rows do not have are NULL.
        """
        from deltalake import DeltaTable
        from pyspark.sql.functions import lit

        table = DeltaTable(self._log.table)
        kinds = {field.name: field for field in table.schema().fields}
        for name in table.metadata().partition_columns:
            if name not in frame.columns and GENERATED not in kinds[name].metadata:
                frame = frame.withColumn(name, lit(None).cast(self.no_rows([name]).schema[name].dataType))
        with self.labelled(label):
            frame.write.format("delta").mode("append").save(self._log.table)

    def merge(self, frame: DataFrame, input_: SinkInput, label: Label) -> None:
        """MERGE rows by their keys, as one version: see `versions.merge_rows`."""
        added = {merge_sql.spark_quoted(name): SPARK.both(name)[1] for name in input_.schema.names}
        changed = [f"{name} = {value}" for name, value in merge_sql.assignments(input_, SPARK).items()]
        later = merge_sql.later_condition(input_, SPARK)
        update = (
            f"WHEN MATCHED{f' AND {later}' if later else ''} THEN UPDATE SET {', '.join(changed)} " if changed else ""
        )
        more = {_REPARTITIONS: "false"} if self._has_odd_partition() else {}
        with self.labelled(label, None, more) as session:
            frame.createOrReplaceTempView(_ROWS)
            session.sql(
                f"MERGE INTO {self._sql_name} t USING {_ROWS} s ON {merge_sql.same_key(input_, SPARK)} {update}"
                f"WHEN NOT MATCHED THEN INSERT ({', '.join(added)}) VALUES ({', '.join(added.values())})"
            )
            session.catalog.dropTempView(_ROWS)

    def write_doubled(self, input_: SinkInput, file: str, to: str) -> None:
        """Write the rows of keys that come more than once to Parquet in a folder, each with the path of its `file`."""
        keys = ", ".join(map(merge_sql.spark_quoted, input_.keys))
        names = ", ".join(f"t.{merge_sql.spark_quoted(name)}" for name in (*input_.schema.names, file))
        with self.labelled(None) as session:
            self._view_placed(file)
            session.sql(
                f"SELECT {names} FROM {_PLACED} t LEFT SEMI JOIN (SELECT {keys} FROM {_PLACED} GROUP BY {keys} "
                f"HAVING count(*) > 1) s ON {merge_sql.same_key(input_, SPARK)}"
            ).coalesce(1).write.parquet(to)

    def leave_kept(self, input_: SinkInput, file: str, known: str, metadata: Mapping[str, str]) -> None:
        """Leave one row of each key that is in the Parquet file `known`, in one version: the one that is `KEPT` there, of a
        fold with its values there.

        Raises:
            OSError: other rows of these keys are in the table than in `known`, by their `file`; nothing was written.
        """
        from deltalake import DeltaTable

        fields = DeltaTable(self._log.table).schema().fields
        names = {field.name: merge_sql.spark_quoted(field.name) for field in fields}
        put = [names[field.name] for field in fields if GENERATED not in field.metadata]
        keys = {merge_sql.spark_quoted(key): f"_stormproof_key_{number}" for number, key in enumerate(input_.keys)}
        folded = merge_sql.written_where_held(input_) if input_.folds else ()
        alike = () if input_.folds else map(merge_sql.spark_quoted, compared_columns(input_))
        first = "".join(f"t.{name} <=> s.{name} DESC, " for name in alike)
        same, placed = merge_sql.same_key(input_, SPARK), ", ".join((*keys, file))
        more = {_REPARTITIONS: "false"} if self._has_odd_partition() else {}
        with self.labelled(None, metadata, more) as session:
            self._view_placed(file)
            rows = session.read.parquet(_GLOB.sub(r"\\\g<0>", known))
            rows.createOrReplaceTempView(_ROWS)
            values = (f"{'s' if name in folded else 't'}.{quoted}" for name, quoted in names.items())
            # A key's kept row comes twice: by its key, to delete what is there, and by no key, to be inserted. A file never
            # gets further rows: as long as it has as many of a key as it had, they are the same.
            session.sql(
                f"WITH there AS (SELECT t.* FROM {_PLACED} t LEFT SEMI JOIN {_ROWS} s ON {same}), "
                f"found AS (SELECT {', '.join(values)}, row_number() OVER "
                f"(PARTITION BY {', '.join(f't.{key}' for key in keys)} ORDER BY {first}t.{file}) AS {_RANK} "
                f"FROM there t JOIN {_ROWS} s ON {same} AND s.{KEPT}) "
                f"SELECT *, {', '.join(f'IF({_GONE}, {key}, NULL) AS {name}' for key, name in keys.items())} "
                f"FROM found LATERAL VIEW explode(array(true, false)) g AS {_GONE} "
                f"WHERE {_RANK} = 1 AND (SELECT count(*) FROM there) = {rows.count()} AND "
                f"(SELECT count(*) FROM (SELECT {placed} FROM there EXCEPT ALL SELECT {placed} FROM {_ROWS})) = 0"
            ).createOrReplaceTempView(_TO_PUT)
            (done,) = session.sql(
                f"MERGE INTO {self._sql_name} t USING {_TO_PUT} s "
                f"ON {' AND '.join(f't.{key} = s.{name}' for key, name in keys.items())} "
                f"WHEN MATCHED THEN DELETE WHEN NOT MATCHED AND NOT s.{_GONE} THEN INSERT ({', '.join(put)}) "
                f"VALUES ({', '.join(f's.{quoted}' for quoted in put)})"
            ).collect()
            for view in (_ROWS, _PLACED, _TO_PUT):
                session.catalog.dropTempView(view)
        if not done["num_inserted_rows"]:
            raise OSError(f"{OTHERS_CHANGED}: rows of the keys that come more than once")

    def _view_placed(self, file: str) -> None:
        """Make the view `_PLACED` of the table's rows, each with the path of its file as `file`."""
        from pyspark.sql.functions import col

        self.rows().select("*", col("_metadata.file_path").alias(file)).createOrReplaceTempView(_PLACED)

    def _has_odd_partition(self) -> bool:
        from deltalake import DeltaTable

        names = DeltaTable(self._log.table).metadata().partition_columns
        return any("." in name or "`" in name for name in names)

    def restore(self, version: int, metadata: Mapping[str, str]) -> None:
        """RESTORE the table to a version."""
        with self.labelled(None, metadata) as session:
            session.sql(f"RESTORE TABLE {self._sql_name} TO VERSION AS OF {version}")

    def compact(self, metadata: Mapping[str, str], target_bytes: int | None) -> None:
        """OPTIMIZE: small files become large ones, in one version; of a clustered table by its clustering."""
        sizes: dict[str, str] = {} if target_bytes is None else {name: str(target_bytes) for name in _SIZES}
        with self.labelled(None, metadata, sizes) as session:
            session.sql(f"OPTIMIZE {self._sql_name}")

    def vacuum(self, retained_hours: int | None, *, dry_run: bool) -> list[str]:
        """VACUUM; returns the paths of the files that go. They are removed in a second pass, so that they can be named."""
        hours = "" if retained_hours is None else f" RETAIN {retained_hours} HOURS"
        tasks = str(4 * self.start().sparkContext.defaultParallelism)
        more = {_RETENTION_CHECK: "false", _LISTING_TASKS: tasks, _SHUFFLE_TASKS: tasks}
        with self.labelled(None, {}, more) as session:
            found = session.sql(f"VACUUM {self._sql_name}{hours} DRY RUN").collect()
            if not dry_run:
                session.sql(f"VACUUM {self._sql_name}{hours}").collect()
        return [str(row[0]) for row in found]

    def set_property(self, name: str, value: str) -> None:
        """Set a table property."""
        with self.labelled(None, {}) as session:
            session.sql(
                f"ALTER TABLE {self._sql_name} SET TBLPROPERTIES ({spark_literal(name)} = {spark_literal(value)})"
            )

    def prepared_rows(
        self,
        directory: str,
        files: Sequence[PreparedFile],
        columns: Sequence[str],
        *,
        numbered: tuple[str, str] | None = None,
    ) -> DataFrame:
        """The rows of prepared files, without those that are superseded.

        `numbered` names two further columns, the name of each row's file and its number in it, and brings those, too.
        """
        from pyspark.sql.functions import col, lit

        types = {field.name: field.dataType for field in self.no_rows(columns).schema.fields}
        by_partition: dict[str, list[PreparedFile]] = {}
        for file in files:
            by_partition.setdefault(file.partition, []).append(file)
        frames: list[DataFrame] = []
        for partition in by_partition.values():
            paths = [os.path.join(directory, file.path) for file in partition]
            frame = self.start().read.parquet(*(_GLOB.sub(r"\\\g<0>", path) for path in paths))
            for name, value in partition_values(partition[0]).items():
                frame = frame.withColumn(name, lit(value).cast(types[name]))
            selected = [col(merge_sql.spark_quoted(name)) for name in columns]
            if numbered is None:
                frame = self._own(frame, directory, partition)
            else:
                places = ("_metadata.file_name", "_metadata.row_index")
                selected += [col(place).alias(name) for place, name in zip(places, numbered, strict=True)]
            frames.append(frame.select(*selected))
        return functools.reduce(lambda one, other: one.unionByName(other), frames)

    def _own(self, frame: DataFrame, directory: str, files: Sequence[PreparedFile]) -> DataFrame:
        """Without the rows that later ones of the same file supersede: its first ones."""
        from pyspark.sql.functions import broadcast, coalesce, col, lit

        superseded: list[tuple[str, int]] = []
        for file in files:
            with open_prepared(directory, file) as prepared:
                if prepared.superseded:
                    superseded.append((os.path.basename(file.path), prepared.superseded))
        if not superseded:
            return frame
        counts = self.start().createDataFrame(superseded, f"{_NAME} string, {_SUPERSEDED} long")
        frame = frame.withColumn(_NAME, col("_metadata.file_name")).withColumn(_ROW, col("_metadata.row_index"))
        frame = frame.join(broadcast(counts), _NAME, "left")
        return frame.where(col(_ROW) >= coalesce(col(_SUPERSEDED), lit(0)))

    def rows(self) -> DataFrame:
        """The table's rows."""
        return self.start().read.format("delta").load(self._log.table)

    def no_rows(self, columns: Sequence[str]) -> DataFrame:
        """The table's columns without a row."""
        return self.rows().select(*map(merge_sql.spark_quoted, columns)).limit(0)

    @property
    def _sql_name(self) -> str:
        return f"delta.{merge_sql.spark_quoted(self._log.table)}"

    @contextmanager
    def labelled(
        self, label: Label | None, metadata: Mapping[str, str] | None = None, more: Mapping[str, str] | None = None
    ) -> Generator[SparkSession]:
        """The session, in which Delta writes the label into the commit, with `more` settings.

        Those of the use before are put back here, and not at its end: a call into the JVM that a signal has cut short leaves
        its answer to the next one, which would take it for its own.

        Delta skips a commit silently whose version the table has already. Where it has, after an undo for example, the label
        goes without the identifier: that one stays as it is.
        """
        session = self.start()
        told = metadata if label is None else label.metadata
        settings = dict(more or {})
        if told:
            settings[METADATA] = json.dumps(dict(told))
        if label is not None:
            settings[_SKIPS_EMPTY] = "false"  # a version that has a label alone says something, too
        if label is not None and (label.known is None or label.known < label.version):
            settings |= {_TXN_APPLICATION: label.application, _TXN_VERSION: str(label.version)}
        with spark_errors():
            for name, old in self._before.items():
                session.conf.unset(name) if old is None else session.conf.set(name, old)
            self._before = {name: session.conf.get(name, None) for name in settings}
            for name, value in settings.items():
                session.conf.set(name, value)
            yield session


def spark_runs() -> bool:
    """Whether this process has a Spark. Asked of a process that never imported it, none is imported."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    return context is not None and context._active_spark_context is not None


def spark_of_process(where: str, why: str) -> SparkSession:
    """The process's Spark, with Delta; it is started where the process has none yet, which takes 5 to 25 seconds.

    Raises:
        SettingsError: Spark does not start.
        SinkRefused: it was started without Delta.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:  # pyright: ignore[reportPrivateUsage]
        from stormproof.core.engine.spark import spark_session
        from stormproof.core.start.settings import Settings

        log.info("%s: %s; Spark is starting, which takes 5 to 25 seconds", where, why)
        started = spark_session(Settings())
    else:
        started = SparkSession.builder.getOrCreate()
    if EXTENSION not in str(started.conf.get("spark.sql.extensions", "")):
        raise SinkRefused(
            f"{where}: {why}, and this process's session was started without Delta: set "
            f"spark.sql.extensions={EXTENSION} and spark.sql.catalog.spark_catalog="
            "org.apache.spark.sql.delta.catalog.DeltaCatalog before it starts, or let Stormproof start it"
        )
    return started


def _new_session(where: str) -> SparkSession:
    started = spark_of_process(where, "the table needs Spark to be written to")
    session = started.newSession()
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    session.conf.set("spark.sql.shuffle.partitions", str(started.sparkContext.defaultParallelism))
    return session


def spark_literal(text: str) -> str:
    """A text as SQL of Spark's writes it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@contextmanager
def spark_errors() -> Generator[None]:
    """Turn errors of Spark into those that a commit understands: see `versions.may_pass`.

    Raises:
        OSError: it may pass: another writer came first, or the machine lacks something.
        ValueError: the table refuses.
        FatalError: the JVM is gone.
    """
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        told = what_happened(str(error))
        condition = condition_of(error)
        if condition.startswith(_PASSING) or any(known in str(error)[:400] for known in _PASSING):
            raise OSError(f"{OTHERS_CHANGED}: {told}") from error
        if fault_told_by_spark(str(error), told) is not None:
            raise OSError(told) from error
        raise ValueError(told) from error
    except Py4JNetworkError as error:
        raise FatalError(
            f"Spark is gone: its JVM has died ({error}). Nothing is half written; start the run again, which reads from the "
            "table's log what was committed"
        ) from error
    except Py4JError as error:
        told = what_happened(str(error))
        if any(known in str(error) for known in ("ConcurrentModification", "Concurrent", "MetadataChanged")):
            raise OSError(f"{OTHERS_CHANGED}: {told}") from error
        raise OSError(told) if fault_told_by_spark(str(error), told) else ValueError(told) from error
