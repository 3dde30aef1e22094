"""The rows that travel between stages, and from the last stage to the driver.

A wire row is one of these: a chunk of one edge's rows for one task, notices for an acker, a control row
(`exchange`), or a task's summary for the driver (`report`). Arrow serialises the rows of a chunk, and an engine carries each
wire row as one string of bytes: nothing below converts any of their types.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, Words, pc
from stormproof.core.tracking.share import MANY, MANY_ORIGIN, Anchors, MessageTable, as_signed, as_words

CONTROL: Final = -1
SUMMARY: Final = -2
INIT: Final = -3
ACK: Final = -4

INIT_SCHEMA: Final = pa.schema([("id", pa.int64()), ("origin", pa.int64()), ("value", pa.int64())])
"""Notices that begin messages: `value` is the token."""
ACK_SCHEMA: Final = pa.schema([("id", pa.int64()), ("value", pa.int64())])
"""Notices of acked shares, at most one a message and task: `value` is their XOR."""

BYTES_MAX: Final = 2**31 - 16
"""The JVM has no longer array."""

_HEAD: Final = struct.Struct("!iiii")


@dataclass(frozen=True, slots=True)
class WireRow:
    """A row for the task `dest`, the `seq`-th of an edge, from the task `source` of the stage before."""

    dest: int
    source: int
    edge: int
    seq: int
    payload: bytes | pa.Buffer

    def to_bytes(self) -> bytes:
        """The row as it travels; copies the payload once.

        Raises:
            OverflowError: it is 2 GiB long.
        """
        if len(self.payload) > BYTES_MAX - _HEAD.size:
            raise OverflowError(
                f"a chunk of {len(self.payload)} bytes does not go through an exchange: 2 GiB is too long"
            )
        return b"".join((_HEAD.pack(self.dest, self.source, self.edge, self.seq), self.payload))

    @classmethod
    def from_bytes(cls, sent: bytes) -> WireRow:
        """The row that was sent; its payload is not copied."""
        dest, source, edge, seq = _HEAD.unpack_from(sent)
        return cls(dest, source, edge, seq, pa.py_buffer(sent).slice(_HEAD.size))


# ---- chunks: rows that cross an exchange, with their anchors in columns before their own.
#
# A chunk has one of four forms: rows without anchors; rows with one share each, which were combined; rows with one
# (message, share) pair each; rows with any number of pairs


_SHARE: Final = pa.field("\x00share", pa.int64(), nullable=False)
_MESSAGE: Final = pa.field("\x00message", pa.int64(), nullable=False)
_ORIGIN: Final = pa.field("\x00origin", pa.int64(), nullable=False)
_LISTS: Final = tuple(pa.field(f.name, pa.list_(f.type), nullable=False) for f in (_MESSAGE, _ORIGIN, _SHARE))


class Form(IntEnum):
    """What a chunk has beside its rows."""

    ROWS = 0
    SHARES = 1
    PAIRS = 2
    LISTS = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that came over an edge, with their pairs; `origin` is `MANY_ORIGIN` where a pair stands for many."""

    rows: pa.RecordBatch
    row: Rows | None
    id: Rows | None
    origin: Rows | None
    share: Words | None

    def anchors(self, messages: MessageTable) -> Anchors:
        """The rows' anchors; their messages are added to the task's."""
        if self.id is None or self.origin is None:
            return Anchors(self.rows.num_rows, self.row, None, self.share)
        first = messages.append(self.id, self.origin)
        number = np.arange(first, first + len(self.id), dtype=np.int64)
        number[self.origin == MANY_ORIGIN] = MANY
        return Anchors(self.rows.num_rows, self.row, number, self.share)


def pack(rows: pa.RecordBatch, anchors: Anchors, messages: MessageTable) -> tuple[Form, pa.RecordBatch]:
    """Rows with their anchors in columns before their own."""
    columns: list[pa.Array] = []
    fields: list[pa.Field] = []
    if anchors.row is None and anchors.message is None:
        form = Form.ROWS if anchors.share is None else Form.SHARES
    else:
        form = Form.PAIRS if anchors.row is None else Form.LISTS
        number = anchors.messages()
        many = number == MANY
        known = np.where(many, 0, number)
        ids, origins = messages.ids(known) if messages.number else known, np.full(len(number), MANY_ORIGIN, np.int64)
        if messages.number:
            origins = np.where(many, MANY_ORIGIN, messages.origins(known))
        columns += [pa.array(ids), pa.array(origins)]
        fields += [_MESSAGE, _ORIGIN]
    if anchors.share is not None:
        columns.append(pa.array(as_signed(anchors.share)))
        fields.append(_SHARE)
    if form is Form.LISTS:
        offsets = pa.array(np.searchsorted(anchors.row_of_pairs(), np.arange(anchors.rows + 1)).astype(np.int32))
        columns = [pa.ListArray.from_arrays(offsets, column) for column in columns]
        fields = [pa.field(f.name, pa.list_(f.type), nullable=False) for f in fields]
    return form, pa.RecordBatch.from_arrays([*columns, *rows.columns], schema=pa.schema([*fields, *rows.schema]))


def packed_schema(form: Form, schema: pa.Schema, *, tracked: bool) -> pa.Schema:
    """The schema of a chunk of this form, whose rows have the given schema."""
    share = [_SHARE] if tracked else []
    match form:
        case Form.ROWS:
            return schema
        case Form.SHARES:
            return pa.schema([_SHARE, *schema])
        case Form.PAIRS:
            return pa.schema([_MESSAGE, _ORIGIN, *share, *schema])
        case Form.LISTS:
            return pa.schema([*(_LISTS if tracked else _LISTS[:2]), *schema])


def unpack(form: Form, packed: pa.RecordBatch, schema: pa.Schema, *, tracked: bool) -> Chunk:
    """The rows and anchors of a packed chunk."""
    first = packed.num_columns - len(schema)
    rows = pa.RecordBatch.from_arrays(packed.columns[first:], schema=schema)
    columns = packed.columns[:first]
    index: Rows | None = None
    if form is Form.LISTS:
        lengths = pc.list_value_length(columns[0]).to_numpy(zero_copy_only=False)
        index = np.repeat(np.arange(packed.num_rows, dtype=np.int64), lengths)
        columns = [column.flatten() for column in columns]
    values = [column.to_numpy() for column in columns]
    share = as_words(values.pop()) if form is Form.SHARES or (tracked and form is not Form.ROWS) else None
    return Chunk(rows, index, values[0] if values else None, values[1] if values else None, share)
