"""What a commit leaves out of its transaction where a rule of the table refuses rows, and what it puts instead.

The table's log adopts files as a whole. So the rows that are left of a file are written into a new one, and the log entry
records each row that was left out: the driver that commits again is told the same.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.errors import SinkRefused
from stormproof.core.sink import MESSAGE_COLUMNS, PreparedFile, SinkInput, TaskContext
from stormproof.core.storage.files import files_at
from stormproof.sinks.delta.asked_rows import Ask
from stormproof.sinks.delta.log import FILES, REFUSED, REINSTATED, REJECTED, ROWS, SUPERSEDED
from stormproof.sinks.protocol import PreparedTransaction, RefusedRow
from stormproof.sinks.rejects import Part, Rejects
from stormproof.sinks.staging import parse_prepared_name
from stormproof.sinks.totals import summed_columns
from stormproof.sinks.writer import ParquetTaskWriter

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


def name_messages(directory: str, transaction: PreparedTransaction) -> bool:
    """Whether each prepared file names the messages of its rows."""
    return all(_names_messages(os.path.join(directory, file.path)) for file in transaction.files)


def leave_out(
    directory: str, transaction: PreparedTransaction, input_: SinkInput, where: str, ask: Ask, *, adopted: bool
) -> LeftOut | None:
    """Reject the messages of misfits and of the rows that the table refuses; None where there are none.

    The rows that are left are written and synced, into files to be `adopted` or to be read. Where the commit fails, these go
    with the dead attempts'.

    Raises:
        GroupsRefused: the rows are groups, whose messages have parts in others.
        SinkRefused: more messages are refused than may be rejected, they are not known, or a rule cannot be evaluated.
        StoreUnavailable: the machine lacks what the question takes.
    """
    rejects = Rejects(directory, transaction, transaction.rejects_max, where, input_)
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
            f"{where}: the table refuses {len(refused)} rows, which is more than a log entry records; the last for: "
            f"{refused[-1].error}. Nothing was written",
            rows=len(refused),
        )
    changed = {row.file for row in refused} if not input_.is_by_key else {file.path for file in transaction.files}
    new = _Rewritten(
        directory, {file.path: file for file in transaction.files if file.path in changed}, input_, adopted
    )
    written = new.written(rejects.kept())
    files = written
    files += tuple(file for file in transaction.files if file.path not in changed)
    return LeftOut(
        replace(transaction, files=files, rows=sum(file.rows for file in files)),
        refused,
        transaction.superseded - rejects.reinstated,
        rejects.reinstated,
        record,
        written if adopted else (),
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
    adopted: bool

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
        return ParquetTaskWriter(
            file.sink,
            self.directory,
            TaskContext(name.incarnation, name.txid, name.attempt, name.task),
            schema,
            private=not self.adopted,
            partition=file.partition,
            guarded=self.adopted,
            hashed=schema.names if self.adopted and file.content else (),
            summed=summed_columns(self.input.folds),
        )


def _closed(writers: dict[str, ParquetTaskWriter]) -> list[PreparedFile]:
    return [file for key in list(writers) for file in writers.pop(key).close()]


def _names_messages(path: str) -> bool:
    with files_at(path).open_native(path) as opened, pq.ParquetFile(opened) as parquet:
        return MESSAGE_COLUMNS.names[0] in parquet.schema_arrow.names
