"""`audit verify` over memory: clean where nothing was touched, and each planted corruption named."""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.memory_run import World

from stormproof.core.base.errors import Json, StoreUnavailable, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkInput
from stormproof.core.pending.connector import NumberedAudit
from stormproof.core.pending.rows import SliceRow, Subscriber
from stormproof.sinks.contract.protocol import Evidence, EvidenceReport, SinkIdentity, SinkSession
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.audit.batches import txn
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.message import EndKind, message
from stormproof.trident.audit.report import NoticeKind, VerifyReport, ViolationKind
from stormproof.trident.audit.source import PendingEvidence, evidence_of
from stormproof.trident.audit.status import DriverState, status
from stormproof.trident.audit.verify import verify
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.sink_records import SinkBinding

SINK = "counts0"


class Split:
    """Splits; always raises for m3, and once for m5."""

    def __init__(self) -> None:
        self.raised = False

    def __call__(self, line: str) -> list[str]:
        if "m3" in line:
            raise ValueError("never works")
        if "m5" in line and not self.raised:
            self.raised = True
            raise RuntimeError("not yet")
        return line.split()


@dataclass
class Case:
    """A finished run whose ledger and sinks may be spoiled."""

    world: World
    engine: sa.Engine

    @property
    def ledger(self) -> AuditLedger:
        return AuditLedger(self.engine)

    def opener(self, identity: SinkIdentity, binding: SinkBinding) -> SinkSession:
        sink = next(s for s in self.world.sinks if s.name == binding.sink)
        return inspected(sink, identity)

    def source(self, ledger: LedgerSnapshot, topology: TopologyRow) -> PendingEvidence:
        return evidence_of(self.world.source)

    def verify(self, first: int = 1, last: int | None = None) -> VerifyReport:
        return verify(self.ledger, "words", self.opener, source=self.source, first=first, last=last)

    def kinds(self) -> set[ViolationKind]:
        return {violation.kind for violation in self.verify().violations}

    def sql(self, statement: str, **parameters: object) -> None:
        with self.engine.begin() as connection:
            assert connection.execute(sa.text(statement), parameters).rowcount >= 1

    @property
    def entries(self) -> list[Evidence]:
        (log,) = self.world.sinks[0].store.logs.values()
        return log.entries


def inspected(sink: MemorySink, identity: SinkIdentity) -> SinkSession:
    assert sink.store.content is not None
    return sink.inspect(identity, SinkInput(sink.store.content.schema))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World([f"a m{i}".encode() for i in range(10)], tmp_path_factory.mktemp("audit"), split=Split(), sinks=2)
    world.run()
    return world


@pytest.fixture
def case(finished: World) -> Iterator[Case]:
    with copied(finished) as found:
        before = [copy.deepcopy(sink.store.logs) for sink in finished.sinks]
        yield found
        for sink, logs in zip(finished.sinks, before, strict=True):
            sink.store.logs = logs


