"""Rows with the columns that name their messages, as a task adds them."""

from __future__ import annotations

import pyarrow as pa

from stormproof.core.task.ends import message_columns, with_columns
from stormproof.core.tracking.share import Anchors, MetMessages


def with_messages(rows: pa.RecordBatch, anchors: Anchors, messages: MetMessages) -> pa.RecordBatch:
    """The rows with `MESSAGE_COLUMNS` behind their own."""
    return with_columns(rows, message_columns(anchors, messages))
