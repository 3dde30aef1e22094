"""Which rows of a batch a Delta table refuses, and what a commit leaves out of its transaction and puts instead.

delta-rs, or Spark for tables that it commits to, is asked of each row as the commit would leave it in the table. A row that
is added by key is joined with the one that the table holds: of folds, and of columns that the batch does not write, only
the merged row tells what a constraint says of it. What a function makes of both is computed before the question. A row that
loses against the held one is not asked, since the table never hears of it. Spark reads the prepared files once, and
computes generated columns and defaults, too. What cannot be known before a commit is an identity column's value: a
constraint that names one, or a column generated from one, is not asked.

The table's log adds files as a whole. So the rows that are left of a file are written into a new one, and the log entry
records each row that was left out: the driver that commits again is told the same.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Field, QueryBuilder, Schema
from deltalake.exceptions import DeltaError
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction, RemoveAction

from stormproof.core.base.errors import SinkRefused, StoreUnavailable
from stormproof.core.base.message import storable_text
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import PreparedFile, SinkInput, SinkMode, TaskContext
from stormproof.core.storage.files import files_at
from stormproof.sinks.contract.protocol import PreparedTransaction, RefusedRow
from stormproof.sinks.delta.features import DEFAULT, GENERATED, IDENTITY
from stormproof.sinks.delta.log import FILES, REFUSED, REINSTATED, REJECTED, ROWS, SUPERSEDED
from stormproof.sinks.delta.spark import SparkCommitter, spark_errors
from stormproof.sinks.delta.versions import TableHead, may_pass, panics_as_errors, shown
from stormproof.sinks.prepare.rejected_messages import LEFT_OUT_MAX, ROW_TEXT_MAX, FileRows, Rejects
from stormproof.sinks.prepare.staging import Misfits, parse_prepared_name
from stormproof.sinks.prepare.writer import ParquetTaskWriter, partition_values
from stormproof.sinks.rows.content import summed_columns
from stormproof.sinks.rows.merge_sql import (
    DATAFUSION,
    FITS,
    HELD,
    SPARK,
    Quoted,
    is_written,
    merged_columns,
    quoted,
    same_key,
    spark_quoted,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CONSTRAINT: Final = "delta.constraints."

_TEXTS: Final = re.compile(r"'[^']*'|`[^`]*`")
"""Texts and quoted names in an expression."""


def checks_of(settings: Mapping[str, str]) -> dict[str, str]:
    """The constraints by their names, each an expression in SQL."""
    return {key.removeprefix(CONSTRAINT): text for key, text in settings.items() if key.startswith(CONSTRAINT)}


def dividing(settings: Mapping[str, str]) -> tuple[str, ...]:
    """The constraints whose expressions divide. delta-rs divides integers without their remainder, and Spark does not: the
    two would let different rows in.
    """
    return tuple(name for name, text in checks_of(settings).items() if "/" in _TEXTS.sub("", text))


@dataclass(frozen=True, slots=True)
class TableRule:
    """What a table asks of each row: an expression in SQL that has to be true, NULL is not. `text` names it in errors."""

    name: str
    expression: str
    text: str


def rules_of(table: TableHead, files: Sequence[PreparedFile], quote: Quoted = quoted) -> list[TableRule]:
    """The table's CHECK constraints, and those of its NOT NULL columns in which these files have NULL.

    `quote` quotes a column's name as the SQL does that is to be asked.
    """
    checks = [
        TableRule(name, expression, f"the table's CHECK constraint {name!r} ({expression})")
        for name, expression in checks_of(table.metadata().configuration).items()
    ]
    return checks + [
        TableRule(name, f"{quote(name)} IS NOT NULL", f"the NOT NULL of the table's column {name!r}")
        for name in dict.fromkeys(name for file in files for name in lacking(table, file))
    ]


def ranges(input_: SinkInput, quoted: Quoted) -> list[TableRule]:
    """What is asked of the sums in `merge_sql.merged_columns`."""
    sums = [name for name, fold in input_.folds.items() if fold is Fold.SUM]
    return [TableRule(name, quoted(FITS + name), f"the range of its column {name!r}") for name in sums]


def lacking(table: TableHead, file: PreparedFile) -> list[str]:
    """The table's NOT NULL columns in which a prepared file has NULL, by its statistics.

    They may be others than when the rows were checked.
    """
    values, nulls = partition_values(file), json.loads(file.statistics).get("nullCount", {})
    found = {name for name, value in values.items() if value is None}
    found |= {name for name, count in nulls.items() if isinstance(count, int) and count}
    return [field.name for field in table.schema().fields if not field.nullable and field.name in found]


def violates(table: TableHead, directory: str, files: Sequence[PreparedFile], where: str) -> bool:
    """Whether a row of prepared files violates a rule, be it one that a later row of its key supersedes.

    Raises:
        SinkRefused: delta-rs cannot evaluate a constraint.
        StoreUnavailable: the machine lacks what the question takes.
    """
    rules = rules_of(table, files)
    if not rules or not any(file.rows for file in files):
        return False
    # The files are read through a table of their own, in a folder that lasts as long as the question.
    with tempfile.TemporaryDirectory(prefix="stormproof-check-") as folder:
        asked = QueryBuilder().register("t", _table_of(table, directory, files, folder))
        for rule in rules:
            with asking(rule, where):
                counted = pa.table(asked.execute(f"SELECT count(*) AS n FROM t WHERE ({rule.expression}) IS NOT TRUE"))
            if counted.column("n")[0].as_py():
                return True
    return False


def may_reject(table: TableHead, input_: SinkInput) -> bool:
    """Whether a message can be rejected at a commit to this table: it has constraints, and the rows are whole ones. A fold's
    row is the result of several.
    """
    return input_.mode in (SinkMode.APPEND, SinkMode.UPSERT) and bool(checks_of(table.metadata().configuration))


@contextmanager
def asking(rule: TableRule, where: str) -> Generator[None]:
    """Ask delta-rs about a rule.

    Raises:
        SinkRefused: it cannot evaluate the expression.
        StoreUnavailable: the machine lacks what the question takes.
    """
    try:
        with panics_as_errors():
            yield
    except (DeltaError, OSError, ValueError) as error:
        if may_pass(error):
            raise StoreUnavailable(f"{where}: its constraints cannot be asked: {shown(error)}") from error
        raise SinkRefused(
            f"{where}: delta-rs cannot evaluate {rule.text}: {shown(error)}; nothing was written; give DeltaSink "
            "committer='spark'",
            constraint=rule.name,
        ) from error


def _table_of(table: TableHead, directory: str, files: Sequence[PreparedFile], folder: str) -> DeltaTable:
    """A table in `folder` that has these files, by links to them or copies, and nothing else."""
    # The files of an append are cut by partition; those of an upsert have all columns.
    columns = table.metadata().partition_columns if any(file.partition for file in files) else []
    made = DeltaTable.create(folder, plain_schema(table), partition_by=columns)
    there = [file for file in files if file.rows]
    for file in there:
        files_at(directory).bring(os.path.join(directory, file.path), os.path.join(folder, file.path))
    # Without statistics: a row is looked at, whatever they say of it.
    added: list[AddAction | RemoveAction] = [
        AddAction(f.path, f.bytes, partition_values(f), 0, data_change=True, stats="{}") for f in there
    ]
    made.create_write_transaction(added, "append", made.schema(), columns)
    return DeltaTable(folder)


def plain_schema(table: TableHead) -> Schema:
    """A table's columns, without what its log says of them beyond their types."""
    return Schema([Field(f.name, f.type) for f in table.schema().fields])