class copied:
    """The world with a ledger of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._engine = sa.create_engine(
            "sqlite://", poolclass=sa.pool.StaticPool, connect_args={"check_same_thread": False}
        )

    def __enter__(self) -> Case:
        with self._world.ledger_engine.connect() as source, self._engine.connect() as target:
            into = target.connection.driver_connection
            of = source.connection.driver_connection
            assert isinstance(into, sqlite3.Connection)
            assert isinstance(of, sqlite3.Connection)
            of.backup(into)
        return Case(self._world, self._engine)

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()


def test_an_untouched_run_verifies_clean(case: Case) -> None:
    report = case.verify()
    assert report.violations == ()
    assert report.unknowns == ()
    assert report.exit_status == 0
    assert report.checked.sinks == 2
    assert report.checked.evidence == 2 * report.checked.committed
    assert report.checked.failures == 2


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
def test_the_weaker_guarantees_verify_clean(guarantee: Guarantee, tmp_path: Path) -> None:
    world = World([b"a", b"m3", b"b"], tmp_path, split=Split())
    world.run(guarantee)
    assert Case(world, world.ledger_engine).verify().clean


SPOILED_LEDGER: dict[str, tuple[str, ViolationKind]] = {
    "digest": ("update txn_sink set digest = 'f' || substr(digest, 2) || 'x' where txid = 2", ViolationKind.DIGEST),
    "rows": ("update txn_sink set rows = rows + 1 where txid = 2", ViolationKind.DIGEST),
    "bytes": ("update txn_sink set bytes = bytes + 1 where txid = 2", ViolationKind.DIGEST),
    "files": ("update txn_sink set files = '[]' where txid = 2", ViolationKind.DIGEST),
    "files unreadable": ("update txn_sink set files = '[{}]' where txid = 2", ViolationKind.UNREADABLE_ROW),
    "previous": ("update txn_sink set previous = 7 where txid = 2", ViolationKind.CHAIN),
    "sink row deleted": ("delete from txn_sink where txid = 2", ViolationKind.SINK_ROW_MISSING),
    "newest sink row deleted": (
        "delete from txn_sink where txid = (select max(txid) from txn_sink)",
        ViolationKind.EVIDENCE_UNKNOWN_TXID,
    ),
    "commit forgotten": ("update txn_sink set committed_at = null where txid = 2", ViolationKind.STATE),
    "batch deleted": ("delete from txn where txid = 2", ViolationKind.TXID_MISSING),
    "batch deleted, its rows left": ("delete from txn where txid = 2", ViolationKind.ORPHAN_ROW),
    "attempt deleted": ("delete from attempt where txid = 2", ViolationKind.ATTEMPT),
    "attempt's outcome": ("update attempt set outcome = 'running' where txid = 2", ViolationKind.ATTEMPT),
    "attempt's count": ("update attempt set expected_messages = 99 where txid = 2", ViolationKind.ATTEMPT),
    "messages": ("update txn set messages = messages + 1 where txid = 2", ViolationKind.ATTEMPT),
    "failed": ("update txn set failed = failed + 1 where txid = 2", ViolationKind.COUNTS),
    "failure deleted": ("delete from event where kind = 'failure'", ViolationKind.COUNTS),
    "replay deleted": ("delete from event where kind = 'replay'", ViolationKind.COUNTS),
    "epoch ahead": ("update txn set epoch = 9 where txid = 2", ViolationKind.STATE),
    "graphs deleted": ("delete from graph", ViolationKind.STATE),
    "another table": ("update topology_sink set table_id = 'other'", ViolationKind.TABLE_REPLACED),
    "binding deleted": ("delete from topology_sink where sink = 'counts0'", ViolationKind.ORPHAN_ROW),
    "guarantee unknown": ("update txn set guarantee = 'twice' where txid = 2", ViolationKind.UNREADABLE_ROW),
    "another life": ("update txn_sink set incarnation = 'lost' where txid = 2", ViolationKind.ORPHAN_ROW),
    "slice twice": (
        "update txn set position = (select position from txn where txid = 1) where txid = 2",
        ViolationKind.SLICES,
    ),
}


@pytest.mark.parametrize("name", SPOILED_LEDGER)
def test_a_spoiled_ledger_is_named(name: str, case: Case) -> None:
    statement, kind = SPOILED_LEDGER[name]
    case.sql(statement)
    assert kind in case.kinds()
    assert case.verify().exit_status == 1


def test_an_unknown_state_is_named(case: Case) -> None:
    with case.engine.begin() as connection:
        connection.execute(sa.text("pragma ignore_check_constraints = on"))
        connection.execute(sa.text("update txn set state = 'done' where txid = 2"))
    assert ViolationKind.UNREADABLE_ROW in case.kinds()


def _unknown_txid(entries: list[Evidence]) -> None:
    entries.append(Evidence(99, "d" * 64, 1))


def _doubled(entries: list[Evidence]) -> None:
    entries.insert(1, entries[0])


def _deleted(entries: list[Evidence]) -> None:
    del entries[1]


def _digest(entries: list[Evidence]) -> None:
    entries[1] = replace(entries[1], digest="d" * 64)


def _rows(entries: list[Evidence]) -> None:
    entries[1] = replace(entries[1], rows=entries[1].rows + 1)


def _swapped(entries: list[Evidence]) -> None:
    entries[0], entries[1] = entries[1], entries[0]


def _problem(entries: list[Evidence]) -> None:
    entries[0] = replace(entries[0], problem="a file is missing")


SPOILED_EVIDENCE: list[tuple[Callable[[list[Evidence]], None], ViolationKind]] = [
    (_unknown_txid, ViolationKind.EVIDENCE_UNKNOWN_TXID),
    (_doubled, ViolationKind.EVIDENCE_ORDER),
    (_deleted, ViolationKind.EVIDENCE_MISSING),
    (_digest, ViolationKind.EVIDENCE_DIFFERS),
    (_rows, ViolationKind.EVIDENCE_DIFFERS),
    (_swapped, ViolationKind.EVIDENCE_ORDER),
    (_problem, ViolationKind.EVIDENCE),
]


@pytest.mark.parametrize(("spoil", "kind"), SPOILED_EVIDENCE)
def test_spoiled_evidence_is_named(spoil: Callable[[list[Evidence]], None], kind: ViolationKind, case: Case) -> None:
    spoil(case.entries)
    found = [v for v in case.verify().violations if v.kind is kind]
    assert found
    assert found[0].sink == SINK


def test_a_spoiled_row_of_the_pending_store_is_named(tmp_path: Path) -> None:
    world = World([b"a"], tmp_path)
    world.run()
    case = Case(world, world.ledger_engine)
    assert case.verify().clean
    with world.source.rows() as rows:
        rows.insert(SliceRow(0, {"range": "spoiled"}, 1, 1))
    (found,) = case.verify().violations
    assert found.kind is ViolationKind.SLICES
    assert "the store's returned slice: its position in" in found.text


@pytest.mark.parametrize("position", [{"first": 0}, {"first": 0, "next": "many"}])
def test_a_spoiled_position_of_numbered_messages_is_named(position: dict[str, Json]) -> None:
    (found,) = NumberedAudit(Subscriber("memory", "lines", "life"), None).findings(position, [], [])
    assert "position of source lines cannot be read" in found.text


def test_a_guard_that_was_set_back_is_named(case: Case) -> None:
    (log,) = case.world.sinks[0].store.logs.values()
    assert log.guard is not None
    log.guard = replace(log.guard, txid=1)
    assert ViolationKind.GUARD in case.kinds()


class _Rewritten:
    """A session whose evidence is changed on its way."""

    def __init__(self, session: SinkSession, change: Callable[[EvidenceReport], EvidenceReport]) -> None:
        self._session = session
        self._change = change

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        return self._change(self._session.evidence(first, last))

    def close(self) -> None:
        self._session.close()


def test_evidence_that_retention_removed_cannot_be_told(case: Case) -> None:
    def opener(identity: SinkIdentity, binding: SinkBinding) -> SinkSession:
        return _Rewritten(  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
            case.opener(identity, binding), lambda r: replace(r, entries=r.entries[1:], truncated=True)
        )

    report = verify(case.ledger, "words", opener, source=case.source)
    assert report.violations == ()
    assert {unknown.txid for unknown in report.unknowns} == {1}
    assert report.exit_status == 4


def test_a_sink_that_does_not_answer_cannot_be_told(case: Case) -> None:
    def opener(identity: SinkIdentity, binding: SinkBinding) -> SinkSession:
        raise StoreUnavailable(f"sink {binding.sink} is away")

    report = verify(case.ledger, "words", opener, source=case.source)
    assert report.violations == ()
    assert len(report.unknowns) == 2
    assert report.exit_status == 4


def test_a_sink_ahead_of_a_prepared_batch_is_no_violation(case: Case) -> None:
    newest = max(entry.txid for entry in case.entries)
    case.sql("update txn set state = 'prepared', ended_at = null where txid = :txid", txid=newest)
    case.sql("update txn_sink set committed_at = null, outcome = null where txid = :txid", txid=newest)
    report = case.verify()
    notices = [n for n in report.notices if n.kind is NoticeKind.PENDING_IN_LEDGER]
    assert {(n.txid, n.sink) for n in notices} == {(newest, "counts0"), (newest, "counts1")}
    assert {v.kind for v in report.violations} <= {ViolationKind.MESSAGE_LOST}


def test_an_aborted_batch_in_a_sink_is_a_possible_duplicate_or_a_violation(case: Case) -> None:
    case.sql("update txn set state = 'aborted', cause = 'job_failed', reason = 'test' where txid = 2")
    case.sql("update attempt set outcome = 'dead' where txid = 2")
    assert ViolationKind.EVIDENCE_DIFFERS in case.kinds()
    case.sql("update txn set guarantee = 'at-least-once' where txid = 2")
    report = case.verify()
    assert ViolationKind.EVIDENCE_DIFFERS not in {v.kind for v in report.violations}
    assert [n.messages for n in report.notices if n.kind is NoticeKind.DUPLICATE_POSSIBLE] == [4, 4]


def test_an_abandoned_batch_says_what_was_lost_at_most(case: Case) -> None:
    case.sql(
        "update txn set state = 'abandoned', cause = 'driver_ended', reason = 'crash', guarantee = 'at-most-once'"
        " where txid = 2"
    )
    assert [n.messages for n in case.verify().notices if n.kind is NoticeKind.LOSS_POSSIBLE] == [4]


def test_a_range_is_verified_alone(case: Case) -> None:
    case.sql("update txn_sink set rows = rows + 1 where txid = 1")
    assert case.verify(first=2).clean
    assert not case.verify(last=1).clean
    with pytest.raises(UsageError, match="a range begins at 1"):
        case.verify(first=3, last=2)
    with pytest.raises(UsageError, match="no txid of topology 'words' is 99 or later: the newest is"):
        case.verify(first=99)


def test_a_txid_is_shown_whole(case: Case) -> None:
    report = txn(case.ledger, "words", 1)
    assert report.state == "committed"
    assert {s.sink for s in report.sinks} == {"counts0", "counts1"}
    assert [row.message for row in report.failures] == ["3"]
    with pytest.raises(UsageError, match="no txid 99"):
        txn(case.ledger, "words", 99)


def test_a_message_is_followed_to_its_end(case: Case) -> None:
    plain = message(case.ledger, "words", "7", source=case.source)
    assert (plain.end.kind, [o.txid for o in plain.openings]) == (EndKind.COMMITTED, [2])
    replayed = message(case.ledger, "words", "5", source=case.source)
    assert replayed.end.kind is EndKind.COMMITTED
    assert [o.failed for o in replayed.openings] == [True, False]
    (failure,) = replayed.failures
    assert (failure.reason, "not yet" in failure.error) == ("error", True)
    dead = message(case.ledger, "words", "3", source=case.source)
    assert (dead.end.kind, len(dead.failures)) == (EndKind.DEAD_LETTER, 2)
    with pytest.raises(UsageError, match="knows it"):
        message(case.ledger, "words", "1000", source=case.source)


def test_status_shows_driver_and_sinks(case: Case) -> None:
    (found,) = status(case.ledger, source=case.source).topologies
    assert found.driver is DriverState.STOPPED
    assert found.backlog is not None
    assert found.backlog.dead == 1
    assert {s.last_txid for s in found.sinks} == {max(e.txid for e in case.entries)}
    case.sql("update topology set stopped_at = null, driver_started = 1")
    assert status(case.ledger, source=case.source).topologies[0].driver is DriverState.DEAD
    case.sql("update topology set driver_host = 'elsewhere'")
    assert status(case.ledger, source=case.source).topologies[0].driver is DriverState.UNKNOWN


def test_an_unknown_topology_names_the_known_ones(case: Case) -> None:
    with pytest.raises(UsageError, match="known: words"):
        verify(case.ledger, "nope", case.opener, source=case.source)


def test_every_table_with_a_life_has_a_foreign_key_or_is_looked_through_for_strangers() -> None:
    tables = [table for table in t.metadata.sorted_tables if "incarnation" in table.c and table is not t.topology]
    free = {table.name for table in tables if not table.foreign_keys}
    assert free == {"txn_sink", "txn_component", "txn_edge", "event", "reject"}, "strangers() looks through these"
