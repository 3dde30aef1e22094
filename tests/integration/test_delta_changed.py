"""A Delta table that was changed behind our back: what the audit says of it, and how a topology goes on, on record.

RESTORE, overwrite, DELETE, OPTIMIZE, VACUUM and clean-ups of the log, by delta-rs as another writer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from support.kept import LINES, Kept, should
from support.operated import Operated
from support.sink_harness import SCHEMA, SinkHarness

from stormproof.core.base.errors import CannotTell, PositionMismatch, SinkRefused
from stormproof.sinks.contract.protocol import CommitOutcome, Held, SinkSession
from stormproof.sinks.delta import power_loss
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.session import DeltaSession

pytestmark = pytest.mark.sampled(0.25)

NAME: Final = "identity"
A, B, C = {"a": 1}, {"a": 10, "b": 2}, {"c": 3}


@pytest.fixture(params=["delta-append", "delta-fold"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
    return SinkHarness(request.param, tmp_path, None)


@pytest.fixture
def append(tmp_path: Path) -> SinkHarness:
    return SinkHarness("delta-append", tmp_path, None)


def table(harness: SinkHarness) -> DeltaTable:
    return DeltaTable(harness.delta_path)


def three(harness: SinkHarness) -> SinkSession:
    session = harness.open()
    for txid, rows in enumerate((A, B, C), 1):
        session.commit(harness.prepare(session, txid, txid - 1 or None, rows), checked=True)
    return session


def problems(session: SinkSession) -> dict[int, str | None]:
    report = session.evidence(0, None)
    assert report.problems == ()
    assert all(entry.gone for entry in report.entries if entry.problem is not None)
    return {entry.txid: entry.problem for entry in report.entries}


# -- what the audit sees -------------------------------------------------------------------------------------------------


def test_compaction_and_vacuum_raise_no_alarm(harness: SinkHarness) -> None:
    session = three(harness)
    table(harness).optimize.compact()
    table(harness).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert set(problems(session).values()) == {None}
    session.commit(harness.prepare(session, 4, 3, {"d": 4}), checked=True)
    table(harness).optimize.compact()
    table(harness).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert problems(harness.open(2)) == dict.fromkeys(range(1, 5))


CHANGES: Final[dict[str, Callable[[DeltaTable], object]]] = {
    "DELETE": lambda found: found.delete("word = 'a'"),
    "UPDATE": lambda found: found.update(updates={"n": "n + 1"}, predicate="word = 'a'"),
    "WRITE": lambda found: write_deltalake(found, pa.table({"word": ["x"], "n": [1]}, schema=SCHEMA), mode="overwrite"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compacted", [False, True])
def test_rows_that_another_writer_took_are_named(harness: SinkHarness, change: str, *, compacted: bool) -> None:
    session = three(harness)
    if compacted:
        table(harness).optimize.compact()
    CHANGES[change](table(harness))
    found = problems(session)
    hit = [3] if harness.fold else [1, 2, 3] if compacted or change == "WRITE" else [1, 2]
    assert [txid for txid, problem in found.items() if problem is not None] == hit
    assert f"by {change} in version" in (found[hit[0]] or "")


def test_others_rows_in_a_compacted_file_leave_a_doubt(append: SinkHarness) -> None:
    session = three(append)
    write_deltalake(append.delta_path, pa.table({"word": ["theirs"], "n": [1]}, schema=SCHEMA), mode="append")
    table(append).delete("word = 'theirs'")
    assert set(problems(session).values()) == {None}, "their own file, their own rows"
    write_deltalake(append.delta_path, pa.table({"word": ["theirs"], "n": [1]}, schema=SCHEMA), mode="append")
    table(append).optimize.compact()
    table(append).delete("word = 'theirs'")
    entries = session.evidence(0, None).entries
    assert [(e.problem, "cannot be told" in (e.doubt or "")) for e in entries] == [(None, True)] * 3


def test_a_restore_there_and_back_is_none(harness: SinkHarness) -> None:
    session = three(harness)
    newest = table(harness).version()
    table(harness).restore(newest - 1)
    assert [txid for txid, problem in problems(session).items() if problem is not None] == [3]
    assert "restored" in (problems(session)[3] or "")
    table(harness).restore(newest)
    assert set(problems(session).values()) == {None}


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_listed_file_that_is_lost_is_named_whoever_wrote_it(
    harness: SinkHarness, damage: Callable[[Path], object]
) -> None:
    session = three(harness)
    table(harness).optimize.compact()
    write_deltalake(harness.delta_path, pa.table({"word": ["x"], "n": [1]}, schema=SCHEMA), mode="append")
    session.commit(harness.prepare(session, 4, 3, {"d": 4}), checked=True)
    for path in [harness.delta_path / name for name in table(harness).get_add_actions().column("path").to_pylist()]:
        content = path.read_bytes()
        damage(path)
        report = session.evidence(0, None)
        named = [*report.problems, *(e.problem for e in report.entries if e.problem is not None)]
        assert named
        assert all(path.name in text for text in named)
        path.write_bytes(content)
    assert problems(session) == dict.fromkeys(range(1, 5))


# -- going on after a RESTORE --------------------------------------------------------------------------------------------


@pytest.fixture(params=["delta-append", "delta-fold", "delta-map"])
def kept(request: pytest.FixtureRequest, operated: Operated) -> Kept:
    made = Kept(request.param, operated)
    made.run(put=LINES)
    return made


def time_of(table: DeltaTable, version: int) -> datetime:
    """A time at which this version was the newest one, as delta-rs sees it: by its log entry's file."""
    entry = DeltaLog(table.table_uri.removeprefix("file://").rstrip("/")).entry_path(version)
    return datetime.fromtimestamp(os.stat(entry).st_mtime + 0.001, UTC)


