"""`queue import`: what lies in a broker comes into a queue once, byte by byte, whatever kills the command meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from support.brokers.kafka import KafkaBroker
from support.brokers.redis_server import RedisServer
from support.command_line import CommandLine, command_line_in
from support.queues import prepared_database, put

from stormproof import PostgresQueue
from stormproof.core.base.failpoint import ENV
from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres

FILE: Final = """
from stormproof import KafkaSource, PostgresQueue, RedisStreamSource
from stormproof.trident.cli.queue import import_topology

def kafka(servers: str, topic: str) -> KafkaSource:
    return KafkaSource(topic, servers=servers, schema="payload binary")

def redis(url: str, stream: str) -> RedisStreamSource:
    return RedisStreamSource(stream, url=url, schema="payload binary", field="payload")

def older(queue: str) -> PostgresQueue:
    return PostgresQueue(queue, schema="payload binary")

def imported(url: str, stream: str):
    return import_topology("jobs", redis(url, stream))

lines = PostgresQueue("older")
nothing = 7
"""
EVERYWHERE: Final = (
    *("open.after", "run.after", "prepare.in_transaction", "prepare.after", "postgres.after_rows"),
    *("postgres.after_commit", "finish.in_transaction", "finish.after"),
)
JOURNAL: Final = (
    "journal.in_transaction",
    "journal.after_write",
    "journal.before_acknowledge",
    "journal.after_acknowledge",
)
ODD: Final = [b"", b"\xff\x00\xfe", b"line\nline", '{"a": "\u00e4"}'.encode()]


class Importer:
    """A command line beside a database, and what its queue holds."""

    def __init__(self, database: Database, command: CommandLine) -> None:
        self.database = database
        self.command = command

    def die_at(self, failpoint: str, *words: str) -> None:
        """Run the command in a process of its own, which is killed at this point."""
        done = subprocess.run(
            [sys.executable, "-m", "stormproof", *words],
            env={**os.environ, ENV: f"{failpoint}=kill"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, (failpoint, done.returncode, done.stderr[-2_000:])

    def held(self, queue: str = "jobs") -> Counter[bytes]:
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            rows = connection.execute(f'select payload from stormproof_queue."{queue}"'.encode()).fetchall()
        return Counter(payload for (payload,) in rows)


@pytest.fixture
def importer(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Importer:
    prepared_database(database)
    return Importer(database, command_line_in(tmp_path, database, "sources.py", FILE, monkeypatch, capsys))


def killed_everywhere(
    importer: Importer, produce: Callable[[list[bytes]], Any], places: tuple[str, ...], *source: str
) -> None:
    """Some messages more and a death at each place; then the queue holds each message once, and says so."""
    produced = Counter[bytes](ODD)
    produce(ODD)
    for number, place in enumerate(places):
        more = [f"{number}-{i}".encode() for i in range(5)]
        produced.update(more)
        produce(more)
        importer.die_at(place, "queue", "import", "jobs", *source, "--max-messages", "3")
    report = importer.command("queue", "import", "jobs", *source)
    assert (report["stopped"], report["dead_letters"], report["rejected"]) == ("idle", 0, 0)
    assert importer.held() == produced
    assert importer.command("audit", "verify", report["topology"])["violations"] == []
    assert importer.command("queue", "import", "jobs", *source)["messages"] == 0


def test_a_kafka_topic_is_imported_once_whatever_dies(importer: Importer, kafka: KafkaBroker) -> None:
    topic = kafka.topic(partitions=2)
    source = ("sources.py:kafka", "--param", f"servers={kafka.servers}", "--param", f"topic={topic}")
    killed_everywhere(importer, lambda payloads: kafka.put(topic, payloads), EVERYWHERE, *source)


def redis_source(server: RedisServer, name: str) -> tuple[str, ...]:
    return ("--param", f"url={server.url}", "--param", f"stream={name}")


def test_a_redis_stream_is_imported_once_whatever_dies(
    importer: Importer, redis_server: RedisServer, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    source = ("sources.py:redis", *redis_source(redis_server, name))
    killed_everywhere(importer, lambda payloads: redis_server.put(name, payloads), (*EVERYWHERE, *JOURNAL), *source)


def test_without_a_ledger_of_what_was_written_an_import_doubles(
    importer: Importer, redis_server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """The negative control: the same topology at least once."""
    name = request.node.name
    redis_server.put(name, [b"a", b"b"])
    run = ("run", "sources.py:imported", *redis_source(redis_server, name), "--engine", "inline", "--until-idle")
    with closing(PostgresQueue("jobs", database=importer.database)) as queue:
        queue.make_ready()
    importer.die_at("postgres.after_commit", *run, "--guarantee", "at-least-once")
    importer.command(*run, "--guarantee", "at-least-once")
    assert importer.held() == Counter({b"a": 2, b"b": 2})


def test_a_queue_is_imported_into_another_and_read_from_there(importer: Importer) -> None:
    put(importer.database, "older", ODD)
    source = ("sources.py:older", "--param", "queue=older")
    looked = importer.command("queue", "import", "jobs", *source, "--dry-run")
    assert looked["outcome"] == "would commit"
    report = importer.command("queue", "import", "jobs", *source, "--name", "move")
    assert (report["topology"], report["messages"]) == ("move", len(ODD))
    assert importer.held() == Counter(ODD)
    assert importer.command("queue", "peek", "jobs")["messages"][2]["text"] == "line\nline"
    found = importer.command("audit", "verify", "move")
    assert [notice["kind"] for notice in found["notices"]] == ["not_counted"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("jobs", "sources.py:lines"), "schema='payload binary'"),
        (("older", "sources.py:older", "--param", "queue=older"), "cannot be imported into itself"),
        (("jobs", "sources.py:nothing"), "neither a PendingSource nor a function that returns one"),
        (("jobs", "sources.py:absent"), "it has kafka, lines, older, redis"),
        (("jobs", "nowhere.py:kafka"), "there is no such file"),
        (("no/queue", "sources.py:older", "--param", "queue=older"), "no/queue"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(importer: Importer, words: tuple[str, ...], said: str) -> None:
    assert said in importer.command("queue", "import", *words, status=2)["error"]["message"]
