"""Puts messages into a queue: a binary COPY, streamed in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pgpq
import pyarrow as pa
from psycopg import Cursor

from stormproof.core.source.postgres_queue.messages import MessageTable
from stormproof.core.source.postgres_queue.numbering import assigned_xid_sql, stored_xid_sql
from stormproof.core.source.store import query

CHUNK_MESSAGES = 10_000
CHUNK_BYTES = 4 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024

_SCHEMA = pa.schema([pa.field("payload", pa.binary(), nullable=False)])


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was put: how many messages, and the shown ids of the first and the last; None where there were none."""

    messages: int
    first: str | None
    last: str | None


def copy_in(
    cursor: Cursor[Any],
    table: MessageTable,
    payloads: Iterable[bytes],
    *,
    statement_messages: int | None = None,
    between: Callable[[], None] | None = None,
) -> Receipt:
    """Copy the payloads into the queue, inside the cursor's transaction.

    A COPY sees the partitions that stood when it began. So after about `statement_messages` a further one begins, and
    `between` may make partitions first, on a connection of its own.
    """
    before = query(cursor, f"select ({assigned_xid_sql(table.queue)})::text").fetchone()
    above = _edge(cursor, table, before[0], "desc") if before and before[0] else None
    size = CHUNK_MESSAGES if statement_messages is None else min(CHUNK_MESSAGES, max(1, statement_messages))
    chunks = _chunks(payloads, size)
    chunk = next(chunks, None)
    messages = 0
    while chunk is not None:
        if messages and between is not None:
            between()
        encoder = pgpq.ArrowToPostgresBinaryEncoder(_SCHEMA)
        stop = messages + max(size, statement_messages or sys.maxsize)
        with cursor.copy(f"copy {table.sql} (payload) from stdin (format binary)".encode()) as copy:
            copy.write(encoder.write_header())
            while chunk is not None and messages + len(chunk) <= stop:
                messages += len(chunk)
                copy.write(encoder.write_batch(pa.record_batch([pa.array(chunk, pa.binary())], schema=_SCHEMA)))
                chunk = next(chunks, None)
            copy.write(encoder.finish())
    if not messages:
        return Receipt(0, None, None)
    row = query(cursor, f"select ({stored_xid_sql(table.queue)})::text").fetchone()
    xid = row[0] if row else "0"
    first, last = _edge(cursor, table, xid, "asc", above or 0), _edge(cursor, table, xid, "desc")
    return Receipt(messages, f"{xid}-{first}", f"{xid}-{last}")


def _edge(cursor: Cursor[Any], table: MessageTable, xid: str, order: str, above: int = 0) -> int | None:
    row = query(
        cursor, f"select id from {table.sql} where xid = %s::xid8 and id > %s order by id {order} limit 1", xid, above
    ).fetchone()
    return int(row[0]) if row else None


def _chunks(payloads: Iterable[bytes], messages: int) -> Iterator[list[bytes]]:
    """Lists of payloads, bounded in number and, but for one payload, in bytes."""
    part, size = list[bytes](), 0
    for payload in payloads:
        part.append(payload)
        size += len(payload)
        if len(part) >= messages or size >= CHUNK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    r"""The stream's lines, split at ``\n`` only, other bytes kept; an empty line is a line, an empty end is not."""
    rest = list[bytes]()
    while block := stream.read(BLOCK_BYTES):
        head, *tail = block.split(b"\n")
        rest.append(head)
        if tail:
            yield b"".join(rest)
            yield from tail[:-1]
            rest = [tail[-1]]
    if last := b"".join(rest):
        yield last


def lines_from(source: str | Path | BinaryIO) -> Iterator[bytes]:
    """The lines of a file, of standard input (``-``), or of an open stream."""
    if source == "-":
        yield from lines_of(sys.stdin.buffer)
    elif isinstance(source, str | Path):
        with Path(source).open("rb") as stream:
            yield from lines_of(stream)
    else:
        yield from lines_of(source)
