"""The Delta sink against what other writers, operators and power losses do to a table: each attack was seen to work."""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.transaction import AddAction
from support.delta_tables import make_by_hand
from support.sink_harness import FOLD, SCHEMA, SinkHarness

from stormproof.core.base.errors import (
    CannotTell,
    Fenced,
    PositionMismatch,
    SinkRefused,
    StoreUnavailable,
    TopologyError,
)
from stormproof.core.base.failpoint import watched
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.sinks.contract.protocol import CommitOutcome, PreparedTransaction, SinkProblem, SinkSession
from stormproof.sinks.delta.log import Label
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.delta.transactional_table import CONFLICT_TRIES_MAX

A, B, C = {"a": 1}, {"a": 10, "b": 2}, {"c": 3}


@pytest.fixture(params=["delta-append", "delta-fold"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
    return SinkHarness(request.param, tmp_path, None)


@pytest.fixture
def append(tmp_path: Path) -> SinkHarness:
    return SinkHarness("delta-append", tmp_path, None)


@pytest.fixture
def fold(tmp_path: Path) -> SinkHarness:
    return SinkHarness("delta-fold", tmp_path, None)


def table(harness: SinkHarness) -> DeltaTable:
    return DeltaTable(harness.delta_path)


def log_path(harness: SinkHarness, version: int) -> Path:
    return harness.delta_path / "_delta_log" / f"{version:020}.json"


def commit(
    harness: SinkHarness, session: SinkSession, txid: int, previous: int | None, rows: dict[str, int]
) -> PreparedTransaction:
    transaction = harness.prepare(session, txid, previous, rows)
    assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    return transaction


class Between:
    """Runs something at a named place of the next commit: another driver, while this one stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actions: dict[str, Callable[[], object]] = {}
        monkeypatch.setattr("stormproof.sinks.delta.transactional_table.failpoint", self._reached)

    def _reached(self, name: str) -> None:
        action = self.actions.pop(name, None)
        if action is not None:
            action()


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    return Between(monkeypatch)


# Other drivers and other writers


def test_two_drivers_commit_the_same_transaction_once(harness: SinkHarness, between: Between) -> None:
    stale, newer = harness.open(1), harness.open(2)
    transaction = harness.prepare(stale, 1, None, A)
    between.actions["delta.after_check"] = lambda: newer.commit(transaction, checked=True)
    stale.commit(transaction, checked=True)
    assert harness.rows() == Counter({("a", 1): 1})
    assert [e.txid for e in newer.evidence(0, None).entries] == [1]


def test_a_stale_driver_is_refused_by_the_transaction_identifier(harness: SinkHarness, between: Between) -> None:
    """It has passed every check, and stands just before the log entry, while another driver commits three times."""
    stale, newer = harness.open(1), harness.open(2)
    theirs = harness.prepare(stale, 1, None, B)

    def take_over() -> None:
        for txid in (1, 2, 3):
            commit(harness, newer, txid, txid - 1 or None, {f"new{txid}": 1})

    between.actions["delta.after_check"] = take_over
    with pytest.raises(PositionMismatch, match="txid 3"):
        stale.commit(theirs, checked=True)
    assert harness.rows() == Counter({(f"new{i}", 1): 1 for i in (1, 2, 3)})


def without_identifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Label, "identifiers", lambda _: [])


def test_control_without_the_transaction_identifier_a_stale_driver_doubles(
    append: SinkHarness, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_identifier(monkeypatch)
    stale, newer = append.open(1), append.open(2)
    one, again = append.prepare(stale, 1, None, A), append.prepare(newer, 1, None, A, attempt=2)
    between.actions["delta.after_check"] = lambda: newer.commit(again, checked=True)
    stale.commit(one, checked=True)
    assert append.rows() == Counter({("a", 1): 2})


def test_control_without_the_transaction_identifier_a_repeat_adds_again(
    fold: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_identifier(monkeypatch)
    session = fold.open()
    transaction = commit(fold, session, 1, None, A)
    assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    assert fold.rows() == Counter({("a", 2): 1})


def test_a_driver_of_an_older_epoch_does_not_go_on_from_a_newer_ones_commit(harness: SinkHarness) -> None:
    older, newer = harness.open(1), harness.open(2)
    commit(harness, newer, 1, None, A)
    with pytest.raises(Fenced):
        older.commit(harness.prepare(older, 2, 1, C), checked=True)


def test_other_writers_may_append_at_any_time(append: SinkHarness, between: Between) -> None:
    session = append.open()
    commit(append, session, 1, None, A)
    theirs = pa.table({"word": ["theirs"], "n": [1]}, schema=SCHEMA)
    between.actions["delta.after_check"] = lambda: write_deltalake(append.delta_path, theirs, mode="append")
    commit(append, session, 2, 1, C)
    assert append.rows() == Counter({("a", 1): 1, ("theirs", 1): 1, ("c", 3): 1})


def test_a_merge_that_loses_against_another_writer_is_tried_again(fold: SinkHarness, between: Between) -> None:
    session = fold.open()
    commit(fold, session, 1, None, A)
    transaction = fold.prepare(session, 2, 1, B)
    between.actions["delta.after_check"] = lambda: table(fold).update(updates={"n": "n + 100"}, predicate="word = 'a'")
    assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    assert fold.rows() == Counter({("a", 111): 1, ("b", 2): 1})


def test_a_merge_that_loses_again_and_again_is_an_outage(fold: SinkHarness) -> None:
    session = fold.open()
    commit(fold, session, 1, None, A)
    transaction, met = fold.prepare(session, 2, 1, B), list[str]()

    def strike(name: str) -> None:
        if name == "delta.after_check":
            met.append(name)
            table(fold).update(updates={"n": "n + 100"}, predicate="word = 'a'")

    with watched(strike), pytest.raises(StoreUnavailable, match="nothing was written"):
        session.commit(transaction, checked=True)
    assert len(met) == CONFLICT_TRIES_MAX
    assert fold.rows() == Counter({("a", 1 + 100 * len(met)): 1})
    assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED


def test_a_lost_answer_is_read_from_the_log(harness: SinkHarness, between: Between) -> None:
    session = harness.open()
    transaction = harness.prepare(session, 1, None, A)

    def crash() -> None:
        raise KeyboardInterrupt

    between.actions["delta.after_log_entry"] = crash
    with pytest.raises(KeyboardInterrupt):
        session.commit(transaction, checked=True)
    assert harness.open(2).commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
    assert harness.rows() == Counter({("a", 1): 1})


# What operators do


def test_a_restored_table_stops_and_is_named(harness: SinkHarness) -> None:
    session = harness.open()
    commit(harness, session, 1, None, A)
    good = table(harness).version()
    commit(harness, session, 2, 1, C)
    newest = table(harness).version()
    table(harness).restore(good)
    assert table(harness).transaction_version(harness.identity.application_id) == 2, "the trap: the identifier stays"
    with pytest.raises(PositionMismatch, match="restored"):
        session.held()
    with pytest.raises(PositionMismatch, match="restored"):
        session.commit(harness.prepare(session, 3, 2, B), checked=True)
    problems = {e.txid: e.problem for e in session.evidence(0, None).entries}
    assert problems[1] is None
    assert "restored" in (problems[2] or "")
    # Brought back to where it was, it goes on.
    table(harness).restore(newest)
    commit(harness, session, 3, 2, {"d": 1})
    assert session.evidence(0, None).entries[-1].problem is None


def test_rows_deleted_or_rewritten_by_others(append: SinkHarness) -> None:
    session = append.open()
    commit(append, session, 1, None, A)
    commit(append, session, 2, 1, C)
    table(append).optimize.compact()
    assert [e.problem for e in session.evidence(0, None).entries] == [None, None]
    commit(append, session, 3, 2, {"d": 1})
    table(append).delete("word = 'd'")
    problem = session.evidence(0, None).entries[-1].problem
    assert problem is not None
    assert "DELETE" in problem


def test_the_newest_log_entry_deleted(harness: SinkHarness) -> None:
    session = harness.open()
    commit(harness, session, 1, None, A)
    commit(harness, session, 2, 1, C)
    log_path(harness, table(harness).version()).unlink()
    with pytest.raises(PositionMismatch, match="holds txid 1"):
        session.commit(harness.prepare(session, 3, 2, B), checked=True)
    assert [e.txid for e in session.evidence(0, None).entries] == [1]


def test_a_lower_transaction_version_is_seen(harness: SinkHarness) -> None:
    session = harness.open()
    commit(harness, session, 1, None, A)
    commit(harness, session, 5, 1, C)
    lower = CommitProperties(app_transactions=[Transaction(harness.identity.application_id, 3, 1)])
    found = table(harness)
    found.create_write_transaction([], "append", found.schema(), commit_properties=lower)
    with pytest.raises(PositionMismatch):
        session.commit(harness.prepare(session, 6, 5, B), checked=True)
    assert any("identifier says 3" in problem for problem in session.evidence(0, None).problems)


def test_a_file_that_is_not_there_is_not_adopted(append: SinkHarness) -> None:
    """Delta-rs takes such an add, and nobody can read the table from then on."""
    session = append.open()
    transaction = append.prepare(session, 1, None, A)
    for name in (transaction.files[0].path, f"_{transaction.files[0].path}"):
        (append.staging / name).unlink()
    with pytest.raises(SinkRefused, match="missing"):
        session.commit(transaction, checked=True)
    assert append.rows() == Counter()
    found = table(append)
    found.create_write_transaction(
        [AddAction("none.parquet", 10, {}, 1, data_change=True, stats='{"numRecords":1}')], "append", found.schema()
    )
    with pytest.raises(FileNotFoundError):
        append.rows()


def test_a_held_transaction_whose_file_was_lost_stops(harness: SinkHarness) -> None:
    session = harness.open()
    transaction = commit(harness, session, 1, None, A)
    (live,) = table(harness).file_uris()
    content = Path(live).read_bytes()
    Path(live).write_bytes(b"")
    with pytest.raises(SinkRefused, match="lost") as caught:
        harness.open(2).commit(transaction, checked=True)
    assert caught.value.details["problem"] == SinkProblem.FILE_LOST
    assert session.evidence(0, None).entries[0].problem is not None
    Path(live).write_bytes(content)
    assert harness.open(2).commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD


def test_evidence_that_retention_removed_cannot_tell(harness: SinkHarness) -> None:
    session = harness.open()
    transaction = commit(harness, session, 1, None, A)
    write_deltalake(harness.delta_path, pa.table({"word": ["theirs"], "n": [1]}, schema=SCHEMA), mode="append")
    newest = table(harness).version()
    table(harness).create_checkpoint()
    for version in range(newest):
        log_path(harness, version).unlink()
    session = harness.open(2)
    held = session.held()
    assert held is not None
    assert (held.txid, held.digest) == (1, None)
    if harness.fold:
        with pytest.raises(CannotTell):
            session.commit(transaction, checked=True)
    else:  # the prepared files are the table's own
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
    report = session.evidence(0, None)
    assert (report.truncated, report.entries, report.last_txid) == (True, (), 1)
    # Going on is known to be right: the number is what the ledger expects.
    commit(harness, session, 2, 1, C)


def test_a_table_that_grows_is_read_on_from_where_it_was(harness: SinkHarness) -> None:
    session = harness.open()
    previous = None
    for txid in range(1, 12):
        commit(harness, session, txid, previous, {f"w{txid}": txid})
        previous = txid
    shutil.rmtree(harness.delta_path)
    with pytest.raises(SinkRefused, match="gone"):
        session.held()


# Durability


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    paths: set[str] = set()
    real = os.fsync

    def fsync(fd: int) -> None:
        paths.add(os.path.realpath(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_everything_that_a_commit_wrote_is_synced(harness: SinkHarness, synced: set[str]) -> None:
    session = harness.open()
    log = harness.delta_path / "_delta_log"
    created = {str(log_path(harness, 0)), str(log), str(harness.delta_path), str(harness.delta_path.parent)}
    assert created <= synced
    transaction = harness.prepare(session, 1, None, A)
    assert {str(harness.staging / transaction.files[0].path), str(harness.staging)} <= synced
    for checked_again in (False, True):  # a commit that is found was perhaps never synced by the one that died
        synced.clear()
        session.commit(transaction, checked=True)
        expected = {*table(harness).file_uris(), str(log_path(harness, 1)), str(log), str(harness.delta_path)}
        assert expected <= synced, checked_again


# Tables that are there already


RETENTION = "delta.setTransactionRetentionDuration"


def there(**columns: Any) -> pa.Table:
    return pa.table({"word": ["x"], "n": [1], **columns})


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: write_deltalake(p, there(n=pa.array([1], pa.int32()))), "'n' is integer in the table and long"),
        (lambda p: write_deltalake(p, there(n=[{"a": 1}])), "'n' is struct<a: int64> in the table and long"),
        (lambda p: write_deltalake(p, there().select(["word"])), "no column 'n'"),
        (lambda p: write_deltalake(p, there(), configuration={RETENTION: "interval 7 days"}), "forgets"),
        (lambda p: make_by_hand(p, {"writer": "featureOfTheFuture"}), "featureOfTheFuture"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_serve_is_refused(harness: SinkHarness, make: Callable[[Path], object], why: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(harness.delta_path)
    with pytest.raises(SinkRefused, match=why):
        harness.open()


def test_a_table_with_more_columns_takes_the_rows(append: SinkHarness) -> None:
    write_deltalake(append.delta_path, pa.table({"more": ["x"], "n": [1], "word": ["there"]}))
    commit(append, append.open(), 1, None, A)
    assert append.rows() == Counter({("there", 1): 1, ("a", 1): 1})


def test_a_remote_path_is_refused_when_the_topology_is_built() -> None:
    with pytest.raises(TopologyError, match="a local path"):
        DeltaSink("hdfs://host/table").check(FOLD, Guarantee.EXACTLY_ONCE)


@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.uint64(), pa.time64("us"), pa.duration("us")])
def test_a_type_that_delta_cannot_hold_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(TopologyError, match="'x'"):
        DeltaSink("x").check(SinkInput(pa.schema([("x", kind)])), Guarantee.EXACTLY_ONCE)


def test_names_that_need_quotes_and_every_kind_of_sum(tmp_path: Path) -> None:
    from decimal import Decimal

    schema = pa.schema(
        [
            ("Key", pa.string()),
            ("my key", pa.int32()),
            ("N", pa.int32()),
            ("a b", pa.float64()),
            ("d", pa.decimal128(10, 2)),
        ]
    )
    sink = DeltaSink(tmp_path / "t", name="t")
    input_ = SinkInput.for_fold(schema, ("Key", "my key"), dict.fromkeys(("N", "a b", "d"), Fold.SUM))
    sink.check(input_, Guarantee.EXACTLY_ONCE)
    harness = SinkHarness("delta-fold", tmp_path, None)
    session = sink.open(harness.identity, input_, 1)
    for txid in (1, 2):
        writer = session.writer().open_task(TaskContext("inc-1", txid, 1, 0), schema)
        row = {"Key": "k'\"", "my key": 1, "N": 2, "a b": 0.5, "d": Decimal("1.25")}
        writer.write(pa.RecordBatch.from_pylist([row], schema))
        files = tuple(writer.close())
        session.commit(PreparedTransaction(txid, txid - 1 or None, transaction_digest(files), 1, files), checked=True)
    assert DeltaTable(tmp_path / "t").to_pyarrow_table().to_pylist() == [
        {"Key": "k'\"", "my key": 1, "N": 4, "a b": 1.0, "d": Decimal("2.50")}
    ]
    writer = session.writer().open_task(TaskContext("inc-1", 3, 1, 0), schema)
    writer.write(
        pa.RecordBatch.from_pylist([{"Key": "k'\"", "my key": 1, "N": 2**31 - 1, "a b": 0.0, "d": Decimal(0)}], schema)
    )
    files = tuple(writer.close())
    with pytest.raises(SinkRefused):
        session.commit(PreparedTransaction(3, 2, transaction_digest(files), 1, files), checked=True)


def test_an_adopted_file_is_never_swept(append: SinkHarness) -> None:
    session = append.open()
    commit(append, session, 1, None, A)
    assert session.sweep(lambda _txid, _attempt, _name: True) == 0
    assert append.rows() == Counter({("a", 1): 1})


def test_statistics_let_a_reader_skip_files(append: SinkHarness) -> None:
    session = append.open()
    commit(append, session, 1, None, A)
    commit(append, session, 2, 1, C)
    adds = pa.table(table(append).get_add_actions(flatten=True)).to_pylist()
    assert sorted((a["num_records"], a["min.word"], a["max.n"]) for a in adds) == [(1, "a", 1), (1, "c", 3)]
