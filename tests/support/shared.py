"""One `PostgresQueue` object under random threads and forks: what was put is there once, and each reader has it once."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Final

from stormproof.core.contract.source import Lease, Limit
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.testing import messages_of
from support.databases import fresh_database
from support.queues import prepared_database

ACTS: Final = 12
FORK_S: Final = 60


class OwnMisfortune(Exception):
    """What a producer's own payloads raise."""


class SharedQueue:
    """A queue's one object, with producers and readers of its own choosing; `put` is what must be there in the end."""

    def __init__(self, database: Database, rng: random.Random) -> None:
        self.database = database
        self.queue = PostgresQueue("lines", database=database, partition_messages=20)
        self.queue.put([])
        self.put = list[bytes]()
        self.read = list[list[bytes]]()
        self.raised = list[BaseException]()
        self.forks = 0
        self._producing = threading.Event()

    def producer(self, name: str, rng: random.Random) -> Callable[[], None]:
        """Puts in every way, as chance has it."""
        ways = [
            self._plainly,
            self._plainly,
            self._outbox,
            self._rolled_back,
            self._failing,
            self._forked,
            self._looking,
        ]
        plan = [
            (rng.choice(ways), [f"{name}.{act}.{n}".encode() for n in range(rng.randint(1, 8))]) for act in range(ACTS)
        ]

        def work() -> None:
            for way, payloads in plan:
                way(payloads)

        return work

    def reader(self, subscription: str) -> Callable[[], None]:
        """Opens and confirms until the producers are done and nothing is left."""
        found = list[bytes]()
        self.read.append(found)
        view = self.queue.for_run(self.database)

        def work() -> None:
            with closing(view):
                view.subscribe(subscription, 1)
                last = False
                while True:
                    slice_ = view.open(Lease(subscription, 1), Limit(7), 1)
                    if slice_ is not None:
                        found.extend(message.payload for message in messages_of(view, slice_, 1))
                        view.confirm(Lease(subscription, 1))
                        view.drop_consumed()
                    elif last:
                        return
                    else:
                        last = self._producing.wait(0.02)

        return work

    def run(self, producers: list[Callable[[], None]], readers: list[Callable[[], None]]) -> None:
        """All at once."""
        threads = [
            [threading.Thread(target=self._guarded, args=(work,)) for work in works] for works in (producers, readers)
        ]
        for thread in (*threads[1], *threads[0]):
            thread.start()
        for thread in threads[0]:
            thread.join()
        self._producing.set()
        for thread in threads[1]:
            thread.join()
        self.queue.close()

    def require_exact(self, where: str) -> None:
        """Raise AssertionError where something is lost, doubled, or was never put."""
        assert self.raised == [], f"{where}: {self.raised!r}"
        for found in self.read:
            lost, more = Counter(self.put) - Counter(found), Counter(found) - Counter(self.put)
            assert not lost, f"{where}: {lost.total()} of {len(self.put)} messages lost, such as {next(iter(lost))!r}"
            assert not more, f"{where}: {more.total()} messages too many, such as {next(iter(more))!r}"

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed on
            self.raised.append(error)

    def _plainly(self, payloads: list[bytes]) -> None:
        assert self.queue.put(payloads).messages == len(payloads)
        self.put += payloads

    def _outbox(self, payloads: list[bytes]) -> None:
        with closing(connect(self.database, application_name="tests")) as connection:
            self.queue.put(payloads, connection=connection)
            connection.commit()
        self.put += payloads

    def _rolled_back(self, payloads: list[bytes]) -> None:
        with closing(connect(self.database, application_name="tests")) as connection:
            self.queue.put(payloads, connection=connection)
            connection.rollback()

    def _failing(self, payloads: list[bytes]) -> None:
        def raising() -> Iterator[bytes]:
            yield from payloads
            raise OwnMisfortune

        with suppress(OwnMisfortune):
            self.queue.put(raising())

    def _forked(self, payloads: list[bytes]) -> None:
        self.forks += 1
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(FORK_S)
                self.queue.put(payloads)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0, "a put in a fork failed"
        self.put += payloads

    def _looking(self, payloads: list[bytes]) -> None:
        self.queue.peek(len(payloads))
        self.queue.stats()
        self.queue.drop_connections()


def shared(server: EmbeddedPostgres, rounds: int, seed: int) -> Iterator[str]:
    """So many rounds, a line each.

    Raises:
        AssertionError: a round is not exact.
    """
    for number in range(1, rounds + 1):
        rng = random.Random(f"{seed} {number}")
        name = f"shared_{seed}_{number}"
        with fresh_database(server.database, name) as database:
            one = SharedQueue(prepared_database(database), rng)
            producers = [one.producer(f"p{n}", rng) for n in range(rng.randint(2, 5))]
            readers = [one.reader(f"r{n}") for n in range(rng.randint(1, 2))]
            one.run(producers, readers)
            one.require_exact(f"round {number}")
        yield (
            f"round {number}/{rounds}: {len(producers)} producers, {len(readers)} readers, {one.forks} forks, "
            f"{len(one.put)} messages, exact"
        )
