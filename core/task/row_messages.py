"""Names the messages of rows: so a sink can tell whose row its table refuses, and store who made a row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import UsageError
from stormproof.core.contract.sink import MESSAGE_COLUMNS
from stormproof.core.contract.source import NumberIds, ShownIds
from stormproof.core.tracking.share import MANY, MANY_ORIGIN, Anchors, MessageTable


def with_columns(rows: pa.RecordBatch, messages: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with these columns behind their own."""
    schema = pa.schema([*rows.schema, *messages.schema])
    return pa.RecordBatch.from_arrays([*rows.columns, *messages.columns], schema=schema)


def single_messages(messages: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Number and origin of each row's one message; the number is NULL where a row has none, or several."""
    number, origin, others = messages.columns
    if others.null_count < len(others):
        number = pc.if_else(pc.is_null(others), number, None)
    return number, origin


class MessageIds:
    """The id, as people see it, of the message of each row; made for all rows when the first is asked for."""

    def __init__(self, anchors: Anchors, messages: MessageTable, shown: ShownIds | None) -> None:
        self._anchors, self._messages, self._shown = anchors, messages, shown or NumberIds()
        self._ids: list[str | None] | None = None

    def of_row(self, row: int) -> str:
        """The id of a row's message.

        Raises:
            UsageError: the row was made of several messages, or of none that is known.
        """
        ids = self._ids
        if ids is None:
            columns = message_columns(self._anchors, self._messages)
            ids = self._ids = self._shown.shown(*single_messages(columns)).to_pylist()
        found = ids[row]
        if found is None:
            raise UsageError(
                "context.message_id: this tuple was made of several messages, or of none that is known (behind a group, a "
                "join or a bolt that anchors so); use the tuple's own key"
            )
        return found


def message_columns(anchors: Anchors, messages: MessageTable) -> pa.RecordBatch:
    """The `MESSAGE_COLUMNS` of rows with these anchors."""
    number, origin = _named(anchors, messages)
    if anchors.row is None:
        first = [_of(number, origin == MANY_ORIGIN), pa.array(origin)]
        others = pa.nulls(anchors.rows, MESSAGE_COLUMNS.field(2).type)
    else:
        starts = np.searchsorted(anchors.row, np.arange(anchors.rows + 1))
        counts = np.diff(starts)
        none = counts == 0
        at = np.where(none, 0, starts[:-1])
        if not len(number):
            number, origin = np.zeros(1, np.int64), np.zeros(1, np.int64)
        first = [_of(number[at], none | (origin[at] == MANY_ORIGIN)), _of(origin[at], none)]
        others = _others(anchors.row, starts, counts, number, origin)
    return pa.RecordBatch.from_arrays([*first, others], schema=MESSAGE_COLUMNS)


def _named(anchors: Anchors, messages: MessageTable) -> tuple[Rows, Rows]:
    """Number and origin of each pair's message; `MANY_ORIGIN` where it stands for many."""
    numbers = anchors.messages()
    many = numbers == MANY
    if not messages.number or many.all():
        return np.zeros(len(numbers), np.int64), np.full(len(numbers), MANY_ORIGIN, np.int64)
    known = np.where(many, 0, numbers) if many.any() else numbers
    return messages.ids(known), np.where(many, MANY_ORIGIN, messages.origins(known))


def _of(values: Rows, missing: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.array(values, mask=missing) if missing.any() else pa.array(values)


def _others(row: Rows, starts: Rows, counts: Rows, number: Rows, origin: Rows) -> pa.Array:
    """Number and origin of each message of a row but its first, in turn; NULL where it has no other."""
    kind = MESSAGE_COLUMNS.field(2).type
    if not (counts > 1).any():
        return pa.nulls(len(counts), kind)
    further = np.ones(len(row), np.bool_)
    further[starts[:-1][counts > 0]] = False
    flat = np.stack([number[further], origin[further]], axis=1).reshape(-1)
    ends = np.concatenate([[0], np.cumsum(2 * np.maximum(counts - 1, 0))]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(flat), mask=pa.array(counts <= 1))
    return lists.cast(kind)
