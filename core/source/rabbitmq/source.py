"""`RabbitMQSource`: the messages of a RabbitMQ queue."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Final, NamedTuple, Self, Unpack

from stormproof.core.base.arguments import require_text, require_text_if_given
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import StoreUnavailable, UsageError
from stormproof.core.contract.capabilities import RABBITMQ_CLASSIC, RABBITMQ_WITHOUT_ID
from stormproof.core.contract.payload import Unit
from stormproof.core.pending.journal import Delivery
from stormproof.core.pending.redelivering import RedeliveringArguments, RedeliveringSource
from stormproof.core.postgres.database import Database
from stormproof.core.source.metadata import KeepsMetadata
from stormproof.core.source.rabbitmq.client import (
    AUTO,
    PREFETCH_MAX,
    Arrived,
    BrokerQueue,
    DeliveryMetadata,
    QueueConsumer,
    dataset_at,
    limits_said,
)
from stormproof.core.source.stable_ids import MESSAGE_ID, IdFrom

log = logging.getLogger("stormproof.source")

URL: Final = "amqp://guest:guest@127.0.0.1:5672/%2F"


def require_queue(noun: str, argument: str, name: object) -> str:
    """What errors call the queue; UsageError where it is no queue's name."""
    require_text(noun, argument, name, "orders")
    assert isinstance(name, str)
    where = f"{noun} {name}"
    if len(name.encode("utf-8", "replace")) > 255 or not name.isprintable():
        raise UsageError(f"{where}: a queue's name has at most 255 bytes, and is printable", argument=argument)
    return where


class Handle(NamedTuple):
    """A delivery: the connection on which it came, and the broker's number for it there."""

    connection: int
    tag: int


