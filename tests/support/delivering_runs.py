"""Drivers, as processes, over servers that deliver: topologies over a queue, and the stand that puts messages into it."""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from stormproof import KestrelSource, NatsSource, RabbitMQSource, RabbitMQStreamSource, RedisStreamSource, Topology
from stormproof.core.pending.journal import Delivery, Journal
from stormproof.core.pending.redelivering import RedeliveringSource
from stormproof.core.pending.source import PendingSource
from stormproof.core.source.nats.client import DONE
from stormproof.core.source.rabbitmq.stream_position import StreamPosition
from support import poison
from support.blows import Action, Blow, Stand
from support.brokers import until
from support.brokers.cutter import Cutter
from support.brokers.kestrel_broker import KestrelServer
from support.brokers.nats_server import NatsServer
from support.brokers.rabbitmq_server import RabbitMQServer
from support.brokers.redis_server import RedisServer
from support.crashes import Cell
from support.kafka_runs import built
from support.shapes import SINKS, Shape
from support.topologies import MAX_ATTEMPTS, SinkMode, sink_of

POISONED_SINKS: Final = (SinkMode.POSTGRES_APPEND, SinkMode.DELTA_APPEND)
SOON: Final = {"backoff_base_s": 0.001, "backoff_max_s": 0.001}
FREED_S: Final = 30.0
ACK_WAIT_S: Final = 1.0
"""The shortest that NATS is asked for: what a killed driver was given comes again after it."""


# ---- what a driver runs: `cell.queue` is where the server listens, and the queue


def _given(cell: Cell, max_attempts: int = MAX_ATTEMPTS) -> dict[str, Any]:
    return {"database": cell.database, "max_attempts": max_attempts, **SOON, "rng": Random(1)}


def rabbitmq(cell: Cell, kind: type[RabbitMQSource] = RabbitMQSource) -> Topology:
    """Lines, known by the property message_id."""
    url, _, queue = cell.queue.partition(" ")
    return built(cell, kind(queue, url=url, **_given(cell)))


def kestrel(cell: Cell, kind: type[KestrelSource] = KestrelSource) -> Topology:
    """Lines in JSON items, known by their field `id`."""
    host, _, queue = cell.queue.partition(" ")
    ids: dict[str, Any] = {"schema": "id bigint, line string", "id_from": "field:id"}
    return built(cell, kind(queue, hosts=[host], **ids, **_given(cell)))


def redis(cell: Cell, kind: type[RedisStreamSource] = RedisStreamSource) -> Topology:
    """Lines, known by the ids of their entries."""
    url, _, stream = cell.queue.partition(" ")
    return built(cell, kind(stream, url=url, **_given(cell)))


def nats(cell: Cell, kind: type[NatsSource] = NatsSource) -> Topology:
    """Lines, known by the stream's sequence."""
    url, _, stream = cell.queue.partition(" ")
    return built(cell, kind(stream, url=url, ack_wait_s=ACK_WAIT_S, **_given(cell)))


def rabbitmq_stream(cell: Cell, kind: type[RabbitMQStreamSource] = RabbitMQStreamSource) -> Topology:
    """Lines of a stream."""
    url, _, stream = cell.queue.partition(" ")
    return built(cell, kind(stream, url=url, **_given(cell)))


# ---- the same, where one line takes the driver down


def _poisoned(cell: Cell, source: PendingSource) -> Topology:
    split = poison.Split(poison.Poisoning.EXIT, cell.folder / "pids")
    words = Topology(cell.name).stream("lines", source).flat_map(split, "line", schema="word string")
    return words.into(*(sink_of(mode, cell.name, cell.folder, cell.database) for mode in POISONED_SINKS)).topology


def rabbitmq_poisoned(cell: Cell) -> Topology:
    url, _, queue = cell.queue.partition(" ")
    return _poisoned(cell, RabbitMQSource(queue, url=url, **_given(cell, 1)))


def stream_poisoned(cell: Cell) -> Topology:
    url, _, stream = cell.queue.partition(" ")
    return _poisoned(cell, RabbitMQStreamSource(stream, url=url, **_given(cell, 1)))


def redis_poisoned(cell: Cell) -> Topology:
    url, _, stream = cell.queue.partition(" ")
    return _poisoned(cell, RedisStreamSource(stream, url=url, **_given(cell, 1)))


def nats_poisoned(cell: Cell) -> Topology:
    url, _, stream = cell.queue.partition(" ")
    return _poisoned(cell, NatsSource(stream, url=url, ack_wait_s=ACK_WAIT_S, **_given(cell, 1)))


