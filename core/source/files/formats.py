"""A registered file: its rows, where blocks of them begin, how many bytes they have, and what their content was.

A file of lines (text, jsonl) is read through once. The place of every `MARK_ROWS`-th line is kept as a mark, so that a part
in the middle is found without reading what lies before it. The marks of a Parquet file are its row groups. Each block of
rows between two marks has a digest.

The digests of a file's content are taken at registration and compared at every read. Size and time prove nothing: a file
that is rewritten in place with its rows in another order has the same size, and a Parquet file even the same footer. So
there is a digest of the bytes of each block of lines and, in a Parquet file, of the columns that are read of each row
group. A reader decodes the very bytes that it compared.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import PositionMismatch, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.source.files.rows import converts
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import FileState, OpenFile

Range: TypeAlias = tuple[int, int]

DIGEST_BYTES: Final = 8
"""Bytes kept of a block's SHA-256: changed content goes unnoticed with probability 2^-64."""

_TAIL_BYTES: Final = 8
"""A Parquet file ends with its footer's length and a magic number."""


def digest_of(parts: Iterable[bytes | memoryview]) -> bytes:
    """The digest of a block, which is given in parts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.digest()[:DIGEST_BYTES]


def digest_at(digests: bytes, place: int) -> bytes:
    """The digest of one block, from those of a file; empty where none were kept."""
    return digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]


def footer_of(file: OpenFile) -> tuple[int, bytes]:
    """Where a Parquet file's footer begins, and its bytes up to the file's end."""
    size = file.state.size
    tail = file.read_at(max(0, size - _TAIL_BYTES), _TAIL_BYTES)
    begin = max(0, size - _TAIL_BYTES - int.from_bytes(tail[:4], "little"))
    return begin, file.read_at(begin, size - begin)


def chunks_of(group: pq.RowGroupMetaData, columns: Sequence[str]) -> list[Range]:
    """The places of these columns' chunks in the file, as (begin, size), in the row group's order."""
    ranges: list[Range] = []
    for place in range(group.num_columns):
        chunk = group.column(place)
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
                begin = min(begin, chunk.dictionary_page_offset)
            ranges.append((begin, chunk.total_compressed_size))
    return ranges


def group_digests(file: OpenFile, metadata: pq.FileMetaData, columns: Sequence[str]) -> bytes:
    """The digests of all row groups, each of its chunks of these columns, one after the other."""
    return b"".join(
        digest_of(file.read_at(*chunk) for chunk in chunks_of(metadata.row_group(place), columns))
        for place in range(metadata.num_row_groups)
    )


class ComparedFile(io.RawIOBase):
    """A Parquet file whose footer and compared chunks are read from memory.

    `load` is called before a row group is read. The rest of the file (indexes, filters) holds no rows, and is read from
    the file.
    """

    def __init__(self, file: OpenFile) -> None:
        super().__init__()
        self._file = file
        self._size = file.state.size
        begin, self.footer = footer_of(file)
        self._footer = (begin, memoryview(self.footer))
        self._held: list[tuple[int, memoryview]] = [self._footer]
        self._at = 0

    def load(self, group: pq.RowGroupMetaData, columns: Sequence[str]) -> bytes:
        """Load the chunks of a row group's columns into memory, in place of those before; returns their digest."""
        self._held = [self._footer]
        chunks = [(begin, self._file.read_at(begin, size)) for begin, size in chunks_of(group, columns)]
        self._held += [(begin, memoryview(data)) for begin, data in chunks]
        return digest_of(data for _, data in chunks)

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a place; returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """The present place."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next `size` bytes, or all that are left."""
        if size < 0:
            size = self._size - self._at
        begin = self._at
        found: bytes | None = None
        for start, data in self._held:
            if start <= begin and begin + size <= start + len(data):
                found = bytes(data[begin - start : begin - start + size])
                break
        if found is None:
            found = self._file.read_at(begin, size)
        self._at = begin + len(found)
        return found


# ---- registered files

Format: TypeAlias = Literal["parquet", "jsonl", "text"]
FORMATS: Final[tuple[Format, ...]] = ("parquet", "jsonl", "text")

MARK_ROWS: Final = 1_024
"""Lines between two marks. A mark is kept as 8 bytes, and a read begins at most this many lines too early."""

_CHUNK_BYTES: Final = 1 << 22
_COMPRESSED: Final = (".gz", ".bz2", ".zst", ".xz", ".lz4", ".zip", ".snappy")


