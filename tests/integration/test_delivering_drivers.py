"""Drivers of sources that deliver are killed as processes; servers, connections and second drivers beside them.

Real servers, real Postgres, real Delta tables, the inline engine. The answer comes from what was produced.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from support.blows import Action, Blow
from support.brokers.cutter import Cutter
from support.chain import Chain, Ordeal, one_way_each, ordeal, shuffled
from support.contents import content
from support.crashes import Cell, run_driver
from support.databases import fresh_database
from support.delivering_runs import (
    POISONED_SINKS,
    KestrelStand,
    NatsStand,
    RabbitMQStand,
    RabbitMQStreamStand,
    RedisStand,
    kestrel,
    kestrel_checks_no_id,
    kestrel_poisoned,
    kestrel_tells_first,
    nats,
    nats_checks_no_id,
    nats_poisoned,
    nats_tells_first,
    rabbitmq,
    rabbitmq_checks_no_id,
    rabbitmq_poisoned,
    rabbitmq_tells_first,
    redis,
    redis_checks_no_id,
    redis_poisoned,
    redis_tells_first,
    shape_of,
    stream_poisoned,
)
from support.poison import EXIT_STATUS, POISON
from support.queues import prepared_database

from stormproof import Topology
from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.payload import payload_in
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(900)]

Build = Callable[[Cell], Topology]
OF_RABBITMQ: Final = pytest.mark.broker("rabbitmq")
BROKERS: Final = [pytest.param("rabbitmq", marks=OF_RABBITMQ), "kestrel", "redis", "nats"]
QUORUM: Final = pytest.param("quorum", marks=OF_RABBITMQ)
BUILDS: Final[dict[str, Build]] = {
    "rabbitmq": rabbitmq,
    "quorum": rabbitmq,
    "kestrel": kestrel,
    "redis": redis,
    "nats": nats,
}
TELLS_FIRST: Final[dict[str, Build]] = {
    "rabbitmq": rabbitmq_tells_first,
    "kestrel": kestrel_tells_first,
    "redis": redis_tells_first,
    "nats": nats_tells_first,
}
POISONED: Final[dict[str, Build]] = {
    "rabbitmq": rabbitmq_poisoned,
    "kestrel": kestrel_poisoned,
    "stream": stream_poisoned,
    "redis": redis_poisoned,
    "nats": nats_poisoned,
}
CHECKS_NO_ID: Final[dict[str, Build]] = {
    "rabbitmq": rabbitmq_checks_no_id,
    "kestrel": kestrel_checks_no_id,
    "redis": redis_checks_no_id,
    "nats": nats_checks_no_id,
}
STANDS: Final[dict[str, Callable[..., Any]]] = {
    "rabbitmq": RabbitMQStand,
    "quorum": RabbitMQStand,
    "kestrel": KestrelStand,
    "redis": RedisStand,
    "nats": NatsStand,
}
FIXTURES: Final = {"kestrel": "kestrel", "redis": "redis_server", "nats": "nats_server"}
DRIVERS_MAX: Final = 20
PARTS: Final = 8
ROUNDS: Final = 20
WAYS: Final = [Action.KILL, Action.RAISE, Action.KILL, Action.TAKE_OVER]
EVENTS: Final = [Action.BROKER, Action.CUT_ANSWER, Action.CUT_CONFIRM, Action.TAKE_OVER, Action.AGAIN]
PLACES: Final = (
    *("open.in_transaction", "open.after", "run.after", "prepare.after", "commit.before_sink", "commit.after_sink"),
    *("delta.after_log_entry", "postgres.after_commit", "finish.in_transaction", "finish.after"),
    *("journal.in_transaction", "journal.after_write"),
)
ONLY_OWED: Final = {"journal.before_acknowledge", "journal.after_acknowledge"}
"""A source that takes over (Kestrel) does not come there."""

MakeStand = Callable[..., Any]


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A kind of queue, and a running server that has it."""
    return request.param, request.getfixturevalue(FIXTURES.get(request.param, "rabbitmq"))


