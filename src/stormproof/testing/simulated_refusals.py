"""A simulated sink's table that refuses rows: prepared files are real ones, and a commit leaves out whole messages."""

from __future__ import annotations

import tempfile

import numpy as np
import pyarrow as pa

from stormproof.core.sink import SinkInput, TaskContext, TaskWriter
from stormproof.sinks.limits import Limits
from stormproof.sinks.protocol import PreparedTransaction, RefusedRow
from stormproof.sinks.rejects import Rejects, RowMessages
from stormproof.sinks.writer import FileWriter
from stormproof.testing.faults import Chance, FaultKind


class RefusingTable:
    """What refuses rows of a sink, by chance, and the folder of the sink's prepared files.

    Rows that stand for messages that are not known one by one (a group's results) are never refused: that would block the
    batch, and no fault of a simulation needs an operator.
    """

    def __init__(self, sink: str, input_: SinkInput, chance: Chance) -> None:
        self._sink, self._input, self._chance = sink, input_, chance
        self._folder = tempfile.TemporaryDirectory(prefix="stormproof-simulation-")

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()

    def open_task(self, context: TaskContext, schema: pa.Schema, limits: Limits) -> TaskWriter:
        """A writer of prepared files that name each row's messages."""
        files = FileWriter(self._sink, self._folder.name, limits, input=self._input, names_messages=True)
        return files.open_task(context, schema)

    def taken(self, transaction: PreparedTransaction) -> tuple[pa.Table, tuple[RefusedRow, ...]]:
        """The rows that the table takes, and those that it does not get: refused ones, and others of their messages."""
        where = f"sink {self._sink!r}, txid {transaction.txid}"
        rejects = Rejects(self._folder.name, transaction, transaction.rejects_max, where, self._input)
        messages = RowMessages(self._folder.name, transaction.files)
        asked = dict[int, bool]()
        again, kept = True, list[pa.RecordBatch]()
        while again:
            kept.clear()
            for part in rejects.kept():
                taken = np.ones(part.rows.num_rows, np.bool_)
                for place, number in enumerate(part.numbers.tolist()):
                    row = messages.place(part.file, number)
                    if row not in asked:  # a row that was taken once is taken again
                        asked[row] = self._refuses(transaction, messages, row)
                    if asked[row]:
                        taken[place] = False
                        rejects.add(part.row(place).refused(None, "a simulated constraint"))
                kept.append(part.only(taken).rows)
            again = rejects.close()
        return pa.Table.from_batches(kept, self._input.schema), rejects.rows()

    def _refuses(self, transaction: PreparedTransaction, messages: RowMessages, row: int) -> bool:
        if transaction.rejects_max is None or messages.unnamed[row]:
            return False
        shown = ", ".join(str(number) for number, _ in messages.of_row(row))
        return self._chance.strikes(FaultKind.REFUSE, self._sink, lambda: f"a row of message {shown}")
