"""A real Kafka broker: one node, on loopback, with its data in a folder of its own."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import shutil
import subprocess
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from support.brokers import Broker, free_port, running, until

JARS: Final = Path(__file__).parents[3] / ".brokers" / "kafka"
READY_S: Final = 90

_PROPERTIES: Final = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}{listeners}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}{advertised}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT{protocols}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
log.retention.check.interval.ms=500
log.initial.task.delay.ms=500
log.cleaner.backoff.ms=200
file.delete.delay.ms=100
num.network.threads=2
num.io.threads=2
"""


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """The session's own broker, running. Tests that restart one take `own_kafka`."""
    with running(KafkaBroker, tmp_path_factory) as broker:
        yield broker


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker of the module's own, which its tests may kill and start again."""
    with running(KafkaBroker, tmp_path_factory) as broker:
        yield broker


class KafkaBroker(Broker):
    """The broker's process; it keeps its ports and its data when it is started again."""

    NAME: ClassVar[str] = "Kafka"
    INSTALL: ClassVar[str] = "apt-get install maven openjdk-17-jre-headless && make setup"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._controller = free_port()
        self._admin: Any = None

    @classmethod
    def missing(cls) -> str | None:
        """Java, Kafka's jars, or the client."""
        if shutil.which("java") is None:
            return "java"
        if not list(JARS.glob("kafka_2.13-*.jar")):
            return f"Kafka (its jars, in {JARS.parent.name}/{JARS.name})"
        return None if importlib.util.find_spec("confluent_kafka") else "confluent-kafka"

    def prepare(self) -> None:
        """Write the settings, and format the folder."""
        more = self.listeners()
        properties = _PROPERTIES.format(
            port=self.port,
            controller=self._controller,
            data=self.folder / "data",
            listeners="".join(f",{name}://127.0.0.1:{port}" for name, (_, port, _) in more.items()),
            advertised="".join(f",{name}://127.0.0.1:{port}" for name, (_, _, port) in more.items()),
            protocols="".join(f",{name}:{protocol}" for name, (protocol, _, _) in more.items()),
        )
        self._properties.write_text(properties + self.settings())
        (self.folder / "log4j2.properties").write_text("status=error\nrootLogger.level=off\n")
        drawn = uuid.uuid4().bytes
        id_ = base64.urlsafe_b64encode(bytes([drawn[0] & 0x7F]) + drawn[1:]).decode().rstrip("=")  # "-..." is an option
        command = self._java("kafka.tools.StorageTool", "format", "-t", id_, "-c", str(self._properties))
        subprocess.run(command, check=True, capture_output=True, timeout=READY_S)

    def listeners(self) -> dict[str, tuple[str, int, int]]:
        """Further listeners by name: protocol, port, and the port that clients are told."""
        return {}

    def settings(self) -> str:
        """Further settings, a line each."""
        return ""

    def command(self) -> Sequence[str]:
        """The broker and its controller in one process."""
        return self._java("kafka.Kafka", str(self._properties))

    def start(self) -> None:
        """With another client than before: one that knows of a later leader gets no answer of a broker that was set back."""
        self._admin = None
        super().start()

    def answers(self) -> bool:
        """Whether it knows of itself."""
        from confluent_kafka import KafkaException

        try:
            return bool(self.admin().list_topics(timeout=0.5).brokers)
        except KafkaException:
            return False

    @property
    def servers(self) -> str:
        """For `bootstrap.servers`."""
        return f"127.0.0.1:{self.port}"

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def _java(self, *command: str) -> list[str]:
        return [
            *("java", "-Xmx512m", "-Xms96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}",
            *("-cp", f"{JARS}/*", *command),
        ]

    # ---- what tests do with it

    def admin(self) -> Any:
        """A client that asks and changes."""
        from confluent_kafka.admin import AdminClient

        if self._admin is None:
            self._admin = AdminClient(
                {"bootstrap.servers": self.servers, "log_level": 0, "reconnect.backoff.max.ms": 200}
            )
        return self._admin

    def topic(self, partitions: int = 1, name: str | None = None, **config: str) -> str:
        """A new topic; `cleanup_policy="compact"` stands for ``cleanup.policy``."""
        name = name or f"t{uuid.uuid4().hex[:10]}"
        settings = {key.replace("_", "."): value for key, value in config.items()}
        wait_for(self.admin().create_topics([_admin_api().NewTopic(name, partitions, 1, config=settings)]))
        until(lambda: self._partitions(name) == partitions, f"topic {name} does not come")
        return name

    def _partitions(self, name: str) -> int:
        about = self.admin().list_topics(name, timeout=5).topics[name]
        return 0 if about.error else sum(one.leader >= 0 for one in about.partitions.values())

    def delete(self, topic: str) -> None:
        """Delete a topic, and wait until it is gone."""
        wait_for(self.admin().delete_topics([topic]))
        until(lambda: topic not in self.admin().list_topics(timeout=5).topics, f"topic {topic} does not go")

    def grow(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions."""
        wait_for(self.admin().create_partitions([_admin_api().NewPartitions(topic, partitions)]))
        until(lambda: self._partitions(topic) == partitions, f"topic {topic} does not grow")

    def remove_below(self, topic: str, partition: int, offset: int) -> None:
        """As retention does: the partition's messages below an offset are gone."""
        from confluent_kafka import TopicPartition

        wait_for(self.admin().delete_records([TopicPartition(topic, partition, offset)]))

    def producer(self, **settings: Any) -> Any:
        """A producer that sends at once."""
        from confluent_kafka import Producer

        given = {key.replace("_", "."): value for key, value in settings.items()}
        return Producer({"bootstrap.servers": self.servers, "linger.ms": 0, "log_level": 0, **given})

    def put(self, topic: str, payloads: Iterable[bytes], partition: int = 0, **message: Any) -> None:
        """Append messages to a partition; they are there when this returns."""
        producer = self.producer()
        for payload in payloads:
            producer.produce(topic, payload, partition=partition, **message)
        assert producer.flush(READY_S) == 0

    @contextmanager
    def transaction(self, name: str | None = None, *, commit: bool = True) -> Generator[Any]:
        """A producer inside a transaction, which is committed or aborted at the end."""
        producer = self.producer(transactional_id=name or uuid.uuid4().hex)
        producer.init_transactions(READY_S)
        producer.begin_transaction()
        yield producer
        producer.flush(READY_S)
        (producer.commit_transaction if commit else producer.abort_transaction)(READY_S)

    def until_stable(self, topic: str, partitions: int) -> None:
        """Wait until no transaction is open: markers are written a moment after a producer was told of its end."""
        from confluent_kafka import IsolationLevel, TopicPartition

        wanted = {TopicPartition(topic, number): _admin_api().OffsetSpec.latest() for number in range(partitions)}

        def ends(level: Any) -> list[int]:
            found = self.admin().list_offsets(wanted, isolation_level=level, request_timeout=READY_S)
            return [int(one.result().offset) for one in found.values()]

        until(
            lambda: ends(IsolationLevel.READ_COMMITTED) == ends(IsolationLevel.READ_UNCOMMITTED),
            f"a transaction stays open in {topic}",
        )

    def committed(self, group: str, topic: str, partitions: int = 1) -> list[int]:
        """What a consumer group has committed, by partition."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": group, "log_level": 0})
        found = consumer.committed([TopicPartition(topic, number) for number in range(partitions)], timeout=30)
        consumer.close()
        return [one.offset for one in found]

    def configure(self, topic: str, **config: str) -> None:
        """Change a topic's settings, named as by `topic`."""
        api = _admin_api()
        how = api.AlterConfigOpType.SET
        entries = [
            api.ConfigEntry(name.replace("_", "."), value, incremental_operation=how) for name, value in config.items()
        ]
        wait_for(
            self.admin().incremental_alter_configs(
                [api.ConfigResource(api.ResourceType.TOPIC, topic, incremental_configs=entries)]
            )
        )

    def end(self, topic: str, partition: int = 0, spec: str = "latest") -> int:
        """The offset behind a partition's last message; or with the spec ``earliest``, of its first."""
        from confluent_kafka import KafkaException, TopicPartition

        found = list[int]()

        def is_told() -> bool:
            asked = {TopicPartition(topic, partition): getattr(_admin_api().OffsetSpec, spec)()}
            (answer,) = self.admin().list_offsets(asked).values()
            with suppress(KafkaException):  # a broker that has just started does not lead yet
                found.append(int(answer.result().offset))
            return bool(found)

        until(is_told, f"the {spec} offset of topic {topic} is not told")
        return found[0]


def wait_for(futures: Mapping[Any, Any]) -> None:
    """Until all that was asked for is done."""
    for future in futures.values():
        future.result(READY_S)


def _admin_api() -> Any:
    """The library's module for administrators, whose types are not all there."""
    return importlib.import_module("confluent_kafka.admin")
