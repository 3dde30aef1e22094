"""Partitions of a queue's message table: made ahead, dropped behind, and never with a message that somebody needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from support.queues import prepared_database
from support.source_harness import PostgresHarness, messages_of

from stormproof.core.base.failpoint import ENV, FailpointReached
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.postgres_queue import PostgresQueue

pytestmark = pytest.mark.postgres
SIZE = 10
FIRST, SECOND = 'stormproof_queue."lines.p1"', 'stormproof_queue."lines.p11"'


class Store(PostgresHarness):
    """With small partitions."""

    def made(self, *, name: str = "lines", **options: Any) -> PostgresQueue:
        return super().made(name=name, partition_messages=SIZE, **options)

    def tables(self) -> list[str]:
        rows = self.execute(
            "select relname from pg_class where relkind = 'r' and relnamespace = 'stormproof_queue'::regnamespace"
            " order by relname"
        )
        return [str(row[0]) for row in rows]

    def producer(self) -> closing[psycopg.Connection]:
        return closing(connect(self.database, application_name="tests"))


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    harness = Store(prepared_database(database))
    yield harness
    harness.close()


def numbered(count: int) -> list[bytes]:
    return [b"m%d" % n for n in range(count)]


def opened(source: PostgresQueue, limit: int = 7) -> list[bytes]:
    found = list[bytes]()
    while (slice_ := source.open(Lease("o", 1), Limit(limit), 1)) is not None:
        found += [message.payload for message in messages_of(source, slice_, 1)]
        source.confirm(Lease("o", 1))
    return found


def insert(connection: psycopg.Connection, payload: bytes) -> None:
    connection.execute("insert into stormproof_queue.lines (payload) values (%s)", (payload,))


def test_partitions_are_made_ahead_of_the_producers(store: Store) -> None:
    queue = store.queue()
    for _ in range(8):
        queue.put(numbered(4))
    assert store.tables() == ["lines.p1", "lines.p11", "lines.p21", "lines.p31", "lines.rest"]
    assert store.execute('select count(*) from stormproof_queue."lines.rest"') == [(0,)]


def test_one_put_of_many_messages_gets_its_partitions_while_it_runs(store: Store) -> None:
    source = store.view()
    assert store.queue().put(numbered(47)).messages == 47
    assert store.execute('select count(*) from stormproof_queue."lines.rest"') == [(0,)]
    assert opened(source) == numbered(47)


def test_plain_inserts_that_outrun_the_partitions_are_kept_and_their_range_is_skipped(store: Store) -> None:
    source = store.view()
    with store.producer() as connection:
        for payload in numbered(25):
            insert(connection, payload)
        store.queue().put([b"while the producer holds the default partition"])
        connection.commit()
    store.queue().put([b"after"])
    assert store.tables() == ["lines.p1", "lines.p31", "lines.rest"]
    found = opened(source)
    assert sorted(found) == sorted([*numbered(25), b"while the producer holds the default partition", b"after"])
    assert source.drop_consumed() == (FIRST, 'stormproof_queue."lines.rest"')
    store.queue().put(numbered(3))
    assert opened(source) == numbered(3)


def test_consumed_partitions_are_dropped_and_no_others(store: Store) -> None:
    source = store.view()
    store.put(numbered(4))
    store.put(numbered(25))
    assert source.drop_consumed() == ()
    slice_ = source.open(Lease("a", 1), Limit(13), 1)
    assert slice_ is not None
    assert source.drop_consumed() == ()  # open: not resolved
    source.confirm(Lease("a", 1))
    assert source.open(Lease("b", 1), Limit(4), 1) is not None
    source.confirm(Lease("b", 1))
    assert source.drop_consumed() == (FIRST,)
    assert len(opened(source)) == 12
    source.maintain()
    assert "lines.p11" not in store.tables()
    store.put(numbered(2))
    assert opened(source) == numbered(2)


def test_the_slowest_subscription_keeps_a_partition(store: Store) -> None:
    fast, slow = store.view("fast"), store.view("slow")
    store.put(numbered(4))
    store.put(numbered(20))
    assert len(opened(fast)) == 24
    assert fast.drop_consumed() == ()
    assert len(opened(slow)) == 24
    assert fast.drop_consumed() == (FIRST, SECOND)


def test_a_queue_that_nobody_reads_drops_nothing(store: Store) -> None:
    store.put(numbered(4))
    store.put(numbered(20))
    assert store.queue().drop_consumed() == ()


@pytest.mark.parametrize("state", ["open", "held", "returned"])
def test_an_unresolved_slice_keeps_its_partition(store: Store, state: str) -> None:
    source = store.view()
    store.put(numbered(4))
    store.put(numbered(20))
    slice_ = source.open(Lease("a", 1), Limit(2), 1)
    assert slice_ is not None
    if state == "held":
        source.pin(Lease("a", 1))
    assert len(opened(source)) == 22
    if state == "returned":
        source.abort(Lease("a", 1))
    assert FIRST not in source.drop_consumed()
    if state == "returned":
        assert opened(source) == numbered(2)
    else:
        source.confirm(Lease("a", 1))
    assert FIRST in source.drop_consumed()


def test_retries_and_dead_letters_outlive_their_partition(store: Store) -> None:
    source = store.view()
    store.put(numbered(12))
    slice_ = source.open(Lease("a", 1), Limit(100), 1)
    assert slice_ is not None
    failed = messages_of(source, slice_, 1)[0]
    source.confirm(Lease("a", 1), [failed.failed()])
    assert source.drop_consumed() == (FIRST,)
    for _ in range(2):
        store.wait_for_retries()
        retry = source.open(Lease("b", 1), Limit(100), 1)
        assert retry is not None
        (message,) = messages_of(source, retry, 1)
        assert (message.id, message.origin, message.payload) == (failed.id, failed.origin, failed.payload)
        source.confirm(Lease("b", 1), [failed.failed()])
    assert [letter.payload for letter in source.dead_letters()] == [b"m0"]


def test_a_slow_producer_keeps_its_partition(store: Store) -> None:
    source = store.view()
    store.queue()
    with store.producer() as slow:
        insert(slow, b"slow")
        store.put(numbered(20))
        assert len(opened(source)) == 20
        assert source.drop_consumed() == ()  # the lock is not to be had: left for the next time
        slow.commit()
    assert FIRST not in source.drop_consumed()  # it is not consumed any more
    assert opened(source) == [b"slow"]
    assert FIRST in source.drop_consumed()


def test_a_producer_that_commits_while_the_drop_waits_is_seen_under_the_lock(store: Store) -> None:
    source = store.view()
    with store.producer() as slow, store.producer() as housekeeper:
        insert(slow, b"slow")
        store.put(numbered(20))
        assert len(opened(source)) == 20
        partition = next(part for part in source.table.partitions(housekeeper.cursor()) if part.table == FIRST)
        housekeeper.rollback()
        dropped = list[bool]()

        def drop() -> None:
            with housekeeper.transaction(), housekeeper.cursor() as cursor:
                dropped.append(source.table.drop(cursor, partition, lambda: source.unresolved_conditions(cursor)))

        thread = threading.Thread(target=drop)
        thread.start()
        while not store.waits_for_lock():
            assert thread.is_alive(), "the drop gave up before the producer could commit"
        slow.commit()
        thread.join()
        assert dropped == [False]
    assert opened(source) == [b"slow"]


def test_control_a_plain_drop_loses_the_slow_producers_message(store: Store) -> None:
    source = store.view()
    with store.producer() as slow:
        insert(slow, b"slow")
        store.put(numbered(20))
        assert len(opened(source)) == 20
        thread = threading.Thread(target=store.execute, args=(f"drop table {FIRST}",))
        thread.start()
        while not store.waits_for_lock():
            assert thread.is_alive()
        slow.commit()
        thread.join()
    assert opened(source) == []


def test_a_drop_that_dies_under_the_lock_dropped_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store.view()
    store.put(numbered(20))
    opened(source)
    monkeypatch.setenv(ENV, "queue.drop.after_lock=raise")
    with pytest.raises(FailpointReached):
        source.drop_consumed()
    monkeypatch.delenv(ENV)
    assert "lines.p1" in store.tables()
    assert FIRST in source.drop_consumed()


def test_a_partition_that_another_drops_meanwhile_is_no_error(store: Store) -> None:
    source, other = store.view("one"), store.view("two")
    store.put(numbered(25))
    assert len(opened(source)) == len(opened(other)) == 25
    with store.producer() as connection, connection.cursor() as cursor:
        part = source.table.partitions(cursor)[0]
        connection.commit()
        assert part.table in other.drop_consumed()
        assert not source.table.has_any(cursor, part, ["true"])
        assert not source.table.drop(cursor, part, lambda: ["true"])
    assert source.drop_consumed() == ()


@pytest.mark.parametrize("way", ["own", "outbox", "control"])
def test_a_put_whose_partition_is_attached_meanwhile(store: Store, way: str) -> None:
    """The COPY has read the partitions, and waits; its ids outrun them, and another session attaches the next range."""
    source, queue = store.view(), store.queue()
    queue.put(numbered(2))
    store.execute(
        "create function wait() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock_shared(7); return null; end $$"
    )
    store.execute(
        "create trigger wait before insert on stormproof_queue.lines for each statement execute function wait()"
    )
    raised = list[BaseException]()

    def put() -> None:
        try:
            if way == "own":
                queue.put([b"x", b"y"])
                return
            with store.producer() as connection:
                if way == "outbox":
                    queue.put([b"x", b"y"], connection=connection)
                else:
                    insert(connection, b"x")
                connection.commit()
        except psycopg.errors.CheckViolation as error:
            raised.append(error)

    with store.producer() as gate:
        gate.execute("select pg_advisory_lock(7)")
        gate.commit()
        thread = threading.Thread(target=put)
        thread.start()
        while not store.waits_for_lock():
            assert thread.is_alive()
        store.execute(
            "select count(nextval(pg_get_serial_sequence('stormproof_queue.lines', 'id'))) from generate_series(1, 50)"
        )
        before = store.tables()
        source._make_ready()  # pyright: ignore[reportPrivateUsage]
        assert store.tables() != before
        gate.execute("select pg_advisory_unlock(7)")
        gate.commit()
        thread.join(60)
    assert not thread.is_alive()
    assert len(raised) == (way == "control")
    assert opened(source) == numbered(2) + ([] if way == "control" else [b"x", b"y"])


def test_housekeeping_beside_producers_and_other_drivers(store: Store) -> None:
    """Partitions come and go under everybody: nobody meets one that is half there."""
    puts, at_once = 25, 6
    ended, raised = threading.Event(), list[BaseException]()
    found = dict[str, list[bytes]](one=[], two=[])

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed on
            raised.append(error)
            ended.set()

    def produce() -> None:
        queue = store.queue()
        for n in range(puts):
            queue.put([b"%d" % (n * at_once + k) for k in range(at_once)])
            queue.stats()

    def drive(source: PostgresQueue, into: list[bytes]) -> Callable[[], None]:
        def work() -> None:
            while not ended.is_set() and len(into) < puts * at_once:
                into.extend(opened(source))
                source.drop_consumed()
                source._make_ready()  # pyright: ignore[reportPrivateUsage]

        return work

    works = [produce, *(drive(store.view(name), into) for name, into in found.items())]
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert raised == []
    for messages in found.values():
        assert sorted(messages, key=int) == [b"%d" % n for n in range(puts * at_once)]
