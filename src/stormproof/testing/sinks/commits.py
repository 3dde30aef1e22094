"""Conformance of sinks: what a commit applies, suppresses and refuses; whose table it is; its prepared files."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pyarrow as pa
import pytest

from stormproof.core.base.errors import (
    FatalError,
    Fenced,
    PositionMismatch,
    SinkRefused,
    StoreUnavailable,
    StormproofError,
)
from stormproof.sinks.contract.protocol import (
    CommitOutcome,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkProblem,
    SinkSession,
)
from stormproof.testing.sinks.harness import A, B, SinkHarness


class CommitCases:
    """Each transaction once, in order, with evidence."""

    def test_commits_in_order(self, harness: SinkHarness, session: SinkSession) -> None:
        """Txids are committed in their order; the numbers of batches that were aborted are gaps."""
        assert session.held() is None
        first = harness.prepare(session, 1, None, A, tasks=2)
        assert session.commit(first, checked=True).outcome is CommitOutcome.APPLIED
        assert session.held() == Held(1, first.digest)
        # Numbers of batches that were aborted are gaps.
        second = harness.prepare(session, 4, 1, B)
        assert session.commit(second, checked=True).outcome is CommitOutcome.APPLIED
        assert session.held() == Held(4, second.digest)
        assert harness.rows() == harness.after(A, B)

    def test_a_transaction_of_one_row(self, harness: SinkHarness, session: SinkSession) -> None:
        """Of several tasks only one wrote a row."""
        transaction = harness.prepare(session, 1, None, {"a": 1}, tasks=3)
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
        assert harness.rows() == harness.after({"a": 1})

    def test_two_drivers_commit_one_transaction_at_once(self, harness: SinkHarness, session: SinkSession) -> None:
        """A driver that stalled and the one that took over may commit at the same moment: the rows are applied once, and
        the newer driver is told that the sink holds them. The older one may be fenced out, or lose its connection.
        """
        transaction = harness.prepare(session, 1, None, A, tasks=2)
        session.close()
        older_is_open, together = threading.Event(), threading.Barrier(2)

        def commit(epoch: int) -> CommitOutcome | StormproofError:
            if epoch == 2:
                older_is_open.wait(60)
            with closing(harness.open(epoch=epoch)) as opened:  # in its own thread: some stores' connections want that
                older_is_open.set()
                together.wait(60)
                try:
                    return opened.commit(transaction, checked=True).outcome
                except (Fenced, StoreUnavailable) as error:
                    return error

        with ThreadPoolExecutor(2) as threads:
            older, newer = threads.map(commit, (1, 2))
        assert isinstance(newer, CommitOutcome)
        if isinstance(older, CommitOutcome):
            assert {older, newer} == {CommitOutcome.APPLIED, CommitOutcome.ALREADY_HELD}
        assert harness.rows() == harness.after(A)

    def test_a_repeat_applies_nothing(self, harness: SinkHarness, session: SinkSession) -> None:
        """A transaction that the sink holds is not applied again, also not by a later driver."""
        transaction = harness.prepare(session, 1, None, A)
        session.commit(transaction, checked=True)
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
        session.close()
        with closing(harness.open(epoch=2)) as again:
            assert again.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
        assert harness.rows() == harness.after(A)

    def test_a_repeat_after_staging_files_went(self, harness: SinkHarness, session: SinkSession) -> None:
        """That is told by the evidence alone: the prepared files may be gone."""
        transaction = harness.prepare(session, 1, None, A)
        session.commit(transaction, checked=True)
        session.finished(transaction)
        session.finished(transaction)
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
        assert harness.rows() == harness.after(A)

    def test_the_same_txid_with_other_content_stops(self, harness: SinkHarness, session: SinkSession) -> None:
        """A txid that the sink holds with another digest is refused: a number says nothing about content."""
        session.commit(harness.prepare(session, 1, None, A), checked=True)
        with pytest.raises(PositionMismatch, match="txid 1"):
            session.commit(harness.prepare(session, 1, None, B, attempt=2), checked=True)
        assert harness.rows() == harness.after(A)

    def test_a_sink_that_is_ahead_stops(self, harness: SinkHarness, session: SinkSession) -> None:
        """An older txid than the last one is refused."""
        one, two = harness.prepare(session, 1, None, A), harness.prepare(session, 2, 1, B)
        session.commit(one, checked=True)
        session.commit(two, checked=True)
        with pytest.raises(PositionMismatch, match="holds txid 2"):
            session.commit(one, checked=True)
        assert harness.rows() == harness.after(A, B)

    def test_a_sink_that_is_behind_stops(self, harness: SinkHarness, session: SinkSession) -> None:
        """A txid whose predecessor the sink does not hold is refused."""
        session.commit(harness.prepare(session, 1, None, A), checked=True)
        with pytest.raises(PositionMismatch, match="expects 2"):
            session.commit(harness.prepare(session, 3, 2, B), checked=True)
        with pytest.raises(PositionMismatch):
            session.commit(harness.prepare(session, 3, None, B), checked=True)
        assert harness.rows() == harness.after(A)

    def test_an_empty_transaction_is_held_like_any_other(self, harness: SinkHarness, session: SinkSession) -> None:
        """A transaction without rows leaves evidence like any other."""
        empty = harness.prepare(session, 1, None, {})
        assert empty.files == ()
        assert session.commit(empty, checked=True).outcome is CommitOutcome.APPLIED
        assert session.commit(empty, checked=True).outcome is CommitOutcome.ALREADY_HELD
        session.commit(harness.prepare(session, 2, 1, A), checked=True)
        session.commit(harness.prepare(session, 3, 2, {}), checked=True)
        assert session.held() == Held(3, empty.digest)
        assert [entry.txid for entry in session.evidence(0, None).entries] == [1, 2, 3]
        assert harness.rows() == harness.after(A)

    def test_unchecked_commits_compare_nothing(self, harness: SinkHarness, session: SinkSession) -> None:
        """Under the weaker guarantees a txid may come twice, and late; the evidence has it all the same."""
        two = harness.prepare(session, 2, 1, A)
        assert session.commit(two, checked=False).outcome is CommitOutcome.APPLIED
        # Files of another attempt: a Delta table holds one file once, however often it is added.
        again = harness.prepare(session, 2, 1, A, attempt=2)
        assert session.commit(again, checked=False).outcome is CommitOutcome.APPLIED
        one = harness.prepare(session, 1, None, B)
        assert session.commit(one, checked=False).outcome is CommitOutcome.APPLIED
        assert session.held() == Held(2, again.digest)
        assert harness.rows() == harness.after(A, A, B)
        report = session.evidence(0, None)
        assert {entry.txid for entry in report.entries} == {1, 2}
        assert report.problems == ()

    def test_evidence_says_what_was_committed(self, harness: SinkHarness, session: SinkSession) -> None:
        """The sink's own log has each transaction with digest and rows, for readers, too."""
        transactions: list[PreparedTransaction] = []
        for txid, rows in enumerate((A, {}, B), start=1):
            transactions.append(harness.prepare(session, txid, txid - 1 or None, rows))
            session.commit(transactions[-1], checked=True)
        report = session.evidence(0, None)
        assert [(e.txid, e.digest, e.rows, e.problem) for e in report.entries] == [
            (t.txid, t.digest, t.rows, None) for t in transactions
        ]
        assert (report.table_id, report.last_txid, report.truncated, report.problems) == (
            session.table_id,
            3,
            False,
            (),
        )
        assert [e.txid for e in session.evidence(2, 2).entries] == [2]
        with closing(harness.sink.inspect(harness.identity, harness.input)) as reader:
            assert reader.evidence(0, None) == report


