"""`audit verify` beside a healthy driver: what the driver does meanwhile, at whichever seam, is no violation."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.crashes import Cell
from support.queues import prepared_database, put
from support.topologies import SinkMode, Split, messages, sink_of, source_of

from stormproof import DeltaMap, PostgresMap, Topology, count
from stormproof.core.base.clock import SystemClock
from stormproof.core.base.failpoint import watched
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.sinks.postgres.connection import Link
from stormproof.state import StateFactory
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.report import VerifyReport
from stormproof.trident.audit.verify import verify
from stormproof.trident.decisions.pruning import prune
from stormproof.trident.driver.run import driver
from stormproof.trident.ledger.database import ledger_engine
from stormproof.trident.ledger.ledger import Ledger

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

NAME = "beside"
SEAMS = ("audit.after_ledger", "audit.in_sink", "audit.after_sinks")
RUNS = 6
"""Of the loop here; it was measured with hundreds."""


class Beside:
    """A topology with every kind of table and state, what drives it, and an audit of its own."""

    def __init__(self, database: Database, folder: Path, guarantee: Guarantee = Guarantee.EXACTLY_ONCE) -> None:
        self.cell = Cell(NAME, None, guarantee, folder, prepared_database(database), NAME, 3)
        self.engine = ledger_engine(database)
        self.ledger = AuditLedger(self.engine)
        self.put = 0

    def topology(self) -> Topology:
        cell = self.cell
        t = Topology(NAME)
        words = t.stream("lines", source_of(NAME, cell.database)).flat_map(
            Split(cell.folder), "line", schema="word string"
        )
        modes = [sink_of(mode, NAME, cell.folder, cell.database) for mode in SinkMode if not mode.folds]
        words.into(*modes)
        folds = [sink_of(mode, NAME, cell.folder, cell.database) for mode in SinkMode if mode.folds]
        words.group_by("word").persistent_aggregate(n=count()).into(*folds)
        if cell.guarantee is Guarantee.EXACTLY_ONCE:
            maps: dict[str, StateFactory] = {
                "in-postgres": PostgresMap("beside_map", "opaque", database=cell.database),
                "in-delta": DeltaMap(cell.folder / "lake" / "beside_map", "transactional"),
            }
            for name, state in maps.items():
                words.group_by("word").persistent_aggregate(name=f"to-{name}", state=state, state_name=name, n=count())
        return t

    def more(self, number: int = 3) -> None:
        """New messages, a poison and one that needs a retry among them."""
        self.put += 1
        put(self.cell.database, NAME, messages(number, prefix=f"p{self.put}w"))

    def more_done(self) -> None:
        """New messages, committed."""
        self.more()
        self.drive()

    def drive(self) -> None:
        settings = Settings(
            database_url=self.cell.database.sqlalchemy_url.render_as_string(hide_password=False),
            home=self.cell.folder / "home",
            batch_messages=self.cell.batch_messages,
        )
        with driver(
            self.topology(),
            self.cell.guarantee,
            settings=settings,
            engine="inline",
            until_idle=True,
            rng=random.Random(1),
        ) as coordinator:
            coordinator.run()

    def prune(self) -> None:
        # Not the audit's engine: the connection that a prune wrote through is ended by the next driver that starts.
        ledger, now = Ledger(ledger_engine(self.cell.database), SystemClock(), lambda: ""), datetime.now(UTC)
        prune(ledger, self.ledger, NAME, ended_before=now, now=now, by="tests")
        ledger.close()

    def verify(self) -> VerifyReport:
        return verify(self.ledger, NAME, opener_for(self.cell.database))


@pytest.fixture
def beside(database: Database, tmp_path: Path) -> Iterator[Beside]:
    made = Beside(database, tmp_path)
    yield made
    made.engine.dispose()


@contextmanager
def at_seams(acts: Mapping[str, Callable[[], None]]) -> Generator[set[str]]:
    """Each is called once, the first time that the audit in this process comes to the point of its name."""
    reached: set[str] = set()

    def watch(name: str) -> None:
        act = acts.get(name)
        if act is not None and name not in reached:
            reached.add(name)
            act()

    with watched(watch):
        yield reached


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
def test_a_driver_that_goes_on_at_every_seam_breaks_no_promise(
    database: Database, tmp_path: Path, guarantee: Guarantee
) -> None:
    beside = Beside(database, tmp_path, guarantee)
    beside.more_done()
    with at_seams(dict.fromkeys(SEAMS, beside.more_done)) as reached:
        report = beside.verify()
    assert len(reached) == len(SEAMS)
    assert not report.violations
    assert not beside.verify().violations
    beside.engine.dispose()


def test_a_driver_in_the_middle_of_a_batch_breaks_no_promise(beside: Beside) -> None:
    """It stands between two sinks, its batch prepared, when the audit comes; and goes on between ledger and sinks."""
    beside.more_done()
    beside.more()
    there, go_on = threading.Event(), threading.Event()

    def watch(name: str) -> None:
        is_driver = threading.current_thread() is thread
        if is_driver and name == "commit.after_sink" and not there.is_set():
            there.set()
            assert go_on.wait(60)
        elif not is_driver and name == "audit.after_ledger" and thread.is_alive():
            go_on.set()
            thread.join(60)

    thread = threading.Thread(target=beside.drive)
    with watched(watch):
        thread.start()
        assert there.wait(60)
        report = beside.verify()
    assert not report.violations
    assert not beside.verify().violations


def test_a_prune_of_what_was_committed_meanwhile_breaks_no_promise(beside: Beside) -> None:
    beside.more_done()
    with at_seams({"audit.after_ledger": beside.more_done, "audit.after_sinks": beside.prune}) as reached:
        report = beside.verify()
    assert len(reached) == 2
    assert not report.violations


def test_control_an_audit_that_reads_evidence_and_guard_at_two_instants_blames_a_healthy_driver(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_instants = Link.transaction
    monkeypatch.setattr(Link, "snapshot", two_instants)
    beside.more_done()
    with at_seams({"audit.in_sink": beside.more_done}):
        report = beside.verify()
    assert {violation.kind for violation in report.violations} >= {"evidence"}


def beside_a_driver(beside: Beside, runs: int) -> list[VerifyReport]:
    """So many audits beside a driver that commits all the time, is restarted, and has its record pruned now and then."""
    done, failed = threading.Event(), list[BaseException]()

    def drive() -> None:
        try:
            while not done.is_set():
                beside.more(6)
                beside.drive()
                beside.prune()
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            failed.append(error)

    beside.more_done()
    thread = threading.Thread(target=drive)
    thread.start()
    try:
        reports = [beside.verify() for _ in range(runs)]
    finally:
        done.set()
        thread.join(60)
    assert not failed
    return reports


def test_no_audit_beside_a_driver_finds_a_violation(beside: Beside) -> None:
    reports = beside_a_driver(beside, RUNS)
    assert [violation for report in reports for violation in report.violations] == []
    with beside.engine.connect() as connection:
        assert connection.execute(sa.text("select max(txid) from stormproof.txn")).scalar_one() > 2
