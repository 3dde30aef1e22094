"""Conformance of sinks: what a commit applies, what it suppresses, and what it refuses."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from stormproof.core.base.errors import Fenced, PositionMismatch, StoreUnavailable, StormproofError
from stormproof.sinks.contract.protocol import CommitOutcome, Held, PreparedTransaction, SinkSession
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
