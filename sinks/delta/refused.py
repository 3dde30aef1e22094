"""What a commit leaves out of its transaction where a rule of the table refuses rows, and what it puts instead.

The table's log adopts files as a whole. So the rows that are left of a file are written into a new one, and the log entry
records each row that was left out: the driver that commits again is told the same.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Field, QueryBuilder, Schema
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction, RemoveAction

from stormproof.core.errors import SinkRefused
from stormproof.core.message import storable_text
from stormproof.core.sink import MESSAGE_COLUMNS, PreparedFile, SinkInput, SinkMode, TaskContext
from stormproof.sinks.delta.checks import RowRule, asking, plain_schema, rules_of
from stormproof.sinks.delta.log import FILES, REFUSED, REINSTATED, REJECTED, ROWS, SUPERSEDED
from stormproof.sinks.files import files_at
from stormproof.sinks.partitions import partition_values
from stormproof.sinks.protocol import PreparedTransaction, RefusedRow
from stormproof.sinks.rejects import LEFT_OUT_MAX, ROW_TEXT_MAX, Part, Rejects
from stormproof.sinks.staging import parse_prepared_name
from stormproof.sinks.writer import ParquetTaskWriter

RECORD_BYTES_MAX: Final = 1024 * 1024
"""Bytes of the refused rows in a log entry, compressed. Whoever reads the log reads them, too."""
TEXT_MAX: Final = 1_000
"""Characters of a refused row, as JSON, that are recorded."""

_FILE: Final = "_stormproof_file"
_ROW: Final = "_stormproof_row"


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


def name_messages(directory: str, transaction: PreparedTransaction) -> bool:
    """Whether each prepared file names the messages of its rows."""
    return all(_names_messages(os.path.join(directory, file.path)) for file in transaction.files)


def leave_out(
    table: DeltaTable, directory: str, transaction: PreparedTransaction, input_: SinkInput, where: str
) -> LeftOut | None:
    """Reject the messages of the rows that violate a rule of the table; None where no row does.

    The rows that are left are written and synced. Where the commit fails, their files go with the dead attempts'.

    Raises:
        SinkRefused: more messages are refused than may be rejected, or delta-rs cannot evaluate a constraint.
        StoreUnavailable: the machine lacks what the question takes.
    """
    rejects = Rejects(directory, transaction, transaction.rejects_max, where, input_)
    rules = [] if input_.mode is SinkMode.FOLD else rules_of(table, transaction.files)
    again = True
    while again:
        for row in _violating(table, transaction, rejects, rules, where):
            rejects.add(row)
        again = rejects.close()
    refused = tuple(replace(row, text=row.text[:TEXT_MAX]) for row in rejects.rows())
    if not refused:
        return None
    record = recorded(refused)
    if len(record) > RECORD_BYTES_MAX:
        raise SinkRefused(
            f"{where}: the table refuses {len(refused)} rows, which is more than a log entry records; the last for: "
            f"{refused[-1].error}. Nothing was written",
            rows=len(refused),
        )
    changed = {row.file for row in refused} if not input_.is_by_key else {file.path for file in transaction.files}
    new = _Rewritten(directory, {file.path: file for file in transaction.files if file.path in changed}, input_)
    written = new.written(rejects.kept())
    files = written
    files += tuple(file for file in transaction.files if file.path not in changed)
    return LeftOut(
        replace(transaction, files=files, rows=sum(file.rows for file in files)),
        refused,
        transaction.superseded - rejects.reinstated,
        rejects.reinstated,
        record,
        () if input_.is_by_key else written,
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


def _violating(
    table: DeltaTable, transaction: PreparedTransaction, rejects: Rejects, rules: Sequence[RowRule], where: str
) -> Iterator[RefusedRow]:
    """The rows that are not left out yet and violate a rule, each once, by the first one."""
    names = sorted(file.path for file in transaction.files)
    found = set[tuple[int, int]]()
    with tempfile.TemporaryDirectory(prefix="stormproof-check-") as folder:
        asked = _numbered(table, transaction, rejects.kept(), folder)
        for rule in rules:
            for file, number, row in _answers(asked, rule, where):
                if (file, number) in found:
                    continue
                found.add((file, number))
                text = json.dumps(row, default=str, ensure_ascii=True)[:ROW_TEXT_MAX]
                yield RefusedRow(names[file], number, text, None, storable_text(f"it violates {rule.text}"))


def _answers(asked: DeltaTable, rule: RowRule, where: str) -> Iterator[tuple[int, int, Mapping[str, object]]]:
    """File, number and values of each row that violates a rule; a batch of them is in memory at a time."""
    query = f"SELECT * FROM t WHERE ({rule.expression}) IS NOT TRUE ORDER BY {_FILE}, {_ROW} LIMIT {LEFT_OUT_MAX + 1}"
    with asking(rule, where):
        batches = iter(pa.RecordBatchReader.from_stream(QueryBuilder().register("t", asked).execute(query)))
    while True:
        with asking(rule, where):
            batch = next(batches, None)
        if batch is None:
            return
        for row in batch.to_pylist():
            yield int(row.pop(_FILE)), int(row.pop(_ROW)), row


def _numbered(table: DeltaTable, transaction: PreparedTransaction, parts: Iterator[Part], folder: str) -> DeltaTable:
    """A table in `folder` that has these rows, each with its file and its number in it."""
    columns = table.metadata().partition_columns if any(file.partition for file in transaction.files) else []
    numbers = [Field(name, PrimitiveType("long")) for name in (_FILE, _ROW)]
    made = DeltaTable.create(folder, Schema([*plain_schema(table).fields, *numbers]), partition_by=columns)
    files = sorted(transaction.files, key=lambda file: file.path)
    place = {file.path: number for number, file in enumerate(files)}
    added = list[AddAction | RemoveAction]()
    for at, part in enumerate(parts):
        rows = pa.Table.from_batches([part.rows])
        file = pa.array(np.full(rows.num_rows, place[part.file], np.int64))
        rows = rows.append_column(_FILE, file).append_column(_ROW, pa.array(part.numbers))
        path = os.path.join(folder, f"{at}.parquet")
        pq.write_table(rows, path, coerce_timestamps="us")
        values = partition_values(files[place[part.file]])
        added.append(AddAction(f"{at}.parquet", os.path.getsize(path), values, 0, data_change=True, stats="{}"))
    made.create_write_transaction(added, "append", made.schema(), columns)
    return DeltaTable(folder)


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """Writes the rows that are left of some prepared files into new ones: of an append one for each, else one for all."""

    directory: str
    files: Mapping[str, PreparedFile]
    input: SinkInput

    def written(self, parts: Iterator[Part]) -> tuple[PreparedFile, ...]:
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
        adopted = not self.input.is_by_key
        return ParquetTaskWriter(
            file.sink,
            self.directory,
            TaskContext(name.incarnation, name.txid, name.attempt, name.task),
            schema,
            private=not adopted,
            partition=file.partition,
            guarded=adopted,
            hashed=schema.names if adopted and file.content else (),
        )


def _closed(writers: dict[str, ParquetTaskWriter]) -> list[PreparedFile]:
    return [file for key in list(writers) for file in writers.pop(key).close()]


def _names_messages(path: str) -> bool:
    with files_at(path).open_native(path) as opened, pq.ParquetFile(opened) as parquet:
        return MESSAGE_COLUMNS.names[0] in parquet.schema_arrow.names
