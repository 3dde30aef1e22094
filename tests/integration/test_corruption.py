"""Planted corruptions, one of each kind, after a clean run into all four sinks: the audit names each, or the next start.

What the audit cannot see is here, too: it proves what was applied, not that nobody changed a table since.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from support.contents import content
from support.crashes import KILLED, Cell, run_driver
from support.queues import prepared_database, put
from support.topologies import SinkMode, expected, messages, table_of, topology
from support.verdicts import require_verified

from stormproof.core.base.errors import FatalError, PositionMismatch, SinkRefused
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.start.settings import Settings
from stormproof.trident.audit.report import PROVES
from stormproof.trident.cli import main
from stormproof.trident.driver.run import driver

pytestmark = pytest.mark.postgres

NAME = "spoiled"
TXID = 3
"""The batch that is spoiled: committed, neither the first nor the last (txid 2 is the poison's or the flaky one's)."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A topology that has run, and the ways to reach around it."""

    cell: Cell

    def run(self) -> None:
        """Run it to its end, in this process."""
        cell = self.cell
        settings = Settings(
            database_url=cell.database.sqlalchemy_url.render_as_string(hide_password=False),
            home=cell.folder / "home",
            batch_messages=cell.batch_messages,
        )
        built = topology(cell.name, cell.mode, cell.folder, cell.database, cell.queue)
        with driver(
            built, cell.guarantee, settings=settings, engine="inline", until_idle=True, rng=random.Random(1)
        ) as coordinator:
            coordinator.run()

    def put(self, *payloads: bytes) -> None:
        put(self.cell.database, self.cell.queue, payloads)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Behind everybody's back; it must do something."""
        with connect(self.cell.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            assert cursor.rowcount != 0, f"nothing was spoiled by: {statement}"
            return [] if cursor.description is None else cursor.fetchall()

    def lake(self, mode: SinkMode) -> Path:
        return self.cell.folder / "lake" / table_of(mode, self.cell.name)

    def log_entries(self, mode: SinkMode) -> list[Path]:
        return sorted((self.lake(mode) / "_delta_log").glob("*.json"))

    def entry_of(self, mode: SinkMode, txid: int) -> Path:
        return next(p for p in self.log_entries(mode) if f'"stormproof.txid":"{txid}"' in p.read_text())


@dataclass(frozen=True, slots=True)
class Shell:
    """The command line, in this process."""

    capture: pytest.CaptureFixture[str]

    def verify(self, status: int) -> dict[str, Any]:
        """`stormproof audit verify NAME --json`, which must end with this exit status."""
        self.capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["audit", "verify", NAME, "--json"])
        out, err = self.capture.readouterr()
        assert ended.value.code == status, (ended.value.code, out, err)
        report: dict[str, Any] = json.loads(out)
        return report


