"""An upsert whose commit ends at each failpoint, and which another driver finishes: exact, and counted alike."""

from __future__ import annotations

from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import pytest
from support.sink_harness import SinkHarness

from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.sinks.contract.protocol import CommitOutcome

POINTS = {
    "delta": ("delta.after_check", "delta.after_log_entry", "delta.after_sync"),
    "postgres": ("postgres.after_guard", "postgres.after_rows", "postgres.after_commit"),
}
FIRST = [("a", 5), ("b", 1), ("a", 4)]
SECOND = [("a", 4), ("b", 2), ("b", 1), ("c", 1)]
ONLY_LATE = [("a", 1), ("b", 0)]
"""Changes nothing: a MERGE of it commits nothing by itself."""


@pytest.mark.parametrize(("rows", "superseded"), [(SECOND, 2), (ONLY_LATE, 2)], ids=["some", "none"])
@pytest.mark.parametrize("point", [f"{store}={point}" for store, points in POINTS.items() for point in points])
def test_a_commit_that_ends_anywhere_is_finished_by_the_next_driver(
    point: str,
    rows: list[tuple[str | None, int | None]],
    superseded: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    store, _, where = point.partition("=")
    database = request.getfixturevalue("database") if store == "postgres" else None
    harness = SinkHarness(f"{store}-upsert", tmp_path, database)
    with closing(harness.open(1)) as session:
        session.commit(harness.prepare(session, 1, None, FIRST), checked=True)
        second = harness.prepare(session, 2, 1, rows)
        with armed(f"{where}=error"), suppress(StoreUnavailable), pytest.raises(FailpointError):
            session.commit(second, checked=True)
    with closing(harness.open(2)) as session:
        first_try = session.commit(second, checked=True)
        again = session.commit(second, checked=True)
        assert (first_try.superseded, again.superseded) == (superseded, superseded)
        assert again.outcome is CommitOutcome.ALREADY_HELD
        assert [e.superseded for e in session.evidence(0, None).entries] == [1, superseded]
    expected = {"a": 5, "b": 2, "c": 1} if rows is SECOND else {"a": 5, "b": 1}
    assert harness.rows() == Counter(expected.items())