class TableCases:
    """One life, one driver, one table."""

    def test_a_missing_table_is_refused_unless_it_may_be_made(self, harness: SinkHarness) -> None:
        """Without `create`, nothing is made."""
        for _ in range(2):
            with pytest.raises(SinkRefused, match="no") as refused:
                harness.open(create=False)
            assert refused.value.details["problem"] == SinkProblem.TABLE_GONE, "and nothing was made"

    def test_a_table_that_goes_refuses_what_comes(self, harness: SinkHarness, session: SinkSession) -> None:
        """A commit to a table that was dropped is refused as such."""
        session.commit(harness.prepare(session, 1, None, {"a": 1}), checked=True)
        two = harness.prepare(session, 2, 1, {"b": 1})
        harness.drop()
        with pytest.raises(SinkRefused) as refused:
            session.commit(two, checked=True)
        assert refused.value.details["problem"] == SinkProblem.TABLE_GONE

    def test_a_new_table_of_the_same_name_stops(self, harness: SinkHarness, session: SinkSession) -> None:
        """A table that was dropped and made again is not taken for the old one."""
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

    def test_another_life_of_the_name_is_seen(self, harness: SinkHarness, session: SinkSession) -> None:
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

    def test_two_incarnations_do_not_know_each_other(self, harness: SinkHarness, session: SinkSession) -> None:
        """Evidence belongs to one life of a topology."""
        session.commit(harness.prepare(session, 1, None, A), checked=True)
        other = SinkIdentity("topology", "inc-2", "counts")
        with closing(harness.sink.open(other, harness.input, 1)) as opened:
            assert opened.held() is None
            assert opened.evidence(0, None).entries == ()

    def test_an_older_epoch_is_fenced_out(self, harness: SinkHarness, session: SinkSession) -> None:
        """After a take-over the older driver cannot commit."""
        session.commit(harness.prepare(session, 1, None, A), checked=True)
        stale = harness.prepare(session, 2, 1, B)
        with closing(harness.open(epoch=2)) as newer:
            newer.commit(harness.prepare(newer, 2, 1, {"d": 1}, attempt=2), checked=True)
        with pytest.raises((Fenced, PositionMismatch, StoreUnavailable)) as refused:
            session.commit(stale, checked=True)
        if isinstance(refused.value, StoreUnavailable):  # the take-over ended its connection: it reads the sink again
            with pytest.raises((Fenced, PositionMismatch)):
                session.commit(stale, checked=True)
        assert harness.rows() == harness.after(A, {"d": 1})


