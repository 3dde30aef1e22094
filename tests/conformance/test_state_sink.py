"""A state as a sink: prepared files in, each txid once, by a state that remembers, one that tells a little, and one mute."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.sink_harness import APPEND, FOLD, SCHEMA
from support.state_run import PAYLOADS, TRUTH, StateWorld

from stormproof.core.base.errors import (
    CannotTell,
    Fenced,
    PositionMismatch,
    SinkRefused,
    StoreUnavailable,
    TopologyError,
)
from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import TaskContext, transaction_digest
from stormproof.sinks.contract.protocol import CommitOutcome, Held, PreparedTransaction, SinkIdentity
from stormproof.trident.state.key_value import MemoryMap
from stormproof.trident.state.map import newest, total
from stormproof.trident.state.protocol import SourceKind, State, StateContext, StateKind
from stormproof.trident.state.sink import MapSetter, StateSession, StateSink

EXACTLY = Guarantee.EXACTLY_ONCE
IDENTITY = SinkIdentity("topology", "inc-1", "counts")


class Ledgerless:
    """A user's own state: a dictionary, whose rows of a txid replace one another; it says what it is told to say."""

    def __init__(self, *, tells: bool = False) -> None:
        self.by_txid: dict[int, list[tuple[str, int]]] = {}
        self.committed: list[int] = []
        self.opened = 0
        self.tells = tells
        self.kind = StateKind.TRANSACTIONAL
        self.target = "a dictionary"
        self.error: Exception | None = None

    def make(self, context: StateContext) -> State:
        self.opened += 1
        return (Telling if self.tells else Mute)(self)


class Mute:
    """Remembers nothing."""

    def __init__(self, store: Ledgerless) -> None:
        self.store = store
        self.txid = 0

    @property
    def kind(self) -> StateKind:
        return self.store.kind

    def begin_commit(self, txid: int) -> None:
        self.txid = txid
        self.store.by_txid[txid] = []

    def add(self, rows: pa.RecordBatch) -> None:
        if self.store.error is not None:
            error, self.store.error = self.store.error, None
            raise error
        self.store.by_txid[self.txid] += [(r["word"], r["n"]) for r in rows.to_pylist()]

    def commit(self, txid: int) -> None:
        self.store.committed.append(txid)

    def close(self) -> None:
        pass


class Telling(Mute):
    """Remembers its last txid."""

    def last_txid(self) -> int | None:
        return self.store.committed[-1] if self.store.committed else None


class Adding:
    """The updater that goes with them."""

    def update(self, state: State, rows: pa.RecordBatch) -> None:
        assert isinstance(state, Mute)
        state.add(rows)


def prepare(
    session: StateSession, txid: int, previous: int | None, *rows: tuple[str, int], attempt: int = 1
) -> PreparedTransaction:
    writer = session.writer().open_task(TaskContext("inc-1", txid, attempt, 0), SCHEMA)
    writer.write(pa.RecordBatch.from_pylist([{"word": w, "n": n} for w, n in rows], schema=SCHEMA))
    files = tuple(writer.close())
    return PreparedTransaction(txid, previous, transaction_digest(files), len(rows), files)


def opened(factory: Any, folder: Path, epoch: int = 1, **options: Any) -> closing[StateSession]:
    fold = "updater" not in options
    sink = StateSink("counts", factory, staging=folder, **options)
    return closing(sink.open(IDENTITY, FOLD if fold else APPEND, epoch))


def test_a_map_commits_in_order_and_once(tmp_path: Path) -> None:
    factory = MemoryMap("transactional")
    with opened(factory, tmp_path) as session:
        one = prepare(session, 1, None, ("a", 1), ("b", 2))
        three = prepare(session, 3, 1, ("a", 5))
        assert session.held() is None
        assert session.commit(one, checked=True).outcome is CommitOutcome.APPLIED
        assert session.commit(one, checked=True).outcome is CommitOutcome.ALREADY_HELD
        with pytest.raises(PositionMismatch, match="holds txid 1"):
            session.commit(prepare(session, 5, 3, ("a", 1)), checked=True)
        assert session.commit(three, checked=True).outcome is CommitOutcome.APPLIED
        with pytest.raises(PositionMismatch, match="digest"):
            session.commit(prepare(session, 3, 1, ("a", 6), attempt=2), checked=True)
        assert session.held() == Held(3, three.digest)
        assert session.evidence(0, None).last_txid == 3
    assert {k: v["n"] for k, v in factory.items().items()} == {("a",): 6, ("b",): 2}


