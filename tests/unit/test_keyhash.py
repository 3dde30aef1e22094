"""Keys to tasks: equal keys to equal tasks, wherever they stand."""

from __future__ import annotations

import datetime
import decimal

import pyarrow as pa
import pytest

from stormproof.core.task.router import hash_keys, task_numbers

COLUMNS = [
    pa.array(["", "a", "b", "ab", "ba", "\x00", "\x00\x00", "\u00e9" * 50, "a"], pa.string()),
    pa.array([b"", b"a", b"\xff", b"\xff\x00", b"a"], pa.binary()),
    pa.array([0, 1, -1, 2**62, 1], pa.int64()),
    pa.array([0, 1, -1, 7, 1], pa.int32()),
    pa.array([True, False, True], pa.bool_()),
    pa.array([decimal.Decimal(x) for x in ("0.00", "1.50", "-1.50", "1.50")], pa.decimal128(20, 2)),
    pa.array([datetime.date(2020, 1, 1), datetime.date(2021, 1, 1), datetime.date(2020, 1, 1)], pa.date32()),
    pa.array([datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)] * 2, pa.timestamp("us", "UTC")),
]


def hashes(column: pa.Array) -> list[int]:
    found: list[int] = hash_keys(pa.RecordBatch.from_arrays([column], names=["k"]), ["k"]).tolist()
    return found


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: str(c.type))
def test_equal_keys_and_only_those_have_equal_hashes(column: pa.Array) -> None:
    found = hashes(column)
    assert len(found) == len(column)
    assert len(set(found)) == len(set(column.to_pylist()))
    for start in range(len(column)):
        assert hashes(column.slice(start)) == found[start:]
        assert hashes(column.slice(start, 1)) == found[start : start + 1]
        assert hashes(column.slice(0, start)) == found[:start]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: str(c.type))
def test_null_is_a_value_like_any_other(column: pa.Array) -> None:
    values = column.to_pylist()
    with_nulls = pa.array([None, *values, None], column.type)
    found = hashes(with_nulls)
    assert found[1:-1] == hashes(column)
    assert found[0] == found[-1]
    assert found[0] not in found[1:-1]
    assert hashes(pa.array([None, None], column.type).slice(1)) == found[:1]
    assert hashes(pa.array([], column.type)) == []


def test_what_lies_below_a_null_does_not_count() -> None:
    mask = pa.array([False, True, True])
    hidden = [
        pa.array(["a", "b", "c"]),
        pa.array([1, 2, 3]),
        pa.array([decimal.Decimal(x) for x in (1, 2, 3)], pa.decimal128(9, 0)),
    ]
    for column in hidden:
        masked = pa.Array.from_buffers(
            column.type, 3, [pa.array([True, False, False]).buffers()[1], *column.buffers()[1:]]
        )
        assert masked.is_null().equals(mask)
        found = hashes(masked)
        assert found[1] == found[2] == hashes(pa.array([None], column.type))[0]
        assert found[0] == hashes(column)[0]


@pytest.mark.parametrize(
    "type_",
    [pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string())],
    ids=str,
)
def test_the_hash_is_of_the_value_not_of_how_arrow_holds_it(type_: pa.DataType) -> None:
    plain = pa.array(["a", None, "bc", "", "a", None])
    other = plain.cast(type_)
    assert hashes(other) == hashes(plain)
    assert hashes(other.slice(2, 3)) == hashes(plain.slice(2, 3))


@pytest.mark.parametrize("type_", [pa.string(), pa.binary()], ids=str)
@pytest.mark.parametrize("values", [1, 50, 3_000, 20_000])
def test_a_long_column_has_the_hashes_of_its_rows(type_: pa.DataType, values: int) -> None:
    """Where texts repeat, each is hashed once."""
    column = pa.array([None if i % 97 == 0 else f"w{i * 7919 % values}" for i in range(10_000)], pa.string()).cast(
        type_
    )
    whole = hashes(column)
    assert [x for start in range(0, 10_000, 1_000) for x in hashes(column.slice(start, 1_000))] == whole
    assert hashes(column.slice(3)) == whole[3:]


def test_a_null_in_a_dictionary_is_null() -> None:
    nulls = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array(["a", None]))
    assert hashes(nulls) == hashes(pa.array(["a", None, None]))
    empty = pa.DictionaryArray.from_arrays(pa.array([None], pa.int8()), pa.array([], pa.string()))
    assert hashes(empty) == hashes(pa.array([None], pa.string()))


def test_integers_of_any_width_are_one_value() -> None:
    for type_ in (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint64()):
        assert hashes(pa.array([0, 7], type_)) == hashes(pa.array([0, 7], pa.int64()))
    assert len(set(hashes(pa.array([2**64 - 1, 2**63, 1], pa.uint64())))) == 3


def test_several_columns_are_one_key() -> None:
    rows = pa.record_batch({"a": ["x", "xy", "x"], "b": ["yz", "z", "yz"]})
    one, two, again = hash_keys(rows, ["a", "b"]).tolist()
    assert one == again != two
    assert hash_keys(rows, ["b", "a"])[0] != one


def test_the_hash_is_the_same_in_every_process() -> None:
    # Tasks of one job run in several processes, and a repeated one in another: a change of this number breaks nothing
    # that is stored, but it must not come by itself.
    assert hashes(pa.array(["storm"])) == [8033343684546864323]


def test_keys_spread_over_tasks() -> None:
    rows = pa.record_batch({"k": [f"w{i}" for i in range(1_000)]})
    tasks = task_numbers(rows, ["k"], 4)
    assert set(tasks.tolist()) == {0, 1, 2, 3}
    assert all(150 < (tasks == t).sum() < 350 for t in range(4))
    assert set(task_numbers(rows, ["k"], 1).tolist()) == {0}
