"""A RabbitMQ node on loopback, of Debian's package; and a harness for the suite that every source must pass."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

import pika
import pika.exceptions
import pytest

from stormproof import RabbitMQSource, RabbitMQStreamSource
from stormproof.testing import PendingSourceHarness
from support.brokers import WAIT_S, Broker, free_port, listens, running, until
from support.brokers.harness import BrokerHarness

PROGRAM: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # /usr/sbin's refuses most users
_numbers = itertools.count(1)


class RabbitMQServer(Broker):
    """One node, with a name server (epmd) of its own. It takes some 6 seconds to start: one a session."""

    NAME: ClassVar[str] = "RabbitMQ"
    INSTALL: ClassVar[str] = "apt-get install rabbitmq-server"

    def __init__(self, folder: Path, *, managed: bool = False, **settings: int) -> None:
        """`settings` are those of the application ``rabbit``; `managed`: with a management interface."""
        super().__init__(folder)
        self._management_port = free_port() if managed else None
        self._settings = settings
        self._epmd_port = free_port()
        self._distribution_port = free_port()

    @classmethod
    def missing(cls) -> str | None:
        return None if PROGRAM.exists() else "rabbitmq-server"

    def prepare(self) -> None:
        (self.folder / "home").mkdir()
        managed = self._management_port is not None
        (self.folder / "enabled_plugins").write_text("[rabbitmq_management]." if managed else "[].")
        settings = ", ".join(f"{{{name}, {value}}}" for name, value in self._settings.items())
        (self.folder / "advanced.config").write_text(f"[{{rabbit, [{settings}]}}].\n")
        more = f"management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {self._management_port}\n" if managed else ""
        (self.folder / "rabbitmq.conf").write_text(f"log.console = true\nlog.file = false\n{more}")

    def command(self) -> Sequence[str]:
        return [str(PROGRAM)]

    def environment(self) -> Mapping[str, str]:
        folder = str(self.folder)
        return {
            "HOME": f"{folder}/home",
            "RABBITMQ_NODENAME": f"stormproof{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1 +sbwt none",
            "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{folder}/log.d",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        }

    def answers(self) -> bool:
        if not listens(self.port):
            return False
        try:
            self.connect().close()
        except pika.exceptions.AMQPError:
            return False
        return True

    def leave(self) -> None:
        """End the name server, which outlives its node; it refuses until it has seen that the node is gone."""
        until(self._names_ended, "epmd does not end")

    def _names_ended(self) -> bool:
        environment = {**os.environ, **self.environment()}
        subprocess.run(["epmd", "-kill"], env=environment, check=False, capture_output=True, timeout=10)
        return not listens(self._epmd_port)

    # ---- its queues

    @property
    def url(self) -> str:
        return self.url_at(self.port)

    @property
    def management(self) -> str:
        """The URL of the management interface."""
        return f"http://127.0.0.1:{self._management_port}"

    def url_at(self, port: int) -> str:
        return f"amqp://guest:guest@127.0.0.1:{port}/%2F"

    def connect(self) -> Any:
        return pika.BlockingConnection(pika.URLParameters(self.url))

    def declare(self, queue: str, kind: str = "classic", **more: object) -> None:
        """`more`: arguments of the queue, with underscores."""
        arguments = {"x-queue-type": kind, **{name.replace("_", "-"): value for name, value in more.items()}}
        with self.connect() as connection:
            connection.channel().queue_declare(queue, durable=True, arguments=arguments)

    def until_kept(self, queue: str, system: str = "quorum") -> None:
        """Wait until a quorum queue would be there after a kill: the broker writes its name down up to a second later."""
        names = list(self.folder.glob(f"mnesia/*/{system}/*/names.dets"))
        until(lambda: any(queue.encode() in path.read_bytes() for path in names), f"{queue} is not on disk", 20)

    def delete(self, queue: str) -> None:
        with self.connect() as connection:
            connection.channel().queue_delete(queue)

    def put(
        self,
        queue: str,
        payloads: Sequence[bytes],
        ids: Sequence[str | None] = (),
        headers: Mapping[str, Any] | None = None,
    ) -> None:
        given = list(ids) or [f"m{next(_numbers)}" for _ in payloads]
        with self.connect() as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for payload, id_ in zip(payloads, given, strict=True):
                properties = pika.BasicProperties(delivery_mode=2, message_id=id_, headers=dict(headers or {}))
                channel.basic_publish("", queue, payload, properties, mandatory=True)

    def until_up(self, queue: str) -> None:
        """Wait until a queue is served, which may be a moment after its node is."""
        until(lambda: self._is_up(queue), f"{queue} is not served")

    def _is_up(self, queue: str) -> bool:
        with self.connect() as connection:
            try:
                connection.channel().queue_declare(queue, passive=True)
            except pika.exceptions.ChannelClosedByBroker:
                return False
        return True

    def first(self, stream: str) -> bytes:
        """The payload of the first message that a stream has."""
        with self.connect() as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=1)
            consumed = channel.consume(stream, arguments={"x-stream-offset": "first"}, inactivity_timeout=WAIT_S)
            _, _, payload = next(consumed)
        assert isinstance(payload, bytes), f"stream {stream} has no message"
        return payload

    def ready(self, queue: str) -> int:
        """Messages that nobody was given."""
        with self.connect() as connection:
            count: int = connection.channel().queue_declare(queue, passive=True).method.message_count
        return count

    def consumers(self, queue: str) -> int:
        """Consumers that the broker knows of."""
        with self.connect() as connection:
            found: int = connection.channel().queue_declare(queue, passive=True).method.consumer_count
        return found

    def until_left(self, queue: str, count: int) -> None:
        """Wait until so many messages are ready."""
        until(lambda: self.ready(queue) == count, f"{self.ready(queue)} messages in {queue}, not {count}", 20)


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQServer]:
    """One node for the session; a test takes a queue of its own."""
    with running(RabbitMQServer, tmp_path_factory) as server:
        yield server


@dataclass
class RabbitMQHarness(BrokerHarness):
    """Over a queue of the test's own."""

    server: RabbitMQServer = field(kw_only=True)
    queue_type: str = field(default="classic", kw_only=True)
    options: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    def __post_init__(self) -> None:
        self.server.declare(self.name, self.queue_type)

    def put(self, payloads: Sequence[bytes]) -> None:
        self.server.put(self.name, payloads)

    @property
    def confirms_by(self) -> bytes:
        return b"\x00\x3c\x00\x50"  # of the class basic, the method ack

    def left(self) -> int:
        return self.server.ready(self.name)

    def deliver_again(self) -> None:
        """It cannot: what was confirmed is gone."""

    def made(self, **options: Any) -> RabbitMQSource:
        given: dict[str, Any] = {
            "url": self.server.url,
            "database": self.database,
            "max_attempts": self.max_attempts,
            "rng": Random(1),
        }
        return RabbitMQSource(self.name, **{**given, **self.options, **options})


@dataclass
class RabbitMQStreamHarness(PendingSourceHarness[RabbitMQStreamSource]):
    """Over a stream of the test's own, which `name` is the name of, too."""

    exact_bytes = False  # retries have what the broker says of a message, too

    server: RabbitMQServer = field(kw_only=True)
    options: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    arguments: dict[str, object] = field(default_factory=dict[str, object], kw_only=True)

    def __post_init__(self) -> None:
        self.declare()

    def declare(self) -> None:
        self.server.declare(self.name, "stream", **self.arguments)

    def put(self, payloads: Sequence[bytes]) -> None:
        self.server.put(self.name, payloads)

    def made(self, **options: Any) -> RabbitMQStreamSource:
        given: dict[str, Any] = {"max_attempts": self.max_attempts, "rng": Random(1), **self.options, **options}
        return RabbitMQStreamSource(self.name, url=self.server.url, database=self.database, **given)
