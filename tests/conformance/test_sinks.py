"""What every sink promises, asked of every sink: memory, Postgres and Delta, append and fold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.sink_harness import KINDS, SinkHarness

from stormproof.core.errors import CannotTell, FatalError, Fenced, PositionMismatch, SinkRefused, StoreUnavailable
from stormproof.sinks import protocol
from stormproof.sinks.protocol import (
    CommitOutcome,
    Decision,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkProblem,
    SinkSession,
)

A, B = {"a": 1, "b": 2}, {"b": 5, "c": 7}


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
    kind: str = request.param
    database = request.getfixturevalue("database") if kind.startswith("postgres") else None
    return SinkHarness(kind, tmp_path, database)


@pytest.fixture
def session(harness: SinkHarness) -> Iterator[SinkSession]:
    opened = harness.open()
    yield opened
    opened.close()


def after(harness: SinkHarness, *batches: dict[str, int]) -> Counter[tuple[str, int]]:
    """The rows by the definition: appended, or summed by key."""
    if not harness.fold:
        return Counter(pair for batch in batches for pair in batch.items())
    total: Counter[str] = Counter()
    for batch in batches:
        total.update(batch)
    return Counter(total.items())


def test_commits_in_order(harness: SinkHarness, session: SinkSession) -> None:
    assert session.held() is None
    first = harness.prepare(session, 1, None, A, tasks=2)
    assert session.commit(first, checked=True).outcome is CommitOutcome.APPLIED
    assert session.held() == Held(1, first.digest)
    # Numbers of batches that were aborted are gaps.
    second = harness.prepare(session, 4, 1, B)
    assert session.commit(second, checked=True).outcome is CommitOutcome.APPLIED
    assert session.held() == Held(4, second.digest)
    assert harness.rows() == after(harness, A, B)


def test_a_repeat_applies_nothing(harness: SinkHarness, session: SinkSession) -> None:
    transaction = harness.prepare(session, 1, None, A)
    session.commit(transaction, checked=True)
    assert session.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
    session.close()
    with closing(harness.open(epoch=2)) as again:
        assert again.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
    assert harness.rows() == after(harness, A)


def test_a_repeat_after_staging_files_went(harness: SinkHarness, session: SinkSession) -> None:
    transaction = harness.prepare(session, 1, None, A)
    session.commit(transaction, checked=True)
    session.finished(transaction)
    session.finished(transaction)
    assert session.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
    assert harness.rows() == after(harness, A)


def test_another_life_of_the_name_is_seen(harness: SinkHarness, session: SinkSession) -> None:
    """A table that a lost ledger's topology wrote to, or another topology, must not look new."""
    assert session.other_incarnations() == ()
    session.commit(harness.prepare(session, 1, None, A), checked=True)
    assert session.other_incarnations() == ()
    for identity, others in (
        (SinkIdentity("topology", "inc-2", "counts"), ("inc-1",)),
        (SinkIdentity("another", "inc-2", "counts"), ("topology/inc-1",)),
    ):
        with closing(harness.sink.open(identity, harness.input, 1)) as opened:
            assert opened.other_incarnations() == others


def test_the_same_txid_with_other_content_stops(harness: SinkHarness, session: SinkSession) -> None:
    session.commit(harness.prepare(session, 1, None, A), checked=True)
    with pytest.raises(PositionMismatch, match="txid 1"):
        session.commit(harness.prepare(session, 1, None, B, attempt=2), checked=True)
    assert harness.rows() == after(harness, A)


def test_a_sink_that_is_ahead_stops(harness: SinkHarness, session: SinkSession) -> None:
    one, two = harness.prepare(session, 1, None, A), harness.prepare(session, 2, 1, B)
    session.commit(one, checked=True)
    session.commit(two, checked=True)
    with pytest.raises(PositionMismatch, match="holds txid 2"):
        session.commit(one, checked=True)
    assert harness.rows() == after(harness, A, B)


