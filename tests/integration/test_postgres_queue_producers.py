"""The Postgres queue under producers that are slow, roll back, or share a transaction with the reader."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.queues import prepared_database
from support.source_harness import PostgresHarness, messages_of

from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.failpoint import ENV, FailpointReached
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.postgres_queue import PostgresQueue, Receipt

pytestmark = pytest.mark.postgres
SEED = 11


@pytest.fixture
def store(database: Database) -> Iterator[PostgresHarness]:
    harness = PostgresHarness(prepared_database(database))
    yield harness
    harness.close()


def producer(store: PostgresHarness) -> closing[psycopg.Connection]:
    return closing(connect(store.database, application_name="tests"))


def insert(connection: psycopg.Connection, *payloads: bytes) -> None:
    """The documented way for a plain SQL producer."""
    for payload in payloads:
        connection.execute("insert into stormproof_queue.lines (payload) values (%s)", (payload,))


def opened(source: PostgresQueue, limit: int = 1_000) -> list[bytes]:
    """Open and confirm until nothing is left."""
    found = list[bytes]()
    owner = f"o{id(found)}"
    while (slice_ := source.open(Lease(owner, 1), Limit(limit), SEED)) is not None:
        messages = messages_of(source, slice_, SEED)
        assert len(messages) == slice_.expected.messages <= limit
        found += [message.payload for message in messages]
        source.confirm(Lease(owner, 1))
    return found


def opened_by_id(connection: psycopg.Connection, after: int) -> tuple[list[bytes], int]:
    """The negative control: a reader that keeps the last id as its position."""
    rows = connection.execute(
        "select id, payload from stormproof_queue.lines where id > %s order by id", (after,)
    ).fetchall()
    return [row[1] for row in rows], max((row[0] for row in rows), default=after)


def test_a_buffer_that_a_producer_fills_again_is_a_message_each_time(store: PostgresHarness) -> None:
    def lines() -> Iterator[bytearray]:
        buffer = bytearray(1)
        for letter in b"abc":
            buffer[0] = letter
            yield buffer

    with closing(PostgresQueue("lines", database=store.database)) as queue:
        queue.subscribe("reader", 1)
        queue.put(lines())  # type: ignore[arg-type]
        assert opened(queue) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("payloads", [b"one", "one", bytearray(b"one"), 1, [b"a", 7]])
def test_what_are_no_payloads_are_refused_by_name_and_none_is_put(store: PostgresHarness, payloads: Any) -> None:
    with closing(PostgresQueue("lines", database=store.database)) as queue:
        queue.subscribe("reader", 1)
        with pytest.raises(UsageError, match=r"queue lines: payload(s is .*one for each message| 1 is 7)"):
            queue.put(payloads)
        assert opened(queue) == []


def test_a_put_into_a_database_without_our_tables_says_what_makes_them(database: Database) -> None:
    with closing(PostgresQueue("lines", database=database)) as queue:
        with pytest.raises(UsageError, match="run `stormproof ledger migrate`"):
            queue.put([b"a"])
        with closing(connect(database, application_name="tests")) as connection:
            with pytest.raises(UsageError, match="run `stormproof ledger migrate`"):
                queue.put([b"a"], connection=connection)
            connection.rollback()
            prepared_database(database)
            with pytest.raises(UsageError, match="needs a queue that is there"):
                queue.put([b"a"], connection=connection)
        assert queue.put([b"a"]).messages == 1


def test_a_producer_that_commits_late_is_not_skipped(store: PostgresHarness) -> None:
    source = store.view()
    with producer(store) as slow, producer(store) as fast, producer(store) as by_id:
        by_id.autocommit = True
        insert(slow, b"early id, late commit")
        insert(fast, b"fast")
        fast.commit()
        assert opened(source) == [b"fast"]
        control, last = opened_by_id(by_id, 0)
        assert control == [b"fast"]
        insert(slow, b"more")
        slow.commit()
        assert opened(source) == [b"early id, late commit", b"more"]
        assert opened_by_id(by_id, last)[0] == [b"more"]  # the early id is lost to a reader by id
        assert opened(source) == []


def test_what_was_rolled_back_never_comes(store: PostgresHarness) -> None:
    source = store.view()
    with producer(store) as connection:
        insert(connection, b"gone")
        connection.rollback()
        insert(connection, b"kept")
        connection.execute("savepoint s")
        insert(connection, b"undone by the savepoint")
        connection.execute("rollback to savepoint s")
        insert(connection, b"after the savepoint")
        assert opened(source) == []
        connection.commit()
    assert opened(source) == [b"kept", b"after the savepoint"]


def test_several_slow_producers_that_commit_in_any_order(store: PostgresHarness) -> None:
    source = store.view()
    with producer(store) as a, producer(store) as b, producer(store) as c:
        insert(a, b"a1")
        insert(b, b"b1")
        insert(c, b"c1")
        insert(a, b"a2")
        b.commit()
        assert opened(source, 1) == [b"b1"]
        insert(b, b"b2")
        c.rollback()
        b.commit()
        slice_ = source.open(Lease("x", 1), Limit(10), SEED)
        a.commit()
        assert slice_ is not None
        assert [m.payload for m in messages_of(source, slice_, SEED)] == [b"b2"]
        assert opened(source, 1) == [b"a1", b"a2"]


def test_one_copy_of_many_messages_is_cut(store: PostgresHarness) -> None:
    source = store.view()
    payloads = [b"%d" % n for n in range(20_000)]
    receipt = store.queue().put(payloads)
    assert receipt.messages == 20_000
    assert opened(source, 3_000) == payloads


def test_opening_costs_what_the_slice_holds(store: PostgresHarness) -> None:
    source = store.view()
    queue = store.queue()
    for start in range(0, 20_000, 5_000):
        queue.put([b"%d" % n for n in range(start, start + 5_000)])
    counters = (
        "select coalesce(sum(seq_tup_read), 0)::int, coalesce(sum(idx_tup_fetch), 0)::int"
        " from pg_stat_xact_all_tables where schemaname = 'stormproof_queue'"
    )
    for turn in range(30):
        with producer(store) as connection, connection.transaction():
            slice_ = source.open(Lease(f"o{turn}", 1), Limit(600 if turn % 2 else 60), SEED, connection)
            assert slice_ is not None
            row = connection.execute(counters).fetchone()
            assert row is not None
            assert row[0] == 0
            assert row[1] <= 4 * slice_.expected.messages
        source.confirm(Lease(f"o{turn}", 1))


def test_reader_and_producer_in_one_transaction(store: PostgresHarness) -> None:
    source = store.view()
    with producer(store) as connection:
        insert(connection, b"before")
        assert source.open(Lease("a", 1), Limit(10), SEED, connection) is None
        insert(connection, b"after")
        connection.commit()
    assert opened(source) == [b"before", b"after"]


def test_an_open_that_is_rolled_back_did_not_happen(store: PostgresHarness) -> None:
    source = store.view()
    store.put([b"one"])
    with producer(store) as connection:
        assert source.open(Lease("a", 1), Limit(10), SEED, connection) is not None
        connection.rollback()
    assert opened(source) == [b"one"]


def test_confirm_takes_part_in_a_transaction(store: PostgresHarness) -> None:
    source = store.view()
    store.put([b"one"])
    slice_ = source.open(Lease("a", 1), Limit(10), SEED)
    assert slice_ is not None
    (message,) = messages_of(source, slice_, SEED)
    with producer(store) as connection:
        assert source.joins(connection)
        source.confirm(Lease("a", 1), [message.failed()], connection)
        connection.rollback()
        assert (source.backlog().pending, source.backlog().waiting) == (1, 0)
        source.confirm(Lease("a", 1), [message.failed()], connection)
        connection.commit()
    assert (source.backlog().pending, source.backlog().waiting) == (0, 1)


def test_a_transaction_elsewhere_is_not_joined(store: PostgresHarness) -> None:
    source = store.view()
    with closing(connect(store.database.with_name("postgres"), application_name="tests")) as elsewhere:
        assert not source.joins(elsewhere)
    assert not source.joins("a string")
    with pytest.raises(UsageError, match="not a psycopg connection"):
        source.abort(Lease("a", 1), "a string")


def while_waiting(store: PostgresHarness, action: Callable[[], object]) -> threading.Thread:
    """Run in a thread, and return when it waits for a lock."""
    thread = threading.Thread(target=action)
    thread.start()
    while thread.is_alive() and not store.waits_for_lock():
        pass
    return thread


def test_two_readers_of_one_subscription_never_go_backwards(store: PostgresHarness) -> None:
    """The second waits for the first's lock while a producer commits; its snapshot is from after the wait."""
    first, second = store.view(), store.view()
    store.put([b"one"])
    got = list[bytes]()

    def open_second() -> None:
        slice_ = second.open(Lease("second", 1), Limit(10), SEED)
        assert slice_ is not None
        got.extend(m.payload for m in messages_of(second, slice_, SEED))

    with producer(store) as connection:
        slice_ = first.open(Lease("first", 1), Limit(10), SEED, connection)
        assert slice_ is not None
        thread = while_waiting(store, open_second)
        store.put([b"two"])
        connection.commit()
        thread.join()
    assert got == [b"two"]
    assert [m.payload for m in messages_of(first, slice_, SEED)] == [b"one"]
    assert opened(first) == []


