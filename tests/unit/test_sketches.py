"""Distinct values by sketches: exact below the bound, the same bytes in any order and cut, near the truth above."""

from __future__ import annotations

import datetime as dt
import math
import random
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest

from stormproof.core.folds import ByFunction, MergeFunction
from stormproof.core.merging import MERGINGS
from stormproof.core.sketches import K, UnreadableSketch, empty_sketch, estimates, sketches_of_groups, unions_of_groups

SIGMA: Final = 1 / math.sqrt(K)


def sketch(values: pa.Array) -> bytes:
    found: bytes = sketches_of_groups(np.zeros(len(values), np.int64), values, 1)[0].as_py()
    return found


def union(*sketches: bytes | None) -> bytes:
    found: bytes = unions_of_groups(np.zeros(len(sketches), np.int64), pa.array(sketches, pa.binary()), 1)[0].as_py()
    return found


def estimate(value: bytes) -> int:
    found: int = estimates(pa.array([value], pa.binary()))[0].as_py()
    return found


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [-(2**63), -1, 0, 1, 2**63 - 1]),
        (pa.int8(), [-128, 0, 127]),
        (pa.bool_(), [False, True]),
        (pa.float64(), [0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324]),
        (pa.float32(), [0.0, 1.5, math.nan]),
        (pa.string(), ["", "=", "a", "a\0", "\u00c4", "\U0001f600"]),
        (pa.binary(), [b"", b"\0", b"=", b"\xff", b"\xc3\xbf"]),
        (pa.date32(), [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(1970, 1, 1)]),
        (pa.timestamp("us", "UTC"), [dt.datetime(1969, 12, 31, tzinfo=dt.UTC), dt.datetime(1970, 1, 1, tzinfo=dt.UTC)]),
        (pa.decimal128(10, 2), [Decimal("-0.01"), Decimal("0.00"), Decimal("0.01"), Decimal("99999999.99")]),
        (pa.decimal128(38, 10), [Decimal("-" + "9" * 28), Decimal("1e-10"), Decimal("9" * 28)]),
    ],
    ids=str,
)
def test_values_of_every_type_are_told_apart_and_null_is_none(kind: pa.DataType, values: list[Any]) -> None:
    twice = pa.array([*values, None, *reversed(values)], kind)
    assert estimate(sketch(twice)) == len(values)
    assert sketch(twice) == sketch(pa.array(values, kind))


def test_zeros_are_one_value_and_so_are_all_nan() -> None:
    other_nan = np.array([0xFFF8 << 48], np.uint64).view(np.float64)[0]
    assert estimate(sketch(pa.array([0.0, -0.0, math.nan, other_nan]))) == 2


def test_no_values_give_the_empty_sketch() -> None:
    assert sketch(pa.array([None], pa.int64())) == empty_sketch() == union(None) == union(empty_sketch(), None)
    assert estimate(empty_sketch()) == 0


@pytest.mark.parametrize("number", [1, 2, K - 1, K, K + 1, 3 * K, 40_000])
def test_any_cut_gives_the_same_bytes_and_up_to_the_bound_the_exact_number(number: int) -> None:
    draw = random.Random(number)
    values = [f"visitor {n}" for n in range(number)]
    whole = sketch(pa.array(values))
    for _ in range(3):
        draw.shuffle(values)
        at = sorted(draw.choices(range(number + 1), k=3))
        parts = [values[start:stop] for start, stop in zip([0, *at], [*at, number], strict=True)]
        parts.append(draw.choices(values, k=min(number, 50)))
        one, two, *rest = (sketch(pa.array(part, pa.string())) for part in parts)
        assert union(union(one, two), union(*rest)) == union(*rest, two, union(one)) == whole
    assert len(whole) <= 8 * K + 24
    if number <= K:
        assert estimate(whole) == number
    else:
        assert abs(estimate(whole) - number) <= 4 * SIGMA * number


def test_control_a_sketch_that_lacks_a_part_is_seen() -> None:
    parts = [sketch(pa.array(range(start, start + 3_000))) for start in (0, 2_000, 4_000)]
    assert union(*parts[:2]) != union(*parts)


@pytest.mark.parametrize("function", MergeFunction)
def test_a_function_of_a_fold_merges_in_any_order(function: MergeFunction) -> None:
    merging = MERGINGS[function]
    parts = [pa.array([sketch(pa.array(range(start, start + 3_000)))]) for start in (0, 2_500, 9_000)]
    one, two, three = ([estimates(part), part] for part in parts)
    left = merging.merge(merging.merge(one, two), three)
    assert left == merging.merge(one, merging.merge(three, two)) == merging.merge(left, one)
    nothing = [pa.nulls(1, kind) for kind in merging.types]
    assert merging.merge(nothing, one) == merging.merge(one, nothing) == one


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ((7, None), "NULL beside an estimate"),
        ((7, b""), "8 bytes expected"),
        ((7, b"\xff" * 40), "mismatch"),
    ],
    ids=str,
)
def test_what_is_held_and_cannot_be_merged_is_refused_by_its_row(held: tuple[int, bytes | None], told: str) -> None:
    whole = sketch(pa.array([1, 2]))
    rows = [pa.array([2, held[0]]), pa.array([whole, held[1]], pa.binary())]
    with pytest.raises(UnreadableSketch, match=told) as error:
        MERGINGS[MergeFunction.THETA].merge(rows, [pa.array([2, 2]), pa.array([whole, whole])])
    assert error.value.row == 1


def test_a_fold_by_a_function_says_what_it_is() -> None:
    assert str(ByFunction(MergeFunction.THETA, ("n", "n_sketch"))) == "theta merge of n, n_sketch"
