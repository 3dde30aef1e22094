"""Tables with statistics that exclude rows, and with doubled keys: `audit verify --deep` names them, `repair` mends them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.transaction import AddAction
from support import duck
from support.typed_rows import EDGES, IDENTITY, decimals, put

from stormproof.core.folds import Fold
from stormproof.core.sink import SinkInput
from stormproof.sinks.abilities import Repair
from stormproof.sinks.comparison import Comparison, RowProblem, RowsOnRecord
from stormproof.sinks.delta import DeltaSink
from stormproof.sinks.delta.live_adds import live_adds
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.protocol import SinkIdentity

LARGE: Final = [Decimal("12345678901234567891"), Decimal("98765432109876543219")]
KIND: Final = pa.decimal128(20, 0)
FOLD: Final = {"n": Fold.SUM, "low": Fold.MIN, "high": Fold.MAX}


def of_keys(n: int, keys: list[Decimal] = LARGE) -> pa.Table:
    numbers = [pa.array([n] * len(keys), pa.int64())] * 3
    return pa.table([pa.array(keys, KIND), *numbers], names=["k", "n", "low", "high"])


def input_of(how: str) -> SinkInput:
    schema = of_keys(1).schema
    if how == "append":
        return SinkInput(schema)
    return SinkInput.for_fold(schema, ("k",), FOLD) if how == "fold" else SinkInput.for_upsert(schema, ("k",), ("n",))


def opened(path: Path, how: str) -> DeltaSession:
    session = DeltaSink(path, name="t").open(
        SinkIdentity(IDENTITY.topology, IDENTITY.incarnation, "t"), input_of(how), 9
    )
    assert isinstance(session, DeltaSession)
    return session


def compared(path: Path, how: str) -> Comparison:
    with closing(opened(path, how)) as session:
        return session.compare_rows(lambda: RowsOnRecord({}), 1, None, lambda done, of: None)


def repaired(path: Path, how: str, *, dry_run: bool = False) -> Repair:
    with closing(opened(path, how)) as session:
        return session.repair(dry_run=dry_run)


def problems(path: Path, how: str) -> list[RowProblem]:
    return [wrong.problem for wrong in compared(path, how).wrong]


def written_before(path: Path, how: str, batches: int = 3) -> None:
    """As an earlier version wrote it: a MERGE that reads the bounds which delta-rs took."""
    DeltaTable.create(path, of_keys(1).schema)
    for txid, (n, key) in enumerate(product(range(1, batches + 1), LARGE), 1):
        rows = of_keys(n, [key])
        merge = DeltaTable(path).merge(
            rows,
            "t.k = s.k",
            source_alias="s",
            target_alias="t",
            streamed_exec=False,
            commit_properties=CommitProperties(
                custom_metadata={
                    "stormproof.application": IDENTITY.application_id,
                    "stormproof.txid": str(txid),
                    "stormproof.digest": "d",
                    "stormproof.rows": str(rows.num_rows),
                    "stormproof.epoch": "1",
                    "stormproof.checked": "true",
                },
                app_transactions=[Transaction(IDENTITY.application_id, txid)],
            ),
        )
        changed = {"n": "t.n + s.n", "low": "least(t.low, s.low)", "high": "greatest(t.high, s.high)"}
        merge.when_not_matched_insert_all().when_matched_update(changed if how == "fold" else {"n": "s.n"}).execute()


def by_filters(path: Path) -> list[int]:
    """How many rows DuckDB and delta-rs find of each key."""
    dataset, connection = DeltaTable(path).to_pyarrow_dataset(), duck.connected()
    asked = f"select count(*) from delta_scan('{path}') where k = ?::decimal(20, 0)"
    return [
        *(connection.execute(asked, [str(key)]).fetchone()[0] for key in LARGE),
        *(dataset.count_rows(filter=ds.field("k") == pa.scalar(key, KIND)) for key in LARGE),
    ]


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
