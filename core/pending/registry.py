"""The kinds of sources that keep what is pending in a store: what command line and audit know of each."""

from __future__ import annotations

import importlib
from typing import Final

from stormproof.core.base.errors import UsageError
from stormproof.core.pending.source import PendingSource

_OWN: Final = {
    "queue": "stormproof.core.source.postgres_queue.queue:PostgresQueue",
    "files": "stormproof.core.source.files.source:FileSource",
    "kafka": "stormproof.core.source.kafka.source:KafkaSource",
    "kestrel": "stormproof.core.source.kestrel.source:KestrelSource",
    "nats": "stormproof.core.source.nats.source:NatsSource",
    "rabbitmq": "stormproof.core.source.rabbitmq.source:RabbitMQSource",
    "rabbitmq-stream": "stormproof.core.source.rabbitmq.stream_source:RabbitMQStreamSource",
    "redis": "stormproof.core.source.redis_streams.source:RedisStreamSource",
}
"""Stormproof's own, imported when they are asked for."""

_registered: dict[str, type[PendingSource]] = {}


def register_source(connector: type[PendingSource]) -> type[PendingSource]:
    """Make a connector's class known to audit and command line under its `KIND`; may stand above the class.

    Only a connector that shows ids in a way of its own, stores payloads in another form than it was given, or has messages
    without plain numbers needs it: others are read by what every numbered source keeps.

    Raises:
        UsageError: another class has this kind.
    """
    kind = connector.KIND
    if kind in _OWN or _registered.get(kind, connector).__qualname__ != connector.__qualname__:
        raise UsageError(f"source kind {kind!r} is taken; give {connector.__name__} another KIND", kind=kind)
    _registered[kind] = connector
    return connector


def connector_of(kind: str) -> type[PendingSource]:
    """The class that says how messages of this kind are shown and audited."""
    if kind in _registered:
        return _registered[kind]
    if kind in _OWN:
        module, _, name = _OWN[kind].partition(":")
        found: type[PendingSource] = getattr(importlib.import_module(module), name)
        return found
    return PendingSource
