"""Lineage columns: which transaction wrote a row, and which message it was made of; and messages' ids as columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from stormproof.core.base.arrow_compute import pc

TXID: Final = "_txid"
MESSAGE: Final = "_message_id"


@dataclass(frozen=True, slots=True)
class Lineage:
    """The names of the columns that a sink stores behind each row's own; None: that one is not stored.

    `txid` is the transaction that wrote the row. `message` is the id, as people see it, of the one message that the row was
    made of; NULL where there were several, or where they are not known one by one (a group's result).
    """

    txid: str | None = TXID
    message: str | None = MESSAGE

    @property
    def columns(self) -> pa.Schema:
        """The columns, in the order in which they are stored."""
        txid = [] if self.txid is None else [pa.field(self.txid, pa.int64())]
        message = [] if self.message is None else [pa.field(self.message, pa.string())]
        return pa.schema([*txid, *message])

    def added_to(self, rows: pa.RecordBatch, txid: int, message: Callable[[], pa.Array]) -> pa.RecordBatch:
        """The rows with these columns behind their own; `message` gives their messages' ids, and is called where these are
        stored.
        """
        made = [] if self.txid is None else [pa.repeat(pa.scalar(txid, pa.int64()), rows.num_rows)]
        if self.message is not None:
            made.append(message())
        return pa.RecordBatch.from_arrays([*rows.columns, *made], schema=pa.schema([*rows.schema, *self.columns]))


class ShownIds(Protocol):
    """Messages' ids as people see them, for whole columns: `Source.shown_id` inside tasks. Picklable; no connection."""

    def shown(self, numbers: pa.Array, origins: pa.Array) -> pa.Array:
        """The ids (string) of messages by number and origin (int64); NULL where the number is NULL."""
        ...


@dataclass(frozen=True, slots=True)
class NumberIds(ShownIds):
    """``NUMBER``."""

    def shown(self, numbers: pa.Array, origins: pa.Array) -> pa.Array:
        """The numbers alone."""
        return pc.cast(numbers, pa.string())


@dataclass(frozen=True, slots=True)
class OriginIds(ShownIds):
    """``ORIGIN-NUMBER``."""

    def shown(self, numbers: pa.Array, origins: pa.Array) -> pa.Array:
        """Both, with a hyphen between them."""
        return pc.binary_join_element_wise(pc.cast(origins, pa.string()), pc.cast(numbers, pa.string()), "-")
