"""One `PostgresQueue` object in several threads, topologies and forks: a put that returned is there, and is there once."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.queues import prepared_database
from support.shared import SharedQueue, shared
from support.threads import in_threads

from stormproof import MemorySink, PostgresQueue, Settings, Topology
from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.errors import UsageError

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]


@pytest.fixture
def prepared(database: Database) -> Database:
    return prepared_database(database)


@pytest.fixture
def queue(prepared: Database) -> Iterator[PostgresQueue]:
    made = PostgresQueue("lines", database=prepared)
    yield made
    made.close()


def rows_of(database: Database, statement: str) -> list[tuple[Any, ...]]:
    with connect(database, application_name="tests", autocommit=True) as connection:
        return connection.execute(statement.encode()).fetchall()


def there(database: Database) -> Counter[bytes]:
    """What is in the queue, seen from another connection: what is committed."""
    return Counter(row[0] for row in rows_of(database, "select payload from stormproof_queue.lines"))


def in_fork(work: Callable[[], object]) -> int:
    """Run in a fork of this process; its exit status: 0 done, 1 raised."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def settings(database: Database, folder: Path) -> Settings:
    return Settings(database_url=database.without_password, home=folder, lease_s=5, poll_interval_s=0.01)


def counted(name: str, queue: PostgresQueue, sink: MemorySink) -> Topology:
    topology = Topology(name)
    topology.stream("lines", queue).into(sink)
    return topology


def lines_in(sink: MemorySink) -> Counter[str]:
    assert sink.store.content is not None
    return Counter(sink.store.content.column("line").to_pylist())


def test_a_put_inside_anothers_stream_of_payloads_is_committed_by_itself(
    prepared: Database, queue: PostgresQueue
) -> None:
    """What lost 12,105 of 13,687 returned puts: one thread's put was a savepoint in another's transaction."""
    begun, done = threading.Event(), threading.Event()

    def payloads() -> Iterator[bytes]:
        yield b"of the one that fails"
        begun.set()
        assert done.wait(30)
        raise KeyError("the producer's own")

    def failing() -> None:
        queue.put(payloads())

    def other() -> None:
        assert begun.wait(30)
        try:
            queue.put([b"returned"])
            assert there(prepared) == {b"returned": 1}
        finally:
            done.set()

    queue.put([])
    raised = in_threads(failing, other)
    assert [type(error) for error in raised] == [KeyError]
    assert there(prepared) == {b"returned": 1}


def test_many_producers_on_one_object_lose_and_double_nothing(prepared: Database, queue: PostgresQueue) -> None:
    returned = [list[bytes]() for _ in range(4)]

    def producer(number: int) -> Callable[[], None]:
        def work() -> None:
            for n in range(60):
                payload = b"%d %d" % (number, n)
                queue.put([payload])
                returned[number].append(payload)
                if n % 20 == 0:
                    queue.peek(1)
                    queue.stats()

        return work

    assert in_threads(*map(producer, range(4))) == []
    assert there(prepared) == Counter(payload for list_ in returned for payload in list_)


def test_a_producer_thread_beside_run_on_one_object(prepared: Database, queue: PostgresQueue, tmp_path: Path) -> None:
    sink, returned = MemorySink("rows", staging=tmp_path), list[str]()

    def produce() -> None:
        for n in range(100):
            queue.put([b"%d" % n])
            returned.append(str(n))

    def run() -> None:
        counted("beside", queue, sink).run(engine="inline", settings=settings(prepared, tmp_path), until_idle=True)

    assert in_threads(produce, run) == []
    run()
    assert lines_in(sink) == Counter(returned)
    assert len(returned) == 100


def test_two_topologies_share_one_object(prepared: Database, queue: PostgresQueue, tmp_path: Path) -> None:
    queue.put([b"%d" % n for n in range(200)])
    sinks = [MemorySink(f"rows{n}", staging=tmp_path / str(n)) for n in range(2)]

    def run(n: int) -> Callable[[], object]:
        topology = counted(f"topology{n}", queue, sinks[n])
        chosen = settings(prepared, tmp_path).model_copy(update={"batch_messages": 7})
        return lambda: topology.run(engine="inline", settings=chosen, until_idle=True)

    assert in_threads(run(0), run(1)) == []
    for sink in sinks:
        assert lines_in(sink) == Counter(str(n) for n in range(200))