def test_control_a_snapshot_taken_in_the_locking_statement_goes_backwards(store: PostgresHarness) -> None:
    store.execute("create table position (s pg_snapshot)")
    store.execute("insert into position values (pg_current_snapshot())")
    with producer(store) as first, producer(store) as writer:
        first.execute("select from position for update")
        thread = while_waiting(store, lambda: store.execute("update position set s = pg_current_snapshot()"))
        for _ in range(3):
            writer.execute("select pg_current_xact_id()")
            writer.commit()
        row = first.execute(
            "update position set s = pg_current_snapshot() returning pg_snapshot_xmax(s)::text"
        ).fetchone()
        first.commit()
        thread.join()
    after = store.execute("select pg_snapshot_xmax(s)::text from position")[0][0]
    assert row is not None
    assert int(str(after)) < int(row[0])


def test_a_position_ahead_of_the_server_is_refused(store: PostgresHarness) -> None:
    """As after a dump and restore: transaction numbers begin anew, and new messages would never be seen."""
    source = store.view()
    store.put([b"one"])
    store.set_position('{"from": "900000:900000:"}')
    with pytest.raises(PositionMismatch, match="900000") as refused:
        source.open(Lease("a", 1), Limit(10), SEED)
    assert refused.value.details["position"] == "900000:900000:"
    with pytest.raises(PositionMismatch):
        store.view()
    assert opened(store.view("other name")) == [b"one"]