@contextmanager
def stand_on(
    postgres: EmbeddedPostgres, broker: tuple[str, Any], folder: Path, seed: int, name: str, **more: Any
) -> Generator[Any]:
    """A stand over a queue and a database of its own."""
    kind, server = broker
    name = f"{kind}_{name}"
    with fresh_database(postgres.database, f"test_{name}") as database, Cutter(server.port) as cutter:
        prepared_database(database)
        address = f"127.0.0.1:{cutter.port}"
        if kind in ("redis", "nats"):
            address = f"{kind}://{address}"
        elif kind != "kestrel":
            address = server.url_at(cutter.port)
        if kind == "stream":
            server.declare(name, "stream")
        elif kind == "nats":
            server.make(name)
        elif kind == "quorum":
            server.declare(name, "quorum")
            server.until_kept(name)
        elif kind == "rabbitmq":
            server.declare(name)
        given: dict[str, Any] = {"queue": name, "rng": random.Random(seed), "broker": server}
        cell = Cell(name, None, Guarantee.EXACTLY_ONCE, folder, database, f"{address} {name}", batch_messages=4, **more)
        if kind == "stream":
            yield RabbitMQStreamStand(cell, database, **given)
        else:
            yield STANDS[kind](cell, database, cutter=cutter, **given)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_misfortune_at_every_failpoint(
    postgres: EmbeddedPostgres, broker: tuple[str, Any], tmp_path: Path, seed: int, part: int
) -> None:
    """Killed, failed or taken over from, in turn; with one batch in flight, and with three."""
    shape = shape_of(BUILDS[broker[0]])
    points = [point for point in shape.points() if broker[0] != "kestrel" or point.name not in ONLY_OWED]
    cells = shuffled(one_way_each(WAYS, seed, points, shape), random.Random(seed))[part::PARTS]
    with stand_on(postgres, broker, tmp_path, seed, f"part{part}", in_flight=1 + 2 * (part % 2)) as stand:
        for line in Chain(stand, shape, len(cells)).run(cells):
            print(line)
        stand.settle()
        print(stand.tally)


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("broker", [*BROKERS, QUORUM], indirect=True)
def test_whatever_happens_in_whatever_order_nothing_is_lost_or_doubled(
    postgres: EmbeddedPostgres, broker: tuple[str, Any], tmp_path: Path, seed: int
) -> None:
    """Each driver meets one event at a place, and is killed at another: as the seed decides."""
    rng = random.Random(seed)
    rounds: list[Ordeal] = []
    for number, event in enumerate(rng.sample(EVENTS * (ROUNDS // len(EVENTS)), ROUNDS)):
        blows = Blow(rng.choice(PLACES), event, rng.randint(1, 2)), Blow(rng.choice(PLACES), Action.KILL, 3)
        rounds.append(Ordeal(f"round {number}, {event}", (blows,)))
    with stand_on(postgres, broker, tmp_path, seed, "rounds") as stand:
        chain = Chain(stand, shape_of(BUILDS[broker[0]]), ordeals_per_end=4)
        for line in chain.run(rounds):
            print(line)
        for event in EVENTS:
            if not stand.tally[event]:  # each time its driver was killed before; now none is
                print(chain.undergo(Ordeal(f"{event} alone", ((Blow(PLACES[0], event, 1),),))))
        stand.settle()
        print(stand.tally)
        assert all(stand.tally[event] for event in EVENTS), "else the rounds were about nothing"


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("broker", [*BROKERS, pytest.param("stream", marks=OF_RABBITMQ)], indirect=True)
def test_only_what_kills_its_driver_and_garbage_are_dead_letters(
    postgres: EmbeddedPostgres, broker: tuple[str, Any], tmp_path: Path, seed: int
) -> None:
    lines = [f"m{n} common".encode() for n in range(12)]
    garbage = b"\xff\xfe garbage"
    with stand_on(postgres, broker, tmp_path, seed, "poison") as stand:
        cell = replace(stand.cell, build=POISONED[broker[0]], batch_messages=16)
        stand.broker.put(stand.queue, [*lines[:5], POISON.encode(), *lines[5:9], garbage, *lines[9:]])
        codes = [run_driver(cell)]
        while codes[-1] != 0:
            assert codes[-1] == EXIT_STATUS
            assert len(codes) < DRIVERS_MAX, "the drivers die for ever"
            codes.append(run_driver(cell))
        assert len(codes) > 1
        for mode in POISONED_SINKS:
            found = content(mode, cell.name, cell.folder, stand.database)
            assert found == Counter(word for line in lines for word in line.decode().split())
        with connect(stand.database, application_name="tests") as connection:
            letters = connection.execute("select payload from stormproof.dead_letter").fetchall()
        assert sorted(payload_in(bytes(stored)) for (stored,) in letters) == sorted([POISON.encode(), garbage])


def without_its_constraint(database: Database) -> None:
    with connect(database, application_name="tests", autocommit=True) as connection:
        connection.execute("alter table stormproof.pending_message drop constraint pending_message_stable_id")


def test_a_server_that_is_told_before_the_commit_loses(
    postgres: EmbeddedPostgres, broker: tuple[str, Any], tmp_path: Path, seed: int
) -> None:
    # The entries of a Redis stream are counted, too: where the next driver finds them gone, it ends by name.
    with (
        stand_on(postgres, broker, tmp_path, seed, "first") as stand,
        pytest.raises(AssertionError, match=r"too much, too little: .*\(\{\}, \{'|a driver ended with 1"),
    ):
        Chain(stand, shape_of(TELLS_FIRST[broker[0]])).undergo(
            ordeal(FAILPOINTS["journal.in_transaction"], Action.KILL)
        )


def test_where_no_id_is_checked_what_comes_again_is_doubled(
    postgres: EmbeddedPostgres, broker: tuple[str, Any], tmp_path: Path, seed: int
) -> None:
    kind = broker[0]
    point = "journal.after_write" if kind == "kestrel" else "journal.before_acknowledge"
    with stand_on(postgres, broker, tmp_path, seed, "no_id") as stand:
        without_its_constraint(stand.database)
        with pytest.raises(AssertionError, match=r"holds .* times|\(\{'.*\}, \{\}\)"):
            Chain(stand, shape_of(CHECKS_NO_ID[kind])).undergo(ordeal(FAILPOINTS[point], Action.KILL))
