"""A RabbitMQ broker: how it is reached, what is asked of it to consume a queue, and what its errors mean.

What a queue's own limits may do to messages AMQP does not tell: the broker's management interface does.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa

from stormproof.core.base.clock import Clock
from stormproof.core.base.dataset import DatasetName, at_server
from stormproof.core.base.errors import Json, MissingRight, StoreUnavailable, StormproofError, UsageError
from stormproof.core.base.extras import required
from stormproof.core.base.message import storable_text
from stormproof.core.source.metadata import Fact, Metadata

TIMEOUT_S: Final = 10.0
HEARTBEAT_S: Final = 600
"""The client answers heartbeats only while it is asked for messages: a batch may take longer than the broker's 60 s."""
PREFETCH_MAX: Final = 65_535


@dataclass(frozen=True, slots=True)
class BrokerQueue:
    """A queue, by its name and the URL of its broker. Picklable, and as secret as the URL's password."""

    url: str = field(repr=False)
    name: str
    where: str
    """The source as errors name it."""

    @property
    def pika(self) -> Any:
        """The client library.

        Raises:
            UsageError: it is not installed.
        """
        return required("pika", "rabbitmq", self.where)

    def connect(self) -> Any:
        """A new connection.

        Raises:
            MissingRight, StoreUnavailable, UsageError: as `asked` says.
        """
        parameters = self._parameters()
        with self.asked():
            return self.pika.BlockingConnection(parameters)

    def _parameters(self) -> Any:
        try:
            parameters = self.pika.URLParameters(self.url)
            if "heartbeat" not in self.url:
                parameters.heartbeat = HEARTBEAT_S
            parameters.socket_timeout = TIMEOUT_S
            parameters.stack_timeout = TIMEOUT_S
            parameters.blocked_connection_timeout = TIMEOUT_S
        except (ValueError, TypeError, AttributeError):
            error = UsageError(
                f"{self.where}: the url cannot be read; write amqp://USER:PASSWORD@HOST:PORT/VHOST, amqps:// for TLS "
                "(%2F is the vhost '/')",
                queue=self.name,
            )
            raise error from None  # the cause may show the password
        return parameters

    def disconnect(self, connection: Any) -> None:
        """Close a connection; the broker delivers again what was not confirmed."""
        with suppress(self.pika.exceptions.AMQPError, OSError):  # it is closed
            connection.close()

    @contextmanager
    def asked(self) -> Generator[None]:
        """Around whatever is asked of the broker.

        Raises:
            MissingRight: the broker refuses user or password, or the user this queue.
            StoreUnavailable: the broker is away, or has closed the channel.
            UsageError: there is no such queue, or it is not of this kind.
        """
        errors = self.pika.exceptions
        try:
            yield
        except (errors.ProbableAuthenticationError, errors.AuthenticationError) as error:
            raise MissingRight(
                f"{self.where}: the broker refuses user or password; give the right ones in url", queue=self.name
            ) from error
        except errors.ProbableAccessDeniedError as error:
            raise self._refused(530, storable_text(str(error), 500)) from error
        except (errors.ChannelClosedByBroker, errors.ConnectionClosedByBroker) as error:
            raise self._refused(error.reply_code, storable_text(str(error.reply_text), 500)) from error
        except (errors.AMQPError, OSError) as error:
            text = storable_text(str(error) or type(error).__name__, 500)
            raise StoreUnavailable(f"{self.where}: {text}", queue=self.name) from error

    def _refused(self, code: int, text: str) -> StormproofError:
        details: dict[str, Json] = {"queue": self.name, "code": code}
        if code == 404 and "down" not in text:
            return UsageError(
                f"{self.where}: the broker has no such queue ({text}); declare it, for example: rabbitmqadmin declare "
                f"queue name={self.name} durable=true",
                **details,
            )
        if code == 403:
            return MissingRight(
                f"{self.where}: {text}; as an administrator: rabbitmqctl set_permissions -p VHOST USER '' '' "
                f"'^{self.name}$' (VHOST and USER are those of the url)",
                **details,
            )
        if code == 540:
            return UsageError(
                f"{self.where}: it is a stream ({text}), which is not delivered but read; read it with "
                f"RabbitMQStreamSource({self.name!r})",
                **details,
            )
        if code == 406 and "x-stream-offset" in text:
            return UsageError(
                f"{self.where}: it is no stream ({text}); read it with RabbitMQSource({self.name!r})", **details
            )
        if code in (405, 530):
            return UsageError(f"{self.where}: the broker refuses to have it read: {text}", **details)
        return StoreUnavailable(f"{self.where}: the broker closed the channel: {code} {text}", **details)


def dataset_at(url: str, name: str) -> DatasetName:
    """A queue or stream as others call it, with its virtual host where that is not the one called ``/``."""
    parts = urlsplit(url)
    # Else the rest of a password stands where the virtual host would.
    is_readable = "@" in parts.netloc or "@" not in parts.path
    within = unquote(parts.path.split("/")[1]) if is_readable and len(parts.path) > 1 else "/"
    return at_server(
        "amqp", url, name, port=5671 if parts.scheme == "amqps" else 5672, within="" if within == "/" else within
    )


