"""What every sink promises, asked of every sink: memory, Postgres, Delta and the example, append, upsert and fold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.sink_harness import KINDS, SCHEMA, SinkHarness

from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import CannotTell, PositionMismatch
from stormproof.core.contract.fold import End, Fold
from stormproof.sinks.contract import protocol
from stormproof.sinks.contract.protocol import (
    CommitDecision,
    CommitOutcome,
    CommitResult,
    Held,
    PreparedTransaction,
    SinkSession,
)
from stormproof.sinks.prepare.rejected_messages import LeavingOutWriter, Rejects
from stormproof.sinks.rows import by_key
from stormproof.sinks.stores.memory import MemorySession, MemorySink
from stormproof.testing import FoldCases, MisfitCases, RefuseCases, SinkConformance, UpsertCases
from stormproof.testing.sinks.harness import A, B

REFUSING = [f"{store}-{how}" for store in ("memory", "postgres", "delta") for how in ("append", "upsert")]


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


class TestRefusals(RefuseCases):
    """The cases of refused rows alone, for the sinks whose tables may refuse some."""

    @pytest.fixture(params=REFUSING)
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
        return harness_of(request, tmp_path)


class TestMisfits(MisfitCases):
    """The cases of rows that do not fit alone, for the sinks that reject them."""

    @pytest.fixture(params=[kind for kind in REFUSING if kind != "memory-append"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
        return harness_of(request, tmp_path)


MILLION = 1_000_000


@pytest.mark.sampled(0.2)
def test_a_million_rows_are_committed_once(harness: SinkHarness, session: SinkSession) -> None:
    """Of a million keys, by two tasks; a tenth of them comes again in the next transaction."""

    def rows(numbers: range, n: int) -> list[pa.RecordBatch]:
        words = [pc.cast(pa.array(numbers[task::2]), pa.string()) for task in range(2)]
        return [pa.record_batch([w, pa.array(np.full(len(w), n))], schema=SCHEMA) for w in words]

    first = harness.prepare_rows(session, 1, None, rows(range(MILLION), 1))
    second = harness.prepare_rows(session, 2, 1, rows(range(MILLION // 10), 2))
    for transaction in (first, second):
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.ALREADY_HELD
        session.finished(transaction)
    again = {"append": [1, 2], "upsert": [2], "fold": [3]}[harness.input.mode]
    wanted = Counter({1: MILLION - MILLION // 10})
    for n in again:
        wanted[n] += MILLION // 10
    held = harness.rows()
    assert Counter(n for _, n in held.elements()) == wanted
    assert {word for word, _ in held} == set(map(str, range(MILLION)))
    assert max(held.values()) == 1


EVERY, REFUSE, MISFITS, FOLDS = SinkConformance(), RefuseCases(), MisfitCases(), FoldCases()


# Negative controls: broken variants that the tests above must catch.


def test_control_skip_by_number_alone_is_caught(
    harness: SinkHarness, session: SinkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_number(_identity: Any, transaction: PreparedTransaction, held: Held | None) -> CommitDecision:
        return CommitDecision.SKIP if held is not None and held.txid >= transaction.txid else CommitDecision.COMMIT

    _replace_decide(monkeypatch, by_number)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        EVERY.test_the_same_txid_with_other_content_stops(harness, session)


def test_control_no_transaction_identifier_is_caught(
    harness: SinkHarness, session: SinkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    if harness.store == "postgres":
        pytest.skip("its guard is moved by a second, independent comparison: see the next test")

    def always(*_: Any) -> CommitDecision:
        return CommitDecision.COMMIT

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
        _replace_decide(monkeypatch, lambda *_: CommitDecision.COMMIT)
        with pytest.raises(PositionMismatch, match="holds txid 1 already"):
            session.commit(transaction, checked=True)
        with pytest.raises(PositionMismatch, match="guard rows"):
            session.commit(harness.prepare(session, 3, 2, B), checked=True)
    assert harness.rows() == harness.after(A)


def test_expired_evidence_cannot_tell(harness: SinkHarness, session: SinkSession) -> None:
    transaction = harness.prepare(session, 1, None, A)
    with pytest.raises(CannotTell):
        protocol.decide(session.identity, transaction, Held(1, None))


@pytest.mark.parametrize(
    ("case", "name", "broken"),
    [
        (FOLDS.test_a_fold_by_order_keeps_the_columns_of_one_row, "row_of_groups", "the other end"),
        (
            FOLDS.test_a_fold_of_sets_keeps_the_least_values_and_says_that_there_were_more,
            "sets_of_groups",
            "without a bound",
        ),
    ],
    ids=["order", "sets"],
)
def test_control_a_sink_that_folds_otherwise_is_caught(
    tmp_path: Path, case: Any, name: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Any = getattr(by_key, name)
    wrong: dict[str, Any] = {
        "the other end": lambda groups, compared, end: whole(groups, compared, next(e for e in End if e is not end)),
        "without a bound": lambda groups, values, number, at_most: whole(groups, values, number),
    }
    harness = SinkHarness("memory-fold", tmp_path, None)
    monkeypatch.setattr(by_key, name, wrong[broken])
    with pytest.raises(AssertionError):
        case(harness)


def test_a_case_of_a_fold_that_a_sink_does_not_declare_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = SinkHarness("memory-fold", tmp_path, None)
    monkeypatch.setattr(MemorySink, "fold_kinds", frozenset({Fold}))
    with pytest.raises(pytest.skip.Exception, match="does not declare ByOrder in fold_kinds"):
        FOLDS.test_a_fold_by_order_keeps_the_columns_of_one_row(harness)


@pytest.mark.parametrize("broken", ["one row alone", "forgotten"])
def test_control_a_sink_that_rejects_wrongly_is_caught(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = SinkHarness("memory-append", tmp_path, None)
    with closing(harness.open()) as session:
        if broken == "one row alone":
            # The refused row goes, and the other rows of its message stay.
            monkeypatch.setattr(Rejects, "left_out", _refused_alone)
            case = REFUSE.test_a_refused_row_takes_its_message_and_no_other
        else:
            # A repeat is told as one of a batch without refused rows.
            monkeypatch.setattr(MemorySession, "commit", _forgetful(MemorySession.commit))
            case = REFUSE.test_a_repeat_says_again_what_was_refused
        with pytest.raises(AssertionError):
            case(harness, session)


@pytest.mark.parametrize("broken", ["refused groups", "misfits", "the misfit alone", "misfits unnamed"])
def test_control_a_sink_that_rejects_groups_or_misfits_wrongly_is_caught(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves out a group's messages, which have parts in other groups; or a misfit, and not its message."""
    harness = SinkHarness("memory-append" if broken == "refused groups" else "memory-upsert", tmp_path, None)
    asked: Any = MISFITS.test_a_row_that_does_not_fit_takes_its_message_and_no_other
    match broken:
        case "refused groups" | "misfits":
            monkeypatch.setattr(Rejects, "__init__", _groups_as_rows(Rejects.__init__))
            asked = MISFITS.test_a_group_that_does_not_fit_names_its_messages
        case "the misfit alone":
            monkeypatch.setattr(Rejects, "_begin", lambda *_: None)
        case _:
            monkeypatch.setattr(LeavingOutWriter, "close", _unnamed(LeavingOutWriter.close))
    if broken == "refused groups":
        with closing(harness.open()) as session, pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            REFUSE.test_a_refused_group_names_its_messages(harness, session)
    else:
        with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
            asked(harness)


def _groups_as_rows(made: Any) -> Any:
    def broken(self: Any, directory: str, transaction: PreparedTransaction, *more: Any, **named: Any) -> None:
        made(self, directory, replace(transaction, of_groups=False), *more, **named)

    return broken


def _unnamed(close: Any) -> Any:
    return lambda self: [replace(file, misfits="") for file in close(self)]


def _forgetful(commit: Any) -> Any:
    def broken(session: Any, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        result: CommitResult = commit(session, transaction, checked=checked)
        return protocol.ALREADY_HELD if result.is_suppressed else result

    return broken


def _refused_alone(self: Any) -> Any:
    out = np.zeros(self._messages.rows, np.bool_)
    out[[*self._refused]] = True
    return out


def _replace_decide(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    own = ("stores.memory", "postgres.transactional_table", "delta.transactional_table", "stores.transactional")
    for module in (f"stormproof.sinks.{name}" for name in own):
        monkeypatch.setattr(f"{module}.decide", broken)
