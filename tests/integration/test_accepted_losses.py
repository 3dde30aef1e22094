"""What a server lost is accepted by a person who looked into it: the verdict is of all else, until something new is lost."""

from __future__ import annotations

import re
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from support.brokers.rabbitmq_server import RabbitMQServer, RabbitMQStreamHarness
from support.brokers.redis_server import RedisServer
from support.command_line import CommandLine, command_line_in
from support.queues import prepared_database
from support.web import READER, client, page_of

from stormproof import PostgresSink, RabbitMQStreamSource, RedisStreamSource, Topology
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.web.people import WebOptions

pytestmark = [pytest.mark.postgres]

NAME = "forgets"
LOST = "removed from the stream before they were read"


@pytest.fixture
def command(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    return command_line_in(tmp_path, prepared_database(database), "empty.py", "", monkeypatch, capsys)


def ran(topology: Topology, database: Database, folder: Path) -> None:
    settings = Settings(database_url=database.adbc_uri, home=folder, poll_interval_s=0.001)
    topology.run(engine="inline", until_idle=True, settings=settings)


def redis_topology(server: RedisServer, database: Database, spouts: int = 1) -> Topology:
    topology = Topology(NAME)
    for number in range(spouts):
        source = RedisStreamSource(f"{NAME}{number}", url=server.url, database=database, on_gap="record", rng=Random(1))
        topology.stream(f"lines{number}", source).into(PostgresSink(f"forgets{number}", database=database))
    return topology


def faces(command: CommandLine, database: Database) -> dict[str, list[str]]:
    """What each face says of losses that nobody accepted."""
    app = page_of(database, WebOptions(lambda _: READER))
    pages = [client(app).get(address).text for address in ("/", f"/topology?topology={NAME}")]
    app.close()
    ended, text, _ = command.ended("status", NAME)
    of_all = command("status")["topologies"][0]
    metrics = command("metrics")["metrics"]
    return {
        "the page": [line for page in pages for line in page.splitlines() if "that nobody accepted" in line],
        "status": [line for line in text.splitlines() if line.startswith("PROBLEM loss_open")] * (ended == 1),
        "status --json": [one["text"] for one in of_all["problems"] if one["kind"] == "loss_open"],
        "metrics": [str(one) for one in metrics if one["value"] and "loss_open" in one["labels"].values()],
    }


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("spouts", [1, 2])
def test_what_a_server_removed_is_a_violation_until_it_is_accepted_and_what_it_removes_later_is_one_again(
    database: Database, tmp_path: Path, redis_server: RedisServer, command: CommandLine, spouts: int
) -> None:
    topology = redis_topology(redis_server, database, spouts)
    streams = [f"{NAME}{number}" for number in range(spouts)]

    def lose(kept: int) -> None:
        for stream in streams:
            redis_server.put(stream, [b"%d" % n for n in range(5)])
            with redis_server.client() as client:
                client.xtrim(stream, maxlen=kept, approximate=False)
        ran(topology, database, tmp_path)

    with redis_server.client() as client:
        client.delete(*streams)
    for stream in streams:
        redis_server.put(stream, [b"first"])
    ran(topology, database, tmp_path)
    command("audit", "verify", NAME)
    assert not any(faces(command, database).values())
    lose(2)
    assert all(faces(command, database).values())
    wrong = command("audit", "verify", NAME, status=1)["violations"]
    assert [LOST in one["text"] for one in wrong] == [True] * spouts
    assert "ledger accept-loss" in wrong[0]["text"]
    shown = command("ledger", "accept-loss", NAME)
    assert len(shown["records"]) == spouts
    assert not shown["accepted"]
    command("audit", "verify", NAME, status=1)  # to look changes nothing
    lose(1)
    _, _, refused = command.ended("ledger", "accept-loss", NAME, shown["fingerprint"])
    assert "does not name what is on record" in refused
    now = command("ledger", "accept-loss", NAME)
    command("ledger", "accept-loss", NAME, now["fingerprint"], "--by", "Ada", "--why", "the producer sent them again")
    clean = command("audit", "verify", NAME)
    notes = [one["text"] for one in clean["notices"] if one["kind"] == "loss_accepted"]
    assert len(notes) == 2 * spouts
    assert not any(faces(command, database).values())
    assert all("accepted by Ada: the producer sent them again" in one for one in notes)
    assert command("ledger", "accept-loss", NAME)["records"] == []
    assert "accept_loss\tAda" in command.text("audit", "actions", NAME)
    command("audit", "verify", NAME, "--since", "last")
    lose(3)
    (still,) = faces(command, database)["status --json"]
    assert still.startswith(f"{spouts} loss")
    later = command("audit", "verify", NAME, "--since", "last", status=1)["violations"]
    assert [LOST in one["text"] for one in later] == [True] * spouts


# ---- a RabbitMQ stream that cannot be told


class Segmented:
    """A stream whose broker removes one segment for each that is full, and whose segments have equally many messages: what
    the broker keeps in one of each publisher has a size, too, so there is one publisher.
    """

    def __init__(self, server: RabbitMQServer, database: Database) -> None:
        self.server = server
        small: dict[str, object] = {"x_max_length_bytes": 20_000, "x_stream_max_segment_size_bytes": 5_000}
        RabbitMQStreamHarness(database, NAME, server=server, arguments=small)
        self.end = 0
        self._connection = server.connect()
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()

    @property
    def first(self) -> int:
        return int(self.server.first(NAME))

    def put(self) -> None:
        """One message, as large as each other one."""
        self._channel.basic_publish("", NAME, b"%06d" % self.end + b" " * 500)
        self.end += 1

    def close(self) -> None:
        self._connection.close()

    def moves(self) -> int:
        """Put messages until the broker removes some; the first one that is left.

        One by one: it removes as much as is too much when it comes to it, which may be later than it begins a segment.
        """
        before = self.first
        while (now := self.first) == before:
            self.put()
        return now


@pytest.mark.broker("rabbitmq")
def test_a_stream_whose_last_message_that_was_read_is_gone_cannot_be_told_until_that_is_accepted(
    database: Database, tmp_path: Path, rabbitmq: RabbitMQServer, command: CommandLine
) -> None:
    topology = Topology(NAME)
    source = RabbitMQStreamSource(NAME, url=rabbitmq.url, database=database, on_gap="record")
    topology.stream("lines", source).into(PostgresSink(NAME, database=database))
    with closing(Segmented(rabbitmq, database)) as stream:
        stream.put()
        boundary, *later = [stream.moves() for _ in range(4)]
        segment = min(right - left for left, right in pairwise([boundary, *later]))
        while (stream.end - boundary) % segment:
            stream.put()
        ran(topology, database, tmp_path)
        command("audit", "verify", NAME)
        read = stream.end
        while (left := stream.moves()) < read:
            pass
        assert left == read, "the segment behind the last message that was read begins the stream"
    ran(topology, database, tmp_path)
    found = command("audit", "verify", NAME, status=4)
    (unknown,) = found["unknowns"]
    assert re.search(r"cannot be told: (it may be one that the broker keeps|the message at offset)", unknown["text"])
    assert found["violations"] == []
    shown = command("ledger", "accept-loss", NAME)
    command("ledger", "accept-loss", NAME, shown["fingerprint"], "--by", "Ada", "--why", "the broker never restarted")
    command("audit", "verify", NAME)
    ran(topology, database, tmp_path)  # no new doubt: the last message that was opened is there
    command("audit", "verify", NAME)