def kestrel_poisoned(cell: Cell) -> Topology:
    """Lines as they are, without ids."""
    host, _, queue = cell.queue.partition(" ")
    return _poisoned(cell, KestrelSource(queue, hosts=[host], **_given(cell, 1)))


# ---- the same, broken


class MovesOn(RabbitMQStreamSource):
    """Moves its position without the slices."""

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        with self.rows() as rows:
            rows.cursor.execute("delete from stormproof.pending_slice where at is not null")
        return super().recover(epoch, tx)


class Forgets(RabbitMQStreamSource):
    """Begins anew where it first began."""

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        with self.rows() as rows:
            rows.cursor.execute(
                "update stormproof.pending_subscription set position = %s where source = %s",
                [json.dumps(StreamPosition(0, 0).to_json()), self.name],
            )
        return super().recover(epoch, tx)


def stream_moving_on(cell: Cell) -> Topology:
    return rabbitmq_stream(cell, MovesOn)


def stream_forgetting(cell: Cell) -> Topology:
    return rabbitmq_stream(cell, Forgets)


class TellsFirst(RedeliveringSource):
    """Confirms a message to its server before it is written down."""

    def receive(self, limit: int) -> Sequence[Delivery]:
        received = super().receive(limit)  # type: ignore[safe-super]
        if received:
            self.acknowledge([message.handle for message in received])
        return received


class _NoIds(Journal):
    """Takes whatever comes for new."""

    def _known(self, payloads: Mapping[str, bytes]) -> dict[str, int]:
        return {}


class ChecksNoId(RedeliveringSource):
    def _journal(self, cursor: Any) -> Journal:
        return _NoIds(cursor, self.subscriber, self.where)


class RabbitMQTellsFirst(TellsFirst, RabbitMQSource): ...


class RabbitMQChecksNoId(ChecksNoId, RabbitMQSource): ...


class KestrelTellsFirst(TellsFirst, KestrelSource): ...


class KestrelChecksNoId(ChecksNoId, KestrelSource): ...


class RedisTellsFirst(TellsFirst, RedisStreamSource): ...


class RedisChecksNoId(ChecksNoId, RedisStreamSource): ...


class NatsTellsFirst(TellsFirst, NatsSource): ...


class NatsChecksNoId(ChecksNoId, NatsSource): ...


def rabbitmq_tells_first(cell: Cell) -> Topology:
    return rabbitmq(cell, RabbitMQTellsFirst)


def rabbitmq_checks_no_id(cell: Cell) -> Topology:
    return rabbitmq(cell, RabbitMQChecksNoId)


def kestrel_tells_first(cell: Cell) -> Topology:
    return kestrel(cell, KestrelTellsFirst)


def kestrel_checks_no_id(cell: Cell) -> Topology:
    return kestrel(cell, KestrelChecksNoId)


def redis_tells_first(cell: Cell) -> Topology:
    return redis(cell, RedisTellsFirst)


def redis_checks_no_id(cell: Cell) -> Topology:
    return redis(cell, RedisChecksNoId)


def nats_tells_first(cell: Cell) -> Topology:
    return nats(cell, NatsTellsFirst)


def nats_checks_no_id(cell: Cell) -> Topology:
    return nats(cell, NatsChecksNoId)


# ---- the stand


