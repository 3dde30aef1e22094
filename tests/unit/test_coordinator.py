"""The coordinator over memory: source, sink and ledger without a database or Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.memory_run import World

from stormproof.core.base.errors import (
    BatchUnverified,
    Fenced,
    JobFailed,
    PositionMismatch,
    SinkRefused,
    StoreUnavailable,
)
from stormproof.core.base.message import FailureReason, Guarantee
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.task.job import Job, WireRow
from stormproof.core.tracking.verdict import JobReport
from stormproof.sinks.stores.memory import FaultPoint
from stormproof.trident.ledger import other_lives, txns
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.tables import Run
from stormproof.trident.terms.transaction_states import TxnState


@pytest.mark.parametrize("guarantee", Guarantee)
@pytest.mark.parametrize("fold", [True, False])
def test_without_a_crash_every_guarantee_gives_the_same(guarantee: Guarantee, fold: bool, tmp_path: Path) -> None:
    payloads = [f"a b m{i}".encode() for i in range(10)]
    world = World(payloads, tmp_path, fold=fold, sinks=2)
    statistics = world.run(guarantee)
    expected = Counter(word for p in payloads for word in p.decode().split())
    assert world.counts(0) == world.counts(1) == expected
    assert statistics.batches == 3
    assert statistics.messages == 10
    assert statistics.stopped == "idle"


def test_a_table_of_another_life_is_refused_until_it_is_adopted(tmp_path: Path) -> None:
    """A ledger that was lost and made anew must not write over what the first one committed."""
    first = World([b"a b"], tmp_path / "first")
    first.run()
    second = World([b"a b"], tmp_path / "second", first_incarnation=1)
    for mine, theirs in zip(second.sinks, first.sinks, strict=True):
        mine.store = theirs.store
    with pytest.raises(PositionMismatch, match="stormproof ledger adopt words life0"):
        second.run()
    with second.ledger.transaction(Run("words", "life1", 1)) as tx:
        other_lives.adopt(tx, "life0", by="tests", why="")
    second.run()
    assert second.counts() == Counter({"a": 2, "b": 2})


class Broken(InlineEngine):
    """An engine whose every n-th job, or every job with a certain message, ends without a report."""

    def __init__(self, *, deadly: bytes | None = None, fail_first: int = 0) -> None:
        super().__init__(2)
        self._deadly = deadly
        self._fail_left = fail_first
        self.jobs = 0

    def run(self, job: Job) -> JobReport:
        self.jobs += 1
        if self._fail_left:
            self._fail_left -= 1
            raise JobFailed("a worker died")
        payloads = [
            p for r in job.readers for b in r.read(0, frozenset(), 100) for p in b.column("payload").to_pylist()
        ]
        if self._deadly in payloads:
            raise JobFailed("a worker died")
        return super().run(job)


def states(world: World) -> list[tuple[str, int]]:
    """Every batch's state and attempts, in txid order."""
    with world.ledger.transaction(Run("words", "life0", world.epoch())) as tx:
        rows = tx.connection.execute(sa.select(t.txn.c.state, t.txn.c.attempt).order_by(t.txn.c.txid)).all()
    return [(row.state, row.attempt) for row in rows]


def test_a_job_that_fails_once_is_the_next_attempt(tmp_path: Path) -> None:
    world = World([b"a b"] * 3, tmp_path)
    world.run(engine=Broken(fail_first=1))
    assert states(world) == [("committed", 2)]
    assert world.counts() == Counter({"a": 3, "b": 3})


def test_a_message_that_kills_every_job_is_found_by_halves_and_the_others_keep_their_count(tmp_path: Path) -> None:
    payloads = [f"m{i}".encode() for i in range(8)]
    world = World([*payloads, b"deadly"], tmp_path, batch_messages=9, max_attempts=2)
    engine = Broken(deadly=b"deadly")
    statistics = world.run(engine=engine)
    assert world.counts() == Counter(p.decode() for p in payloads)
    assert statistics.dead_letters == 1
    (letter,) = world.source.dead_letters()
    assert letter.payload == b"deadly"
    assert letter.times_failed == 2
    assert letter.reason == FailureReason.WORKER_LOST.value


