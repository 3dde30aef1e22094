"""Operations on any tuples, against the same in plain Python: groups, joins, and their tracking."""

from __future__ import annotations

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import run_job, source

from stormproof.core.engine.inline import InlineEngine
from stormproof.core.graph.aggregation import Aggregation, AggregationKind, GroupBy
from stormproof.core.graph.join import JoinOn
from stormproof.core.task.combine import Combiner, combine, finish
from stormproof.core.task.join import joined_rows, matches
from stormproof.core.task.reduce import rows_with_keys
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.topology.stream import Topology

Row = tuple[Any, ...]
FEW = settings(max_examples=50, deadline=None)
JOB = settings(max_examples=12, deadline=None)
KEYS = st.one_of(st.none(), st.sampled_from(["", "a", "b", "ü"]))
VALUES = st.one_of(st.none(), st.integers(-(2**40), 2**40))


def batch(names: Sequence[str], types: Sequence[pa.DataType], rows: Sequence[Row]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else ([] for _ in names)
    return pa.RecordBatch.from_arrays(
        [pa.array(list(c), t) for c, t in zip(columns, types, strict=True)],
        schema=pa.schema(list(zip(names, types, strict=True))),
    )


READY = [
    Aggregation("n", AggregationKind.COUNT),
    Aggregation("s", AggregationKind.SUM, "x"),
    Aggregation("lo", AggregationKind.MIN, "x"),
    Aggregation("hi", AggregationKind.MAX, "t"),
    Aggregation("m", AggregationKind.MEAN, "x"),
    Aggregation("d", AggregationKind.DISTINCT, "t"),
    Aggregation("e", AggregationKind.DISTINCT, "x"),
]


def answer(rows: Sequence[Row]) -> Row:
    x = [v for _, v, _ in rows if v is not None]
    t = [v for _, _, v in rows if v is not None]
    mean = None if not x else float(sum(x)) / float(len(x))
    return (
        len(rows), sum(x), min(x, default=None), max(t, default=None), mean, len(set(t)), len(set(x))
    )  # fmt: skip


@pytest.mark.parametrize("keyed", [True, False])
@FEW
@given(parts=st.lists(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), VALUES, KEYS), max_size=12), max_size=5))
def test_ready_aggregates_come_to_the_same_however_rows_are_divided(keyed: bool, parts: list[list[Row]]) -> None:
    names, types = ("k", "x", "t"), (pa.string(), pa.int64(), pa.string())
    schema = pa.schema(list(zip(names, types, strict=True)))
    keys = ("k",) if keyed else ()
    results = [a.result(schema, "g") for a in READY]
    group = GroupBy("g", keys, tuple(READY), pa.schema([*(schema.field(k) for k in keys), *results]), schema)
    combiner = Combiner(group, _rows_max=3)
    for part in parts:
        combiner.absorb(combine(group, batch(names, types, part)))
    travelled = combiner.partials()
    again = Combiner(group)
    again.absorb(pa.Table.from_batches([travelled]))
    got = {tuple(row[k] for k in keys): tuple(row[a.output] for a in READY) for row in again.finish().to_pylist()}
    grouped: dict[Row, list[Row]] = defaultdict(list)
    for row in (row for part in parts for row in part):
        grouped[(row[0],) if keyed else ()].append(row)
    assert got == {key: answer(rows) for key, rows in grouped.items()}


@FEW
@given(values=st.lists(st.floats(allow_nan=True), min_size=1, max_size=8))
def test_nan_is_the_least_and_the_greatest_only_where_there_is_nothing_else(values: list[float]) -> None:
    schema = pa.schema([("x", pa.float64())])
    wanted = (Aggregation("lo", AggregationKind.MIN, "x"), Aggregation("hi", AggregationKind.MAX, "x"))
    group = GroupBy("g", (), wanted, pa.schema([a.result(schema, "g") for a in wanted]), schema)
    (row,) = finish(group, combine(group, batch(["x"], [pa.float64()], [(v,) for v in values]))).to_pylist()
    numbers = [v for v in values if not math.isnan(v)]
    if numbers:
        assert (row["lo"], row["hi"]) == (min(numbers), max(numbers))
    else:
        assert math.isnan(row["lo"])
        assert math.isnan(row["hi"])


SIDE = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 2)), st.integers(0, 99)), max_size=9)