@dataclass(slots=True)
class DeliveringStand(Stand):
    """Puts messages into a server's queue, behind a proxy that cuts connections; deals out what befalls the server, too."""

    queue: str = field(kw_only=True)
    cutter: Cutter = field(kw_only=True)
    rng: Random = field(kw_only=True)
    _sent: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _running: int = 0

    @property
    @abstractmethod
    def marker(self) -> bytes:
        """What stands in the bytes by which a client confirms messages."""

    @abstractmethod
    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Put messages, each with its id."""

    @abstractmethod
    def is_free(self) -> bool:
        """Whether the server knows of every driver that ended: it holds no message for it."""

    @abstractmethod
    def left(self) -> int:
        """Messages that were not confirmed to the server."""

    @abstractmethod
    def restart(self) -> None:
        """Kill the server, and start it."""

    def send_again(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Have messages delivered again that were sent before, these among them."""
        self.send(messages)

    def give(self, payloads: Sequence[bytes]) -> None:
        """Put messages."""
        numbered = [(next(self._ids), payload) for payload in payloads]
        self.send(numbered)
        self._sent += numbered
        self.put += payloads

    def run(self, blows: Sequence[Blow] = (), cell: Cell | None = None) -> int:
        """Run one driver; the server has what drivers held that ended before."""
        if not self._running:
            until(self.is_free, "the server still holds messages for a driver that ended", FREED_S)
        self._running += 1
        try:
            return Stand.run(self, blows, cell)
        finally:
            self._running -= 1

    def settle(self) -> None:
        """Run drivers until the server has no message left."""

        def settled() -> bool:
            self.run()
            return self.is_free() and self.left() == 0

        until(settled, "the server still has messages", FREED_S)

    def _deal(self, blow: Blow, cell: Cell) -> None:
        match blow.action:
            case Action.BROKER:
                self.restart()
            case Action.CUT_ANSWER | Action.CUT_CONFIRM:
                self.cutter.cut_at(self.marker, "answer" if blow.action is Action.CUT_ANSWER else "request")
            case Action.AGAIN:
                self.send_again(self.rng.sample(self._sent, min(5, len(self._sent))))
            case _:
                return Stand._deal(self, blow, cell)
        self.tally[blow.action] += 1
        return None


@dataclass(slots=True)
class RabbitMQStand(DeliveringStand):
    broker: RabbitMQServer = field(kw_only=True)

    @property
    def marker(self) -> bytes:
        return b"\x00\x3c\x00\x50"  # of the class basic, the method ack

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        self.broker.put(self.queue, [payload for _, payload in messages], [str(id_) for id_, _ in messages])

    def is_free(self) -> bool:
        return self.broker.consumers(self.queue) == 0

    def left(self) -> int:
        return self.broker.ready(self.queue)

    def restart(self) -> None:
        self.broker.restart()


@dataclass(slots=True)
class KestrelStand(DeliveringStand):
    broker: KestrelServer = field(kw_only=True)

    @property
    def marker(self) -> bytes:
        return b"/close"

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        items = [json.dumps({"id": id_, "line": payload.decode()}).encode() for id_, payload in messages]
        self.broker.put(self.queue, items)

    def is_free(self) -> bool:
        with self.broker.client() as client:
            return client.stats(self.queue).get("open_transactions", 0) == 0

    def left(self) -> int:
        return self.broker.left(self.queue)

    def restart(self) -> None:
        self.broker.restart()


@dataclass(slots=True)
class RedisStand(DeliveringStand):
    broker: RedisServer = field(kw_only=True)

    @property
    def marker(self) -> bytes:
        return b"XACK"

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        self.broker.put(self.queue, [payload for _, payload in messages])

    def send_again(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """The server gives the ids, so no message can be put twice: the group is set back to the stream's beginning."""
        self.broker.deliver_again(self.queue)

    def is_free(self) -> bool:
        return True  # the next driver takes over at once

    def left(self) -> int:
        return self.broker.left(self.queue)

    def restart(self) -> None:
        self.broker.restart()


@dataclass(slots=True)
class NatsStand(DeliveringStand):
    broker: NatsServer = field(kw_only=True)

    @property
    def marker(self) -> bytes:
        return DONE

    def send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        self.broker.put(self.queue, [payload for _, payload in messages])

    def send_again(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """The server gives the sequences, so no message can be put twice: the consumer begins again."""
        self.broker.deliver_again(self.queue)

    def is_free(self) -> bool:
        return self.broker.gives_all(self.queue)

    def left(self) -> int:
        return self.broker.left(self.queue)

    def restart(self) -> None:
        self.broker.restart()


@dataclass(slots=True)
class RabbitMQStreamStand(Stand):
    """Puts messages into a stream; kills its broker."""

    queue: str = field(kw_only=True)
    broker: RabbitMQServer = field(kw_only=True)
    rng: Random = field(kw_only=True)

    def give(self, payloads: Sequence[bytes]) -> None:
        """Put messages."""
        self.broker.put(self.queue, payloads)
        self.put += payloads

    def _deal(self, blow: Blow, cell: Cell) -> None:
        if blow.action is not Action.BROKER:
            return Stand._deal(self, blow, cell)
        self.tally[blow.action] += 1
        return self.broker.restart()


def shape_of(build: Callable[[Cell], Topology], *, journal: bool = True) -> Shape:
    """All four sinks; with the journal's failpoints."""
    return replace(SINKS, build=build, hits={**SINKS.hits, **({"journal": 1} if journal else {})})