def test_a_sink_that_is_behind_stops(harness: SinkHarness, session: SinkSession) -> None:
    session.commit(harness.prepare(session, 1, None, A), checked=True)
    with pytest.raises(PositionMismatch, match="expects 2"):
        session.commit(harness.prepare(session, 3, 2, B), checked=True)
    with pytest.raises(PositionMismatch):
        session.commit(harness.prepare(session, 3, None, B), checked=True)
    assert harness.rows() == after(harness, A)


def test_a_new_table_of_the_same_name_stops(harness: SinkHarness, session: SinkSession) -> None:
    session.commit(harness.prepare(session, 1, None, A), checked=True)
    old = session.table_id
    harness.drop()
    with pytest.raises(FatalError):
        session.commit(harness.prepare(session, 2, 1, B), checked=True)
    session.close()
    with closing(harness.open(epoch=2)) as new:
        assert new.table_id != old
        with pytest.raises(PositionMismatch):
            new.commit(harness.prepare(new, 2, 1, B), checked=True)
    assert harness.rows() == Counter()


def test_an_empty_transaction_is_held_like_any_other(harness: SinkHarness, session: SinkSession) -> None:
    empty = harness.prepare(session, 1, None, {})
    assert empty.files == ()
    assert session.commit(empty, checked=True).outcome is CommitOutcome.APPLIED
    assert session.commit(empty, checked=True).outcome is CommitOutcome.ALREADY_HELD
    session.commit(harness.prepare(session, 2, 1, A), checked=True)
    session.commit(harness.prepare(session, 3, 2, {}), checked=True)
    assert session.held() == Held(3, empty.digest)
    assert [entry.txid for entry in session.evidence(0, None).entries] == [1, 2, 3]
    assert harness.rows() == after(harness, A)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_file_is_refused_before_anything_moves(
    harness: SinkHarness, session: SinkSession, damage: str
) -> None:
    transaction = harness.prepare(session, 1, None, A, tasks=2)
    path = harness.staging / transaction.files[1].path
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-8])
    with pytest.raises(SinkRefused, match=path.name) as caught:
        session.commit(transaction, checked=True)
    assert caught.value.details["problem"] == SinkProblem.FILE_LOST
    assert session.held() is None
    assert harness.rows() == Counter()
    # Repaired, the very same transaction goes through.
    path.write_bytes(content)
    assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    assert harness.rows() == after(harness, A)


def test_a_wrong_number_of_rows_is_refused(harness: SinkHarness, session: SinkSession) -> None:
    good = harness.prepare(session, 1, None, A)
    with pytest.raises(SinkRefused, match="instead of"):
        session.commit(PreparedTransaction(1, None, good.digest, 3, good.files), checked=True)
    assert session.held() is None
    assert harness.rows() == Counter()


def test_unchecked_commits_compare_nothing(harness: SinkHarness, session: SinkSession) -> None:
    two = harness.prepare(session, 2, 1, A)
    assert session.commit(two, checked=False).outcome is CommitOutcome.APPLIED
    # Files of another attempt: a Delta table holds one file once, however often it is added.
    again = harness.prepare(session, 2, 1, A, attempt=2)
    assert session.commit(again, checked=False).outcome is CommitOutcome.APPLIED
    one = harness.prepare(session, 1, None, B)
    assert session.commit(one, checked=False).outcome is CommitOutcome.APPLIED
    assert session.held() == Held(2, again.digest)
    assert harness.rows() == after(harness, A, A, B)
    report = session.evidence(0, None)
    assert {entry.txid for entry in report.entries} == {1, 2}
    assert report.problems == ()


def test_an_older_epoch_is_fenced_out(harness: SinkHarness, session: SinkSession) -> None:
    session.commit(harness.prepare(session, 1, None, A), checked=True)
    stale = harness.prepare(session, 2, 1, B)
    with closing(harness.open(epoch=2)) as newer:
        newer.commit(harness.prepare(newer, 2, 1, {"d": 1}, attempt=2), checked=True)
    if harness.store == "postgres":
        # Its connection was ended by the take-over: that is a lost answer, and what it reads then is the fence.
        with pytest.raises(StoreUnavailable):
            session.commit(stale, checked=True)
    with pytest.raises(PositionMismatch if harness.store == "delta" else Fenced):
        session.commit(stale, checked=True)
    assert harness.rows() == after(harness, A, {"d": 1})


