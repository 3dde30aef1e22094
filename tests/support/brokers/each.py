"""A harness over each broker: the fixture of its server, and what makes the harness from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from support.brokers.kestrel_broker import KestrelHarness
from support.brokers.nats_server import NatsHarness
from support.brokers.rabbitmq_server import RabbitMQHarness, RabbitMQStreamHarness
from support.brokers.redis_server import RedisHarness
from support.kafka_source import KafkaHarness

EACH: Final[Mapping[str, tuple[str, Callable[..., Any]]]] = {
    "rabbitmq": ("rabbitmq", lambda database, name, server: RabbitMQHarness(database, name, server=server)),
    "rabbitmq-stream": (
        "rabbitmq",
        lambda database, name, server: RabbitMQStreamHarness(database, name, server=server),
    ),
    "redis": ("redis_server", lambda database, name, server: RedisHarness(database, name, server=server)),
    "nats": ("nats_server", lambda database, name, server: NatsHarness(database, name, server=server)),
    "kestrel": ("kestrel", lambda database, name, server: KestrelHarness(database, name, servers=[server])),
    "kafka": ("kafka", lambda database, name, server: KafkaHarness(database, server)),
}
