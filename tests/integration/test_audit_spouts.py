"""The command line over a topology with two spouts, each with a queue of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine, command_line_in
from support.queues import put

from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres

FILE = """
from stormproof import PostgresQueue, PostgresSink, Topology, count

def split(line: str) -> list[str]:
    if line == "poison":
        raise ValueError("never works")
    return line.split()

def source(queue: str) -> PostgresQueue:
    return PostgresQueue(queue, max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)

def topology() -> Topology:
    t = Topology("mixed")
    for spout, queue in (("lines", "lines"), ("clicks", "raw_clicks")):
        (t.stream(spout, source(queue)).flat_map(split, "line", schema="word string", name=f"split-{spout}")
          .group_by("word").persistent_aggregate(n=count()).into(PostgresSink(spout)))
    return t
"""


@pytest.fixture
def command(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    return command_line_in(tmp_path, database, "mixed_spouts.py", FILE, monkeypatch, capsys)


def run_topology(command: CommandLine, folder: Path) -> None:
    target = f"{folder / 'mixed_spouts.py'}:topology"
    command("run", target, "--engine", "inline", "--until-idle", "--max-messages", "5")


@pytest.fixture
def done(command: CommandLine, database: Database, tmp_path: Path) -> CommandLine:
    """A run to its end: a poison in each queue became a dead letter."""
    command("ledger", "migrate")
    put(database, "lines", [b"a l%d" % i for i in range(9)] + [b"poison"])
    put(database, "raw_clicks", [b"a c%d" % i for i in range(6)] + [b"poison"])
    run_topology(command, tmp_path)
    return command


def rows(database: Database, statement: str) -> list[tuple[Any, ...]]:
    with connect(database, application_name="tests", autocommit=True) as connection:
        return connection.execute(statement.encode()).fetchall()


def test_each_spout_reaches_its_own_sink_and_the_audit_is_clean(done: CommandLine, database: Database) -> None:
    assert rows(database, "select n from lines where word = 'a'") == [(9,)]
    assert rows(database, "select n from clicks where word = 'a'") == [(6,)]
    report = done("audit", "verify", "mixed")
    assert report["violations"] == report["unknowns"] == []
    (topology,) = done("status")["topologies"]
    assert topology["source"] == "lines+clicks=raw_clicks"
    assert (topology["backlog"]["ready"], topology["backlog"]["dead"]) == (0, 2)


def test_messages_are_followed_by_spout(done: CommandLine, database: Database) -> None:
    first = done("queue", "peek", "raw_clicks", "-n", "1")["messages"][0]["id"]
    assert done("audit", "message", "mixed", f"clicks:{first}")["end"]["kind"] == "committed"
    replayed = {row["message"] for row in done("audit", "replays", "mixed", "--what", "message")["rows"]}
    letters = {d["id"]: d["text"] for d in done("dead-letters", "list", "mixed")["dead_letters"]}
    assert replayed == letters.keys()
    assert {done("audit", "message", "mixed", one)["end"]["kind"] for one in letters} == {"dead_letter"}
    assert {one.partition(":")[0] for one in letters} == {"lines", "clicks"}
    assert set(letters.values()) == {"poison"}
    for wrong in (first, f"taps:{first}"):
        error = done("audit", "message", "mixed", wrong, status=2)["error"]
        assert "SPOUT:ID" in error["message"]
        assert "lines, clicks" in error["message"]
    put(database, "lines", [b"later"])
    assert [q["ready"] for q in (done("status")["topologies"][0]["backlog"],)] == [1]


def test_dead_letters_are_disposed_of_by_spout(done: CommandLine, tmp_path: Path) -> None:
    letters = [d["id"] for d in done("dead-letters", "list", "mixed")["dead_letters"]]
    (line,) = [one for one in letters if one.startswith("lines:")]
    (click,) = [one for one in letters if one.startswith("clicks:")]
    assert done("dead-letters", "requeue", "mixed", line, "--why", "try")["requeued"] == [line]
    done("audit", "verify", "mixed")
    assert done("dead-letters", "drop", "mixed", "--all", "--why", "bad")["dropped"] == [click]
    run_topology(done, tmp_path)
    assert done("audit", "verify", "mixed")["violations"] == []
    assert done("audit", "message", "mixed", click)["end"]["kind"] == "dropped"
    assert done("audit", "message", "mixed", line)["end"]["kind"] == "dead_letter"
    assert done("dead-letters", "drop", "mixed", "1-1", "--why", "typo", status=1)["not_dead"] == ["1-1"]


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("delete from stormproof.dead_letter where source = 'raw_clicks'", "message_lost"),
        (
            "update stormproof.txn set position = jsonb_set(position, '{spouts,lines}',"
            " (select position -> 'spouts' -> 'lines' from stormproof.txn where txid = 1))"
            " where txid = (select max(txid) from stormproof.txn where position -> 'spouts' ? 'lines' and not retry"
            " and txid > 1)",
            "slices",
        ),
        ("update stormproof.txn set position = '{}' where txid = 1", "slices"),
    ],
)
def test_a_planted_corruption_is_named(done: CommandLine, database: Database, statement: str, kind: str) -> None:
    with connect(database, application_name="tests", autocommit=True) as connection:
        assert connection.execute(statement.encode()).rowcount == 1
    assert kind in {v["kind"] for v in done("audit", "verify", "mixed", status=1)["violations"]}


def test_a_queue_that_is_not_in_the_ledgers_database_is_said_to_be_elsewhere(
    done: CommandLine, database: Database
) -> None:
    with connect(database, application_name="tests", autocommit=True) as connection:
        connection.execute("update stormproof.topology set source = 'lines+files'")
    assert done("status")["topologies"][0]["backlog"] is None
    assert len(done("dead-letters", "list", "mixed")["dead_letters"]) == 1
    assert done("audit", "verify", "mixed", status=4)["unknowns"] != []


@pytest.mark.parametrize("source", ["shop.orders", "https://shop/orders?of=today"])
def test_a_source_elsewhere_may_have_a_name_that_no_queue_has(
    done: CommandLine, database: Database, source: str
) -> None:
    with connect(database, application_name="tests", autocommit=True) as connection:
        connection.execute("update stormproof.topology set source = %s", (source,))
    assert f"source {source!r} keeps nothing" in str(done("audit", "verify", "mixed", status=4)["unknowns"])
