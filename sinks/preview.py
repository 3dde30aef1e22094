"""What a sink would do with its table and with a batch's rows, found without a change: the sinks' part of a dry run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.message import storable_text
from stormproof.core.sink import PreparedFile, SinkWriter, TaskContext, TaskWriter
from stormproof.sinks.discards import discarded_in

EXAMPLES_MAX: Final = 5
"""Refused rows that are named for each sink; all of them are counted."""
_EXAMPLE_CHARACTERS: Final = 500


class TableAction(StrEnum):
    """What a start would do with a sink's table."""

    CREATE = "create"
    """There is none: it would be made."""
    USE = "use"
    """It is there, and stays as it is."""
    ALTER = "alter"
    """Columns would be added or widened (``schema_contract="evolve"``)."""
    REFUSE = "refuse"
    """It cannot take the rows: nothing would be written to any sink."""
    CANNOT_TELL = "cannot tell"
    """This kind of sink has no preview, or the table cannot be read."""


@dataclass(frozen=True, slots=True)
class TablePreview:
    """What would become of a sink's table, by the table as it is now.

    `writer` checks and counts rows, and keeps none of them; None where there is no writer without opening the sink.
    """

    action: TableAction
    why: str = ""
    """Why it is refused, or cannot be told."""
    changes: tuple[str, ...] = ()
    """What would be changed of its columns, each in a few words."""
    can_refuse: tuple[str, ...] = ()
    """The table's own rules that can refuse rows at the commit, each in a few words: a dry run does not try them."""
    table_id: str | None = None
    other_lives: tuple[str, ...] = ()
    """Other lives that wrote to the table or claimed it, named as `SinkIdentity.other_life` does."""
    dropped: str = ""
    """Of a table that its catalog does not have: why a start refuses it, if the ledger knows it."""
    writer: SinkWriter | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class RowsPreview:
    """What would be written to one sink."""

    rows: int = 0
    files: int = 0
    bytes: int = 0
    superseded: int = 0
    """Rows of an upsert that are not among `rows`, since another row of the batch is the last one of their key."""
    refused: int = 0
    """Rows that the writer's checks refuse; they are not among `rows`."""
    examples: tuple[str, ...] = ()
    """Some refused rows, or rows for which messages are rejected: column, value and reason, then the row."""
    rejected: int = 0
    """Messages that the sink would reject, since a column cannot hold a row of theirs (``"discard_row"``). No row of theirs
    is among `rows`; `files` and `bytes` count what is prepared.
    """
    blocked: str = ""
    """Why the sink would not commit such rows, which blocks the batch: the messages to reject are too many, or not known."""
    discarded: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many values of each column would be NULL, since the column cannot hold them (``"discard_value"``)."""

    @classmethod
    def of(cls, files: Sequence[PreparedFile]) -> RowsPreview:
        """What the tasks of a `Rehearsal` returned for one sink."""
        written = [file for file in files if file.path]
        reports = [json.loads(file.statistics) for file in files if not file.path]
        return cls(
            sum(file.rows for file in written),
            len(written),
            sum(file.bytes for file in written),
            sum(file.superseded for file in written),
            sum(int(report["refused"]) for report in reports),
            tuple(text for report in reports for text in report["examples"])[:EXAMPLES_MAX],
            discarded=discarded_in(written),
        )


def example_of(error: str, row: str) -> str:
    """A row that a table cannot hold, and why, as a dry run shows it."""
    return f"{storable_text(error)}; the row: {storable_text(row)[:_EXAMPLE_CHARACTERS]}"


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A writer that counts the rows that another one would refuse, and hands it all others. No row is refused to the caller.

    What it counted comes as one more `PreparedFile` of each task, which has no path.
    """

    of: SinkWriter

    @property
    def sink(self) -> str:
        """The sink's name."""
        return self.of.sink

    @property
    def names_messages(self) -> bool:
        """No: the columns would only be counted among the bytes."""
        return False

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """None: they are checked when they are written."""
        del rows
        return ()

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task."""
        return _RehearsedTask(self.of, self.of.open_task(context, schema))

    def files_in(self) -> str | None:
        """The folder of the other writer."""
        return self.of.files_in()

    def resource(self) -> object | None:
        """That of the other writer."""
        return self.of.resource()


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Stands for the writer of a sink that has none without being opened: it takes every row, and keeps and counts none."""

    sink: str

    @property
    def names_messages(self) -> bool:
        """No."""
        return False

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """None is refused, as far as can be told."""
        del rows
        return ()

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task."""
        del context, schema
        return _NoTask()

    def files_in(self) -> str | None:
        """It has no folder."""
        return None

    def resource(self) -> object | None:
        """Nothing."""
        return None


class _NoTask:
    def write(self, rows: pa.RecordBatch) -> None:
        del rows

    def close(self) -> Sequence[PreparedFile]:
        return ()

    def discard(self) -> None:
        return


class _RehearsedTask:
    def __init__(self, writer: SinkWriter, task: TaskWriter) -> None:
        self._writer = writer
        self._task = task
        self._refused = 0
        self._examples: list[str] = []

    def write(self, rows: pa.RecordBatch) -> None:
        refused = self._writer.check(rows)
        if refused:
            self._refused += len(refused)
            for row, text in refused[: EXAMPLES_MAX - len(self._examples)]:
                self._examples.append(example_of(text, repr(rows.slice(row, 1).to_pylist()[0])))
            kept = np.ones(rows.num_rows, np.bool_)
            kept[[row for row, _ in refused]] = False
            rows = rows.filter(pa.array(kept))
        self._task.write(rows)

    def close(self) -> Sequence[PreparedFile]:
        report = json.dumps({"refused": self._refused, "examples": self._examples})
        return (*self._task.close(), PreparedFile(self._writer.sink, "", 0, 0, "", report))

    def discard(self) -> None:
        self._task.discard()
