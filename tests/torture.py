"""Drivers that meet one misfortune after the other: ``make torture ROUNDS=n SEED=s``, the long form of what the tests do.

In this order, each part checked after every misfortune, with a line each (``--only PART`` for one part alone):

``matrix`` every failpoint, for each sink that comes by, killed, failed, left standing past its leases, and taken over from;
           with 1 and with 4 batches in flight; on the inline engine
``states`` the same with states instead of sinks, and Postgres that restarts or loses a COMMIT in a state's commit
``tables`` every failpoint for appends and upserts of each kind, into tables that refuse some rows
``races``  two drivers started on one topology at once
``shared`` one queue object under random threads and forks
``rounds`` n random rounds: two or three misfortunes at once, Postgres restarts and lost COMMITs among them
``spark``  every failpoint, killed and failed, on Spark
``restarts`` a topology with 14 sinks, Postgres restarted or crashed at random failpoints of its run
``containers`` users of one embedded Postgres in containers and under two names of its folder: they come, put, leave, die
``environment`` every fault of docs/faults.md, in a random order, those on Spark among them
``servers`` NATS, Redis, Kafka and RabbitMQ streams, 20 seeds each: the server loses its tail, removes what nobody read,
           gives numbers again, is made again, is restored; what is on record is added up
``verify`` 10,000 verifications, deep and not deep, of all txids and of the last ones, beside drivers that commit,
           are killed, fail messages, compact: none may raise an alarm
``rows``   500 random Delta tables under 30 random steps each, read by delta-rs, DuckDB and Spark, against a plain model

What is random comes from the seed, which is printed. A round that failed is run again by ``SEED=s ARGS='--only rounds
--first ROUND' ROUNDS=1``. Exit status 1 at the first difference.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from support.beside import beside
from support.blows import Action
from support.chain import Chain, Ordeal, ordeal, ordeals, shuffled
from support.containers import random_containers
from support.databases import fresh_database
from support.fault_stand import NotHere, place_in, try_fault
from support.fault_table import faults
from support.forgetful import KINDS, SEEDS, chaos
from support.races import races
from support.restarts import restarts
from support.rounds import ROUNDS_PER_TOPOLOGY, Rounds, lives, stand_on
from support.row_oracle import MAKERS, WITH_SPARK, Oracle
from support.shapes import SINKS, Shape
from support.shared import shared
from support.spark_driver import TIMEOUT_S, SparkDriver
from support.states import IN_ALL, IN_MAPS, READ, StateMode, promised
from support.strict_tables import STRICT_TABLES

from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.postgres.embedded import EmbeddedPostgres

PARTS = (
    "matrix",
    "states",
    "tables",
    "races",
    "shared",
    "rounds",
    "restarts",
    "environment",
    "containers",
    "spark",
    "servers",
    "verify",
    "rows",
)
RACES = 50
SHARED = 40
RESTARTS = 30
CONTAINERS = 20
VERIFICATIONS = 10_000
TABLES = 500
BY_SPARK = 10
"""Of so many tables Spark writes one and reads it."""

ALONE = (Action.KILL, Action.RAISE, Action.LAPSE)
WAYS = (*ALONE, Action.TAKE_OVER)
AWAY = (Action.RESTART, Action.CRASH, Action.LOSE_ANSWER, Action.LOSE_COMMIT)


def matrix(server: EmbeddedPostgres, rng: random.Random) -> Iterator[str]:
    """Every cell once, for each number of batches in flight."""
    for in_flight in (1, 4):
        yield from cells_of(server, rng, in_flight, SINKS, ordeals(WAYS))


def states(server: EmbeddedPostgres, rng: random.Random) -> Iterator[str]:
    """Every cell once in which states promise something, for each number of batches in flight."""
    in_postgres = [n for n, mode in enumerate(StateMode, start=1) if mode.store == "postgres"]
    away = [
        ordeal(point, action, at)
        for point in FAILPOINTS.values()
        if point.scope == "state"
        for action in AWAY
        for at in in_postgres
    ]
    yield from cells_of(server, rng, 1, READ, [cell for cell in ordeals(WAYS, shape=READ) if promised(cell)])
    yield from cells_of(server, rng, 1, IN_MAPS, away, proxied=True)
    yield from cells_of(server, rng, 4, IN_ALL, ordeals(ALONE, shape=IN_ALL))
    yield from cells_of(server, rng, 4, IN_MAPS, ordeals([Action.TAKE_OVER], shape=IN_MAPS))


def tables(server: EmbeddedPostgres, rng: random.Random) -> Iterator[str]:
    """Every cell once, for each number of batches in flight; and Postgres that goes away where rows are rejected."""
    shape = STRICT_TABLES
    for in_flight in (1, 4):
        yield from cells_of(server, rng, in_flight, shape, ordeals(WAYS, shape=shape))
    away = [
        ordeal(FAILPOINTS[point], action, 1)
        for point in ("postgres.after_rejects", "finish.before_commit")
        for action in AWAY
    ]
    yield from cells_of(server, rng, 1, shape, away, proxied=True)


def cells_of(
    server: EmbeddedPostgres,
    rng: random.Random,
    in_flight: int,
    shape: Shape,
    cells: Sequence[Ordeal],
    *,
    proxied: bool = False,
) -> Iterator[str]:
    """Each cell once, in a random order."""
    tally: Counter[str] = Counter()
    shaped = partial(replace, in_flight=in_flight, batch_messages=5 if in_flight == 1 else 2)
    for line in lives(server, shuffled(cells, rng), tally, shaped, shape, proxied=proxied):
        yield f"{in_flight} in flight: {line}"
    yield f"{in_flight} in flight: {len(cells)} cells exact; {shown(tally)}"


def on_spark(server: EmbeddedPostgres, rng: random.Random) -> Iterator[str]:
    """Every failpoint in one chain on Spark, with 4 batches in flight.

    But the one between two attempts: Spark itself tries a task again that raises an error, so no attempt follows.
    """
    points = [point for point in SINKS.points() if point.scope != "retry"]
    with stand_on(server, "spark", proxied=False) as stand:
        stand.cell = replace(stand.cell, in_flight=4, batch_messages=2)
        stand.start, stand.timeout_s = SparkDriver, TIMEOUT_S
        yield from Chain(stand).run(shuffled(ordeals([Action.KILL, Action.RAISE], points), rng))
        yield shown(stand.tally)


def random_rounds(server: EmbeddedPostgres, seed: int, first: int, number: int) -> Iterator[str]:
    """Random rounds, and what they came to."""
    rounds = Rounds(server, seed)
    last = first + number - 1
    for n, line in rounds.run(first, last):
        yield f"round {n}/{last}: {line}"
        if n == last or n % ROUNDS_PER_TOPOLOGY == 0:
            yield f"so far: at {len(rounds.reached)} failpoints; {shown(rounds.tally)}"


def faults_of_the_environment(server: EmbeddedPostgres, folder: Path, rng: random.Random) -> Iterator[str]:
    """Each fault once, with what the run said."""
    tried = faults()
    rng.shuffle(tried)
    for number, fault in enumerate(tried, start=1):
        place_folder = folder / f"environment-{number}"
        place_folder.mkdir()
        with place_in(place_folder, server, f"environment_{number}") as place:
            try:
                seen = try_fault(place, fault)
            except NotHere as reason:
                yield f"{number}/{len(tried)} {fault.name}: not tried: {reason}"
                continue
        said = [line for line in seen.err.splitlines() if line.startswith("stormproof: ")]
        what = said[-1] if said else "said nothing"
        yield f"{number}/{len(tried)} {fault.name}: status {seen.status}, 0 blamed, exact; {what}"


def rows_of_tables(folder: Path, seed: int, number: int) -> Iterator[str]:
    """Each table once, by seeds from this one on."""
    from stormproof.core.engine.spark import spark_session
    from stormproof.core.start.settings import Settings

    session = spark_session(Settings(master="local[2]", home=folder / "rows-spark"))
    tally: Counter[str] = Counter()
    for n in range(number):
        spark = session if n % BY_SPARK == 0 else None
        oracle = Oracle(folder / f"rows-{n}", seed + n, spark, MAKERS if spark is None else WITH_SPARK)
        oracle.play()
        tally += oracle.told
        shutil.rmtree(folder / f"rows-{n}")
        if (n + 1) % BY_SPARK == 0:
            yield f"{n + 1}/{number} tables exact; {shown(tally)}"
    session.stop()


def servers_that_forget(server: EmbeddedPostgres, folder: Path, seeds: range) -> Iterator[str]:
    """Each seed of each kind of server that starts here, and what came of all of them."""
    for kind, (broker, _) in KINDS.items():
        if (missing := broker.missing()) is not None:
            yield f"{kind}: not tried: {missing} is not installed"
            continue
        tally: Counter[str] = Counter()
        for number in seeds:
            with fresh_database(server.database, f"servers_{kind}_{number}") as database:
                found = chaos(kind, number, database, folder)
            yield f"{kind}, seed {number}: {shown(found) or 'nothing'} on record"
            tally += found
        yield f"{kind}: {len(seeds)} seeds, nothing lost or doubled without its record; on record: {shown(tally)}"


def shown(tally: Counter[str]) -> str:
    """Counts in a line."""
    return ", ".join(f"{name} {n}" for name, n in sorted(tally.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="random rounds")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="number of the first of them")
    parser.add_argument("--races", type=int, default=RACES, metavar="N", help="races of two drivers")
    parser.add_argument(
        "--verifications", type=int, default=VERIFICATIONS, metavar="N", help="those of the part `verify`"
    )
    parser.add_argument("--tables", type=int, default=TABLES, metavar="N", help="tables of the part `rows`")
    parser.add_argument("--servers", type=int, default=SEEDS, metavar="N", help="seeds of each server that forgets")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be repeated")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {seed} (repeat with SEED={seed})", flush=True)
    told_to_end = threading.Event()

    def end(*_: object) -> None:
        told_to_end.set()
        sys.exit(1)  # and not without stopping the server

    signal.signal(signal.SIGTERM, end)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="stormproof-torture-") as folder,
        EmbeddedPostgresServer(Path(folder)) as server,
    ):
        runs = {
            "matrix": lambda: matrix(server, random.Random(seed)),
            "states": lambda: states(server, random.Random(seed)),
            "tables": lambda: tables(server, random.Random(seed)),
            "races": lambda: races(server, arguments.races, seed),
            "shared": lambda: shared(server, SHARED, seed),
            "rounds": lambda: random_rounds(server, seed, arguments.first, arguments.rounds),
            "restarts": lambda: restarts(server, Path(folder), seed, RESTARTS),
            "environment": lambda: faults_of_the_environment(server, Path(folder), random.Random(seed)),
            "containers": lambda: random_containers(Path(folder) / "containers", seed, CONTAINERS),
            "spark": lambda: on_spark(server, random.Random(seed)),
            "servers": lambda: servers_that_forget(server, Path(folder), range(seed, seed + arguments.servers)),
            "verify": lambda: beside(server, seed, arguments.verifications),
            "rows": lambda: rows_of_tables(Path(folder), seed, arguments.tables),
        }
        for part in arguments.only or PARTS:
            try:
                for line in runs[part]():
                    print(f"{time.monotonic() - began:6.0f} s  {part}: {line}", flush=True)
            except AssertionError as error:
                # A call into Spark's JVM that the signal cut short leaves its answer to the next call, which cannot read it.
                what = "told to end in this" if told_to_end.is_set() else error
                print(f"{part}, seed {seed}: {what}", file=sys.stderr)
                return 1
    return 0


class EmbeddedPostgresServer:
    """A server for as long as the block lasts, itself and not its database."""

    def __init__(self, folder: Path) -> None:
        self._server = EmbeddedPostgres(folder)

    def __enter__(self) -> EmbeddedPostgres:
        self._server.acquire()
        return self._server

    def __exit__(self, *_: object) -> None:
        self._server.release()


if __name__ == "__main__":
    sys.exit(main())
