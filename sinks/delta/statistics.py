"""Which columns of a Delta table have statistics in its log, and whether those are right.

No reader and no MERGE may pass over a file that holds the row. delta-rs rounds the bounds of decimals through a double, and
leaves NaN out of those of floating-point numbers. Spark gives booleans none, spells a small decimal with an exponent, which
delta-rs does not read, and has NaN as an upper bound, under which a dataset of delta-rs finds no number. Columns for which a
file has no bounds beside others that have some are no way out: a dataset of delta-rs takes that for "no value". So such
columns are left out of the table's own property that names the columns with statistics. Writers gather none of them then,
and the bounds that a file has already are not used, be it by a MERGE or by a reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.storage.files import files_at
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.prepare.staging import COLUMNS_MAX, FileStatistics
from stormproof.sinks.rows.limits import is_string

WITH_STATISTICS: Final = "delta.dataSkippingStatsColumns"
"""The property that names the columns with statistics; without it they are the first ones, `_FIRST` in number."""
_FIRST: Final = "delta.dataSkippingNumIndexedCols"
_DIGITS_OF_DOUBLE: Final = 15
"""A decimal of so many digits is the same after it was a double."""
_SCALE_WITHOUT_EXPONENT: Final = 6
"""Smaller decimals are written as ``1E-7``, by Spark as by delta-rs, whose readers take that for no bound."""
_NAME: Final = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^,.`]+))[^,]*")
"""The column of one entry of the property; an entry may name a field of it."""


def narrowed(
    schema: pa.Schema,
    partitions: Collection[str],
    properties: Mapping[str, str],
    is_doubtful: Callable[[pa.Field], bool],
) -> str | None:
    """The value of `WITH_STATISTICS` that leaves out the columns that are doubtful; None: there are none.

    `partitions` are the columns without statistics, by which the table is partitioned. A column that has the name of a field
    inside of a doubtful one is left out, too: delta-rs takes its name for that of the field.
    """
    indexed = _indexed([f for f in schema if f.name not in partitions], properties)
    doubtful = [f for f in indexed if is_doubtful(f)]
    inside = {name for f in doubtful for name in _names_inside(f.type)}
    kept = [f for f in indexed if f not in doubtful and f.name not in inside]
    return None if kept == indexed else ",".join(f"`{f.name}`" for f in kept if _may_be_named(f))


def by_delta_rs(field: pa.Field) -> bool:
    """Whether delta-rs may take wrong bounds of a column."""
    return is_rounded(field.type)


def by_spark(keys: Collection[str]) -> Callable[[pa.Field], bool]:
    """Whether delta-rs's readers find no row by the bounds that Spark takes of a column; or it is one of the `keys`, where
    Spark's MERGE believes the bounds that delta-rs has taken.
    """
    return lambda field: any(map(_is_unread, _leaves(field.type))) or (field.name in keys and is_rounded(field.type))


def _is_unread(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(kind)
        or pa.types.is_floating(kind)
        or (pa.types.is_decimal(kind) and kind.scale > _SCALE_WITHOUT_EXPONENT)
    )


def is_rounded(kind: pa.DataType) -> bool:
    """Whether delta-rs may take wrong bounds of such a column, or of a field of such a struct."""
    return any(
        pa.types.is_floating(leaf)
        or (pa.types.is_decimal(leaf) and (leaf.precision > _DIGITS_OF_DOUBLE or leaf.scale > _SCALE_WITHOUT_EXPONENT))
        for leaf in _leaves(kind)
    )


def exact_statistics(path: str) -> str:
    """The `stats` of a Parquet file, by its rows."""
    return _read(path, COLUMNS_MAX).to_json()


def wrong_statistics(log: DeltaLog, adds: Mapping[str, dict[str, Any]]) -> tuple[dict[str, list[str]], list[str]]:
    """The live files whose statistics exclude a row that they hold, each with the columns; and those that were not read."""
    wrong, unread = dict[str, list[str]](), list[str]()
    for name, add in adds.items():
        path = log.local_path(name)
        if path is None or "stats_parsed" in add or (add.get("deletionVector") and _are_tight(add.get("stats", ""))):
            unread.append(name)
        elif columns := _read(path, None).excluded_by(add.get("stats", "")):
            wrong[name] = columns
    return wrong, unread


def _are_tight(statistics: str) -> bool:
    """Whether they are those of the rows that a deletion vector has left, and not of all in the file."""
    return bool(json.loads(statistics or "{}").get("tightBounds", True))


def _read(path: str, columns_max: int | None) -> FileStatistics:
    with files_at(path).open(path) as file, pq.ParquetFile(file, coerce_int96_timestamp_unit="us") as parquet:
        found = FileStatistics(parquet.schema_arrow, columns_max)
        for batch in parquet.iter_batches():
            found.add(batch)
    return found


def _indexed(columns: Sequence[pa.Field], properties: Mapping[str, str]) -> list[pa.Field]:
    """The columns that have statistics. To delta-rs a struct is one of the first so many; to Spark it is as many as it has
    fields, so that those of Spark are among them.
    """
    named = properties.get(WITH_STATISTICS)
    if named is not None:
        names = {(quoted.replace("``", "`") or plain.strip()).lower() for quoted, plain in _NAME.findall(named)}
        return [f for f in columns if f.name.lower() in names]
    told = properties.get(_FIRST, "")
    most = int(told) if re.fullmatch(r"-?\d+", told) else COLUMNS_MAX
    return [*columns[: most if most >= 0 else None]]


def _leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    """The type itself, or those inside of a struct. Arrays and maps have no statistics inside."""
    if not pa.types.is_struct(kind):
        yield kind
        return
    for at in range(kind.num_fields):
        yield from _leaves(kind.field(at).type)


def _names_inside(kind: pa.DataType) -> Iterator[str]:
    """The names of a struct's fields, at any depth."""
    if pa.types.is_struct(kind):
        for at in range(kind.num_fields):
            yield kind.field(at).name
            yield from _names_inside(kind.field(at).type)


def _may_be_named(field: pa.Field) -> bool:
    """Whether Spark takes it for a column with statistics, and every reader of the property its name."""
    return "`" not in field.name and all(
        pa.types.is_integer(leaf)
        or pa.types.is_floating(leaf)
        or pa.types.is_decimal(leaf)
        or pa.types.is_date(leaf)
        or pa.types.is_timestamp(leaf)
        or is_string(leaf)
        for leaf in _leaves(field.type)
    )
