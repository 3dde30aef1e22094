"""Slices under concurrent producers, for any interleaving: nothing is skipped, nothing is opened twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from support.queues import prepared_database
from support.source_harness import Message, messages_of

from stormproof.core.contract.source import Lease, Limit, Slice
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.postgres_queue import PostgresQueue, reader

pytestmark = pytest.mark.postgres
PRODUCERS = 3


@pytest.fixture(scope="module")
def queues(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """One database for all examples; each has a queue of its own."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute("create database slices template template0")
    yield prepared_database(postgres.database.with_name("slices"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute("drop database slices with (force)")


class World:
    """Producers, one driver after the other, and a model that knows what each message's end should be."""

    def __init__(self, database: Database, queue: str, seed: int) -> None:
        self.database, self.queue_name, self.rng = database, queue, Random(seed)
        self.connections = [connect(database, application_name="tests") for _ in range(PRODUCERS)]
        self.uncommitted = [list[bytes]() for _ in range(PRODUCERS)]
        self.committed = Counter[bytes]()
        self.confirmed = Counter[bytes]()
        self.leases = dict[str, tuple[Slice, list[Message]]]()
        self.number = 0
        self.epoch = 0
        self.driver: PostgresQueue
        self.restart()

    def fresh(self) -> PostgresQueue:
        return PostgresQueue(
            self.queue_name,
            database=self.database,
            max_attempts=10_000,
            backoff_base_s=0.000_001,
            partition_messages=16,
            rng=self.rng,
        )

    def put(self, producer: int, messages: int) -> None:
        for _ in range(messages):
            self.number += 1
            payload = b"%d" % self.number
            self.connections[producer].execute(
                f"insert into stormproof_queue.{self.queue_name} (payload) values (%s)".encode(), (payload,)
            )
            self.uncommitted[producer].append(payload)

    def end(self, producer: int, *, commit: bool) -> None:
        if commit:
            self.connections[producer].commit()
            self.committed.update(self.uncommitted[producer])
        else:
            self.connections[producer].rollback()
        self.uncommitted[producer] = []

    def open(self, limit: int) -> bool:
        self.number += 1
        owner = f"o{self.number}"
        slice_ = self.driver.open(Lease(owner, self.epoch), Limit(limit), self.number)
        if slice_ is None:
            return False
        messages = messages_of(self.driver, slice_, self.number)
        xor = 0
        for message in messages:
            xor ^= message.token
        assert (len(messages), xor) == (slice_.expected.messages, slice_.expected.xor)
        assert 1 <= len(messages) <= limit
        pending = {m.payload for _, others in self.leases.values() for m in others}
        for message in messages:
            assert message.payload in self.committed, "opened before its commit"
            assert message.payload not in pending, "opened twice at once"
            assert message.payload not in self.confirmed, "opened after it was confirmed"
        self.leases[owner] = (slice_, messages)
        return True

    def confirm(self, *, failing: int) -> None:
        owner, (_, messages) = self.leases.popitem()
        failed = messages[:failing]
        self.driver.confirm(Lease(owner, self.epoch), [message.failed() for message in failed])
        self.confirmed.update(message.payload for message in messages[failing:])

    def abort(self, *, halve: bool) -> None:
        owner, (slice_, _) = self.leases.popitem()
        if halve:
            self.driver.split(slice_, Lease(owner, self.epoch))
        else:
            self.driver.abort(Lease(owner, self.epoch))

    def restart(self) -> None:
        """The driver dies and the next one takes over."""
        self.epoch += 1
        if self.epoch > 1:
            self.driver.close()
        self.driver = self.fresh()
        self.driver.subscribe("s", self.epoch)
        assert set(self.driver.recover(self.epoch)) == set(self.leases)
        for owner in self.leases:
            self.driver.abort(Lease(owner, self.epoch))
        self.leases.clear()

    def finish(self) -> None:
        """Everything that was committed is confirmed once, in the end."""
        for producer in range(PRODUCERS):
            self.end(producer, commit=producer != 0)
        while self.leases:
            self.confirm(failing=0)
        while self.open(5):
            self.confirm(failing=0)
        assert self.confirmed == self.committed
        assert max(self.confirmed.values(), default=1) == 1

    def close(self) -> None:
        self.driver.close()
        for connection in self.connections:
            connection.close()


step = st.one_of(
    st.tuples(st.just("put"), st.integers(0, PRODUCERS - 1), st.integers(1, 6)),
    st.tuples(st.just("commit"), st.integers(0, PRODUCERS - 1), st.just(0)),
    st.tuples(st.just("commit"), st.integers(0, PRODUCERS - 1), st.just(0)),
    st.tuples(st.just("rollback"), st.integers(0, PRODUCERS - 1), st.just(0)),
    st.tuples(st.just("open"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("open"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("confirm"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 1), st.just(0)),
    st.tuples(st.sampled_from(["crash", "drop"]), st.just(0), st.just(0)),
)


@pytest.fixture(scope="module", params=[1, reader.BULK])
def bulk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Slices are found in both ways: with the walk for bulk producers, and without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BULK", request.param)
        yield


@given(steps=st.lists(step, min_size=5, max_size=40), seed=st.integers(0, 2**16))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.usefixtures("bulk")
def test_every_committed_message_is_confirmed_once(
    queues: Database, steps: list[tuple[str, int, int]], seed: int
) -> None:
    with connect(queues, application_name="tests", autocommit=True) as connection:
        row = connection.execute("select count(*) from stormproof.queue").fetchone()
    assert row is not None
    world = World(queues, f"q{row[0]}", seed)
    try:
        for name, first, second in steps:
            match name:
                case "put":
                    world.put(first, second)
                case "commit" | "rollback":
                    world.end(first, commit=name == "commit")
                case "open":
                    world.open(first)
                case "confirm" if world.leases:
                    world.confirm(failing=first)
                case "abort" if world.leases:
                    world.abort(halve=bool(first))
                case "crash":
                    world.restart()
                case "drop" if not any(world.uncommitted):
                    note(f"dropped {world.driver.drop_consumed()}")
                case _:
                    pass
        world.finish()
    finally:
        world.close()


def test_control_a_position_by_id_loses_messages(queues: Database) -> None:
    """The same producers with a reader that keeps the last id: one interleaving is enough."""
    world = World(queues, "control", 0)

    def after(last: int) -> tuple[set[bytes], int]:
        with connect(queues, application_name="tests", autocommit=True) as connection:
            rows = connection.execute(
                "select id, payload from stormproof_queue.control where id > %s order by id", (last,)
            ).fetchall()
        return {row[1] for row in rows}, max((row[0] for row in rows), default=last)

    world.put(0, 1)
    world.put(1, 1)
    world.end(1, commit=True)
    first, last = after(0)
    world.end(0, commit=True)
    second, _ = after(last)
    assert first | second < set(world.committed)
    world.finish()
    world.close()