FILE: Final = "_stormproof_file"
ROW: Final = "_stormproof_row"
"""Where a row lies: the place of its prepared file among all in path order, and its number in it."""


def _told_by_delta_rs(judge: Judge, rejects: Rejects) -> Iterator[RefusedRow]:
    """The rows that the table refuses of those that are not left out yet, each once, by the first rule that it violates.
    They are read through a table of their own, in a folder that lasts as long as the question.

    Raises:
        SinkRefused: delta-rs cannot evaluate a constraint.
        StoreUnavailable: the machine lacks what the question takes.
    """
    transaction, input_ = judge.transaction, judge.input
    names = sorted(file.path for file in transaction.files)
    found = set[tuple[int, int]]()
    with tempfile.TemporaryDirectory(prefix="stormproof-check-") as folder:
        query = QueryBuilder().register("added", _numbered(judge, rejects.kept(), folder))
        rows = "added"
        if input_.is_by_key:
            query = query.register("held", judge.table)
            rows = f"({_merged(judge.table, input_)}) AS merged"
        for rule in (*ranges(input_, quoted), *rules_of(judge.table, transaction.files)):
            for file, number, row in _violations(query, rows, rule, judge.where):
                if (file, number) in found:
                    continue
                found.add((file, number))
                yield _refused_by(rule, names[file], number, row)


