"""Digests of a file's content, taken at registration and compared at every read.

Size and time prove nothing: a file that is rewritten in place with its rows in another order has the same size, and a
Parquet file even the same footer. So there is a digest of the bytes of each block of lines and, in a Parquet file, of the
columns that are read of each row group. A reader decodes the very bytes that it compared.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from stormproof.core.storage.protocol import OpenFile

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    Range = tuple[int, int]

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

    `hold` is called before a row group is read. The rest of the file (indexes, filters) holds no rows, and is read from
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

    def hold(self, group: pq.RowGroupMetaData, columns: Sequence[str]) -> bytes:
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
