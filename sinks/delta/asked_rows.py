"""Which rows of a batch a Delta table refuses: delta-rs is asked of each row as the commit would leave it in the table.

A row that is added by key is joined with the one that the table holds: of folds, and of columns that the batch does not
write, only the merged row tells what a constraint says of it. What a function makes of both is computed before the
question. A row that loses against the held one is not asked, since the table never hears of it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Field, QueryBuilder, Schema
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction, RemoveAction

from stormproof.core.message import storable_text
from stormproof.core.sink import SinkInput
from stormproof.sinks.delta.checks import TableRule, asking, plain_schema, rules_of
from stormproof.sinks.delta.folds import fold_expression, quoted
from stormproof.sinks.delta.merge_sql import FITS, HELD, is_written, merged_columns, ranges, same_key
from stormproof.sinks.partitions import partition_values
from stormproof.sinks.protocol import PreparedTransaction, RefusedRow
from stormproof.sinks.rejects import LEFT_OUT_MAX, ROW_TEXT_MAX, Part, Rejects

Ask: TypeAlias = Callable[[Rejects], Iterator[RefusedRow]]
"""Which rows the table refuses of those that are not left out yet, each once, by the first rule that it violates."""

FILE: Final = "_stormproof_file"
ROW: Final = "_stormproof_row"
"""Where a row lies: the place of its prepared file among all in path order, and its number in it."""


def ask_delta_rs(
    table: DeltaTable, transaction: PreparedTransaction, input_: SinkInput, where: str, rejects: Rejects
) -> Iterator[RefusedRow]:
    """See `Ask`. The rows are read through a table of their own, in a folder that lasts as long as the question.

    Raises:
        SinkRefused: delta-rs cannot evaluate a constraint.
        StoreUnavailable: the machine lacks what the question takes.
    """
    names = sorted(file.path for file in transaction.files)
    found = set[tuple[int, int]]()
    with tempfile.TemporaryDirectory(prefix="stormproof-check-") as folder:
        asked = _Asked(table, input_, where)
        query = QueryBuilder().register("added", asked.numbered(transaction, rejects.kept(), folder))
        rows = "added"
        if input_.is_by_key:
            query = query.register("held", table)
            rows = f"({_merged(table, input_)}) AS merged"
        for rule in (*ranges(input_, quoted), *rules_of(table, transaction.files)):
            for file, number, row in _violations(query, rows, rule, where):
                if (file, number) in found:
                    continue
                found.add((file, number))
                yield refused_by(rule, names[file], number, row)


def refused_by(rule: TableRule, file: str, number: int, row: Mapping[str, object]) -> RefusedRow:
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked about: rows for this table."""

    table: DeltaTable
    input: SinkInput
    where: str

    def numbered(self, transaction: PreparedTransaction, parts: Iterator[Part], folder: str) -> DeltaTable:
        """A table in `folder` that has these rows, each with its file and its number in it."""
        columns = self.table.metadata().partition_columns if any(file.partition for file in transaction.files) else []
        numbers = [Field(name, PrimitiveType("long")) for name in (FILE, ROW)]
        made = DeltaTable.create(folder, Schema([*plain_schema(self.table).fields, *numbers]), partition_by=columns)
        files = sorted(transaction.files, key=lambda file: file.path)
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
    columns = merged_columns(
        (field.name for field in table.schema().fields),
        input_,
        quoted,
        lambda name, fold: fold_expression(name, input_.schema, fold, "TRY_CAST"),
        lambda name: "NULL",
    )
    text = (
        f"SELECT {', '.join(columns)}, s.{FILE}, s.{ROW} FROM added AS s "
        f"LEFT JOIN (SELECT *, true AS {HELD} FROM held) AS t ON {same_key(input_, quoted)}"
    )
    written = is_written(input_, quoted)
    return text if written is None else f"{text} WHERE {written}"
