"""Drivers that read Kafka die at every failpoint, into Delta and Postgres: the answer comes from what was produced.

A real broker, real Postgres, real Delta tables, the inline engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.blows import Action, Blow
from support.brokers.kafka import KafkaBroker
from support.chain import Chain, Ordeal, one_way_each, ordeal, shuffled
from support.crashes import KILLED, Cell, Driver, ended, start
from support.kafka_runs import SHAPE, forgetting, moving_on, stand_on
from support.spark_driver import TIMEOUT_S, SparkDriver
from support.topologies import messages

from stormproof import Topology
from stormproof.core.base.failpoint import ENV, FAILPOINTS
from stormproof.core.postgres.embedded import EmbeddedPostgres

pytestmark = [pytest.mark.postgres, pytest.mark.broker("kafka"), pytest.mark.timeout(600)]

PARTS = 8
WAYS = [Action.KILL, Action.RAISE, Action.KILL, Action.TAKE_OVER]


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_misfortune_at_every_failpoint(
    postgres: EmbeddedPostgres, kafka: KafkaBroker, tmp_path: Path, seed: int, part: int
) -> None:
    """Killed, failed or taken over from, in turn; with one batch in flight, and with three."""
    cells = shuffled(one_way_each(WAYS, seed), random.Random(seed))[part::PARTS]
    flight: dict[str, Any] = {"in_flight": 1 + 2 * (part % 2), "batch_messages": 4}
    with stand_on(postgres, kafka, tmp_path, seed, f"part{part}", **flight) as stand:
        for line in Chain(stand, SHAPE, len(cells)).run(cells):
            print(line)
        print(stand.tally)


def test_a_broker_that_is_killed_meanwhile_loses_and_doubles_nothing(
    postgres: EmbeddedPostgres, own_kafka: KafkaBroker, tmp_path: Path, seed: int
) -> None:
    """Killed behind a driver that died inside a batch; the next driver begins while the broker is away, and waits for it."""
    with stand_on(postgres, own_kafka, tmp_path, seed, "broker", batch_messages=4) as stand:
        chain = Chain(stand, SHAPE)
        stand.give(messages(7, prefix="b"))
        point = random.Random(seed).choice(["open.after", "task.after_file", "commit.before_sink", "finish.before"])
        assert stand.run([Blow(point, Action.KILL)]) == KILLED
        own_kafka.kill()
        waits = start(stand.cell, {})
        own_kafka.start()
        assert ended(waits, "a driver that waits for its broker") == 0
        stand.renew()
        print(chain.undergo(ordeal(FAILPOINTS["start.after_epoch"], Action.KILL)))


@pytest.mark.parametrize(
    ("build", "point", "message"),
    [(moving_on, "open.after", "were handed out to no batch"), (forgetting, "finish.after", "holds .* times")],
    ids=["before", "after"],
)
def test_a_position_that_moves_apart_from_the_ledger_loses_or_doubles(
    postgres: EmbeddedPostgres,
    kafka: KafkaBroker,
    tmp_path: Path,
    seed: int,
    build: Callable[[Cell], Topology],
    point: str,
    message: str,
) -> None:
    with (
        stand_on(postgres, kafka, tmp_path, seed, f"control_{point[:4]}", batch_messages=4) as stand,
        pytest.raises(AssertionError, match=message),
    ):
        Chain(stand, replace(SHAPE, build=build)).undergo(ordeal(FAILPOINTS[point], Action.KILL))


def on_spark_where_armed(cell: Cell, environment: Mapping[str, str]) -> Driver:
    return (SparkDriver if environment[ENV] else start)(cell, environment)


@pytest.mark.spark(own=True)
@pytest.mark.broker("kafka")
@pytest.mark.timeout(300)
def test_on_spark_a_killed_driver_goes_on_where_it_was(
    postgres: EmbeddedPostgres, kafka: KafkaBroker, tmp_path: Path, seed: int
) -> None:
    """Executors in processes of their own read the ranges, each by its own client."""
    with stand_on(postgres, kafka, tmp_path, seed, "spark", batch_messages=20) as stand:
        stand.start, stand.timeout_s = on_spark_where_armed, TIMEOUT_S
        print(Chain(stand, SHAPE).undergo(Ordeal("on Spark", ((Blow("commit.after_sink", Action.KILL),),))))