def _refused_by(rule: TableRule, file: str, number: int, row: Mapping[str, object]) -> RefusedRow:
    """A row that violates a rule of the table."""
    shown = {name: value for name, value in row.items() if not name.startswith(FITS)}
    text = json.dumps(shown, default=str, ensure_ascii=True)[:ROW_TEXT_MAX]
    return RefusedRow(file, number, text, None, storable_text(f"it violates {rule.text}"))


def _violations(
    query: QueryBuilder, rows: str, rule: TableRule, where: str
) -> Iterator[tuple[int, int, Mapping[str, object]]]:
    """File, number and values of each of these rows that violates a rule; a batch of them is in memory at a time."""
    text = f"SELECT * FROM {rows} WHERE ({rule.expression}) IS NOT TRUE ORDER BY {FILE}, {ROW} LIMIT {LEFT_OUT_MAX + 1}"
    with asking(rule, where):
        batches = iter(pa.RecordBatchReader.from_stream(query.execute(text)))
    while True:
        with asking(rule, where):
            batch = next(batches, None)
        if batch is None:
            return
        for row in batch.to_pylist():
            yield int(row.pop(FILE)), int(row.pop(ROW)), row


def _numbered(judge: Judge, parts: Iterator[FileRows], folder: str) -> DeltaTable:
    """A table in `folder` that has these rows, each with its file and its number in it."""
    files = sorted(judge.transaction.files, key=lambda file: file.path)
    columns = judge.table.metadata().partition_columns if any(file.partition for file in files) else []
    numbers = [Field(name, PrimitiveType("long")) for name in (FILE, ROW)]
    made = DeltaTable.create(folder, Schema([*plain_schema(judge.table).fields, *numbers]), partition_by=columns)
    place = {file.path: number for number, file in enumerate(files)}
    added = list[AddAction | RemoveAction]()
    for at, part in enumerate(parts):
        rows = pa.Table.from_batches([part.rows])
        file = pa.array(np.full(rows.num_rows, place[part.file], np.int64))
        rows = rows.append_column(FILE, file).append_column(ROW, pa.array(part.numbers))
        path = os.path.join(folder, f"{at}.parquet")
        pq.write_table(rows, path, coerce_timestamps="us")
        values = partition_values(files[place[part.file]])
        added.append(AddAction(f"{at}.parquet", os.path.getsize(path), values, 0, data_change=True, stats="{}"))
    made.create_write_transaction(added, "append", made.schema(), columns)
    return DeltaTable(folder)


def _merged(table: DeltaTable, input_: SinkInput) -> str:
    """The rows as the MERGE would leave them, in SQL."""
    columns = merged_columns((field.name for field in table.schema().fields), input_, DATAFUSION)
    text = (
        f"SELECT {', '.join(columns)}, s.{FILE}, s.{ROW} FROM added AS s "
        f"LEFT JOIN (SELECT *, true AS {HELD} FROM held) AS t ON {same_key(input_, DATAFUSION)}"
    )
    written = is_written(input_, DATAFUSION)
    return text if written is None else f"{text} WHERE {written}"


log = logging.getLogger("stormproof.sink")

_RULE: Final = "_stormproof_rule"


