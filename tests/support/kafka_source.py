"""`KafkaSource` over a real broker, for the suite that every source must pass and for the tests beside it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.kafka import KafkaSource
from stormproof.testing import SourceHarness
from support.brokers.kafka import READY_S, KafkaBroker


@dataclass
class KafkaHarness(SourceHarness):
    """A topic of its own with one partition; time is moved in the rows, since the clock is the database's."""

    database: Database
    broker: KafkaBroker
    partitions: int = 1
    kind: type[KafkaSource] = KafkaSource
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    views: list[KafkaSource] = field(default_factory=list[KafkaSource])

    def __post_init__(self) -> None:
        self.topic = self.broker.topic(self.partitions)

    def put(self, payloads: Sequence[bytes]) -> None:
        self.broker.put(self.topic, payloads)

    def unsubscribed(self) -> KafkaSource:
        given: dict[str, Any] = {
            "max_attempts": self.max_attempts,
            "look_interval_s": 0.0,
            "rng": Random(1),
            **self.options,
        }
        source = self.kind(self.topic, servers=self.broker.servers, database=self.database, **given)
        self.views.append(source)
        return source

    def view(self, subscription: str = "s", epoch: int = 1) -> KafkaSource:
        source = self.unsubscribed()
        source.subscribe(subscription, epoch)
        return source

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run SQL; `MINE` stands for this harness's subscriptions."""
        mine = f"subscription in (select id from stormproof.pending_subscription where source = '{self.topic}')"
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(statement.replace("MINE", mine).encode())
            return cursor.fetchall() if cursor.description else []

    def expire(self) -> None:
        self.execute("update stormproof.pending_slice set expires_at = clock_timestamp() where state = 'open' and MINE")

    def wait_for_retries(self) -> None:
        self.execute("update stormproof.pending_retry set not_before = clock_timestamp() where MINE")

    def close(self) -> None:
        for view in self.views:
            view.close()


@dataclass
class GapsHarness(KafkaHarness):
    """The same, where offsets have gaps: each message is in a transaction of its own, behind one that was aborted."""

    counts_unopened = False
    _producers: ClassVar[dict[str, Any]] = {}

    def put(self, payloads: Sequence[bytes]) -> None:
        producer = self._producers.get(self.broker.servers)
        if producer is None:
            producer = self.broker.producer(transactional_id=uuid.uuid4().hex)
            producer.init_transactions(READY_S)
            self._producers[self.broker.servers] = producer
        for payload in payloads:
            producer.begin_transaction()
            producer.produce(self.topic, b"aborted", partition=0)
            producer.flush(READY_S)
            producer.abort_transaction(READY_S)
            producer.begin_transaction()
            producer.produce(self.topic, payload, partition=0)
            producer.commit_transaction(READY_S)