@pytest.mark.postgres
def test_a_restore_to_a_time_that_took_no_commit_of_ours_is_no_loss(kept: Kept) -> None:
    """The log says neither the version nor, by Spark, the time's zone: the files do."""
    found = DeltaTable(kept.folder("counts"))
    ours = found.version()
    write_deltalake(found, found.to_pyarrow_table().slice(0, 1), mode="append")
    found.update_incremental()
    found.restore(time_of(found, ours))
    kept.run(put=[b"c"])
    assert kept.counts() == should(*LINES, b"c")
    assert kept.operated.verify()["violations"] == []


@pytest.mark.postgres
def test_a_restore_to_a_time_before_a_commit_of_ours_is_a_loss(kept: Kept) -> None:
    found = DeltaTable(kept.folder("counts"))
    found.restore(time_of(found, found.version() - 1))
    kept.operated.put(b"c")
    with pytest.raises(PositionMismatch, match="restored the table to before"):
        kept.run()
    lost = kept.adopt("--accept-loss", "--why", "as agreed")["lost"]
    assert (lost["txids"], lost["upto"]) == ("3", 3)


@pytest.mark.postgres
def test_after_a_restore_the_loss_may_be_accepted(kept: Kept) -> None:
    found = DeltaTable(kept.folder("counts"))
    before = found.version() - 1
    found.restore(before)
    left = kept.counts()
    kept.operated.put(b"c")
    with pytest.raises(PositionMismatch, match=r"restored.*adopt-table identity s --accept-loss"):
        kept.run()
    text = kept.adopt(status=1)["error"]["message"]
    assert "holds what txid 3 wrote there" in text
    assert "restored the table to before version 3" in text
    assert kept.operated.verify(1)["violations"] != []
    lost = kept.adopt("--accept-loss", "--why", "as agreed")["lost"]
    assert (lost["txids"], lost["upto"]) == ("3", 3)
    kept.run()
    assert kept.counts() == left + should(b"c")
    report = kept.operated.verify()
    assert kept.operated.kinds("notices", report) == ["loss_accepted"]
    assert "as agreed" in report["notices"][0]["text"]
    assert kept.adopt("--accept-loss")["lost"] is None
    # And a second time.
    found = DeltaTable(kept.folder("counts"))
    found.restore(found.version() - 1)
    lost = kept.adopt("--accept-loss")["lost"]
    assert (lost["txids"], lost["upto"]) == ("4", 4)
    kept.run(put=[b"d"])
    assert kept.counts() == left + should(b"d")
    assert set(kept.operated.kinds("notices", kept.operated.verify())) == {"loss_accepted"}


