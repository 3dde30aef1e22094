"""Reads a part of a slice of files inside an executor: ranges of messages, and which rows of which files they are."""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import PositionMismatch
from stormproof.core.contract.source import Limit
from stormproof.core.pending.batches import reader_batch
from stormproof.core.pending.rows import even_bounds
from stormproof.core.source.files.formats import (
    DIGEST_BYTES,
    MARK_ROWS,
    ComparedFile,
    File,
    changed,
    digest_at,
    digest_of,
    require_content,
)
from stormproof.core.source.files.rows import as_struct, pack
from stormproof.core.storage.protocol import StorageOptions, options_to_send, use_storage

_NO_MARKS: Final[Rows] = np.empty(0, np.int64)
_READ_BYTES: Final = 1 << 23
"""Bytes of lines that are read at once, about; a single line may be longer."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one file, from `start` up to but not including `stop`, counted within the file.

    `file` has no marks, and digests only of the blocks of lines, or the row groups, that hold these rows; `first_mark` is
    the number of the first of them. `marks` are, of lines, the bytes at which these blocks begin and the byte behind the
    last one; of Parquet, the first rows of the row groups and the row behind the last one.
    """

    file: File
    start: int
    stop: int
    first_mark: int
    marks: tuple[int, ...]

    @property
    def path(self) -> str:
        """The file's path."""
        return self.file.path

    @property
    def digests(self) -> bytes:
        """The digests of the blocks or row groups."""
        return self.file.digests

    @classmethod
    def of(cls, file: File, start: int, stop: int) -> Segment:
        """These rows of a file; there must be some."""
        if file.format == "parquet":
            rows = file.group_rows
            low = int(np.searchsorted(rows, start, side="right")) - 1
            high = int(np.searchsorted(rows, stop, side="left"))
            marks = rows[low : high + 1]
        else:
            low, high = start // MARK_ROWS, -(-stop // MARK_ROWS)
            marks = file.marks[low : high + 1]
        digests = file.digests[low * DIGEST_BYTES : (low + len(marks) - 1) * DIGEST_BYTES]
        part = replace(file, marks=_NO_MARKS, digests=digests)
        return cls(part, start, stop, low, tuple(marks.tolist()))


def lines(segment: Segment) -> Iterator[tuple[Rows, pa.Array]]:
    """The rows' numbers within the file, and their bytes without the newline, some megabytes at a time.

    Raises:
        PositionMismatch: the file is gone, or is not as it was when it was registered.
    """
    marks = segment.marks
    with segment.file.opened() as file:
        block = 0
        while block < len(marks) - 1:
            end = block + 1
            while end < len(marks) - 1 and marks[end + 1] - marks[block] <= _READ_BYTES:
                end += 1
            data = file.read_at(marks[block], marks[end] - marks[block])
            _compare_blocks(segment, block, end, data)
            if marks[end] > segment.file.size_bytes:
                data += b"\n"  # the file has none at its end
            first = (segment.first_mark + block) * MARK_ROWS
            array = _split(data)
            is_last = end == len(marks) - 1
            if not is_last and len(array) != (end - block) * MARK_ROWS:
                raise _other_rows(segment, len(array), (end - block) * MARK_ROWS)
            if is_last and first + len(array) < segment.stop:
                raise _other_rows(segment, first + len(array), segment.stop)
            low, high = max(segment.start, first), min(segment.stop, first + len(array))
            yield np.arange(low, high, dtype=np.int64), array.slice(low - first, high - low)
            block = end


def _compare_blocks(segment: Segment, first: int, stop: int, data: bytes) -> None:
    """Refuse blocks whose content is not what was registered."""
    view, begin = memoryview(data), segment.marks[first]
    for block in range(first, stop):
        found = digest_of([view[segment.marks[block] - begin : segment.marks[block + 1] - begin]])
        row = (segment.first_mark + block) * MARK_ROWS
        require_content(segment.path, row, digest_at(segment.digests, block), found)


def _split(data: bytes) -> pa.Array:
    """The lines of whole blocks; each ends with a newline, which is taken off."""
    buffer = pa.py_buffer(data)
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1
    offsets = np.concatenate([[0], ends])
    if len(data) < 2**31:
        array = pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets.astype(np.int32)), buffer])
    else:  # one line of gigabytes
        array = pa.Array.from_buffers(pa.large_binary(), len(ends), [None, pa.py_buffer(offsets), buffer])
    return pc.cast(pc.binary_slice(array, 0, -1), pa.binary())


