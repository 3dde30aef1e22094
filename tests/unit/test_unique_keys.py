"""`require_unique_keys`: no key comes twice in a batch of prepared rows."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormproof.core.base.errors import SinkRefused
from stormproof.sinks.rows import by_key
from stormproof.sinks.rows.by_key import require_unique_keys

VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "few": (pa.int8(), st.integers(0, 30)),
    "text": (pa.string(), st.text(max_size=3)),
    "bytes": (pa.large_binary(), st.binary(max_size=2)),
    "bool": (pa.bool_(), st.booleans()),
    "decimal": (pa.decimal128(38, 2), st.decimals(-9, 9, places=2)),
    "date": (pa.date32(), st.dates(dt.date(1900, 1, 1), dt.date(1900, 2, 1))),
    "instant": (pa.timestamp("us"), st.datetimes()),
    "float": (pa.float64(), st.floats(allow_nan=False).filter(lambda x: str(x) != "-0.0")),
    "time": (pa.time64("us"), st.times()),
}


def _check(table: pa.Table, rows: int | None = None, rows_at_once: int = 3) -> None:
    require_unique_keys(
        lambda: table.to_batches(max_chunksize=rows_at_once),
        table.num_rows if rows is None else rows,
        tuple(table.column_names),
        "sink 's'",
    )


@given(st.data(), st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3, unique=True))
def test_a_key_that_comes_twice_is_refused(data: st.DataObject, kinds: Sequence[str]) -> None:
    keys = data.draw(st.lists(st.tuples(*(VALUES[kind][1] for kind in kinds)), max_size=12))
    table = pa.table(
        [pa.array([key[n] for key in keys], VALUES[kind][0]) for n, kind in enumerate(kinds)], names=list(kinds)
    )
    if len(set(keys)) == len(keys):
        _check(table)
        return
    with pytest.raises(SinkRefused, match=f"{len(keys) - len(set(keys))} keys come more than once"):
        _check(table)


@pytest.mark.parametrize("keys", [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 1]])
def test_keys_of_one_hash_are_compared(monkeypatch: pytest.MonkeyPatch, keys: list[int]) -> None:
    def alike(rows: pa.RecordBatch, names: Sequence[str]) -> np.ndarray:
        return np.zeros(rows.num_rows, np.uint64)

    monkeypatch.setattr(by_key, "hash_keys", alike)
    table = pa.table({"k": keys})
    if len(set(keys)) == len(keys):
        _check(table)
    else:
        with pytest.raises(SinkRefused, match=r"1 keys come more than once, such as \{'k': 1\}"):
            _check(table)


def test_a_null_is_refused_by_its_column() -> None:
    with pytest.raises(SinkRefused, match="key column 'b' holds NULL"):
        _check(pa.table({"a": [1, 2], "b": pa.array([decimal.Decimal(1), None], pa.decimal128(3, 1))}))


@pytest.mark.parametrize("rows", [1, 4])
def test_missing_and_additional_rows_are_refused(rows: int) -> None:
    with pytest.raises(SinkRefused, match=f"3 rows read from the prepared files instead of {rows}"):
        _check(pa.table({"a": [1, 2, 3]}), rows, rows_at_once=2)


def test_rows_are_read_again_only_where_hashes_are_equal() -> None:
    seen: list[int] = []

    def read(table: pa.Table) -> Callable[[], list[pa.RecordBatch]]:
        def again() -> list[pa.RecordBatch]:
            seen.append(table.num_rows)
            batches: list[pa.RecordBatch] = table.to_batches()
            return batches

        return again

    require_unique_keys(read(pa.table({"a": [1, 2]})), 2, ("a",), "sink 's'")
    assert len(seen) == 1  # different hashes: different keys
    with pytest.raises(SinkRefused):
        require_unique_keys(read(pa.table({"a": [1, 1]})), 2, ("a",), "sink 's'")
    assert len(seen) == 3  # equal hashes: the keys themselves are read
