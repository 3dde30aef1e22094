"""The rows of `file_entry`: the files of a subscription, as they were when they were registered.

Whether a file is still the one that was registered follows from its content, where size and time do not settle it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from psycopg import Cursor
from sqlalchemy import BigInteger, DateTime, Index, LargeBinary, MetaData, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY

from stormproof.core.base.errors import PositionMismatch, StormproofError
from stormproof.core.pending.connector import Finding, Kept, NumberedAudit, OpenedSlice
from stormproof.core.pending.rows import At, Subscriber
from stormproof.core.postgres.columns import key, must
from stormproof.core.postgres.store import query
from stormproof.core.source.files.formats import File, Format, changed, check_unchanged, digests_now, gone, scan
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import FileState

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


log = logging.getLogger("stormproof.source")


# ---- whether a file is the one that was registered

_LIKE_ONE_THAT_WAS_READ: Final = (
    "file %s has the size and the time of %s, which was read and is gone: it is read as a new file. If it is that file "
    "under another name, its messages come a second time"
)


def as_registered(file: File, schema: pa.Schema, listed: FileState | None, *, needed: bool) -> File:
    """A registered file as it is now: with its present time, and digests of the columns that are read now.

    `listed` is what a search for files found under its path. It is read again where its time has changed. `needed` is off
    where all of its messages are resolved: then it may be gone.

    Raises:
        PositionMismatch: its content has changed, or it is gone and needed.
    """
    now = files_at(file.path).stat(file.path) if listed is None and needed else listed
    if now is None:
        if needed:
            raise gone(file.path)
        return file
    is_same = (now.size, now.modified_ns) == (file.size_bytes, file.modified_ns)
    columns = tuple(schema.names) if file.format == "parquet" else ()
    if is_same and (not needed or file.digested == columns):
        return file
    check_unchanged(file.path, now, file.size_bytes, None)
    found = scan(file.path, file.format, schema)
    if file.digested != found.digested:  # other columns are read now
        same = file.fingerprint == found.fingerprint and digests_now(file) == file.digests
    else:
        same = _same_content(file, found)
    if not same:
        then = f"{file.size_bytes} bytes, modified at {file.modified_ns} ns, hash {file.fingerprint[:16]}"
        told = f"other content in as many bytes, modified at {now.modified_ns} ns, hash {found.fingerprint[:16]}"
        raise changed(file.path, then, told)
    return replace(
        file,
        modified_ns=now.modified_ns,
        fingerprint=found.fingerprint,
        digests=found.digests,
        digested=found.digested,
    )


def renamed_from(files: Sequence[File], path: str, now: FileState, schema: pa.Schema, lowest: int) -> int | None:
    """The place of the registered file that `path` is under a new name; None where it is a new file.

    A renamed file has the size, the time and the content of a registered file that is gone, and of whose messages some are
    not resolved: `lowest` is the first such message. A new file, too, may have all three of one whose messages are resolved,
    so that one is not guessed at: its messages would be lost. A copy has another time, and is a new file. An object store
    has no renaming: what is there under a new name was put there.
    """
    store = files_at(path)
    if not store.is_local:
        return None
    for place, file in enumerate(files):
        if (file.size_bytes, file.modified_ns) != (now.size, now.modified_ns) or store.stat(file.path) is not None:
            continue
        if file.stop_id <= lowest:
            log.warning(_LIKE_ONE_THAT_WAS_READ, path, file.path)
        elif _same_content(file, scan(path, file.format, schema)):
            return place
    return None


def _same_content(registered: File, found: File) -> bool:
    return (registered.fingerprint, registered.digests, registered.digested) == (
        found.fingerprint,
        found.digests,
        found.digested,
    )


# ---- what the audit asks


class FilesAudit(NumberedAudit):
    """The answers for one subscription of a file source. A message's origin is the number of its file."""

    def has(self, id_: int, origin: int) -> bool:
        """Whether a registered file of this number has the message."""
        return has(self._cursor, self._who, origin, id_)

    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether the message is in the range, and its file has it."""
        return super().contains(at, id_, origin) and self.has(id_, origin)

    def unopened(self, position: At) -> tuple[int, float | None]:
        """How many messages of the registered files lie behind the position."""
        _, registered = last(self._cursor, self._who)
        return max(0, registered - self.reach({"range": [0, position.get("next", 0)]})), None

    def kept(self, slices: Sequence[OpenedSlice]) -> Kept:
        """By the digests that were taken when the files were registered. A file that is gone is not kept."""
        same, wrong, left_out = 0, list[Finding](), list[str]()
        for file in registered(self._cursor, self._who, "text") if slices else ():
            try:
                now = files_at(file.path).stat(file.path)
                if now is None:
                    continue
                check_unchanged(file.path, now, file.size_bytes, None)
                parquet = replace(file, format="parquet")
                found = digests_now(parquet) if file.digested else scan(file.path, "text", pa.schema([])).digests
                altered = found != file.digests
            except (PositionMismatch, pa.ArrowInvalid):
                altered = True
            except (OSError, StormproofError) as error:
                left_out.append(f"the messages of {file.path}: {error}")
                continue
            if altered:
                wrong.append(Finding(f"file {file.path} has another content than when its messages were read"))
            else:
                same += file.rows
        return Kept(same, f"{same} messages of files that are still there", tuple(wrong), tuple(left_out))
