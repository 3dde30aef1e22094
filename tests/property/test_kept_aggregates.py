"""Aggregates that a table keeps in several columns: any cut into batches gives what a plain Python fold gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fold_harness import VALUES, Folded, FoldHarness, comparable, rows_of

from stormproof import collect_set, first, last
from stormproof.core.contract.fold import ByOrder, End, Fold, SetTruncated, SetUnion

Row = dict[str, Any]
STORES = ("memory", "postgres", "delta")
FUNCTION_SCOPED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

_lives = itertools.count(1)


@pytest.fixture(params=STORES)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> FoldHarness:
    database = request.getfixturevalue("database") if request.param == "postgres" else None
    return FoldHarness(f"{request.param}-fold", tmp_path, database)


def anew(harness: FoldHarness, folder: Path, folded: Folded) -> FoldHarness:
    """The same kind of sink, with an empty table."""
    life = f"inc-{next(_lives)}"
    if harness.store == "postgres":
        harness.sql("drop table if exists counts")
    return FoldHarness(harness.kind, folder / life, harness.database).take(folded, life)


def rows_with(*names: str) -> st.SearchStrategy[list[tuple[int, Row]]]:
    """Rows of these columns, each with the number of its batch."""
    columns: dict[str, st.SearchStrategy[Any]] = {n: st.sampled_from([None, *VALUES[n][1]]) for n in names}
    columns |= {"key": st.integers(0, 1), "n": st.none() | st.integers(0, 2)}
    return st.lists(st.tuples(st.integers(0, 2), st.fixed_dictionaries(columns)), max_size=12)


def held(harness: FoldHarness, folded: Folded, rows: Sequence[tuple[int, Row]]) -> dict[int, Row]:
    """What the sink holds after these batches, the last of which comes twice under its txid."""
    batches = [folded.batch(rows_of(row for b, row in rows if b == number)) for number in range(3)]
    return harness.commit_all(batches)


# First and last


def place(value: Any, end: End) -> tuple[Any, ...]:
    """Sorts values as the docs say: NULL and NaN at the far end, NULL behind NaN, text by its bytes."""
    if value is None:
        return (2 if end is End.FIRST else 0,)
    if isinstance(value, float) and math.isnan(value):
        return (1,)
    return (0 if end is End.FIRST else 2, value.encode() if isinstance(value, str) else value)


def plain_end(rows: Iterable[Row], of: str, by: str, end: End) -> tuple[Any, Any]:
    """The value and its order, of the first or last row."""
    choose = min if end is End.FIRST else max
    row = choose(rows, key=lambda r: (place(r[by], end), place(r[of], end)))
    return row[of], row[by]


def plain(rows: Sequence[tuple[int, Row]], wanted: Mapping[str, tuple[str, str, End]]) -> dict[int, Row]:
    found: list[Row] = []
    for key in sorted({row["key"] for _, row in rows}):
        made: Row = {"key": key}
        for name, (of, by, end) in wanted.items():
            made[name], made[f"{name}_{by}"] = plain_end((r for _, r in rows if r["key"] == key), of, by, end)
        found.append(made)
    return comparable(found)


def ends(name: str) -> tuple[Folded, dict[str, tuple[str, str, End]]]:
    """A column of this type as the value and as the order, from both ends."""
    wanted = {
        "a": (name, "n", End.FIRST),
        "b": (name, "n", End.LAST),
        "c": ("n", name, End.FIRST),
        "d": ("n", name, End.LAST),
    }
    ready = {End.FIRST: first, End.LAST: last}
    return Folded({}, {a: ready[end](of, order_by=by) for a, (of, by, end) in wanted.items()}), wanted


def require_ends(harness: FoldHarness, rows: Sequence[tuple[int, Row]], name: str) -> None:
    folded, wanted = ends(name)
    assert held(harness.take(folded, harness.identity.incarnation), folded, rows) == plain(rows, wanted)


ORDERED: Final = ("int64", "float64", "text", "bytes", "truth", "day", "instant", "price")


@pytest.mark.parametrize("name", ["float64", "text"])
@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=FUNCTION_SCOPED)
def test_first_and_last_are_those_of_a_plain_fold(
    harness: FoldHarness, tmp_path: Path, name: str, data: st.DataObject
) -> None:
    folded, _ = ends(name)
    require_ends(anew(harness, tmp_path, folded), data.draw(rows_with(name)), name)


@pytest.mark.parametrize("name", ORDERED)
def test_first_and_last_of_every_pair_of_values(harness: FoldHarness, tmp_path: Path, name: str) -> None:
    values = [None, *VALUES[name][1]]
    rows = [
        (batch, {"key": key, "n": n, name: value})
        for key, (one, other, n) in enumerate(itertools.product(values, values, (None, 1)))
        for batch, value in ((0, one), (1, other))
    ]
    require_ends(anew(harness, tmp_path, ends(name)[0]), rows, name)


@pytest.mark.parametrize("broken", [ByOrder(End.FIRST, ("b_n", "b")), ByOrder(End.LAST, ("b",)), Fold.MAX], ids=str)
def test_control_a_last_that_is_folded_otherwise_is_seen(
    harness: FoldHarness, tmp_path: Path, broken: ByOrder | Fold
) -> None:
    values = {0: (2, 5), 1: (1, 9), 2: (0, 1)}
    rows: list[tuple[int, Row]] = [(b, {"key": 1, "n": n, "int64": value}) for b, (n, value) in values.items()]
    folded, wanted = ends("int64")
    changed = anew(harness, tmp_path, folded)
    changed.with_fold(b=broken)
    with pytest.raises(AssertionError):
        assert held(changed, folded, rows) == plain(rows, wanted)


# Sets with a bound

AT_MOST: Final = 3
SETS: Final = ("int64", "text", "truth", "day", "time", "instant", "price", "exact")


def plain_sets(rows: Sequence[tuple[int, Row]], name: str) -> dict[int, Row]:
    found: list[Row] = []
    for key in sorted({row["key"] for _, row in rows}):
        values = {row.get(name) for _, row in rows if row["key"] == key} - {None}
        kept = sorted(values, key=lambda value: place(value, End.FIRST))[:AT_MOST]
        found.append({"key": key, "x": kept, "x_truncated": len(values) > AT_MOST})
    return comparable(found)


def sets_of(name: str) -> Folded:
    return Folded({}, {"x": collect_set(name, at_most=AT_MOST)})


@pytest.mark.parametrize("name", ["int64", "text"])
@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=FUNCTION_SCOPED)
def test_a_set_is_that_of_a_plain_fold(harness: FoldHarness, tmp_path: Path, name: str, data: st.DataObject) -> None:
    rows = data.draw(rows_with(name))
    assert held(anew(harness, tmp_path, sets_of(name)), sets_of(name), rows) == plain_sets(rows, name)


@pytest.mark.parametrize("name", SETS)
def test_sets_of_every_type_are_sorted_alike_and_marked_where_values_are_left_out(
    harness: FoldHarness, tmp_path: Path, name: str
) -> None:
    values = [None, *VALUES[name][1]]
    cuts = [
        (values, []),
        ([], values),
        ([None], [None]),
        (values[:2], values[2:]),
        (values[3:], values[:3]),
        (values, values),
    ]
    rows = [
        (batch, {"key": key, name: value})
        for key, cut in enumerate(cuts)
        for batch, part in enumerate(cut)
        for value in part
    ]
    assert held(anew(harness, tmp_path, sets_of(name)), sets_of(name), rows) == plain_sets(rows, name)


@pytest.mark.parametrize(
    "broken", [{"x": SetUnion(2)}, {"x_truncated": SetTruncated("x", 9)}, {"x": SetUnion(9)}], ids=str
)
def test_control_a_set_that_is_folded_otherwise_is_seen(
    harness: FoldHarness, tmp_path: Path, broken: dict[str, SetUnion | SetTruncated]
) -> None:
    rows: list[tuple[int, Row]] = [(n % 3, {"key": 1, "int64": n}) for n in range(6)]
    changed = anew(harness, tmp_path, sets_of("int64"))
    changed.with_fold(**broken)
    with pytest.raises(AssertionError):
        assert held(changed, sets_of("int64"), rows) == plain_sets(rows, "int64")
