"""Rows that their columns cannot hold, left out and named: what ``schema_contract="discard_row"`` does in a task.

A task cannot know which other rows its message has. So the row is kept apart, in the description of the file, and the
commit leaves out what else the message has there (`stormproof.sinks.judge.rejected_messages`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.message import storable_text
from stormproof.core.contract.sink import MESSAGE_COLUMNS, PreparedFile, TaskWriter
from stormproof.core.task.account import shown_row
from stormproof.core.tracking.share import MANY_ORIGIN
from stormproof.sinks.contract.protocol import RefusedRow
from stormproof.sinks.rows.limits import Limits


def pairs_of(batch: pa.RecordBatch) -> tuple[Rows, Rows, Rows, npt.NDArray[np.bool_]]:
    """Row, number and origin of each pair, in order of the rows; and which rows have messages that are not known."""
    nothing, rows = np.empty(0, np.int64), np.arange(batch.num_rows, dtype=np.int64)
    if batch.num_columns == 1:
        return nothing, nothing, nothing, np.ones(batch.num_rows, np.bool_)
    number, origin, others = batch.columns
    has_number = np.asarray(number.is_valid())
    has_origin = np.asarray(origin.is_valid())
    named = has_number & has_origin
    unnamed = has_origin & ~has_number
    row = rows[named]
    numbers, origins = np.asarray(number.fill_null(0))[named], np.asarray(origin.fill_null(0))[named]
    if others.null_count == len(others):
        return row, numbers, origins, unnamed
    lengths = np.asarray(pc.list_value_length(others).fill_null(0)) // 2
    more = np.asarray(others.flatten()).reshape(-1, 2)
    more_row = np.repeat(rows, lengths)
    unnamed[more_row[more[:, 1] == MANY_ORIGIN]] = True
    known = more[:, 1] != MANY_ORIGIN
    row = np.concatenate([row, more_row[known]])
    order = np.argsort(row, kind="stable")
    numbers = np.concatenate([numbers, more[known, 0]])[order]
    origins = np.concatenate([origins, more[known, 1]])[order]
    return row[order], numbers, origins, unnamed


MESSAGES_MAX: Final = 1_001
"""Messages of misfits that a task names: one more than a commit may reject. Of each message the first row is named."""
TEXT_MAX: Final = 1_000
"""Characters of a row, and of the reason, that are recorded."""


@dataclass(frozen=True, slots=True)
class Misfits:
    """The misfits of some prepared files. Of those that are `unnamed` the messages are not known one by one."""

    rows: tuple[RefusedRow, ...] = ()
    unnamed: tuple[RefusedRow, ...] = ()
    more: bool = False
    """There are more messages than are named."""

    @staticmethod
    def of(files: Iterable[PreparedFile]) -> Misfits:
        """Those of these files."""
        found: dict[bool, list[RefusedRow]] = {False: [], True: []}
        more = False
        for file in files:
            told: dict[str, Any] = json.loads(file.misfits) if file.misfits else {}
            more |= bool(told.get("more"))
            for text, error, messages, unnamed in told.get("rows", ()):
                pairs = tuple((int(number), int(origin)) for number, origin in messages)
                found[bool(unnamed)].append(RefusedRow(file.path, -1, text, None, error, pairs))
        return Misfits(tuple(found[False]), tuple(found[True]), more)

    @property
    def all(self) -> tuple[RefusedRow, ...]:
        """Both."""
        return self.rows + self.unnamed

    def __bool__(self) -> bool:
        return bool(self.rows or self.unnamed or self.more)


class LeavingOutWriter:
    """A task's writer that leaves out rows which the limits do not allow; the first file says which.

    `empty` makes a writer whose file has no rows, for a task that has nothing else to write.
    """

    def __init__(self, inner: TaskWriter, limits: Limits, empty: Callable[[], TaskWriter]) -> None:
        self._inner = inner
        self._limits = limits
        self._empty = empty
        self._rows: list[tuple[str, str, list[tuple[int, int]], bool]] = []
        self._named = set[int]()
        self._more = False

    def write(self, rows: pa.RecordBatch) -> None:
        """Write the rows that fit; `rows` have the message columns."""
        own = rows.select([name for name in rows.schema.names if name not in MESSAGE_COLUMNS.names])
        messages = rows.select(MESSAGE_COLUMNS.names)
        bad = self.misfits(own, messages)
        if bad:
            self._leave_out(own, messages, bad)
            fit = np.ones(rows.num_rows, np.bool_)
            fit[[row for row, _ in bad]] = False
            rows = rows.filter(pa.array(fit))
        self._inner.write(rows)

    def misfits(self, rows: pa.RecordBatch, messages: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """The rows that their columns cannot hold, each with the reason: by the limits, whatever their messages are."""
        return self._limits.check(rows)

    def _leave_out(self, own: pa.RecordBatch, messages: pa.RecordBatch, bad: Sequence[tuple[int, str]]) -> None:
        places = [row for row, _ in bad]
        row, number, origin, unnamed = pairs_of(messages.take(pa.array(places, pa.int64())))
        starts = np.searchsorted(row, np.arange(len(bad) + 1))
        for at, (place, why) in enumerate(bad):
            start, stop = int(starts[at]), int(starts[at + 1])
            named = list(zip(number[start:stop].tolist(), origin[start:stop].tolist(), strict=True))
            if named and self._named.issuperset(one for one, _ in named):
                continue
            if len(self._rows) >= MESSAGES_MAX:
                self._more = True
                return
            self._named.update(one for one, _ in named)
            text, error = shown_row(own, place)[:TEXT_MAX], storable_text(why)[:TEXT_MAX]
            self._rows.append((text, error, named, bool(unnamed[at])))

    def close(self) -> Sequence[PreparedFile]:
        """Finish the files."""
        files = list(self._inner.close())
        if not self._rows:
            return files
        if not files:
            files = list(self._empty().close())
        files[0] = replace(files[0], misfits=json.dumps({"rows": self._rows, "more": self._more}))
        return files

    def discard(self) -> None:
        """Remove what was written: the task failed."""
        self._inner.discard()