class _LastGroup:
    """The row group that this process read last, of which only a part was wanted: the next part is mostly wanted next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[object, ...] | None = None
        self._rows: pa.Table | None = None

    def get(
        self, parquet: pq.ParquetFile, segment: Segment, place: int, columns: tuple[str, ...], load: Callable[[], None]
    ) -> pa.Table:
        """The rows of the segment's row group at `place`; `load` is called before a read, and compares its content."""
        group = segment.first_mark + place
        content = digest_at(segment.digests, place)
        key = (segment.path, segment.file.size_bytes, content or segment.file.modified_ns, group, columns)
        with self._lock:
            if self._key == key and self._rows is not None:
                return self._rows
            self._key = self._rows = None  # before the next one is read, so that only one is in memory
            load()
            rows = parquet.read_row_group(group, columns=list(columns), use_threads=False)
            self._key, self._rows = key, rows
            return rows


_last_group: Final = _LastGroup()


def parquet_rows(segment: Segment, columns: tuple[str, ...], batch_rows: int) -> Iterator[tuple[Rows, pa.Array]]:
    """The rows' numbers within the file, and the rows as a struct of these columns.

    A row group that is wanted whole is streamed. One of which only a part is wanted stays in memory until another is read.

    Raises:
        PositionMismatch: the file is gone, or is not as it was when it was registered.
    """
    fingerprint = segment.file.fingerprint
    with segment.file.opened() as file:
        source = ComparedFile(file)
        if hashlib.sha256(source.footer).hexdigest() != fingerprint:
            raise changed(segment.path, f"a footer with hash {fingerprint[:16]}", "another footer")
        with pq.ParquetFile(source) as parquet:
            for place in range(len(segment.marks) - 1):
                yield from _group_rows(segment, place, columns, batch_rows, parquet, source)
    segment.file.opened().close()  # it was not replaced during the read


def _group_rows(
    segment: Segment,
    place: int,
    columns: tuple[str, ...],
    batch_rows: int,
    parquet: pq.ParquetFile,
    source: ComparedFile,
) -> Iterator[tuple[Rows, pa.Array]]:
    """The rows that are wanted of one row group, after its content was compared."""
    first, behind = segment.marks[place], segment.marks[place + 1]
    low, high = max(segment.start, first), min(segment.stop, behind)
    group = segment.first_mark + place
    there = parquet.metadata.row_group(group)

    def load() -> None:
        found = source.load(there, segment.file.digested or columns)
        require_content(segment.path, first, digest_at(segment.digests, place), found)

    if there.num_rows != behind - first:
        raise _other_rows(segment, there.num_rows, behind - first)
    if (low, high) == (first, behind):
        load()
        batches = parquet.iter_batches(batch_rows, row_groups=[group], columns=list(columns), use_threads=False)
    else:
        part = _last_group.get(parquet, segment, place, columns, load).slice(low - first, high - low)
        batches = iter(part.to_batches(max_chunksize=batch_rows))
    row = low
    for batch in batches:
        yield np.arange(row, row + batch.num_rows, dtype=np.int64), as_struct(batch.select(columns))
        row += batch.num_rows
    if row != high:
        raise _other_rows(segment, row, high)


def columns_in(file: File) -> tuple[str, ...]:
    """All columns of a Parquet file whose names tell them apart."""
    with file.opened() as opened, pq.ParquetFile(ComparedFile(opened)) as parquet:
        return tuple(name for name, times in Counter(parquet.schema_arrow.names).items() if times == 1)


def _other_rows(segment: Segment, found: int, wanted: int) -> PositionMismatch:
    return changed(segment.path, f"{wanted} rows up to there", f"{found}")


def rows_of(segment: Segment, columns: tuple[str, ...] | None, batch_rows: int) -> Iterator[tuple[Rows, pa.Array]]:
    """A segment's rows: of Parquet with these columns, or lines where `columns` is None."""
    return lines(segment) if columns is None else parquet_rows(segment, columns, batch_rows)


