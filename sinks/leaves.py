"""The values inside a nested column: each of its parts as one flat column, with the row that each value belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.arrow_compute import pc


@dataclass(frozen=True, slots=True)
class Part:
    """One level of a nested column, flat. `path` begins behind the column's name: ``.x`` of a struct, ``[]`` of an array,
    ``{key}`` and ``{value}`` of a map.

    `rows` has the column's row of each value. `lacking` has the rows in which a value is NULL that must not be: in a field
    that is declared NOT NULL, or the key of a map.
    """

    path: str
    values: pa.Array
    rows: npt.NDArray[np.int64]
    lacking: npt.NDArray[np.int64]


def is_list(kind: pa.DataType) -> bool:
    """Whether it is an array of any of Arrow's layouts that Parquet can hold; a map is none."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_string(kind: pa.DataType) -> bool:
    """Whether it is text of any of Arrow's layouts, a dictionary excepted."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether it is bytes of any of Arrow's layouts."""
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def plain(column: pa.Array) -> pa.Array:
    """The column in a layout that every function of Arrow takes: without dictionary, extension type and views."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain(column.storage)
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    if pa.types.is_string_view(kind):
        return column.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return column.cast(pa.large_binary())
    return column


def parts_of(column: pa.Array) -> Iterator[Part]:
    """The parts of a nested column, the outer ones first; none of a flat one. NULL rows have no parts."""
    yield from _inside(column, "", np.arange(len(column)))


def as_list(column: pa.Array) -> pa.Array:
    """A map as an array of its entries, structs of key and value."""
    kind = column.type
    return column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))


def parents_of(column: pa.Array) -> npt.NDArray[np.int64]:
    """For each value of a flattened array, the row that it belongs to."""
    return np.repeat(np.arange(len(column)), lengths_of(column))


def lengths_of(column: pa.Array) -> npt.NDArray[np.int64]:
    """The number of values in each row of an array; 0 where it is NULL."""
    lengths: npt.NDArray[np.int64] = (
        pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return lengths


def _inside(column: pa.Array, path: str, rows: npt.NDArray[np.int64]) -> Iterator[Part]:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _inside(column.storage, path, rows)
    elif pa.types.is_struct(kind):
        there = pc.is_valid(column)
        for i, child in enumerate(column.flatten()):
            field = kind.field(i)
            missing = None if field.nullable else pc.and_(there, pc.is_null(child))
            yield from _part(child, f"{path}.{field.name}", rows, missing)
    elif is_list(kind):
        values = column.flatten()
        missing = None if kind.value_field.nullable else pc.is_null(values)
        yield from _part(values, f"{path}[]", rows[parents_of(column)], missing)
    elif pa.types.is_map(kind):
        entries = as_list(column)
        keys, items = entries.flatten().flatten()
        inner = rows[parents_of(entries)]
        yield from _part(keys, f"{path}{{key}}", inner, pc.is_null(keys))
        yield from _part(items, f"{path}{{value}}", inner, None if kind.item_field.nullable else pc.is_null(items))


def _part(values: pa.Array, path: str, rows: npt.NDArray[np.int64], missing: pa.Array | None) -> Iterator[Part]:
    lacking = rows[:0] if missing is None else rows[missing.to_numpy(zero_copy_only=False)]
    yield Part(path, values, rows, lacking)
    yield from _inside(values, path, rows)


def repeated_keys(column: pa.Array) -> npt.NDArray[np.int64]:
    """The rows of a map in which a key comes more than once; keys that are nested themselves are not looked at."""
    entries = as_list(column)
    keys, parents = plain(entries.flatten().field(0)), parents_of(entries)
    if not len(keys) or pa.types.is_nested(keys.type):
        return parents[:0]
    counted = pa.table({"row": parents, "key": keys}).group_by(["row", "key"]).aggregate([([], "count_all")])
    if counted.num_rows == len(keys):
        return parents[:0]
    found: npt.NDArray[np.int64] = np.unique(
        counted.filter(pc.greater(counted.column("count_all"), 1)).column("row").to_numpy()
    )
    return found
