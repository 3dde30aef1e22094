"""Joins whose functions fail, in real queues: partners come again in one batch, and a poisoned one lets the others go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.databases import fresh_database
from support.queues import prepared_database, put
from support.verdicts import verified

from stormproof import PostgresQueue, PostgresSink, Topology
from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.base.message import MessageFailure
from stormproof.core.contract.source import Lease, Resolution
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.start.settings import Settings

pytestmark = pytest.mark.postgres

PAIRS = 60


class Flaky:
    """Fails once for each odd id; every time for `poison`."""

    def __init__(self, folder: Path, poison: int = -1) -> None:
        self.folder, self.poison = folder, poison

    def __call__(self, id: int, *rest: object) -> tuple[object, ...]:
        mark = self.folder / str(id)
        if id == self.poison or (id % 2 and not mark.exists()):
            mark.touch()
            raise ConnectionError("the service is away")
        return id, *rest


def queue(name: str, schema: str, database: Database) -> PostgresQueue:
    return PostgresQueue(name, schema=schema, database=database, max_attempts=3, backoff_base_s=0.05)


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_function_that_fails_once_costs_no_pair(
    place: str, in_flight: int, database: Database, tmp_path: Path
) -> None:
    prepared_database(database)
    put(database, "orders", [json.dumps({"id": i, "item": f"i{i}"}).encode() for i in range(PAIRS)])
    put(database, "payments", [json.dumps({"id": i, "cents": i}).encode() for i in range(PAIRS)])
    flaky = Flaky(tmp_path, poison=7)
    t = Topology("paid")
    orders = t.stream("orders", queue("orders", "id long, item string", database))
    payments = t.stream("payments", queue("payments", "id long, cents long", database))
    if place == "before":
        orders = orders.map(flaky, schema="id long, item string")
    paid = orders.join(payments, "id")
    if place == "behind":
        paid = paid.map(flaky, schema="id long, item string, cents long")
    paid.into(PostgresSink("paid", database=database))
    settings = Settings(
        database_url=database.adbc_uri, staging_dir=str(tmp_path / "staging"), max_batches_in_flight=in_flight
    )
    done = t.run("exactly-once", engine="inline", until_idle=True, settings=settings)
    with connect(database, application_name="tests") as connection:
        ids = [id_ for (id_,) in connection.execute("select id from paid where item is not null and cents = id")]
        waiting = connection.execute("select count(*) from stormproof.pending_retry").fetchone()
    assert sorted(ids) == [i for i in range(PAIRS) if i != 7]
    assert done.dead_letters == (1 if place == "before" else 2)
    assert waiting == (0,)
    assert verified("paid", database).clean


class Away(PostgresQueue):
    """Its database is away at every other confirm, when the other source's partners are confirmed already."""

    confirms = 0

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        assert tx is None, "this queue is in a database of its own"
        Away.confirms += 1
        if Away.confirms % 2:
            raise StoreUnavailable("the database of the payments is away")
        return super().confirm(lease, failed, tx)


def test_partners_in_two_databases_stay_together_where_one_is_away(
    postgres: EmbeddedPostgres, database: Database, tmp_path: Path
) -> None:
    prepared_database(database)
    put(database, "orders", [json.dumps({"id": i, "item": f"i{i}"}).encode() for i in range(PAIRS)])
    with fresh_database(postgres.database, "partners_payments") as second:
        prepared_database(second)
        put(second, "payments", [json.dumps({"id": i, "cents": i}).encode() for i in range(PAIRS)])
        t = Topology("paid")
        orders = t.stream("orders", queue("orders", "id long, item string", database))
        payments = Away("payments", schema="id long, cents long", database=second, max_attempts=3, backoff_base_s=0.05)
        flaky = Flaky(tmp_path, poison=7)
        paid = orders.map(flaky, schema="id long, item string").join(t.stream("payments", payments), "id", how="full")
        paid.into(PostgresSink("paid", database=database))
        staging = str(tmp_path / "staging")
        settings = Settings(database_url=database.adbc_uri, staging_dir=staging, max_batches_in_flight=3)
        t.run("exactly-once", engine="inline", until_idle=True, settings=settings)
        assert Away.confirms > 2
        with connect(database, application_name="tests") as connection:
            rows = connection.execute("select id, item, cents from paid order by id").fetchall()
            dead = connection.execute("select count(*) from stormproof.dead_letter").fetchone()
        assert not verified("paid", database).violations
    assert rows == [(i, None if i == 7 else f"i{i}", i) for i in range(PAIRS)]
    assert dead == (1,)
