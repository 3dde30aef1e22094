"""Partitioned Delta tables, and CHECK constraints: rows are cut by partition, and checked before they are adopted."""

from __future__ import annotations

import datetime as dt
import json
import os
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from deltalake.transaction import AddAction
from support.brokers.object_store import ObjectStore
from support.delta_tables import make_by_hand
from support.sink_harness import SCHEMA, SinkHarness

from stormproof.core.base.errors import SinkRefused, TopologyError, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.sinks.contract.protocol import PreparedTransaction, SinkIdentity, SinkSession
from stormproof.sinks.delta import judge
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.prepare import writer

IDENTITY = SinkIdentity("topology", "inc-1", "t")
A = dt.datetime.fromisoformat("2024-02-29T01:02:03.000004")
VALUES: Mapping[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), ["a", "a b/c=%25é'\"", " ", None]),
    "integer": (pa.int64(), [-(2**63), 0, None]),
    "byte": (pa.int8(), [-128, 127]),
    "boolean": (pa.bool_(), [True, False, None]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(9999, 12, 31), None]),
    "instant": (pa.timestamp("us", "UTC"), [A.replace(tzinfo=dt.UTC), dt.datetime(1900, 1, 1, tzinfo=dt.UTC), None]),
    "local": (pa.timestamp("us"), [A, dt.datetime.fromisoformat("1900-01-01"), None]),
}


def put(session: SinkSession, rows: pa.Table, txid: int = 1, previous: int | None = None) -> PreparedTransaction:
    writer = session.writer().open_task(TaskContext("inc-1", txid, 1, 0), rows.schema)
    for batch in rows.to_batches(max_chunksize=7):
        writer.write(batch)
    files = tuple(writer.close())
    transaction = PreparedTransaction(txid, previous, transaction_digest(files), rows.num_rows, files)
    session.commit(transaction, checked=True)
    return transaction


@pytest.mark.parametrize("kind", VALUES)
def test_rows_of_each_partition_come_back(kind: str, tmp_path: Path) -> None:
    type_, values = VALUES[kind]
    schema = pa.schema([("n", pa.int64()), ("p", type_)])
    DeltaTable.create(tmp_path, Schema.from_arrow(schema), partition_by=["p"])
    rows = pa.table({"n": range(20), "p": pa.array([values[i % len(values)] for i in range(20)], type_)}, schema)
    session = DeltaSink(tmp_path).open(IDENTITY, SinkInput(schema), 1)
    transaction = put(session, rows)
    assert len(transaction.files) == len(values)
    assert DeltaTable(tmp_path).to_pyarrow_table().select(["n", "p"]).sort_by("n").to_pylist() == rows.to_pylist()
    (evidence,) = session.evidence(1, None).entries
    assert (evidence.rows, evidence.problem, evidence.gone) == (20, None, False)
    for value in (v for v in values if v is not None and kind in ("text", "integer", "boolean")):
        found = DeltaTable(tmp_path).to_pyarrow_table(filters=[("p", "=", value)])
        assert sorted(found["n"].to_pylist()) == [i for i in range(20) if values[i % len(values)] == value]


def test_two_partition_columns_and_more_partitions_than_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "OPEN_MAX", 2)
    schema = pa.schema([("a", pa.int64()), ("n", pa.int64()), ("b", pa.string())])
    DeltaTable.create(tmp_path, Schema.from_arrow(schema), partition_by=["a", "b"])
    rows = pa.table({"a": [i % 3 for i in range(60)], "n": range(60), "b": [str(i % 5) for i in range(60)]}, schema)
    put(DeltaSink(tmp_path).open(IDENTITY, SinkInput(schema), 1), rows)
    assert DeltaTable(tmp_path).to_pyarrow_table().select(schema.names).sort_by("n").to_pylist() == rows.to_pylist()


def test_rows_that_have_partition_columns_alone_are_refused(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path, Schema.from_arrow(SCHEMA), partition_by=["word"])
    with pytest.raises(SinkRefused, match=r"partitioned by word, and the rows have no other column.*one more column"):
        DeltaSink(tmp_path).open(IDENTITY, SinkInput(pa.schema([("word", pa.string())])), 1)
    assert DeltaTable(tmp_path).version() == 0