class _ToldBySpark:
    """As `_told_by_delta_rs`. All rows of the batch are asked at the first call, which is one job."""

    def __init__(self, judge: Judge, spark: SparkCommitter) -> None:
        self._judge, self._spark, self._told = judge, spark, set[tuple[str, int]]()
        self._table, self._input = judge.table, judge.input

    def __call__(self, rejects: Rejects) -> Iterator[RefusedRow]:
        """The rows that the table refuses of those that are given.

        Raises:
            StoreUnavailable: the machine lacks what the question takes.
        """
        for part in rejects.kept():
            wrong = self._wrong.get(part.file, {})
            for number in part.numbers[np.isin(part.numbers, list(wrong))].tolist():
                if (part.file, number) not in self._told:
                    self._told.add((part.file, number))
                    yield wrong[number]

    @functools.cached_property
    def _wrong(self) -> Mapping[str, Mapping[int, RefusedRow]]:
        """Each row that violates a rule, superseded ones among them, by its file and its number."""
        from pyspark.sql.functions import col, expr, struct, to_json

        judge, names = self._judge, self._input.schema.names
        files = judge.transaction.files
        paths = {os.path.basename(file.path): file.path for file in files}
        found: dict[str, dict[int, RefusedRow]] = {}
        try:
            with spark_errors():
                added = self._spark.prepared_rows(judge.directory, files, names, numbered=(FILE, ROW))
                frame = self._computed(self._merged(added))
                rules = self._rules()
                cases = " ".join(
                    f"WHEN NOT COALESCE({rule.expression}, false) THEN {i}" for i, rule in enumerate(rules)
                )
                if not cases:
                    return {}
                values = [spark_quoted(name) for name in frame.columns if name not in (FILE, ROW)]
                shown = to_json(struct(*values), {"ignoreNullFields": "false"})
                asked = frame.withColumn(_RULE, expr(f"CASE {cases} END")).where(col(_RULE).isNotNull())
                rows = asked.select(FILE, ROW, _RULE, shown).limit(LEFT_OUT_MAX + 1).collect()
        except OSError as error:
            raise StoreUnavailable(f"{judge.where}: its constraints cannot be asked: {error}") from error
        except ValueError as error:
            # The commit's own refusal, which names no row, is what the caller then has.
            log.warning("%s: which rows the table refuses cannot be told: %s", judge.where, error)
            return {}
        for file, number, rule, text in rows:
            path = paths[file]
            row = json.loads(text) if len(text) < ROW_TEXT_MAX else {"row": text[:ROW_TEXT_MAX]}
            found.setdefault(path, {})[number] = _refused_by(rules[rule], path, number, row)
        return found

    def _rules(self) -> list[TableRule]:
        return ranges(self._input, spark_quoted) + [rule for rule, told in self._table_rules() if told]

    def untold(self) -> str:
        """The constraints that are not asked, with the remedy, for the error of a batch that the table refuses; "": none."""
        names = [rule.text for rule, told in self._table_rules() if not told]
        return (
            f". Which rows {' and '.join(names)} refuses cannot be told before the commit: it names an identity column. "
            "Drop it, or have it name other columns; then retry the txid, or give up its rows at this sink"
            if names
            else ""
        )

    def _table_rules(self) -> list[tuple[TableRule, bool]]:
        """The table's rules, and of each whether it can be asked."""
        fields = self._table.schema().fields
        untold = [
            field.name
            for field in fields
            if any(key.startswith(IDENTITY) for key in field.metadata) and field.name not in self._input.schema.names
        ]
        untold += [field.name for field in fields if _names(str(field.metadata.get(GENERATED, "")), untold)]
        return [
            (rule, not _names(rule.expression, untold))
            for rule in rules_of(self._table, self._judge.transaction.files, spark_quoted)
        ]

    def _merged(self, added: DataFrame) -> DataFrame:
        """The rows as the MERGE would leave them, or as they are appended; without generated columns."""
        input_ = self._input
        if not input_.is_by_key:
            return added
        from pyspark.sql.functions import expr, lit

        table = [field.name for field in self._table.schema().fields if GENERATED not in field.metadata]
        held = self._spark.rows().select(*map(spark_quoted, table)).withColumn(HELD, lit(True))
        rows = added.alias("s").join(held.alias("t"), expr(same_key(input_, SPARK)), "left")
        if (written := is_written(input_, SPARK)) is not None:
            rows = rows.where(written)
        columns = merged_columns(table, input_, SPARK, self._default)
        return rows.selectExpr(*columns, f"s.{FILE}", f"s.{ROW}")

    def _computed(self, frame: DataFrame) -> DataFrame:
        """With the table's types, defaults of columns that are not there, and generated columns."""
        from pyspark.sql.functions import expr

        types = {field.name: field.dataType for field in self._spark.rows().schema.fields}
        generated: dict[str, str] = {}
        for field in self._table.schema().fields:
            name = field.name
            if name in frame.columns:
                frame = frame.withColumn(name, frame[spark_quoted(name)].cast(types[name]))
            elif GENERATED in field.metadata:
                generated[name] = str(field.metadata[GENERATED])
            else:
                frame = frame.withColumn(name, expr(self._default(name)).cast(types[name]))
        for name, expression in generated.items():
            frame = frame.withColumn(name, expr(expression).cast(types[name]))
        return frame

    def _default(self, name: str) -> str:
        field = next(field for field in self._table.schema().fields if field.name == name)
        return str(field.metadata.get(DEFAULT, "NULL"))


