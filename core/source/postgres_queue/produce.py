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
from psycopg.errors import CheckViolation

from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue.messages import MessageTable
from stormproof.core.source.postgres_queue.numbering import assigned_xid_sql, stored_xid_sql

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

    Each COPY is of one chunk in memory, in a savepoint, and can be repeated. After about each `statement_messages`
    `between` may make partitions, on a connection of its own.
    """
    before = query(cursor, f"select ({assigned_xid_sql(table.queue)})::text").fetchone()
    above = _edge(cursor, table, before[0], "desc") if before and before[0] else None
    size = CHUNK_MESSAGES if statement_messages is None else min(CHUNK_MESSAGES, max(1, statement_messages))
    chunks = _chunks(payloads, size)
    chunk = next(chunks, None)
    messages = since = 0
    while chunk is not None:
        if since and since + len(chunk) > max(size, statement_messages or sys.maxsize) and between is not None:
            between()
            since = 0
        _copy(cursor, table, chunk)
        messages += len(chunk)
        since += len(chunk)
        chunk = next(chunks, None)
    if not messages:
        return Receipt(0, None, None)
    row = query(cursor, f"select ({stored_xid_sql(table.queue)})::text").fetchone()
    xid = row[0] if row else "0"
    first, last = _edge(cursor, table, xid, "asc", above or 0), _edge(cursor, table, xid, "desc")
    return Receipt(messages, f"{xid}-{first}", f"{xid}-{last}")


def _copy(cursor: Cursor[Any], table: MessageTable, payloads: list[bytes]) -> None:
    """Copy one chunk. Where partitions are attached meanwhile, once more, with that locked out.

    A COPY sees the partitions that stood when it began. A row that it routes to the default partition, while another
    session attaches the partition that the row belongs to, is refused by the default partition's constraint.
    """
    try:
        with cursor.connection.transaction():
            _copy_once(cursor, table, payloads)
    except CheckViolation as error:
        if error.diag.constraint_name is not None:
            raise  # one that somebody gave the table; a partition's own has no name
        with cursor.connection.transaction():
            # The partitions' locks as well: ATTACH needs the default partition's in full. By the parent's name, since a
            # producer has no rights on partitions.
            query(cursor, f"lock table {table.sql} in row exclusive mode")
            _copy_once(cursor, table, payloads)


def _copy_once(cursor: Cursor[Any], table: MessageTable, payloads: list[bytes]) -> None:
    encoder = pgpq.ArrowToPostgresBinaryEncoder(_SCHEMA)
    with cursor.copy(f"copy {table.sql} (payload) from stdin (format binary)".encode()) as copy:
        copy.write(encoder.write_header())
        copy.write(encoder.write_batch(pa.record_batch([pa.array(payloads, pa.binary())], schema=_SCHEMA)))
        copy.write(encoder.finish())


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