@pytest.mark.parametrize("change", ['{"server": "42"}', '{"timeline": 7}'])
def test_a_position_of_another_server_or_timeline_is_refused(store: PostgresHarness, change: str) -> None:
    source = store.view()
    store.put([b"one"])
    store.set_position(change)
    with pytest.raises(PositionMismatch, match=re.sub(r"\D", "", change)):
        source.open(Lease("a", 1), Limit(10), SEED)


def test_messages_that_were_deleted_by_hand_are_missed(store: PostgresHarness) -> None:
    source = store.view()
    store.put([b"one", b"two"])
    source.open(Lease("a", 1), Limit(10), SEED)
    source.abort(Lease("a", 1))
    store.execute("delete from stormproof_queue.lines where payload = 'one'")
    with pytest.raises(PositionMismatch, match="held 2 messages"):
        source.open(Lease("b", 1), Limit(10), SEED)


def test_put_in_the_users_own_transaction(store: PostgresHarness) -> None:
    source = store.view()
    queue = store.queue()
    with producer(store) as connection:
        assert queue.put([], connection=connection) == Receipt(0, None, None)
        queue.put([b"lost"], connection=connection)
        connection.rollback()
        first = queue.put([b"a", b"b"], connection=connection)
        second = queue.put([b"c"], connection=connection)
        assert opened(source) == []
        connection.commit()
    assert (first.messages, second.messages, second.first) == (2, 1, second.last)
    slice_ = source.open(Lease("a", 1), Limit(10), SEED)
    assert slice_ is not None
    shown = [source.shown_id(m.id, m.origin) for m in messages_of(source, slice_, SEED)]
    assert shown == [first.first, first.last, second.first]


