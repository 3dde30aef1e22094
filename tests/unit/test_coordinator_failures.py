"""Failures after a message's tuples had gone on, through the whole path: sinks, source, ledger and audit agree.

The jobs are real; what is stated by script is only which messages failed late, or share a tuple.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from support.memory_run import World
from support.scripted import failure, token
from support.verdicts import traces_of

from stormproof import Topology
from stormproof.core.base.errors import BoltUnavailable
from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.core.base.message import FailureReason, Guarantee
from stormproof.core.bolt import BasicBolt, BoltContext, Emit, Tuple
from stormproof.core.contract.sink import SinkInput
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.task.job import Job
from stormproof.core.tracking import attempts, partners
from stormproof.core.tracking.verdict import JobReport
from stormproof.sinks.contract.protocol import SinkIdentity, SinkSession
from stormproof.trident.audit.batches import txn
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.message import EndKind, message
from stormproof.trident.audit.source import PendingEvidence, evidence_of
from stormproof.trident.audit.verify import verify
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.sink_records import SinkBinding
from stormproof.trident.ledger.tables import Run

EXACTLY, AT_LEAST, AT_MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
PAYLOADS = [f"all m{i}".encode() for i in range(6)]


class Late(InlineEngine):
    """Messages of `late` fail after their tuples have gone on; those in `together` share a tuple, if both are there.

    `lost` have their acks dropped, and in per-message mode are named.
    """

    def __init__(self, late: set[int], together: list[tuple[int, int]] | None = None, *, lost: int = -1) -> None:
        super().__init__(2)
        self._late, self._together, self._lost = late, together or [], lost
        self.jobs: list[Job] = []

    def run(self, job: Job) -> JobReport:
        self.jobs.append(job)
        report = super().run(job)
        read = {m for r in job.readers for b in r.read(job.seed, job.excluded, 99) for m in b.column("id").to_pylist()}
        for id_ in sorted(self._late & read):
            twice = [failure(id_, job.seed, error="late", component=f"task {n}") for n in range(2)]
            part = token(id_, job.seed) if job.tracked else 0
            report = replace(
                report, late=(*report.late, *twice), late_xor=report.late_xor ^ part, ack_xor=report.ack_xor ^ part
            )
        if self._lost in read:
            named = (failure(self._lost, job.seed, reason=FailureReason.LOST),) if job.per_message else ()
            report = replace(report, ack_xor=report.ack_xor ^ token(self._lost, job.seed), lost=named)
        pairs = [pair for pair in self._together if {*pair} <= read]
        return replace(report, together=np.array(pairs, np.int64).reshape(-1, 2))


def audited(world: World) -> AuditLedger:
    return AuditLedger(world.ledger_engine.execution_options(schema_translate_map={t.SCHEMA: None}))


def evidence(world: World) -> Callable[[LedgerSnapshot, TopologyRow], PendingEvidence]:
    return lambda _snapshot, _row: evidence_of(world.source)


def require_verified(world: World) -> None:
    def opener(identity: SinkIdentity, binding: SinkBinding) -> SinkSession:
        sink = next(s for s in world.sinks if s.name == binding.sink)
        assert sink.store.content is not None
        return sink.inspect(identity, SinkInput(sink.store.content.schema))

    report = verify(audited(world), "words", opener, source=evidence(world))
    assert not report.violations, [v.text for v in report.violations]


def words(*messages: int) -> Counter[str]:
    return Counter(w for m in messages for w in PAYLOADS[m].decode().split())


def attempt_rows(world: World) -> list[tuple[int, int, str, list[int]]]:
    """(txid, attempt, outcome, excluded) of every attempt."""
    with world.ledger.transaction(Run("words", "life0", world.epoch())) as tx:
        a = t.attempt.c
        rows = tx.connection.execute(sa.select(a.txid, a.attempt, a.outcome, a.excluded).order_by(a.txid, a.attempt))
        return [(row.txid, row.attempt, row.outcome, row.excluded) for row in rows]


@pytest.mark.parametrize("fold", [True, False])
def test_exactly_once_writes_nothing_of_a_message_that_failed_late(fold: bool, tmp_path: Path) -> None:
    world = World(PAYLOADS, tmp_path, batch_messages=6, fold=fold)
    engine = Late({1})
    statistics = world.run(engine=engine)
    assert world.counts() == words(0, 2, 3, 4, 5)
    assert attempt_rows(world) == [(1, 1, "moot", []), (1, 2, "complete", [1]), (2, 1, "complete", [])]
    assert statistics.failed_by_reason == {"error": 2}
    assert (statistics.failed, statistics.returned, statistics.dead_letters) == (2, 0, 1)
    assert (statistics.batches, statistics.attempts, statistics.messages, statistics.replayed) == (2, 3, 5, 1)
    report = txn(audited(world), "words", 1)
    ((row),) = report.failures
    assert (row.attempt, row.component, row.error) == (1, "task 0", "late")
    require_verified(world)


def test_exactly_once_returns_those_that_share_a_tuple_and_counts_them_no_failure(tmp_path: Path) -> None:
    world = World(PAYLOADS, tmp_path, batch_messages=6)
    statistics = world.run(engine=Late({1}, [(1, 3), (3, 5)]))
    assert world.counts() == words(0, 2, 3, 4, 5)
    assert (statistics.failed, statistics.returned, statistics.dead_letters) == (2, 4, 1)
    assert statistics.messages == 5
    (letter,) = world.source.dead_letters()
    assert (letter.id, letter.times_failed) == (1, 2)
    first = txn(audited(world), "words", 1)
    assert (first.failed, [r.message for r in first.failures], [r.message for r in first.returned]) == (
        1,
        ["1"],
        ["3", "5"],
    )
    innocent = message(audited(world), "words", "3", source=evidence(world))
    assert innocent.failures == ()
    assert [r.error for r in innocent.returned] == ["returned with message 1, with which it shares a tuple: late"] * 2
    assert innocent.end.kind is EndKind.COMMITTED
    found = traces_of(audited(world), "words").values()
    told = {one.message: (len(one.failures), len(one.returns)) for one in found}
    assert told == {"1": (2, 0), "3": (0, 2), "5": (0, 2)}
    require_verified(world)


def test_at_least_once_keeps_what_a_message_wrote_before_it_failed(tmp_path: Path) -> None:
    world = World(PAYLOADS, tmp_path, batch_messages=6)
    statistics = world.run(AT_LEAST, engine=Late({1}, [(1, 3)]))
    assert world.counts() == words(0, 1, 2, 3, 4, 5), "its last opening had every message failed, and wrote nothing"
    assert (statistics.failed, statistics.returned, statistics.dead_letters, statistics.attempts) == (2, 0, 1, 2)
    require_verified(world)


def test_at_most_once_records_a_late_failure_and_nothing_comes_back(tmp_path: Path) -> None:
    world = World(PAYLOADS, tmp_path, batch_messages=6)
    statistics = world.run(AT_MOST, engine=Late({1}, [(1, 3)]))
    assert world.counts() == words(0, 1, 2, 3, 4, 5)
    assert (statistics.failed, statistics.returned, statistics.dead_letters, statistics.attempts) == (1, 0, 0, 1)
    require_verified(world)


@pytest.mark.parametrize("guarantee", [EXACTLY, AT_LEAST])
def test_a_message_that_its_acker_calls_lost_fails_by_name(guarantee: Guarantee, tmp_path: Path) -> None:
    world = World(PAYLOADS, tmp_path, batch_messages=6)
    engine = Late(set(), lost=2)
    statistics = world.run(guarantee, engine=engine)
    assert not words(0, 1, 3, 4, 5) - world.counts()
    assert statistics.failed_by_reason == {"lost": 2}
    assert [job.per_message for job in engine.jobs[:2]] == [False, True]
    (letter,) = world.source.dead_letters()
    assert (letter.id, letter.reason) == (2, "lost")
    if guarantee is EXACTLY:
        assert world.counts() == words(0, 1, 3, 4, 5)
        assert [row[2] for row in attempt_rows(world)[:3]] == ["unverified", "moot", "complete"]
    require_verified(world)


def test_what_failed_in_an_earlier_attempt_is_confirmed_by_a_later_driver_too(tmp_path: Path) -> None:
    """The driver dies between prepare and commit: the next one rolls forward, and owes all the failures."""
    world = World(PAYLOADS, tmp_path, batch_messages=6)
    with armed("prepare.after=error@1"), pytest.raises(FailpointError):
        world.run(engine=Late({1}, [(1, 3)]))
    world.run(max_batches=0)
    assert world.counts() == words(0, 2, 4, 5)
    assert world.source.backlog().waiting == 2
    world.clock.sleep(1000)
    slice_ = world.source.open(Lease("x", world.epoch()), Limit(), 1)
    assert slice_ is not None
    assert slice_.replayed == ((1, 0), (3, 0))


# -- negative controls: wrong, and caught by what stands above ---------------------------------------------------------


def test_a_late_failure_that_is_ignored_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    judge = attempts.BatchRunner._judge_exactly_once  # pyright: ignore[reportPrivateUsage]

    def deaf(runner: attempts.BatchRunner, batch: object, report: JobReport, wrong: tuple[str, ...]) -> object:
        return judge(runner, batch, replace(report, late=()), wrong)  # type: ignore[arg-type]

    monkeypatch.setattr(attempts.BatchRunner, "_judge_exactly_once", deaf)
    with pytest.raises(AssertionError):
        test_exactly_once_writes_nothing_of_a_message_that_failed_late(True, tmp_path)


def test_a_touched_message_that_is_confirmed_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(partners, "touched_by", lambda *_: {})
    with pytest.raises(AssertionError):
        test_exactly_once_returns_those_that_share_a_tuple_and_counts_them_no_failure(tmp_path)


class Unprepared(BasicBolt):
    """Its database is away for the first `times` tasks."""

    streams = "word string"

    def __init__(self, times: int) -> None:
        self.left = [times]

    def __deepcopy__(self, memo: object) -> Unprepared:
        return self

    def prepare(self, context: BoltContext, /) -> None:
        if self.left[0]:
            self.left[0] -= 1
            raise OSError("no route to the database")

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        emit(tuple["line"])


def unprepared(folder: Path, times: int) -> World:
    world = World([b"a", b"b", b"c"], folder, fold=False)
    topology = Topology("words")
    lines = topology.spout("lines", world.source)
    topology.sink(world.sinks[0], topology.bolt("look-up", Unprepared(times), lines.shuffle()))
    world.topology = topology
    return world


def test_a_bolt_that_cannot_prepare_blames_no_message_and_goes_on_when_it_can(tmp_path: Path) -> None:
    world = unprepared(tmp_path, 3)
    statistics = world.run()
    assert sorted(world.counts()) == ["a", "b", "c"]
    assert (statistics.failed, statistics.dead_letters) == (0, 0)


def test_a_bolt_that_never_prepares_ends_the_run_and_every_message_waits(tmp_path: Path) -> None:
    world = unprepared(tmp_path, 10**6)
    with pytest.raises(BoltUnavailable, match=r"bolt 'look-up' raised in prepare.*no route to the database"):
        world.run(outage_s=5.0)
    backlog = world.source.backlog()
    assert (backlog.dead, backlog.waiting) == (0, 0)
    assert not world.counts()
