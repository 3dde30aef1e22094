"""What a sink can tell of a row before anything is written."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.row_rule import check_fold_input
from stormproof.sinks.rows.by_key import fold_tables
from stormproof.sinks.rows.limits import ColumnLimit, Limits
from stormproof.trident.state.map import merge_columns, total


def check(limit: ColumnLimit, column: pa.Array) -> list[tuple[int, str]]:
    return Limits((limit,)).check(pa.record_batch([column], names=["x"]))


def test_null_nul_and_length_each_name_the_row() -> None:
    limit = ColumnLimit("x", "character varying(3)", not_null=True, no_nul=True, chars_max=3)
    found = check(limit, pa.array(["abc", None, "a\0b", "\0\0\0\0", "äöüß", "äöü"]))
    assert [row for row, _ in found] == [1, 2, 3, 4]
    assert "NULL" in found[0][1]
    assert "NUL" in found[1][1]
    assert "4 characters" in found[3][1]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view()])
def test_what_names_no_folder_is_no_partition(kind: pa.DataType) -> None:
    values = ["", "__HIVE_DEFAULT_PARTITION__", "a\0", "日" * 11, "x" * 91, "日" * 10, "x" * 90, "a/.. :%\n", None]
    column = pa.array([None if v is None else v.encode() for v in values], pa.binary()).cast(kind)
    found = check(ColumnLimit("x", "a partition column", path_bytes_max=90), column)
    assert [row for row, _ in found] == [0, 1, 2, 3, 4]
    assert "99 bytes in a file's path" in found[3][1]
    if kind == pa.binary():
        assert [row for row, _ in check(ColumnLimit("x", "", path_bytes_max=90), pa.array([b"a", b"\xff"]))] == [1]


def test_a_decimal_below_zero_that_delta_rs_cannot_read_is_no_partition() -> None:
    limit = ColumnLimit("x", "a partition column", path_bytes_max=90)
    values = [Decimal("-0.5"), Decimal(0), None, Decimal("1.25"), Decimal(-9)]
    assert [row for row, _ in check(limit, pa.array(values, pa.decimal128(38, 30)))] == [0, 4]
    assert check(limit, pa.array([Decimal(-9), None], pa.decimal128(38, 0))) == []
    no_whole_digit = pa.array([Decimal("-0.5"), Decimal(0), Decimal("0.5")], pa.decimal128(38, 38))
    assert [row for row, _ in check(limit, no_whole_digit)] == [0]
    assert check(ColumnLimit("x", "decimal"), pa.array(values, pa.decimal128(9, 2))) == []


def test_integers_out_of_range() -> None:
    limit = ColumnLimit("x", "smallint", low=-(2**15), high=2**15 - 1)
    found = check(limit, pa.array([0, 2**15, -(2**15) - 1, None], pa.int64()))
    assert [row for row, _ in found] == [1, 2]
    assert "32768" in found[0][1]
    assert check(limit, pa.array([127], pa.int8())) == []


def test_a_key_that_no_index_takes_is_named_by_its_size() -> None:
    limit = ColumnLimit("x", "text", bytes_max=4)
    assert check(limit, pa.array(["abcd", None])) == []
    ((row, error),) = check(limit, pa.array(["a", "aää"]))
    assert row == 1
    assert "5 bytes" in error
    assert [row for row, _ in check(limit, pa.array([b"abcd", b"abcde"]))] == [1]


def test_bytes_that_are_not_utf8() -> None:
    offsets = pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in (0, 1, 2, 5)))
    broken = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffok\0")])
    found = check(ColumnLimit("x", "text", no_nul=True), broken)
    assert [row for row, _ in found] == [1, 2]
    assert "UTF-8" in found[0][1]


def test_only_the_columns_that_are_there_are_checked() -> None:
    assert check(ColumnLimit("y", "text", not_null=True), pa.array([None])) == []


def keyed(kind: pa.DataType) -> pa.Schema:
    return pa.schema([("k", pa.string()), ("n", kind)])


KEYED = keyed(pa.int64())


@pytest.mark.parametrize(
    ("input_", "why"),
    [
        (SinkInput.for_fold(KEYED, ("k",), {"m": Fold.SUM}), "no column 'm'"),
        (SinkInput.for_fold(KEYED, (), {"n": Fold.SUM}), "at least one key"),
        (SinkInput.for_fold(KEYED, ("n",), {"n": Fold.SUM}), "either a key or folded"),
        (SinkInput.for_fold(KEYED.append(pa.field("z", pa.int64())), ("k",), {"n": Fold.SUM}), "'z'"),
        (SinkInput.for_fold(pa.schema([("k", pa.float64()), ("n", pa.int64())]), ("k",), {"n": Fold.SUM}), "double"),
        (SinkInput.for_fold(keyed(pa.string()), ("k",), {"n": Fold.SUM}), "no sum"),
        (
            SinkInput.for_fold(pa.schema([("k", pa.string()), ("n", pa.list_(pa.int64()))]), ("k",), {"n": Fold.MIN}),
            "no min",
        ),
        (SinkInput.for_fold(keyed(pa.float16()), ("k",), {"n": Fold.MAX}), "no max"),
        (SinkInput.for_fold(KEYED, ("k",), {"n": Fold.OWN}), "cannot call"),
    ],
)
def test_a_fold_that_cannot_be_served(input_: SinkInput, why: str) -> None:
    with pytest.raises(TopologyError, match=why):
        check_fold_input(input_, "sink 'x'")


def test_a_fold_that_can() -> None:
    check_fold_input(SinkInput.for_fold(KEYED, ("k",), {"n": Fold.SUM}), "sink 'x'")
    check_fold_input(SinkInput(KEYED), "sink 'x'")
    check_fold_input(SinkInput.for_fold(KEYED, ("n",), {"k": Fold.MIN}), "sink 'x'")


def test_columns_may_be_called_as_arrow_calls_results() -> None:
    schema = pa.schema([(name, pa.int64()) for name in ("x", "x_min", "x_max", "x_max_sum", "0")])
    input_ = SinkInput.for_fold(schema, ("0", "x_min"), {"x": Fold.MIN, "x_max": Fold.SUM, "x_max_sum": Fold.MAX})
    one, two = ([dict.fromkeys(schema.names, 1) | {"x": x, "x_max": 5, "x_max_sum": x}] for x in (3, 2))
    folded = fold_tables(pa.Table.from_pylist(one, schema), pa.Table.from_pylist(two, schema), input_, "here")
    assert folded.to_pylist() == [{"x": 2, "x_min": 1, "x_max": 10, "x_max_sum": 3, "0": 1}]


def wide_decimal(*values: int) -> pa.Array:
    """Of `decimal(38,2)`, whatever the number of digits: as arithmetic over record batches may make it."""
    data = b"".join(value.to_bytes(16, "little", signed=True) for value in values)
    return pa.Array.from_buffers(pa.decimal128(38, 2), len(values), [None, pa.py_buffer(data)])


@pytest.mark.parametrize("limits", [Limits(), Limits((ColumnLimit("x", "numeric(38,2)"),))])
def test_values_that_no_sink_takes_whatever_its_table(limits: Limits) -> None:
    def rows_of(column: pa.Array) -> list[int]:
        return [row for row, _ in limits.check(pa.record_batch([column], names=["x"]))]

    most = 10**38 - 1
    assert rows_of(wide_decimal(0, most, -most, most + 1, -most - 1, 2**127 - 1)) == [3, 4, 5]
    assert rows_of(pa.array([-719162, 2932896, -719163, 2932897, None], pa.int32()).view(pa.date32())) == [2, 3]
    day = 86_400_000_000
    for kind in (pa.timestamp("us"), pa.timestamp("us", tz="UTC")):
        there = [-719162 * day, 2932897 * day - 1, -719162 * day - 1, 2932897 * day, 2**63 - 1, -(2**63), None]
        assert rows_of(pa.array(there, pa.int64()).view(kind)) == [2, 3, 4, 5]
    assert rows_of(pa.array([2**63 - 1], pa.int64()).view(pa.timestamp("ns"))) == []
    ((_, text),) = limits.check(pa.record_batch([wide_decimal(most + 1)], names=["x"]))
    assert "column 'x': '1000000000000000000000000000000000000.00' has too many digits" in text


def test_a_sum_beyond_38_digits_is_refused_and_never_wraps() -> None:
    kind = pa.decimal128(38, 0)
    input_ = SinkInput.for_fold(keyed(kind), ("k",), {"n": Fold.SUM})

    def rows(n: Decimal) -> pa.Table:
        return pa.table({"k": pa.array(["a"]), "n": pa.array([n], kind)})

    held = pa.array([Decimal(6 * 10**37)], kind)
    for added in (Decimal(6 * 10**37), Decimal(10**38 - 1)):
        with pytest.raises(SinkRefused, match="does not fit"):
            fold_tables(rows(Decimal(6 * 10**37)), rows(added), input_, "here")
        with pytest.raises(SinkRefused, match="cannot hold a merged value"):
            merge_columns({"n": held}, {"n": pa.array([added], kind)}, {"n": total}, "here")
    five = rows(Decimal(5))
    assert fold_tables(five, five, input_, "here").column("n").to_pylist() == [Decimal(10)]
    n = pa.array([Decimal(5), None], kind)
    assert merge_columns({"n": n}, {"n": n}, {"n": total}, "here")["n"].to_pylist() == [Decimal(10), None]
