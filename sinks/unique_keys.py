"""That no key comes twice in a batch of prepared rows, in 9 bytes of memory a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.core.errors import SinkRefused
from stormproof.core.task.keyhash import hash_keys, is_hashable


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
        hashes.sort()
        suspects = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        if not suspects.size:
            return
        _require_unique((_with_hashes(batch, keys, suspects) for batch in read()), keys, where)
    else:
        _require_unique(read(), keys, where)


def _with_hashes(batch: pa.RecordBatch, keys: tuple[str, ...], hashes: npt.NDArray[np.uint64]) -> pa.RecordBatch:
    return batch.filter(pa.array(np.isin(hash_keys(batch, keys), hashes)))


def _require_unique(batches: Iterable[pa.RecordBatch], keys: tuple[str, ...], where: str) -> None:
    parts = [batch.select(list(keys)) for batch in batches if batch.num_rows]
    if not parts:
        return
    table = pa.Table.from_batches(parts)
    counted = table.append_column("", pa.repeat(1, table.num_rows)).group_by(list(keys)).aggregate([("", "sum")])
    if counted.num_rows == table.num_rows:
        return
    twice = counted.filter(pc.greater(counted.column("_sum"), 1)).select(list(keys)).slice(0, 1).to_pylist()[0]
    raise SinkRefused(
        f"{where}: {table.num_rows - counted.num_rows} keys come more than once, such as {twice!r}", key=repr(twice)
    )
