"""What every sink promises, asked of every sink: memory, Postgres, Delta and the example, append, upsert and fold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.sink_harness import KINDS, SinkHarness

from stormproof.core.errors import CannotTell, PositionMismatch
from stormproof.sinks import protocol
from stormproof.sinks.protocol import Decision, Held, PreparedTransaction, SinkSession
from stormproof.testing import FoldCases, SinkConformance, UpsertCases
from stormproof.testing.sinks.harness import A


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
    return harness_of(request, tmp_path)


def harness_of(request: pytest.FixtureRequest, folder: Path) -> SinkHarness:
    kind: str = request.param
    database = request.getfixturevalue("database") if kind.startswith("postgres") else None
    return SinkHarness(kind, folder, database)


@pytest.fixture
def session(harness: SinkHarness) -> Iterator[SinkSession]:
    opened = harness.open()
    yield opened
    opened.close()


class TestEverySink(SinkConformance):
    @pytest.fixture(params=KINDS)
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
        return harness_of(request, tmp_path)


class TestFolds(FoldCases):
    """The cases of folds alone; `TestEverySink` has the others, for folds, too."""

    @pytest.fixture(params=[kind for kind in KINDS if kind.endswith("fold")])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
        return harness_of(request, tmp_path)


class TestUpserts(UpsertCases):
    """The cases of upserts alone."""

    @pytest.fixture(params=[kind for kind in KINDS if kind.endswith("upsert")])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
        return harness_of(request, tmp_path)


EVERY = SinkConformance()


# Negative controls: broken variants that the tests above must catch.


def test_control_skip_by_number_alone_is_caught(
    harness: SinkHarness, session: SinkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_number(_identity: Any, transaction: PreparedTransaction, held: Held | None) -> Decision:
        return Decision.SKIP if held is not None and held.txid >= transaction.txid else Decision.COMMIT

    _replace_decide(monkeypatch, by_number)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        EVERY.test_the_same_txid_with_other_content_stops(harness, session)


def test_control_no_transaction_identifier_is_caught(
    harness: SinkHarness, session: SinkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    if harness.store == "postgres":
        pytest.skip("its guard is moved by a second, independent comparison: see the next test")

    def always(*_: Any) -> Decision:
        return Decision.COMMIT

    _replace_decide(monkeypatch, always)
    with pytest.raises(AssertionError):
        EVERY.test_a_repeat_applies_nothing(harness, session)


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
    assert harness.rows() == harness.after(A)


def test_expired_evidence_cannot_tell(harness: SinkHarness, session: SinkSession) -> None:
    transaction = harness.prepare(session, 1, None, A)
    with pytest.raises(CannotTell):
        protocol.decide(session.identity, transaction, Held(1, None))


def _replace_decide(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    own = ("memory", "postgres.hold", "delta.hold", "transactional")
    for module in (f"stormproof.sinks.{name}" for name in own):
        monkeypatch.setattr(f"{module}.decide", broken)
