"""Conformance of sinks that change rows by their key."""

from __future__ import annotations

from collections import Counter

import pytest

from stormproof.core.errors import SinkRefused
from stormproof.sinks.protocol import SinkSession
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
