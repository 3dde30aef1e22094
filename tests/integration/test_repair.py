"""Tables with statistics that exclude rows, and with doubled keys: `audit verify --deep` names them, `repair` mends them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction
from support.doubled_keys import (
    KIND,
    LARGE,
    by_filters,
    compared,
    input_of,
    of_keys,
    opened,
    problems,
    repaired,
    written_before,
)
from support.typed_rows import EDGES, IDENTITY, decimals, put

from stormproof.core.contract.fold import AnyFold, ByOrder, End, Fold, SetTruncated, SetUnion
from stormproof.core.contract.sink import SinkInput
from stormproof.sink import Lineage
from stormproof.sinks.contract.protocol import Repair, SinkIdentity
from stormproof.sinks.contract.row_rule import with_lineage
from stormproof.sinks.delta.log import live_adds
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.rows.comparison import RowProblem


@pytest.mark.parametrize("behind_checkpoint", [False, True])
@pytest.mark.parametrize("how", ["upsert", "fold"])
def test_doubled_keys_and_wrong_statistics_are_named_and_mended(
    tmp_path: Path, how: str, behind_checkpoint: bool
) -> None:
    path = tmp_path / "t"
    written_before(path, how)
    if behind_checkpoint:
        DeltaTable(path).create_checkpoint()
    assert DeltaTable(path).to_pyarrow_table().num_rows == 6
    assert {RowProblem.STATISTICS_WRONG, RowProblem.ROWS_ADDED} <= {*problems(path, how)}
    before = DeltaTable(path).version()
    looked = repaired(path, how, dry_run=True)
    assert (looked.version, looked.doubled_keys, looked.rows_removed, looked.left) == (None, 2, 4, [])
    assert DeltaTable(path).version() == before
    done = repaired(path, how)
    assert (done.version, done.doubled_keys, done.rows_removed, done.left) == (before + 1, 2, 4, [])
    rows = DeltaTable(path).to_pyarrow_table().sort_by("k").to_pylist()
    expected = {"n": 6, "low": 1, "high": 3} if how == "fold" else {"n": 3, "low": 3, "high": 3}
    assert rows == [{"k": key, **expected} for key in LARGE]
    assert by_filters(path) == [1, 1, 1, 1]
    assert problems(path, how) == []
    assert repaired(path, how) == Repair(None, [], 0, 0, [])
    put(DeltaSink(path, name="t"), of_keys(4), input_of(how), txid=7)
    assert DeltaTable(path).to_pyarrow_table().num_rows == 2
    with closing(opened(path, how)) as session:
        report = session.evidence(1, None)
    assert (report.problems, [entry.problem for entry in report.entries if entry.gone]) == ((), [])


def test_wrong_statistics_of_an_append_are_mended_without_a_change_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for txid in (1, 2):
        put(DeltaSink(path, name="t"), of_keys(txid), txid=txid)
    DeltaTable(path).optimize.compact()
    rows = DeltaTable(path).to_pyarrow_table()
    assert by_filters(path) != [2, 2, 2, 2]
    assert RowProblem.STATISTICS_WRONG in problems(path, "append")
    done = repaired(path, "append")
    assert (len(done.files), done.doubled_keys, done.left) == (1, 0, [])
    assert by_filters(path) == [2, 2, 2, 2]
    assert problems(path, "append") == []
    assert DeltaTable(path).to_pyarrow_table() == rows
    with closing(opened(path, "append")) as session:
        assert [(e.txid, e.problem, e.gone, e.doubt) for e in session.evidence(1, None).entries] == [
            (1, None, False, None),
            (2, None, False, None),
        ]


def test_sums_of_which_both_rows_were_added_to_are_named_and_left(tmp_path: Path) -> None:
    path = tmp_path / "t"
    written_before(path, "fold", 2)
    put(
        DeltaSink(path, name="t"), of_keys(3), input_of("fold"), txid=3
    )  # it finds both rows of a key, and adds to both
    done = repaired(path, "fold")
    assert (done.doubled_keys, done.rows_removed) == (0, 0)
    assert done.left == [
        "2 keys that come more than once: the log does not tell that each message was added to one row of its key"
    ]
    assert RowProblem.ROWS_ADDED in problems(path, "fold")


def test_a_deep_verify_is_right_behind_the_repair_of_a_row_that_a_commit_had_replaced(tmp_path: Path) -> None:
    """Its file had stayed, so the record of the commits had one row, and the table two."""
    path = tmp_path / "lake"
    for txid in (1, 2):
        put(DeltaSink(path, name="t"), of_keys(txid, LARGE[:1]), input_of("upsert"), txid=txid)
    write_deltalake(path, of_keys(1, LARGE[:1]), mode="append")
    assert any("2 rows are there, 1 were written" in one.text for one in compared(path, "upsert").wrong)
    assert repaired(path, "upsert").rows_removed == 1
    for txid in (3, 4):
        assert all("version 3" in one.text for one in compared(path, "upsert").wrong), "the other writer's alone"
        put(DeltaSink(path, name="t"), of_keys(txid), input_of("upsert"), txid=txid)


def test_versions_of_a_key_without_an_order_are_named_and_left(tmp_path: Path) -> None:
    path = tmp_path / "t"
    written_before(path, "upsert")
    unordered = SinkInput.for_upsert(of_keys(1).schema, ("k",))
    sink = DeltaSink(path, name="t")
    with closing(sink.open(SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, "t"), unordered, 9)) as session:
        left = session.repair().left
    assert left == ["2 keys that come more than once: without order_by no row of them is the newest"]


def test_another_writer_that_takes_a_file_meanwhile_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "t", list[int]()
    written_before(path, "upsert")
    read = live_adds

    def and_then_another(*args: Any) -> Mapping[str, Any]:
        found = read(*args)
        if not calls:
            DeltaTable(path).delete(f"k = cast('{LARGE[0]}' as decimal(20, 0))")
            DeltaTable(path).delete("n = 1")
        calls.append(1)
        return found

    monkeypatch.setattr("stormproof.sinks.delta.repair.live_adds", and_then_another)
    repaired(path, "upsert")
    assert len(calls) == 2
    assert {row["k"] for row in DeltaTable(path).to_pyarrow_table().to_pylist()} == {*LARGE}


NAN: Final = float("nan")
TEXTS: Final = pa.list_(pa.string())
FOLDS: Final[Mapping[str, tuple[Mapping[str, AnyFold], Mapping[str, pa.DataType], Sequence[Mapping[str, Any]]]]] = {
    "last by order": (
        {"v": ByOrder(End.LAST, ("at",)), "at": ByOrder(End.LAST, ("at",))},
        {"v": pa.string(), "at": pa.int64()},
        [{"v": "b", "at": 2}, {"v": "c", "at": 3}, {"v": "a", "at": 1}],
    ),
    "first by order, with NULL and NaN": (
        {"v": ByOrder(End.FIRST, ("at",)), "at": ByOrder(End.FIRST, ("at",))},
        {"v": pa.string(), "at": pa.float64()},
        [{"v": None, "at": None}, {"v": "n", "at": NAN}, {"v": "a", "at": 0.5}],
    ),
    "sets": (
        {"s": SetUnion(3), "more": SetTruncated("s", 3)},
        {"s": TEXTS, "more": pa.bool_()},
        [{"s": ["b", "d"], "more": False}, {"s": ["a", "b"], "more": False}, {"s": ["c"], "more": False}],
    ),
    "extremes with NaN": (
        {"low": Fold.MIN, "high": Fold.MAX},
        {"low": pa.float64(), "high": pa.float64()},
        [{"low": NAN, "high": 1.0}, {"low": 2.0, "high": NAN}, {"low": None, "high": 0.5}],
    ),
}


@pytest.mark.parametrize("lineage", [None, Lineage(message=None)], ids=["plain", "lineage"])
@pytest.mark.parametrize("kind", FOLDS)
def test_rows_of_one_key_are_merged_as_a_merge_folds_them(tmp_path: Path, kind: str, lineage: Lineage | None) -> None:
    folds, types, told = FOLDS[kind]
    input_ = with_lineage(SinkInput.for_fold(pa.schema([("k", KIND), *types.items()]), ("k",), folds), lineage, "t")
    schema = input_.schema
    values = [{"k": key, "_txid": txid, **row} for txid, row in enumerate(told, 1) for key in LARGE]
    rows = pa.Table.from_pylist(values, schema)
    right, wrong = DeltaSink(tmp_path / "right", name="t"), DeltaSink(tmp_path / "t", name="t")
    for txid in range(1, 4):
        put(right, rows.slice(2 * txid - 2, 2), input_, txid=txid)
    put(wrong, rows.slice(2, 2), input_)  # the second one came first
    for at in (0, 4):
        write_deltalake(tmp_path / "t", rows.slice(at, 2), mode="append")
    with closing(wrong.open(SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, "t"), input_, 9)) as session:
        done = session.repair()
    assert (done.doubled_keys, done.rows_removed, done.left) == (2, 4, [])
    found, expected = (DeltaTable(tmp_path / name).to_pyarrow_table().sort_by("k") for name in ("t", "right"))
    assert repr(found.select(schema.names).to_pylist()) == repr(expected.select(schema.names).to_pylist())


@pytest.mark.parametrize("value", ["a b/c", "Zürich", "100%", "%41", "\U00020000"])
def test_a_key_is_mended_in_a_partition_whose_value_is_escaped_in_paths(tmp_path: Path, value: str) -> None:
    rows = pa.table({"k": [1], "at": [1], "place": [value]})
    sink, input_ = (
        DeltaSink(tmp_path / "t", name="t", partition_by=["place"]),
        SinkInput.for_upsert(rows.schema, ("k",), ("at",)),
    )
    put(sink, rows, input_)
    write_deltalake(tmp_path / "t", pa.table({"k": [1, 2], "at": [2, 1], "place": [value] * 2}), mode="append")
    with closing(sink.open(SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, "t"), input_, 9)) as session:
        assert session.repair().rows_removed == 1
    found = DeltaTable(tmp_path / "t").to_pyarrow_table().sort_by("k").to_pylist()
    assert found == [{"k": 1, "at": 2, "place": value}, {"k": 2, "at": 1, "place": value}]


MICROS: Final = pa.array([0, 1_000_999], pa.timestamp("us", "UTC"))
WRONG: Final[Mapping[str, tuple[pa.Array, Mapping[str, Any]]]] = {
    "a rounded maximum": (pa.array(LARGE, KIND), {"maxValues": {"c": 98765432109876543000}}),
    "a saturated minimum": (pa.array([-LARGE[0]], KIND), {"minValues": {"c": -9223372036854775808}}),
    "NaN above the maximum": (pa.array([1.0, float("nan")]), {"maxValues": {"c": 1.0}}),
    "a second that was cut": (MICROS, {"maxValues": {"c": "1970-01-01T00:00:00.000Z"}}),
    "a text that was cut": (pa.array(["a" * 40]), {"maxValues": {"c": "a" * 32}}),
    "no NULL where there is one": (pa.array([1, None]), {"nullCount": {"c": 0}}),
    "nothing but NULL where there is a value": (pa.array([1, None]), {"nullCount": {"c": 2}}),
    "a field of a struct": (pa.array([{"x": 3}]), {"maxValues": {"c": {"x": 2}}}),
}
RIGHT: Final[Mapping[str, tuple[pa.Array, Mapping[str, Any]]]] = {
    "a millisecond": (MICROS, {"maxValues": {"c": "1970-01-01T00:00:01.000Z"}}),
    "the last millisecond": (EDGES["timestamp_ntz"].drop_null(), {"maxValues": {"c": "9999-12-31T23:59:59.999"}}),
    "Spark's NaN": (pa.array([1.0, float("nan")]), {"minValues": {"c": 1.0}, "maxValues": {"c": "NaN"}}),
    "a bound of another zone": (
        pa.array([0], pa.timestamp("us", "UTC")),
        {"minValues": {"c": "1970-01-01T01:00:00.000+01:00"}},
    ),
    "a text that ends in the highest character": (pa.array(["a" * 40]), {"maxValues": {"c": "a" * 32 + "\U0010ffff"}}),
    "a float of 32 bits": (pa.array([0.1], pa.float32()), {"minValues": {"c": 0.1}, "maxValues": {"c": 0.1}}),
    "no bounds": (decimals(38, 38), {}),
}


@pytest.mark.parametrize("name", [*WRONG, *RIGHT])
def test_statistics_are_wrong_where_they_exclude_a_row_and_only_there(tmp_path: Path, name: str) -> None:
    column, told = {**WRONG, **RIGHT}[name]
    path, rows = tmp_path / "t", pa.table({"c": column})
    pq.write_table(rows, tmp_path / "made.parquet")
    table = DeltaTable.create(path, rows.schema)
    (tmp_path / "made.parquet").rename(path / "made.parquet")
    size = (path / "made.parquet").stat().st_size
    stats = json.dumps({"numRecords": len(column), **told})
    add = AddAction("made.parquet", size, {}, 0, data_change=True, stats=stats)
    table.create_write_transaction([add], "append", table.schema())
    session = DeltaSink(path, name="t").open(IDENTITY, SinkInput(rows.schema), 9)
    with closing(session):
        looked = session.repair(dry_run=True)
        assert [*looked.files] == (["made.parquet"] if name in WRONG else [])
        session.repair()
        assert session.repair(dry_run=True).files == []