def joined(left: Sequence[Row], right: Sequence[Row], how: str) -> list[Row]:
    """By the definition: all pairs, then those without a partner."""
    equal = [
        (a, b)
        for a, b in product(range(len(left)), range(len(right)))
        if None not in left[a][:2] and left[a][:2] == right[b][:2]
    ]
    rows = [(*left[a], right[b][2]) for a, b in equal]
    if how in {"left", "full"}:
        rows += [(*left[a], None) for a in range(len(left)) if a not in {i for i, _ in equal}]
    if how in {"right", "full"}:
        rows += [(*right[b][:2], None, right[b][2]) for b in range(len(right)) if b not in {i for _, i in equal}]
    return rows


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
@FEW
@given(left=SIDE, right=SIDE)
def test_joins_by_two_keys(how: str, left: list[Row], right: list[Row]) -> None:
    types = (pa.string(), pa.int32(), pa.int64())
    one, other = batch(["k", "i", "x"], types, left), batch(["q", "i", "y"], types, right)
    on = JoinOn.of("j", how, {"k": "q", "i": "i"}, one.schema, other.schema)
    rows = joined_rows(on, one, other, matches(on, one, other))
    assert rows.schema.names == ["k", "i", "x", "y"]
    assert Counter(tuple(row.values()) for row in rows.to_pylist()) == Counter(joined(left, right, how))


def key_and_number(line: str) -> tuple[str, int]:
    return line[0], int(line[1:])


@pytest.mark.parametrize("per_message", [False, True])
@pytest.mark.parametrize("how", ["inner", "full"])
@JOB
@given(
    lines=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)).map(lambda p: f"{p[0]}{p[1]}"), max_size=9),
    parallelism=st.integers(1, 3),
)
def test_any_join_accounts_for_every_share(how: str, per_message: bool, lines: list[str], parallelism: int) -> None:
    """The left side has the numbers below 3, the right side all; a result has anchors of both."""
    with tempfile.TemporaryDirectory() as folder:
        topology = Topology("join")
        rows = topology.stream("lines", source()).map(key_and_number, "line", schema="k string, x int")
        small = rows.filter(below_three, "x")
        small.join(rows.project("k", y="x"), "k", how=how).into(MemorySink("out", staging=Path(folder)))
        payloads = [line.encode() for line in lines]
        ran = run_job(InlineEngine(parallelism), topology, payloads, Path(folder), per_message=per_message)
        assert ran.mismatches == ()
        assert ran.report.violations == ()
        assert ran.lost() == []
        right = [(k, 0, x) for k, x in map(key_and_number, lines)]
        left = [row for row in right if row[2] < 3]
        wanted = Counter((k, x, y) for k, _, x, y in joined(left, right, how))
        assert Counter(tuple(row.values()) for row in ran.rows["out"]) == wanted
        linked = {tuple(pair) for pair in (ran.report.together - 100).tolist()}
        assert linked == {
            (min(a, b), max(a, b))
            for a, b in product(range(len(lines)), repeat=2)
            if a != b and right[a][0] == right[b][0] and right[a][2] < 3
        }


def below_three(x: int) -> bool:
    return x < 3


def exact_mean(values: Sequence[int]) -> Fraction:
    return Fraction(sum(values), len(values))


@FEW
@given(values=st.lists(st.integers(-(2**52), 2**52), min_size=1, max_size=6))
def test_a_mean_is_the_nearest_double_of_nearly_the_exact_one(values: list[int]) -> None:
    schema = pa.schema([("x", pa.int64())])
    wanted = Aggregation("m", AggregationKind.MEAN, "x")
    group = GroupBy("g", (), (wanted,), pa.schema([wanted.result(schema, "g")]), schema)
    (row,) = finish(group, combine(group, batch(["x"], [pa.int64()], [(v,) for v in values]))).to_pylist()
    assert row["m"] == pytest.approx(float(exact_mean(values)), rel=1e-15, abs=1e-300)


@FEW
@given(
    rows=st.lists(st.tuples(KEYS.filter(lambda k: k is not None), st.integers(0, 2))),
    drawn=st.data(),
)
def test_the_rows_of_a_bad_key_are_found(rows: list[Row], drawn: st.DataObject) -> None:
    names, types = ("a", "b"), (pa.string(), pa.int64())
    distinct = sorted(set(rows))
    refused = drawn.draw(st.sets(st.sampled_from(range(len(distinct))))) if distinct else set[int]()
    bad = {distinct[number]: number for number in refused}
    found = rows_with_keys(batch(names, types, rows), names, batch(names, types, distinct), refused)
    assert found == [(place, bad[row]) for place, row in enumerate(rows) if row in bad]
