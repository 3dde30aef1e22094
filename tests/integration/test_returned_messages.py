"""Messages that go back with a failed one, in real queues: found by their ids, never counted, told apart by the audit."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from support.joins import PAYLOADS, pairs
from support.queues import prepared_database, put
from support.verdicts import traces_of, verified

from stormproof import PostgresQueue, PostgresSink, Topology
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.message import message

pytestmark = pytest.mark.postgres


def source(queue: str, database: Database) -> PostgresQueue:
    return PostgresQueue(queue, database=database, max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)


@pytest.mark.parametrize("queues", [[PAYLOADS], [PAYLOADS[::2], PAYLOADS[1::2]]], ids=["one queue", "two spouts"])
def test_returned_messages_are_found_in_their_queues_and_told_from_failed_ones(
    queues: list[list[bytes]], database: Database, tmp_path: Path
) -> None:
    prepared_database(database)
    topology = Topology("join")
    for number, payloads in enumerate(queues):
        put(database, f"q{number}", payloads)
    made = pairs(topology, *(source(f"q{number}", database) for number in range(len(queues))))
    topology.sink(PostgresSink("pairs", database=database), made)
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(tmp_path))
    statistics = topology.run("exactly-once", engine="inline", until_idle=True, settings=settings)
    with connect(database, application_name="tests") as connection:
        words = connection.execute("select word from pairs").fetchall()
        waiting = connection.execute("select count(*) from stormproof.pending_retry").fetchall()
        dead = connection.execute(
            "select convert_from(payload, 'utf8'), times_failed from stormproof.dead_letter"
        ).fetchall()
    assert sorted(words) == [("c",), ("d+e",)]
    assert sorted(dead) == [("x b", 2), ("x bad", 2)]
    assert waiting == [(0,)]
    assert statistics.failed == 4
    assert statistics.returned >= 1
    assert verified("join", database).clean
    engine = sa.create_engine(database.sqlalchemy_url)
    try:
        (innocent,) = [one for one in traces_of(AuditLedger(engine), "join").values() if not one.failures]
        told = message(AuditLedger(engine), "join", innocent.message)
    finally:
        engine.dispose()
    assert "with which it shares a tuple" in told.returned[0].error
    assert "ValueError: a bad pair" in told.returned[0].error
    assert told.openings[0].returned
    assert told.end.kind.value == "committed"
