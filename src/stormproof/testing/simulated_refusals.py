"""A simulated sink's table that refuses rows, and columns that cannot hold some: prepared files are real ones, and a commit
leaves out whole messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.sink import SinkInput, TaskContext, TaskWriter
from stormproof.core.storage.kept_files import kept_folder
from stormproof.sinks.limits import Limits
from stormproof.sinks.message_pairs import pairs_of
from stormproof.sinks.misfits import LeavingOutWriter
from stormproof.sinks.protocol import PreparedTransaction, RefusedRow
from stormproof.sinks.rejects import Part, Rejects, RowMessages
from stormproof.sinks.writer import FileWriter, ParquetTaskWriter
from stormproof.testing.faults import Chance, FaultKind

GROUPS_MAX: Final = 3
"""Rows of groups that all tables of a simulation refuse in one batch. A batch's job runs again for its refused groups some
few times (`stormproof.trident.recount`); then the batch is blocked, and no fault of a simulation needs an operator.
"""


class GroupRules:
    """Which rows of groups are refused, for all sinks of a simulation.

    It is drawn once for a row's values in a batch, as a constraint would have it: where the job runs again for its groups, a
    group that has the same messages is refused again.
    """

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._drawn = dict[tuple[FaultKind, str, int, str], bool]()
        self._refused = Counter[int]()

    def strikes(self, kind: FaultKind, sink: str, txid: int, row: pa.RecordBatch) -> bool:
        """Whether a sink's table refuses this one row of a batch."""
        values = repr(row.to_pylist()[0])
        key = (kind, sink, txid, values)
        if key not in self._drawn:
            may = self._refused[txid] < GROUPS_MAX
            self._drawn[key] = may and self._chance.strikes(kind, sink, lambda: f"a group's row {values}")
            self._refused[txid] += self._drawn[key]
        return self._drawn[key]


class RefusingTable:
    """What refuses rows of a sink, by chance, and the folder of the sink's prepared files.

    Under at-most-once (`tracked` is off) no row of a group is refused: its messages cannot be named, so that would block the
    batch, and no fault of a simulation needs an operator.
    """

    def __init__(
        self, sink: str, input_: SinkInput, chance: Chance, groups: GroupRules, *, tracked: bool, leaves_out: bool
    ) -> None:
        self._sink, self._input, self._chance, self._groups = sink, input_, chance, groups
        self._tracked, self._leaves_out = tracked, leaves_out
        self._has_groups = False
        self._open = ExitStack()
        self._folder = self._open.enter_context(kept_folder())

    def close(self) -> None:
        """Forget the files."""
        self._open.close()

    def open_task(self, context: TaskContext, schema: pa.Schema, limits: Limits) -> TaskWriter:
        """A writer of prepared files that name each row's messages; with `leaves_out`, without rows that do not fit."""
        folder = self._folder
        files = FileWriter(self._sink, folder, limits, input=self._input, names_messages=True)
        inner = files.open_task(context, schema)
        if not self._leaves_out:
            return inner

        def empty() -> TaskWriter:
            return ParquetTaskWriter(self._sink, folder, context, schema, empty=True)

        def misfits(rows: pa.RecordBatch, messages: pa.RecordBatch) -> list[tuple[int, str]]:
            # In per-message mode a group's row names its messages, and may have a single one.
            self._has_groups |= bool(pairs_of(messages)[3].any())
            found = dict(limits.check(rows))
            for place in range(rows.num_rows):
                if place not in found and self._does_not_fit(context.txid, rows.slice(place, 1)):
                    found[place] = "a simulated column cannot hold it"
            return sorted(found.items())

        return _MisfitsByChance(inner, limits, empty, misfits)

    def _does_not_fit(self, txid: int, row: pa.RecordBatch) -> bool:
        if self._has_groups:
            return self._groups.strikes(FaultKind.REJECT, self._sink, txid, row)
        return self._chance.strikes(FaultKind.REJECT, self._sink)

    def taken(self, transaction: PreparedTransaction) -> tuple[pa.Table, tuple[RefusedRow, ...]]:
        """The rows that the table takes, and those that it does not get: refused ones, and others of their messages.

        Raises:
            SinkRefused: rows of groups are refused.
        """
        where = f"sink {self._sink!r}, txid {transaction.txid}"
        rejects = Rejects(self._folder, transaction, transaction.rejects_max, where, self._input)
        messages = RowMessages(self._folder, transaction.files)
        asked = dict[int, bool]()
        again, kept = True, list[pa.RecordBatch]()
        while again:
            kept.clear()
            for part in rejects.kept():
                taken = np.ones(part.rows.num_rows, np.bool_)
                for place, number in enumerate(part.numbers.tolist()):
                    row = messages.place(part.file, number)
                    if row not in asked:  # a row that was taken once is taken again
                        asked[row] = self._refuses(transaction, messages, row, part, place)
                    if asked[row]:
                        taken[place] = False
                        rejects.add(part.row(place).refused(None, "a simulated constraint"))
                kept.append(part.only(taken).rows)
            again = rejects.close()
        return pa.Table.from_batches(kept, self._input.schema), rejects.rows()

    def _refuses(
        self, transaction: PreparedTransaction, messages: RowMessages, row: int, part: Part, place: int
    ) -> bool:
        if transaction.rejects_max is None:
            return False
        if messages.unnamed[row] or transaction.of_groups:
            rows = part.rows.slice(place, 1)
            return self._tracked and self._groups.strikes(FaultKind.REFUSE, self._sink, transaction.txid, rows)
        shown = ", ".join(str(number) for number, _ in messages.of_row(row))
        return self._chance.strikes(FaultKind.REFUSE, self._sink, lambda: f"a row of message {shown}")


class _MisfitsByChance(LeavingOutWriter):
    """Leaves out rows that this function finds in a record batch with its message columns."""

    def __init__(
        self,
        inner: TaskWriter,
        limits: Limits,
        empty: Callable[[], TaskWriter],
        misfits: Callable[[pa.RecordBatch, pa.RecordBatch], Sequence[tuple[int, str]]],
    ) -> None:
        super().__init__(inner, limits, empty)
        self._found = misfits

    def misfits(self, rows: pa.RecordBatch, messages: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """By the function."""
        return self._found(rows, messages)
