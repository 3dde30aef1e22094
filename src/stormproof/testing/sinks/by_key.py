"""Conformance of sinks that change rows by their key."""

from __future__ import annotations

from collections import Counter

import pytest

from stormproof.core.errors import SinkRefused
from stormproof.sinks.protocol import CommitOutcome, CommitResult, PreparedTransaction, SinkSession
from stormproof.testing.sinks.harness import SinkHarness


class FoldCases:
    """Mix this in for a sink whose `modes` include fold, with a harness whose `input` is `FOLD`."""

    def test_a_fold_refuses_what_it_would_apply_wrongly(self, harness: SinkHarness, session: SinkSession) -> None:
        """A repeated key, a key that is NULL and a sum that overflows are refused; nothing is written."""
        for rows, why in (([("new", 1), ("new", 2)], "more than once"), ([(None, 1)], "NULL")):
            with pytest.raises(SinkRefused, match=why):
                session.commit(harness.prepare(session, 1, None, rows, tasks=len(rows)), checked=True)
        session.commit(harness.prepare(session, 1, None, {"big": 2**63 - 1, "a": 1}), checked=True)
        with pytest.raises(SinkRefused):
            session.commit(harness.prepare(session, 2, 1, {"big": 1, "a": 1}), checked=True)
        assert session.held() is not None
        assert harness.rows() == Counter({("big", 2**63 - 1): 1, ("a", 1): 1})

    def test_a_fold_adds_nothing_for_null(self, harness: SinkHarness, session: SinkSession) -> None:
        """A NULL adds nothing."""
        session.commit(harness.prepare(session, 1, None, [("a", None), ("b", 2)]), checked=True)
        session.commit(harness.prepare(session, 2, 1, [("a", 3), ("b", None)]), checked=True)
        assert harness.rows() == Counter({("a", 3): 1, ("b", 2): 1})


class UpsertCases:
    """Mix this in for a sink whose `modes` include upsert, with a harness whose `input` is `UPSERT`."""

    def test_an_upsert_refuses_what_it_would_apply_wrongly(self, harness: SinkHarness, session: SinkSession) -> None:
        """A key that two tasks wrote and a key that is NULL are refused; nothing is written."""
        for rows, why in (([("new", 1), ("new", 2)], "more than once"), ([(None, 1)], "NULL")):
            with pytest.raises(SinkRefused, match=why):
                session.commit(harness.prepare(session, 1, None, rows, tasks=len(rows)), checked=True)
        assert session.held() is None
        assert harness.rows() == Counter()

    def test_an_older_row_never_overwrites_a_newer_one(self, harness: SinkHarness, session: SinkSession) -> None:
        """In whatever order they come."""
        for txid, n in enumerate((2, 1, 3, 3, 2), start=1):
            session.commit(harness.prepare(session, txid, txid - 1 or None, {"a": n}), checked=True)
        assert harness.rows() == Counter({("a", 3): 1})

    def test_an_upsert_counts_what_it_supersedes(self, harness: SinkHarness, session: SinkSession) -> None:
        """The count is the sink's own: asked again, also by another driver, it says the same."""
        batches: list[tuple[list[tuple[str | None, int | None]], int]] = [
            ([("a", 5), ("a", 3), ("b", 1)], 1),
            ([("a", 4), ("b", 2)], 1),
            ([("a", 1), ("a", 5), ("b", 2)], 3),  # nothing of it changes the table
            ([], 0),
            ([("c", 1)], 0),
        ]
        done: list[PreparedTransaction] = []
        for txid, (rows, superseded) in enumerate(batches, start=1):
            done.append(harness.prepare(session, txid, txid - 1 or None, rows))
            assert session.commit(done[-1], checked=True) == CommitResult(CommitOutcome.APPLIED, superseded)
            session.close()
            assert session.commit(done[-1], checked=True) == CommitResult(CommitOutcome.ALREADY_HELD, superseded)
        assert harness.rows() == Counter({("a", 5): 1, ("b", 2): 1, ("c", 1): 1})
        report = session.evidence(0, None)
        assert [(e.rows, e.superseded, e.problem) for e in report.entries] == [
            (t.rows, superseded, None) for t, (_, superseded) in zip(done, batches, strict=True)
        ]
        assert report.problems == ()
