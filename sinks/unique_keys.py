"""That no key comes twice: in a batch of prepared rows, in 9 bytes of memory a row, and in a table, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.arrays import Words
from stormproof.core.arrow_compute import pc
from stormproof.core.errors import SinkRefused
from stormproof.core.task.keyhash import hash_keys, is_hashable

HASHES_MAX: Final = 16 << 20
"""Keys of a table that are looked at together. Where there are more, the table is read several times."""
SUSPECTS_MAX: Final = 100_000
"""Hashes of keys that come twice whose keys are compared; more are not needed to know that some do."""


def require_unique_keys(
    read: Callable[[], Iterable[pa.RecordBatch]], rows: int, keys: tuple[str, ...], where: str
) -> None:
    """Refuse prepared rows that a commit by key would apply wrongly: a NULL key matches no key, and a new key that comes
    twice would be inserted twice.

    `read` gives the key columns of all rows, and may be called twice: only keys of equal hashes are compared.

    Raises:
        SinkRefused: names the column, or one such key; or there are more or fewer than `rows` rows.
    """
    hashes = np.empty(rows, np.uint64)
    at, comparable = 0, True
    for batch in read():
        for name in keys:
            if batch.column(name).null_count:
                raise SinkRefused(f"{where}: key column {name!r} holds NULL, which no key can match", column=name)
        comparable = comparable and all(is_hashable(batch.column(name).type) for name in keys)
        if comparable and at + batch.num_rows <= rows:
            hashes[at : at + batch.num_rows] = hash_keys(batch, keys)
        at += batch.num_rows
    if at != rows:
        raise SinkRefused(f"{where}: {at} rows read from the prepared files instead of {rows}")
    if comparable:
        suspects = _twice(hashes)
        if not suspects.size:
            return
        found = _doubled((_with_hashes(batch, keys, suspects) for batch in read()), keys)
    else:
        found = _doubled(read(), keys)
    if found.num_rows:
        more = pc.sum(pc.subtract(found.column("_sum"), 1)).as_py()
        one = found.select(list(keys)).slice(0, 1).to_pylist()[0]
        raise SinkRefused(f"{where}: {more} keys come more than once, such as {one!r}", key=repr(one))


def doubled_keys(read: Callable[[], Iterable[pa.RecordBatch]], rows: int, keys: tuple[str, ...]) -> int:
    """How many keys a table of so many rows has more than once; of a great many, at least how many. A NULL equals none."""
    parts = max(1, -(-rows // HASHES_MAX))
    return sum(_doubled(_suspects(read, keys, part, parts), keys).num_rows for part in range(parts))


def _suspects(
    read: Callable[[], Iterable[pa.RecordBatch]], keys: tuple[str, ...], part: int, parts: int
) -> Iterator[pa.RecordBatch]:
    """The rows whose keys' hashes are of this part, and come more than once."""

    def chosen() -> Iterator[pa.RecordBatch]:
        for batch in read():
            yield (
                batch.select(list(keys)).filter(pa.array(hash_keys(batch, keys) % np.uint64(parts) == part)).drop_null()
            )

    hashes = [hash_keys(batch, keys) for batch in chosen()]
    found = _twice(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)
    if found.size:
        yield from (_with_hashes(batch, keys, found[:SUSPECTS_MAX]) for batch in chosen())


def _twice(hashes: Words) -> Words:
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def _with_hashes(batch: pa.RecordBatch, keys: tuple[str, ...], hashes: Words) -> pa.RecordBatch:
    return batch.filter(pa.array(np.isin(hash_keys(batch, keys), hashes)))


def _doubled(batches: Iterable[pa.RecordBatch], keys: tuple[str, ...]) -> pa.Table:
    """The keys that come more than once, and how often in the column `_sum`."""
    parts = [batch.select(list(keys)) for batch in batches if batch.num_rows]
    if not parts:
        return pa.table({"_sum": pa.array([], pa.int64())})
    table = pa.Table.from_batches(parts)
    counted = table.append_column("", pa.repeat(1, table.num_rows)).group_by(list(keys)).aggregate([("", "sum")])
    return counted.filter(pc.greater(counted.column("_sum"), 1))
