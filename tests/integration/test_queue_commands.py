"""`queue list` and `queue stats`: every queue, and which topology reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import CommandLine, command_line_in
from support.queues import prepared_database, put

from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres

TOPOLOGIES = """
from stormproof import MemorySink, PostgresQueue, Topology

words = Topology("words")
words.stream("lines", PostgresQueue("lines")).into(MemorySink("kept"))

both = Topology("both")
for queue in ("lines", "clicks"):
    both.stream(queue, PostgresQueue(queue)).into(MemorySink(f"kept_{queue}"))
"""


@pytest.fixture
def done(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    return command_line_in(tmp_path, database, "app.py", TOPOLOGIES, monkeypatch, capsys)


def test_queues_are_listed_with_the_topologies_that_read_them(done: CommandLine, database: Database) -> None:
    assert done("queue", "list") == {"queues": []}
    assert "no queues yet" in done.text("queue", "list")
    prepared_database(database)
    put(database, "lines", [b"a", b"b", b"c"])
    put(database, "unread", [b"x"])
    done("run", "app.py:words", "--engine", "inline", "--until-idle")
    done("run", "app.py:both", "--engine", "inline", "--until-idle")
    put(database, "lines", [b"d"])

    queues = {queue["queue"]: queue for queue in done("queue", "list")["queues"]}
    assert list(queues) == ["clicks", "lines", "unread"]
    lines = queues["lines"]
    assert (lines["messages_put"], lines["bytes_on_disk"] > 0) == (4, True)
    assert sorted(lines["topologies"].values()) == ["both:lines", "words"]
    assert [backlog["ready"] for backlog in lines["subscriptions"].values()] == [1, 1]
    assert (queues["unread"]["subscriptions"], queues["unread"]["topologies"]) == ({}, {})

    text = done.text("queue", "list")
    assert [line.split()[0] for line in text.splitlines() if line.split()[0] in queues] == [
        "clicks",
        "lines",
        "lines",
        "unread",
    ]
    assert done("queue", "stats", "lines")["topologies"] == lines["topologies"]
    stats = done.text("queue", "stats", "lines")
    assert "both:lines" in stats
    assert "words" in stats
