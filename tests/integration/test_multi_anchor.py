"""A tuple that several messages anchor fails: who has failed, who merely goes back with them, and what the sinks hold.

A bolt holds the parts of each key to the batch's end and puts them into windows, each anchored to all the messages that
are in it. Behind it some windows are refused. Beside it each message has a row of its own in another sink.

Under exactly-once a failure takes along every message that shares a window with a failed one, directly or through others;
those go back without a failure counted, and nothing of them is written. Under the other guarantees they are not touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psycopg
import pytest
from deltalake import DeltaTable
from support.memory_run import World
from support.queues import prepared_database, put
from support.verdicts import traces_of, verified

from stormproof import DeltaSink, MemorySink, MemorySource, PostgresQueue, PostgresSink, Topology
from stormproof.core.base.message import Guarantee, MessageFailure
from stormproof.core.bolt import Bolt, Tuple
from stormproof.core.contract.sink import SinkSpec
from stormproof.core.contract.source import Source
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Engine
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.core.task.job import Job
from stormproof.core.tracking import attempts, partners
from stormproof.core.tracking.verdict import JobReport
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.ledger import tables as t

EXACTLY, AT_LEAST, AT_MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
PART = "key string, place int, word string"
ALWAYS = 1_000


# --- the topology --------------------------------------------------------------------------------------------------


class Windows(Bolt):
    """So many neighbours of a key in one tuple, then on by `stride`; parts that are too few for one go on by themselves."""

    streams = PART

    def __init__(self, width: int, stride: int) -> None:
        self.width, self.stride = width, stride
        self.held: dict[str, list[Tuple]] = {}

    def execute(self, tuple: Tuple, /) -> None:
        self.held.setdefault(tuple["key"], []).append(tuple)

    def finish(self) -> None:
        for key, held in self.held.items():
            parts = sorted(held, key=lambda part: part["place"])
            width = self.width if len(parts) >= self.width else 1
            for start in range(0, len(parts) - width + 1, self.stride if width > 1 else 1):
                some = parts[start : start + width]
                word = "+".join(part["word"] for part in some)
                self.collector.emit((key, some[0]["place"], word), anchors=some)
            for part in parts:
                self.collector.ack(part)


class Refuses:
    """Raises at these words, each so many times. It counts for all its copies, since none is made."""

    def __init__(self, words: Mapping[str, int]) -> None:
        self.left = dict(words)

    def __deepcopy__(self, memo: object) -> Refuses:
        return self

    def __call__(self, key: str, place: int, word: str) -> list[str]:
        if self.left.get(word, 0) > 0:
            self.left[word] -= 1
            raise ValueError("a bad window")
        return [word]


def part(line: str) -> list[tuple[str, int, str]]:
    key, word = line.split()
    return [(key, int(word), word)]


def own_word(key: str, place: int, word: str) -> list[str]:
    return [word]


@dataclass(frozen=True)
class Case:
    """Messages are known by their places. `windows` are (width, stride) of one bolt after another.

    `first` are the windows of the first batch of all guarantees but exactly-once, `again` what later batches add under
    at-least-once; `first_exactly` and `end_exactly` are those of exactly-once.
    """

    name: str
    keys: str
    refused: Mapping[str, int]
    failed: frozenset[int]
    touched: frozenset[int]
    first: Sequence[str]
    first_exactly: Sequence[str]
    end_exactly: Sequence[str]
    again: Sequence[str] = ()
    windows: Sequence[tuple[int, int]] = ((2, 1),)
    undecodable: frozenset[int] = frozenset()

    @property
    def payloads(self) -> list[bytes]:
        return [
            b"\xff" if place in self.undecodable else f"{key} {place}".encode() for place, key in enumerate(self.keys)
        ]

    @property
    def dead(self) -> frozenset[int]:
        transient = all(times < ALWAYS for times in self.refused.values())
        return self.undecodable | (frozenset() if transient else self.failed)

    def all_but(self, *groups: frozenset[int]) -> Counter[str]:
        return Counter(str(place) for place in range(len(self.keys)) if place not in frozenset().union(*groups))


CASES = [
    Case(
        "three anchors",
        "xxxxxyyy",
        {"0+1+2": ALWAYS},
        failed=frozenset({0, 1, 2}),
        touched=frozenset({3, 4}),
        first=["2+3+4", "5+6+7"],
        first_exactly=["5+6+7"],
        end_exactly=["5+6+7", "3", "4"],
        windows=[(3, 2)],
    ),
    Case(
        "through a chain",
        "xxxxxxyy",
        {"0+1": ALWAYS},
        failed=frozenset({0, 1}),
        touched=frozenset({2, 3, 4, 5}),
        first=["1+2", "2+3", "3+4", "4+5", "6+7"],
        first_exactly=["6+7"],
        end_exactly=["6+7", "2+3", "3+4", "4+5"],
    ),
    Case(
        "two that fail in one chain",
        "xxxxyy",
        {"0+1": ALWAYS, "2+3": ALWAYS},
        failed=frozenset({0, 1, 2, 3}),
        touched=frozenset(),
        first=["1+2", "4+5"],
        first_exactly=["4+5"],
        end_exactly=["4+5"],
    ),
    Case(
        "only once",
        "xxxyy",
        {"0+1": 1},
        failed=frozenset({0, 1}),
        touched=frozenset({2}),
        first=["1+2", "3+4"],
        again=["0+1"],
        first_exactly=["3+4"],
        end_exactly=["3+4", "0+1", "1+2"],
    ),
    Case(
        "before it was anchored to anything",
        "xxxyy",
        {},
        failed=frozenset({0}),
        touched=frozenset(),
        first=["1+2", "3+4"],
        first_exactly=["1+2", "3+4"],
        end_exactly=["1+2", "3+4"],
        undecodable=frozenset({0}),
    ),
    Case(
        "windows of windows",
        "xxxxyyyy",
        {"0+1+2+3": ALWAYS},
        failed=frozenset({0, 1, 2, 3}),
        touched=frozenset(),
        first=["4+5+6+7"],
        first_exactly=["4+5+6+7"],
        end_exactly=["4+5+6+7"],
        windows=[(2, 2), (2, 2)],
    ),
    Case(
        "windows of windows, through a chain",
        "xxxxxxyyyyyy",
        {"0+1+2+3": ALWAYS},
        failed=frozenset({0, 1, 2, 3}),
        touched=frozenset({4, 5}),
        first=["2+3+4+5", "6+7+8+9", "8+9+10+11"],
        first_exactly=["6+7+8+9", "8+9+10+11"],
        end_exactly=["6+7+8+9", "8+9+10+11", "4+5"],
        windows=[(2, 2), (2, 1)],
    ),
]
BY_NAME = {case.name: case for case in CASES}
SPREADING = [case.name for case in CASES if case.touched]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def build(case: Case, refuses: Refuses, sources: Sequence[Source], windows: SinkSpec, own: SinkSpec) -> Topology:
    """Every source is a spout; all their parts meet in the same windows."""
    topology = Topology("windows")
    parts = [
        topology.bolt(f"part-{n}", part, topology.spout(f"spout-{n}", source), schema=PART)
        for n, source in enumerate(sources)
    ]
    made = topology.bolt("join", Windows(*case.windows[0]), *(p.fields("key") for p in parts))
    for number, window in enumerate(case.windows[1:]):
        made = topology.bolt(f"join-{number}", Windows(*window), made.fields("key"))
    good = topology.bolt("refuses", refuses, made.shuffle(), schema="word string")
    topology.sink(windows, good)
    each = topology.bolt("each", own_word, *(p.shuffle() for p in parts), schema="word string")
    topology.sink(own, each)
    return topology


# --- in memory -----------------------------------------------------------------------------------------------------


class Windowed(World):
    """The topology between memory source and memory sinks."""

    def __init__(self, case: Case, folder: Path) -> None:
        super().__init__([], folder, batch_messages=99)
        self.source = MemorySource(
            "lines", case.payloads, max_attempts=2, backoff_base_s=0.0, clock=self.clock, rng=self.rng
        )
        self.sinks = [MemorySink(name, staging=folder / name) for name in ("windows", "own")]
        self.topology = build(case, Refuses(case.refused), [self.source], *self.sinks)

    def replayed(self) -> dict[int, tuple[int, int]]:
        """Of each message that came more than once: how often it failed, and how often it was merely returned."""
        ledger = AuditLedger(self.ledger_engine.execution_options(schema_translate_map={t.SCHEMA: None}))
        found = traces_of(ledger, "windows").values()
        return {int(one.message): (len(one.failures), len(one.returns)) for one in found}

    def dead(self) -> dict[int, int]:
        """How often each dead letter failed."""
        return {letter.id: letter.times_failed for letter in self.source.dead_letters()}


def require_exactly_once(case: Case, folder: Path, engine: Engine | None = None) -> None:
    world = Windowed(case, folder)
    first = world.run(max_batches=1, engine=engine)
    assert (first.failed, first.returned) == (len(case.failed), len(case.touched))
    assert first.dead_letters == 0
    assert world.counts(0) == Counter(case.first_exactly)
    assert world.counts(1) == case.all_but(case.failed, case.touched), "nothing is left of those that come again"
    assert world.source.backlog().waiting == len(case.failed | case.touched)
    rest = world.run(engine=engine)
    assert world.counts(0) == Counter(case.end_exactly)
    assert world.counts(1) == case.all_but(case.dead), "each message once, or dead"
    assert world.dead() == dict.fromkeys(case.dead, 2)
    rounds = 2 if case.dead else 1
    assert rest.failed == (rounds - 1) * len(case.failed)
    assert world.replayed() == {
        **dict.fromkeys(case.failed, (rounds, 0)),
        **dict.fromkeys(case.touched, (0, rounds)),
    }


@cases
def test_exactly_once_a_failure_spreads_over_shared_tuples(case: Case, tmp_path: Path) -> None:
    require_exactly_once(case, tmp_path)


@cases
def test_at_least_once_only_those_that_anchor_the_failed_tuple_come_again(case: Case, tmp_path: Path) -> None:
    world = Windowed(case, tmp_path)
    first = world.run(AT_LEAST, max_batches=1)
    assert (first.failed, first.returned) == (len(case.failed), 0)
    assert world.counts(0) == Counter(case.first)
    assert world.counts(1) == case.all_but(case.undecodable), "what a message wrote before it failed stays"
    rest = world.run(AT_LEAST)
    assert rest.returned == 0
    assert world.counts(0) == Counter([*case.first, *case.again])
    again = case.failed - case.dead
    assert world.counts(1) == case.all_but(case.undecodable) + Counter(str(place) for place in again)
    assert world.dead() == dict.fromkeys(case.dead, 2)
    assert set(world.replayed()) == case.failed


@cases
def test_at_most_once_the_failure_is_told_and_nobody_comes_again(case: Case, tmp_path: Path) -> None:
    world = Windowed(case, tmp_path)
    statistics = world.run(AT_MOST)
    assert (statistics.failed, statistics.returned, statistics.replayed) == (len(case.failed), 0, 0)
    assert world.counts(0) == Counter(case.first)
    assert world.counts(1) == case.all_but(case.undecodable)
    assert world.dead() == {}
    assert world.source.backlog().waiting == 0


# --- negative controls: what the above must see --------------------------------------------------------------------


@pytest.mark.parametrize("name", SPREADING)
def test_a_failure_that_does_not_spread_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(partners, "touched_by", lambda *_: {})
    with pytest.raises(AssertionError):
        require_exactly_once(BY_NAME[name], tmp_path)


class Silent(InlineEngine):
    """Does not tell which messages share tuples."""

    def run(self, job: Job) -> JobReport:
        return replace(super().run(job), together=np.empty((0, 2), np.int64))


@pytest.mark.parametrize("name", SPREADING)
def test_shared_tuples_that_nobody_tells_of_are_caught(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        require_exactly_once(BY_NAME[name], tmp_path, Silent(2))


@pytest.mark.parametrize("name", SPREADING)
def test_a_returned_message_that_is_counted_as_failed_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner = attempts.BatchRunner
    real: Callable[..., list[MessageFailure]] = runner._returned  # pyright: ignore[reportPrivateUsage]

    def counted(*arguments: object) -> list[MessageFailure]:
        return [replace(failure, counted=True) for failure in real(*arguments)]

    monkeypatch.setattr(runner, "_returned", counted)
    with pytest.raises(AssertionError):
        require_exactly_once(BY_NAME[name], tmp_path)


# --- Postgres and Delta --------------------------------------------------------------------------------------------


@dataclass
class Stores:
    """Queues and tables, and a case between them: one queue, or two whose messages meet in the same windows."""

    database: Database
    folder: Path
    case: Case
    queues: int
    sources: list[PostgresQueue] = field(default_factory=list[PostgresQueue])

    def __post_init__(self) -> None:
        self.refuses = Refuses(self.case.refused)
        prepared_database(self.database)
        for number in range(self.queues):
            put(self.database, f"q{number}", self.case.payloads[number :: self.queues])

    def run(self, guarantee: Guarantee, max_batches: int | None = None) -> tuple[int, int]:
        """One driver; the number of failures, and of messages that were merely returned."""
        self.sources += [
            PostgresQueue(f"q{n}", database=self.database, max_attempts=2, backoff_base_s=0.0)
            for n in range(self.queues)
        ]
        topology = build(
            self.case,
            self.refuses,
            self.sources[-self.queues :],
            DeltaSink(self.folder / "lake" / "windows", name="windows"),
            PostgresSink("own", database=self.database),
        )
        settings = Settings(database_url=self.database.adbc_uri, staging_dir=str(self.folder / "staging"))
        statistics = topology.run(
            guarantee, engine="inline", until_idle=True, max_batches=max_batches, settings=settings
        )
        return statistics.failed, statistics.returned

    def windows(self) -> Counter[str]:
        path = str(self.folder / "lake" / "windows")
        rows = DeltaTable(path).to_pyarrow_table() if DeltaTable.is_deltatable(path) else None
        return Counter() if rows is None else Counter(str(word) for word in rows.column("word").to_pylist())

    def own(self) -> Counter[str]:
        return Counter(str(word) for (word,) in self._rows("select word from own"))

    def waiting(self) -> dict[str, int]:
        """The messages that wait for another try, and how often each failed."""
        found = self._rows("select convert_from(payload, 'utf8'), times_failed from stormproof.pending_retry")
        return {str(payload).split()[1]: int(str(times)) for payload, times in found}

    def dead(self) -> dict[str, int]:
        found = self._rows("select convert_from(payload, 'utf8'), times_failed from stormproof.dead_letter")
        return {str(payload).split()[1]: int(str(times)) for payload, times in found}

    def _rows(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.database.conninfo) as connection:
            return connection.execute(statement.encode()).fetchall()

    def close(self) -> None:
        for source in self.sources:
            source.close()


@pytest.fixture
def stores(database: Database, tmp_path: Path) -> Iterator[Callable[[str, int], Stores]]:
    made: list[Stores] = []

    def make(name: str, queues: int) -> Stores:
        made.append(Stores(database, tmp_path, BY_NAME[name], queues))
        return made[-1]

    yield make
    for one in made:
        one.close()


def require_stores(stores: Stores) -> None:
    case = stores.case
    assert stores.run(EXACTLY, max_batches=1) == (len(case.failed), len(case.touched))
    assert stores.windows() == Counter(case.first_exactly)
    assert stores.own() == case.all_but(case.failed, case.touched)
    wanted = {**dict.fromkeys(case.failed, 1), **dict.fromkeys(case.touched, 0)}
    assert stores.waiting() == {str(place): times for place, times in wanted.items()}
    stores.run(EXACTLY)
    assert stores.windows() == Counter(case.end_exactly)
    assert stores.own() == case.all_but(case.dead)
    assert stores.dead() == {str(place): 2 for place in case.dead}
    assert stores.waiting() == {}
    assert verified("windows", stores.database).clean


@pytest.mark.postgres
@pytest.mark.parametrize("queues", [1, 2], ids=["one queue", "two queues"])
@pytest.mark.parametrize("name", ["three anchors", "only once"])
def test_queue_delta_and_postgres_agree_with_it(name: str, queues: int, stores: Callable[[str, int], Stores]) -> None:
    require_stores(stores(name, queues))


@pytest.mark.postgres
def test_in_real_stores_a_failure_that_does_not_spread_is_caught(
    stores: Callable[[str, int], Stores], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(partners, "touched_by", lambda *_: {})
    with pytest.raises(AssertionError):
        require_stores(stores("three anchors", 1))


@pytest.mark.postgres
@pytest.mark.parametrize("guarantee", [AT_LEAST, AT_MOST])
def test_in_real_stores_the_other_guarantees_leave_the_neighbours_alone(
    guarantee: Guarantee, stores: Callable[[str, int], Stores]
) -> None:
    world = stores("three anchors", 1)
    case = world.case
    rounds = 2 if guarantee is AT_LEAST else 1
    assert world.run(guarantee) == (rounds * len(case.failed), 0)
    assert world.windows() == Counter(case.first)
    assert world.own() == case.all_but(), "what was written before the failure stays"
    assert world.dead() == ({str(place): 2 for place in case.dead} if guarantee is AT_LEAST else {})
    assert world.waiting() == {}