def test_a_verdict_that_never_adds_up_stops_at_the_third_time_with_nothing_written(tmp_path: Path) -> None:
    world = World([b"a b", b"c d"], tmp_path)

    def drop_chunks(stage: int, rows: list[WireRow]) -> list[WireRow]:
        return [row for row in rows if row.edge < 0]

    with pytest.raises(BatchUnverified, match="does not add up"):
        world.run(engine=InlineEngine(2, tamper=drop_chunks))
    assert not world.counts()
    assert states(world) == [("aborted", 2), ("open", 1)], "the next attempt, then halves, then the end"
    world.run()
    assert world.counts() == Counter("abcd")


def test_at_most_once_tries_a_failed_job_no_second_time(tmp_path: Path) -> None:
    world = World([b"a b", b"c d"], tmp_path, batch_messages=1)
    statistics = world.run(Guarantee.AT_MOST_ONCE, engine=Broken(fail_first=1))
    assert states(world) == [("abandoned", 1), ("committed", 1)]
    assert statistics.abandoned_batches == 1
    assert world.counts() == Counter("cd")


def test_a_batch_whose_messages_all_failed_is_aborted_with_nothing_written(tmp_path: Path) -> None:
    world = World([b"bad"], tmp_path, split=_refuse, max_attempts=1)
    statistics = world.run()
    assert states(world) == [("aborted", 1)]
    assert (statistics.failed, statistics.dead_letters, statistics.messages) == (1, 1, 0)


def test_a_refusal_for_good_blocks_the_txid_and_a_retry_goes_on(tmp_path: Path) -> None:
    world = World([b"a b"], tmp_path)
    world.sinks[0].store.fail(FaultPoint.BEFORE, SinkRefused("no room"))
    with pytest.raises(SinkRefused, match="stormproof retry words 1"):
        world.run()
    with pytest.raises(SinkRefused, match="txid 1 of topology 'words' is blocked"):
        world.run()
    with world.ledger.transaction(Run("words", "life0", world.epoch())) as tx:
        txns.move(tx, 1, TxnState.BLOCKED, TxnState.PREPARED)
    world.run()
    assert world.counts() == Counter("ab")


def test_a_lost_answer_is_looked_up_and_applied_once(tmp_path: Path) -> None:
    world = World([b"a b"], tmp_path)
    world.sinks[0].store.fail(FaultPoint.AFTER, StoreUnavailable("no answer"))
    statistics = world.run()
    assert world.counts() == Counter("ab")
    assert statistics.suppressed == 1
    assert statistics.recoveries[-1].suppressed == ((1, "counts0"),)


def test_a_store_that_stays_away_ends_the_run_with_its_error(tmp_path: Path) -> None:
    world = World([b"a b"], tmp_path)
    for _ in range(100):
        world.sinks[0].store.fail(FaultPoint.BEFORE, StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable, match="gone"):
        world.run(outage_s=3.0)
    assert not world.counts()


def test_a_second_driver_fences_the_first(tmp_path: Path) -> None:
    world = World([b"a b", b"c d"], tmp_path, batch_messages=1)

    class TakenOver(InlineEngine):
        def run(self, job: Job) -> JobReport:
            report = super().run(job)
            world.run()  # another driver starts meanwhile, and finishes everything
            return report

    with pytest.raises(Fenced):
        world.run(engine=TakenOver(2))
    assert world.counts() == Counter("abcd")


def test_it_stops_at_its_limit_and_goes_on_from_there(tmp_path: Path) -> None:
    world = World([b"a"] * 8, tmp_path)
    first = world.run(max_batches=1)
    assert (first.stopped, first.batches, world.counts()["a"]) == ("limit", 1, 4)
    assert world.run().batches == 1
    assert world.counts()["a"] == 8


def _refuse(line: str) -> list[str]:
    raise ValueError(line)