class RabbitMQSource(KeepsMetadata, RedeliveringSource):
    """The messages of a RabbitMQ queue, classic or quorum.

    RabbitMQ gives messages no id of their own. `id_from` says where the publisher's stands: ``message_id``, the property;
    ``header:NAME``; or ``field:NAME`` of a JSON payload. It must be the same each time a message is published or delivered,
    and no other message's.

    Guarantee: a message is confirmed to the broker after its batch was committed, and not before. One that comes again,
    because a driver, a connection or the broker went, because the broker's consumer timeout ran out, or because its
    publisher repeated it, is known by its id for `horizon_s` seconds after it was resolved: confirmed again, and not applied
    again.

    Not guaranteed: without ids (`id_from=None`) a message that comes again is a new one; exactly-once is refused then.
    What the broker itself loses: messages that are not persistent, or of a queue that is not durable, when it restarts;
    those that its limits (`x-max-length`, `x-message-ttl`, `x-delivery-limit`) drop before they are received.

    A stream is refused by name: `RabbitMQStreamSource` reads it.

    Threads: topologies on several threads may share one object; each run has a connection of
    its own.
    """

    KIND: ClassVar[str] = "rabbitmq"
    READS_AHEAD: ClassVar[bool] = False  # what was delivered and is not opened is returned at the end, and counted
    BEFORE_ID: ClassVar[str] = "="
    NOUN: ClassVar[str] = "RabbitMQ queue"

    def __init__(
        self,
        queue: str,
        *,
        url: str = URL,
        schema: str = "line string",
        unit: Unit | None = None,
        id_from: str | None = MESSAGE_ID,
        metadata: Sequence[str] | Mapping[str, str] = (),
        management: str | None = AUTO,
        name: str | None = None,
        new_id: Callable[[], str] | None = None,
        **pending: Unpack[RedeliveringArguments],
    ) -> None:
        """`queue` is one that is there: it is never declared here. `name`: under which messages are pending.

        `management`: the URL of the broker's management interface, which is asked for the queue's limits when a run starts;
        "auto" is port 15672 of the broker's host (15671 of amqps), None asks nobody.

        `prefetch`: messages that may be written down and not opened yet; and, at most 65,535, that the broker delivers
        without a confirmation. `new_id` makes the ids of messages, with `id_from=None`. `metadata` names fields to add
        behind the schema's: message_id, exchange, routing_key, timestamp, headers, redelivered, and delivery_count, which is
        NULL where the queue does not count. Those of a message's first delivery are kept. `RedeliveringArguments` and
        `PendingArguments` have further arguments.
        """
        where = require_queue(self.NOUN, "queue", queue)
        require_text(where, "url", url, "amqp://USER:PASSWORD@HOST:PORT/VHOST")
        require_text_if_given(where, "name", name, queue)
        require_text_if_given(where, "management", management, "http://HOST:15672")
        self._id_from = None if id_from is None else IdFrom.of(where, id_from, properties=True)
        self.id_from = id_from
        # A quorum queue counts deliveries: that is metadata. What failed is counted here, where a retry is no delivery.
        self.capabilities = RABBITMQ_WITHOUT_ID if id_from is None else RABBITMQ_CLASSIC
        super().__init__(name or queue, schema=schema, unit=unit, **pending)
        self._metadata = DeliveryMetadata.chosen(where, metadata, self._decoder.schema)
        self._decoder = self._metadata.decoder(IdFrom.decoder(self._decoder, id_from))
        self._queue = queue
        self._url = url
        self._management = management
        self._new_id = new_id or (lambda: uuid.uuid4().hex)
        self._consumer: QueueConsumer | None = None
        self._connection = 0

    def __repr__(self) -> str:
        return f"RabbitMQSource({self._queue!r})"  # the url has a password

    def datasets(self) -> tuple[DatasetName, ...]:
        """The queue at its broker, in its virtual host."""
        return (dataset_at(self._url, self._queue),)

    def for_run(self, database: Database) -> Self:
        """The same queue for one run, with a connection of its own."""
        view = super().for_run(database)
        view._consumer = None
        return view

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on; what the queue's own limits may do to messages is logged."""
        super().subscribe(subscription, epoch)
        if self._management is not None:
            for text in limits_said(self._url, self._management, self._queue, min(self._prefetch, PREFETCH_MAX)):
                log.warning("%s: %s", self.where, text)

    # ---- the connection

    def _connected(self) -> QueueConsumer:
        if self._consumer is None:
            self._consumer = QueueConsumer(BrokerQueue(self._url, self._queue, self.where), self._prefetch, self._clock)
            self._connection += 1
            self.reconnected()
        return self._consumer

    def _drop(self) -> None:
        """Let the connection go; its deliveries come again."""
        if self._consumer is not None:
            self._consumer.drop()
            self._consumer = None
            self.reconnected()

    # ---- what the journal asks for

    def receive(self, limit: int) -> Sequence[Delivery]:
        """What the broker has for us."""
        try:
            arrived = self._connected().receive(limit)
        except StoreUnavailable:
            self._drop()
            raise
        return self._metadata.kept([self._delivery(message) for message in arrived], arrived)

    def left_at_server(self) -> int | None:
        """What the queue has for somebody; what was delivered to other consumers is not in it."""
        return None if self._consumer is None else self._consumer.left

    def _delivery(self, message: Arrived) -> tuple[str, Handle, bytes]:
        handle = Handle(self._connection, message.tag)
        if self._id_from is None:
            return self._new_id(), handle, message.payload
        properties = message.properties
        id_, payload = self._id_from.identified(message.payload, properties.message_id, properties.headers)
        return id_, handle, payload

    def reused(self, message: Delivery) -> Delivery | None:
        """A message that fails: its publisher gave an id twice."""
        return None if self._id_from is None else self._id_from.reused(message)

    def acknowledge(self, handles: Sequence[Handle]) -> None:
        """Confirm what came on the connection that is there now; the rest comes again."""
        if self._consumer is None:
            return
        try:
            self._consumer.confirm([handle.tag for handle in handles if handle.connection == self._connection])
        except StoreUnavailable:
            self._drop()
            raise

    def give_back(self, handles: Sequence[Handle]) -> None:
        """Have the broker deliver them to whoever is next."""
        if self._consumer is not None:
            self._consumer.give_back([handle.tag for handle in handles if handle.connection == self._connection])

    def maintain(self) -> None:
        """Also answer the broker's heartbeats. It delivers no more for what is confirmed here: perhaps nobody asks again."""
        if self._handles and self._consumer is not None:
            self._at_broker(QueueConsumer.hold_back)
        super().maintain()
        self._at_broker(QueueConsumer.pump)

    def _at_broker(self, what: Callable[[QueueConsumer], None]) -> None:
        if self._consumer is not None:
            try:
                what(self._consumer)
            except StoreUnavailable:
                self._drop()
                raise

    def drop_connections(self) -> None:
        """Let connections go; the next call makes others."""
        super().drop_connections()
        self._drop()

    def close(self) -> None:
        """Confirm what is owed, give back what is unresolved, and let connections go.

        The broker delivers nothing any more before that: a quorum queue counts each message that is returned.
        """
        with suppress(StoreUnavailable):
            self._at_broker(QueueConsumer.stop)
        super().close()
