"""The task of a key: a hash of key columns that is the same in every process and for every form of an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import Rows, Words, pc
from stormproof.core.graph.fields import can_be_key
from stormproof.core.tracking.share import GAMMA, mix64

_BASE: Final = np.uint64(0x9E3779B97F4A7C55)
"""Odd, so that no power of it loses bits."""
_SAMPLE: Final = 2_048
_NULL: Final = np.uint64(0xA3F5C1E29B7D6084)


def task_numbers(rows: pa.RecordBatch, keys: Sequence[str], tasks: int) -> npt.NDArray[np.int32]:
    """The task, 0 to `tasks` - 1, of each row's key.

    Equal keys have equal tasks in any record batch, and in any form of Arrow's (a slice, a dictionary, large strings). NULL
    is a value like any other, equal to itself.
    """
    if tasks == 1:
        return np.zeros(rows.num_rows, np.int32)
    return (hash_keys(rows, keys) % np.uint64(tasks)).astype(np.int32)


def hash_keys(rows: pa.RecordBatch, keys: Sequence[str]) -> Words:
    """A 64-bit hash of each row's key."""
    total = np.zeros(rows.num_rows, np.uint64)
    for key in keys:
        total = mix64(total * GAMMA + GAMMA ^ _hash_column(rows.column(key)))
    return total


def is_hashable(kind: pa.DataType) -> bool:
    """Whether `hash_keys` takes columns of such values: those of fields that can be keys, and their large forms."""
    return can_be_key(kind) or bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _hash_column(column: pa.Array) -> Words:
    if len(column) == 0:
        return np.empty(0, np.uint64)
    if _repeats(column):
        column = column.dictionary_encode()
    hashes = _hash_dictionary(column) if pa.types.is_dictionary(column.type) else _hash_values(column)
    if column.null_count:  # the value in a NULL's place is arbitrary
        hashes[column.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return hashes


def _repeats(column: pa.Array) -> bool:
    """Whether it pays to hash each distinct text once only, by an estimate from the first rows. Both ways give one result.

    Of `_SAMPLE` rows drawn from D equally frequent values, about sample^2 / 2D repeat an earlier one. It pays where there
    are fewer than about half as many values as rows.
    """
    type_ = column.type
    if len(column) <= 2 * _SAMPLE or not (pa.types.is_string(type_) or pa.types.is_binary(type_)):
        return False
    distinct = int(pc.count_distinct(column.slice(0, _SAMPLE), mode="all").as_py())
    return (_SAMPLE - distinct) * len(column) >= _SAMPLE * _SAMPLE


def _hash_dictionary(column: pa.Array) -> Words:
    """Hash each value of the dictionary once. NULL may be an index or a value."""
    if len(column.dictionary) == 0:  # then every index is NULL
        return np.full(len(column), _NULL, np.uint64)
    places: Rows = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return _hash_column(column.dictionary)[places]


def _hash_values(column: pa.Array) -> Words:
    type_ = column.type
    if pa.types.is_string(type_) or pa.types.is_binary(type_):
        return _hash_bytes(column, np.dtype(np.int32))
    if pa.types.is_large_string(type_) or pa.types.is_large_binary(type_):
        return _hash_bytes(column, np.dtype(np.int64))
    if pa.types.is_decimal128(type_):
        halves = np.frombuffer(column.buffers()[1], np.uint64)
        pairs = halves[2 * column.offset : 2 * (column.offset + len(column))].reshape(-1, 2)
        return mix64(mix64(pairs[:, 0]) ^ pairs[:, 1])
    if pa.types.is_date32(type_):
        column = column.view(pa.int32())
    elif pa.types.is_timestamp(type_) or pa.types.is_uint64(type_):
        column = column.view(pa.int64())
    if column.null_count:
        column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
    return mix64(np.ascontiguousarray(pc.cast(column, pa.int64()).to_numpy(zero_copy_only=False)).view(np.uint64))


def _hash_bytes(column: pa.Array, offset: np.dtype[Any]) -> Words:
    """A polynomial over each value's bytes, for all values in one pass."""
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, offset)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    hashes = np.zeros(len(column), np.uint64)
    lengths = np.diff(offsets)
    if data_buffer is not None and offsets[-1] > offsets[0]:
        data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]].astype(np.uint64) + np.uint64(1)
        starts = offsets[:-1] - offsets[0]
        powers = np.full(int(lengths.max()), _BASE, np.uint64)
        powers[0] = 1
        np.multiply.accumulate(powers, out=powers)
        place = np.arange(len(data), dtype=np.int64) - np.repeat(starts, lengths)
        filled = np.flatnonzero(lengths)  # reduceat would give an empty value its neighbour's first byte
        hashes[filled] = np.add.reduceat(data * powers[place], starts[filled])
    return mix64(hashes ^ mix64(lengths.astype(np.uint64)))