def test_an_older_driver_is_fenced(tmp_path: Path) -> None:
    factory = MemoryMap()
    with opened(factory, tmp_path) as old:
        old.commit(prepare(old, 1, None, ("a", 1)), checked=True)
        with opened(factory, tmp_path, epoch=2) as new:
            new.commit(prepare(new, 2, 1, ("a", 1)), checked=True)
            with pytest.raises((Fenced, PositionMismatch)):
                old.commit(prepare(old, 2, 1, ("a", 9), attempt=2), checked=True)
    assert factory.items()[("a",)]["n"] == 2


def test_a_file_that_is_not_as_prepared_is_refused(tmp_path: Path) -> None:
    factory = MemoryMap()
    with opened(factory, tmp_path) as session:
        one = prepare(session, 1, None, ("a", 1))
        content = (tmp_path / one.files[0].path).read_bytes()
        (tmp_path / one.files[0].path).write_bytes(content[:-1] + b"?")
        with pytest.raises(SinkRefused, match="digest"):
            session.commit(one, checked=True)
        (tmp_path / one.files[0].path).write_bytes(content)
        with pytest.raises(SinkRefused, match="instead of 7"):
            session.commit(PreparedTransaction(1, None, one.digest, 7, one.files), checked=True)
        with pytest.raises(SinkRefused, match="more than once"):
            session.commit(prepare(session, 1, None, ("a", 1), ("a", 1)), checked=True)
        assert factory.items() == {}
        assert session.commit(one, checked=True).outcome is CommitOutcome.APPLIED


@pytest.mark.parametrize("tells", [False, True], ids=["mute", "telling"])
def test_a_users_own_state(tmp_path: Path, tells: bool) -> None:
    store = Ledgerless(tells=tells)
    with opened(store, tmp_path, updater=Adding()) as session:
        assert session.tells_position is tells
        one, two = prepare(session, 1, None, ("a", 1), ("a", 2)), prepare(session, 2, 1, ("b", 1))
        assert session.commit(one, checked=True).outcome is CommitOutcome.APPLIED
        again = CommitOutcome.ALREADY_HELD if tells else CommitOutcome.APPLIED
        assert session.commit(one, checked=True).outcome is again
        assert session.held() == (Held(1, None) if tells else None)
        session.commit(two, checked=True)
        if tells:
            report = session.evidence(0, None)
            assert (report.last_txid, report.truncated, report.entries) == (2, True, ())
            with pytest.raises(PositionMismatch):
                session.commit(one, checked=True)
        else:
            with pytest.raises(CannotTell, match="by hand"):
                session.evidence(0, None)
    assert store.by_txid == {1: [("a", 1), ("a", 2)], 2: [("b", 1)]}


def test_a_lost_connection_is_an_unknown_outcome_and_the_state_is_made_anew(tmp_path: Path) -> None:
    store = Ledgerless()
    with opened(store, tmp_path, updater=Adding()) as session:
        one = prepare(session, 1, None, ("a", 1))
        store.error = ConnectionResetError("peer")
        with pytest.raises(StoreUnavailable, match="peer"):
            session.commit(one, checked=True)
        assert store.opened == 1
        assert session.commit(one, checked=True).outcome is CommitOutcome.APPLIED
        assert store.opened == 2


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: StateSink("s", MemoryMap()).check(APPEND, EXACTLY), "key column"),
        (lambda: StateSink("s", MemoryMap(), keys=("word",)).check(APPEND, EXACTLY), "merges="),
        (lambda: StateSink("s", MemoryMap(), keys=("nope",)).check(APPEND, EXACTLY), "'nope'"),
        (lambda: StateSink("s", MemoryMap("non-transactional")).check(FOLD, EXACTLY), "TransactionalMap"),
    ],
)
def test_what_a_state_cannot_take_is_refused_when_it_is_built(build: Any, why: str) -> None:
    with pytest.raises(TopologyError, match=why):
        build()
    StateSink("s", MemoryMap("non-transactional")).check(FOLD, Guarantee.AT_LEAST_ONCE)
    StateSink("s", MemoryMap(), keys=("word",), merges={"n": total}).check(APPEND, EXACTLY)