def test_one_object_acts_for_one_subscription(queue: PostgresQueue) -> None:
    queue.subscribe("one", 1)
    queue.subscribe("one", 2)
    with pytest.raises(UsageError, match=r"acts for subscription 'one'.*make another PostgresQueue"):
        queue.subscribe("two", 1)
    queue.put([b"m"])
    assert queue.open(Lease("o", 2), Limit(1), 1) is not None


def test_runs_on_two_databases_leave_open_where_a_put_goes(prepared: Database, postgres: Any, tmp_path: Path) -> None:
    queue = PostgresQueue("lines")
    queue.bind(prepared)
    assert queue.database == prepared
    queue.bind(postgres.database.with_name("another"))
    with pytest.raises(UsageError, match="name one"):
        queue.put([b"m"])


def test_random_threads_and_forks_on_one_object(postgres: EmbeddedPostgres, seed: int) -> None:
    """The short form of `make torture ARGS='--only shared'`."""
    assert len(list(shared(postgres, 2, seed))) == 2


def test_control_a_put_that_is_undone_is_seen(prepared: Database) -> None:
    one = SharedQueue(prepared, random.Random(1))
    reader = one.reader("r")
    one.put.append(b"returned, and not there")
    one.run([one.producer("p", random.Random(1))], [reader])
    with pytest.raises(AssertionError, match=r"1 of .* messages lost"):
        one.require_exact("control")


def test_a_fork_puts_by_a_connection_of_its_own(prepared: Database, queue: PostgresQueue) -> None:
    queue.put([b"parent"])
    for n in range(3):
        assert in_fork(lambda n=n: queue.put([b"child %d" % n])) == 0  # type: ignore[misc]
        queue.put([b"after %d" % n])
    expected = [b"parent", *(b"child %d" % n for n in range(3)), *(b"after %d" % n for n in range(3))]
    assert there(prepared) == Counter(expected)


def test_a_fork_in_the_midst_of_a_put_cannot_speak_in_its_parents_transaction(
    prepared: Database, queue: PostgresQueue
) -> None:
    def payloads() -> Iterator[bytes]:
        yield b"before"
        child = os.fork()
        if child == 0:
            raise KeyError("unwinds through the parent's transaction, in the fork")
        assert os.waitpid(child, 0)[1] == 0
        yield b"after"

    parent = os.getpid()
    try:
        queue.put(payloads())
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert there(prepared) == {b"before": 1, b"after": 1}


def test_a_fork_neither_uses_nor_closes_a_connection_of_its_parent(prepared: Database) -> None:
    def use(connection: psycopg.Connection) -> Callable[[], None]:
        def work() -> None:
            for act in (lambda: connection.execute("select 1"), connection.commit, connection.rollback):
                with pytest.raises(UsageError, match="is a fork of process"):
                    act()
            connection.close()

        return work

    with closing(connect(prepared, application_name="tests")) as connection:
        connection.execute("create temporary table mine (n int)")
        assert in_fork(use(connection)) == 0
        connection.execute("insert into mine values (1)")
        connection.commit()
        assert connection.execute("select n from mine").fetchall() == [(1,)]


def test_a_connection_that_went_stale_while_idle_is_replaced(prepared: Database, queue: PostgresQueue) -> None:
    queue.put([b"before"])
    rows_of(prepared, "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name ~ ' queue '")
    queue.put([b"after"])
    assert there(prepared) == {b"before": 1, b"after": 1}


def test_an_autocommit_connection_without_a_transaction_is_refused(prepared: Database, queue: PostgresQueue) -> None:
    queue.put([])
    with closing(connect(prepared, application_name="tests", autocommit=True)) as connection:
        with pytest.raises(UsageError, match="autocommit"):
            queue.put([b"m"], connection=connection)
        with connection.transaction():
            receipt = queue.put([b"m"], connection=connection)
        assert receipt.first is not None
        assert "None" not in receipt.first
    assert there(prepared) == {b"m": 1}
    with pytest.raises(UsageError, match=r"psycopg\.Connection"):
        queue.put([b"m"], connection="postgresql:///x")  # type: ignore[arg-type]


def test_a_lost_server_is_named_once_the_new_connection_fails_too(prepared: Database) -> None:
    gone = PostgresQueue("lines", database=prepared.with_name("no_such_database"))
    with pytest.raises(StoreUnavailable, match="no_such_database"):
        gone.put([b"m"])
