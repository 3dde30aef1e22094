"""One connection to a RabbitMQ broker that consumes a queue; and what the broker's errors mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from stormproof.core.clock import Clock
from stormproof.core.errors import Json, MissingRight, StoreUnavailable, StormproofError, UsageError
from stormproof.core.extras import required
from stormproof.core.message import storable_text

TIMEOUT_S: Final = 10.0
HEARTBEAT_S: Final = 600
"""The client answers heartbeats only while it is asked for messages: a batch may take longer than the broker's 60 s."""
PREFETCH_MAX: Final = 65_535
_WAIT_S: Final = 2.0
"""How long messages that the broker has, and that are ours to have, may take to arrive."""
_STEP_S: Final = 0.005
_OFFSET: Final = "x-stream-offset"


class Arrived(NamedTuple):
    """One delivery."""

    tag: int
    payload: bytes
    message_id: str | None
    headers: Mapping[str, Any]


class Consumer:
    """Consumes one queue. After an error it is of no use any more: the broker delivers again what was not confirmed."""

    def __init__(self, url: str, queue: str, prefetch: int, where: str, clock: Clock) -> None:
        self._pika = required("pika", "rabbitmq", where)
        self._queue = queue
        self._prefetch = min(prefetch, PREFETCH_MAX)
        self._where = where
        self._clock = clock
        self._arrived: deque[Arrived] = deque()
        self._unconfirmed: dict[int, None] = {}
        self._cancelled = False
        parameters = self._parameters(url)
        with self._asked():
            self._connection: Any = self._pika.BlockingConnection(parameters)
        try:
            with self._asked():
                self._channel: Any = self._connection.channel()
                self._channel.queue_declare(queue, passive=True)
                self._first()
                self._channel.basic_qos(prefetch_count=self._prefetch)
                self._channel.add_on_cancel_callback(self._on_cancel)
                self._channel.basic_consume(queue, self._on_message)
        except StormproofError:
            self.drop()
            raise

    def _parameters(self, url: str) -> Any:
        try:
            parameters = self._pika.URLParameters(url)
            if "heartbeat" not in url:
                parameters.heartbeat = HEARTBEAT_S
            parameters.socket_timeout = TIMEOUT_S
            parameters.stack_timeout = TIMEOUT_S
            parameters.blocked_connection_timeout = TIMEOUT_S
        except (ValueError, TypeError, AttributeError):
            error = UsageError(
                f"{self._where}: the url cannot be read; write amqp://USER:PASSWORD@HOST:PORT/VHOST, amqps:// for TLS "
                "(%2F is the vhost '/')",
                queue=self._queue,
            )
            raise error from None  # the cause may show the password
        return parameters

    def _first(self) -> None:
        """Take one message by ``basic.get``: a stream refuses it, which otherwise gives only what comes from now on."""
        method, properties, body = self._channel.basic_get(self._queue)
        if method is not None:
            self._on_message(self._channel, method, properties, body)

    # ---- what the broker sends

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        del channel
        self._unconfirmed[method.delivery_tag] = None
        headers = properties.headers or {}
        self._arrived.append(Arrived(method.delivery_tag, body, properties.message_id, headers))

    def _on_cancel(self, method: Any) -> None:
        del method
        self._cancelled = True  # the queue was deleted, or its node went

    # ---- what is asked of it

    def receive(self, limit: int) -> list[Arrived]:
        """At most `limit` messages that the broker has for us now."""
        with self._asked():
            self._collect(limit)
        return [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]

    def _collect(self, limit: int) -> None:
        """Wait for messages, as long as the broker has some that are ours to have.

        It answers on one channel in order: what it sent before it counted has arrived with the count.
        """
        end_s = self._clock.monotonic_s() + _WAIT_S
        while True:
            left = self._channel.queue_declare(self._queue, passive=True).method.message_count
            self._connection.process_data_events(time_limit=0)  # hands out what has arrived meanwhile
            full = len(self._arrived) >= limit or len(self._unconfirmed) >= self._prefetch
            if not left or full or self._cancelled or self._clock.monotonic_s() > end_s:
                break
            self._connection.process_data_events(time_limit=_STEP_S)
        if self._cancelled:
            raise StoreUnavailable(f"{self._where}: the broker cancelled the consumer", queue=self._queue)

    def confirm(self, tags: Sequence[int]) -> None:
        """Confirm deliveries of this connection, and wait until the broker has heard it: at a close it forgets acks."""
        mine = {tag for tag in tags if tag in self._unconfirmed}
        if not mine:
            return
        with self._asked():
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

    def give_back(self, tags: Sequence[int]) -> None:
        """Have deliveries put back; what has arrived and was handed to nobody goes with them."""
        with self._asked():
            for tag in [*tags, *(message.tag for message in self._arrived)]:
                if self._unconfirmed.pop(tag, 0) is None:
                    self._channel.basic_nack(tag, requeue=True)
            self._arrived.clear()
            self._channel.queue_declare(self._queue, passive=True)

    def pump(self) -> None:
        """Answer heartbeats, and collect what has arrived."""
        with self._asked():
            self._connection.process_data_events(time_limit=0)

    def drop(self) -> None:
        """Close the connection; the broker delivers again what was not confirmed."""
        with suppress(self._pika.exceptions.AMQPError, OSError, AttributeError):  # it is closed, or was never opened
            self._connection.close()

    # ---- errors

    @contextmanager
    def _asked(self) -> Generator[None]:
        errors = self._pika.exceptions
        try:
            yield
        except (errors.ProbableAuthenticationError, errors.AuthenticationError) as error:
            raise MissingRight(
                f"{self._where}: the broker refuses user or password; give the right ones in url", queue=self._queue
            ) from error
        except errors.ProbableAccessDeniedError as error:
            raise self._refused(530, storable_text(str(error), 500)) from error
        except (errors.ChannelClosedByBroker, errors.ConnectionClosedByBroker) as error:
            raise self._refused(error.reply_code, storable_text(str(error.reply_text), 500)) from error
        except (errors.AMQPError, OSError) as error:
            text = storable_text(str(error) or type(error).__name__, 500)
            raise StoreUnavailable(f"{self._where}: {text}", queue=self._queue) from error

    def _refused(self, code: int, text: str) -> StormproofError:
        details: dict[str, Json] = {"queue": self._queue, "code": code}
        if code == 404 and "down" not in text:
            return UsageError(
                f"{self._where}: the broker has no such queue ({text}); declare it, for example: rabbitmqadmin declare "
                f"queue name={self._queue} durable=true",
                **details,
            )
        if code == 403:
            return MissingRight(
                f"{self._where}: {text}; as an administrator: rabbitmqctl set_permissions -p VHOST USER '' '' "
                f"'^{self._queue}$' (VHOST and USER are those of the url)",
                **details,
            )
        if code == 540:
            return UsageError(
                f"{self._where}: it is a stream, which this source does not read ({text}); name a classic or a quorum "
                "queue, for example one that is bound to the same exchange",
                **details,
            )
        if code in (405, 530):
            return UsageError(f"{self._where}: the broker refuses to have it read: {text}", **details)
        return StoreUnavailable(f"{self._where}: the broker closed the channel: {code} {text}", **details)
