"""Conformance of sinks whose tables refuse rows one by one, and of those that leave out rows which do not fit."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TypeAlias

import pytest

from stormproof.core.base.errors import SinkRefused
from stormproof.sinks.contract.protocol import (
    CommitOutcome,
    CommitResult,
    Held,
    PreparedTransaction,
    SinkProblem,
    SinkSession,
)
from stormproof.sinks.prepare.rejected_messages import GroupsRefused
from stormproof.sinks.prepare.staging import Misfits
from stormproof.testing.sinks.harness import A, SinkHarness

Told = set[tuple[int, bool]]
Row: TypeAlias = tuple[str | None, int | None]


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

    def test_a_refused_group_names_its_messages(self, harness: SinkHarness, session: SinkSession) -> None:
        """Its messages have parts in other rows, so nothing is written; the driver comes again without them."""
        harness.refuse("bad")
        groups = harness.prepare(session, 1, None, self.ROWS, messages=self.MESSAGES, rejects_max=9, of_groups=True)
        with pytest.raises(GroupsRefused) as caught:
            session.commit(groups, checked=True)
        assert [row.messages for row in caught.value.rows] == [((20, 0),)]
        assert (session.held(), harness.rows()) == (None, Counter())
        rest = (("a", 1), ("d", 4))
        again = harness.prepare(session, 1, None, rest, messages=(10, 30), rejects_max=9, of_groups=True, attempt=2)
        assert session.commit(again, checked=True) == CommitResult(CommitOutcome.APPLIED)
        assert harness.rows() == Counter(rest)

    def test_a_refused_group_of_unknown_messages_says_so(self, harness: SinkHarness, session: SinkSession) -> None:
        """Then the driver has them named; nothing is written until then."""
        harness.refuse("bad")
        groups = harness.prepare(session, 1, None, (("a", 1), ("bad", 2)), messages=(None, None), rejects_max=9)
        with pytest.raises(SinkRefused) as caught:
            session.commit(groups, checked=True)
        assert caught.value.details["problem"] == SinkProblem.MESSAGES_UNKNOWN
        assert (session.held(), harness.rows()) == (None, Counter())


class MisfitCases:
    """Mix this in for a sink that `rejects_misfits`: a task leaves out a row that does not fit, its file's description names
    the row's message (see `stormproof.sinks.prepare`), and the commit leaves out what else the message has there.

    The harness says which row does not fit: `discard_row`.
    """

    MESSAGES: tuple[int, ...] = (10, 20, 20, 30)
    """The message of each row: the one that does not fit shares its message with the row behind it."""

    def _prepared(
        self, harness: SinkHarness, session: SinkSession, bad: Row, *, most: int | None = 1, of_groups: bool = False
    ) -> PreparedTransaction:
        rows: tuple[Row, ...] = (("a", 1), bad, ("c", 3), ("d", 4))
        return harness.prepare(session, 1, None, rows, messages=self.MESSAGES, rejects_max=most, of_groups=of_groups)

    def test_a_row_that_does_not_fit_takes_its_message_and_no_other(self, harness: SinkHarness) -> None:
        """No task fails for it. The file names its message; the evidence accounts for each prepared row."""
        bad = harness.discard_row()
        with closing(harness.open()) as session:
            transaction = self._prepared(harness, session, bad)
            (row,) = Misfits.of(transaction.files).rows
            assert (row.messages, row.sqlstate) == (((20, 0),), None)
            result = session.commit(transaction, checked=True)
            assert (result.outcome, _told(result)) == (CommitOutcome.APPLIED, {(20, True)})
            assert harness.rows() == Counter([("a", 1), ("d", 4)])
            (entry,) = session.evidence(0, None).entries
            assert (entry.rows, entry.rejected, transaction.rows) == (2, 1, 3)

    def test_a_repeat_says_again_what_was_left_out(self, harness: SinkHarness) -> None:
        """Also to another driver, once the prepared files are gone."""
        bad = harness.discard_row()
        with closing(harness.open()) as session:
            transaction = self._prepared(harness, session, bad)
            first = session.commit(transaction, checked=True)
            session.finished(transaction)
        with closing(harness.open(epoch=2)) as again:
            repeated = again.commit(transaction, checked=True)
        assert (repeated.outcome, repeated.refused) == (CommitOutcome.ALREADY_HELD, first.refused)
        assert len(first.refused) == 1
        assert harness.rows() == Counter([("a", 1), ("d", 4)])

    def test_nothing_but_rows_that_do_not_fit(self, harness: SinkHarness) -> None:
        """The sink holds the transaction, and the table none of its rows."""
        bad = harness.discard_row()
        with closing(harness.open()) as session:
            transaction = harness.prepare(session, 1, None, (bad,), messages=(10,), rejects_max=1)
            assert (transaction.rows, len(Misfits.of(transaction.files).rows)) == (0, 1)
            assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
            session.finished(transaction)
            assert session.held() == Held(1, transaction.digest)
            session.commit(harness.prepare(session, 2, 1, {"a": 1}, messages=(20,)), checked=True)
        assert harness.rows() == Counter([("a", 1)])

    def test_more_misfits_than_may_be_rejected_refuse_the_transaction(self, harness: SinkHarness) -> None:
        """Nothing is written."""
        bad = harness.discard_row()
        with closing(harness.open()) as session:
            for most in (0, None):
                with pytest.raises(SinkRefused):
                    session.commit(self._prepared(harness, session, bad, most=most), checked=True)
            assert (session.held(), harness.rows()) == (None, Counter())

    def test_a_group_that_does_not_fit_names_its_messages(self, harness: SinkHarness) -> None:
        """Its messages have parts in other rows, so nothing is written; where they are not known, that is said."""
        bad = harness.discard_row()
        with closing(harness.open()) as session:
            with pytest.raises(GroupsRefused) as groups:
                session.commit(self._prepared(harness, session, bad, of_groups=True), checked=True)
            assert [row.messages for row in groups.value.rows] == [((20, 0),)]
            unknown = harness.prepare(session, 1, None, (("a", 1), bad), messages=(None, None), rejects_max=9)
            with pytest.raises(SinkRefused) as caught:
                session.commit(unknown, checked=True)
            assert caught.value.details["problem"] == SinkProblem.MESSAGES_UNKNOWN
            assert (session.held(), harness.rows()) == (None, Counter())
