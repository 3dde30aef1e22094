"""Aggregates that are kept in several columns: what a topology makes of them, in one batch and across batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from stormproof import (
    MemoryMap,
    MemorySink,
    MemorySource,
    Stream,
    Topology,
    collect_set,
    first,
    last,
)
from stormproof.core.base.errors import TopologyError, UsageError
from stormproof.core.contract.fold import (
    AnyFold,
    ByOrder,
    End,
    Fold,
    SetTruncated,
    SetUnion,
    fold_from_json,
    fold_to_json,
)
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.row_rule import check_fold_input
from stormproof.testing import simulate

LINES = ["van 7 Bonn", "van 9 Ulm", "bus 3 Kiel", "van 8 Kiel", "van 9 Aue", "van - Xanten"]


def seen(line: str) -> tuple[str, int | None, str]:
    car, at, city = line.split()
    return car, None if at == "-" else int(at), city


def sightings(topology: Topology) -> Stream:
    lines = topology.stream("lines", MemorySource("lines", schema="line string"))
    return lines.map(seen, schema="car string, at long, city string")


def test_first_and_last_of_one_batch_are_one_column_each() -> None:
    topology = Topology("once")
    sightings(topology).group_by("car").agg(old=first("city", order_by="at"), new=last("city", order_by=["at"])).into(
        MemorySink("out")
    )
    (found,) = (r for r in simulate(topology, LINES, guarantee="exactly-once").rows("out") if r["car"] == "bus")
    assert found == {"car": "bus", "old": "Kiel", "new": "Kiel"}


def test_last_is_kept_with_its_order_and_the_greater_value_wins_among_equal_ones() -> None:
    topology = Topology("kept")
    sightings(topology).group_by("car").persistent_aggregate(city=last("city", order_by="at")).into(MemorySink("out"))
    rows = simulate(topology, LINES, guarantee="exactly-once").rows("out")
    assert sorted(rows, key=str) == [
        {"car": "bus", "city": "Kiel", "city_at": 3},
        {"car": "van", "city": "Ulm", "city_at": 9},
    ]


@pytest.mark.parametrize("function", [first, last])
@pytest.mark.parametrize("order_by", ["", [], None, [1]], ids=repr)
def test_an_order_of_no_fields_is_refused(function: Callable[..., Any], order_by: object) -> None:
    with pytest.raises(TopologyError, match=r"order_by=.* names no fields"):
        function("city", order_by=order_by)


@pytest.mark.parametrize(
    ("field", "order_by", "told"),
    [
        ("town", "at", "unknown field 'town'"),
        ("city", "when", "unknown field 'when'"),
        ("stops", "at", "'stops' is list<.*> *, which has no order.*told apart"),
        ("city", "stops", "'stops' is list"),
    ],
)
def test_fields_that_cannot_be_ordered_are_refused_by_name(field: str, order_by: str, told: str) -> None:
    topology = Topology("refused")
    trips = sightings(topology).map(
        lambda car, at, city: (car, at, city, [city]), schema="car string, at long, city string, stops array<string>"
    )
    with pytest.raises(TopologyError, match=told):
        trips.group_by("car").persistent_aggregate(x=last(field, order_by=order_by))


def test_a_state_refuses_what_it_cannot_fold_column_by_column() -> None:
    topology = Topology("state")
    cars = sightings(topology).group_by("car")
    with pytest.raises(TopologyError, match=r"column 'city' is folded as the last by .* use a sink"):
        cars.persistent_aggregate(city=last("city", order_by="at"), state=MemoryMap())


def test_two_results_of_one_name_are_refused() -> None:
    cars = sightings(Topology("twice")).group_by("car")
    with pytest.raises(TopologyError, match="'city_at' stands twice"):
        cars.persistent_aggregate(city=last("city", order_by="at"), city_at=first("at", order_by="at"))


LAST = ByOrder(End.LAST, ("at", "city"))


def test_columns_of_one_row_that_are_folded_apart_are_refused() -> None:
    schema = pa.schema([("car", pa.string()), ("at", pa.int64()), ("city", pa.string())])
    check_fold_input(SinkInput.for_fold(schema, ("car",), {"at": LAST, "city": LAST}), "sink 'x'")
    broken: list[dict[str, AnyFold]] = [
        {"at": Fold.MAX, "city": LAST},
        {"at": LAST, "city": ByOrder(End.LAST, ("at",))},
    ]
    for folds in broken:
        with pytest.raises(TopologyError, match="each of these columns must be folded so"):
            check_fold_input(SinkInput.for_fold(schema, ("car",), folds), "sink 'x'")


@pytest.mark.parametrize(
    "fold", [*Fold, LAST, ByOrder(End.FIRST, ("a, b",)), SetUnion(3), SetTruncated("a", 3)], ids=str
)
def test_a_fold_is_read_back_as_the_ledger_keeps_it(fold: AnyFold) -> None:
    assert fold_from_json(fold_to_json(fold)) == fold


@pytest.mark.parametrize(
    "found",
    [
        "least",
        {"fold": "middle", "compared": ["a"]},
        {"fold": "last"},
        None,
        {"fold": "function", "function": "hll", "columns": []},
    ],
    ids=repr,
)
def test_a_fold_of_another_version_is_none(found: Any) -> None:
    with pytest.raises(ValueError, match=r"fold|valid"):
        fold_from_json(found)


def test_a_set_of_one_batch_is_sorted_and_has_a_mark_where_it_has_a_bound() -> None:
    topology = Topology("sets")
    all_, some = collect_set("city"), collect_set("city", at_most=2)
    sightings(topology).group_by("car").agg(all=all_, some=some).into(MemorySink("out"))
    (found,) = (r for r in simulate(topology, LINES[:2], guarantee="exactly-once").rows("out") if r["car"] == "van")
    assert found == {"car": "van", "all": ["Bonn", "Ulm"], "some": ["Bonn", "Ulm"], "some_truncated": False}


def test_a_set_across_batches_keeps_the_least_values_and_tells_that_there_were_more() -> None:
    topology = Topology("bound")
    cars = sightings(topology).group_by("car")
    cars.persistent_aggregate(cities=collect_set("city", at_most=2)).into(MemorySink("out"))
    rows = simulate(topology, LINES, guarantee="exactly-once").rows("out")
    assert sorted(rows, key=str) == [
        {"car": "bus", "cities": ["Kiel"], "cities_truncated": False},
        {"car": "van", "cities": ["Aue", "Bonn"], "cities_truncated": True},
    ]


def test_a_set_of_no_tuples_is_empty() -> None:
    topology = Topology("none")
    sightings(topology).filter(lambda at: False, "at").aggregate(cities=collect_set("city", at_most=2)).into(
        MemorySink("out")
    )
    rows = simulate(topology, LINES, guarantee="exactly-once").rows("out")
    assert all(row == {"cities": [], "cities_truncated": False} for row in rows)


def test_a_set_without_a_bound_is_refused_across_batches_and_a_bad_bound_at_once() -> None:
    cars = sightings(Topology("endless")).group_by("car")
    with pytest.raises(TopologyError, match=r"may outgrow its row; write collect_set\('city', at_most=100\)"):
        cars.persistent_aggregate(cities=collect_set("city"))
    for bound in (0, "3", 1.5, True):
        with pytest.raises(UsageError, match="a whole number, at least 1"):
            collect_set("city", at_most=bound)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["double", "binary", "array<string>"])
def test_a_set_of_a_type_without_one_order_is_refused(kind: str) -> None:
    topology = Topology("types")
    rows = sightings(topology).map(lambda car, at, city: (car, None), schema=f"car string, x {kind}")
    with pytest.raises(TopologyError, match=r"'x' is .*, which has no set that every store sorts alike"):
        rows.group_by("car").persistent_aggregate(xs=collect_set("x", at_most=2))
