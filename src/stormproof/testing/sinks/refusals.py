"""Conformance of sinks whose tables refuse rows one by one."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest

from stormproof.core.errors import SinkRefused
from stormproof.sinks.protocol import CommitOutcome, CommitResult, Held, SinkProblem, SinkSession
from stormproof.testing.sinks.harness import A, SinkHarness

Told = set[tuple[int, bool]]


def _told(result: CommitResult) -> Told:
    return {(number, row.goes_with_others) for row in result.refused for number, _ in row.messages}


class RefuseCases:
    """Mix this in for a sink that rejects messages: its writer `names_messages`, and its commit leaves out refused rows.

    The harness says how its table refuses rows: `refuse`.
    """

    ROWS: tuple[tuple[str, int], ...] = (("a", 1), ("bad", 2), ("c", 3), ("d", 4))
    MESSAGES: tuple[int, ...] = (10, 20, 20, 30)
    """The message of each row: the refused row shares its message with the row behind it."""

    def test_a_refused_row_takes_its_message_and_no_other(self, harness: SinkHarness, session: SinkSession) -> None:
        """A message is in the table whole or not at all; the rows of all others are committed."""
        harness.refuse("bad")
        transaction = harness.prepare(session, 1, None, self.ROWS, messages=self.MESSAGES, rejects_max=1)
        result = session.commit(transaction, checked=True)
        assert (result.outcome, _told(result)) == (CommitOutcome.APPLIED, {(20, False), (20, True)})
        assert harness.rows() == Counter([("a", 1), ("d", 4)])
        assert session.held() == Held(1, transaction.digest)

    def test_a_repeat_says_again_what_was_refused(self, harness: SinkHarness, session: SinkSession) -> None:
        """The sink's own record has the refused rows, so that a driver whose ledger lost them is told the same."""
        harness.refuse("bad")
        transaction = harness.prepare(session, 1, None, self.ROWS, messages=self.MESSAGES, rejects_max=1)
        first = session.commit(transaction, checked=True)
        assert len(first.refused) == 2
        session.finished(transaction)
        session.close()
        with closing(harness.open(epoch=2)) as again:
            repeated = again.commit(transaction, checked=True)
        assert (repeated.outcome, repeated.refused) == (CommitOutcome.ALREADY_HELD, first.refused)
        assert harness.rows() == Counter([("a", 1), ("d", 4)])

    def test_the_evidence_counts_refused_rows_apart(self, harness: SinkHarness, session: SinkSession) -> None:
        """`rows` are those that the table took."""
        harness.refuse("bad")
        session.commit(
            harness.prepare(session, 1, None, self.ROWS, messages=self.MESSAGES, rejects_max=1), checked=True
        )
        session.commit(harness.prepare(session, 2, 1, A), checked=True)
        entries = session.evidence(0, None).entries
        assert [(entry.rows, entry.rejected, entry.problem) for entry in entries] == [(2, 2, None), (2, 0, None)]

    def test_more_than_may_be_rejected_refuses_the_transaction(
        self, harness: SinkHarness, session: SinkSession
    ) -> None:
        """Nothing is written; once the table takes the rows, the same transaction goes through."""
        harness.refuse("bad")
        rows, messages = (("bad", 1), ("b", 2), ("bad too", 3)), (1, 2, 3)
        many = harness.prepare(session, 1, None, rows, messages=messages, rejects_max=1)
        none = harness.prepare(session, 1, None, rows, messages=messages)
        with pytest.raises(SinkRefused) as caught:
            session.commit(many, checked=True)
        assert caught.value.details["problem"] == SinkProblem.TOO_MANY_REJECTS
        with pytest.raises(SinkRefused):
            session.commit(none, checked=True)
        assert (session.held(), harness.rows()) == (None, Counter())
        harness.refuse(None)
        assert session.commit(many, checked=True) == CommitResult(CommitOutcome.APPLIED)
        assert harness.rows() == Counter(rows)

    def test_a_refused_row_of_no_message_refuses_the_transaction(
        self, harness: SinkHarness, session: SinkSession
    ) -> None:
        """Its message cannot fail alone, so nothing is written."""
        harness.refuse("bad")
        with pytest.raises(SinkRefused):
            session.commit(harness.prepare(session, 1, None, {"a": 1, "bad": 2}, rejects_max=9), checked=True)
        assert (session.held(), harness.rows()) == (None, Counter())

    def test_unchecked_commits_reject_alike(self, harness: SinkHarness, session: SinkSession) -> None:
        """Under the weaker guarantees, too."""
        harness.refuse("bad")
        transaction = harness.prepare(session, 1, None, self.ROWS, messages=self.MESSAGES, rejects_max=1)
        assert _told(session.commit(transaction, checked=False)) == {(20, False), (20, True)}
        assert harness.rows() == Counter([("a", 1), ("d", 4)])