def test_keys_of_its_own_may_come_often(tmp_path: Path) -> None:
    sink = StateSink("counts", MemoryMap(), keys=("word",), merges={"n": total}, staging=tmp_path)
    with closing(sink.open(IDENTITY, APPEND, 1)) as session:
        session.commit(prepare(session, 1, None, ("a", 1), ("b", 1), ("a", 4)), checked=True)
    setter = StateSink(
        "counts", MemoryMap(), keys=("word",), merges={"n": newest}, updater=MapSetter(), staging=tmp_path
    )
    with closing(setter.open(IDENTITY, APPEND, 1)) as session:
        session.commit(prepare(session, 1, None, ("a", 1), ("b", 1), ("a", 4)), checked=True)
    for made, n in ((sink, 5), (setter, 4)):
        assert isinstance(made.factory, MemoryMap)
        assert {k: v["n"] for k, v in made.factory.items().items()} == {("a",): n, ("b",): 1}


# -- through whole topologies ------------------------------------------------------------------------------------------


def random_split(rng: random.Random, log: list[str], line: str) -> list[str]:
    """Other words each time that it runs: nothing about it can be repeated."""
    words = [f"{word}{rng.randrange(1000)}" for word in line.split() for _ in range(rng.randrange(3))]
    log.append(line)
    return words


@pytest.mark.parametrize("kind", [StateKind.TRANSACTIONAL, StateKind.OPAQUE])
def test_code_that_gives_something_else_each_time_is_still_exactly_once(tmp_path: Path, kind: StateKind) -> None:
    """A driver dies at each place; what the state holds is the sum of what the committed txids prepared, no more."""
    ran: list[str] = []
    places = [*range(3, 30, 4), *range(30, 70, 5)]
    for at in places:
        split = partial(random_split, random.Random(at), ran)
        world = StateWorld(tmp_path / str(at), SourceKind.TRANSACTIONAL, kind, split=split)
        prepared = recording(world)
        world.lives(EXACTLY, at)
        truth: Counter[str] = Counter()
        for tries in prepared.values():
            whole = max(tries, key=len)
            assert all(rows == whole[: len(rows)] for rows in tries), "a txid came with different rows"
            truth.update(dict(whole))
        assert world.totals() == truth
    assert len(ran) > len(places) * len(PAYLOADS), "no job ran twice"


def recording(world: StateWorld) -> dict[int, list[list[tuple[str, int]]]]:
    """Has each try at a txid note the rows that it was given, beside what the state does with them."""
    tries: dict[int, list[list[tuple[str, int]]]] = {}
    made = world.map.make

    def make(context: StateContext) -> Any:
        state: Any = made(context)
        begin, update = state.begin_commit, state.multi_update
        given: list[list[tuple[str, int]]] = []

        def begin_commit(txid: int) -> None:
            given.append([])
            tries.setdefault(txid, []).append(given[-1])
            begin(txid)

        def multi_update(batch: pa.RecordBatch, *, each_once: bool = False) -> None:
            given[-1].extend((r["word"], r["n"]) for r in batch.to_pylist())
            update(batch, each_once=each_once)

        state.begin_commit, state.multi_update = begin_commit, multi_update
        return state

    world.map.make = make  # type: ignore[method-assign]
    return tries


@pytest.mark.parametrize("tells", [False, True], ids=["mute", "telling"])
@pytest.mark.parametrize(
    "point",
    ["prepare.after", "state.after_begin", "state.after_rows", "state.after_commit", "finish.before", "finish.after"],
)
def test_a_users_own_state_is_recovered(tmp_path: Path, point: str, tells: bool) -> None:
    """The ledger stands in for a state that cannot say what it took last."""
    store = Ledgerless(tells=tells)
    world = StateWorld(
        tmp_path, SourceKind.TRANSACTIONAL, store, sink=lambda factory: StateSink("counts", factory, updater=Adding())
    )
    with armed(f"{point}=error"), pytest.raises(FailpointError):
        world.run(EXACTLY)
    world.run(EXACTLY)
    totals: Counter[str] = Counter()
    for txid in set(store.committed):
        totals.update(dict(store.by_txid[txid]))
    assert totals == TRUTH
