"""What a Delta table holds for the keys of a batch, merged with the batch's rows before their MERGE."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from itertools import chain
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from stormproof.core.arrow_compute import pc
from stormproof.core.sink import SinkInput
from stormproof.sinks.delta.folds import quoted
from stormproof.sinks.merging import columns_by_function, merged_rows

BYTES_IN_MEMORY_MAX: Final = 256 << 20
"""Merged rows beyond are streamed to the MERGE; the table's files are then not pruned by the range of its keys."""


class MergedRows:
    """The rows of a batch, with what functions make of their columns and of the table's rows, at the version as loaded.

    The MERGE must be of the same `table`: then a commit of another writer in between conflicts with it.
    """

    def __init__(self, table: DeltaTable, added: pa.Table, input_: SinkInput, where: str) -> None:
        self._schema = input_.schema
        self._rows = merged_rows(held_rows(table, added, input_), added, input_, where)
        self.failure: Exception | None = None
        """What failed while the MERGE read the rows: delta-rs does not hand it on."""

    def source(self) -> tuple[pa.Table | pa.RecordBatchReader, bool]:
        """The rows for the MERGE, and whether they are streamed.

        Raises:
            SinkRefused: a held value is none that its function can merge.
        """
        read, size = list[pa.RecordBatch](), 0
        for batch in self._rows:
            read.append(batch)
            size += batch.nbytes
            if size > BYTES_IN_MEMORY_MAX:
                return pa.RecordBatchReader.from_batches(self._schema, chain(read, self._left())), True
        return pa.Table.from_batches(read, self._schema), False

    def _left(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._rows
        except Exception as error:
            self.failure = error
            raise


def held_rows(table: DeltaTable, added: pa.Table, input_: SinkInput) -> Iterator[pa.RecordBatch]:
    """The keys and the columns to merge of the table's rows; of files that cannot hold one of the keys, none."""
    columns = ", ".join(map(quoted, (*input_.keys, *columns_by_function(input_))))
    ranges = [
        f"{quoted(key)} BETWEEN {low} AND {high}" for key in input_.keys for low, high in _range(added.column(key))
    ]
    asked = f"SELECT {columns} FROM t{' WHERE ' if ranges else ''}{' AND '.join(ranges)}"
    return iter(pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(asked)))


def _range(keys: pa.ChunkedArray) -> list[tuple[str, str]]:
    """The least and the greatest key as literals; none for types whose statistics are cut."""
    if not (pa.types.is_integer(keys.type) or pa.types.is_date32(keys.type)):
        return []
    low, high = pc.min_max(keys).as_py().values()
    if isinstance(low, dt.date):
        return [(f"DATE '{low}'", f"DATE '{high}'")]
    return [(str(low), str(high))]