def _names(expression: str, columns: Sequence[str]) -> bool:
    """Whether an expression may name one of these columns."""
    return any(re.search(rf"(?i)(?<!\w){re.escape(name)}(?!\w)", expression) for name in columns)


RECORD_BYTES_MAX: Final = 1024 * 1024
"""Bytes of the refused rows in a log entry, compressed. Whoever reads the log reads them, too."""
TEXT_MAX: Final = 1_000
"""Characters of a refused row, as JSON, that are recorded."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a commit leaves out of its transaction. `put` is the transaction without these rows, in files of its own."""

    put: PreparedTransaction
    refused: tuple[RefusedRow, ...]
    superseded: int
    reinstated: int
    record: str
    written: tuple[PreparedFile, ...] = ()
    """Those of `put`'s files that are not in the ledger."""

    def metadata(self) -> dict[str, str]:
        """What the commit's own metadata says of it."""
        return {
            ROWS: str(self.put.rows),
            SUPERSEDED: str(self.superseded),
            REJECTED: str(len(self.refused)),
            REINSTATED: str(self.reinstated),
            REFUSED: self.record,
            FILES: json.dumps([{**asdict(file), "statistics": "{}"} for file in self.written]),
        }


@dataclass(frozen=True, slots=True)
class Judge:
    """Tells which rows of a transaction its table refuses, and what is to be put instead. `spark` commits to the table;
    None: delta-rs.

    Both answers are None where no row is to be left out, and raise:
        GroupsRefused: the rows are groups, whose messages have parts in others.
        SinkRefused: more messages are refused than may be rejected, they are not known, or a rule cannot be evaluated.
        StoreUnavailable: the machine lacks what the question takes.
    """

    table: DeltaTable
    directory: str
    transaction: PreparedTransaction
    input: SinkInput
    spark: SparkCommitter | None
    where: str

    def refused(self) -> LeftOut | None:
        """Before the rows are put: misfits, and where files are added the rows that violate a CHECK constraint, or a NOT
        NULL made since they were checked. A MERGE, and Spark, ask the table themselves, and `refused_since` comes after.
        """
        files = self.transaction.files
        asks = self._adds_files and may_reject(self.table, self.input)
        if Misfits.of(files) or (asks and violates(self.table, self.directory, files, self.where)):
            return self._left_out()
        return None

    def refused_since(self) -> LeftOut | None:
        """The same for a table that has just refused the rows as a whole; None, too, where it cannot be told which."""
        return None if self._adds_files else self._left_out()

    def untold(self) -> str:
        """Which of the table's rules cannot be asked, and the remedy, for the error of a refusal; "": none."""
        return "" if self.spark is None else _ToldBySpark(self, self.spark).untold()

    @property
    def _adds_files(self) -> bool:
        return self.spark is None and not self.input.is_by_key

    def _left_out(self) -> LeftOut | None:
        """The rows that are left are written and synced, into files to be added or to be read. Where the commit fails,
        these go with the dead attempts'.
        """
        transaction, input_ = self.transaction, self.input
        ask = functools.partial(_told_by_delta_rs, self) if self.spark is None else _ToldBySpark(self, self.spark)
        rejects = Rejects(self.directory, transaction, transaction.rejects_max, self.where, input_)
        again = True
        while again:
            for row in ask(rejects):
                rejects.add(row)
            again = rejects.close()
        refused = tuple(replace(row, text=row.text[:TEXT_MAX]) for row in rejects.rows())
        if not refused:
            return None
        record = recorded(refused)
        if len(record) > RECORD_BYTES_MAX:
            raise SinkRefused(
                f"{self.where}: the table refuses {len(refused)} rows, which is more than a log entry records; the last "
                f"for: {refused[-1].error}. Nothing was written",
                rows=len(refused),
            )
        changed = {row.file for row in refused} if not input_.is_by_key else {f.path for f in transaction.files}
        old = {file.path: file for file in transaction.files if file.path in changed}
        written = _Rewritten(self.directory, old, input_, self._adds_files).written(rejects.kept())
        files = written + tuple(file for file in transaction.files if file.path not in changed)
        return LeftOut(
            replace(transaction, files=files, rows=sum(file.rows for file in files)),
            refused,
            transaction.superseded - rejects.reinstated,
            rejects.reinstated,
            record,
            written if self._adds_files else (),
        )