@dataclass(frozen=True, slots=True)
class FileSliceReader:
    """Reads a part of a slice: rows of files. `columns` are those of a Parquet row; None: the files hold lines. `storage`
    has the options of the folders that are in an object store: they travel with the job.
    """

    segments: tuple[Segment, ...]
    columns: tuple[str, ...] | None
    storage: tuple[tuple[str, StorageOptions], ...] = ()

    @classmethod
    def of(cls, segments: tuple[Segment, ...], columns: tuple[str, ...] | None) -> FileSliceReader:
        """A reader of these segments, with the options that this process has for the object stores they are in."""
        sent = {os.path.dirname(segment.path): options_to_send(segment.path) for segment in segments}
        return cls(segments, columns, tuple((folder, given) for folder, given in sent.items() if given is not None))

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages, by ascending id; a message's id is its file's `first_id` plus its row in the file.

        Raises:
            PositionMismatch: a file is gone, or is not as it was when it was registered.
        """
        for folder, options in self.storage:
            use_storage(folder, options)
        out = np.fromiter(excluded, np.int64)
        for segment in self.segments:
            for rows, payload in rows_of(segment, self.columns, batch_rows):
                ids, kept = rows + segment.file.first_id, payload
                if len(out):
                    mask = ~np.isin(ids, out)
                    ids, kept = ids[mask], payload.filter(pa.array(mask))
                for start in range(0, len(ids), batch_rows):
                    part = ids[start : start + batch_rows]
                    origins = np.full(len(part), segment.file.number, np.int64)
                    yield reader_batch(part, origins, kept.slice(start, batch_rows), seed)


# ---- ranges of messages in registered files

_PAYLOAD_ROWS: Final = 10_000
"""Rows of a record batch where payloads are read again."""


class RegisteredFiles(list[File]):
    """The registered files that may still be read, in their order; messages are numbered on from file to file.

    A range of messages is `first` up to but not including `stop`, and lies within these files.
    """

    @property
    def stop(self) -> int:
        """The number behind the last message."""
        return self[-1].stop_id if self else 0

    @property
    def newest(self) -> int:
        """The newest file's number."""
        return self[-1].number if self else 0

    def overlapping(self, first: int, stop: int) -> list[tuple[File, int, int]]:
        """The files that hold these messages, each with the first of its rows among them, and the row behind the last."""
        low = bisect_right(self, first, key=lambda file: file.stop_id)
        high = bisect_left(self, stop, key=lambda file: file.first_id)
        return [
            (file, max(first, file.first_id) - file.first_id, min(stop, file.stop_id) - file.first_id)
            for file in self[low:high]
        ]

    def cut(self, first: int, stop: int, limit: Limit) -> tuple[int, int]:
        """Where the limit ends a range, at least one message on, and its bytes up to there."""
        stop = min(stop, first + max(1, limit.messages))
        left, at = limit.bytes, first
        for file, low, high in self.overlapping(first, stop):
            size = file.bytes_of(low, high)
            if size > left:
                at = file.first_id + file.cut(low, high, left)
                break
            left, at = left - size, file.first_id + high
        at = max(at, first + 1)
        return at, sum(file.bytes_of(low, high) for file, low, high in self.overlapping(first, at))

    def whole_groups(self, first: int, stop: int) -> int:
        """The end of the last row group that is whole in the range; `stop` where none is. For Parquet only."""
        ((file, _, high),) = self.overlapping(stop - 1, stop)
        starts = file.group_rows
        whole = int(starts[np.searchsorted(starts, high, side="right") - 1]) + file.first_id
        return whole if whole > first else stop

    def bounds(self, first: int, stop: int, parts: int) -> list[int]:
        """Where a range is cut into this many parts; of Parquet where row groups end, if that moves a cut by less than half
        a part.
        """
        ideal = even_bounds(first, stop, parts)
        starts = np.concatenate(
            [
                np.empty(0, np.int64),
                *(
                    file.group_rows + file.first_id
                    for file, _, _ in self.overlapping(first, stop)
                    if file.format == "parquet"
                ),
            ]
        )
        starts = starts[(starts > first) & (starts < stop)]
        if not len(starts):
            return ideal
        near = [int(starts[np.abs(starts - cut).argmin()]) for cut in ideal[1:-1]]
        half = (stop - first) / parts / 2
        inner = [snap if abs(snap - cut) <= half else cut for snap, cut in zip(near, ideal[1:-1], strict=True)]
        return [first, *sorted(inner), stop]

    def segments(self, first: int, stop: int) -> tuple[Segment, ...]:
        """The range as rows of files."""
        return tuple(Segment.of(file, low, high) for file, low, high in self.overlapping(first, stop) if low < high)

    def payloads(self, ids: Sequence[int], columns: tuple[str, ...] | None) -> dict[int, bytes]:
        """The payloads of these messages (ascending), as they are stored; `columns` are those that are read of Parquet.

        A Parquet row is stored with all of its file's columns: the source may read others by the time it is tried again.

        Raises:
            PositionMismatch: a file has changed or is gone.
        """
        found: dict[int, bytes] = {}
        wanted = np.array(ids, np.int64)
        for file, low, high in self.overlapping(ids[0], ids[-1] + 1):
            mine = wanted[(wanted >= file.first_id + low) & (wanted < file.first_id + high)] - file.first_id
            if not len(mine):
                continue
            start, stop, stored = int(mine[0]), int(mine[-1]) + 1, columns
            if columns is not None:
                stored = tuple(dict.fromkeys((*columns, *columns_in(file))))
                groups = file.group_rows  # whole ones are streamed: wide rows are never in memory at once
                start = int(groups[np.searchsorted(groups, start, side="right") - 1])
                stop = int(groups[np.searchsorted(groups, stop)])
            segment = Segment.of(file, start, stop)
            for rows, payload in rows_of(segment, stored, _PAYLOAD_ROWS):
                here = mine[(mine >= rows[0]) & (mine <= rows[-1])] if len(rows) else mine[:0]
                if len(here):
                    picked = payload.take(pa.array(here - rows[0]))
                    packed = picked.to_pylist() if columns is None else pack(picked)
                    found.update(zip((here + file.first_id).tolist(), packed, strict=True))
        return found
