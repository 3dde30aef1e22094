"""A queue of a RabbitMQ broker: how it is reached, and what the broker's errors mean."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from stormproof.core.base.dataset import DatasetName, at_server
from stormproof.core.base.errors import Json, MissingRight, StoreUnavailable, StormproofError, UsageError
from stormproof.core.base.machine_faults import required
from stormproof.core.base.message import storable_text

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
