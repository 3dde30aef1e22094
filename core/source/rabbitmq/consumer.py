"""One connection to a RabbitMQ broker that consumes a queue."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import StoreUnavailable, StormproofError
from stormproof.core.source.rabbitmq.broker import PREFETCH_MAX, BrokerQueue

_WAIT_S: Final = 2.0
"""How long messages that the broker has, and that are ours to have, may take to arrive."""
_STEP_S: Final = 0.005


class Arrived(NamedTuple):
    """One delivery; `method` and `properties` are the client's."""

    payload: bytes
    method: Any
    properties: Any

    @property
    def tag(self) -> int:
        """The broker's number for it on this connection."""
        number: int = self.method.delivery_tag
        return number


class Consumer:
    """Consumes one queue. After an error it is of no use any more: the broker delivers again what was not confirmed.

    A quorum queue counts how often a message was returned, and gives it up at a limit. So the broker is asked for as many
    messages as are wanted, in place of as many as it may deliver: what it delivers and nobody opens is returned at the end.
    """

    def __init__(self, broker: BrokerQueue, prefetch: int, clock: Clock) -> None:
        self._broker = broker
        self._queue = broker.name
        self._prefetch = min(prefetch, PREFETCH_MAX)
        self._clock = clock
        self._arrived: deque[Arrived] = deque()
        self._unconfirmed: dict[int, str] = {}
        self._cancelled = False
        self._credits: dict[str, int] = {}
        """How many messages each consumer may have delivered and unconfirmed."""
        self._counted = 0
        self._connection: Any = broker.connect()
        try:
            with broker.asked():
                self._channel: Any = self._connection.channel()
                self._channel.queue_declare(self._queue, passive=True)
                self._channel.add_on_cancel_callback(self._on_cancel)
                self._first()
        except StormproofError:
            self.drop()
            raise

    def _ask_for(self, messages: int) -> None:
        """Have the broker deliver so many messages in all, by one more consumer for those that the others do not allow.

        One that has delivered all that it may ends then, so that a confirmation lets it deliver nothing more; what it
        delivered stays ours. The client refuses what arrives while a consumer ends: of such a one nothing does. The queue is
        never without a consumer, for which it might be deleted.
        """
        delivered = Counter(self._unconfirmed.values())
        free = sum(self._credits.values()) - sum(delivered[consumer] for consumer in self._credits)
        spent = [consumer for consumer, credit in self._credits.items() if delivered[consumer] >= credit]
        if messages > free:
            self._channel.basic_qos(prefetch_count=messages - free)
            self._credits[self._channel.basic_consume(self._queue, self._on_message)] = messages - free
        if messages > 0:
            self._end(spent)

    def _end(self, consumers: Sequence[str]) -> None:
        for consumer in consumers:
            del self._credits[consumer]
            self._channel.basic_cancel(consumer)

    def _first(self) -> None:
        """Take one message by ``basic.get``: a stream refuses it, which otherwise gives only what comes from now on."""
        method, properties, body = self._channel.basic_get(self._queue)
        if method is not None:
            self._on_message(self._channel, method, properties, body)

    # ---- what the broker sends

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._unconfirmed[method.delivery_tag] = getattr(method, "consumer_tag", "")  # a message that was got has none
        self._arrived.append(Arrived(body, method, properties))

    def _on_cancel(self, method: Any) -> None:
        self._cancelled = True  # the queue was deleted, or its node went

    # ---- what is asked of it

    def receive(self, limit: int) -> list[Arrived]:
        """At most `limit` messages that the broker has for us now."""
        with self._broker.asked():
            wanted = min(limit - len(self._arrived), self._prefetch - len(self._unconfirmed))
            self._ask_for(wanted)
            self._collect(len(self._arrived) + wanted)
        return [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]

    def _collect(self, limit: int) -> None:
        """Wait for messages, as long as the broker has some that are ours to have.

        It answers on one channel in order: what it sent before it counted has arrived with the count.
        """
        end_s = self._clock.monotonic_s() + _WAIT_S
        while True:
            left = self._counted = self._channel.queue_declare(self._queue, passive=True).method.message_count
            self._connection.process_data_events(time_limit=0)  # hands out what has arrived meanwhile
            if not left or len(self._arrived) >= limit or self._cancelled or self._clock.monotonic_s() > end_s:
                break
            self._connection.process_data_events(time_limit=_STEP_S)
        if self._cancelled:
            raise StoreUnavailable(f"{self._broker.where}: the broker cancelled the consumer", queue=self._queue)

    @property
    def left(self) -> int:
        """Messages that the queue had for somebody when it was last asked, with those that arrived and nobody took."""
        return self._counted + len(self._arrived)

    def confirm(self, tags: Sequence[int]) -> None:
        """Confirm deliveries of this connection, and wait until the broker has heard it: at a close it forgets acks."""
        mine = {tag for tag in tags if tag in self._unconfirmed}
        if not mine:
            return
        with self._broker.asked():
            prefix = 0
            for tag in self._unconfirmed:  # ascending, as they were delivered
                if tag not in mine:
                    break
                prefix = tag
            if prefix:
                self._channel.basic_ack(prefix, multiple=True)
            for tag in sorted(mine):
                if tag > prefix:
                    self._channel.basic_ack(tag)
            self._channel.queue_declare(self._queue, passive=True)
        for tag in mine:
            del self._unconfirmed[tag]

    def hold_back(self) -> None:
        """Have the broker deliver one message more at most, whatever is confirmed from here on; unless it had none left."""
        with self._broker.asked():
            self._ask_for(1)

    def stop(self) -> None:
        """Have the broker deliver nothing more, whatever is confirmed or given back from here on."""
        with self._broker.asked():
            self._connection.process_data_events(time_limit=0)
            self._end(list(self._credits))

    def give_back(self, tags: Sequence[int]) -> None:
        """Have deliveries put back; what has arrived and was handed to nobody goes with them."""
        with self._broker.asked():
            for tag in [*tags, *(message.tag for message in self._arrived)]:
                if self._unconfirmed.pop(tag, None) is not None:
                    self._channel.basic_nack(tag, requeue=True)
            self._arrived.clear()
            self._channel.queue_declare(self._queue, passive=True)

    def pump(self) -> None:
        """Answer heartbeats, and collect what has arrived."""
        with self._broker.asked():
            self._connection.process_data_events(time_limit=0)
        if not self._channel.is_open:
            raise StoreUnavailable(
                f"{self._broker.where}: the broker closed the channel; what was not confirmed comes again",
                queue=self._queue,
            )

    def drop(self) -> None:
        """Close the connection; the broker delivers again what was not confirmed."""
        self._broker.disconnect(self._connection)