def test_every_folder_of_nested_partitions_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema([("k", pa.int64()), ("a", pa.string()), ("b", pa.string())])
    sink = DeltaSink(tmp_path / "t", mode="upsert", key="k", order_by="any", partition_by=["a", "b"])
    session = sink.open(IDENTITY, sink.input_of(SinkInput(schema)), 1)
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.path.realpath(f"/proc/self/fd/{fd}")))
    put(session, pa.table({"k": [1], "a": ["x y"], "b": ["z"]}, schema))
    (file,) = (tmp_path / "t").glob("*/*/*.parquet")
    assert {str(path) for path in (file, *list(file.parents)[:3])} <= synced


def test_a_partition_column_that_the_rows_do_not_have_is_null(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path, Schema.from_arrow(SCHEMA), partition_by=["word"])
    rows = pa.table({"n": [1, 2]})
    put(DeltaSink(tmp_path).open(IDENTITY, SinkInput(rows.schema), 1), rows)
    assert DeltaTable(tmp_path).to_pyarrow_table().to_pylist() == [{"word": None, "n": 1}, {"word": None, "n": 2}]


def test_a_table_is_made_with_partitions_and_properties(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path / "t", partition_by="word", properties={"delta.appendOnly": "true"})
    sink.open(IDENTITY, SinkInput(SCHEMA), 1)
    made = DeltaTable(tmp_path / "t").metadata()
    assert (made.partition_columns, made.configuration["delta.appendOnly"]) == (["word"], "true")
    assert DeltaSink(tmp_path / "t").committed_by(SinkInput(SCHEMA)) == "delta-rs"
    with pytest.raises(TopologyError, match="partition_by names 'day'"):
        DeltaSink(tmp_path, partition_by=["day"]).check(SinkInput(SCHEMA), Guarantee.EXACTLY_ONCE)
    with pytest.raises(UsageError, match="no committer 'hive'"):
        DeltaSink(tmp_path, committer=cast("Any", "hive"))


@pytest.fixture
def by_word(tmp_path: Path) -> SinkHarness:
    harness = SinkHarness("delta-append", tmp_path, None)
    DeltaTable.create(harness.delta_path, Schema.from_arrow(SCHEMA), partition_by=["word"])
    return harness


@pytest.mark.parametrize("name", ["of\tday", "at:hour", "x" * 201])
def test_a_table_by_a_column_whose_name_no_path_takes_is_not_made(name: str, tmp_path: Path) -> None:
    input_ = SinkInput(pa.schema([("n", pa.int64()), (name, pa.string())]))
    with pytest.raises(SinkRefused, match=r"partition columns whose names no path takes.*name the column otherwise"):
        DeltaSink(tmp_path / "t", partition_by=name).open(IDENTITY, input_, 1)
    assert not (tmp_path / "t").exists()


def test_empty_text_that_would_become_null_fails_its_message(by_word: SinkHarness) -> None:
    rows = pa.record_batch([pa.array(["", "a", None]), pa.array([1, 2, 3])], schema=SCHEMA)
    assert [row for row, _ in by_word.open().writer().check(rows)] == [0]


