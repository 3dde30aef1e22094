"""Servers that deliver: whatever dies, in whatever moment, each message is applied exactly once, and confirmed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from support.brokers.cutter import Cutter
from support.brokers.harness import ANY, CrashHarness, opened
from support.brokers.journal_lives import TOPOLOGY, Lives
from support.brokers.lives import Killed
from support.brokers.nats_server import KilledWithItsProcess, NatsHarness
from support.brokers.redis_server import RedisHarness
from support.queues import prepared_database
from support.verdicts import verified

from stormproof import RedisStreamSource
from stormproof.core.base.errors import Fenced
from stormproof.core.contract.payload import payload_in
from stormproof.core.contract.source import Lease
from stormproof.core.pending.journal import Delivery, Journal
from stormproof.core.pending.redelivering import RedeliveringSource
from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres

HARNESSES: Final[Mapping[str, Callable[..., CrashHarness]]] = {"redis": RedisHarness, "nats": NatsHarness}
ROUNDS: Final = 20


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, database: Database) -> Iterator[CrashHarness]:
    server: Any = request.getfixturevalue(f"{request.param}_server")
    harness = HARNESSES[request.param](prepared_database(database), request.node.name, server=server)
    yield harness
    harness.close()


@pytest.fixture
def lives(harness: CrashHarness, tmp_path: Path) -> Lives:
    return Lives(harness, harness.database, tmp_path)


# ---- the driver dies


@pytest.mark.sampled(0.25)
def test_a_driver_that_dies_at_any_failpoint_loses_and_doubles_nothing(lives: Lives) -> None:
    met: dict[str, None] = {}
    lives.put(12, "bad 0")
    lives.live(met.setdefault)
    done: set[str] = set()
    while left := [name for name in met if name not in done]:
        point = left[0]
        done.add(point)

        def reached(name: str, point: str = point) -> None:
            met.setdefault(name)
            if name == point:
                raise Killed

        lives.put(6, f"bad {len(done)}")
        lives.live(reached)
    assert {"journal.in_transaction", "journal.before_acknowledge", "journal.after_acknowledge"} <= done
    assert len(done) > 25
    lives.settle()
    lives.require_exactly_once()
    assert lives.dead() == sorted(f"bad {n}" for n in range(len(done) + 1))


# ---- the server dies, connections are cut, drivers replace each other, and what was applied comes again


@pytest.mark.sampled(0.25)
def test_whatever_happens_in_whatever_order_nothing_is_lost_or_doubled(lives: Lives, seed: int) -> None:
    rng = Random(seed)
    server: Any = lives.harness.server  # type: ignore[attr-defined]
    happened: Counter[str] = Counter()
    with Cutter(server.port) as cutter:
        lives.options = {"url": server.url.replace(str(server.port), str(cutter.port))}

        def kill_driver() -> None:
            raise Killed

        def second_driver() -> None:
            lives.live()  # the first is fenced by it

        events: Mapping[str, Callable[[], None]] = {
            "driver": kill_driver,
            "server": server.restart,
            "answer": lambda: cutter.cut_at(lives.harness.confirms_by),
            "confirm": lambda: cutter.cut_at(lives.harness.confirms_by, "request"),
            "second": second_driver,
            "again": lives.harness.deliver_again,
        }
        planned = rng.sample(sorted(events) * ROUNDS, ROUNDS)
        for event in planned:
            left = rng.randrange(1, 20)

            def reached(name: str, event: str = event) -> None:
                nonlocal left
                del name
                left -= 1
                if left == 0:
                    happened[event] += 1
                    events[event]()

            lives.put(rng.randrange(1, 9), *["bad"] * (rng.random() < 0.1))
            try:
                lives.live(reached, prefetch=rng.choice([3, 7, 100]))
            except Fenced:
                assert event == "second"
        assert happened.total() > ROUNDS // 2, "else the rounds were about nothing"
        lives.settle()
    lives.require_exactly_once()


def test_a_confirmation_whose_effect_is_unknown_is_neither_lost_nor_repeated_for_ever(lives: Lives) -> None:
    server: Any = lives.harness.server  # type: ignore[attr-defined]
    with Cutter(server.port) as cutter:
        lives.options = {"url": server.url.replace(str(server.port), str(cutter.port))}
        for loses in ("answer", "request"):
            lives.put(7)
            cutter.cut_at(lives.harness.confirms_by, loses)
            lives.live()
        assert cutter.cut == 2
        lives.settle()
    lives.require_exactly_once()


def test_what_was_applied_and_comes_again_is_confirmed_and_counted(lives: Lives) -> None:
    lives.put(9)

    def reached(name: str) -> None:
        if name == "journal.before_acknowledge":
            raise Killed

    lives.live(reached)
    lives.settle()
    lives.require_exactly_once()
    assert lives.journal().suppressed > 0
    assert lives.journal().owed == 0


def test_a_replaced_driver_confirms_nothing_more(harness: CrashHarness) -> None:
    harness.put([b"a", b"b"])
    old = harness.view(epoch=1)
    assert opened(old, Lease("a", 1)) == [b"a", b"b"]
    new = harness.view(epoch=2)
    new.recover(2)
    with pytest.raises(Fenced):
        old.open(Lease("b", 1), ANY, 7)
    with pytest.raises(Fenced):
        old.confirm(Lease("a", 1))
    new.abort(Lease("a", 2))
    assert opened(new, Lease("c", 2)) == [b"a", b"b"]


# ---- messages that fail


def test_only_the_culprit_is_a_dead_letter(lives: Lives) -> None:
    lives.put(20, "bad 1", "bad 2")
    lives.settle()
    lives.require_exactly_once()
    assert lives.dead() == ["bad 1", "bad 2"]


def test_garbage_is_a_dead_letter_and_its_neighbours_are_applied(harness: CrashHarness, tmp_path: Path) -> None:
    lives = Lives(harness, harness.database, tmp_path)
    lives.put(3)
    harness.put([b"\xff\xfe", b"\x80"])
    lives.put(3)
    lives.settle()
    lives.require_exactly_once()
    with connect(harness.database, application_name="tests") as connection:
        found = connection.execute("select payload, reason from stormproof.dead_letter").fetchall()
    assert sorted((payload_in(bytes(stored)), reason) for stored, reason in found) == [
        (b"\x80", "bad_message"),
        (b"\xff\xfe", "bad_message"),
    ]


# ---- the weaker guarantees, with what is theirs


def died_at(point: str) -> Callable[[str], None]:
    def reached(name: str) -> None:
        if name == point:
            raise Killed

    return reached


def test_at_least_once_doubles_what_was_applied_and_not_confirmed_and_loses_nothing(lives: Lives) -> None:
    lives.put(5)
    lives.live(died_at("commit.after_sink"), guarantee="at-least-once")
    lives.settle("at-least-once")
    found = lives.in_postgres() + lives.in_delta()
    assert set(lives.in_postgres()) == set(lives.in_delta()) == set(lives.produced)
    assert max(found.values()) > 2, "a sink had it already"


def test_at_most_once_loses_what_was_opened_and_doubles_nothing(lives: Lives) -> None:
    lives.put(10)
    lives.live(died_at("commit.before_sink"), guarantee="at-most-once")
    lives.settle("at-most-once")
    assert sum(lives.in_postgres().values()) == 5, "one batch of two is gone"
    assert set(lives.in_postgres().values()) == set(lives.in_delta().values()) == {1}


# ---- negative controls


class NoKeyJournal(Journal):
    """Takes whatever comes for new."""

    def _known(self, payloads: Mapping[str, bytes]) -> dict[str, int]:
        return {}


class NoKey(RedeliveringSource):
    def _journal(self, cursor: Any) -> Journal:
        return NoKeyJournal(cursor, self.subscriber, self.where)


class ConfirmsFirst(RedeliveringSource):
    """Confirms a message to its server before it is written down."""

    def receive(self, limit: int) -> Sequence[Delivery]:
        received = super().receive(limit)  # type: ignore[safe-super]
        if received:
            self.acknowledge([message.handle for message in received])
        return received


class RedisNoKey(NoKey, RedisStreamSource): ...


class NatsNoKey(NoKey, KilledWithItsProcess): ...


class RedisConfirmsFirst(ConfirmsFirst, RedisStreamSource): ...


class NatsConfirmsFirst(ConfirmsFirst, KilledWithItsProcess): ...


BROKEN: Final[Mapping[tuple[type[CrashHarness], str], type[RedeliveringSource]]] = {
    (RedisHarness, "key"): RedisNoKey,
    (NatsHarness, "key"): NatsNoKey,
    (RedisHarness, "order"): RedisConfirmsFirst,
    (NatsHarness, "order"): NatsConfirmsFirst,
}


def test_without_the_id_a_message_that_comes_again_is_applied_again(lives: Lives) -> None:
    lives.harness.kind = BROKEN[type(lives.harness), "key"]  # type: ignore[attr-defined]
    with connect(lives.database, application_name="tests", autocommit=True) as connection:
        connection.execute("alter table stormproof.pending_message drop constraint pending_message_stable_id")
    lives.put(5)
    lives.live(died_at("journal.before_acknowledge"))
    lives.settle()
    assert set(lives.in_postgres().values()) == {2}


def test_a_message_that_is_confirmed_before_it_is_written_down_is_lost(lives: Lives) -> None:
    lives.harness.kind = BROKEN[type(lives.harness), "order"]  # type: ignore[attr-defined]
    lives.options = {"on_gap": "record"}  # where the server counts what it gave, the loss is seen
    lives.put(5)
    lives.live(died_at("journal.in_transaction"))
    lives.settle()
    lives.put(1)
    lives.settle()
    assert sum(lives.in_postgres().values()) == 1


# ---- what the server removed


def test_what_was_removed_before_it_was_read_is_on_record_and_the_audit_names_it(lives: Lives) -> None:
    """Also where the driver dies once it has seen it, before anything behind it is written down."""
    lives.options = {"on_gap": "record"}
    lives.put(2)
    lives.settle()
    lives.require_exactly_once()  # negative control: no alarm
    lives.put(5)
    lives.harness.remove_but(2)
    lives.live(died_at("journal.in_transaction"))
    lives.settle()
    lost = [text for text in map(str, verified(TOPOLOGY, lives.database).violations) if "are lost" in text]
    assert len(lost) == 1
    assert re.search("3 (messages|entries) between", lost[0])
    assert sorted(lives.in_postgres()) == [f"word {n}" for n in (0, 1, 5, 6)]
    assert lives.in_delta() == lives.in_postgres()