@pytest.mark.postgres
@pytest.mark.parametrize("kept", ["delta-fold"], indirect=True)
def test_control_what_a_restore_took_counts_as_there(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it did: the command said that it was done, and the next start was refused as before."""
    found = DeltaTable(kept.folder("counts"))
    found.restore(found.version() - 1)
    monkeypatch.setattr(DeltaSession, "take_table", lambda self, last: None)
    kept.adopt("--accept-loss")
    with pytest.raises(PositionMismatch, match="restored"):
        kept.run(put=[b"c"])


@pytest.mark.postgres
@pytest.mark.parametrize("kept", ["delta-append", "delta-map"], indirect=True)
def test_a_table_made_anew_and_then_restored(kept: Kept) -> None:
    kept.drop()
    kept.adopt("--accept-loss")
    kept.run(put=[b"c"])
    found = DeltaTable(kept.folder("counts"))
    found.restore(found.version() - 1)
    assert kept.adopt("--accept-loss")["lost"]["txids"] == "4"
    kept.run(put=[b"d"])
    assert kept.counts() == should(b"d")
    assert set(kept.operated.kinds("notices", kept.operated.verify())) == {"loss_accepted"}


@pytest.mark.postgres
@pytest.mark.parametrize("kept", ["delta-append", "delta-fold"], indirect=True)
def test_rows_that_another_writer_took_may_be_given_up(kept: Kept) -> None:
    DeltaTable(kept.folder("counts")).delete("word = 'b'")
    left = kept.counts()
    assert kept.operated.kinds("violations", kept.operated.verify(1))[0] == "evidence"
    assert "by DELETE in version" in kept.adopt(status=1)["error"]["message"]
    kept.adopt("--accept-loss")
    kept.run(put=[b"c"])
    assert kept.counts() == left + should(b"c")
    assert kept.operated.kinds("notices", kept.operated.verify()) == ["loss_accepted"]


# -- clean-ups of the log ------------------------------------------------------------------------------------------------


def cleaned(harness: SinkHarness, *, leave: tuple[int, ...] = ()) -> None:
    """A checkpoint of the newest version, and a clean-up of all entries before it but those in `leave`: it was cut short."""
    found = table(harness)
    found.create_checkpoint()
    for version in range(found.version()):
        if version not in leave:
            Path(DeltaLog(str(harness.delta_path)).entry_path(version)).unlink(missing_ok=True)


@pytest.mark.parametrize("leave", [(), (0,), (1,), (0, 2), (2,)], ids=str)
def test_a_clean_up_behind_a_checkpoint_is_no_restored_backup(harness: SinkHarness, leave: tuple[int, ...]) -> None:
    three(harness)
    cleaned(harness, leave=leave)
    session = harness.open(2)
    held = session.held()
    assert held is not None
    assert held.txid == 3
    report = session.evidence(0, None)
    there = [2, 3] if 2 in leave else [3]  # txid and version are one here
    assert (report.truncated, [e.txid for e in report.entries], report.problems) == (True, there, ())
    session.commit(harness.prepare(session, 4, 3, {"d": 4}), checked=True)
    assert {e.problem for e in session.evidence(0, None).entries} == {None}


def test_a_foreign_clean_up_with_no_retention(harness: SinkHarness) -> None:
    """It takes the entry of our newest commit, too, once another's comes after it."""
    session = three(harness)
    fourth = harness.prepare(session, 4, 3, {"d": 4})
    session.commit(fourth, checked=True)
    found = table(harness)
    found.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    found.create_checkpoint()
    found.cleanup_metadata()
    assert DeltaLog(str(harness.delta_path)).versions() == [5]
    session = harness.open(2)
    assert session.held() == Held(4, None)
    if harness.fold:  # of a MERGE nothing is left that tells
        with pytest.raises(CannotTell, match="evidence of its content has expired"):
            session.commit(fourth, checked=True)
    else:
        assert session.commit(fourth, checked=True).outcome is CommitOutcome.ALREADY_HELD
        other = harness.prepare(session, 4, 3, {"d": 5})
        with pytest.raises(CannotTell):
            session.commit(other, checked=True)
    session.commit(harness.prepare(session, 5, 4, {"e": 5}), checked=True)
    assert session.held() is not None


def test_a_clean_up_at_the_instant_of_a_commit(harness: SinkHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    session = three(harness)

    def cleans(place: str) -> None:
        if place == "delta.after_log_entry":
            cleaned(harness)
            write_deltalake(harness.delta_path, pa.table({"word": ["x"], "n": [1]}, schema=SCHEMA), mode="append")
            cleaned(harness)

    monkeypatch.setattr("stormproof.sinks.delta.transactional_table.failpoint", cleans)
    assert session.commit(harness.prepare(session, 4, 3, {"d": 4}), checked=True).outcome is CommitOutcome.APPLIED
    assert session.held() == Held(4, None)


@pytest.mark.parametrize("leave", [None, (0, 2)], ids=str)
def test_a_restored_backup_is_never_taken_for_a_clean_up(harness: SinkHarness, leave: tuple[int, ...] | None) -> None:
    session = three(harness)
    if leave is not None:
        cleaned(harness, leave=leave)
    backup = harness.delta_path.with_name("backup")
    shutil.copytree(harness.delta_path, backup)
    session = harness.open(2)
    session.commit(harness.prepare(session, 4, 3, {"d": 4}), checked=True)
    fifth = harness.prepare(session, 5, 4, {"e": 5})
    shutil.rmtree(harness.delta_path)
    backup.rename(harness.delta_path)
    session = harness.open(3)
    held = session.held()
    assert held is not None
    assert held.txid == 3
    with pytest.raises((PositionMismatch, SinkRefused), match=r"holds txid 3|missing"):
        session.commit(fifth, checked=True)


def test_a_hole_above_the_checkpoint_is_still_a_loss(harness: SinkHarness) -> None:
    session = three(harness)
    cleaned(harness, leave=(1,))
    for txid in (4, 5, 6):
        session.commit(harness.prepare(session, txid, txid - 1, {"d": txid}), checked=True)
    os.unlink(DeltaLog(str(harness.delta_path)).entry_path(5))
    with pytest.raises(SinkRefused, match=r"00005\.json is missing"):
        harness.open(2)


def test_control_a_gap_behind_a_checkpoint_counts_as_a_loss(
    harness: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(harness)
    cleaned(harness, leave=(1,))
    monkeypatch.setattr(DeltaLog, "checkpoints", lambda self, *, of_all=False: frozenset[int]())
    with pytest.raises(SinkRefused, match=r"00002\.json is missing"):
        power_loss.put_torn_aside(DeltaLog(str(harness.delta_path)), "here")
