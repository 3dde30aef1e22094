"""Compaction of a Delta sink's table: no row and no evidence changes, beside other writers, and after a crash anywhere."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, QueryBuilder, write_deltalake
from deltalake.transaction import AddAction
from support.sink_harness import SCHEMA, SinkHarness

from stormproof.core.base.errors import Fenced, SinkRefused
from stormproof.core.base.failpoint import FailpointReached, watched
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import CommitOutcome, PreparedTransaction, SinkSession
from stormproof.sinks.delta.log import COMPACTS, DeltaLog, Label
from stormproof.sinks.delta.power_loss import written_for
from stormproof.sinks.delta.rewrite import rewrite
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.delta.versions import TableHead, add_files, merge_rows

pytestmark = pytest.mark.sampled(0.5)

PLAIN = CommitProperties()
BATCHES: list[dict[str, int]] = [{"a": 1, "b": 2}, {"a": 3}, {"c": 4}, {"b": 5, "d": 6}]


@pytest.fixture(params=["append", "upsert", "fold"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
    return SinkHarness(f"delta-{request.param}", tmp_path, None)


@pytest.fixture
def append(tmp_path: Path) -> SinkHarness:
    return SinkHarness("delta-append", tmp_path, None)


def opened(harness: SinkHarness, epoch: int = 1) -> DeltaSession:
    session = harness.open(epoch)
    assert isinstance(session, DeltaSession)
    return session


def put(harness: SinkHarness, session: SinkSession, txids: range) -> PreparedTransaction:
    prepared: list[PreparedTransaction] = []
    for txid in txids:
        prepared.append(harness.prepare(session, txid, txid - 1 or None, BATCHES[txid - 1]))
        session.commit(prepared[-1], checked=True)
    return prepared[-1]


def foreign(harness: SinkHarness, *words: str) -> None:
    rows = pa.table({"word": words, "n": [7] * len(words)}, schema=SCHEMA)
    write_deltalake(harness.delta_path, rows, mode="append")


def require_sound(harness: SinkHarness, rows: Counter[tuple[str, int]], txids: range) -> None:
    session = opened(harness, 9)
    report = session.evidence(1, None)
    assert harness.rows() == rows
    assert report.problems == ()
    assert [(e.txid, e.problem, e.gone, e.doubt) for e in report.entries] == [(t, None, False, None) for t in txids]


def test_a_compaction_changes_neither_rows_nor_evidence(harness: SinkHarness) -> None:
    session = opened(harness)
    put(harness, session, range(1, 4))
    foreign(harness, "x", "y")
    foreign(harness, "z")
    rows = harness.rows()
    done = session.compact()
    assert done.version is not None
    assert done.removed > 1
    assert done.added == 1
    assert len(DeltaTable(harness.delta_path).file_uris()) == 1
    require_sound(harness, rows, range(1, 4))
    last = harness.prepare(session, 4, 3, BATCHES[3])
    assert session.commit(last, checked=True).outcome is CommitOutcome.APPLIED
    assert session.commit(last, checked=True).outcome is CommitOutcome.ALREADY_HELD
    require_sound(harness, harness.rows(), range(1, 5))


def test_a_compaction_without_small_files_writes_no_version(append: SinkHarness) -> None:
    session = opened(append)
    put(append, session, range(1, 2))
    assert session.compact().version is None


@pytest.mark.parametrize("point", ["compact.before", "compact.after_log_entry", "compact.after_sync"])
def test_a_compaction_that_is_killed_leaves_the_table_right(harness: SinkHarness, point: str) -> None:
    session = opened(harness)
    put(harness, session, range(1, 4))
    foreign(harness, "x")
    rows = harness.rows()

    def die(name: str) -> None:
        if name == point:
            raise FailpointReached(point)

    with watched(die), pytest.raises(FailpointReached):
        session.compact()
    require_sound(harness, rows, range(1, 4))
    put(harness, opened(harness, 10), range(4, 5))
    require_sound(harness, harness.rows(), range(1, 5))


@pytest.mark.parametrize("damage", ["missing", "empty", "zeros"])
def test_a_compaction_whose_files_a_power_loss_took_is_taken_back(harness: SinkHarness, damage: str) -> None:
    session = opened(harness)
    put(harness, session, range(1, 4))
    foreign(harness, "x")
    rows, before = harness.rows(), DeltaTable(harness.delta_path).version()
    session.compact()
    hurt(newest_file(harness), damage)
    opened(harness, 2)
    assert DeltaTable(harness.delta_path).version() == before + 2
    require_sound(harness, rows, range(1, 4))
    again = opened(harness, 10)
    put(harness, again, range(4, 5))
    again.compact()
    require_sound(harness, harness.rows(), range(1, 5))


def test_lost_files_of_a_compaction_below_another_writers_version_are_named(append: SinkHarness) -> None:
    session = opened(append)
    put(append, session, range(1, 4))
    session.compact()
    lost = newest_file(append)
    foreign(append, "x")
    lost.unlink()
    with pytest.raises(
        SinkRefused, match=f"version 4, a compaction, lost .*{lost.name}.*RESTORE the table to version 3"
    ):
        opened(append, 2)


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_a_torn_entry_of_a_compaction_is_put_aside(harness: SinkHarness, lines: int) -> None:
    """Cut between two actions: to a reader, rows would be doubled or gone."""
    session = opened(harness)
    put(harness, session, range(1, 4))
    foreign(harness, "x")
    rows = harness.rows()
    version = session.compact().version
    assert version is not None
    entry = Path(DeltaLog(str(harness.delta_path)).entry_path(version))
    whole = entry.read_text().splitlines(keepends=True)
    entry.write_text("".join(whole[: min(lines, len(whole) - 1)]))
    opened(harness, 2)
    require_sound(harness, rows, range(1, 4))


def newest_file(harness: SinkHarness) -> Path:
    log = DeltaLog(str(harness.delta_path))
    entry = log.entry(log.versions()[-1])
    assert entry is not None
    return harness.delta_path / entry.added[0].path


def hurt(file: Path, damage: str) -> None:
    content = file.read_bytes()
    match damage:
        case "missing":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case _:
            file.write_bytes(bytes(len(content)))


# Beside others


def test_rows_that_others_add_during_a_compaction_stay(append: SinkHarness) -> None:
    session, other = opened(append), opened(append)
    put(append, session, range(1, 3))

    def add(name: str) -> None:
        if name == "compact.before":
            foreign(append, "x")
            put(append, other, range(3, 4))

    with watched(add):
        done = session.compact()
    assert done.removed == 2
    require_sound(append, Counter({("a", 1): 1, ("b", 2): 1, ("a", 3): 1, ("c", 4): 1, ("x", 7): 1}), range(1, 4))


def test_a_commit_goes_through_while_the_table_is_compacted(harness: SinkHarness) -> None:
    """By another process's compaction, between a commit's check and its log entry."""
    session, other = opened(harness), opened(harness)
    put(harness, session, range(1, 4))
    struck: list[str] = []

    def strike(name: str) -> None:
        if name == "delta.after_check" and not struck:
            struck.append(name)
            DeltaTable(harness.delta_path).optimize.compact()

    transaction = harness.prepare(session, 4, 3, BATCHES[3])
    with watched(strike):
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    other.close()
    require_sound(harness, harness.rows(), range(1, 5))


def test_a_compaction_that_loses_against_another_begins_again(append: SinkHarness) -> None:
    session = opened(append)
    put(append, session, range(1, 4))
    met: list[str] = []

    def strike(name: str) -> None:
        met.append(name)
        if met == ["compact.before"]:
            DeltaTable(append.delta_path).delete("word = 'a'")
            foreign(append, "x")

    with watched(strike):
        done = session.compact()
    assert done.tries == met.count("compact.before")
    assert append.rows() == Counter({("b", 2): 1, ("c", 4): 1, ("x", 7): 1})


def test_two_compactions_at_once_double_no_row(append: SinkHarness) -> None:
    """Between the reading of the table and our log entry, another one replaces the same files."""
    session = opened(append)
    put(append, session, range(1, 4))
    rows, met = append.rows(), list[str]()

    def strike(name: str) -> None:
        met.append(name)
        if met == ["compact.before"]:
            DeltaTable(append.delta_path).optimize.compact()

    with watched(strike):
        assert session.compact().version is None
    assert met.count("compact.before") == 2
    require_sound(append, rows, range(1, 4))


def test_control_two_compactions_by_delta_rs_double_the_rows_and_the_audit_says_so(append: SinkHarness) -> None:
    session = opened(append)
    put(append, session, range(1, 4))
    rows, late = append.rows(), DeltaTable(append.delta_path)
    session.compact()
    late.optimize.compact()
    assert append.rows() == rows + rows
    (problem,) = session.evidence(1, None).problems
    assert re.search(
        "OPTIMIZE in version 5 replaced .*, which version 4 had replaced: .* the rows are there twice", problem
    )


def test_a_partitioned_table_is_compacted_by_partition(tmp_path: Path) -> None:
    path, schema = tmp_path / "t", pa.schema([pa.field("p", pa.string()), pa.field("at", pa.timestamp("us", "UTC"))])
    rows = [{"p": p, "at": datetime(2020, 1, day, tzinfo=UTC)} for day in (1, 2) for p in ("a b/%c", "é=", None)]
    for row in rows:
        write_deltalake(path, pa.Table.from_pylist([row], schema), mode="append", partition_by=["p", "at"][:1])
    assert rewrite(DeltaLog(str(path)), DeltaTable(path), "x", None) == len(rows)
    table = DeltaTable(path)
    assert len(table.file_uris()) == 3
    key = str
    assert sorted(table.to_pyarrow_table().to_pylist(), key=key) == sorted(rows, key=key)
    assert table.to_pyarrow_table(filters=[("p", "=", "é=")]).num_rows == 2
    assert rewrite(DeltaLog(str(path)), table, "x", None) is None


def test_a_driver_of_an_older_epoch_leaves_the_table_alone(append: SinkHarness) -> None:
    older, newer = opened(append, 1), opened(append, 2)
    put(append, newer, range(1, 4))
    with pytest.raises(Fenced):
        older.compact()


# Every n commits


def test_a_driver_compacts_after_so_many_commits(append: SinkHarness) -> None:
    """Counted across drivers."""
    sink = DeltaSink(append.delta_path, name="counts", compact_every=2)
    for txid in range(1, 5):
        session = sink.open(append.identity, append.input, txid)
        transaction = append.prepare(session, txid, txid - 1 or None, BATCHES[txid - 1])
        session.commit(transaction, checked=True)
        session.finished(transaction)
    log = DeltaLog(str(append.delta_path))
    made = [v for v in log.versions() if (e := log.entry(v)) is not None and COMPACTS in e.info]
    assert len(made) == 2
    require_sound(append, append.rows(), range(1, 5))


# Statistics


@pytest.mark.parametrize("by", ["merge", "compaction"])
def test_files_have_no_bounds_that_pass_over_a_nan(tmp_path: Path, by: str) -> None:
    """To Spark, NaN is greater than every number; delta-rs leaves it out of a column's bounds."""
    point = pa.struct([("x", pa.float64())])
    schema = pa.schema([pa.field("k", pa.int64()), pa.field("x", pa.float32()), pa.field("at", point)])
    rows = [{"k": k, "x": x, "at": {"x": x}} for k, x in enumerate([1.0, math.nan, 2.0])]
    path = tmp_path / "t"
    write_deltalake(path, pa.Table.from_pylist(rows[:2], schema))
    if by == "merge":
        merge_rows(
            DeltaTable(path), pa.Table.from_pylist(rows[1:], schema), SinkInput.for_upsert(schema, ("k",)), PLAIN
        )
    else:
        write_deltalake(path, pa.Table.from_pylist(rows[2:], schema), mode="append")
        DeltaTable(path).optimize.compact(writer_properties=written_for(DeltaTable(path)))
    entry = Path(DeltaLog(str(path)).entry_path(DeltaTable(path).version())).read_text()
    added = [json.loads(line)["add"]["stats"] for line in entry.splitlines() if line.startswith('{"add"')]
    for told in map(json.loads, added):
        assert told["minValues"].keys() == {"k"}
        assert told["maxValues"].keys() == {"k"}
    found = QueryBuilder().register("t", DeltaTable(path)).execute("select k from t where x > 5").read_all()
    assert found.column(0).to_pylist() == [1]


