"""`RabbitMQStreamSource` over a real broker: ranges of offsets, retention, streams that are not the same any more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pytest
from support.blows import Action
from support.brokers import running, until
from support.brokers.rabbitmq_server import RabbitMQServer, RabbitMQStreamHarness
from support.chain import Chain, one_way_each, ordeal, shuffled
from support.crashes import Cell
from support.databases import fresh_database
from support.delivering_runs import (
    RabbitMQStreamStand,
    rabbitmq_stream,
    shape_of,
    stream_forgetting,
    stream_moving_on,
)
from support.queues import prepared_database
from support.verdicts import verified

from stormproof import PostgresSink, RabbitMQSource, RabbitMQStreamSource, Topology
from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.base.message import FailureReason, Guarantee, MessageFailure, MessageId, Token
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.pending.continuity import looks_in
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.kafka.position import OffsetRange
from stormproof.core.source.metadata import Metadata
from stormproof.core.source.rabbitmq.client import BrokerQueue
from stormproof.core.source.rabbitmq.stream_position import StreamLookahead, whole
from stormproof.core.source.rabbitmq.stream_reader import StreamSliceReader, let_go, messages_in
from stormproof.core.start.settings import Settings
from stormproof.testing import messages_of

pytestmark = [pytest.mark.postgres, pytest.mark.broker("rabbitmq"), pytest.mark.sampled(0.5)]

A, B, C = Lease("a", 1), Lease("b", 1), Lease("c", 1)
ANY: Final = Limit(1_000)
SMALL: Final[dict[str, object]] = {"x_max_length_bytes": 20_000, "x_stream_max_segment_size_bytes": 5_000}
NOTHING: Final = Metadata()


@pytest.fixture(scope="module")
def shared_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """One database for all cases: they keep apart by their names."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create database test_rabbitmq_stream template template0")
    yield prepared_database(postgres.database.with_name("test_rabbitmq_stream"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"drop database test_rabbitmq_stream with (force)")


@pytest.fixture
def harness(
    request: pytest.FixtureRequest, shared_database: Database, rabbitmq: RabbitMQServer
) -> Iterator[RabbitMQStreamHarness]:
    harness = RabbitMQStreamHarness(shared_database, request.node.name, server=rabbitmq)
    yield harness
    harness.close()


@pytest.fixture
def small(
    request: pytest.FixtureRequest, shared_database: Database, rabbitmq: RabbitMQServer
) -> Iterator[RabbitMQStreamHarness]:
    """Retention removes all but the last few segments."""
    harness = RabbitMQStreamHarness(shared_database, request.node.name, server=rabbitmq, arguments=SMALL)
    yield harness
    harness.close()


def numbers(first: int, stop: int, size: int = 0) -> list[bytes]:
    return [b"%d" % number + b" " * size for number in range(first, stop)]


def opened(source: Any, lease: Lease, limit: Limit = ANY) -> list[bytes]:
    slice_ = source.open(lease, limit, 7)
    return [] if slice_ is None else [message.payload for message in messages_of(source, slice_)]


# ---- ranges


def test_a_slice_ends_at_the_limit_in_messages_or_bytes_and_the_next_one_goes_on(
    harness: RabbitMQStreamHarness,
) -> None:
    harness.put(numbers(0, 30, 98))
    source = harness.view()
    assert len(opened(source, A, Limit(messages=7))) == 7
    assert len(opened(source, B, Limit(messages=100, bytes=1_000))) == 10
    rest = opened(source, C)
    assert [int(payload) for payload in rest] == list(range(17, 30))
    harness.put(numbers(30, 31))
    assert opened(source, Lease("d", 1)) == [b"30"]


def test_a_slice_is_read_by_several_readers_each_its_own_offsets(harness: RabbitMQStreamHarness) -> None:
    harness.put(numbers(0, 10))
    source = harness.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    parts = [
        [payload for batch in reader.read(7, frozenset([4]), 2) for payload in batch.column("payload").to_pylist()]
        for reader in source.readers(slice_, 3)
    ]
    assert parts == [[b"0", b"1", b"2"], [b"3", b"5"], [b"6", b"7", b"8", b"9"]]


def test_subscriptions_are_independent_and_nothing_is_taken_from_the_stream(harness: RabbitMQStreamHarness) -> None:
    harness.put(numbers(0, 3))
    for subscription in ("one", "two"):
        source = harness.view(subscription)
        assert opened(source, A) == numbers(0, 3)
        source.confirm(A)
        assert opened(source, B) == []


@pytest.mark.parametrize(("start", "expected"), [("earliest", 0), ("latest", 5), (3, 3), (5, 5)])
def test_where_a_new_subscription_begins(harness: RabbitMQStreamHarness, start: Any, expected: int) -> None:
    harness.put(numbers(0, 5))
    source = harness.view(start=start)
    harness.put(numbers(5, 7))
    assert opened(source, A) == numbers(expected, 7)


def test_a_start_by_time_begins_with_the_chunk_of_that_time(harness: RabbitMQStreamHarness) -> None:
    harness.put(numbers(0, 2))
    assert opened(harness.view("before", start=datetime(2020, 1, 1, tzinfo=UTC)), A) == numbers(0, 2)
    assert opened(harness.view("after", start=datetime(2100, 1, 1, tzinfo=UTC)), A) == []


def test_a_start_behind_the_end_is_refused(harness: RabbitMQStreamHarness) -> None:
    with pytest.raises(UsageError, match="start names offset 7, and the stream ends at 0"):
        harness.view(start=7)


def test_metadata_stands_behind_the_fields_and_a_failed_message_keeps_it(harness: RabbitMQStreamHarness) -> None:
    harness.options = {"metadata": ("offset", "message_id", "routing_key", "headers"), "max_attempts": 1}
    harness.server.put(harness.name, [b"a", b"b"], ["1", "2"], {"kind": "x", "n": 7})
    source = harness.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    (batch,) = [batch for reader in source.readers(slice_, 1) for batch in reader.read(7, frozenset(), 10)]
    rows = source.decoder.decode(batch.column("payload")).rows.to_pylist()
    headers = [{"name": "kind", "value": "x"}, {"name": "n", "value": "7"}]
    assert rows == [
        {"line": line, "offset": n, "message_id": id_, "routing_key": harness.name, "headers": headers}
        for n, (line, id_) in enumerate([("a", "1"), ("b", "2")])
    ]
    failure = MessageFailure(MessageId(1), 0, Token(0), FailureReason.ERROR, "b", "boom", "x", counted=True)
    assert source.confirm(A, [failure]).dead == ("0-1",)
    assert source.edit("0-1", b"new", by="me", why="test")
    again = source.open(B, ANY, 7)
    assert again is not None
    (batch,) = [batch for reader in source.readers(again, 1) for batch in reader.read(7, frozenset(), 10)]
    assert source.decoder.decode(batch.column("payload")).rows.to_pylist() == [{**rows[1], "line": "new"}]


def test_gaps_are_read_as_gaps(harness: RabbitMQStreamHarness) -> None:
    """The broker has offsets for what it keeps itself: a range has a list of those that are messages."""
    harness.put(numbers(0, 10))
    broker = BrokerQueue(harness.server.url, harness.name, f"RabbitMQ stream {harness.name}")  # as the harness's source
    with_gaps = OffsetRange.of(whole(harness.name, 2, 9), np.array([3, 4, 8], np.int64), 0)
    assert [message.offset for message in messages_in(broker, with_gaps)] == list(range(3, 9))
    (batch,) = StreamSliceReader(broker, with_gaps.head(2, 0), NOTHING).read(7, frozenset(), 10)
    assert batch.column("id").to_pylist() == [3, 4]
    let_go(broker)


def test_a_connection_is_let_go_with_messages_on_their_way(
    harness: RabbitMQStreamHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """The client would refuse them, and the broker answer that with an error."""
    harness.put(numbers(0, 200, 2_000))
    source = harness.view(start="earliest")
    assert len(opened(source, A, Limit(1))) == 1
    source.drop_connections()
    assert len(opened(source, B, Limit(300))) == 199
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# ---- retention


def test_messages_that_retention_took_before_they_were_read_are_refused_by_name(small: RabbitMQStreamHarness) -> None:
    source = small.view()
    small.put(numbers(0, 200, 500))
    with pytest.raises(PositionMismatch, match=r"offsets 0 to \d+ were removed by the stream's retention") as refused:
        opened(source, A)
    assert "on_gap='record'" in str(refused.value)


def test_with_on_gap_record_they_are_on_record_and_the_run_goes_on(
    small: RabbitMQStreamHarness, shared_database: Database, tmp_path: Path
) -> None:
    small.options = {"on_gap": "record"}
    small.put(numbers(0, 3))
    topology = Topology("stream_gap")
    source = small.unsubscribed()
    topology.stream("lines", source).into(PostgresSink("stream_gap", database=shared_database))
    settings = Settings(database_url=shared_database.adbc_uri, home=tmp_path, poll_interval_s=0.001)
    topology.run(engine="inline", until_idle=True, settings=settings)
    small.put(numbers(3, 200, 500))
    topology.run(engine="inline", until_idle=True, settings=settings)
    with connect(shared_database, application_name="tests") as connection:
        found = {int(line) for (line,) in connection.execute("select line from stream_gap").fetchall()}
    first = min(found - {0, 1, 2})
    assert found == {0, 1, 2, *range(first, 200)}
    report = verified("stream_gap", shared_database)
    (violation,) = report.violations
    assert re.search(r"at least offsets 3 to \d+ were removed by the stream's retention", violation.text)


def test_a_slice_that_retention_took_is_refused_by_name(small: RabbitMQStreamHarness) -> None:
    small.put(numbers(0, 5))
    source = small.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    small.put(numbers(5, 200, 500))
    with pytest.raises(PositionMismatch, match=r"offsets 0 to \d were opened and cannot be read any more"):
        messages_of(source, slice_)


def test_a_stream_of_which_retention_has_left_nothing_is_no_other_one(
    request: pytest.FixtureRequest, shared_database: Database, rabbitmq: RabbitMQServer
) -> None:
    """Less may be kept than a segment takes: then the broker removes all as soon as one is full."""
    less: dict[str, object] = {**SMALL, "x_max_length_bytes": 1_000}
    harness = RabbitMQStreamHarness(shared_database, request.node.name, server=rabbitmq, arguments=less)
    found, source = list[bytes](), harness.view(on_gap="record")
    for number in range(24):  # three segments
        harness.put(numbers(number, number + 1, 500))
        source = harness.view(epoch=number // 2 + 1, on_gap="record")  # another driver for each second one
        lease = Lease(f"l{number}", number // 2 + 1)
        found += opened(source, lease)
        source.confirm(lease)
    with source.rows() as rows:
        looks = looks_in(rows.position() or {})
    assert len(found) + sum(one.messages for one in looks) >= 24  # offsets that the broker keeps for itself count, too
    harness.close()


def test_a_stream_that_was_set_back_below_what_retention_took_unread_is_refused_or_read_from_there(
    shared_database: Database, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing was opened behind what was removed, since nothing has arrived, it is not on record yet."""
    with running(RabbitMQServer, tmp_path_factory) as server:
        streams = [
            RabbitMQStreamHarness(shared_database, name, server=server, arguments=SMALL, options={"on_gap": "record"})
            for name in ("opened", "not opened")
        ]
        server.until_kept("rabbit_stream_coordinator", "coordination")
        for stream in streams:
            stream.put(numbers(0, 5))
            source = stream.view()
            assert opened(source, A) == numbers(0, 5)
            source.confirm(A)
            source.close()
        server.save("five")
        for stream in streams:
            server.until_up(stream.name)
            stream.put(numbers(5, 100, 500))
        first, later = (stream.view(epoch=2) for stream in streams)
        assert opened(first, Lease("b", 2))
        with monkeypatch.context() as patched:
            patched.setattr(StreamLookahead, "behind", lambda *_: [])
            assert opened(later, Lease("b", 2)) == []
        server.set_back("five")
        for stream in streams:
            server.until_up(stream.name)
            stream.put(numbers(1_000, 1_115))  # beyond all that was opened, and not so many that this was removed
        with pytest.raises(PositionMismatch, match="is not the one that was opened"):
            until(lambda: bool(waited(first)), "it is never seen")
        until(lambda: waited(later)[:1] == [server.first(streams[1].name)], "they are not read from the first on")
        for stream in streams:
            stream.close()


def waited(source: RabbitMQStreamSource) -> list[bytes]:
    """As a run does, which waits for a broker that is away."""
    with suppress(StoreUnavailable):
        return opened(source, Lease("c", 2))
    return []


# ---- another stream under the same name


@pytest.mark.parametrize("messages", [1, 2, 5, 9])
def test_a_stream_that_was_deleted_and_made_again_is_refused_by_name(
    harness: RabbitMQStreamHarness, messages: int
) -> None:
    harness.put(numbers(0, 5))
    source = harness.view()
    assert opened(source, A) == numbers(0, 5)
    source.confirm(A)
    source.close()
    harness.server.delete(harness.name)
    harness.declare()
    after = harness.view(epoch=2)
    assert opened(after, Lease("b", 2)) == [], "it has no message, as where retention left none"
    harness.put(numbers(100, 100 + messages))
    text = "is not the one that was opened" if messages >= 5 else f"it ends at offset {messages}"
    with pytest.raises(PositionMismatch, match=text):
        opened(after, Lease("b", 2))


def test_so_it_is_where_nothing_was_opened_yet(harness: RabbitMQStreamHarness) -> None:
    harness.put(numbers(0, 5))
    harness.view(start="latest").close()
    harness.server.delete(harness.name)
    harness.declare()
    harness.put(numbers(0, 2))
    with pytest.raises(PositionMismatch, match="it ends at offset 2"):
        opened(harness.view(epoch=2), Lease("b", 2))


def test_a_stream_that_is_deleted_meanwhile_stops_the_run_by_name(harness: RabbitMQStreamHarness) -> None:
    harness.put(numbers(0, 5))
    source = harness.view()
    assert opened(source, A) == numbers(0, 5)
    harness.server.delete(harness.name)
    with pytest.raises(UsageError, match=r"no such queue|was deleted"):
        opened(source, B)


def test_what_is_no_stream_is_refused_by_name(harness: RabbitMQStreamHarness) -> None:
    harness.server.declare("a queue")
    harness.server.put("a queue", [b"a"])
    source = RabbitMQStreamSource("a queue", url=harness.server.url, database=harness.database)
    with pytest.raises(UsageError, match=r"no stream .*; read it with RabbitMQSource\('a queue'\)"):
        source.subscribe("s", 1)
    source.close()
    assert harness.server.ready("a queue") == 1
    missing = RabbitMQStreamSource("nowhere", url=harness.server.url, database=harness.database)
    with pytest.raises(UsageError, match="no such queue"):
        missing.subscribe("s", 1)
    missing.close()
    away = RabbitMQStreamSource("s", url="amqp://u:sesame@127.0.0.1:1/", database=harness.database)
    with pytest.raises(StoreUnavailable) as refused:
        away.subscribe("s", 1)
    away.close()
    for shown in (
        str(refused.value),
        repr(away),
        repr(BrokerQueue("amqp://u:sesame@h/", "q", "w")),
        json.dumps(refused.value.details),
    ):
        assert "sesame" not in shown
    with pytest.raises(UsageError, match=r"RabbitMQStreamSource\('s'\)"):
        raise_for_stream(harness)


def raise_for_stream(harness: RabbitMQStreamHarness) -> None:
    harness.server.declare("s", "stream")
    source = RabbitMQSource("s", url=harness.server.url, database=harness.database)
    source.subscribe("s", 1)
    try:
        source.open(A, ANY, 7)
    finally:
        source.drop_connections()


# ---- drivers and the broker die


def stand_of(
    postgres: EmbeddedPostgres, server: RabbitMQServer, folder: Path, seed: int, name: str, database: Database
) -> RabbitMQStreamStand:
    name = f"stream_{name}"
    server.declare(name, "stream")
    cell = Cell(
        name,
        None,
        Guarantee.EXACTLY_ONCE,
        folder,
        prepared_database(database),
        f"{server.url} {name}",
        batch_messages=4,
    )
    del postgres
    return RabbitMQStreamStand(cell, database, queue=name, rng=Random(seed), broker=server)


@pytest.mark.sampled(0.12)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(8))
def test_a_misfortune_at_every_failpoint(
    postgres: EmbeddedPostgres, rabbitmq: RabbitMQServer, tmp_path: Path, seed: int, part: int
) -> None:
    """Killed as a process, failed, taken over from, or with the broker killed: into Delta and Postgres."""
    ways = [Action.KILL, Action.RAISE, Action.KILL, Action.TAKE_OVER]
    shape = shape_of(rabbitmq_stream, journal=False)
    cells = shuffled(one_way_each(ways, seed, None, shape), Random(seed))[part::8]
    with fresh_database(postgres.database, f"test_stream_part{part}") as database:
        stand = stand_of(postgres, rabbitmq, tmp_path, seed, f"part{part}", database)
        chain = Chain(stand, shape, len(cells))
        for line in chain.run(cells):
            print(line)
        if part == 0:
            print(chain.undergo(ordeal(FAILPOINTS["run.after"], Action.BROKER)))


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize(
    ("build", "point", "message"),
    [
        (stream_moving_on, "open.after", "were handed out to no batch"),
        (stream_forgetting, "finish.after", "holds .* times"),
    ],
    ids=["before", "after"],
)
def test_a_position_that_moves_apart_from_the_ledger_loses_or_doubles(
    postgres: EmbeddedPostgres,
    rabbitmq: RabbitMQServer,
    tmp_path: Path,
    seed: int,
    build: Callable[[Cell], Topology],
    point: str,
    message: str,
) -> None:
    with fresh_database(postgres.database, f"test_stream_{point[:4]}") as database:
        stand = stand_of(postgres, rabbitmq, tmp_path, seed, f"control_{point[:4]}", database)
        with pytest.raises(AssertionError, match=message):
            Chain(stand, shape_of(build, journal=False)).undergo(ordeal(FAILPOINTS[point], Action.KILL))
