"""A queue in another server than before: refused by readers and producers, adopted with a proof, nothing lost or doubled.

Real servers: a dump restored in a fresh one, a standby that is promoted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from support.command_line import CommandLine
from support.contents import counted, in_delta, in_postgres
from support.operated import Operated
from support.queues import prepared_database
from support.servers import dump, promote, restore, sql, standby_of, use_numbers
from support.topologies import MAX_ATTEMPTS, POISON, Split

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count
from stormproof.core.base.errors import PositionMismatch
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.postgres_queue import message_table

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

NAME: Final = "moved"
OTHER: Final = "moved-too"
FIRST: Final = [f"a{i} common".encode() for i in range(9)] + [POISON]
WAITING: Final = [f"w{i} common".encode() for i in range(7)]
AFTER: Final = [f"z{i} common".encode() for i in range(5)]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """Another server, which has given out few transaction numbers."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("fresh"))
    server.acquire()
    yield server
    server.release()


@dataclass
class Moved:
    """A topology with a table in Delta and one in the ledger's own database, which is restored or promoted elsewhere."""

    operated: Operated

    @property
    def database(self) -> Database:
        return self.operated.cell.database

    def built(self, name: str = NAME) -> Topology:
        topology = Topology(name)
        queue = PostgresQueue(NAME, max_attempts=MAX_ATTEMPTS, backoff_base_s=0.001, backoff_max_s=0.001)
        words = topology.stream("lines", queue).flat_map(Split(self.operated.cell.folder), "line", schema="word string")
        table = name.replace("-", "_")
        folds = words.group_by("word").persistent_aggregate(n=count())
        folds.into(DeltaSink(self.lake(name), name="delta"), PostgresSink(f"{table}_counts", name="postgres"))
        return topology

    def lake(self, name: str) -> Path:
        return self.operated.cell.folder / "lake" / name

    def run(self, name: str = NAME) -> None:
        self.operated.run(self.built(name))

    def put(self, *payloads: bytes) -> None:
        self.operated.put(*payloads)

    def require(self, payloads: list[bytes], name: str = NAME) -> None:
        """Both tables have each word of these once."""
        wanted = Counter(word for payload in payloads if payload != POISON for word in payload.decode().split())
        assert counted(in_delta(self.lake(name), "n")) == wanted
        assert counted(in_postgres(self.database, f"{name.replace('-', '_')}_counts", "n")) == wanted

    def at(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> Moved:
        """The same, in the database that took the old one's place."""
        monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
        cell = replace(self.operated.cell, database=database)
        return Moved(replace(self.operated, cell=cell))

    def command(self, *arguments: str, status: int = 0) -> Any:
        return self.operated.command(*arguments, status=status)

    def adopt(self, *arguments: str, status: int = 0) -> Any:
        return self.command("queue", "adopt", NAME, *arguments, status=status)


@pytest.fixture
def moved(operated: Operated) -> Moved:
    """Its first messages are in both tables or dead, further ones wait."""
    found = Moved(operated)
    found.put(*FIRST)
    found.run()
    found.put(*WAITING)
    return found


def restored(moved: Moved, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> Moved:
    """In another server; the old database is gone."""
    name = str(dict(moved.database.parameters)["dbname"])
    database = restore(dump(moved.database, moved.operated.cell.folder / "dump"), server.database, name)
    sql(moved.database.with_name("postgres"), f"drop database {name} with (force)")
    sql(moved.database.with_name("postgres"), f"create database {name}")  # for the fixture that drops it
    return moved.at(database, monkeypatch)


def test_a_queue_restored_below_its_own_numbers(
    moved: Moved, fresh: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new server is at lower numbers than the restored messages: they would be invisible, and backlog 0."""
    use_numbers(moved.database, 3_000)
    moved.put(b"late common")
    payloads = [*FIRST, *WAITING, b"late common", *AFTER]
    new = restored(moved, fresh, monkeypatch)

    for name in (NAME, OTHER):
        with pytest.raises(PositionMismatch, match=f"stormproof queue adopt {NAME}"):
            new.run(name)
    with pytest.raises(PositionMismatch, match=f"Nothing was put.*stormproof queue adopt {NAME}"):
        new.put(b"mixed")
    with pytest.raises(psycopg.DatabaseError, match="nothing may be put before the queue is adopted"):
        sql(new.database, f"insert into stormproof_queue.{NAME} (payload) values ('mixed')")

    (backlog,) = new.command("queue", "list", NAME)["subscriptions"].values()
    assert backlog["ready"] == len(WAITING) + 1
    assert f"queue adopt {NAME}" in new.command("queue", "list", NAME)["refused"]
    status = {one["name"]: one for one in new.command("status")["topologies"]}
    assert status[NAME]["backlog"]["ready"] == len(WAITING) + 1
    found = {v["kind"]: v["text"] for v in new.command("audit", "verify", NAME, status=1)["violations"]}
    assert {"unreachable", "table_replaced"} <= found.keys()
    assert f"{len(WAITING) + 1} messages" in found["unreachable"]
    assert OTHER not in status  # its first start was refused

    refused = new.adopt(status=4)
    assert not refused["adopted"]
    assert any(f"ledger adopt-table {NAME} postgres" in text for text in refused["unproven"])
    new.command("ledger", "adopt-table", NAME, "postgres")
    done = new.adopt("--by", "me", "--why", "moved")
    assert (done["adopted"], done["changed"], done["unproven"], done["by"]) == (True, True, [], "me")
    assert done["now"]["shift"] > 0
    assert list(done["subscriptions"].values()) == [NAME]
    assert not new.adopt()["changed"]

    new.put(*AFTER)
    assert new.command("queue", "list", NAME)["refused"] is None
    new.run()
    new.run(OTHER)
    new.require(payloads)
    new.require(payloads, OTHER)
    assert new.command("audit", "verify", NAME)["violations"] == []
    (shown,) = [one["id"] for one in new.command("dead-letters", "list", NAME)["dead_letters"]]
    assert new.command("audit", "message", NAME, shown)["message"] == shown
    assert sql(new.database, "select by, why from stormproof.queue_adoption") == [("me", "moved")]
    new.command("dead-letters", "drop", NAME, "--all")
    new.command("audit", "verify", NAME)


def test_a_queue_restored_above_its_own_numbers(
    operated: Operated, fresh: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new server is far ahead: what was restored lies below its numbers, and nothing is shifted."""
    home = operated.cell.database
    origin = fresh.database.with_name("origin")
    sql(fresh.database, "create database origin template template0")
    use_numbers(home, 5_000)
    moved = Moved(operated).at(origin, monkeypatch)
    prepared_database(origin)
    moved.put(*FIRST)
    moved.run()
    moved.put(*WAITING)
    dumped = dump(origin, operated.cell.folder / "dump")
    name = str(dict(home.parameters)["dbname"])
    sql(home.with_name("postgres"), f"drop database {name} with (force)")
    new = moved.at(restore(dumped, home, name), monkeypatch)
    with pytest.raises(PositionMismatch, match="queue adopt"):
        new.run()
    new.command("ledger", "adopt-table", NAME, "postgres")
    assert new.adopt()["now"]["shift"] == 0
    new.put(*AFTER)
    new.run()
    new.require([*FIRST, *WAITING, *AFTER])
    new.command("audit", "verify", NAME)


def test_a_clean_fail_over_to_a_standby(moved: Moved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standby = standby_of(moved.database.with_name("postgres"), tmp_path / "standby")
    try:
        name = str(dict(moved.database.parameters)["dbname"])
        new = moved.at(standby.database.with_name(name), monkeypatch)
        new.command("status")
        found = new.command("audit", "verify", NAME)
        assert "takes no writes" in found["not_recorded"]
        assert "takes no writes" in new.command("pause", NAME, status=1)["error"]["message"]
        promote(standby, moved.database.with_name("postgres"))
        new.put(b"put before the adoption common")  # its numbers go on: a fail-over stops no producer
        with pytest.raises(PositionMismatch, match=f"stormproof queue adopt {NAME}"):
            new.run()
        done = new.adopt()
        assert (done["changed"], done["unproven"], done["now"]["shift"]) == (True, [], 0)
        new.put(*AFTER)
        new.run()
        new.require([*FIRST, *WAITING, b"put before the adoption common", *AFTER])
        new.command("audit", "verify", NAME)
    finally:
        standby.release()


def carried_to_another_identifier(moved: Moved) -> None:
    """As `pg_upgrade` leaves it: the same rows and numbers, and records of a server that is not this one."""
    sql(moved.database, "update stormproof.queue set server = '4711', timeline = 9")
    elsewhere = """position || '{"server": "4711", "timeline": 9}'"""
    sql(moved.database, f"update stormproof.pending_subscription set position = {elsewhere}")
    sql(
        moved.database,
        f"create or replace trigger stormproof_server before insert on stormproof_queue.{NAME} for each statement"
        " execute function stormproof_queue.require_server('4711')",
    )


def test_after_pg_upgrade_the_numbers_go_on(moved: Moved) -> None:
    carried_to_another_identifier(moved)
    with pytest.raises(PositionMismatch, match="4711"):
        moved.run()
    with pytest.raises(PositionMismatch, match="4711"):
        moved.put(b"mixed")
    assert moved.adopt()["now"]["shift"] == 0
    moved.put(*AFTER)
    moved.run()
    moved.require([*FIRST, *WAITING, *AFTER])


def test_what_is_not_proven_is_named_and_only_accepted_on_record(moved: Moved, command: CommandLine) -> None:
    """The ledger's database was set back behind a batch that Delta holds."""
    carried_to_another_identifier(moved)
    sql(moved.database, "update stormproof.txn_sink set digest = 'another' where sink = 'delta'")
    before = sql(moved.database, "select * from stormproof.queue, stormproof.pending_subscription")
    refused = moved.adopt(status=4)
    assert not refused["changed"]
    assert any("digest" in text for text in refused["unproven"])
    assert sql(moved.database, "select * from stormproof.queue, stormproof.pending_subscription") == before
    text = command.text("queue", "adopt", NAME, status=4)
    assert "NOT PROVEN" in text
    assert "nothing was changed" in text
    moved.adopt("--accept-unproven", status=2)
    done = moved.adopt("--accept-unproven", "--why", "looked at it", "--by", "me")
    assert done["changed"]
    (row,) = sql(moved.database, "select unproven, why from stormproof.queue_adoption")
    assert row == (done["unproven"], "looked at it")
    events = sql(moved.database, "select detail from stormproof.event where kind = 'operator'")
    assert [detail["unproven"] for (detail,) in events] == [done["unproven"]]  # type: ignore[index]


def test_a_reader_that_the_ledger_does_not_know_is_not_proven(moved: Moved) -> None:
    queue = PostgresQueue(NAME, database=moved.database)
    queue.subscribe("a reader by hand", 1)
    queue.close()
    carried_to_another_identifier(moved)
    (text,) = moved.adopt(status=4)["unproven"]
    assert "a reader by hand" in text
    moved.adopt("--accept-unproven", "--why", "mine")
    moved.run()


def test_messages_above_the_servers_numbers_are_refused_whatever_the_records_say(moved: Moved) -> None:
    """Only the data were restored, below records of this very server."""
    (shift,) = sql(moved.database, "select 100000 + pg_current_xact_id()::text::bigint")[0]
    sql(
        moved.database,
        f"insert into stormproof_queue.{NAME} (xid, id, payload) overriding system value"
        f" values ('{shift}'::xid8, 1000001, 'restored common')",
    )
    for name in (NAME, OTHER):
        with pytest.raises(PositionMismatch, match="above this server's own"):
            moved.run(name)
    assert moved.adopt()["unreachable"] == 1
    moved.put(*AFTER)
    moved.run()
    moved.require([*FIRST, *WAITING, b"restored common", *AFTER])


def test_control_without_a_shift_restored_messages_are_not_reached(
    moved: Moved, fresh: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the adoption is for: a stamp alone leaves the restored messages behind, and `verify` says so."""
    use_numbers(moved.database, 3_000)
    moved.put(b"late common")
    new = restored(moved, fresh, monkeypatch)
    new.command("ledger", "adopt-table", NAME, "postgres")
    monkeypatch.setattr(message_table, "_shift_for", lambda *_, **__: 0)
    new.adopt()
    with pytest.raises(PositionMismatch, match="above this server's own"):
        new.run()
    assert {v["kind"] for v in new.command("audit", "verify", NAME, status=1)["violations"]} == {"unreachable"}


def test_a_message_table_restored_without_its_records_keeps_its_server(moved: Moved) -> None:
    """`pg_dump --schema stormproof_queue` alone: the trigger still names the server of the numbers."""
    carried_to_another_identifier(moved)
    sql(moved.database, "delete from stormproof.queue")
    queue = PostgresQueue(NAME, database=moved.database)
    with pytest.raises(PositionMismatch, match="4711"):
        queue.subscribe("anybody", 1)
    with pytest.raises(PositionMismatch, match="4711"):
        queue.put([b"mixed"])
    queue.close()


def test_an_outbox_put_after_an_adoption_names_its_messages(moved: Moved) -> None:
    """Receipts and positions are in the queue's numbers, which are not the server's any more."""
    sql(moved.database, "update stormproof.queue set xid_shift = 0")
    carried_to_another_identifier(moved)
    (above,) = sql(moved.database, "select 100000 + pg_current_xact_id()::text::bigint")[0]
    sql(
        moved.database,
        f"alter table stormproof_queue.{NAME} disable trigger stormproof_server;"
        f"insert into stormproof_queue.{NAME} (xid, id, payload) overriding system value"
        f" values ('{above}'::xid8, 1000001, 'restored common');"
        f"alter table stormproof_queue.{NAME} enable trigger stormproof_server",
    )
    assert moved.adopt()["now"]["shift"] > 0
    queue = PostgresQueue(NAME, database=moved.database)
    with connect(moved.database, application_name="tests") as connection:
        first = queue.put([b"one"], connection=connection)
        second = queue.put([b"two", b"three"], connection=connection)
    queue.close()
    ids = [row[0] for row in sql(moved.database, f"select xid || '-' || id from stormproof_queue.{NAME}")]
    assert {first.first, first.last, second.first, second.last} <= set(ids)
    assert int(str(second.last).partition("-")[0]) > int(str(above))
