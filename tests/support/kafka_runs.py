"""Topologies over a Kafka topic, for drivers that die: messages in several partitions, between transactions that failed."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from stormproof import Topology, count
from stormproof.core.base.message import Guarantee
from stormproof.core.pending.source import PendingSource
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.kafka import KafkaSource
from stormproof.core.source.kafka.position import KafkaPosition, PartitionPlace
from support.blows import Stand
from support.brokers.kafka import READY_S, KafkaBroker
from support.crashes import Cell
from support.databases import fresh_database
from support.queues import prepared_database
from support.shapes import SINKS
from support.topologies import MAX_ATTEMPTS, SinkMode, Split, sink_of

PARTITIONS = 3


def source_of(cell: Cell, kind: type[KafkaSource] = KafkaSource) -> KafkaSource:
    """Lines of the topic that `cell.queue` names, behind its servers."""
    servers, _, topic = cell.queue.partition(" ")
    return kind(
        topic,
        servers=servers,
        database=cell.database,
        max_attempts=MAX_ATTEMPTS,
        backoff_base_s=0.001,
        backoff_max_s=0.001,
        look_interval_s=0.0,
        answer_s=20.0,
    )


def topology_of(cell: Cell) -> Topology:
    """Words and their counts, in Delta and in Postgres."""
    return built(cell, source_of(cell))


def built(cell: Cell, source: PendingSource) -> Topology:
    """The same over any source of lines."""
    t = Topology(cell.name)
    words = t.stream("lines", source).flat_map(Split(cell.folder), "line", schema="word string")
    modes = list(SinkMode) if cell.mode is None else [cell.mode]
    appends, folds = [m for m in modes if not m.folds], [m for m in modes if m.folds]
    if appends:
        words.into(*(sink_of(mode, cell.name, cell.folder, cell.database) for mode in appends))
    if folds:
        words.group_by("word").persistent_aggregate(n=count()).into(
            *(sink_of(mode, cell.name, cell.folder, cell.database) for mode in folds)
        )
    return t


class MovesOn(KafkaSource):
    """Moves its position without the slices: as a consumer group that is told before the commit."""

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        with self.rows() as rows:
            rows.cursor.execute("delete from stormproof.pending_slice where at is not null")
        return super().recover(epoch, tx)


class Forgets(KafkaSource):
    """Begins anew where it first began: as a group that is told after the commit, and was not."""

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        with self.rows() as rows:
            known = KafkaPosition.of(rows.position() or {})
            again = replace(
                known, places=tuple(PartitionPlace(p.topic, p.partition, p.first, p.first) for p in known.places)
            )
            rows.cursor.execute(
                "update stormproof.pending_subscription set position = %s where source = %s",
                [json.dumps(again.to_json()), self.name],
            )
        return super().recover(epoch, tx)


def moving_on(cell: Cell) -> Topology:
    return built(cell, source_of(cell, MovesOn))


def forgetting(cell: Cell) -> Topology:
    return built(cell, source_of(cell, Forgets))


SHAPE = replace(SINKS, build=topology_of)


@dataclass(slots=True)
class KafkaStand(Stand):
    """Puts messages into partitions in turn; some in transactions, and an aborted one before these."""

    broker: KafkaBroker = field(kw_only=True)
    rng: Random = field(kw_only=True)
    partitions: int = PARTITIONS
    _turn: itertools.count[int] = field(default_factory=itertools.count)
    _producer: Any = None

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.cell.queue.partition(" ")[2]

    def grow(self) -> None:
        """Give the topic one more partition, which gets messages from now on."""
        self.partitions += 1
        self.broker.grow(self.topic, self.partitions)
        self._producer = None  # it knows the topic as it was

    def give(self, payloads: Sequence[bytes]) -> None:
        topic = self.topic
        if self._producer is None:
            self._producer = self.broker.producer(transactional_id=uuid.uuid4().hex)
            self._producer.init_transactions(READY_S)
        for lines, commit in (([b"never seen"] * 2, False), (payloads, True)):
            self._producer.begin_transaction()
            for line in lines:
                self._producer.produce(topic, line, partition=next(self._turn) % self.partitions)
            self._producer.flush(READY_S)
            end = self._producer.commit_transaction if commit else self._producer.abort_transaction
            end(READY_S)
        self.broker.until_stable(topic, self.partitions)
        self.put += payloads

    def renew(self) -> None:
        """The broker was killed: the producer's transactions are begun anew."""
        self._producer = None


@contextmanager
def stand_on(
    postgres: EmbeddedPostgres,
    broker: KafkaBroker,
    folder: Path,
    seed: int,
    name: str,
    servers: str | None = None,
    **more: object,
) -> Generator[KafkaStand]:
    """A stand over a topic and a database of its own. Drivers reach the broker at `servers`."""
    topic = broker.topic(PARTITIONS)
    with fresh_database(postgres.database, f"test_kafka_{name}") as database:
        prepared_database(database)
        fields = {"mode": None, "guarantee": Guarantee.EXACTLY_ONCE, "folder": folder, "database": database, **more}
        cell = Cell(name=name, queue=f"{servers or broker.servers} {topic}", **fields)  # type: ignore[arg-type]
        yield KafkaStand(cell, database, broker=broker, rng=Random(seed))
