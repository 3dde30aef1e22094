"""`queue list`, `stats`, `create`, `unsubscribe`: every queue, who reads it, and what it keeps back for whom."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.command_line import CommandLine, command_line_in
from support.queues import prepared_database, put
from support.servers import sql
from support.source_harness import messages_of
from support.untouched import rows_that_name

from stormproof import PostgresQueue
from stormproof.core.base.errors import UsageError
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.postgres.database import Database
from stormproof.testing import Message

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
    assert done("queue", "list", "lines")["topologies"] == lines["topologies"]
    stats = done.text("queue", "list", "lines")
    assert "both:lines" in stats
    assert "words" in stats


def test_a_queue_is_made_with_its_schema_on_record(done: CommandLine, database: Database) -> None:
    schema = "n int, total decimal(10, 2)"
    made = done("queue", "create", "orders", "--schema", schema)
    assert made == {"queue": "orders", "schema": schema, "table": 'stormproof_queue."orders"'}
    sql(database, "insert into stormproof_queue.orders (payload) values ('{}')")
    assert done("queue", "list", "orders")["messages_put"] == 1
    assert done("queue", "create", "orders") == made
    assert f"PostgresQueue('orders', '{schema}')" in done.text("queue", "create", "orders")
    assert f"of {schema}" in done.text("queue", "list", "orders")
    assert [queue["schema"] for queue in done("queue", "list")["queues"]] == [schema]

    error = done("queue", "create", "orders", "--schema", "n long", status=2)["error"]
    assert repr(schema) in error["message"]
    error = done("queue", "create", "others", "--schema", "n integr", status=2)["error"]
    assert "integr" in error["message"]
    assert [queue["queue"] for queue in done("queue", "list")["queues"]] == ["orders"]


def test_a_queue_that_a_producer_made_is_given_its_schema_later(done: CommandLine, database: Database) -> None:
    put(prepared_database(database), "lines", [b"a"])
    assert done("queue", "list", "lines")["schema"] is None
    assert done("queue", "create", "lines", "--schema", "line string")["schema"] == "line string"
    assert done("queue", "list", "lines")["messages_put"] == 1


@pytest.fixture
def read_by(database: Database) -> Iterator[Callable[[str], PostgresQueue]]:
    """Programs of somebody's own, each of which reads under a name; 9 messages lie in two partitions and a part of one."""
    prepared_database(database)
    with ExitStack() as ends:

        def reader(name: str | None) -> PostgresQueue:
            queue = PostgresQueue("lines", max_attempts=1, partition_messages=4, database=database)
            ends.enter_context(closing(queue))
            if name is not None:
                queue.subscribe(name, 1)
            return queue

        for _ in range(3):
            reader(None).put([b"x", b"y", b"z"])
        yield reader


def opened(reader: PostgresQueue, lease: Lease, messages: int) -> Sequence[Message]:
    slice_ = reader.open(lease, Limit(messages), 1)
    assert slice_ is not None
    return messages_of(reader, slice_, 1)


def test_a_queue_keeps_nothing_back_for_a_reader_that_was_unsubscribed(
    done: CommandLine, database: Database, read_by: Callable[[str], PostgresQueue]
) -> None:
    slow, fast = read_by("slow"), read_by("fast")
    (failed, *_) = opened(slow, Lease("a", 1), 3)
    slow.confirm(Lease("a", 1), [failed.failed()])
    opened(slow, Lease("c", 1, seconds=0.0), 2)
    opened(fast, Lease("d", 1), 9)
    fast.confirm(Lease("d", 1))
    assert len(fast.drop_consumed()) < 2

    would = done("queue", "unsubscribe", "lines", "slow", "--by", "ann", "--dry-run")
    assert would["removed"] == {"dead_letter": 1, "pending_slice": 1, "pending_subscription": 1}
    assert "slow" in done("queue", "list", "lines")["subscriptions"]
    gone = done("queue", "unsubscribe", "lines", "slow", "--by", "ann", "--why", "moved")
    assert (gone["removed"], gone["dry_run"], gone["by"]) == (would["removed"], False, "ann")
    assert "6 messages not read, 0 pending, 0 waiting for a retry, 1 dead letter" in gone["kept"][0]

    assert list(done("queue", "list", "lines")["subscriptions"]) == ["fast"]
    assert rows_that_name(database, "slow") == {"stormproof.forgotten": 1}
    assert len(fast.drop_consumed()) == 2
    with pytest.raises(UsageError, match="no subscription 'slow'"):
        slow.confirm(Lease("c", 1))
    assert "no subscription 'slow'" in done.ended("queue", "unsubscribe", "lines", "slow", "--by", "ann")[2]
    assert len(opened(read_by("slow"), Lease("e", 1), 9)) == 1, "what no other reader was done with, from the start"


def test_a_reader_that_works_or_is_a_topologys_is_not_unsubscribed(
    done: CommandLine, database: Database, read_by: Callable[[str], PostgresQueue]
) -> None:
    program = read_by("program")
    opened(program, Lease("a", 1), 2)
    error = done("queue", "unsubscribe", "lines", "program", "--by", "ann", status=2)["error"]["message"]
    assert "somebody reads as program, with a lease until" in error
    program.abort(Lease("a", 1))
    done("run", "app.py:words", "--engine", "inline", "--until-idle")
    done("run", "app.py:both", "--engine", "inline", "--until-idle")
    readers = {reader: name for reader, name in done("queue", "list", "lines")["topologies"].items() if name}
    assert sorted(readers.values()) == ["both:lines", "words"]
    for subscription, topology in readers.items():
        error = done("queue", "unsubscribe", "lines", subscription, "--by", "ann", status=2)["error"]["message"]
        assert f"stormproof forget {topology.partition(':')[0]} --by NAME" in error
    assert done("queue", "unsubscribe", "lines", "program", "--by", "ann")["removed"] == {
        "pending_slice": 1,
        "pending_subscription": 1,
    }
    assert sorted(done("queue", "list", "lines")["topologies"].values()) == ["both:lines", "words"]


def test_a_put_into_a_database_without_a_ledger_says_what_makes_it_and_no_more(database: Database) -> None:
    with (
        closing(PostgresQueue("orders", schema="line string", database=database)) as orders,
        pytest.raises(UsageError, match="stormproof ledger migrate") as refused,
    ):
        orders.put([b"a"])
    lines = traceback.format_exception(refused.value)
    assert "stormproof ledger migrate" in lines[-1]
    assert not any("UndefinedTable" in line or "another exception" in line for line in lines)
