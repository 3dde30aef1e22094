"""A transaction of a Delta table that an operator gave up: nothing of it lands later, whoever was about to commit it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable
from support.sink_harness import SinkHarness

from stormproof.core.base.errors import Fenced, PositionMismatch
from stormproof.core.base.failpoint import watched
from stormproof.sinks.contract.protocol import CommitOutcome, SinkSession
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.session import DeltaSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

A, B, C = {"a": 1}, {"b": 2}, {"c": 3}


@pytest.fixture(params=["delta-append", "delta-upsert", "delta-fold"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
    return SinkHarness(request.param, tmp_path, None)


def commit(harness: SinkHarness, session: SinkSession, txid: int, previous: int | None, rows: dict[str, int]) -> None:
    assert session.commit(harness.prepare(session, txid, previous, rows), checked=True).outcome is CommitOutcome.APPLIED


def version(harness: SinkHarness) -> int:
    return DeltaTable(harness.delta_path).version()


def give_up_within(harness: SinkHarness, txid: int, previous: int | None) -> type[Exception] | None:
    """A driver is paused before it writes the log entry, and wakes after an operator gave the transaction up. Returns how it
    ends.
    """
    paused, operator = harness.open(), harness.open()
    transaction = harness.prepare(paused, txid, previous, B)
    done = list[int | None]()

    def give_up(name: str) -> None:
        if name == "delta.after_check" and not done:
            done.append(operator.keep_out(transaction))

    with watched(give_up):
        try:
            paused.commit(transaction, checked=True)
        except Fenced:
            return Fenced
    return None


@pytest.mark.parametrize("before", [{}, A], ids=["the first one", "behind another one"])
def test_a_paused_driver_does_not_commit_what_was_given_up(harness: SinkHarness, before: dict[str, int]) -> None:
    session = harness.open()
    if before:
        commit(harness, session, 1, None, before)
    last = 1 if before else None
    held = session.held()
    assert give_up_within(harness, 2, last) is Fenced
    assert session.held() == held
    commit(harness, session, 3, last, C)
    assert harness.rows() == Counter({**before, **C}.items())
    report = session.evidence(0, None)
    assert ([e.txid for e in report.entries], report.last_txid) == ([1, 3] if before else [3], 3)
    assert not report.problems
    assert not any(e.problem or e.doubt for e in report.entries)


@pytest.mark.parametrize("before", [{}, A], ids=["the first one", "behind another one"])
def test_control_without_such_a_version_it_lands(
    harness: SinkHarness, before: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeltaSession, "keep_out", lambda *_: None)
    if before:
        commit(harness, harness.open(), 1, None, before)
    assert give_up_within(harness, 2, 1 if before else None) is None
    assert harness.rows() == Counter({**before, **B}.items())


def test_a_driver_that_starts_to_commit_afterwards_is_told(harness: SinkHarness) -> None:
    session = harness.open()
    commit(harness, session, 1, None, A)
    transaction = harness.prepare(session, 2, 1, B)
    harness.open().keep_out(transaction)
    with pytest.raises(Fenced, match="txid 2: an operator gave its rows up"):
        session.commit(transaction, checked=True)
    assert harness.rows() == Counter(A.items())


def test_the_name_of_the_next_log_entry_is_taken(harness: SinkHarness) -> None:
    """A PUT that a store carries out late is for the version behind the one that its driver had read."""
    session = harness.open()
    commit(harness, session, 1, None, A)
    read = version(harness)
    assert session.keep_out(harness.prepare(session, 2, 1, B)) == read + 1
    log = DeltaLog(str(harness.delta_path))
    with pytest.raises(FileExistsError):
        log.files.put_new(log.entry_path(read + 1), b"{}")


def test_what_the_table_holds_is_not_given_up(harness: SinkHarness) -> None:
    session = harness.open()
    transaction = harness.prepare(session, 1, None, A)
    session.commit(transaction, checked=True)
    before = version(harness)
    with pytest.raises(PositionMismatch, match="the table holds it"):
        session.keep_out(transaction)
    assert version(harness) == before


def test_giving_up_may_be_repeated_and_several_may_be_given_up(harness: SinkHarness) -> None:
    session = harness.open()
    commit(harness, session, 1, None, A)
    given_up = [harness.prepare(session, txid, 1, B) for txid in (2, 3)]
    assert len({session.keep_out(transaction) for transaction in (*given_up, given_up[0])}) == 3
    for transaction in given_up:
        with pytest.raises(Fenced):
            session.commit(transaction, checked=True)
    commit(harness, session, 4, 1, C)
    assert harness.rows() == Counter({**A, **C}.items())


def test_other_writers_may_come_in_between(harness: SinkHarness) -> None:
    session = harness.open()
    commit(harness, session, 1, None, A)
    session.keep_out(harness.prepare(session, 2, 1, B))
    DeltaTable(harness.delta_path).optimize.compact()
    commit(harness, session, 3, 1, C)
    assert [e.txid for e in session.evidence(0, None).entries] == [1, 3]
    DeltaTable(harness.delta_path).create_checkpoint()
    commit(harness, harness.open(2), 4, 3, {"d": 4})


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["delta-append", "delta-fold"])
def test_a_table_that_spark_commits_to(spark: SparkSession, kind: str, tmp_path: Path) -> None:
    harness = SinkHarness(kind, tmp_path, None, committer="spark")
    session = harness.open()
    commit(harness, session, 1, None, A)
    transaction = harness.prepare(session, 2, 1, B)
    assert session.keep_out(transaction) == version(harness)
    with pytest.raises(Fenced):
        session.commit(transaction, checked=True)
    commit(harness, session, 3, 1, C)
    assert harness.rows() == Counter({**A, **C}.items())
    assert not session.evidence(0, None).problems
