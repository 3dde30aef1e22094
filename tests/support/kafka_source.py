"""`KafkaSource` over a real broker, for the suite that every source must pass and for the tests beside it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from stormproof.core.source.kafka import KafkaSource
from stormproof.testing import PendingSourceHarness
from support.brokers.kafka import READY_S, KafkaBroker


@dataclass
class KafkaHarness(PendingSourceHarness[KafkaSource]):
    """A topic of its own, with one partition; `name` is the topic."""

    exact_bytes = False  # retries have what the cluster says of a message, too

    name: str = field(init=False)
    broker: KafkaBroker
    partitions: int = 1
    kind: type[KafkaSource] = KafkaSource
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.name = self.broker.topic(self.partitions)

    def put(self, payloads: Sequence[bytes]) -> None:
        self.broker.put(self.name, payloads)

    def made(self, **options: Any) -> KafkaSource:
        given: dict[str, Any] = {
            "max_attempts": self.max_attempts,
            "look_interval_s": 0.0,
            "rng": Random(1),
            **self.options,
            **options,
        }
        return self.kind(self.name, servers=self.broker.servers, database=self.database, **given)


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
            producer.produce(self.name, b"aborted", partition=0)
            producer.flush(READY_S)
            producer.abort_transaction(READY_S)
            producer.begin_transaction()
            producer.produce(self.name, payload, partition=0)
            producer.commit_transaction(READY_S)
        self.broker.until_stable(self.name, self.partitions)
