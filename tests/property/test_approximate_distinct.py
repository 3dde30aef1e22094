"""Approximate distinct counts in tables: as a plain Python set says, and the same bytes whatever the cut into batches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fold_harness import VALUES, Folded, FoldHarness, comparable, rows_of

from stormproof import approx_count_distinct, count, sum_
from stormproof.core.folds import AnyFold, Fold
from stormproof.core.sketches import K, sketches_of_groups

Row = dict[str, Any]
STORES = ("memory", "postgres", "delta", "delta-streamed")
FUNCTION_SCOPED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

_lives = itertools.count(1)


@pytest.fixture(params=STORES)
def harness(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FoldHarness:
    store, _, streamed = str(request.param).partition("-")
    if streamed:
        monkeypatch.setattr("stormproof.sinks.delta.merging.BYTES_IN_MEMORY_MAX", 0)
    # So that a test's few rows are merged in several parts.
    monkeypatch.setattr("stormproof.sinks.merging.ROWS_AT_ONCE", 2)
    monkeypatch.setattr("stormproof.sinks.postgres.merging.ROWS_AT_ONCE", 2)
    database = request.getfixturevalue("database") if store == "postgres" else None
    return FoldHarness(f"{store}-fold", tmp_path, database)


def anew(harness: FoldHarness, folder: Path, folded: Folded) -> FoldHarness:
    """The same kind of sink, with an empty table."""
    life = f"inc-{next(_lives)}"
    if harness.store == "postgres":
        harness.sql("drop table if exists counts")
    return FoldHarness(harness.kind, folder / life, harness.database).take(folded, life)


def counted(name: str) -> Folded:
    """Beside a plain count and sum, since these are folded by the store."""
    return Folded({}, {"rows": count(), "x": approx_count_distinct(name), "total": sum_("n")})


def held(harness: FoldHarness, name: str, rows: Sequence[tuple[int, Row]]) -> dict[int, Row]:
    batches = [counted(name).batch(rows_of(row for b, row in rows if b == number)) for number in range(3)]
    return harness.commit_all(batches)


def plain(rows: Sequence[tuple[int, Row]], name: str) -> dict[int, Row]:
    """By a Python set; the sketch is that of all values at once."""
    found: list[Row] = []
    for key in sorted({row["key"] for _, row in rows}):
        of_key = [row for _, row in rows if row["key"] == key]
        values = [row[name] for row in of_key if row[name] is not None]
        column = pa.array(values, VALUES[name][0])
        sketch = sketches_of_groups(np.zeros(len(values), np.int64), column, 1)[0].as_py()
        total = sum(row.get("n") or 0 for row in of_key)
        different = {"NaN" if isinstance(v, float) and math.isnan(v) else v for v in values}
        found.append({"key": key, "rows": len(of_key), "x": len(different), "x_sketch": sketch, "total": total})
    return comparable(found)


@pytest.mark.parametrize("name", ["int64", "text"])
@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=FUNCTION_SCOPED)
def test_a_distinct_count_is_that_of_a_plain_set(
    harness: FoldHarness, tmp_path: Path, name: str, data: st.DataObject
) -> None:
    columns = {name: st.sampled_from([None, *VALUES[name][1]]), "key": st.integers(0, 4), "n": st.integers(0, 2)}
    rows = data.draw(st.lists(st.tuples(st.integers(0, 2), st.fixed_dictionaries(columns)), max_size=20))
    assert held(anew(harness, tmp_path, counted(name)), name, rows) == plain(rows, name)


@pytest.mark.parametrize("name", list(VALUES))
def test_values_of_every_type_are_counted(harness: FoldHarness, tmp_path: Path, name: str) -> None:
    values = [None, *VALUES[name][1]]
    cuts = [(values, []), ([], values), ([None], [None]), (values[:2], values[2:]), (values, values)]
    rows = [
        (batch, {"key": key, name: value})
        for key, cut in enumerate(cuts)
        for batch, part in enumerate(cut)
        for value in part
    ]
    assert held(anew(harness, tmp_path, counted(name)), name, rows) == plain(rows, name)


def test_beyond_the_bound_it_is_near_the_truth_and_the_same_in_any_cut(harness: FoldHarness, tmp_path: Path) -> None:
    draw, number = random.Random(12), 3 * K
    values, found = list(range(number)), list[dict[int, Row]]()
    for _ in range(2):
        draw.shuffle(values)
        rows = [(draw.randrange(3), {"key": n % 2, "int64": value}) for n, value in enumerate(values) for _ in range(2)]
        rows = [(batch, {"key": row["int64"] % 2, "int64": row["int64"]}) for batch, row in rows]
        found.append(held(anew(harness, tmp_path, counted("int64")), "int64", rows))
    assert found[0] == found[1]
    for row in found[0].values():
        assert abs(row["x"] - number / 2) <= 4 / math.sqrt(K) * number / 2
        assert row["x"] != number / 2
        assert row["rows"] == number


@pytest.mark.parametrize(
    "broken",
    [{"x": Fold.SUM}, {"x": Fold.MAX, "x_sketch": Fold.MAX}, {"x": Fold.MIN, "x_sketch": Fold.MIN}],
    ids=["sum", "max", "min"],
)
def test_control_a_distinct_count_that_is_folded_otherwise_is_seen(
    harness: FoldHarness, tmp_path: Path, broken: dict[str, AnyFold]
) -> None:
    rows: list[tuple[int, Row]] = [(n % 3, {"key": 1, "int64": n % 4}) for n in range(8)]
    changed = anew(harness, tmp_path, counted("int64"))
    changed.with_fold(**broken)
    with pytest.raises(AssertionError):
        assert held(changed, "int64", rows) == plain(rows, "int64")