def recorded(rows: tuple[RefusedRow, ...]) -> str:
    """Refused rows as a text for the log entry."""
    return base64.b64encode(zlib.compress(json.dumps([astuple(row) for row in rows]).encode())).decode()


def refused_rows(record: str) -> tuple[RefusedRow, ...]:
    """The rows of such a text; none of an empty one."""
    found = json.loads(zlib.decompress(base64.b64decode(record))) if record else []
    return tuple(
        RefusedRow(file, row, text, sqlstate, error, tuple((int(n), int(o)) for n, o in messages), with_others)
        for file, row, text, sqlstate, error, messages, with_others in found
    )


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """Writes the rows that are left of some prepared files into new ones: of an append one for each, else one for all."""

    directory: str
    files: Mapping[str, PreparedFile]
    input: SinkInput
    added: bool

    def written(self, parts: Iterator[FileRows]) -> tuple[PreparedFile, ...]:
        """The new files. Where it fails, they are removed."""
        writers = dict[str, ParquetTaskWriter]()
        done = list[PreparedFile]()
        try:
            for part in parts:
                if part.file not in self.files:
                    continue
                key = "" if self.input.is_by_key else part.file
                if key not in writers:
                    if not self.input.is_by_key:
                        done += _closed(writers)
                    writers[key] = self._writer(self.files[part.file], part.rows.schema)
                writers[key].write(part.rows)
            done += _closed(writers)
        except BaseException:
            for writer in writers.values():
                writer.discard()
            raise
        return tuple(done)

    def _writer(self, file: PreparedFile, schema: pa.Schema) -> ParquetTaskWriter:
        name = parse_prepared_name(os.path.basename(file.path))
        if name is None:
            raise SinkRefused(f"{file.path} is not the name of a prepared file; nothing was written", files=[file.path])
        return ParquetTaskWriter(
            file.sink,
            self.directory,
            TaskContext(name.incarnation, name.txid, name.attempt, name.task),
            schema,
            private=not self.added,
            partition=file.partition,
            guarded=self.added,
            hashed=schema.names if self.added and file.content else (),
            summed=summed_columns(self.input.folds),
        )


def _closed(writers: dict[str, ParquetTaskWriter]) -> list[PreparedFile]:
    return [file for key in list(writers) for file in writers.pop(key).close()]