# Negative controls


def test_control_a_compaction_that_drops_a_file_is_found(append: SinkHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(append)
    put(append, session, range(1, 4))
    version = session.compact().version
    assert version is not None
    entry = Path(DeltaLog(str(append.delta_path)).entry_path(version))
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if "add" in action:
            action["add"]["stats"] = action["add"]["stats"].replace('"numRecords":4', '"numRecords":3')
    entry.write_text("".join(json.dumps(action) + "\n" for action in actions))
    problems = opened(append, 2).evidence(1, None).problems
    assert problems == ("OPTIMIZE in version 4 says that it changed no data, and wrote 3 rows in place of 4",)


# VACUUM


def vacuum(harness: SinkHarness) -> list[str]:
    found = DeltaTable(harness.delta_path).vacuum(0, enforce_retention_duration=False, dry_run=False, full=True)
    return [name for name in found if name.startswith("stormproof-")]


def second_names(harness: SinkHarness) -> set[str]:
    return {path.name for path in harness.delta_path.glob("_stormproof-*")}


@pytest.mark.parametrize("at", ["delta.after_check", "delta.after_log_entry", "before", "before a start"])
def test_a_vacuum_without_retention_costs_no_prepared_file(append: SinkHarness, at: str) -> None:
    session = opened(append)
    put(append, session, range(1, 2))
    transaction = append.prepare(session, 2, 1, BATCHES[1], tasks=2)
    taken: list[str] = []

    def strike(name: str) -> None:
        if name == at and not taken:  # its own versions come first, so the commit is checked twice
            taken.extend(vacuum(append))

    if at.startswith("before"):
        strike(at)
        session = opened(append, 2) if at == "before a start" else session
    with watched(strike):
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    session.finished(transaction)
    assert len(taken) == (0 if at == "delta.after_log_entry" else len(transaction.files))
    require_sound(append, Counter({("a", 1): 1, ("b", 2): 1, ("a", 3): 1}), range(1, 3))


def test_a_vacuum_before_the_log_entry_and_a_kill_behind_it_lose_nothing(append: SinkHarness) -> None:
    session = opened(append)
    transaction = append.prepare(session, 1, None, BATCHES[0])

    def adopted_and_killed(_log: DeltaLog, _table: TableHead, files: Sequence[AddAction], label: Label) -> None:
        vacuum(append)
        add_files(DeltaTable(append.delta_path), files, label.for_delta_rs())
        raise FailpointReached("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stormproof.sinks.delta.versions.put_next", adopted_and_killed)
        with pytest.raises(FailpointReached):
            session.commit(transaction, checked=True)
    again = opened(append, 2)
    assert again.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
    require_sound(append, Counter({("a", 1): 1, ("b", 2): 1}), range(1, 2))


def test_second_names_go_with_their_batch_and_with_dead_attempts(append: SinkHarness) -> None:
    session = opened(append)
    dead = append.prepare(session, 1, None, BATCHES[1], attempt=1)
    live = append.prepare(session, 1, None, BATCHES[0], attempt=2)
    following = append.prepare(session, 2, 1, BATCHES[1])
    files = [file.path for one in (dead, live, following) for file in one.files]
    assert second_names(append) == {f"_{path}" for path in files}
    session.commit(live, checked=True)
    session.finished(live)
    session.sweep(lambda txid, attempt, _name: (txid, attempt) == (1, 1))
    assert second_names(append) == {f"_{file.path}" for file in following.files}


def test_control_without_second_names_a_vacuum_takes_the_batch(
    append: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormproof.sinks.prepare.staging.put_back", lambda *_: None)
    session = opened(append)
    transaction = append.prepare(session, 1, None, BATCHES[0])
    assert vacuum(append) == [file.path for file in transaction.files]
    with pytest.raises(SinkRefused, match="is missing"):
        session.commit(transaction, checked=True)


def test_the_sinks_own_vacuum_takes_what_the_table_let_go_of_and_no_prepared_file(harness: SinkHarness) -> None:
    session = opened(harness)
    put(harness, session, range(1, 4))
    session.compact()
    rows, before = harness.rows(), DeltaTable(harness.delta_path).version()
    waiting = harness.prepare(session, 4, 3, BATCHES[3])
    assert session.vacuum() == []  # younger than a week
    named = session.vacuum(0, dry_run=True)
    assert named
    assert all((harness.delta_path / path).exists() for path in named)
    assert sorted(session.vacuum(0)) == sorted(named)
    assert not any((harness.delta_path / path).exists() for path in named)
    assert not any(file.path in "".join(named) for file in waiting.files)
    assert DeltaTable(harness.delta_path).version() > before
    assert harness.rows() == rows
    assert session.commit(waiting, checked=True).outcome is CommitOutcome.APPLIED
    require_sound(harness, harness.rows(), range(1, 5))


def test_no_vacuum_where_a_power_loss_took_a_compactions_files(append: SinkHarness) -> None:
    """The files that it replaced have the rows."""
    session = opened(append)
    put(append, session, range(1, 4))
    rows = append.rows()
    session.compact()
    hurt(newest_file(append), "missing")
    with pytest.raises(SinkRefused, match=r"a compaction, lost .*Start the topology"):
        session.vacuum(0)
    opened(append, 2)
    require_sound(append, rows, range(1, 4))
