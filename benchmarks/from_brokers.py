"""P16: messages of 100 bytes from RabbitMQ, Redis and NATS into a Delta table exactly once, beside a plain client's loop."""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.workbench import Workbench, require_total
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Source
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.source.nats import NatsSource
from stormproof.core.source.rabbitmq import RabbitMQSource
from stormproof.core.source.redis_streams import RedisStreamSource
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.trident.topology.stream import Topology

if TYPE_CHECKING:
    from support.brokers import Broker

ROOT: Final = Path(__file__).parents[1]
BATCH: Final = 10_000
BATCHES: Final = 2
"""Of one run, both sides."""
MESSAGE_BYTES: Final = 100

T = TypeVar("T")
Write = Callable[[Sequence[bytes]], None]


class Rival(ABC):
    """A server, and the plain loop of its users: read a batch, write it, confirm it. `queues`: ours, and the loop's own."""

    NAME: ClassVar[str]

    def __init__(self, server: Any) -> None:
        self.server = server

    @staticmethod
    @abstractmethod
    def kind() -> type[Broker]:
        """The server that the tests start, too."""

    @abstractmethod
    def source(self, queue: str) -> Source:
        """Ours."""

    @abstractmethod
    def make(self, queue: str) -> None:
        """Make an empty queue."""

    @abstractmethod
    def put(self, queue: str, payloads: Sequence[bytes]) -> None:
        """Put messages into it, as many at once as the server takes."""

    @abstractmethod
    def loop(self, queue: str, write: Write) -> AbstractContextManager[Callable[[], None]]:
        """A connected client, and what takes one batch on."""


class RabbitMQ(Rival):
    """pika: a consumer with a prefetch of a batch, one ack for all that came before it."""

    NAME = "rabbitmq"

    @staticmethod
    def kind() -> type[Broker]:
        from support.brokers.rabbitmq_server import RabbitMQServer

        return RabbitMQServer

    def source(self, queue: str) -> Source:
        return RabbitMQSource(queue, url=self.server.url)

    def make(self, queue: str) -> None:
        self.server.declare(queue)

    def put(self, queue: str, payloads: Sequence[bytes]) -> None:
        import pika

        with closing(self.server.connect()) as connection:
            channel = connection.channel()
            for payload in payloads:
                properties = pika.BasicProperties(delivery_mode=2, message_id=payload[:9].decode())
                channel.basic_publish("", queue, payload, properties)
            channel.queue_declare(
                queue, passive=True
            )  # answered behind all of them; some may be with a consumer already

    @contextmanager
    def loop(self, queue: str, write: Write) -> Generator[Callable[[], None]]:
        with closing(self.server.connect()) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=BATCH)
            came: list[tuple[int, bytes]] = []
            channel.basic_consume(queue, lambda _, method, __, body: came.append((method.delivery_tag, body)))

            def once() -> None:
                while len(came) < BATCH:
                    connection.process_data_events(time_limit=1)
                write([body for _, body in came])
                last = came[-1][0]
                came.clear()
                channel.basic_ack(last, multiple=True)
                channel.queue_declare(queue, passive=True)  # it has read the confirmation

            yield once


class Redis(Rival):
    """redis-py: XREADGROUP of a batch, one XACK."""

    NAME = "redis"

    @staticmethod
    def kind() -> type[Broker]:
        from support.brokers.redis_server import RedisServer

        return RedisServer

    def source(self, queue: str) -> Source:
        return RedisStreamSource(queue, url=self.server.url)

    def make(self, queue: str) -> None:
        with self.server.client() as client:
            client.xgroup_create(queue, "plain", id="0", mkstream=True)

    def put(self, queue: str, payloads: Sequence[bytes]) -> None:
        self.server.put(queue, payloads)

    @contextmanager
    def loop(self, queue: str, write: Write) -> Generator[Callable[[], None]]:
        with self.server.client() as client:

            def once() -> None:
                ((_, entries),) = client.xreadgroup("plain", "one", {queue: ">"}, count=BATCH)
                require_total(len(entries), BATCH, "what was read")
                write([fields[b"payload"] for _, fields in entries])
                client.xack(queue, "plain", *(id_ for id_, _ in entries))

            yield once


