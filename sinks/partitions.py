"""How a task cuts its rows by the partitions of a Delta table: a prepared file holds rows of one partition alone.

The partition columns are not in the file. Their values travel as text in the file's description, and its digest covers them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.core.sink import PreparedFile
from stormproof.sinks.latest import FileTaskWriter

OPEN_MAX: Final = 100
"""Files that a task keeps open at once. Where its rows have more partitions, it ends these files and begins others."""
BYTES_MAX: Final = 64 * 1024 * 1024
"""So many bytes of rows wait for their files at most, over all partitions of a task."""


class PartitionedTaskWriter:
    """One task's output for a partitioned table: a file for each partition that its rows have, or a few."""

    def __init__(
        self, columns: Sequence[str], schema: pa.Schema, open_file: Callable[[pa.Schema, str], FileTaskWriter]
    ) -> None:
        self._columns = tuple(columns)
        self._schema = schema
        self._kept = [name for name in schema.names if name not in self._columns]
        self._open_file = open_file
        self._open: dict[str, FileTaskWriter] = {}
        self._waiting = 0
        self._done: list[PreparedFile] = []
        self._all: list[FileTaskWriter] = []

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows of the writer's schema.

        Raises:
            ValueError: the rows' columns are not those of the schema.
        """
        if rows.schema.names != self._schema.names or rows.schema.types != self._schema.types:
            raise ValueError(f"this writer takes columns {self._schema.names}, not {rows.schema.names}")
        if rows.num_rows == 0:
            return
        for partition, part in self._parts(rows):
            if partition not in self._open:
                file = self._open_file(part.schema, partition)
                self._open[partition] = file
                self._all.append(file)
            self._open[partition].write(part)
        self._waiting += rows.nbytes
        if self._waiting >= BYTES_MAX or len(self._open) > OPEN_MAX:
            self._let_go()

    def close(self) -> Sequence[PreparedFile]:
        """Finish all files; returns them."""
        self._end_files()
        return tuple(self._done)

    def discard(self) -> None:
        """Remove what was written: the task failed."""
        for file in self._all:
            file.discard()

    def _let_go(self) -> None:
        if len(self._open) > OPEN_MAX:
            self._end_files()
        else:
            for file in self._open.values():
                file.flush()
        self._waiting = 0

    def _end_files(self) -> None:
        for file in self._open.values():
            self._done += file.close()
        self._open.clear()

    def _parts(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows of each partition, with its values as JSON."""
        there = [name for name in self._columns if name in self._schema.names]
        texts = [as_text(rows.column(name)).dictionary_encode(null_encoding="encode") for name in there]
        codes = np.zeros(rows.num_rows, np.int64)
        for text in texts:
            own = text.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            codes = np.unique(codes * len(text.dictionary) + own, return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        kept = rows.select(self._kept)
        for start, end in zip(starts, [*starts[1:], rows.num_rows], strict=True):
            row = int(order[start])
            values = dict.fromkeys(self._columns)  # one that the rows do not have is NULL
            values |= {n: t.dictionary[t.indices[row].as_py()].as_py() for n, t in zip(there, texts, strict=True)}
            yield json.dumps(values), kept.take(pa.array(order[start:end]))


def as_text(column: pa.Array) -> pa.Array:
    """A partition column's values as Delta's log spells them."""
    kind = column.type
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return column.cast(pa.string())
    in_utc = column.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us")).cast(pa.string())
    return pc.binary_join_element_wise(pc.replace_substring(in_utc, " ", "T"), "Z", "")


def partition_values(file: PreparedFile) -> Mapping[str, str | None]:
    """The partition of a prepared file; empty where it was not cut."""
    values: dict[str, str | None] = json.loads(file.partition) if file.partition else {}
    return values
