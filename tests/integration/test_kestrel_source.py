"""`KestrelSource` over real servers: what is taken over is applied once, and how far that goes without ids."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final
from zlib import crc32

import psycopg
import pyarrow as pa
import pytest
from support.brokers import running
from support.brokers.cutter import Cutter
from support.brokers.harness import opened
from support.brokers.kestrel_broker import KestrelHarness, KestrelServer
from support.brokers.lives import SOON, Killed, Life, kill_after, kill_at
from support.queues import prepared_database

from stormproof import Guarantee, KestrelSource
from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import Fenced, StoreUnavailable, UsageError
from stormproof.core.base.failpoint import watched
from stormproof.core.contract.payload import payload_in
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.pending.journal import Delivery, JournalCounts
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.kestrel.client import KestrelConnection
from stormproof.testing import messages_of

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.34)]

A, B, C = Lease("a", 1), Lease("b", 1), Lease("c", 1)
ANY: Final = Limit(1_000)
ID: Final = "field:id"


@pytest.fixture(scope="module")
def shared_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """One database for all cases: they keep apart by their names."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create database test_kestrel template template0")
    yield prepared_database(postgres.database.with_name("test_kestrel"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"drop database test_kestrel with (force)")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KestrelServer]:
    """Another server, which tests kill."""
    with running(KestrelServer, tmp_path_factory) as server:
        yield server


@pytest.fixture
def harness(
    request: pytest.FixtureRequest, shared_database: Database, kestrel: KestrelServer
) -> Iterator[KestrelHarness]:
    harness = KestrelHarness(shared_database, request.node.name, servers=[kestrel])
    yield harness
    harness.close()


@pytest.fixture
def both(
    request: pytest.FixtureRequest, shared_database: Database, kestrel: KestrelServer, second: KestrelServer
) -> Iterator[KestrelHarness]:
    """Over two servers."""
    harness = KestrelHarness(shared_database, request.node.name, servers=[kestrel, second])
    yield harness
    harness.close()
    if second.process is None:
        second.start()


# ---- taken over


def test_an_item_is_ours_once_it_is_written_down_and_its_server_has_none_left(harness: KestrelHarness) -> None:
    harness.put([b"a", b"b", b"c"])
    source = harness.view()
    assert opened(source, A, Limit(2)) == [b"a", b"b"]
    assert harness.servers[0].left(harness.queue) == 0
    assert source.journal_counts() == JournalCounts(messages=3, owed=0, suppressed=0, unresolved=3)
    source.close()
    after = harness.view(epoch=2)
    after.recover(2)
    after.abort(Lease("a", 2))
    assert [*opened(after, Lease("b", 2)), *opened(after, Lease("c", 2))] == [b"a", b"b", b"c"]


def test_equal_items_are_as_many_messages(harness: KestrelHarness) -> None:
    harness.put([b"a"] * 5)
    assert opened(harness.view(), A) == [b"a"] * 5


def test_no_more_is_taken_over_than_may_wait(harness: KestrelHarness) -> None:
    harness.put([b"%d" % n for n in range(50)])
    source = harness.view(prefetch=20)
    assert len(opened(source, A)) == 20
    assert harness.servers[0].left(harness.queue) == 30


def test_an_item_that_could_not_be_written_down_is_given_back(harness: KestrelHarness) -> None:
    harness.put([b"a", b"b"])
    source = harness.view()

    def fails(name: str) -> None:
        if name == "journal.in_transaction":
            raise psycopg.OperationalError("the database is away")

    with pytest.raises(StoreUnavailable), watched(fails):
        source.open(A, ANY, 7)
    assert harness.servers[0].left(harness.queue) == 2
    assert opened(source, A) == [b"a", b"b"]