@dataclass(frozen=True)
class File:
    """A registered file. `first_id` is the number of its first row's message, `number` the file's own, from 1.

    `marks`: of lines, the byte at which every `MARK_ROWS`-th line begins, and the byte behind the last line (as if the
    file ended with a newline). Of Parquet, first the first rows of the row groups and the number of rows, then the bytes
    before each row group and those of all.

    `digests`: one for each block of lines, or for each row group, of its chunks of the columns `digested`.
    """

    number: int
    path: str
    format: Format
    first_id: int
    rows: int
    size_bytes: int
    modified_ns: int
    fingerprint: str
    marks: Rows
    digests: bytes = b""
    digested: tuple[str, ...] = ()

    @property
    def stop_id(self) -> int:
        """The number behind its last row's."""
        return self.first_id + self.rows

    def opened(self) -> OpenFile:
        """The file, open for reading bytes, if its size is as registered; its time, too, where there are no digests.

        Raises:
            PositionMismatch: it is gone or has changed.
        """
        try:
            file = files_at(self.path).open_at(self.path)
        except FileNotFoundError as error:
            raise gone(self.path) from error
        try:
            check_unchanged(self.path, file.state, self.size_bytes, None)
        except PositionMismatch:
            file.close()
            raise
        return file

    @cached_property
    def group_rows(self) -> Rows:
        """The first row of every row group, and the number of rows; for Parquet only."""
        rows: Rows = self.marks.reshape(2, -1)[0]
        return rows

    def bytes_of(self, start: int, stop: int) -> int:
        """The bytes of these rows' payloads; for Parquet by the average of their row group.

        Raises:
            PositionMismatch: the file has changed.
        """
        if self.format == "parquet":
            rows, before = self.marks.reshape(2, -1)
            return int(np.interp(stop, rows, before)) - int(np.interp(start, rows, before))
        return self._begin(stop) - self._begin(start) - (stop - start)

    def cut(self, start: int, stop: int, limit_bytes: int) -> int:
        """The row behind the last one that still fits into `limit_bytes` with all from `start` on; `start` if none fits.

        Raises:
            PositionMismatch: the file has changed.
        """
        if self.format == "parquet":
            rows, before = self.marks.reshape(2, -1)
            at = float(np.interp(start, rows, before)) + limit_bytes
            stop = min(stop, int(np.interp(at, before, rows)))
            return max(start, stop)
        begin = self._begin(start)
        marks = np.arange(len(self.marks) - 1) * MARK_ROWS
        have = self.marks[:-1] - begin - (marks - start)
        fits = np.flatnonzero((marks > start) & (marks <= stop) & (have <= limit_bytes))
        row = int(marks[fits[-1]]) if len(fits) else start
        begins = self._begins(row // MARK_ROWS)
        first = row // MARK_ROWS * MARK_ROWS
        places = np.arange(first, first + len(begins))
        good = (places >= row) & (places <= stop) & (begins - begin - (places - start) <= limit_bytes)
        return int(places[good][-1]) if good.any() else start

    def _begin(self, row: int) -> int:
        """The byte at which a line begins; for the row behind the last line, where that ends."""
        if row >= self.rows:
            return int(self.marks[-1])
        if row % MARK_ROWS == 0:
            return int(self.marks[row // MARK_ROWS])
        return int(self._begins(row // MARK_ROWS)[row % MARK_ROWS])

    def _begins(self, block: int) -> Rows:
        """The bytes at which the lines of a block begin, and the byte behind the last of them."""
        if block >= len(self.marks) - 1:
            return self.marks[-1:]
        low, high = int(self.marks[block]), int(self.marks[block + 1])
        with self.opened() as file:
            read = file.read_at(low, high - low)
        require_content(self.path, block * MARK_ROWS, digest_at(self.digests, block), digest_of([read]))
        data = np.frombuffer(read, np.uint8)
        begins = np.concatenate([[0], np.flatnonzero(data == _NEWLINE) + 1]).astype(np.int64) + low
        if begins[-1] < high:  # the file has no newline at its end
            begins = np.append(begins, high)
        return begins


_NEWLINE: Final = 10


def scan(path: str, format_: Format, schema: pa.Schema) -> File:
    """Describe a new file; `number` and `first_id` are set when it is registered.

    Raises:
        UsageError: it is compressed, is not a Parquet file, or lacks a column of the schema.
        PositionMismatch: it changed while it was read.
        FileNotFoundError: it is gone.
    """
    if Path(path).suffix.lower() in _COMPRESSED and format_ != "parquet":
        raise UsageError(
            f"file {path} is compressed, so a part of it cannot be read by itself: decompress it first", file=path
        )
    with files_at(path).open_at(path) as opened:
        before = opened.state
        blank = File(0, path, format_, 0, 0, before.size, before.modified_ns, "", np.empty(0, np.int64))
        found = _scan_parquet(blank, opened, schema) if format_ == "parquet" else _scan_lines(blank, opened)
    now = files_at(path).stat(path)
    if now is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    check_unchanged(path, now, before.size, before.modified_ns)
    return found


def _scan_lines(file: File, opened: OpenFile) -> File:
    marks: list[Rows] = [np.zeros(1, np.int64)]
    digests: list[bytes] = []
    block = hashlib.sha256()
    rows, place, last = 0, 0, _NEWLINE
    while chunk := opened.read_at(place, _CHUNK_BYTES):
        view = memoryview(chunk)
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE)
        first = (-rows - 1) % MARK_ROWS  # the line before a mark, counted from those that end here
        begins = ends[first::MARK_ROWS].astype(np.int64) + 1
        at = 0
        for begin in begins.tolist():
            block.update(view[at:begin])
            digests.append(block.digest()[:DIGEST_BYTES])
            block, at = hashlib.sha256(), begin
        block.update(view[at:])
        marks.append(begins + place)
        rows, place, last = rows + len(ends), place + len(chunk), chunk[-1]
    digests.append(block.digest()[:DIGEST_BYTES])
    end = place
    if last != _NEWLINE:
        rows, end = rows + 1, place + 1
    blocks = -(-rows // MARK_ROWS)
    whole = np.concatenate(marks)[:blocks]
    kept = b"".join(digests[:blocks])
    fingerprint = hashlib.sha256(kept).hexdigest()
    return replace(file, rows=rows, fingerprint=fingerprint, marks=np.append(whole, end), digests=kept)


def _scan_parquet(file: File, opened: OpenFile, schema: pa.Schema) -> File:
    columns = tuple(schema.names)
    try:
        compared = ComparedFile(opened)
        with pq.ParquetFile(compared) as parquet:
            metadata, there = parquet.metadata, parquet.schema_arrow
        digests = group_digests(opened, metadata, columns)
    except pa.ArrowInvalid as error:
        raise UsageError(
            f"file {file.path} is not a Parquet file: {storable_text(error)}; write files elsewhere and move them here when "
            "they are whole (names that begin with '.' or '_' are left out)",
            file=file.path,
        ) from error
    for field in schema:
        if there.names.count(field.name) != 1:
            has = f"{'several columns' if field.name in there.names else 'no column'} {field.name!r}"
            raise UsageError(f"file {file.path} has {has}; it has {', '.join(there.names)}", file=file.path)
        found = there.field(field.name).type
        if not converts(found, field.type):
            raise UsageError(
                f"file {file.path}: column {field.name!r} is {found}, which cannot be read as {field.type}",
                file=file.path,
            )
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    rows = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
    sizes = np.cumsum([0, *(group.total_byte_size for group in groups)], dtype=np.int64)
    return replace(
        file,
        rows=metadata.num_rows,
        fingerprint=hashlib.sha256(compared.footer).hexdigest(),
        marks=np.concatenate([rows, sizes]),
        digests=digests,
        digested=columns,
    )


def digests_now(file: File) -> bytes:
    """The digests of a Parquet file's present content, of the columns that were digested at registration."""
    with files_at(file.path).open_at(file.path) as opened, pq.ParquetFile(ComparedFile(opened)) as parquet:
        return group_digests(opened, parquet.metadata, file.digested)


def require_content(path: str, row: int, registered: bytes, found: bytes) -> None:
    """Refuse a block of rows, which begins at `row`, if its digest is not the registered one.

    Raises:
        PositionMismatch: the digests differ.
    """
    if registered != found:
        raise changed(
            path, f"a block from row {row} on with digest {registered.hex()}", f"one with digest {found.hex()}"
        )


def check_unchanged(path: str, now: FileState, size_bytes: int, modified_ns: int | None) -> None:
    """Refuse a file whose size is not the registered one; nor its time, where one is given.

    Raises:
        PositionMismatch: size or time differ.
    """
    if now.size != size_bytes:
        raise changed(path, f"{size_bytes} bytes", f"{now.size} bytes")
    if modified_ns not in (None, now.modified_ns):
        raise changed(path, f"{size_bytes} bytes, modified at {modified_ns} ns", _told(now))


def changed(path: str, then: str, now: str) -> PositionMismatch:
    """The error for a file whose content is not the registered one."""
    return PositionMismatch(
        f"file {path} has changed since it was registered: it had {then}, and has {now} now. Its messages are known by "
        "their row, so a file must stay as it is: put the old one back, and new rows into a new file",
        file=path,
        registered=then,
        found=now,
    )


def gone(path: str) -> PositionMismatch:
    """The error for a registered file that does not exist any more."""
    return PositionMismatch(
        f"file {path} was registered and is gone, and not all of its messages are resolved: put it back", file=path
    )


def _told(now: FileState) -> str:
    return f"{now.size} bytes, modified at {now.modified_ns} ns"
