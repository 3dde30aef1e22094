"""Drivers that read Kafka die at every failpoint, into Delta and Postgres: the answer comes from what was produced.

A real broker, real Postgres, real Delta tables, the inline engine.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.blows import Action
from support.brokers.kafka import KafkaBroker
from support.chain import Chain, one_way_each, shuffled
from support.crashes import Cell
from support.databases import fresh_database
from support.kafka_runs import PARTITIONS, SHAPE, KafkaStand
from support.queues import prepared_database

from stormproof.core.guarantee import Guarantee
from stormproof.core.postgres.embedded import EmbeddedPostgres

pytestmark = [pytest.mark.postgres, pytest.mark.broker("kafka"), pytest.mark.timeout(600)]

PARTS = 8
WAYS = [Action.KILL, Action.RAISE, Action.KILL, Action.TAKE_OVER]


@contextmanager
def stand_on(
    postgres: EmbeddedPostgres, broker: KafkaBroker, folder: Path, seed: int, name: str, **more: object
) -> Generator[KafkaStand]:
    """A stand over a topic and a database of its own."""
    topic = broker.topic(PARTITIONS)
    with fresh_database(postgres.database, f"test_kafka_{name}") as database:
        prepared_database(database)
        fields = {"mode": None, "guarantee": Guarantee.EXACTLY_ONCE, "folder": folder, "database": database, **more}
        cell = Cell(name=name, queue=f"{broker.servers} {topic}", **fields)  # type: ignore[arg-type]
        yield KafkaStand(cell, database, broker=broker, rng=random.Random(seed))


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_misfortune_at_every_failpoint(
    postgres: EmbeddedPostgres, kafka: KafkaBroker, tmp_path: Path, seed: int, part: int
) -> None:
    """Killed, failed or taken over from, in turn; with one batch in flight, and with three."""
    cells = shuffled(one_way_each(WAYS, seed), random.Random(seed))[part::PARTS]
    flight = {"in_flight": 1 + 2 * (part % 2), "batch_messages": 4}
    with stand_on(postgres, kafka, tmp_path, seed, f"part{part}", **flight) as stand:
        for line in Chain(stand, SHAPE, len(cells)).run(cells):
            print(line)
        print(stand.tally)
