"""Conformance of sinks: whose table it is, and who may write to it."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest

from stormproof.core.base.errors import FatalError, Fenced, PositionMismatch, SinkRefused, StoreUnavailable
from stormproof.sinks.contract.protocol import SinkIdentity, SinkProblem, SinkSession
from stormproof.testing.sinks.harness import A, B, SinkHarness


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
