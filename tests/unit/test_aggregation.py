"""Counts and sums: of every type, in parts or at once, exact at the edges of 64 bits."""

from __future__ import annotations

import decimal

import pyarrow as pa
import pytest

from stormproof.core.base.errors import JobFailed
from stormproof.core.graph.aggregation import Aggregation, AggregationKind, GroupBy
from stormproof.core.task import combine as combine_module
from stormproof.core.task.combine import Combiner, combine, merge
from stormproof.core.task.reduce import in_key_order

COUNT = Aggregation("n", AggregationKind.COUNT)
SUM = Aggregation("total", AggregationKind.SUM, "x")


def grouping(rows: pa.RecordBatch) -> GroupBy:
    results = [a.result(rows.schema, "g") for a in (COUNT, SUM)]
    return GroupBy("g", ("k",), (COUNT, SUM), pa.schema([rows.schema.field("k"), *results]))


def summed(values: list[object], type_: pa.DataType) -> object:
    rows = pa.RecordBatch.from_arrays([pa.array(["a"] * len(values)), pa.array(values, type_)], names=["k", "x"])
    group = grouping(rows)
    return in_key_order(group.keys, combine(group, rows)).to_pylist()[0]["total"]


@pytest.mark.parametrize(
    ("values", "type_", "total"),
    [
        ([1, 2, None], pa.int64(), 3),
        ([None, None], pa.int64(), 0),
        ([2**63 - 1, -(2**63 - 1)], pa.int64(), 0),
        ([-(2**63), 2**63 - 1], pa.int64(), -1),
        ([2**62, 2**62 - 1], pa.int64(), 2**63 - 1),
        ([-(2**62), -(2**62)], pa.int64(), -(2**63)),
        ([2**31 - 1] * 3, pa.int32(), 3 * (2**31 - 1)),
        ([-1, 2**40, -(2**62)], pa.int64(), 2**40 - 2**62 - 1),
        ([0.5, 0.25], pa.float64(), 0.75),
        ([0.5, 0.25], pa.float32(), 0.75),
        ([decimal.Decimal("99.99")] * 5, pa.decimal128(4, 2), decimal.Decimal("499.95")),
        ([decimal.Decimal(10**38 - 1)], pa.decimal128(38, 0), decimal.Decimal(10**38 - 1)),
        ([decimal.Decimal(n * (10**38 - 1)) for n in (1, 1, -1)], pa.decimal128(38, 0), decimal.Decimal(10**38 - 1)),
    ],
)
def test_sums(values: list[object], type_: pa.DataType, total: object) -> None:
    assert summed(values, type_) == total


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([2**62, 2**62], pa.int64()),
        ([-(2**63), -1], pa.int64()),
        ([2**63 - 1] * 9, pa.int64()),
        ([decimal.Decimal(10**38 - 1)] * 2, pa.decimal128(38, 0)),
        ([decimal.Decimal(10**38 - 1)] * 40, pa.decimal128(38, 0)),
        ([decimal.Decimal(-(10**38) + 1), decimal.Decimal(-1)], pa.decimal128(38, 0)),
    ],
)
def test_a_sum_that_does_not_fit_never_wraps(values: list[object], type_: pa.DataType) -> None:
    with pytest.raises(JobFailed, match="'total'"):
        summed(values, type_)


def test_parts_come_to_the_same_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combine_module, "COMBINE_ROWS_MAX", 10)
    rows = pa.record_batch({"k": [f"k{i % 17}" for i in range(400)], "x": list(range(400))})
    group = grouping(rows)
    parts = Combiner(group, _rows_max=10)
    for start in range(0, 400, 7):
        parts.absorb(combine(group, rows.slice(start, 7)))
        assert parts._rows <= 2 * 17 + 7  # pyright: ignore[reportPrivateUsage]
    assert parts.finish().to_pylist() == in_key_order(group.keys, combine(group, rows)).to_pylist()
    assert [r["k"] for r in parts.finish().to_pylist()] == sorted({f"k{i}" for i in range(17)})


def test_large_parts_of_few_keys_are_merged_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combine_module, "COMBINE_BYTES_MAX", 20_000)
    rows = pa.record_batch({"k": ["a", "b"] * 5_000, "x": list(range(10_000))})
    least = Aggregation("least", AggregationKind.SET, "x", at_most=1_000)
    schema = pa.schema([("k", pa.string()), ("least", pa.list_(pa.int64()))])
    group = GroupBy("g", ("k",), (least,), schema, rows.schema)
    parts, whole = Combiner(group, _bytes_max=20_000), combine(group, rows)
    for start in range(0, 10_000, 100):
        parts.absorb(combine(group, rows.slice(start, 100)))
        assert parts._bytes <= 2 * whole.nbytes + 20_000  # pyright: ignore[reportPrivateUsage]
    assert len(parts._parts) < 50  # pyright: ignore[reportPrivateUsage]
    assert parts._merged() == merge(group, [whole])  # pyright: ignore[reportPrivateUsage]
    assert [row["least"][-1] for row in parts.finish().to_pylist()] == [1_998, 1_999]


def test_nothing_combines_to_nothing() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([], pa.string()), pa.array([], pa.int64())], names=["k", "x"])
    group = grouping(rows)
    assert combine(group, rows).num_rows == 0
    assert Combiner(group).finish().schema == group.schema
