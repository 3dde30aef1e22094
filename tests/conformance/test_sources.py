"""Our own sources pass the suite that every source must pass (`stormproof.testing.SourceConformance`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.brokers.kafka import KafkaBroker
from support.brokers.kestrel_broker import KestrelHarness, KestrelServer
from support.brokers.nats_server import NatsHarness, NatsServer
from support.brokers.rabbitmq_server import RabbitMQHarness, RabbitMQServer, RabbitMQStreamHarness
from support.brokers.redis_server import RedisHarness, RedisServer
from support.kafka_source import GapsHarness, KafkaHarness
from support.queues import prepared_database
from support.redelivering import ToyHarness
from support.source_harness import FileHarness, IteratorHarness, MemoryHarness, PostgresHarness

from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.files.formats import Format
from stormproof.testing import SourceConformance, SourceHarness


class TestMemorySource(SourceConformance):
    """The source in memory."""

    @pytest.fixture
    def harness(self) -> SourceHarness:
        return MemoryHarness()


class TestIteratorSource(SourceConformance):
    """The adapter for a user's own client."""

    @pytest.fixture
    def harness(self) -> Iterator[SourceHarness]:
        harness = IteratorHarness()
        yield harness
        harness.close()


@pytest.mark.postgres
class TestPostgresQueue(SourceConformance):
    """The queue in Postgres."""

    @pytest.fixture
    def harness(self, database: Database) -> Iterator[SourceHarness]:
        harness = PostgresHarness(prepared_database(database))
        yield harness
        harness.close()


@pytest.fixture(scope="module")
def shared_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """One database for all cases that keep apart by their source's name."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create database test_file_sources template template0")
    yield prepared_database(postgres.database.with_name("test_file_sources"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"drop database test_file_sources with (force)")


@pytest.mark.postgres
class TestFileSource(SourceConformance):
    """Files, of each kind: JSON lines are read as text is."""

    @pytest.fixture(params=["parquet", "text"])
    def harness(
        self, request: pytest.FixtureRequest, shared_database: Database, tmp_path: Path
    ) -> Iterator[SourceHarness]:
        format_: Format = request.param
        harness = FileHarness(shared_database, request.node.name, tmp_path, format_)
        yield harness
        harness.close()


@pytest.mark.postgres
class TestRedeliveringSource(SourceConformance):
    """A journal of what a server delivered that can only redeliver."""

    @pytest.fixture
    def harness(self, request: pytest.FixtureRequest, shared_database: Database) -> Iterator[SourceHarness]:
        harness = ToyHarness(shared_database, request.node.name)
        yield harness
        harness.close()


@pytest.mark.postgres
@pytest.mark.sampled(0.2)
class TestRedisStreamSource(SourceConformance):
    """A stream of a Redis server."""

    @pytest.fixture
    def harness(
        self, request: pytest.FixtureRequest, shared_database: Database, redis_server: RedisServer
    ) -> Iterator[SourceHarness]:
        harness = RedisHarness(shared_database, request.node.name, server=redis_server)
        yield harness
        harness.close()


@pytest.mark.postgres
@pytest.mark.broker("kafka")
@pytest.mark.sampled(0.2)
class TestKafkaSource(SourceConformance):
    """Topics of a real broker: offsets without gaps, and offsets among those of transactions."""

    @pytest.fixture(params=[KafkaHarness, GapsHarness], ids=["plain", "gaps"])
    def harness(
        self, request: pytest.FixtureRequest, shared_database: Database, kafka: KafkaBroker
    ) -> Iterator[SourceHarness]:
        harness = request.param(shared_database, kafka)
        yield harness
        harness.close()


@pytest.mark.postgres
@pytest.mark.sampled(0.2)
class TestNatsSource(SourceConformance):
    """A JetStream stream of a NATS server."""

    @pytest.fixture
    def harness(
        self, request: pytest.FixtureRequest, shared_database: Database, nats_server: NatsServer
    ) -> Iterator[SourceHarness]:
        harness = NatsHarness(shared_database, request.node.name, server=nats_server)
        yield harness
        harness.close()


@pytest.mark.postgres
@pytest.mark.sampled(0.2)
class TestKestrelSource(SourceConformance):
    """Queues of a Kestrel server: without ids, and with them."""

    @pytest.fixture
    def harness(
        self, request: pytest.FixtureRequest, shared_database: Database, kestrel: KestrelServer
    ) -> Iterator[SourceHarness]:
        harness = KestrelHarness(shared_database, request.node.name, servers=[kestrel])
        yield harness
        harness.close()


@pytest.mark.postgres
@pytest.mark.broker("rabbitmq")
@pytest.mark.sampled(0.2)
class TestRabbitMQSource(SourceConformance):
    """A classic queue of a RabbitMQ broker."""

    @pytest.fixture
    def harness(
        self, request: pytest.FixtureRequest, shared_database: Database, rabbitmq: RabbitMQServer
    ) -> Iterator[SourceHarness]:
        harness = RabbitMQHarness(shared_database, request.node.name, server=rabbitmq)
        yield harness
        harness.close()


@pytest.mark.postgres
@pytest.mark.broker("rabbitmq")
@pytest.mark.sampled(0.2)
class TestRabbitMQStreamSource(SourceConformance):
    """A stream of a RabbitMQ broker."""

    @pytest.fixture
    def harness(
        self, request: pytest.FixtureRequest, shared_database: Database, rabbitmq: RabbitMQServer
    ) -> Iterator[SourceHarness]:
        harness = RabbitMQStreamHarness(shared_database, f"stream {request.node.name}", server=rabbitmq)
        yield harness
        harness.close()