@pytest.mark.parametrize("how", ["append", "upsert"])
@pytest.mark.parametrize("where", ["local disk", "object store"])
def test_a_value_too_long_for_a_path_fails_its_message_and_the_longest_is_merged_and_compacted(
    where: str, how: str, object_store: ObjectStore, tmp_path: Path
) -> None:
    columns = pa.schema([("k", pa.int64()), *((name, pa.string()) for name in "abcde")])
    folder = f"{object_store.url}/{uuid.uuid4().hex}" if where == "object store" else str(tmp_path)
    options = object_store.options() if where == "object store" else None
    given: dict[str, Any] = {} if how == "append" else {"mode": "upsert", "key": "k", "order_by": "any"}
    sink = DeltaSink(f"{folder}/t", partition_by=list("abcde"), storage_options=options, **given)
    session = sink.open(IDENTITY, sink.input_of(SinkInput(columns)), 1)
    assert isinstance(session, DeltaSession)
    most = next(limit.path_bytes_max for limit in session.limits.columns if limit.name == "a")
    assert most is not None
    assert most == 253 if where == "local disk" else 130 < most < 253
    longest = "日" * (most // 9) + "x" * (most % 9)
    rows = pa.table({"k": [1, 2], "a": ["short", longest], **dict.fromkeys("bcde", [longest] * 2)}, columns)
    ((row, reason),) = session.writer().check(pa.record_batch([["x"], [longest + "x"]], names=["k", "a"]))
    assert (row, f"{most + 1} bytes in a file's path" in reason) == (0, True)
    put(session, rows)
    put(session, rows, 2, 1)
    session.compact()
    found = DeltaTable(f"{folder}/t", storage_options=options).to_pyarrow_table().column("a").to_pylist()
    assert Counter(found) == Counter(["short", longest] * (2 if how == "append" else 1))


def test_a_table_with_values_of_others_too_long_for_a_folder_is_compacted(tmp_path: Path) -> None:
    harness = SinkHarness("delta-append", tmp_path, None)
    made = DeltaTable.create(harness.delta_path, Schema.from_arrow(SCHEMA), partition_by=["word"])
    values = ["日" * 29, "日" * 29, "a", "a", None, None]
    for at, value in enumerate(values):
        pq.write_table(pa.table({"n": [at]}), harness.delta_path / f"{at}.parquet")
        size = (harness.delta_path / f"{at}.parquet").stat().st_size
        add = AddAction(
            f"{at}.parquet", size, {"word": value}, 0, data_change=True, stats=json.dumps({"numRecords": 1})
        )
        made.create_write_transaction([add], "append", made.schema(), ["word"])
    session = harness.open()
    assert isinstance(session, DeltaSession)
    assert session.compact().removed == 6
    assert harness.rows() == Counter({(value, at): 1 for at, value in enumerate(values)})
    assert len(DeltaTable(harness.delta_path).file_uris()) == 3


def test_the_digest_covers_the_partition(by_word: SinkHarness) -> None:
    (file,) = by_word.prepare(by_word.open(), 1, None, {"a": 1}).files
    moved = replace(file, partition=json.dumps({"word": "b"}))
    assert transaction_digest([file]) != transaction_digest([moved])


def test_files_that_were_cut_for_another_table_are_refused(by_word: SinkHarness) -> None:
    session = by_word.open()
    transaction = by_word.prepare(session, 1, None, {"a": 1, "b": 2})
    by_word.drop()
    DeltaTable.create(by_word.delta_path, Schema.from_arrow(SCHEMA))
    with pytest.raises(SinkRefused, match="partitioned by nothing"):
        by_word.open().commit(transaction, checked=True)


def test_a_fold_into_a_partitioned_table_reads_only_its_partitions(tmp_path: Path) -> None:
    harness = SinkHarness("delta-fold", tmp_path, None)
    DeltaTable.create(harness.delta_path, Schema.from_arrow(SCHEMA), partition_by=["word"])
    session = harness.open()
    session.commit(harness.prepare(session, 1, None, {"a": 1, "b": 2, "c": 3}), checked=True)
    session.commit(harness.prepare(session, 2, 1, {"b": 10}), checked=True)
    assert harness.rows() == Counter({("a", 1): 1, ("b", 12): 1, ("c", 3): 1})
    metrics = json.loads(json.dumps(DeltaTable(harness.delta_path).history(1)[0]))["operationMetrics"]
    assert (metrics["num_target_files_scanned"], metrics["num_target_files_skipped_during_scan"]) == (1, 2)


@pytest.fixture
def checked(tmp_path: Path) -> SinkHarness:
    harness = SinkHarness("delta-append", tmp_path, None)
    table = DeltaTable.create(harness.delta_path, Schema.from_arrow(SCHEMA))
    table.alter.add_constraint({"few": "n < 100"})
    return harness


@pytest.mark.parametrize("bad", [100, None])
def test_a_row_that_violates_a_check_is_not_adopted(checked: SinkHarness, bad: int | None) -> None:
    session = checked.open()
    with pytest.raises(SinkRefused, match=r"it violates .*'few' \(n < 100\)"):
        session.commit(checked.prepare(session, 1, None, [("a", 1), ("b", bad)]), checked=True)
    assert checked.rows() == Counter()
    session.commit(checked.prepare(session, 1, None, [("a", 1), ("b", 99)]), checked=True)
    assert checked.rows() == Counter({("a", 1): 1, ("b", 99): 1})


def test_control_without_the_question_such_a_row_is_adopted(
    checked: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "checks_of", lambda _: {})
    session = checked.open()
    session.commit(checked.prepare(session, 1, None, [("b", 100)]), checked=True)
    assert checked.rows() == Counter({("b", 100): 1})


def test_a_constraint_that_cannot_be_evaluated_is_no_permission(tmp_path: Path) -> None:
    harness = SinkHarness("delta-append", tmp_path, None)
    make_by_hand(harness.delta_path, {"settings": {"delta.constraints.odd": "nope(n)"}})
    session = harness.open()
    with pytest.raises(SinkRefused, match=r"cannot evaluate .*'odd'.*committer='spark'"):
        session.commit(harness.prepare(session, 1, None, {"a": 1}), checked=True)


def test_null_is_not_adopted_into_a_column_that_was_made_not_null_meanwhile(tmp_path: Path) -> None:
    for columns in ([], ["word"]):
        path = tmp_path / str(len(columns))
        session = DeltaSink(path, partition_by=columns).open(IDENTITY, SinkInput(SCHEMA), 1)
        task = session.writer().open_task(TaskContext("inc-1", 1, 1, 0), SCHEMA)
        task.write(pa.record_batch([["a", None], [1, 2]], schema=SCHEMA))
        files = tuple(task.close())
        strict = pa.schema([SCHEMA.field(0).with_nullable(False), SCHEMA.field(1)])
        one = pa.table([["b"], [3]], schema=strict)
        write_deltalake(path, one, mode="overwrite", schema_mode="overwrite", partition_by=columns or None)
        with pytest.raises(SinkRefused, match=r"column 'word' is NOT NULL, and .* has NULL in it"):
            session.commit(PreparedTransaction(1, None, transaction_digest(files), 2, files), checked=True)
        assert DeltaTable(path).to_pyarrow_table().to_pylist() == one.to_pylist()


def test_a_file_of_a_cleaned_log_is_adopted_whatever_the_folder_is_called(tmp_path: Path) -> None:
    path = tmp_path / "a b%é"
    session = DeltaSink(path).open(IDENTITY, SinkInput(SCHEMA), 1)
    transaction = put(session, pa.table([["a"], [1]], schema=SCHEMA))
    DeltaTable(path).create_checkpoint()
    for entry in (path / "_delta_log").glob("*.json"):
        entry.unlink()
    assert session.sweep(lambda *_: True) == 0
    assert (path / transaction.files[0].path).exists()


def test_a_folder_that_delta_rs_would_not_find_is_refused(tmp_path: Path) -> None:
    for name in ("a%20b", "a\\b"):
        with pytest.raises(TopologyError, match="rename the folder"):
            DeltaSink(tmp_path / name).check(SinkInput(SCHEMA), Guarantee.EXACTLY_ONCE)


def test_a_constraint_among_properties_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ADD CONSTRAINT"):
        DeltaSink(tmp_path, properties={"delta.constraints.few": "n < 5"})


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_constraint_that_divides_is_left_to_spark(mode: str, tmp_path: Path) -> None:
    kind = f"delta-{mode}"
    plain, divides = SinkHarness(kind, tmp_path / "a", None), SinkHarness(kind, tmp_path / "b", None)
    make_by_hand(plain.delta_path, {"settings": {"delta.constraints.c": "word <> 'a/b'"}})
    plain.open()
    make_by_hand(divides.delta_path, {"settings": {"delta.constraints.c": "n / 2 < 1.5"}})
    with pytest.raises(SinkRefused, match=r"constraint 'c' divides.*committer='spark'"):
        divides.open()


def test_where_a_protocol_lists_features_it_lists_that_of_not_null(tmp_path: Path) -> None:
    key = pa.field("k", pa.int64(), nullable=False)
    first, later = pa.schema([key]), pa.schema([key, pa.field("at", pa.timestamp("us"))])
    DeltaSink(tmp_path / "made").open(IDENTITY, SinkInput(later), 1)
    evolved = DeltaSink(tmp_path / "evolved", schema_contract="evolve")
    put(evolved.open(IDENTITY, SinkInput(first), 1), pa.table({"k": [1]}, first))
    put(evolved.open(IDENTITY, SinkInput(later), 2), pa.table({"k": [2], "at": [A]}, later), 2, 1)
    for name in ("made", "evolved"):
        assert {"invariants", "timestampNtz"} <= {*(DeltaTable(tmp_path / name).protocol().writer_features or ())}
    assert DeltaTable(tmp_path / "evolved").to_pyarrow_table().num_rows == 2
