"""Which rows a simulated sink's table refuses, and which its columns cannot hold, by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from stormproof.core.contract.sink import TaskContext, TaskWriter
from stormproof.sinks.contract.protocol import PreparedTransaction
from stormproof.sinks.prepare.rejected_messages import LeavingOutWriter, Part, RowMessages, pairs_of
from stormproof.sinks.rows.limits import Limits
from stormproof.testing.faults import Chance, FaultKind

GROUPS_MAX: Final = 3
"""Rows of groups that all tables of a simulation refuse in one batch. A batch's job runs again for its refused groups some
few times (`stormproof.trident.driver.recovery`); then the batch is blocked, and no fault of a simulation needs an operator.
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


class Refusals:
    """Which rows of a sink are refused, by chance.

    Under at-most-once (`tracked` is off) no row of a group is refused: its messages cannot be named, so that would block the
    batch, and no fault of a simulation needs an operator.
    """

    def __init__(self, sink: str, chance: Chance, groups: GroupRules, *, tracked: bool) -> None:
        self._sink, self._chance, self._groups, self._tracked = sink, chance, groups, tracked
        self._has_groups = False

    def leaving_out(
        self, inner: TaskWriter, limits: Limits, empty: Callable[[], TaskWriter], context: TaskContext
    ) -> TaskWriter:
        """A writer without rows that their columns cannot hold."""

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

    def rule(self, folder: str, transaction: PreparedTransaction) -> Callable[[Part], Sequence[str | None]]:
        """What says why each row of a part is refused, or None. A row that was taken once is taken again."""
        messages, asked = RowMessages(folder, transaction.files), dict[int, bool]()

        def reason(part: Part, place: int) -> str | None:
            row = messages.place(part.file, int(part.numbers[place]))
            if row not in asked:
                asked[row] = self._refuses(transaction, messages, row, part, place)
            return "a simulated constraint" if asked[row] else None

        return lambda part: [reason(part, place) for place in range(part.rows.num_rows)]

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
