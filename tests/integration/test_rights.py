"""Roles that may not do everything: every command either works or names the role, the object, the right and the GRANT.

Real roles in a real Postgres; the grants are those that `ledger sql --grants` prints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import pytest
from support.command_line import CommandLine
from support.operated import Operated
from support.queues import prepared_database
from support.registry import commands
from support.roles import NOBODY, as_role, grant, roles, used
from support.servers import sql
from support.topologies import POISON

from stormproof import PostgresQueue, PostgresSink, Topology
from stormproof.core.base.errors import MissingRight, SettingsError, SinkRefused, StoreUnavailable
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.postgres.role import RoleKind
from stormproof.trident.cli.ledger import lacking
from stormproof.trident.ledger.graphs import SHOWN_CHARACTERS

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

NAME: Final = "rights"

COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "status": (),
    "metrics": (),
    "retry": (NAME, "1"),
    "pause": (NAME,),
    "resume": (NAME,),
    "drain": (NAME,),
    "stop": (NAME,),
    "queue put": (NAME, "--lines", "LINES"),
    "queue peek": (NAME,),
    "queue list": (),
    "queue create": (NAME, "--schema", "line string"),
    "queue unsubscribe": (NAME, "a reader", "--by", "ann"),
    "queue adopt": (NAME,),
    "audit verify": (NAME,),
    "audit replays": (NAME,),
    "audit txn": (NAME, "1"),
    "audit message": (NAME, "1-1"),
    "audit aborted": (NAME,),
    "audit actions": (NAME,),
    "audit attempts": (NAME,),
    "audit behind": (NAME,),
    "audit components": (NAME,),
    "audit dead-letters": (NAME,),
    "audit duplicates": (NAME,),
    "audit pending": (NAME,),
    "audit recovered": (NAME,),
    "audit verdicts": (NAME,),
    "dead-letters list": (NAME,),
    "dead-letters show": (NAME, "DEAD"),
    "dead-letters edit": (NAME, "DEAD", "--payload", "LINES"),
    "dead-letters requeue": (NAME, "DEAD"),
    "dead-letters drop": (NAME, "DEAD"),
    "dead-letters retry": (NAME,),
    "compact": (NAME,),
    "vacuum": (NAME,),
    "repair": (NAME,),
    "ledger migrate": (),
    "ledger adopt": (NAME, "other/abc"),
    "ledger skip": (NAME, "1", "postgres-append"),
    "ledger accept-change": (NAME, "0" * SHOWN_CHARACTERS),
    "ledger accept-loss": (NAME,),
    "ledger adopt-table": (NAME, "postgres-append"),
    "ledger prune": (NAME, "--older-than", "1d"),
    "forget": (NAME, "--by", "ann"),
}
"""Commands that reach the database, with arguments with which an owner gets past the rights."""
OTHERS: Final = {
    "audit report",
    "ledger release-table",
    "run",
    "queue import",
    "explain",
    "doctor",
    "ledger sql",
    "psql",
    "init",
    "jars",
    "pack",
    "demo",
    "web",
}
"""Commands that reach none, or that have tests of their own below."""

READS: Final = {
    "status",
    "metrics",
    "queue peek",
    "queue list",
    "audit verify",
    "audit replays",
    "audit txn",
    "audit message",
    "audit aborted",
    "audit actions",
    "audit attempts",
    "audit behind",
    "audit components",
    "audit dead-letters",
    "audit duplicates",
    "audit pending",
    "audit recovered",
    "audit verdicts",
    "dead-letters list",
    "dead-letters show",
    "ledger accept-loss",
}
PUTS: Final = {"queue put", "queue peek"}
DENIED: Final = {
    NOBODY: set(COMMANDS),
    RoleKind.PRODUCER: set(COMMANDS) - PUTS - {"ledger migrate"},
    RoleKind.AUDITOR: set(COMMANDS)
    - READS
    - {"ledger migrate", "queue adopt", "queue unsubscribe", "retry"}
    - {"resume", "drain", "stop"},
    RoleKind.DRIVER: set[str](),
}
"""Some only look where there is nothing to do: nothing to migrate, to adopt, to retry or to stop."""


@pytest.fixture
def granted(database: Database) -> Iterator[dict[str, str]]:
    """Roles with their least rights in a database that an owner migrated."""
    prepared_database(database)
    with roles(database) as made:
        sql(database, f"grant create on schema public to {made[RoleKind.DRIVER]}")
        for kind in RoleKind:
            grant(database, kind, made[kind], made[RoleKind.DRIVER])
        yield made


def test_every_command_is_known_here() -> None:
    known = {path for path, _ in commands()}
    assert known - OTHERS <= set(COMMANDS), "say above what the command is given, and who may run it"


def test_every_command_under_every_role(
    operated: Operated,
    database: Database,
    granted: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    command: CommandLine,
    tmp_path: Any,
) -> None:
    driver = used(operated, granted[RoleKind.DRIVER], monkeypatch)
    with closing(PostgresQueue(NAME, database=driver.cell.database)) as queue:
        queue.subscribe("makes it", 1)
    sql(database, "delete from stormproof.pending_subscription")
    producer = used(operated, granted[RoleKind.PRODUCER], monkeypatch)
    producer.put(b"a b", POISON, b"c")
    driver.run()
    sql(database, f"grant usage on schema stormproof_sink to {granted[RoleKind.AUDITOR]}")
    sql(database, f"grant select on all tables in schema stormproof_sink, public to {granted[RoleKind.AUDITOR]}")
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    (dead,) = [one["id"] for one in command("dead-letters", "list", NAME)["dead_letters"]]
    lines = tmp_path / "lines"
    lines.write_text("d\n")
    wrong: dict[tuple[str, str], object] = {}
    for kind in (
        NOBODY,
        RoleKind.PRODUCER,
        RoleKind.AUDITOR,
        RoleKind.DRIVER,
    ):  # the last one may change what they look at
        role = granted[kind]
        used(operated, role, monkeypatch)
        for name, given in COMMANDS.items():
            arguments = [{"LINES": str(lines), "DEAD": dead}.get(one, one) for one in given]
            status, out, err = command.ended(*name.split(), *arguments)
            denied = f'role "{role}"' in err and "As its owner run: GRANT" in err
            if "unexpected error" in err or denied != (name in DENIED[kind]) or (denied and status != 1):
                wrong[kind, name] = (status, err or out)
    assert not wrong, "\n".join(f"{where}: {what}" for where, what in wrong.items())


def test_what_each_role_lacks_is_said_by_doctor(
    operated: Operated,
    database: Database,
    granted: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    command: CommandLine,
) -> None:
    def checks(kind: RoleKind, role: str) -> dict[str, Any]:
        used(operated, role, monkeypatch)
        _, out, _ = command.ended("doctor", "--no-spark", "--for", kind, "--json")
        return {check["name"]: check for check in json.loads(out)["checks"]}

    for kind in RoleKind:
        assert checks(kind, granted[kind])[f"rights of a {kind}"]["ok"]
        refused = checks(kind, granted[NOBODY])
        assert not refused["ledger schema"]["ok"]
    sql(database, f"revoke update on stormproof.txn from {granted[RoleKind.DRIVER]}")
    found = checks(RoleKind.DRIVER, granted[RoleKind.DRIVER])["rights of a driver"]
    assert not found["ok"]
    assert "UPDATE on table stormproof.txn" in found["found"]
    assert "stormproof ledger sql --grants" in found["advice"]
    with closing(PostgresQueue("of-the-owner", database=database)) as queue:
        queue.put([b"x"])
    sql(database, f"grant update on stormproof.txn to {granted[RoleKind.DRIVER]}")
    sql(database, f"grant all on all tables in schema stormproof_queue to {granted[RoleKind.DRIVER]}")
    sql(database, f"grant all on all sequences in schema stormproof_queue to {granted[RoleKind.DRIVER]}")
    found = checks(RoleKind.DRIVER, granted[RoleKind.DRIVER])["rights of a driver"]
    assert "does not own the queues of-the-owner" in found["found"]


@pytest.mark.parametrize(
    ("made", "by_key", "revoked", "lacks"),
    [
        ("word text primary key, n bigint", True, "temporary on database NAME from public", "TEMPORARY on database"),
        ("word inet, n bigint", False, "temporary on database NAME from public", "TEMPORARY on database"),
        ("word text primary key, n bigint", True, "update (n) on t from ROLE", "UPDATE on column n"),
        ("word text primary key, n bigint", True, "select on t from ROLE", ".*SELECT on the table"),
        ("word text, n bigint", False, "insert (n) on t from ROLE", "INSERT on column n"),
        ("id serial, word text, n bigint", False, "usage on sequence t_id_seq from ROLE", "USAGE on sequence t_id_seq"),
        ("word text, n bigint generated by default as identity", False, None, None),
        ("id bigint generated always as identity, word text, n bigint", False, None, None),
    ],
)
def test_a_right_that_a_table_needs_is_asked_for_before_anything_is_written_and_said_by_doctor(
    operated: Operated,
    database: Database,
    granted: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    made: str,
    by_key: bool,
    revoked: str | None,
    lacks: str | None,
) -> None:
    role = granted[RoleKind.DRIVER]
    name = dict(database.parameters)["dbname"]
    sql(database, f"create table t ({made})")
    columns = "select, insert (word, n), update (n)" if by_key else "insert (word, n)"
    sql(database, f"grant {columns} on t to {role}")
    sql(database, f"grant usage on all sequences in schema public to {role}")
    driver = used(operated, role, monkeypatch)

    def topology() -> Topology:
        built = Topology(NAME)
        lines = built.stream("lines", PostgresQueue(NAME, schema="word string, n long", database=driver.cell.database))
        by = PostgresSink("t", name="t", mode="upsert", key="word", order_by="n")
        lines.into(by if by_key else PostgresSink("t", name="t"))
        return built

    with closing(PostgresQueue(NAME, database=driver.cell.database)) as queue:
        queue.put([b'{"word": "10.0.0.1", "n": 1}'])
    if revoked is not None:
        sql(database, f"revoke {revoked.replace('NAME', name).replace('ROLE', role)}")
        with pytest.raises(SinkRefused, match=f"cannot start: sink 't' .*has not the rights {lacks}"):
            driver.run(topology())
        assert sql(database, "select count(*) from stormproof.topology") == [(0,)]
        if "TEMPORARY" in str(lacks):
            assert f"role {role} lacks {lacks}" in str(driver.command("doctor", "--no-spark"))
        sql(database, f"grant {revoked.replace('NAME', name).replace('ROLE', role).replace(' from ', ' to ')}")
    driver.run(topology())
    assert sql(database, "select word::text, n from t") in ([("10.0.0.1", 1)], [("10.0.0.1/32", 1)])
    assert "a start would be refused" not in str(driver.command("doctor", "--no-spark"))
    if revoked is not None:
        sql(database, f"revoke {revoked.replace('NAME', name).replace('ROLE', role)}")
        assert "a start would be refused: sink 't' (table t at" in str(driver.command("doctor", "--no-spark"))


def test_a_role_that_may_make_nothing_is_told_before_and_after(
    database: Database, monkeypatch: pytest.MonkeyPatch, command: CommandLine
) -> None:
    """On a database without a schema: reads make nothing, whoever asks; the rest names what is missing."""
    with roles(database) as made:
        nobody = as_role(database, made[NOBODY])
        monkeypatch.setenv("STORMPROOF_DATABASE_URL", nobody.adbc_uri)
        for name in sorted(READS - {"queue list"}):
            arguments = [one.replace("DEAD", "1-1") for one in COMMANDS[name]]
            status, _, err = command.ended(*name.split(), *arguments)
            assert (status, "has no Stormproof schema yet" in err) == (2, True), (name, err)
        for name in ("queue put", "ledger migrate"):
            status, _, err = command.ended(*name.split(), *(() if "migrate" in name else (NAME, "--lines", __file__)))
            assert status == 1, (name, err)
            assert f'role "{made[NOBODY]}" has no right to CREATE on database' in err
            assert f'GRANT CREATE ON DATABASE {dict(database.parameters)["dbname"]} TO "{made[NOBODY]}";' in err
        assert command("queue", "list") == {"queues": []}
        doctor = command("doctor", "--no-spark", status=1)
        assert any("no right to CREATE" in check["found"] for check in doctor["checks"] if not check["ok"])
    # Nor does a read under a role that may.
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    assert command.ended("status")[0] == 2
    assert sql(database, "select to_regnamespace('stormproof') is null") == [(True,)]


def test_a_producer_puts_in_its_own_transaction_and_in_a_users(database: Database, granted: dict[str, str]) -> None:
    with closing(PostgresQueue(NAME, database=as_role(database, granted[RoleKind.DRIVER]))) as queue:
        queue.subscribe("makes it", 1)
    producer = as_role(database, granted[RoleKind.PRODUCER])
    with closing(PostgresQueue(NAME, database=producer, partition_messages=4)) as queue:
        assert queue.put([b"%d" % n for n in range(40)]).messages == 40
        with connect(producer, application_name="tests") as connection:
            assert queue.put([b"x"], connection=connection).messages == 1
        with pytest.raises(MissingRight, match=r"SELECT.*stormproof\.pending_subscription"):
            queue.subscribe("a reader", 1)
    with (
        closing(PostgresQueue("absent", database=producer)) as queue,
        pytest.raises(MissingRight, match="GRANT CREATE ON SCHEMA stormproof_queue"),
    ):
        queue.put([b"x"])


def test_a_driver_that_owns_no_queue_goes_on_without_housekeeping(database: Database, granted: dict[str, str]) -> None:
    with closing(PostgresQueue(NAME, database=database, partition_messages=2)) as queue:
        queue.put([b"%d" % n for n in range(9)])
    driver = as_role(database, granted[RoleKind.DRIVER])
    with closing(PostgresQueue(NAME, database=driver, partition_messages=2)) as queue:
        queue.subscribe("a", 1)
        queue.maintain()
        queue.put([b"more"])
    with closing(PostgresQueue(NAME, database=database)) as queue:
        assert len(queue.peek(20)) == 10


def test_a_sink_without_rights_stops_by_name_and_goes_on_once_granted(
    operated: Operated, database: Database, granted: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = used(operated, granted[RoleKind.DRIVER], monkeypatch)
    with closing(PostgresQueue(NAME, database=driver.cell.database)) as queue:
        queue.put([b"a b"])
    driver.run()
    sql(database, "alter table rights_postgres_append owner to postgres")
    driver.put(b"c")
    with pytest.raises(MissingRight, match=r"role .* (on|of) table public\.rights_postgres_append.*GRANT"):
        driver.run()
    assert driver.command("status")["topologies"][0]["backlog"]["dead"] == 0
    sql(database, f"grant select, insert on rights_postgres_append to {granted[RoleKind.DRIVER]}")
    driver.run()
    assert ("c",) in sql(database, "select word from rights_postgres_append")
    driver.verify()


def test_a_server_that_takes_no_writes_says_so(
    operated: Operated, database: Database, monkeypatch: pytest.MonkeyPatch, command: CommandLine
) -> None:
    operated.put(b"a b")
    operated.run()
    name = dict(database.parameters)["dbname"]
    sql(database, f"alter database {name} set default_transaction_read_only = on")
    for read in (("status",), ("audit", "verify", NAME), ("queue", "list", NAME), ("dead-letters", "list", NAME)):
        command(*read)
    for write in (("queue", "put", NAME, "--lines", __file__), ("ledger", "prune", NAME, "--older-than", "1d")):
        status, _, err = command.ended(*write)
        assert "unexpected error" not in err
        assert (status, "takes no writes" in err) in ((1, True), (0, False)), (write, err)
    with pytest.raises(StoreUnavailable, match="takes no writes"):
        operated.put(b"c")
    found = {check["name"]: check for check in command("doctor", "--no-spark", status=1)["checks"]}
    assert "takes no writes" in found["writes"]["found"]


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_in_another_encoding_is_refused_by_name(
    operated: Operated,
    postgres: EmbeddedPostgres,
    encoding: str,
    monkeypatch: pytest.MonkeyPatch,
    command: CommandLine,
) -> None:
    name = f"encoded_{encoding.lower()}_{os.getpid()}"
    sql(postgres.database, f"create database {name} encoding '{encoding}' template template0 locale 'C'")
    try:
        other = postgres.database.with_name(name)
        refused = rf"{name}.* has encoding {encoding}; Stormproof needs UTF8.*CREATE DATABASE"

        def raises() -> Any:
            return pytest.raises(SettingsError, match=refused)

        with raises():
            connect(other, application_name="tests")
        with raises(), closing(PostgresQueue("q", database=other)) as queue:
            queue.put([b"x"])
        operated.put(b"a b")
        topology = Topology(NAME)
        words = topology.stream("lines", PostgresQueue(NAME, database=operated.cell.database))
        words.into(PostgresSink("elsewhere", name="s", database=other))
        with raises():
            operated.run(topology)
        monkeypatch.setenv("STORMPROOF_DATABASE_URL", other.adbc_uri)
        for arguments in (("status",), ("ledger", "migrate"), ("queue", "put", "q", "--lines", __file__)):
            status, _, err = command.ended(*arguments)
            assert (status, f"has encoding {encoding}" in err) == (2, True), err
        found = {check["name"]: check for check in command("doctor", "--no-spark", status=1)["checks"]}
        assert f"has encoding {encoding}" in found["postgres"]["found"]
    finally:
        sql(postgres.database, f"drop database {name} with (force)")


def test_the_printed_grants_are_statements(database: Database, command: CommandLine) -> None:
    prepared_database(database)
    with roles(database) as made:
        for kind in RoleKind:
            printed = command.text(
                "ledger", "sql", "--grants", made[kind], "--for", kind, "--driver", made[RoleKind.DRIVER]
            )
            sql(database, printed)
            with connect(as_role(database, made[kind]), application_name="tests", autocommit=True) as connection:
                assert lacking(connection, kind) == []