# ---- one connection that consumes a queue

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


class QueueConsumer:
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


# ---- what a queue's own limits may do to its messages, by the management interface

MANAGEMENT_TIMEOUT_S: Final = 3.0
AUTO: Final = "auto"


def limits_said(url: str, management: str, queue: str, prefetch: int) -> list[str]:
    """What cannot be kept of a queue's limits, a text each; or that they are not known. `management` is a URL, or "auto"."""
    try:
        found = _asked(url, management, queue)
    except (OSError, ValueError, http.client.HTTPException) as error:
        text = str(error) if isinstance(error, OSError) else type(error).__name__  # which may repeat the URL
        return [
            f"its delivery limit, time-outs and dead-letter exchange are not known: the management interface says {text}. "
            "Give its address by management='http://HOST:15672', and the user the tag 'monitoring'; or management=None"
        ]
    limit, timeout_ms = _setting(found, "delivery-limit"), _setting(found, "consumer-timeout")
    exchange = _setting(found, "dead-letter-exchange")
    goes = "drops it" if exchange is None else f"moves it to the exchange {exchange!r}"
    said: list[str] = []
    if limit is not None and limit >= 0:
        said.append(
            f"delivery-limit {limit}: the broker {goes} once a message was returned more often. A run that ends in order "
            f"returns none that it opened; one that is killed returns up to {prefetch}, which are applied here anyway. "
            "Attempts are counted in Postgres, so the queue needs no limit"
        )
    if timeout_ms is not None:
        said.append(
            f"consumer-timeout {timeout_ms} ms: what a batch has not confirmed by then is returned, which counts as a "
            "delivery. Set it above the time of a batch"
        )
    if (ttl_ms := _setting(found, "message-ttl")) is not None:
        said.append(f"message-ttl {ttl_ms} ms: the broker {goes} before it is read, if a message waits longer")
    return said


def _asked(url: str, management: str, queue: str) -> Mapping[str, Any]:
    broker = urlsplit(url)
    is_safe = broker.scheme == "amqps"
    auto = f"http{'s' if is_safe else ''}://{broker.hostname or '127.0.0.1'}:{15671 if is_safe else 15672}"
    vhost = unquote(broker.path[1:]) or "/"
    base = auto if management == AUTO else management.rstrip("/")
    asked = urllib.request.Request(f"{base}/api/queues/{quote(vhost, safe='')}/{quote(queue, safe='')}")  # noqa: S310
    user = f"{unquote(broker.username or 'guest')}:{unquote(broker.password or 'guest')}"
    asked.add_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    try:
        with urllib.request.urlopen(asked, timeout=MANAGEMENT_TIMEOUT_S) as answer:  # noqa: S310 - of the scheme that was given
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    if not isinstance(found, dict):
        raise ValueError
    return found


def _setting(found: Mapping[str, Any], name: str) -> Any:
    """A setting by argument or by policy; of two numbers the lower one holds. A newer broker tells its own default, too."""
    given = (found.get("arguments") or {}).get(f"x-{name}")
    values = [given, (found.get("effective_policy_definition") or {}).get(name), found.get(name.replace("-", "_"))]
    there = [value for value in values if value is not None and value != "unlimited"]
    return min(there) if there and all(isinstance(value, int) for value in there) else next(iter(there), None)


_YEAR_10000_S: Final = 253_402_300_800
_COUNT: Final = "x-delivery-count"
_OURS: Final = (_COUNT, "x-stream-offset")


def _text(value: object) -> str:
    """A header's value: text as it is, all else as JSON."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)


def _headers(one: Any) -> Sequence[dict[str, str]]:
    headers: Mapping[str, object] | None = one.properties.headers
    if not headers:
        return ()
    return [{"name": name, "value": _text(value)} for name, value in headers.items() if name not in _OURS]


def _timestamp(one: Any) -> int | None:
    """The property, which its publisher set, in microseconds; None where there is none, or none that is a time."""
    seconds = one.properties.timestamp
    return seconds * 1_000_000 if isinstance(seconds, int) and 0 <= seconds < _YEAR_10000_S else None


_MESSAGE: Final[Mapping[str, Fact]] = {
    "message_id": (pa.string(), lambda one: one.properties.message_id),
    "exchange": (pa.string(), lambda one: one.method.exchange),
    "routing_key": (pa.string(), lambda one: one.method.routing_key),
    "timestamp": (pa.timestamp("us", "UTC"), _timestamp),
    "headers": (pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())])), _headers),
}


class DeliveryMetadata(Metadata):
    """Of messages that are delivered. `delivery_count` is NULL where the queue does not count (classic queues)."""

    __slots__ = ()
    KNOWN: ClassVar[Mapping[str, Fact]] = {
        **_MESSAGE,
        "redelivered": (pa.bool_(), lambda one: one.method.redelivered),
        "delivery_count": (pa.int64(), lambda one: (one.properties.headers or {}).get(_COUNT)),
    }


class StreamMetadata(Metadata):
    """Of messages of streams."""

    __slots__ = ()
    KNOWN: ClassVar[Mapping[str, Fact]] = {**_MESSAGE, "offset": (pa.int64(), lambda one: one.offset)}
