"""Two topologies with one empty table, each in a ledger of its own: the second is refused before either commits."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final

import pytest
from deltalake import DeltaTable
from support.databases import fresh_database
from support.operated import Operated
from support.queues import prepared_database
from support.sink_harness import SinkHarness

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count
from stormproof.core.base.errors import PositionMismatch
from stormproof.core.postgres.database import Database, connect
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.postgres.session import PostgresSession
from stormproof.trident.driver import opening
from stormproof.trident.state.delta import DeltaMap
from stormproof.trident.state.postgres import PostgresMap

pytestmark = pytest.mark.sampled(0.25)

NAME: Final = "first"
STORES: Final = ("delta-append", "delta-map", "postgres-append", "postgres-map")
ROUNDS: Final = 8


@dataclass
class Side:
    """One of two topologies that name one table."""

    name: str
    store: str
    operated: Operated
    tables: Database
    folder: Path

    def run(self, *put: bytes, on_ready: Callable[[object], None] | None = None) -> None:
        if put:
            self.operated.put(*put)
        topology = Topology(self.name)
        queue = PostgresQueue(NAME, database=self.operated.cell.database)
        words = topology.stream("lines", queue).flat_map(str.split, "line", schema="word string")
        if self.store.endswith("append"):
            words.into(self._sink())
        else:
            state = DeltaMap(self.folder) if self.store == "delta-map" else PostgresMap("t", database=self.tables)
            words.group_by("word").persistent_aggregate(n=count(), state=state, state_name="s")
        self.operated.run(topology, on_ready=on_ready)

    def _sink(self) -> DeltaSink | PostgresSink:
        is_delta = self.store == "delta-append"
        return DeltaSink(self.folder, name="s") if is_delta else PostgresSink("t", name="s", database=self.tables)

    def words(self) -> list[str]:
        if self.store.startswith("delta"):
            return sorted(DeltaTable(self.folder).to_pyarrow_table()["word"].to_pylist())
        with connect(self.tables, application_name="tests", autocommit=True) as connection:
            return [word for (word,) in connection.execute("select word from t order by word").fetchall()]


@pytest.fixture
def another(database: Database) -> Iterator[Database]:
    """A second database with a ledger."""
    name = f"{database.sqlalchemy_url.database}_b"
    with fresh_database(database, name) as second:
        yield prepared_database(second)


@pytest.fixture(params=STORES)
def sides(request: pytest.FixtureRequest, operated: Operated, another: Database, tmp_path: Path) -> tuple[Side, Side]:
    """Both started would bind the table; nobody did yet."""
    second = replace(operated, cell=replace(operated.cell, database=another, folder=tmp_path / "second"))
    tables, folder = operated.cell.database, tmp_path / "lake" / "t"
    return (
        Side(NAME, request.param, operated, tables, folder),
        Side("second", request.param, second, tables, folder),
    )


@pytest.mark.postgres
def test_the_second_is_refused_by_name_and_loses_nothing(sides: tuple[Side, Side]) -> None:
    first, second = sides
    first.run()
    second.operated.put(b"theirs")
    for _ in range(2):
        with pytest.raises(PositionMismatch, match=r"'s' of topology 'second': .*claimed by topology 'first'.*release"):
            second.run()
    first.run(b"ours")
    assert first.words() == ["ours"]
    first.run(b"again")
    assert first.words() == ["again", "ours"]
    error = first.operated.command("ledger", "release-table", NAME, "s", status=2)["error"]["message"]
    assert "'s' holds txid 2: its table is in use" in error
    with pytest.raises(Exception, match="first"):
        second.run()
    assert second.operated.sql("select count(*) from stormproof.txn") == [(0,)]


@pytest.mark.postgres
@pytest.mark.parametrize("sides", ["delta-map", "postgres-append"], indirect=True)
def test_a_claim_without_a_commit_can_be_released(sides: tuple[Side, Side]) -> None:
    first, second = sides
    first.run()
    with pytest.raises(PositionMismatch, match="claimed"):
        second.run(b"theirs")
    first.operated.command("ledger", "release-table", NAME, "s", "--why", "moved")
    second.run()
    assert second.words() == ["theirs"]
    with pytest.raises(Exception, match="second"):
        first.run(b"ours")
    assert second.words() == ["theirs"]


@pytest.mark.postgres
@pytest.mark.parametrize("sides", ["delta-append", "postgres-append"], indirect=True)
def test_control_without_claims_both_write(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    for session in (DeltaSession, PostgresSession):
        monkeypatch.setattr(session, "claim", lambda self, accepted: ())
    monkeypatch.setattr(opening, "_look_at_new_tables", lambda *_: {})
    first, second = sides
    second.run(b"theirs", on_ready=lambda _: first.run(b"ours"))
    assert first.words() == ["ours", "theirs"]


@pytest.mark.postgres
def test_one_that_starts_between_the_others_start_and_its_first_commit_is_refused(sides: tuple[Side, Side]) -> None:
    first, second = sides
    refused: list[str] = []

    def start_first(_: object) -> None:
        with pytest.raises(PositionMismatch, match=r"claimed by topology 'second'") as error:
            first.run(b"ours")
        refused.append(str(error.value))

    second.run(b"theirs", on_ready=start_first)
    assert refused
    assert second.words() == ["theirs"]


def claim_each(kind: str, folder: Path, database: Database | None, life: str, barrier: Barrier, answers: Any) -> None:
    """One of two processes: opens table after table at the same instant as the other, and claims it."""
    for number in range(ROUNDS):
        harness = SinkHarness(kind, folder / str(number), database)
        if database is not None:
            harness.sink = PostgresSink(f"t{number}", name="counts", database=database, staging=folder / life)
        identity = SinkIdentity("topology", life, "counts")
        barrier.wait(60)
        with closing(harness.sink.open(identity, harness.input, 1)) as session:
            answers.put((number, life, session.claim(())))


@pytest.mark.postgres
def test_a_claim_of_a_dropped_table_gives_no_right_to_the_one_made_in_its_place(
    tmp_path: Path, database: Database
) -> None:
    harness = SinkHarness("postgres-append", tmp_path, database)

    def claimed_by(life: str) -> tuple[str, ...]:
        identity = SinkIdentity("topology", life, "counts")
        with closing(harness.sink.open(identity, harness.input, 1)) as session:
            return session.claim(())

    assert claimed_by("a") == ()
    harness.drop()
    assert claimed_by("b") == ()
    assert claimed_by("a") == ("b",)
    assert claimed_by("b") == ()
    harness.drop()
    assert claimed_by("a") == ()  # its own claim goes over to a table that nobody has


@pytest.mark.postgres
@pytest.mark.parametrize(("kind", "made"), [("delta-append", True), ("postgres-append", False)])
def test_of_two_that_claim_at_the_same_instant_one_has_it(
    kind: str, tmp_path: Path, database: Database, *, made: bool
) -> None:
    given = database if kind.startswith("postgres") else None
    if made and given is None:  # by somebody else: then the claim is a version of its own
        for number in range(ROUNDS):
            harness = SinkHarness(kind, tmp_path / str(number), None)
            DeltaTable.create(harness.delta_path, harness.input.schema)
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    start: Callable[..., Any] = context.Process
    both = [start(target=claim_each, args=(kind, tmp_path, given, life, barrier, answers)) for life in ("a", "b")]
    for process in both:
        process.start()
    found = [answers.get(timeout=60) for _ in range(2 * ROUNDS)]
    for process in both:
        process.join(60)
    for number in range(ROUNDS):
        claims = {life: strangers for at, life, strangers in found if at == number}
        assert sorted(claims.values()) in ([(), ("a",)], [(), ("b",)]), claims
        (winner,) = [life for life, strangers in claims.items() if not strangers]
        assert set(claims.values()) == {(), (winner,)}