def test_several_open_reads_of_a_connection(harness: KestrelHarness, tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(KestrelServer, tmp_path_factory) as strict:
        harness.servers = [strict]
        harness.put([b"%d" % n for n in range(9)])
        with pytest.raises(UsageError, match="set open_reads=1, or raise maxOpenTransactions"):
            harness.view(open_reads=4).open(A, ANY, 7)
    folder = tmp_path_factory.mktemp("kestrel")
    many = KestrelServer(folder, "--max-open", "4")
    many.start()
    try:
        harness.servers = [many]
        harness.put([b"%d" % n for n in range(9)])
        source = harness.view("t", open_reads=4, connections=2)
        assert sorted(opened(source, A)) == [b"%d" % n for n in range(9)]
        assert many.left(harness.queue) == 0
    finally:
        many.kill()


def test_what_is_named_wrongly_is_refused() -> None:
    for hosts in ([], "localhost:1", ["a b:1"], ["h:0"], ["h:x"], [""], [7], ["user:pw@h:1"]):
        with pytest.raises(UsageError, match="hosts"):
            KestrelSource("q", hosts=hosts)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for queue in ("a/open", "a b", "a\r\nset", "", "x" * 201):
        with pytest.raises(UsageError, match="queue"):
            KestrelSource(queue)
    for id_from in ("id", "message_id", "header:x", "field:", 7):
        with pytest.raises(UsageError, match="id_from"):
            KestrelSource("q", id_from=id_from)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- several servers


def test_items_of_every_server_are_taken_in_turn(both: KestrelHarness) -> None:
    both.put([b"%d" % n for n in range(40)])
    source = both.view(prefetch=10)
    assert len(opened(source, A)) == 10
    left = [server.left(both.queue) for server in both.servers]
    assert sum(left) == 30
    assert max(left) < 20, "both gave some"


def test_a_server_that_is_gone_is_left_alone_for_a_while_and_the_others_go_on(
    both: KestrelHarness, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    source = both.view(clock=clock)
    both.servers[1].kill()
    both.servers[0].put(both.queue, [b"a"])
    with caplog.at_level(logging.WARNING):
        assert opened(source, A) == [b"a"]
        assert opened(source, B) == []
    warned = [record.message for record in caplog.records if "left alone" in record.message]
    assert len(warned) == 1, "asked once, and not again"
    both.servers[1].start()
    both.servers[1].put(both.queue, [b"b"])
    assert opened(source, B) == []
    clock.advance(1)
    assert opened(source, B) == [b"b"]


def test_it_is_left_alone_longer_each_time_at_most_a_minute(both: KestrelHarness) -> None:
    clock = ManualClock()
    source = both.view(clock=clock)
    both.servers[1].kill()
    waits = list[float]()
    for _ in range(12):
        assert opened(source, A) == []
        host = source._servers._hosts[1]
        waits.append(host.not_before_s - clock.monotonic_s())
        clock.advance(61)
    assert 0.25 <= waits[0] <= 0.5
    assert 30 <= waits[-1] <= 60


def test_when_no_server_answers_the_store_is_away(second: KestrelServer, shared_database: Database) -> None:
    harness = KestrelHarness(shared_database, "no-server", servers=[second])
    source = harness.view()
    second.kill()
    try:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"no server answers \(127.0.0.1:"):
                source.open(A, ANY, 7)
    finally:
        second.start()
        harness.close()


# ---- poison and garbage


def test_a_poison_does_not_bounce_between_clients(harness: KestrelHarness) -> None:
    """Kestrel's guide says of an abort: "you'll end up bouncing the same item around". Nothing is aborted here."""
    harness.put([b"poison", *(b"good %d" % n for n in range(20))])
    source = harness.view()
    first = source.open(A, ANY, 7)
    assert first is not None
    bad = messages_of(source, first)[0]
    assert bad.payload == b"poison"
    source.confirm(A, [bad.failed()])
    for number in range(1, harness.max_attempts):
        harness.wait_for_retries()
        lease = Lease(f"retry {number}", 1)
        slice_ = source.open(lease, ANY, 7)
        assert slice_ is not None
        (again,) = messages_of(source, slice_)
        source.confirm(lease, [again.failed()])
    assert [payload_in(letter.payload) for letter in source.dead_letters()] == [b"poison"]
    with harness.servers[0].client() as client:
        stats = client.stats(harness.queue)
    assert (stats["transactions"], stats["canceled_transactions"]) == (21, 0), "each item came over the wire once"


def test_the_same_client_with_aborts_gets_the_poison_again_and_again(harness: KestrelHarness) -> None:
    """Negative control: what Kestrel's own way of failing an item leads to."""
    harness.put([b"poison", b"good"])
    with harness.servers[0].client() as client:
        for _ in range(20):
            assert client.get(f"{harness.queue}/open") == b"poison"
            client.get(f"{harness.queue}/abort")
        assert client.stats(harness.queue)["canceled_transactions"] == 20


def test_the_server_that_an_item_came_from_may_be_a_field(both: KestrelHarness) -> None:
    both.options = {"metadata": {"host": "server"}, "max_attempts": 1}
    for server in both.servers:
        server.put(both.queue, [server.host.encode()])
    source = both.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    (batch,) = [batch for reader in source.readers(slice_, 1) for batch in reader.read(7, frozenset(), 9)]
    rows = source.decoder.decode(batch.column("payload")).rows.to_pylist()
    assert sorted(row["server"] for row in rows) == sorted(server.host for server in both.servers)
    assert all(row["line"] == row["server"] for row in rows)


# ---- ids


def items(count: int, **more: object) -> list[bytes]:
    return [json.dumps({"id": n, **more}).encode() for n in range(count)]


def test_with_ids_an_item_that_comes_again_is_known(harness: KestrelHarness) -> None:
    harness.options = {"id_from": ID, "schema": "id bigint"}
    harness.put(items(3))
    source = harness.view()
    assert opened(source, A) == items(3)
    source.confirm(A)
    harness.put(items(4))
    assert opened(source, B) == items(4)[3:]
    assert source.journal_counts() == JournalCounts(messages=4, owed=0, suppressed=3, unresolved=1)
    assert harness.servers[0].left(harness.queue) == 0


@pytest.mark.parametrize("item", [b"\xff\x00garbage", b"[]", b"{}", b'{"id": null}', b'{"id": {}}', b'{"id": true}'])
def test_an_item_without_its_id_fails_alone(harness: KestrelHarness, item: bytes) -> None:
    harness.options = {"id_from": ID, "schema": "line string", "max_attempts": 1}
    harness.put([b'{"id": 1}', item, b'{"id": 2}'])
    source = harness.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    found = messages_of(source, slice_)
    decoded = source.decoder.decode(pa.array([message.payload for message in found], pa.binary()))
    ((row, why),) = decoded.failed
    assert found[row].payload.endswith(item)
    assert "no id in field:id" in why


# ---- drivers that die


@pytest.fixture
def lives(
    request: pytest.FixtureRequest, shared_database: Database, tmp_path: Path, kestrel: KestrelServer
) -> Callable[..., tuple[Life, KestrelHarness]]:
    """Makes a topology over a queue of its own."""

    def make(
        *, ids: bool, servers: Sequence[KestrelServer] = (kestrel,), **options: Any
    ) -> tuple[Life, KestrelHarness]:
        name = f"kestrel{crc32(request.node.name.encode())}"
        harness = KestrelHarness(shared_database, name, servers=servers)
        harness.max_attempts = 2
        given = {**SOON, "id_from": ID if ids else None, **options}
        life = Life(name, shared_database, tmp_path, lambda: harness.made(**given), cut)
        return life, harness

    return make


def cut(source: Any) -> None:
    if source._hosts is not None:
        source._hosts.drop()


def words(count: int) -> list[bytes]:
    return [json.dumps({"id": n, "line": f"word {n}"}).encode() for n in range(count)]


def texts(payloads: Sequence[bytes]) -> list[str]:
    return [payload.decode() for payload in payloads]


@pytest.mark.parametrize("point", ["open.after", "commit.after_sink"])
def test_without_ids_exactly_once_holds_from_the_take_over_on(
    lives: Callable[..., tuple[Life, KestrelHarness]], point: str
) -> None:
    life, harness = lives(ids=False)
    harness.put(words(12))
    life.live([kill_at(point), kill_at(point, 2)])
    life.require(texts(words(12)))


def test_without_ids_the_window_before_the_server_heard_of_the_take_over_doubles_and_does_not_lose(
    lives: Callable[..., tuple[Life, KestrelHarness]],
) -> None:
    """Just this is what cannot be promised; with ids, it is (`test_delivering_drivers`, at the same place)."""
    life, harness = lives(ids=False, connections=1)
    harness.put(words(3))
    life.live([kill_at("journal.after_write")])
    (first, *others) = texts(words(3))
    life.require([first, first, *others])


def test_drivers_and_the_server_die_in_any_order(
    lives: Callable[..., tuple[Life, KestrelHarness]], second: KestrelServer, kestrel: KestrelServer
) -> None:
    rng = Random(5)
    life, harness = lives(ids=True, servers=[kestrel, second])
    expected = words(60)
    for chunk in range(6):
        harness.put(expected[chunk * 10 : chunk * 10 + 10])
        life.drive(kill_after(rng.randrange(10, 120)))
        second.restart()
    life.live([])
    life.require(texts(expected))
    assert [server.left(harness.queue) for server in (kestrel, second)] == [0, 0]


def test_a_connection_that_is_cut_when_the_take_over_was_told(
    harness: KestrelHarness, kestrel: KestrelServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its effect is unknown. Where the server heard it, nothing comes again; where not, it does, and ids tell."""
    for loses, ids, expected in (
        ("answer", False, 3),
        ("request", False, 4),
        ("answer", True, 3),
        ("request", True, 3),
    ):
        with Cutter(kestrel.port) as cutter:
            mine = KestrelHarness(harness.database, f"cut {loses} {ids}", servers=[kestrel])
            mine.put(words(3))
            clock = ManualClock()
            source = mine.view(
                hosts=[f"127.0.0.1:{cutter.port}"], connections=1, id_from=ID if ids else None, clock=clock
            )
            cutter.cut_at(b"/close", loses)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            found = list[bytes]()
            with caplog.at_level(logging.WARNING):
                for number in range(20):
                    found += opened(source, Lease(f"{number}", 1))
                    source.confirm(Lease(f"{number}", 1))
                    clock.advance(61)
                    if len(found) >= expected and kestrel.left(mine.queue) == 0:
                        break
            assert len(found) == expected, (loses, ids)
            assert set(found) == set(words(3))
            assert "did not hear come again" in caplog.text
            mine.close()


def test_a_driver_that_was_replaced_takes_nothing_over(harness: KestrelHarness) -> None:
    harness.put([b"a", b"b"])
    old = harness.view()
    assert opened(old, A, Limit(1)) == [b"a"]
    new = harness.view(epoch=2)
    assert new.recover(2) == ("a",)
    harness.put([b"c"])
    with pytest.raises(Fenced):
        old.open(B, ANY, 7)
    with pytest.raises(Fenced):
        old.confirm(A)
    new.confirm(Lease("a", 2))
    assert opened(new, Lease("b", 2)) == [b"b", b"c"]


def test_a_replaced_driver_gives_back_what_it_has_open(harness: KestrelHarness) -> None:
    """It was asked while it was the newest, and learns the rest when it writes."""
    harness.put([b"a"])
    old = harness.view()
    received = old.receive
    later: list[Any] = []

    def replaced(limit: int) -> Sequence[Delivery]:
        found: Sequence[Delivery] = received(limit)
        later.append(harness.view(epoch=2))
        return found

    old.receive = replaced
    with pytest.raises(Fenced):
        old.open(A, ANY, 7)
    old.close()
    harness.servers[0].put(harness.queue, [b"b"])
    new = later[0]
    assert sorted(opened(new, Lease("b", 2)) + opened(new, Lease("c", 2))) == [b"a", b"b"]


# ---- the weaker guarantees


def test_at_most_once_may_lose_and_never_doubles(lives: Callable[..., tuple[Life, KestrelHarness]]) -> None:
    life, harness = lives(ids=False)
    life.guarantee, life.sinks = "at-most-once", ("postgres",)
    harness.put(words(12))
    life.live([kill_at("open.after")])
    found = life.applied()["postgres"]
    assert found.total() == 7, "the batch of 5 that was open"
    assert set(found) < set(texts(words(12)))


@pytest.mark.parametrize("place", ["journal.after_write", "journal.in_transaction"])
def test_at_most_once_never_doubles_where_an_item_is_taken_over(
    lives: Callable[..., tuple[Life, KestrelHarness]], place: str
) -> None:
    """Items have no id, so their server hears of them before they are written down. Under exactly-once the first of these
    places doubles one: see above.
    """
    life, harness = lives(ids=False, connections=1)
    life.guarantee, life.sinks = "at-most-once", ("postgres",)
    harness.put(words(3))
    life.live([kill_at(place)])
    found = life.applied()["postgres"]
    assert set(found) <= set(texts(words(3)))
    assert max(found.values(), default=0) == 1
    assert found.total() == (3 if place == "journal.after_write" else 2)


def test_at_least_once_may_double_and_never_loses(lives: Callable[..., tuple[Life, KestrelHarness]]) -> None:
    life, harness = lives(ids=False)
    life.guarantee, life.sinks = "at-least-once", ("postgres",)
    harness.put(words(12))
    life.live([kill_at("commit.after_sink")])
    found = life.applied()["postgres"]
    assert set(found) == set(texts(words(12)))
    assert found.total() > 12


# ---- negative controls


class ClosesFirst(KestrelSource):
    """Tells the server before the items are written down."""

    def receive(self, limit: int) -> Sequence[Delivery]:
        found = super().receive(limit)
        super().acknowledge([message.handle for message in found])
        return found

    def acknowledge(self, handles: Sequence[KestrelConnection]) -> None:
        """Done."""


def test_a_server_that_is_told_before_the_items_are_written_down_loses_them(harness: KestrelHarness) -> None:
    harness.put([b"a"])
    source = ClosesFirst(harness.queue, hosts=[harness.servers[0].host], name=harness.name, database=harness.database)
    harness.views.append(source)
    source.subscribe("s", 1)
    with pytest.raises(Killed), watched(kill_at("journal.in_transaction")):
        source.open(A, ANY, 7)
    assert opened(harness.view(epoch=2), Lease("b", 2)) == []
    assert harness.servers[0].left(harness.queue) == 0


def test_exactly_once_is_served_with_and_without_ids() -> None:
    for id_from in (None, ID):
        assert KestrelSource("q", id_from=id_from).serves(Guarantee.EXACTLY_ONCE) is None


# ---- the example


def test_the_example_does_what_its_text_says(shared_database: Database, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "brokers" / "kestrel.py"
    url = shared_database.sqlalchemy_url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, str(example)],
        env={**os.environ, "STORMPROOF_DATABASE_URL": url},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "ann: 5\nbob: 5\n"), done.stderr
