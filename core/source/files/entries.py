"""The rows of `file_entry`: the files of a subscription, as they were when they were registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from psycopg import Cursor
from sqlalchemy import BigInteger, DateTime, Index, LargeBinary, MetaData, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY

from stormproof.core.pending.rows import Subscriber
from stormproof.core.postgres.columns import key, must
from stormproof.core.postgres.store import query
from stormproof.core.source.files.formats import File, Format

# ---- the table of the file sources: the files of each subscription. Pending messages are in the pending store's
# tables

SCHEMA = "stormproof"

metadata = MetaData(schema=SCHEMA)


file_entry = Table(
    "file_entry",
    metadata,
    key("source", Text, "the source's name"),
    key("subscription", Text, "who reads it"),
    key("number", BigInteger, "from 1, as the files were found"),
    must("path", Text, "where the file was found"),
    must("first_id", BigInteger, "number of its first row's message"),
    must("rows", BigInteger, "how many messages it has"),
    must("size_bytes", BigInteger, "of the file"),
    must("modified_ns", BigInteger, "since 1970"),
    must("fingerprint", Text, "SHA-256 of a Parquet file's footer, of another's digests"),
    must("marks", LargeBinary, "where blocks of rows begin: 64-bit numbers, little-endian"),
    must("digests", LargeBinary, "8 bytes of the SHA-256 of each block of rows"),
    must("digested", ARRAY(Text), "the columns of a Parquet file that the digests are of"),
    must("registered_at", DateTime(timezone=True), "when it was found", server_default=text("clock_timestamp()")),
    # Of a digest: a path may be longer than Postgres takes into an index.
    Index("file_entry_path", "source", "subscription", text("md5(path)"), unique=True),
    comment="files as they were when they were found; they must not change any more",
)


_MINE: Final = "source = %s and subscription = %s"


def registered(cursor: Cursor[Any], who: Subscriber, format_: Format, behind: int = -1) -> list[File]:
    """The files whose last message is `behind` or a later one, in their order."""
    rows = query(
        cursor,
        "select number, path, first_id, rows, size_bytes, modified_ns, fingerprint, marks, digests, digested"
        f" from {SCHEMA}.file_entry where {_MINE} and first_id + rows > %s order by number",
        *_key(who),
        behind,
    ).fetchall()
    return [
        File(
            number=number,
            path=path,
            format=format_,
            first_id=first_id,
            rows=count,
            size_bytes=size,
            modified_ns=modified,
            fingerprint=fingerprint,
            marks=np.frombuffer(marks, "<i8"),
            digests=bytes(digests),
            digested=tuple(digested),
        )
        for number, path, first_id, count, size, modified, fingerprint, marks, digests, digested in rows
    ]


def last(cursor: Cursor[Any], who: Subscriber) -> tuple[int, int]:
    """The number of the newest file, and the number behind its last message; (0, 0) where there is no file."""
    row = query(
        cursor,
        f"select number, first_id + rows from {SCHEMA}.file_entry where {_MINE} order by number desc limit 1",
        *_key(who),
    ).fetchone()
    return (0, 0) if row is None else (int(row[0]), int(row[1]))


def has(cursor: Cursor[Any], who: Subscriber, number: int, message: int) -> bool:
    """Whether the file with this number is registered and has the message."""
    found = query(
        cursor,
        f"select 1 from {SCHEMA}.file_entry where {_MINE} and number = %s and first_id <= %s and %s < first_id + rows",
        *_key(who),
        number,
        message,
        message,
    )
    return found.fetchone() is not None


def insert(cursor: Cursor[Any], who: Subscriber, file: File) -> None:
    """Register a file under its number."""
    query(
        cursor,
        f"insert into {SCHEMA}.file_entry (source, subscription, number, path, first_id, rows, size_bytes,"
        " modified_ns, fingerprint, marks, digests, digested)"
        " values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        *_key(who),
        file.number,
        file.path,
        file.first_id,
        file.rows,
        file.size_bytes,
        file.modified_ns,
        file.fingerprint,
        file.marks.astype("<i8").tobytes(),
        file.digests,
        list(file.digested),
    )


def update(cursor: Cursor[Any], who: Subscriber, file: File) -> None:
    """Store path, time and digests of a file whose messages stay the same."""
    query(
        cursor,
        f"update {SCHEMA}.file_entry set path = %s, modified_ns = %s, fingerprint = %s, digests = %s, digested = %s"
        f" where {_MINE} and number = %s",
        file.path,
        file.modified_ns,
        file.fingerprint,
        file.digests,
        list(file.digested),
        *_key(who),
        file.number,
    )


def forget(cursor: Cursor[Any], who: Subscriber, ranges: Sequence[tuple[int, int]]) -> int:
    """Remove the files all of whose messages are within one of these ranges; returns how many.

    The newest file stays, since the messages of the next one are numbered on from it.
    """
    return query(
        cursor,
        f"delete from {SCHEMA}.file_entry e using unnest(%s::bigint[], %s::bigint[]) as gone (first_id, stop_id)"
        " where e.source = %s and e.subscription = %s"
        " and e.first_id >= gone.first_id and e.first_id + e.rows <= gone.stop_id"
        f" and e.number < (select max(number) from {SCHEMA}.file_entry where {_MINE})",
        [first for first, _ in ranges],
        [stop for _, stop in ranges],
        *_key(who),
        *_key(who),
    ).rowcount


def _key(who: Subscriber) -> tuple[str, str]:
    return who.source, who.subscription