def test_start_latest_sees_only_what_is_committed_after_it(store: PostgresHarness) -> None:
    store.put([b"old"])
    with producer(store) as slow:
        insert(slow, b"slow")
        late = PostgresQueue("lines", database=store.database, start="latest")
        late.subscribe("late", 1)
        slow.commit()
    store.put([b"new"])
    assert opened(late) == [b"slow", b"new"]
    late.close()


def test_lines_of_a_file(store: PostgresHarness, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\r\n\n\xfftwo\x00\nlast")
    receipt = store.queue().put_lines(path)
    source = store.view()
    assert receipt.messages == 4
    assert opened(source) == [b"one\r", b"", b"\xfftwo\x00", b"last"]
    assert [p.payload for p in source.peek(2)] == [b"one\r", b""]
    assert source.peek(1)[0].shown_id == receipt.first
    stats = source.stats()
    assert (stats.messages_put, stats.subscriptions["s"].ready) == (4, 0)


def test_a_put_that_dies_before_its_commit_put_nothing(store: PostgresHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store.view()
    monkeypatch.setenv(ENV, "queue.put.before_commit=raise")
    with pytest.raises(FailpointReached):
        store.put([b"one"])
    monkeypatch.delenv(ENV)
    assert opened(source) == []


def test_queue_and_readers_travel_without_their_connections(store: PostgresHarness) -> None:
    store.put([b"one", b"two"])
    source = store.view()
    slice_ = source.open(Lease("a", 1), Limit(10), SEED)
    assert slice_ is not None
    copy = pickle.loads(pickle.dumps(source))  # noqa: S301
    store.views.append(copy)
    copy.confirm(Lease("a", 1))
    readers = pickle.loads(pickle.dumps(source.readers(slice_, 2)))  # noqa: S301
    assert sum(batch.num_rows for r in readers for batch in r.read(SEED, frozenset(), 10)) == 2


def test_a_reader_connects_again_when_its_idle_connection_was_ended(store: PostgresHarness) -> None:
    store.put([b"one"])
    source = store.view()
    slice_ = source.open(Lease("a", 1), Limit(10), SEED)
    assert slice_ is not None
    assert len(messages_of(source, slice_, SEED)) == 1
    store.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()")
    assert len(messages_of(source, slice_, SEED, parallelism=1)) == 1


def test_where_there_is_no_server_nothing_secret_is_said() -> None:
    queue = PostgresQueue("lines", database="postgresql://ann:hidden-word@127.0.0.1:1/x")
    with pytest.raises(StoreUnavailable) as error:
        queue.subscribe("s", 1)
    assert "hidden-word" not in str(error.value)
    assert "hidden-word" not in repr(queue.database)


def test_a_database_without_the_tables_says_what_makes_them(database: Database) -> None:
    queue = PostgresQueue("lines", database=database)
    with pytest.raises(UsageError, match="ledger migrate"):
        queue.subscribe("s", 1)
    queue.close()
