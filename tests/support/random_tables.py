"""Random schemas and rows for Hypothesis, the rows as Python values, and what each store's reader must show of them."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

_UTC: Final = dt.UTC
_TEXT: Final = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
_NAMES: Final = ("a", "B c", 'd"e', "é", "f.g", "h`i", "select", "j'k")
_FLAT: Final[tuple[tuple[pa.DataType, st.SearchStrategy[Any]], ...]] = (
    (pa.string(), _TEXT),
    (pa.binary(), st.binary(max_size=40)),
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(_UTC))),
    (pa.timestamp("us"), st.datetimes()),
)


@st.composite
def _decimal(draw: st.DrawFn) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    precision = draw(st.integers(1, 38))
    scale = draw(st.integers(0, precision))
    most = 10**precision - 1
    digits = st.integers(-most, most)
    return pa.decimal128(precision, scale), digits.map(lambda n: Decimal(f"{n}E-{scale}"))


def _types(depth: int) -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    flat = st.one_of(st.sampled_from(_FLAT), _decimal())
    return flat if depth == 0 else st.one_of(flat, flat, _nested(depth))


@st.composite
def _nested(draw: st.DrawFn, depth: int) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    match draw(st.sampled_from(["list", "struct", "map"])):
        case "list":
            kind, values = draw(_types(depth - 1))
            return pa.list_(kind), st.lists(st.none() | values, max_size=4)
        case "map":
            key, keys = draw(st.sampled_from(_FLAT[:1] + _FLAT[3:7]))
            kind, values = draw(_types(depth - 1))
            pairs = st.lists(st.tuples(keys, st.none() | values), max_size=3, unique_by=lambda pair: pair[0])
            return pa.map_(key, kind), pairs
        case _:
            names = draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3, unique=True))
            fields = {name: draw(_types(depth - 1)) for name in names}
            kind = pa.struct([(name, of) for name, (of, _) in fields.items()])
            return kind, st.fixed_dictionaries({name: st.none() | values for name, (_, values) in fields.items()})


@st.composite
def batches(draw: st.DrawFn) -> list[pa.Table]:
    """One to three batches of one schema: a number for each row, and some columns of any type."""
    names = draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=4, unique=True))
    columns = {name: draw(_types(2)) for name in names}
    schema = pa.schema([("i", pa.int32()), *((name, kind) for name, (kind, _) in columns.items())])
    made: list[pa.Table] = []
    first = 0
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(0, 4))
        arrays = [
            pa.array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), kind)
            for kind, values in columns.values()
        ]
        made.append(pa.table([pa.array(range(first, first + rows), pa.int32()), *arrays], schema=schema))
        first += rows
    return made


@dataclass(frozen=True)
class Made:
    """A table that a sink may make, and the batches that go there."""

    batches: list[pa.Table]
    partitions: list[str]
    properties: dict[str, str]
    by_key: bool
    constrained: bool


_PROPERTIES: Final[tuple[dict[str, str], ...]] = (
    {},
    {"delta.enableChangeDataFeed": "true"},
    {"delta.enableDeletionVectors": "true"},
    {"delta.appendOnly": "true", "delta.checkpointInterval": "1"},
    {"delta.dataSkippingNumIndexedCols": "1", "my.own": "x", "delta.logRetentionDuration": "interval 30 days"},
)
"""A MERGE of a table with one of the first features needs Spark, or is refused."""


@st.composite
def made_tables(draw: st.DrawFn) -> Made:
    """Batches, and how their table is made: NOT NULL, partitions, properties, a constraint, rows by key or not."""
    given = draw(batches())
    whole = pa.concat_tables(given)
    strict = [f.name for f in whole.schema if not whole[f.name].null_count and draw(st.booleans())]
    schema = pa.schema([f.with_nullable(f.name not in strict) for f in whole.schema])
    by_key = draw(st.booleans())
    by_value = [name for name in whole.schema.names[1:] if _is_partition(whole[name], by_key=by_key)]
    partitions = draw(st.lists(st.sampled_from(by_value), max_size=2, unique=True)) if by_value else []
    properties = draw(st.sampled_from(_PROPERTIES[:1] + _PROPERTIES[4:] if by_key else _PROPERTIES))
    return Made([table.cast(schema) for table in given], partitions, properties, by_key, draw(st.booleans()))


def _is_partition(column: pa.ChunkedArray, *, by_key: bool) -> bool:
    """Whether delta-rs writes rows of a table that it is partitioned by this column."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None and by_key:
        return False
    if pa.types.is_string(kind):
        return all(value is None or 0 < len(value.encode()) < 60 for value in column.to_pylist())
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_temporal(kind))


def shown(value: Any) -> Any:
    """A value that compares by what it is: NaN equals itself, 0.0 is not -0.0, and 1.5 is not 1.50."""
    match value:
        case dict():
            return tuple((name, shown(of)) for name, of in value.items())
        case list() | tuple():
            return tuple(shown(of) for of in value)
        case dt.datetime() if value.tzinfo is not None:
            return ("at", value.astimezone(_UTC).replace(tzinfo=None))
        case float() if math.isnan(value):
            return "NaN"
        case float() | Decimal():
            return repr(value)
        case _:
            return value


def as_json(value: Any, kind: pa.DataType) -> Any:
    """A nested value as Postgres's `to_jsonb` shows it, with numbers as decimals; made value by value, unlike the sink's."""
    if value is None:
        return None
    if pa.types.is_list(kind):
        return [as_json(of, kind.value_type) for of in value]
    if pa.types.is_struct(kind):
        return {f.name: as_json(value[f.name], f.type) for f in (kind.field(i) for i in range(kind.num_fields))}
    if pa.types.is_map(kind):
        return {str(key): as_json(of, kind.item_type) for key, of in value}
    if pa.types.is_floating(kind):
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return Decimal(str(np.float32(value)) if pa.types.is_float32(kind) else repr(value))
    match value:
        case bool() | str():
            return value
        case bytes():
            return f"\\x{value.hex()}"
        case dt.datetime():
            zone = "" if value.tzinfo is None else "Z"
            return value.replace(tzinfo=None).isoformat(timespec="microseconds") + zone
        case dt.date():
            return value.isoformat()
        case _:
            return Decimal(value)