class Nats(Rival):
    """nats-py: a pull of a batch by a durable consumer that acks all before; an ack of the last, and its answer."""

    NAME = "nats"

    @staticmethod
    def kind() -> type[Broker]:
        from support.brokers.nats_server import NatsServer

        return NatsServer

    def source(self, queue: str) -> Source:
        return NatsSource(queue, url=self.server.url)

    def make(self, queue: str) -> None:
        self.server.make(queue)

    def put(self, queue: str, payloads: Sequence[bytes]) -> None:
        import nats

        async def put() -> None:
            connection = await nats.connect(self.server.url)
            jetstream = connection.jetstream()
            wanted = (await jetstream.stream_info(queue)).state.last_seq + len(payloads)
            for payload in payloads:
                await connection.publish(f"{queue}.a", payload)
            await connection.flush()
            while (await jetstream.stream_info(queue)).state.last_seq < wanted:
                await asyncio.sleep(0.01)
            await connection.close()

        asyncio.run(put())

    @contextmanager
    def loop(self, queue: str, write: Write) -> Generator[Callable[[], None]]:
        import nats
        from nats.js.api import AckPolicy, ConsumerConfig

        running = asyncio.new_event_loop()

        def ask(what: Coroutine[Any, Any, T]) -> T:
            return running.run_until_complete(what)

        connection = ask(nats.connect(self.server.url))
        config = ConsumerConfig(ack_policy=AckPolicy.ALL, max_ack_pending=-1)
        pull = connection.jetstream().pull_subscribe(f"{queue}.>", "plain", stream=queue, config=config)
        subscription = ask(pull)

        def once() -> None:
            came: list[Any] = []
            while len(came) < BATCH:
                came += ask(subscription.fetch(BATCH - len(came), timeout=5))
            write([message.data for message in came])
            ask(came[-1].ack_sync())

        try:
            yield once
        finally:
            ask(connection.close())
            running.close()


class Supply:
    """Numbered messages in a queue of its own for each side, put there before they are measured."""

    def __init__(self, rival: Rival) -> None:
        self._rival = rival
        self.put: dict[str, int] = {}

    def fill(self, queue: str) -> None:
        """Have the next run's messages there."""
        first = self.put.get(queue, 0)
        self.put[queue] = first + BATCH * BATCHES
        numbers = range(first, self.put[queue])
        self._rival.put(queue, [b"%09d " % number + b"x" * (MESSAGE_BYTES - 10) for number in numbers])


@contextmanager
def server_of(kind: type[Rival], folder: Path) -> Generator[Rival]:
    """A running server."""
    folder.mkdir()
    server = kind.kind()(folder)
    server.prepare()
    try:
        server.start()
        yield kind(server)
    finally:
        server.kill()


@contextmanager
def against_loop(bench: Workbench, kind: type[Rival]) -> Generator[Case]:
    """Both sides in this process alone, by the same writer of Delta."""
    table, plain = bench.path("lines"), bench.path("plain")
    ours_queue, their_queue = bench.unused("ours"), bench.unused("theirs")

    def write(payloads: Sequence[bytes]) -> None:
        write_deltalake(
            str(plain), pa.table({"line": pa.array(payloads, pa.binary()).cast(pa.string())}), mode="append"
        )

    with server_of(kind, bench.path(kind.NAME)) as rival, closing(InlineEngine(1)) as engine:
        supply = Supply(rival)
        for queue in (ours_queue, their_queue):
            rival.make(queue)
        topology = Topology(bench.unused("main"))
        topology.stream("lines", rival.source(ours_queue)).into(DeltaSink(table, name="lake"))
        with (
            bench.stepping(topology, Guarantee.EXACTLY_ONCE, BATCH, engine=engine) as stepper,
            rival.loop(their_queue, write) as once,
        ):

            def measured(queue: str, step: Callable[[], object]) -> float:
                supply.fill(queue)
                started_s = time.perf_counter()
                for _ in range(BATCHES):
                    step()
                return BATCH * BATCHES / (time.perf_counter() - started_s)

            yield Case(
                key=f"P16-{kind.NAME}",
                title=f"messages of 100 bytes from {kind.NAME} into a Delta table, exactly-once, in batches of {BATCH:,}; "
                "its client's loop that reads a batch, writes it by delta-rs and confirms it",
                unit=Unit.MESSAGES,
                goal=Goal(ratio=0.7),
                ours=lambda: measured(ours_queue, stepper.all_of),
                theirs=lambda: measured(their_queue, once),
                warm_ups=1,
            )
    for path, queue in ((table, ours_queue), (plain, their_queue)):
        require_total(DeltaTable(path).to_pyarrow_dataset().count_rows(), supply.put[queue], path.name)


def p16(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P16; a server that cannot be had is left out by name."""
    if (tests := str(ROOT / "tests")) not in sys.path:
        sys.path.append(tests)
    for kind in (RabbitMQ, Redis, Nats):
        server = kind.kind()
        if (missing := server.missing()) is not None:
            sys.stderr.write(f"P16-{kind.NAME} is left out: {missing} is not installed; install it: {server.INSTALL}\n")
            continue
        yield against_loop(bench, kind)
