"""Writers that stand in another one's place, and let no row of their own into a sink."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stormproof.core.sink import PreparedFile, SinkWriter, TaskContext, TaskWriter
from stormproof.sinks.preview import EXAMPLES_MAX, example_of


@dataclass(frozen=True, slots=True)
class WritesNothing:
    """The writer of a sink that holds a batch's messages already: it takes the rows, and writes and counts none of them.

    `of` is the sink's writer; None where there is none without opening the sink.
    """

    sink: str
    of: SinkWriter | None = None

    @property
    def names_messages(self) -> bool:
        """No: the columns would only be counted among the bytes."""
        return False

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """Every row will do."""
        del rows
        return ()

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer that makes no file."""
        del context, schema
        return _NoFile()

    def files_in(self) -> str | None:
        """The sink's folder."""
        return None if self.of is None else self.of.files_in()

    def resource(self) -> object | None:
        """What bolts may use in executors."""
        return None if self.of is None else self.of.resource()


class _NoFile:
    def write(self, rows: pa.RecordBatch) -> None:
        del rows

    def close(self) -> Sequence[PreparedFile]:
        return ()

    def discard(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Rehearsal(WritesNothing):
    """A writer that counts the rows that another one would refuse, and hands it all others. No row is refused to the caller.

    What it counted comes as one more `PreparedFile` of each task, which has no path.
    """

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task. Rows are checked when they are written."""
        assert self.of is not None
        return _RehearsedTask(self.of, self.of.open_task(context, schema))


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
