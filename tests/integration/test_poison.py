"""Messages that take their worker down with them, hang it, or kill the driver: only the culprit is dead-lettered."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession
from support.crashes import KILLED
from support.memory_run import World
from support.poison import EXIT_STATUS, POISON, Poisoning, Slow, Split, pids_in
from support.poison_driver import BATCH, QUEUE, Case, applied, blamed, run_poisoned
from support.queues import prepared_database, put

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.message import FailureReason
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.postgres.database import Database
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.tables import Run
from stormproof.trident.terms.transaction_states import EventKind

MESSAGES = 64
CULPRIT = 37
TIMEOUT_S = 2.0
MEMORY_MB = 256
BATCHES_MAX = 6
"""The whole batch, the culprit, what lies around it, and a neighbour that was in hand when the job was stopped. By halves
it would be up to 1 + 2 * log2(64) = 13."""

REASONS = {
    Poisoning.EXIT: FailureReason.WORKER_LOST,
    Poisoning.ALLOCATE: FailureReason.ERROR,
    Poisoning.HANG: FailureReason.TIMEOUT,
    Poisoning.SPIN: FailureReason.TIMEOUT,
}


def gone(pids: list[int]) -> bool:
    """Whether these processes have ended, or end within seconds."""
    running = [psutil.Process(pid) for pid in set(pids) if psutil.pid_exists(pid)]
    return not psutil.wait_procs(running, timeout=10)[1]


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("at_a_time", [None, 8])
@pytest.mark.parametrize("poisoning", REASONS)
def test_on_spark_only_the_culprit_is_dead_lettered(
    spark: SparkSession, tmp_path: Path, poisoning: Poisoning, at_a_time: int | None
) -> None:
    payloads = [f"m{i} common".encode() for i in range(MESSAGES)]
    payloads[CULPRIT] = POISON.encode()
    pids = tmp_path / "pids"
    world = World(
        payloads,
        tmp_path / "world",
        split=Split(poisoning, pids),
        concurrency=at_a_time,
        batch_messages=MESSAGES,
        max_attempts=1,
        clock=SystemClock(),
    )
    statistics = world.run(
        engine=SparkEngine(spark, 2, worker_memory_mb=MEMORY_MB),
        message_timeout_s=TIMEOUT_S,
        heartbeat_root=tmp_path / "heartbeat",
    )
    (letter,) = world.source.dead_letters()
    assert (letter.id, letter.reason, letter.times_failed) == (CULPRIT, REASONS[poisoning].value, 1)
    assert failed_in_ledger(world) == {str(CULPRIT)}
    assert world.counts() == Counter(word for p in payloads if p != POISON.encode() for word in p.decode().split())
    assert statistics.batches <= BATCHES_MAX
    took_hold = pids_in(pids)
    assert took_hold
    if poisoning is Poisoning.HANG and at_a_time is not None:
        assert statistics.batches == 1, (
            "a call among several that hangs fails its own message; its thread is left behind"
        )
    elif poisoning is not Poisoning.ALLOCATE:
        assert gone(took_hold), "a cancelled worker must leave its core to the next attempt"


def failed_in_ledger(world: World) -> set[str | None]:
    kinds = [k.value for k in (EventKind.FAILURE, EventKind.RETURNED, EventKind.REPLAY, EventKind.DEAD_LETTER)]
    with world.ledger.transaction(Run("words", "life0", world.epoch())) as tx:
        rows = tx.connection.execute(sa.select(t.event.c.message).where(t.event.c.kind.in_(kinds))).all()
    return {row.message for row in rows}


@pytest.mark.spark
@pytest.mark.timeout(120)
def test_a_slow_function_outlives_the_message_timeout(spark: SparkSession, tmp_path: Path) -> None:
    """A batch that takes longer than the timeout, each of its calls far less, is one attempt."""
    world = World(
        [b"m%d" % i for i in range(MESSAGES)],
        tmp_path / "world",
        split=Slow(TIMEOUT_S * 1.5 / (MESSAGES / 2)),
        batch_messages=MESSAGES,
        clock=SystemClock(),
    )
    statistics = world.run(
        engine=SparkEngine(spark, 2), message_timeout_s=TIMEOUT_S, heartbeat_root=tmp_path / "heartbeat"
    )
    assert (statistics.batches, statistics.attempts, statistics.failed) == (1, 1, 0)


async def later(line: str) -> list[str]:
    await asyncio.sleep(TIMEOUT_S / 8)
    return line.split()


@pytest.mark.spark
@pytest.mark.timeout(120)
def test_async_functions_run_on_spark_several_calls_at_a_time(spark: SparkSession, tmp_path: Path) -> None:
    payloads = [b"m%d common" % i for i in range(MESSAGES)]
    world = World(payloads, tmp_path / "world", split=later, batch_messages=MESSAGES, clock=SystemClock())
    statistics = world.run(
        engine=SparkEngine(spark, 2), message_timeout_s=TIMEOUT_S, heartbeat_root=tmp_path / "heartbeat"
    )
    assert (statistics.batches, statistics.attempts, statistics.failed) == (1, 1, 0)
    assert world.counts() == Counter(word for p in payloads for word in p.decode().split())


# Drivers that die.


def drivers_until_done(case: Case) -> int:
    """Start drivers until one comes to its end; how many died."""
    for died in range(MESSAGES):
        status = run_poisoned(case)
        if status == 0:
            return died
        assert status in (EXIT_STATUS, KILLED), f"a driver ended with {status}"
    raise AssertionError("the drivers die for ever")


def poisoned_queue(database: Database) -> tuple[Database, list[bytes]]:
    prepared = prepared_database(database)
    payloads = [f"m{i} common".encode() for i in range(BATCH)]
    payloads[BATCH // 3] = POISON.encode()
    put(prepared, QUEUE, payloads)
    return prepared, payloads


def check_exact(case: Case, payloads: list[bytes]) -> None:
    innocent = [p for p in payloads if p != POISON.encode()]
    assert applied(case) == Counter(word for p in innocent for word in p.decode().split())
    failures, kinds = blamed(case)
    assert failures == [(FailureReason.WORKER_LOST.value, repr(POISON.encode()))]
    assert kinds == {EventKind.FAILURE.value: 1, EventKind.DEAD_LETTER.value: 1}, "no innocent message was replayed"


DEATHS_WITH_NOTES = 3
"""The whole batch, unnoted; the whole batch, noted and set apart; the culprit alone, noted for the second time."""


@pytest.mark.postgres
@pytest.mark.timeout(300)
@pytest.mark.parametrize("poisoning", [Poisoning.EXIT, Poisoning.DRIVER])
def test_a_message_that_kills_its_driver_is_found_after_two_deaths(
    database: Database, tmp_path: Path, poisoning: Poisoning
) -> None:
    prepared, payloads = poisoned_queue(database)
    case = Case(tmp_path, prepared, poisoning, engine="inline")
    assert drivers_until_done(case) == DEATHS_WITH_NOTES
    check_exact(case, payloads)


@pytest.mark.postgres
@pytest.mark.timeout(600)
def test_without_notes_more_drivers_die(database: Database, tmp_path: Path) -> None:
    """The negative control: by halves alone the culprit is found, too, at the cost of more deaths."""
    prepared, payloads = poisoned_queue(database)
    case = Case(tmp_path, prepared, Poisoning.EXIT, engine="inline", notes=False)
    assert drivers_until_done(case) > DEATHS_WITH_NOTES + math.log2(BATCH)
    check_exact(case, payloads)


@pytest.mark.spark(own=True)
@pytest.mark.postgres
@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.timeout(600)
def test_on_spark_a_message_that_kills_its_driver_is_found_after_two_deaths(database: Database, tmp_path: Path) -> None:
    prepared, payloads = poisoned_queue(database)
    case = Case(tmp_path, prepared, Poisoning.DRIVER, engine="spark")
    assert [run_poisoned(case) for _ in range(DEATHS_WITH_NOTES)] == [KILLED] * DEATHS_WITH_NOTES
    assert run_poisoned(replace(case, engine="inline")) == 0  # it would die of the culprit, too
    check_exact(case, payloads)
    assert gone([pid for pid in pids_in(case.pids) if pid != os.getpid()])
