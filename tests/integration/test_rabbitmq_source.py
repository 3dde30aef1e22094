"""`RabbitMQSource` over a real broker: what comes again is known by its publisher's id, confirmed and not applied again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final
from zlib import crc32

import pytest
from support.brokers import running, until
from support.brokers.cutter import Cutter
from support.brokers.harness import opened, tuples_of
from support.brokers.lives import SOON, Killed, Life, kill_after, kill_at
from support.brokers.rabbitmq_server import RabbitMQHarness, RabbitMQServer
from support.queues import prepared_database

from stormproof import Guarantee, RabbitMQSource
from stormproof.core.base.errors import Fenced, MissingRight, StoreUnavailable, UsageError
from stormproof.core.base.failpoint import watched
from stormproof.core.base.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.pending.journal import Delivery, JournalCounts
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.rabbitmq.client import limits_said
from stormproof.testing import messages_of

pytestmark = [pytest.mark.postgres, pytest.mark.broker("rabbitmq"), pytest.mark.sampled(0.34)]

A, B, C = Lease("a", 1), Lease("b", 1), Lease("c", 1)
ANY: Final = Limit(1_000)


@pytest.fixture(scope="module")
def shared_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """One database for all cases: they keep apart by their names."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create database test_rabbitmq template template0")
    yield prepared_database(postgres.database.with_name("test_rabbitmq"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"drop database test_rabbitmq with (force)")


@pytest.fixture(params=["classic", "quorum"])
def harness(
    request: pytest.FixtureRequest, shared_database: Database, rabbitmq: RabbitMQServer
) -> Iterator[RabbitMQHarness]:
    harness = RabbitMQHarness(shared_database, request.node.name, server=rabbitmq, queue_type=request.param)
    yield harness
    harness.close()


@pytest.fixture
def classic(
    request: pytest.FixtureRequest, shared_database: Database, rabbitmq: RabbitMQServer
) -> Iterator[RabbitMQHarness]:
    harness = RabbitMQHarness(shared_database, request.node.name, server=rabbitmq)
    yield harness
    harness.close()


# ---- one message after the other


def test_a_message_is_confirmed_to_the_broker_after_its_slice_and_the_rest_is_given_back(
    harness: RabbitMQHarness,
) -> None:
    harness.put([b"a", b"b", b"c"])
    source = harness.view()
    assert opened(source, A, Limit(2)) == [b"a", b"b"]
    assert harness.server.ready(harness.name) == 1, "no more is taken than is opened"
    source.confirm(A)
    source.maintain()
    source.close()
    harness.server.until_left(harness.name, 1)


def test_a_confirmation_that_is_owed_survives_a_crash_and_is_paid_with_the_new_handle(harness: RabbitMQHarness) -> None:
    harness.put([b"a", b"b"])
    source = harness.view()
    assert opened(source, A) == [b"a", b"b"]
    source.confirm(A)  # and here the driver dies
    source.drop_connections()
    harness.server.until_left(harness.name, 2)
    after = harness.view(epoch=2)
    assert opened(after, Lease("b", 2)) == []
    assert after.journal_counts() == JournalCounts(messages=2, owed=0, suppressed=2)
    after.close()
    assert harness.server.ready(harness.name) == 0


def test_a_message_that_its_publisher_repeats_is_applied_once(classic: RabbitMQHarness) -> None:
    classic.server.put(classic.name, [b"a", b"a", b"b"], ["1", "1", "2"])
    source = classic.view()
    assert opened(source, A) == [b"a", b"b"]
    source.confirm(A)
    classic.server.put(classic.name, [b"a"], ["1"])
    assert opened(source, B) == []
    source.close()
    assert classic.server.ready(classic.name) == 0


def test_the_broker_is_asked_for_no_more_than_may_wait(classic: RabbitMQHarness) -> None:
    classic.put([b"%d" % n for n in range(20)])
    source = classic.view(prefetch=5)
    assert len(opened(source, A)) == 5
    assert 20 - 6 <= classic.server.ready(classic.name) <= 20 - 5, "one came by basic.get"
    source.confirm(A)
    source.maintain()
    assert len(opened(source, B)) == 5


@pytest.mark.parametrize("id_from", ["header:key", "field:key"])
def test_an_id_may_stand_in_a_header_or_in_a_field(classic: RabbitMQHarness, id_from: str) -> None:
    payload = json.dumps({"key": 7}).encode()
    for _ in range(2):
        classic.server.put(classic.name, [payload], [None], {"key": 7})
    assert opened(classic.view(id_from=id_from), A) == [payload]


def test_metadata_stands_behind_the_fields_and_a_failed_message_keeps_it(harness: RabbitMQHarness) -> None:
    names = ("message_id", "routing_key", "headers", "redelivered", "delivery_count")
    harness.options = {"metadata": names, "max_attempts": 1}
    harness.server.put(harness.name, [b"a", b"b"], ["1", "2"], {"n": 7})
    with harness.server.connect() as connection:
        channel = connection.channel()
        for _ in range(2):
            (method, _, _) = channel.basic_get(harness.name)
            channel.basic_nack(method.delivery_tag, requeue=True)
            channel.basic_qos(prefetch_count=1)
    source = harness.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    rows = sorted(tuples_of(source, slice_), key=lambda row: str(row["message_id"]))
    counts = [(row["redelivered"], row["delivery_count"]) for row in rows]
    counted = [1, 2, None] if harness.queue_type == "quorum" else [None]
    assert any(redelivered for redelivered, _ in counts)
    assert {count for _, count in counts} <= set(counted)
    assert [(row["line"], row["message_id"], row["headers"]) for row in rows] == [
        (line, id_, [{"name": "n", "value": "7"}]) for line, id_ in (("a", "1"), ("b", "2"))
    ]
    source.drop_connections()  # they come again, and what the broker says of them is another thing
    harness.server.until_left(harness.name, 2)
    failure = MessageFailure(MessageId(0), 0, Token(0), FailureReason.ERROR, "b", "boom", "x", counted=True)
    assert source.confirm(A, [failure]).dead == ("0-0",)
    assert opened(source, B) == []
    first = tuples_of(source, slice_)[0]
    assert source.edit("0-0", b"new", by="me", why="test")
    again = source.open(C, ANY, 7)
    assert again is not None
    assert tuples_of(source, again) == [{**first, "line": "new"}]


def test_without_ids_exactly_once_is_refused_by_name() -> None:
    source = RabbitMQSource("q", id_from=None)
    assert "have no stable id" in str(source.serves(Guarantee.EXACTLY_ONCE))
    assert source.serves(Guarantee.AT_LEAST_ONCE) is None
    assert RabbitMQSource("q").serves(Guarantee.EXACTLY_ONCE) is None


def test_without_ids_what_comes_again_is_another_message(classic: RabbitMQHarness) -> None:
    """Negative control: no check of ids doubles."""
    classic.put([b"a"])
    source = classic.view(id_from=None)
    assert opened(source, A) == [b"a"]
    source.confirm(A)
    source.drop_connections()
    classic.server.until_left(classic.name, 1)
    assert opened(classic.view(epoch=2, id_from=None), Lease("b", 2)) == [b"a"]


# ---- what is named wrongly


def test_what_cannot_be_read_is_refused_by_name(rabbitmq: RabbitMQServer, shared_database: Database) -> None:
    def opens(queue: str, url: str = rabbitmq.url) -> None:
        source = RabbitMQSource(queue, url=url, database=shared_database)
        try:
            source.subscribe("s", 1)
            source.open(A, ANY, 7)
        finally:
            source.drop_connections()

    rabbitmq.declare("a stream", "stream")
    rabbitmq.put("a stream", [b"a"])
    with pytest.raises(UsageError, match="read it with RabbitMQStreamSource"):
        opens("a stream")
    with pytest.raises(UsageError, match=r"no such queue.*rabbitmqadmin declare"):
        opens("nowhere")
    for wrong in (rabbitmq.url.replace("guest:guest", "guest:sesame"), "amqp://u:sesame@127.0.0.1:x/"):
        with pytest.raises((MissingRight, UsageError)) as refused:
            opens("a stream", wrong)
        assert "sesame" not in str(refused.value)
        assert "sesame" not in repr(RabbitMQSource("q", url=wrong))
    with pytest.raises(UsageError, match="refuses to have it read"):
        opens("a stream", rabbitmq.url.replace("%2F", "elsewhere"))
    with pytest.raises(StoreUnavailable):
        opens("a stream", "amqp://guest:guest@127.0.0.1:1/%2F")


# ---- poison and garbage


def test_only_the_culprit_becomes_a_dead_letter(classic: RabbitMQHarness) -> None:
    classic.put([b"good 1"])
    classic.server.put(classic.name, [b"without id", b"good 2"], [None, "2"])
    source = classic.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    found = messages_of(source, slice_)
    assert [message.payload for message in found if message.payload.endswith(b"without id")] == [found[1].payload]
    source.confirm(A, [found[1].failed()])
    for number in range(1, classic.max_attempts):
        classic.wait_for_retries()
        lease = Lease(f"{number}", 1)
        again = source.open(lease, ANY, 7)
        assert again is not None
        source.confirm(lease, [message.failed() for message in messages_of(source, again)])
    assert [letter.payload[-10:] for letter in source.dead_letters()] == [b"without id"]
    source.close()
    assert classic.server.ready(classic.name) == 0


def test_an_id_that_comes_with_another_payload_is_a_dead_letter_with_the_reason(
    classic: RabbitMQHarness,
) -> None:
    """Also where both come at once, and where they come again; with its metadata."""
    classic.options = {"max_attempts": 1, "metadata": ("message_id",)}
    source = classic.view()
    classic.server.put(classic.name, [b"one", b"other", b"two"], ["1", "1", "2"])
    for first, message in ((b"one", b"third"), (b"third", b"other")):
        del first
        slice_ = source.open(A, ANY, 7)
        assert slice_ is not None
        source.confirm(A, failed_of(source, slice_))
        classic.server.put(classic.name, [message, message], ["1", "1"])
    assert opened(source, B) == [], "both are known"
    texts = [letter.error for letter in source.dead_letters()]
    assert [
        letter.payload.endswith(end) for letter, end in zip(source.dead_letters(), (b"other", b"third"), strict=True)
    ]
    assert all("the id '1' in message_id came before with another payload" in text for text in texts)
    source.close()
    assert classic.server.ready(classic.name) == 0
    again = classic.view(epoch=2)
    letter = source.dead_letters()[0].shown_id
    assert again.edit(letter, b"mended", by="me", why="its publisher gave an id twice")
    slice_ = again.open(Lease("c", 2), ANY, 7)
    assert slice_ is not None
    assert tuples_of(again, slice_) == [{"line": "mended", "message_id": "1"}]


def failed_of(source: RabbitMQSource, slice_: Any) -> list[MessageFailure]:
    """Failures of those messages that cannot be decoded."""
    found: list[MessageFailure] = []
    for reader in source.readers(slice_, 1):
        for batch in reader.read(7, frozenset(), 100):
            ids = batch.column("id").to_pylist()
            for row, text in source.decoder.decode(batch.column("payload")).failed:
                id_ = MessageId(ids[row])
                found.append(
                    MessageFailure(id_, 0, Token(0), FailureReason.BAD_MESSAGE, "lines", text, "", counted=True)
                )
    return found


def test_a_publisher_that_gives_an_id_twice_does_not_stop_a_topology(
    lives: Callable[..., tuple[Life, RabbitMQHarness]],
) -> None:
    life, harness = lives()
    harness.server.put(harness.name, [b"one", b"two", b"three"], ["1", "1", "3"])
    life.live([kill_at("journal.after_write")])
    life.require(["one", "three"])
    assert [payload.endswith(b"two") for payload in life.dead()] == [True]
    assert harness.server.ready(harness.name) == 0


# ---- a queue that counts deliveries


DEAD: Final = {"x_delivery_limit": 2, "x_dead_letter_exchange": ""}


@pytest.fixture
def limited(
    request: pytest.FixtureRequest, shared_database: Database, rabbitmq: RabbitMQServer
) -> Iterator[RabbitMQHarness]:
    """A queue that gives a message up once it was returned three times, and the queue of what it gave up."""
    harness = RabbitMQHarness(shared_database, request.node.name, server=rabbitmq, queue_type="quorum")
    rabbitmq.delete(harness.name)
    rabbitmq.declare(f"dead {harness.name}")
    rabbitmq.declare(harness.name, "quorum", **DEAD, x_dead_letter_routing_key=f"dead {harness.name}")
    yield harness
    harness.close()


def run_in_short(harness: RabbitMQHarness, runs: int, messages: int) -> list[bytes]:
    """What so many runs apply: each has two slices open at a time, commits both, and ends in order."""
    found: list[bytes] = []
    for epoch in range(1, runs + 1):
        source = harness.view(epoch=epoch)
        for lease in (Lease("a", epoch), Lease("b", epoch)):
            found += opened(source, lease, Limit(messages))
        for lease in (Lease("a", epoch), Lease("b", epoch)):
            source.confirm(lease)
        source.maintain()
        source.close()
    return found


def test_runs_that_end_cost_a_message_no_delivery(limited: RabbitMQHarness) -> None:
    payloads = [b"%d" % n for n in range(240)]
    limited.put(payloads)
    assert sorted(run_in_short(limited, 12, 10)) == sorted(payloads)
    assert limited.server.ready(f"dead {limited.name}") == 0
    assert limited.server.ready(limited.name) == 0


def test_with_messages_that_are_delivered_ahead_a_queue_gives_up_what_was_never_tried(
    limited: RabbitMQHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RabbitMQSource, "READS_AHEAD", True)
    limited.put([b"%d" % n for n in range(240)])
    run_in_short(limited, 4, 10)
    assert limited.server.ready(f"dead {limited.name}") > 0


def test_a_paused_run_is_delivered_next_to_nothing_and_its_queue_is_never_without_a_consumer(
    limited: RabbitMQHarness,
) -> None:
    limited.put([b"%d" % n for n in range(50)])
    source = limited.view()
    assert len(opened(source, A, Limit(10))) == 10
    source.confirm(A)
    for _ in range(3):
        source.maintain()
        assert limited.server.consumers(limited.name) >= 1
    limited.server.until_left(limited.name, 39)
    assert len(opened(source, B, Limit(10))) == 10
    source.close()


def test_limits_of_a_queue_are_said_when_a_run_starts_and_that_they_are_not_known(
    shared_database: Database, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    with running(RabbitMQServer, tmp_path_factory, managed=True) as server:
        harness = RabbitMQHarness(shared_database, "limits", server=server, queue_type="quorum")
        server.delete("limits")
        server.declare("limits", "quorum", x_delivery_limit=2, x_dead_letter_exchange="dead", x_message_ttl=60_000)
        until(
            lambda: "delivery-limit 2" in " ".join(limits_said(server.url, server.management, "limits", 9)), "no limit"
        )
        harness.options = {"management": server.management}
        harness.view()
        assert "delivery-limit 2: the broker moves it to the exchange 'dead'" in caplog.text
        assert "message-ttl 60000 ms" in caplog.text
        (unknown,) = limits_said(server.url, server.management, "another", 9)
        assert "are not known: the management interface says HTTP Error 404" in unknown
        harness.close()
    caplog.clear()
    (unknown,) = limits_said(server.url, server.management, "limits", 9)
    assert "Connection refused" in unknown


# ---- drivers, connections and the broker


def cut(source: Any) -> None:
    if source._consumer is not None:
        with suppress(OSError):  # the broker was killed before
            source._consumer._connection._impl._transport._sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def lives(
    request: pytest.FixtureRequest, shared_database: Database, tmp_path: Path, rabbitmq: RabbitMQServer
) -> Callable[..., tuple[Life, RabbitMQHarness]]:
    """Makes a topology over a queue of its own."""

    def make(queue_type: str = "classic", **options: Any) -> tuple[Life, RabbitMQHarness]:
        name = f"rabbit{crc32(request.node.name.encode())}"
        harness = RabbitMQHarness(shared_database, name, server=rabbitmq, queue_type=queue_type)
        harness.max_attempts = 2
        given = {**SOON, **options}
        life = Life(name, shared_database, tmp_path, lambda: harness.made(**given), cut)
        return life, harness

    return make


def words(count: int) -> list[bytes]:
    return [b"word %d" % n for n in range(count)]


def texts(payloads: Sequence[bytes]) -> list[str]:
    return [payload.decode() for payload in payloads]


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_drivers_and_the_broker_die_in_any_order(
    lives: Callable[..., tuple[Life, RabbitMQHarness]], rabbitmq: RabbitMQServer, queue_type: str
) -> None:
    """The broker is killed once: it takes some 6 seconds."""
    rng = Random(3)
    life, harness = lives(queue_type)
    expected = words(30)
    harness.put(expected[:20])
    life.drive(kill_after(60))
    if queue_type == "quorum":
        rabbitmq.until_kept(harness.name)
    rabbitmq.restart()
    harness.put(expected[20:])
    life.live([kill_after(rng.randrange(20, 120)) for _ in range(2)])
    life.require(texts(expected))
    assert harness.server.ready(harness.name) == 0


@pytest.mark.parametrize("loses", ["answer", "request"])
def test_a_connection_that_is_cut_when_a_confirmation_was_sent(classic: RabbitMQHarness, loses: Any) -> None:
    """Its effect is unknown. The message comes again if the broker did not hear it, and is not opened again."""
    with Cutter(classic.server.port) as cutter:
        classic.put([b"a", b"b"])
        source = classic.view(url=classic.server.url_at(cutter.port))
        assert opened(source, A) == [b"a", b"b"]
        source.confirm(A)
        cutter.cut_at(classic.confirms_by, loses)
        with pytest.raises(StoreUnavailable):
            source.maintain()
        assert cutter.cut == 1
        assert opened(source, B) == []
        source.close()
    assert classic.server.ready(classic.name) == 0
    with classic.server.connect() as connection:
        assert connection.channel().basic_get(classic.name)[0] is None


def test_what_comes_again_by_the_consumer_timeout_is_known(
    shared_database: Database, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The broker closes the channel of a consumer that does not confirm in time: after 30 minutes, here at once."""
    short = {"consumer_timeout": 200, "channel_tick_interval": 100}
    with running(RabbitMQServer, tmp_path_factory, **short) as server:
        harness = RabbitMQHarness(shared_database, "consumer timeout", server=server)
        harness.put([b"a", b"b"])
        source = harness.view()
        assert opened(source, A) == [b"a", b"b"]
        server.until_left(harness.name, 2)  # given back, behind our back
        with pytest.raises(StoreUnavailable, match="the broker closed the channel"):
            source.maintain()
        assert opened(source, B) == []
        source.confirm(A)
        source.close()
        assert source.journal_counts() == JournalCounts(messages=2, owed=0, suppressed=0)
        server.until_left(harness.name, 0)
        server.kill()
        harness.close()


def test_a_driver_that_was_replaced_takes_nothing(harness: RabbitMQHarness) -> None:
    harness.put([b"a", b"b"])
    old = harness.view()
    assert opened(old, A, Limit(1)) == [b"a"]
    new = harness.view(epoch=2)
    assert new.recover(2) == ("a",)
    with pytest.raises(Fenced):
        old.open(B, ANY, 7)
    old.close()
    new.confirm(Lease("a", 2))
    assert opened(new, Lease("b", 2)) == [b"b"]
    new.confirm(Lease("b", 2))
    assert opened(new, Lease("c", 2)) == []
    new.close()
    assert harness.server.ready(harness.name) == 0


# ---- the weaker guarantees


def test_at_most_once_may_lose_and_does_not_double(lives: Callable[..., tuple[Life, RabbitMQHarness]]) -> None:
    life, harness = lives()
    life.guarantee, life.sinks = "at-most-once", ("postgres",)
    harness.put(words(12))
    life.live([kill_at("open.after")])
    found = life.applied()["postgres"]
    assert found.total() == 7, "the batch of 5 that was open"


def test_at_least_once_may_double_and_does_not_lose(lives: Callable[..., tuple[Life, RabbitMQHarness]]) -> None:
    life, harness = lives(id_from=None)
    life.guarantee, life.sinks = "at-least-once", ("postgres",)
    harness.put(words(12))
    life.live([kill_at("commit.after_sink")])
    found = life.applied()["postgres"]
    assert set(found) == set(texts(words(12)))
    assert found.total() > 12


# ---- negative controls


class ConfirmsFirst(RabbitMQSource):
    """Tells the broker before messages are written down."""

    def receive(self, limit: int) -> Sequence[Delivery]:
        found = super().receive(limit)
        super().acknowledge([message.handle for message in found])
        return found


def test_a_broker_that_is_told_before_messages_are_written_down_loses_them(classic: RabbitMQHarness) -> None:
    classic.put([b"a"])
    source = ConfirmsFirst(classic.name, url=classic.server.url, database=classic.database)
    classic.views.append(source)
    source.subscribe("s", 1)
    with pytest.raises(Killed), watched(kill_at("journal.in_transaction")):
        source.open(A, ANY, 7)
    source.drop_connections()
    assert opened(classic.view(epoch=2), Lease("b", 2)) == []
    assert classic.server.ready(classic.name) == 0


# ---- the example


def test_the_example_does_what_its_text_says(
    rabbitmq: RabbitMQServer, shared_database: Database, tmp_path: Path
) -> None:
    example = Path(__file__).parents[2] / "examples" / "brokers" / "rabbitmq.py"
    url = shared_database.sqlalchemy_url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, str(example), "--url", rabbitmq.url],
        env={**os.environ, "STORMPROOF_DATABASE_URL": url},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "ann: 4\nbob: 4\n"), done.stderr
