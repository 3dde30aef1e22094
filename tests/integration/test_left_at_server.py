"""What a server that delivers has not delivered yet: in a source's backlog, in `status`, and in the ledger's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from support.brokers.harness import BrokerHarness, opened
from support.brokers.journal_lives import TOPOLOGY, Lives
from support.brokers.kestrel_broker import KestrelHarness
from support.brokers.lives import Killed
from support.brokers.nats_server import NatsHarness
from support.brokers.rabbitmq_server import RabbitMQHarness
from support.brokers.redis_server import RedisHarness, RedisServer
from support.queues import prepared_database

from stormproof.core.contract.source import Lease
from stormproof.core.postgres.database import Database, connect
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.source import evidence_of
from stormproof.trident.audit.status import status
from stormproof.trident.cli.reports import _topology_text  # pyright: ignore[reportPrivateUsage]
from stormproof.trident.telemetry import catalogue as m
from stormproof.trident.telemetry.exposition import ledger_figures

pytestmark = pytest.mark.postgres

A, B = Lease("a", 1), Lease("b", 1)
FIXTURES: Final = {"redis": "redis_server", "nats": "nats_server", "rabbitmq": "rabbitmq", "kestrel": "kestrel"}
SOURCES: Final = ["redis", "nats", "kestrel", pytest.param("rabbitmq", marks=pytest.mark.broker("rabbitmq"))]


@pytest.fixture(params=SOURCES)
def harness(request: pytest.FixtureRequest, database: Database) -> Iterator[BrokerHarness]:
    server: Any = request.getfixturevalue(FIXTURES[request.param])
    given: tuple[Any, str] = prepared_database(database), request.node.name
    harness: BrokerHarness
    match request.param:
        case "redis":
            harness = RedisHarness(*given, server=server)
        case "nats":
            harness = NatsHarness(*given, server=server)
        case "rabbitmq":
            harness = RabbitMQHarness(*given, server=server)
        case _:
            harness = KestrelHarness(*given, servers=[server])
    yield harness
    harness.close()


def test_what_the_server_has_left_is_known_from_each_opening(harness: BrokerHarness) -> None:
    source = harness.view(prefetch=3)
    assert evidence_of(source).backlog().at_server is None, "nobody has asked yet"
    harness.put([b"%d" % n for n in range(10)])
    assert len(opened(source, A)) == 3
    assert source.backlog().at_server == 7
    assert evidence_of(source).backlog().at_server == 7
    source.confirm(A)
    wide = harness.view(prefetch=100, epoch=2)
    source.drop_connections()
    while opened(wide, lease := Lease("b", 2)):
        wide.confirm(lease)
    assert wide.backlog().at_server == 0
    assert evidence_of(wide).backlog().at_server == 0


@pytest.fixture
def redis(request: pytest.FixtureRequest, database: Database, redis_server: RedisServer) -> Iterator[RedisHarness]:
    harness = RedisHarness(prepared_database(database), request.node.name, server=redis_server)
    yield harness
    harness.close()


def shown(database: Database, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, object]]:
    """What `status` prints of the topology, and the backlog among the ledger's metrics, by place."""
    engine = sa.create_engine(database.sqlalchemy_url)
    try:
        ledger = AuditLedger(engine)
        _topology_text(status(ledger, TOPOLOGY).topologies[0])
        samples = ledger_figures(ledger, (TOPOLOGY,), datetime.now(UTC))
    finally:
        engine.dispose()
    places: dict[str, object] = {one.labels[-1]: one.value for one in samples if one.metric is m.LEDGER_BACKLOG}
    return capsys.readouterr().out, places


def dies_with_batch(number: int) -> Callable[[str], None]:
    """Ends the driver once it has opened so many batches."""
    left = number

    def reached(name: str) -> None:
        nonlocal left
        left -= name == "open.after"
        if left == 0:
            raise Killed

    return reached


def test_status_and_metrics_show_it_and_call_unknown_what_the_server_does_not_tell(
    redis: RedisHarness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = Lives(redis, redis.database, tmp_path, options={"prefetch": 3})
    lives.put(10)
    lives.live(dies_with_batch(1))
    text, places = shown(redis.database, capsys)
    assert "at the server, not received when messages were last opened: 7 messages" in text, text
    assert places["at_server"] == 7
    with redis.server.client() as client:
        last = client.xrevrange(redis.name, count=2)[-1][0]
        client.xdel(redis.name, last)
    with connect(
        redis.database, application_name="tests"
    ) as connection:  # as of a group whose reads were never counted
        connection.execute(
            "update stormproof.pending_subscription set position = jsonb_set(position, '{counted,0}', '-1')"
        )
    lives.live(dies_with_batch(2), prefetch=5)  # the first is the one before, opened again
    text, places = shown(redis.database, capsys)
    assert "at the server, not received when messages were last opened: not known" in text
    assert "at_server" not in places
    lives.settle()
    assert sum(lives.in_postgres().values()) == 9