def test_evidence_says_what_was_committed(harness: SinkHarness, session: SinkSession) -> None:
    transactions: list[PreparedTransaction] = []
    for txid, rows in enumerate((A, {}, B), start=1):
        transactions.append(harness.prepare(session, txid, txid - 1 or None, rows))
        session.commit(transactions[-1], checked=True)
    report = session.evidence(0, None)
    assert [(e.txid, e.digest, e.rows, e.problem) for e in report.entries] == [
        (t.txid, t.digest, t.rows, None) for t in transactions
    ]
    assert (report.table_id, report.last_txid, report.truncated, report.problems) == (session.table_id, 3, False, ())
    assert [e.txid for e in session.evidence(2, 2).entries] == [2]
    with closing(harness.sink.inspect(harness.identity, harness.input)) as reader:
        assert reader.evidence(0, None) == report


def test_two_incarnations_do_not_know_each_other(harness: SinkHarness, session: SinkSession) -> None:
    session.commit(harness.prepare(session, 1, None, A), checked=True)
    other = protocol.SinkIdentity("topology", "inc-2", "counts")
    with closing(harness.sink.open(other, harness.input, 1)) as opened:
        assert opened.held() is None
        assert opened.evidence(0, None).entries == ()


def test_sweep_removes_only_what_is_dead(harness: SinkHarness, session: SinkSession) -> None:
    dead = harness.prepare(session, 1, None, A, attempt=1)
    live = harness.prepare(session, 1, None, A, attempt=2)
    foreign = harness.staging / live.files[0].path.replace("inc-1", "inc-2")
    foreign.write_bytes(b"another incarnation's")
    (harness.staging / "notes.txt").write_text("not ours")
    assert session.sweep(lambda txid, attempt, _name: (txid, attempt) == (1, 1)) == 1
    assert not (harness.staging / dead.files[0].path).exists()
    assert foreign.exists()
    assert (harness.staging / "notes.txt").exists()
    assert session.commit(live, checked=True).outcome is CommitOutcome.APPLIED
    assert harness.rows() == after(harness, A)


def test_a_late_file_of_a_dead_attempt_changes_nothing(harness: SinkHarness, session: SinkSession) -> None:
    good = harness.prepare(session, 1, None, A, attempt=2)
    session.commit(good, checked=True)
    late = harness.prepare(session, 1, None, B, attempt=1)
    assert harness.rows() == after(harness, A)
    assert session.sweep(lambda _txid, attempt, _name: attempt == 1) == 1
    assert not (harness.staging / late.files[0].path).exists()
    assert harness.rows() == after(harness, A)


def test_files_of_repeated_tasks_and_attempts_go_with_their_txid(harness: SinkHarness, session: SinkSession) -> None:
    """A task that ran twice has written twice under one name but for its end; one of the two is in the transaction."""
    first = harness.prepare(session, 1, None, B, attempt=1)
    again = harness.prepare(session, 1, None, A, attempt=2)
    counted = harness.prepare(session, 1, None, A, attempt=2)
    following = harness.prepare(session, 2, 1, B)
    session.commit(counted, checked=True)
    session.finished(counted)
    left = {path.name for path in harness.staging.glob("stormproof-*")}
    orphans = {first.files[0].path, again.files[0].path}
    if harness.private:
        assert left == {following.files[0].path}
    else:  # the table's folder is not looked through for each batch, but by a start
        assert left == {following.files[0].path, counted.files[0].path, *orphans}
        assert session.sweep(lambda txid, _attempt, name: txid == 1 and name != counted.files[0].path) == 2
    session.commit(following, checked=True)
    assert (harness.staging / following.files[0].path).stat().st_mode & 0o077 == (0 if harness.private else 0o044)


