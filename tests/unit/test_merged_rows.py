"""Rows of a batch merged with the rows that a table holds: each added row once, whatever its key's type."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stormproof.core.errors import SinkRefused
from stormproof.core.folds import ByFunction, Fold, MergeFunction
from stormproof.core.sink import SinkInput
from stormproof.core.sketches import estimates, sketches_of_groups
from stormproof.sinks.merging import merged_rows

THETA = ByFunction(MergeFunction.THETA, ("x", "x_sketch"))
TIMES = [dt.datetime(1969, 12, 31, 23, 59, 59, 999999, dt.UTC), dt.datetime(2262, 5, 1, tzinfo=dt.UTC)]
KEYS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, 0, 127]),
    (pa.int64(), [-(2**63), 0, 2**63 - 1]),
    (pa.bool_(), [False, True]),
    (pa.string(), ["", "a", "\u00c4"]),
    (pa.binary(), [b"", b"\0", b"\xff"]),
    (pa.date32(), [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(9999, 12, 31)]),
    (pa.timestamp("us"), [time.replace(tzinfo=None) for time in TIMES]),
    (pa.timestamp("us", "UTC"), TIMES),
    (pa.decimal128(10, 2), [Decimal("-0.01"), Decimal("0.00"), Decimal("99999999.99")]),
    (pa.decimal128(38, 10), [Decimal("1e-10"), Decimal("9" * 28)]),
]


def rows(kind: pa.DataType, keys: list[Any], value: int) -> pa.Table:
    sketch = sketches_of_groups(np.arange(len(keys)), pa.array([value] * len(keys)), len(keys))
    columns = [pa.array(keys, kind), pa.array([1] * len(keys), pa.int64()), estimates(sketch), sketch]
    return pa.Table.from_arrays(columns, schema=input_of(kind).schema)


def input_of(kind: pa.DataType) -> SinkInput:
    schema = pa.schema([("key", kind), ("n", pa.int64()), ("x", pa.int64()), ("x_sketch", pa.binary())])
    return SinkInput.for_fold(schema, ("key",), {"n": Fold.SUM, "x": THETA, "x_sketch": THETA})


@pytest.mark.parametrize(("kind", "keys"), KEYS, ids=str)
def test_each_added_row_comes_once_merged_with_the_row_of_its_key(kind: pa.DataType, keys: list[Any]) -> None:
    held, added = rows(kind, keys[1:], 1).select(["key", "x", "x_sketch"]), rows(kind, keys, 2)
    made = pa.Table.from_batches(list(merged_rows(held.to_batches(max_chunksize=1), added, input_of(kind), "here")))
    assert made.schema.equals(added.schema)
    assert sorted((row["key"], row["n"], row["x"]) for row in made.to_pylist()) == [
        (keys[0], 1, 1),
        *((key, 1, 2) for key in keys[1:]),
    ]


def test_a_key_that_is_held_twice_is_refused_also_in_two_batches() -> None:
    held = rows(pa.int64(), [1, 2, 1], 1).select(["key", "x", "x_sketch"]).to_batches(max_chunksize=1)
    with pytest.raises(SinkRefused, match=r"here: the table has the key \{'key': 1\} more than once"):
        list(merged_rows(held, rows(pa.int64(), [1], 2), input_of(pa.int64()), "here"))