@pytest.fixture
def shell(database: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return Shell(capsys)


def cell_of(database: Database, folder: Path, mode: SinkMode | None = None) -> Cell:
    return Cell(NAME, mode, Guarantee.EXACTLY_ONCE, folder, prepared_database(database), "spoiled-lines", 4)


def run_of(database: Database, folder: Path) -> Ran:
    """Five batches or more: new messages, a retry, a poison that is a dead letter."""
    done = Ran(cell_of(database, folder))
    done.put(*messages(9))
    done.run()
    return done


@pytest.fixture
def ran(database: Database, tmp_path: Path) -> Ran:
    """A run of the test's own."""
    return run_of(database, tmp_path)


RECORDS = (
    *(f"stormproof.{name}" for name in ("topology_sink", "txn", "attempt", "txn_sink", "event")),
    *(f"stormproof.{name}" for name in ("pending_subscription", "pending_slice", "pending_retry", "dead_letter")),
    *(f"stormproof_sink.{name}" for name in ("fence", "guard", "evidence")),
)
"""The tables that `LEDGER`, `QUEUE` and `EVIDENCE` spoil."""


@pytest.fixture(scope="module")
def shared(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """One run for all tests that spoil rows and never run on, with a copy of its rows beside it."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create database corruption template template0")
    done = run_of(postgres.database.with_name("corruption"), tmp_path_factory.mktemp("shared"))
    with connect(done.cell.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create schema kept")
        for number, table in enumerate(RECORDS):
            connection.execute(f"create table kept.t{number} as table {table}".encode())
    yield done
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"drop database corruption with (force)")


@pytest.fixture
def spoilable(shared: Ran, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """The shared run; its rows are put back afterwards."""
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", shared.cell.database.adbc_uri)
    yield shared
    with connect(shared.cell.database, application_name="tests") as connection:
        for number, table in enumerate(RECORDS):
            connection.execute(f"delete from {table}".encode())
            connection.execute(f"insert into {table} overriding system value table kept.t{number}".encode())


def test_an_untouched_run_verifies_clean_and_goes_on(ran: Ran, shell: Shell) -> None:
    report = shell.verify(status=0)
    assert report["violations"] == report["unknowns"] == report["notices"] == []
    assert report["checked"]["sinks"] == len(SinkMode)
    assert report["checked"]["evidence"] == len(SinkMode) * report["checked"]["committed"]
    ran.put(b"more words")
    ran.run()
    shell.verify(status=0)


# -- what lies in Postgres -------------------------------------------------------------------------------------------

MINE = "where txid = 3 and sink = 'postgres-fold'"
NEWEST = "(select max(txid) from stormproof.txn)"


@dataclass(frozen=True, slots=True)
class Planted:
    """A statement that spoils something; what the audit calls it, and of which txid and sink it speaks."""

    sql: str
    kind: str
    txid: int | None = TXID
    sink: str | None = None


LEDGER = {
    "txn deleted": Planted("delete from stormproof.txn where txid = 3", "txid_missing"),
    "newest txn deleted": Planted(f"delete from stormproof.txn where txid = {NEWEST}", "txid_missing", txid=None),
    "txn's state set back": Planted(
        "update stormproof.txn set state = 'aborted', cause = 'job_failed', reason = 'by hand' where txid = 3",
        "evidence_differs",
    ),
    "txn's messages altered": Planted("update stormproof.txn set messages = messages + 1 where txid = 3", "attempt"),
    "txn's failures altered": Planted("update stormproof.txn set failed = failed + 1 where txid = 3", "counts"),
    "txn's attempt altered": Planted("update stormproof.txn set attempt = 2 where txid = 3", "attempt"),
    "txn's epoch altered": Planted("update stormproof.txn set epoch = 99 where txid = 3", "state"),
    "txn's slice altered": Planted(
        "update stormproof.txn set position = (select position from stormproof.txn where txid = 1) where txid = 3",
        "slices",
        txid=None,
    ),
    "txn_sink deleted": Planted(f"delete from stormproof.txn_sink {MINE}", "sink_row_missing", sink="postgres-fold"),
    "txn_sink's digest altered": Planted(
        f"update stormproof.txn_sink set digest = md5(digest) {MINE}", "digest", sink="postgres-fold"
    ),
    "txn_sink's rows altered": Planted(
        f"update stormproof.txn_sink set rows = rows + 1 {MINE}", "evidence_differs", sink="postgres-fold"
    ),
    "txn_sink's previous altered": Planted(
        f"update stormproof.txn_sink set previous = 99 {MINE}", "chain", sink="postgres-fold"
    ),
    "txn_sink's commit removed": Planted(
        f"update stormproof.txn_sink set committed_at = null {MINE}", "state", sink="postgres-fold"
    ),
    "txn_sink's files altered": Planted(
        f"update stormproof.txn_sink set files = '[]' {MINE}", "digest", sink="postgres-fold"
    ),
    "attempt deleted": Planted("delete from stormproof.attempt where txid = 3", "attempt"),
    "attempt's outcome altered": Planted("update stormproof.attempt set outcome = 'dead' where txid = 3", "attempt"),
    "attempt's expectation altered": Planted(
        "update stormproof.attempt set expected_messages = 1 where txid = 3", "attempt"
    ),
    "failure deleted": Planted(
        "delete from stormproof.event where id = (select min(id) from stormproof.event where kind = 'failure')",
        "counts",
        txid=1,
    ),
    "failure's message altered": Planted(
        "update stormproof.event set message = '1-1' where id ="
        " (select min(id) from stormproof.event where kind = 'failure')",
        "message_lost",
        txid=None,
    ),
    "replay deleted": Planted(
        "delete from stormproof.event where id = (select min(id) from stormproof.event where kind = 'replay')",
        "counts",
        txid=None,
    ),
    "record of a dead letter deleted": Planted(
        "delete from stormproof.event where kind = 'dead_letter'", "message_unknown", txid=None
    ),
    "sink's binding deleted": Planted(
        "delete from stormproof.topology_sink where sink = 'postgres-fold'", "orphan_row", sink="postgres-fold"
    ),
    "sink's binding altered": Planted(
        "update stormproof.topology_sink set table_id = 'another' where sink = 'postgres-fold'",
        "table_replaced",
        txid=None,
        sink="postgres-fold",
    ),
}

QUEUE = {
    "retry added": Planted(
        "insert into stormproof.pending_retry (subscription, id, origin, payload, times_opened, times_failed,"
        " not_before, reason, history) select id, 1, 755, '', 1, 1, now(), 'error', '[]'"
        " from stormproof.pending_subscription",
        "message_unknown",
        txid=None,
    ),
    "dead letter deleted": Planted("delete from stormproof.dead_letter", "message_lost", txid=None),
    "dead letter added": Planted(
        "insert into stormproof.dead_letter (kind, source, subscription, id, origin, payload, reason, error, times_opened,"
        " times_failed, history) select kind, source, subscription, 1, 755, '', 'error', '', 1, 1, '[]'"
        " from stormproof.pending_subscription",
        "message_unknown",
        txid=None,
    ),
}

EVIDENCE = {
    "evidence deleted": Planted(
        f"delete from stormproof_sink.evidence {MINE}", "evidence_missing", sink="postgres-fold"
    ),
    "evidence doubled": Planted(
        "insert into stormproof_sink.evidence (topology, incarnation, sink, txid, rows, digest, epoch)"
        f" select topology, incarnation, sink, 99, rows, digest, epoch from stormproof_sink.evidence {MINE}",
        "evidence_unknown_txid",
        txid=99,
        sink="postgres-fold",
    ),
    "evidence's rows altered": Planted(
        f"update stormproof_sink.evidence set rows = rows + 1 {MINE}", "evidence_differs", sink="postgres-fold"
    ),
    "digest altered in ledger and evidence": Planted(
        f"with a as (update stormproof.txn_sink set digest = md5(digest) {MINE} returning digest)"
        f" update stormproof_sink.evidence set digest = (select digest from a) {MINE}",
        "digest",
        sink="postgres-fold",
    ),
    "guard deleted": Planted(
        "delete from stormproof_sink.guard where sink = 'postgres-fold'", "guard", txid=None, sink="postgres-fold"
    ),
}


@pytest.mark.parametrize("what", [*LEDGER, *QUEUE, *EVIDENCE])
def test_the_audit_names_a_corruption(what: str, spoilable: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell(capsys)
    shell.verify(status=0)
    planted = {**LEDGER, **QUEUE, **EVIDENCE}[what]
    spoilable.sql(planted.sql)
    found = shell.verify(status=1)["violations"]
    named = [v for v in found if v["kind"] == planted.kind]
    assert named, f"no {planted.kind} among {[(v['kind'], v['text']) for v in found]}"
    if planted.txid is not None:
        assert planted.txid in {v["txid"] for v in named}
        assert any(f"txid {planted.txid}" in v["text"] or str(planted.txid) in v["text"] for v in named)
    if planted.sink is not None:
        assert planted.sink in {v["sink"] for v in named}
        assert any(planted.sink in v["text"] for v in named)


# -- what stops the next start -------------------------------------------------------------------------------------------


def _drop_and_make_again(ran: Ran) -> None:
    table = table_of(SinkMode.POSTGRES_FOLD, NAME)
    ran.sql(f"create table kept as table {table}")
    ran.sql(f"drop table {table}")
    ran.sql(f"create table {table} (like kept, primary key (word))")


def _delete_newest_entry(ran: Ran) -> None:
    ran.log_entries(SinkMode.DELTA_APPEND)[-1].unlink()


def _restore(ran: Ran) -> None:
    table = DeltaTable(str(ran.lake(SinkMode.DELTA_FOLD)))
    table.restore(table.version() - 1)


def _make_delta_anew(ran: Ran) -> None:
    path = ran.lake(SinkMode.DELTA_APPEND)
    rows = DeltaTable(str(path)).to_pyarrow_table()
    shutil.rmtree(path)
    write_deltalake(str(path), rows)


@dataclass(frozen=True, slots=True)
class Stops:
    """A corruption that the next start refuses; the audit names it, too, unless `kind` is empty."""

    spoil: Callable[[Ran], object]
    says: str
    kind: str
    sink: str
    error: type[FatalError] = PositionMismatch


STOPS = {
    "newest Delta log entry deleted": Stops(
        _delete_newest_entry,
        r"sink 'delta-append' .* holds txid \d+ .* the ledger says txid",
        "evidence_missing",
        "delta-append",
    ),
    "Delta table restored": Stops(_restore, "restored the table to before version", "evidence", "delta-fold"),
    "Delta table made again": Stops(_make_delta_anew, "dropped and made again", "table_replaced", "delta-append"),
    "Delta table gone": Stops(
        lambda ran: shutil.rmtree(ran.lake(SinkMode.DELTA_APPEND)),
        "is gone",
        "sink_unreadable",
        "delta-append",
    ),
    "Postgres table made again": Stops(
        _drop_and_make_again, "dropped and made again", "table_replaced", "postgres-fold"
    ),
    "guard set back": Stops(
        lambda ran: ran.sql("update stormproof_sink.guard set last_txid = 1 where sink = 'postgres-fold'"),
        r"sink 'postgres-fold' .* holds txid 1 .* the ledger says txid",
        "guard",
        "postgres-fold",
    ),
    "guard's digest altered": Stops(
        lambda ran: ran.sql("update stormproof_sink.guard set last_digest = 'x' where sink = 'postgres-fold'"),
        r"sink 'postgres-fold' .* holds txid \d+ \(digest x\)",
        "evidence",
        "postgres-fold",
    ),
    "guard deleted": Stops(
        lambda ran: ran.sql("delete from stormproof_sink.guard where sink = 'postgres-fold'"),
        "holds no txid",
        "guard",
        "postgres-fold",
    ),
    "newest txid forgotten": Stops(
        lambda ran: (
            [ran.sql(f"delete from stormproof.{table} where txid = {NEWEST}") for table in ("txn_sink", "attempt")]
            + [ran.sql(f"delete from stormproof.txn where txid = {NEWEST}")]
        ),
        r"holds txid \d+ .* the ledger says txid",
        "evidence_unknown_txid",
        "postgres-fold",
    ),
}


@pytest.mark.parametrize("what", STOPS)
def test_the_next_start_refuses_a_corruption(what: str, ran: Ran, shell: Shell) -> None:
    stops = STOPS[what]
    stops.spoil(ran)
    found = shell.verify(status=1)["violations"]
    assert (stops.kind, stops.sink) in {(v["kind"], v["sink"]) for v in found}, found
    ran.put(b"more words")
    with pytest.raises(stops.error, match=stops.says) as refused:
        ran.run()
    assert "audit verify" in str(refused.value)


def test_a_delta_file_that_was_deleted_from_disk_is_named(ran: Ran, shell: Shell) -> None:
    entry = ran.entry_of(SinkMode.DELTA_APPEND, TXID)
    path = next(json.loads(line)["add"]["path"] for line in entry.read_text().splitlines() if '"add"' in line)
    (ran.lake(SinkMode.DELTA_APPEND) / path).unlink()
    found = shell.verify(status=1)["violations"]
    assert [(v["kind"], v["txid"], v["sink"]) for v in found] == [("evidence", TXID, "delta-append")]
    assert path in found[0]["text"]


def test_a_delta_log_entry_that_was_altered_is_named(ran: Ran, shell: Shell) -> None:
    entry = ran.entry_of(SinkMode.DELTA_APPEND, TXID)
    entry.write_text(entry.read_text().replace('"stormproof.rows":"', '"stormproof.rows":"9'))
    found = shell.verify(status=1)["violations"]
    assert {(v["txid"], v["sink"]) for v in found} == {(TXID, "delta-append")}


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_a_position_that_was_moved_forward_is_named_once_it_skips(ran: Ran, shell: Shell) -> None:
    ran.put(b"skipped one", b"skipped two")
    ran.sql(
        "update stormproof.pending_subscription set position = position"
        " || jsonb_build_object('from', pg_current_snapshot()::text, 'to', null, 'after', null)"
    )
    ran.put(b"more words")
    ran.run()
    (found,) = shell.verify(status=1)["violations"]
    assert found["kind"] == "slices"
    assert "2 messages" in found["text"]


def test_a_position_that_was_moved_back_is_named_once_it_repeats(ran: Ran, shell: Shell) -> None:
    ran.sql(
        "update stormproof.pending_subscription set position = position"
        " || jsonb_build_object('from', '3:3:', 'to', null, 'after', null)"
    )
    ran.run()
    assert "slices" in {v["kind"] for v in shell.verify(status=1)["violations"]}


@pytest.mark.parametrize("batch", [1, 2])  # the first is of new messages, the second of a retry
def test_an_opened_slice_that_was_deleted_is_named(
    batch: int, database: Database, tmp_path: Path, shell: Shell
) -> None:
    ran = Ran(cell_of(database, tmp_path))
    ran.put(*messages(9))
    assert run_driver(ran.cell, f"open.after=kill@{batch}") == KILLED
    shell.verify(status=0)
    ran.sql("delete from stormproof.pending_slice where owner is not null")
    found = shell.verify(status=1)["violations"]
    assert {v["kind"] for v in found} == {"slices"}
    assert any("of queue spoiled-lines" in v["text"] for v in found)


def test_a_message_that_was_deleted_from_a_slice_stops_its_batch(database: Database, tmp_path: Path) -> None:
    ran = Ran(cell_of(database, tmp_path))
    ran.put(*messages(9))
    assert run_driver(ran.cell, "open.after=kill") == KILLED
    ran.sql(
        'delete from stormproof_queue."spoiled-lines" where id = (select min(id) + 1 from'
        ' stormproof_queue."spoiled-lines")'
    )
    with pytest.raises(PositionMismatch, match="deleted or changed by hand"):
        ran.run()


# -- prepared files ----------------------------------------------------------------------------------------------------


def _remove(path: Path) -> None:
    path.unlink()
    path.with_name(f"_{path.name}").unlink(missing_ok=True)  # the second name of a file in a table's folder


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("mode", SinkMode)
@pytest.mark.parametrize("spoil", [_remove, _truncate, _alter])
def test_a_prepared_file_that_was_spoiled_blocks_its_txid(
    mode: SinkMode, spoil: Callable[[Path], None], database: Database, tmp_path: Path, shell: Shell
) -> None:
    ran = Ran(cell_of(database, tmp_path, mode))
    payloads = messages(3)
    ran.put(*payloads)
    assert run_driver(ran.cell, "prepare.after=kill") == KILLED
    path = next(iter(tmp_path.rglob("stormproof-*-1-1-*.parquet")))
    good = path.read_bytes()
    spoil(path)
    for _ in range(2):  # it stays blocked
        with pytest.raises(SinkRefused, match=r"txid 1 .*stormproof retry spoiled 1") as refused:
            ran.run()
        assert path.name in str(refused.value)
    notices = shell.verify(status=0)["notices"]
    assert any(n["kind"] == "blocked" and path.name in n["text"] for n in notices)
    path.write_bytes(good)
    with pytest.raises(SystemExit, match="0"):
        main(["retry", NAME, "1", "--why", "put back"])
    ran.run()
    assert content(mode, NAME, tmp_path, database) == expected(payloads)
    require_verified(ran.cell)


# -- what the audit does not see ---------------------------------------------------------------------------------------


def test_rows_that_another_hand_changed_are_not_seen_and_the_verdict_says_so(ran: Ran, shell: Shell) -> None:
    ran.sql(f"update {table_of(SinkMode.POSTGRES_FOLD, NAME)} set n = n + 1")
    report = shell.verify(status=0)
    assert report["proves"] == PROVES
    assert "does not prove that nobody changed the tables since" in PROVES


def test_rows_that_another_hand_added_to_a_delta_table_are_not_seen(ran: Ran, shell: Shell) -> None:
    write_deltalake(str(ran.lake(SinkMode.DELTA_APPEND)), pa.table({"word": ["intruder"]}), mode="append")
    shell.verify(status=0)
    ran.put(b"more words")
    ran.run()  # another writer of the table is no fault
    shell.verify(status=0)


def test_rows_that_another_hand_deleted_from_an_appended_delta_table_are_seen(ran: Ran, shell: Shell) -> None:
    DeltaTable(str(ran.lake(SinkMode.DELTA_APPEND))).delete("word = 'common'")
    found = shell.verify(status=1)["violations"]
    assert {(v["kind"], v["sink"]) for v in found} == {("evidence", "delta-append")}
