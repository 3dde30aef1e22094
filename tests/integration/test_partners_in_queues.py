"""Joins whose functions fail, in real queues: partners come again in one batch, and a poisoned one lets the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.queues import prepared_database, put
from support.verdicts import verified

from stormproof import PostgresQueue, PostgresSink, Topology
from stormproof.core.postgres.database import Database, connect
from stormproof.core.settings import Settings

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