def test_a_fold_refuses_what_it_would_apply_wrongly(harness: SinkHarness, session: SinkSession) -> None:
    if not harness.fold:
        pytest.skip("only folds have keys")
    for rows, why in (([("new", 1), ("new", 2)], "more than once"), ([(None, 1)], "NULL")):
        with pytest.raises(SinkRefused, match=why):
            session.commit(harness.prepare(session, 1, None, rows, tasks=len(rows)), checked=True)
    session.commit(harness.prepare(session, 1, None, {"big": 2**63 - 1, "a": 1}), checked=True)
    with pytest.raises(SinkRefused):
        session.commit(harness.prepare(session, 2, 1, {"big": 1, "a": 1}), checked=True)
    assert session.held() is not None
    assert harness.rows() == Counter({("big", 2**63 - 1): 1, ("a", 1): 1})


def test_a_fold_adds_nothing_for_null(harness: SinkHarness, session: SinkSession) -> None:
    if not harness.fold:
        pytest.skip("only folds add")
    session.commit(harness.prepare(session, 1, None, [("a", None), ("b", 2)]), checked=True)
    session.commit(harness.prepare(session, 2, 1, [("a", 3), ("b", None)]), checked=True)
    assert harness.rows() == Counter({("a", 3): 1, ("b", 2): 1})


def test_a_missing_table_is_refused_unless_it_may_be_made(harness: SinkHarness) -> None:
    for _ in range(2):
        with pytest.raises(SinkRefused, match="no") as refused:
            harness.open(create=False)
        assert refused.value.details["problem"] == SinkProblem.TABLE_GONE, "and nothing was made"


def test_a_table_that_goes_refuses_what_comes(harness: SinkHarness, session: SinkSession) -> None:
    session.commit(harness.prepare(session, 1, None, {"a": 1}), checked=True)
    two = harness.prepare(session, 2, 1, {"b": 1})
    harness.drop()
    with pytest.raises(SinkRefused) as refused:
        session.commit(two, checked=True)
    assert refused.value.details["problem"] == SinkProblem.TABLE_GONE


def test_keys_that_are_null_are_told_before_the_commit(harness: SinkHarness, session: SinkSession) -> None:
    import pyarrow as pa

    rows = pa.record_batch([pa.array(["a", None], pa.string())], names=["word"])
    assert [row for row, _ in session.writer().check(rows)] == ([1] if harness.fold else [])


# Negative controls: broken variants that the tests above must catch.


def test_control_skip_by_number_alone_is_caught(
    harness: SinkHarness, session: SinkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_number(_identity: Any, transaction: PreparedTransaction, held: Held | None) -> Decision:
        return Decision.SKIP if held is not None and held.txid >= transaction.txid else Decision.COMMIT

    _replace_decide(monkeypatch, by_number)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_the_same_txid_with_other_content_stops(harness, session)


def test_control_no_transaction_identifier_is_caught(
    harness: SinkHarness, session: SinkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    if harness.store == "postgres":
        pytest.skip("its guard is moved by a second, independent comparison: see the next test")

    def always(*_: Any) -> Decision:
        return Decision.COMMIT

    _replace_decide(monkeypatch, always)
    with pytest.raises(AssertionError):
        test_a_repeat_applies_nothing(harness, session)


def test_postgres_moves_the_guard_only_from_the_previous_txid(
    tmp_path: Path, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = SinkHarness("postgres-append", tmp_path, database)
    with closing(harness.open()) as session:
        transaction = harness.prepare(session, 1, None, A)
        session.commit(transaction, checked=True)
        _replace_decide(monkeypatch, lambda *_: Decision.COMMIT)
        with pytest.raises(PositionMismatch, match="guard rows"):
            session.commit(transaction, checked=True)
    assert harness.rows() == after(harness, A)


def test_expired_evidence_cannot_tell(harness: SinkHarness, session: SinkSession) -> None:
    transaction = harness.prepare(session, 1, None, A)
    with pytest.raises(CannotTell):
        protocol.decide(session.identity, transaction, Held(1, None))


def _replace_decide(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    own = ("memory", "postgres.hold", "delta.hold")
    for module in (*(f"stormproof.sinks.{name}" for name in own), "sqlite_sink"):
        monkeypatch.setattr(f"{module}.decide", broken)