class FileCases:
    """What is prepared is what is written, and nothing is left behind."""

    @pytest.mark.parametrize("damage", ["missing", "truncated"])
    def test_a_damaged_file_is_refused_before_anything_moves(
        self, harness: SinkHarness, session: SinkSession, damage: str
    ) -> None:
        """A prepared file that is missing or cut short is named; once it is repaired, the same transaction goes through."""
        folder = harness.prepared_in(session)
        transaction = harness.prepare(session, 1, None, A, tasks=2)
        name = transaction.files[1].path
        content = folder.read(name)
        if damage == "missing":
            folder.remove(name)
        else:
            folder.put(name, content[:-8])
        with pytest.raises(SinkRefused, match=name) as caught:
            session.commit(transaction, checked=True)
        assert caught.value.details["problem"] == SinkProblem.FILE_LOST
        assert session.held() is None
        assert harness.rows() == Counter()
        # Repaired, the very same transaction goes through.
        folder.put(name, content)
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
        assert harness.rows() == harness.after(A)

    def test_a_wrong_number_of_rows_is_refused(self, harness: SinkHarness, session: SinkSession) -> None:
        """The files must hold as many rows as were prepared."""
        good = harness.prepare(session, 1, None, A)
        with pytest.raises(SinkRefused, match="instead of"):
            session.commit(PreparedTransaction(1, None, good.digest, 3, good.files), checked=True)
        assert session.held() is None
        assert harness.rows() == Counter()

    def test_sweep_removes_only_what_is_dead(self, harness: SinkHarness, session: SinkSession) -> None:
        """A sweep takes prepared files of this life that are dead, and nothing else."""
        folder = harness.prepared_in(session)
        dead = harness.prepare(session, 1, None, A, attempt=1)
        live = harness.prepare(session, 1, None, A, attempt=2)
        foreign = live.files[0].path.replace("inc-1", "inc-2")
        folder.put(foreign, b"another incarnation's")
        folder.put("notes.txt", b"not ours")
        assert session.sweep(lambda txid, attempt, _name: (txid, attempt) == (1, 1)) == 1
        assert not folder.exists(dead.files[0].path)
        assert folder.exists(foreign)
        assert folder.exists("notes.txt")
        assert session.commit(live, checked=True).outcome is CommitOutcome.APPLIED
        assert harness.rows() == harness.after(A)

    def test_a_late_file_of_a_dead_attempt_changes_nothing(self, harness: SinkHarness, session: SinkSession) -> None:
        """A file that a task writes after its attempt is over has no effect, and is swept."""
        folder = harness.prepared_in(session)
        good = harness.prepare(session, 1, None, A, attempt=2)
        session.commit(good, checked=True)
        late = harness.prepare(session, 1, None, B, attempt=1)
        assert harness.rows() == harness.after(A)
        assert session.sweep(lambda _txid, attempt, _name: attempt == 1) == 1
        assert not folder.exists(late.files[0].path)
        assert harness.rows() == harness.after(A)

    def test_files_of_repeated_tasks_and_attempts_go_with_their_txid(
        self, harness: SinkHarness, session: SinkSession
    ) -> None:
        """A task that ran twice has written twice under one name but for its end; one of the two is in the transaction."""
        folder = harness.prepared_in(session)
        first = harness.prepare(session, 1, None, B, attempt=1)
        again = harness.prepare(session, 1, None, A, attempt=2)
        counted = harness.prepare(session, 1, None, A, attempt=2)
        following = harness.prepare(session, 2, 1, B)
        session.commit(counted, checked=True)
        session.finished(counted)
        left = folder.names()
        orphans = {first.files[0].path, again.files[0].path}
        if harness.private:
            assert left == {following.files[0].path}
        else:  # the table's folder is not looked through for each batch, but by a start
            assert left == {following.files[0].path, counted.files[0].path, *orphans}
            assert session.sweep(lambda txid, _attempt, name: txid == 1 and name != counted.files[0].path) == 2
        session.commit(following, checked=True)
        mode = folder.mode(following.files[0].path)
        assert mode is None or mode & 0o077 == (0 if harness.private else 0o044)

    def test_keys_that_are_null_are_told_before_the_commit(self, harness: SinkHarness, session: SinkSession) -> None:
        """A key that is NULL is told in the task, so that its message fails alone; other columns take NULL."""
        rows = pa.RecordBatch.from_arrays([pa.array(["a", None], pa.string())], names=["word"])
        assert [row for row, _ in session.writer().check(rows)] == ([1] if harness.input.is_by_key else [])
