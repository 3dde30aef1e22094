"""Rounds of misfortunes drawn by a seed, over Kafka into Delta and Postgres: the answer comes from what was produced.

Drivers are processes that are killed or replaced; the broker is killed and started again; connections are cut by a proxy;
partitions are added; aborted transactions lie between.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.blows import Action
from support.brokers.kafka_listeners import FrayedKafka
from support.chain import Chain, one_way_each, ordeal
from support.crashes import Cell, ended, start
from support.kafka_runs import SHAPE, KafkaStand, forgetting, moving_on, stand_on
from support.topologies import messages

from stormproof import Topology
from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.postgres.embedded import EmbeddedPostgres

pytestmark = [pytest.mark.postgres, pytest.mark.broker("kafka"), pytest.mark.timeout(300)]

ROUNDS = 20
SHARES = (0.0, 0.01, 0.04)
"""Of a driver's requests to Kafka, so many end with a cut."""


def driver_killed(chain: Chain, stand: KafkaStand, rng: random.Random) -> None:
    _one_of(chain, Action.KILL, rng)


def second_driver(chain: Chain, stand: KafkaStand, rng: random.Random) -> None:
    _one_of(chain, Action.TAKE_OVER, rng)


def _one_of(chain: Chain, action: Action, rng: random.Random) -> None:
    for line in chain.run([rng.choice(one_way_each([action], 0))]):
        print(line)


def broker_killed(chain: Chain, stand: KafkaStand, rng: random.Random) -> None:
    """While a driver runs, or before it begins."""
    stand.give(messages(9, prefix=f"b{rng.randrange(10**6)}w"))
    is_first = rng.random() < 0.5
    if is_first:
        stand.broker.kill()
    driver = start(stand.cell, {})
    if not is_first:
        stand.broker.kill()
    stand.broker.start()
    assert ended(driver, "a driver whose broker was killed") == 0
    stand.renew()


def new_partition(chain: Chain, stand: KafkaStand, rng: random.Random) -> None:
    stand.give(messages(5, prefix=f"p{rng.randrange(10**6)}w"))
    stand.grow()
    stand.give(messages(5, prefix=f"q{rng.randrange(10**6)}w"))


MISFORTUNES = (driver_killed, second_driver, broker_killed, new_partition)


@pytest.mark.sampled(0.05)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_round_loses_and_doubles_nothing(
    postgres: EmbeddedPostgres, frayed_kafka: FrayedKafka, tmp_path: Path, seed: int, number: int
) -> None:
    rng, proxy = random.Random(f"{seed} {number}"), frayed_kafka.proxy
    proxy.rng, share = random.Random(rng.random()), rng.choice(SHARES)
    how = {"batch_messages": 4, "in_flight": rng.choice((1, 3))}
    with stand_on(postgres, frayed_kafka, tmp_path, seed, f"round{number}", frayed_kafka.frayed, **how) as stand:
        chain = Chain(stand, SHAPE)
        for misfortune in rng.sample(MISFORTUNES, len(MISFORTUNES)):
            print(misfortune.__name__)
            # A second driver comes at a named place, within a bound: connections that end there, too, may be too much.
            proxy.share = 0.0 if misfortune is second_driver else share
            misfortune(chain, stand, rng)
        proxy.share = share
        print(chain.undergo(ordeal(FAILPOINTS["start.after_epoch"], Action.KILL)), f"{proxy.cut} connections were cut")


@pytest.mark.parametrize(
    ("build", "point", "message"),
    [(moving_on, "open.after", "were handed out to no batch"), (forgetting, "finish.after", "holds .* times")],
    ids=["before", "after"],
)
def test_rounds_notice_a_position_that_moves_apart_from_the_ledger(
    postgres: EmbeddedPostgres,
    frayed_kafka: FrayedKafka,
    tmp_path: Path,
    seed: int,
    build: Callable[[Cell], Topology],
    point: str,
    message: str,
) -> None:
    """In place of a consumer group that is told before the commit, or after it."""
    name = f"false_{point[:4]}"
    with (
        stand_on(postgres, frayed_kafka, tmp_path, seed, name, frayed_kafka.frayed, batch_messages=4) as stand,
        pytest.raises(AssertionError, match=message),
    ):
        Chain(stand, replace(SHAPE, build=build)).undergo(ordeal(FAILPOINTS[point], Action.KILL))
