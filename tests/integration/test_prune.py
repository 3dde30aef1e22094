"""The ledger is pruned while topologies live on it: nothing that a sink, a message or the audit needs goes with it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.contents import content
from support.crashes import KILLED, Cell, ended, paused_driver, resume, run_driver
from support.operated import Operated
from support.queues import prepared_database
from support.topologies import SinkMode, expected, messages

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.decisions.pruning import PruneReport, prune
from stormproof.trident.ledger.ledger import Ledger

pytestmark = pytest.mark.postgres

NAME = "pruned"
TABLES = ("txn", "attempt", "txn_sink", "event", "prune")


@pytest.fixture
def operated(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Operated:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return Operated(Cell(NAME, None, Guarantee.EXACTLY_ONCE, tmp_path, prepared_database(database), NAME, 3), capsys)


def exact(operated: Operated, payloads: list[bytes]) -> None:
    for mode in SinkMode:
        assert content(mode, NAME, operated.cell.folder, operated.cell.database) == expected(payloads), mode


def rows(operated: Operated) -> dict[str, int]:
    return {table: operated.sql(f"select count(*) from stormproof.{table}")[0][0] for table in TABLES}


def pruned_upto(operated: Operated, status: int = 0) -> list[int]:
    return [n["txid"] for n in operated.verify(status)["notices"] if n["kind"] == "pruned"]


def test_more_messages_are_pruned_than_a_statement_can_have_parameters(operated: Operated) -> None:
    operated.put(*messages(6))
    operated.run()
    inserted = operated.sql(
        "insert into stormproof.event (incarnation, at, kind, txid, message)"
        " select incarnation, now(), 'replay', txid, 'again/' || i from stormproof.txn, generate_series(1, 65536) i"
        " where txid = 1 returning 1"
    )
    assert len(inserted) == 65_536
    removed = operated.command("ledger", "prune", NAME, "--older-than", "0s")["topologies"][0]["removed"]
    assert removed["event"] >= 65_536
    operated.verify()


def test_a_topology_that_is_pruned_goes_on_and_verifies(operated: Operated) -> None:
    payloads: list[bytes] = []
    for start in range(3):
        fresh = messages(6, prefix=f"s{start}w")
        payloads += fresh
        operated.put(*fresh)
        operated.run()
        before = rows(operated)
        dry = operated.command("ledger", "prune", NAME, "--older-than", "0s", "--dry-run")["topologies"][0]
        assert rows(operated) == before
        assert operated.command("ledger", "prune", "--older-than", "30d")["topologies"][0]["removed"] == {}
        done = operated.command("ledger", "prune", NAME, "--older-than", "0s", "--by", "Ada")["topologies"][0]
        after = rows(operated)
        assert done["removed"]["attempt"] == dry["removed"]["attempt"] > 0
        assert after["attempt"] == 1
        assert after["txn_sink"] <= 2 * len(SinkMode)
        highest = operated.sql("select max(txid) from stormproof.txn")[0][0]
        assert done["upto"] == highest - 1
        assert pruned_upto(operated) == [done["upto"]]
    # The poison died once: its story stays, whatever its age.
    (letter,) = [d["id"] for d in operated.command("dead-letters", "list", NAME)["dead_letters"]][:1]
    assert operated.command("audit", "message", NAME, letter)["end"]["kind"] == "dead_letter"
    (gone,) = operated.sql(
        "select min(n) from generate_series(1, 9) n where n not in (select txid from stormproof.txn)"
    )[0]
    refused = operated.command("audit", "txn", NAME, str(gone), status=2)
    assert "pruned up to txid" in refused["error"]["message"]
    operated.command("audit", "verify", NAME, "--last", "2", status=4)
    exact(operated, payloads)
    operated.command("dead-letters", "requeue", NAME, letter)
    operated.run()
    operated.verify()


def test_of_old_verdicts_the_newest_of_each_scope_stays(operated: Operated) -> None:
    operated.put(*messages(3))
    operated.run()
    for options in ((), ("--deep",), (), ("--deep",), ("--since", "last")):
        operated.command("audit", "verify", NAME, *options)
    newest = operated.sql("select max(id) from stormproof.verdict group by deep order by 1")
    assert "verdict" not in operated.command("ledger", "prune", NAME, "--older-than", "1d")["topologies"][0]["removed"]
    dry = operated.command("ledger", "prune", NAME, "--older-than", "0s", "--dry-run")["topologies"][0]
    done = operated.command("ledger", "prune", NAME, "--older-than", "0s")["topologies"][0]
    assert done["removed"]["verdict"] == dry["removed"]["verdict"] == 3
    assert operated.sql("select id from stormproof.verdict order by 1") == newest
    report = operated.command("audit", "verify", NAME, "--since", "last")
    assert report["violations"] == []


@pytest.mark.parametrize("point", ["open.after", "prepare.after", "commit.after_sink", "finish.before_commit"])
def test_what_is_not_resolved_stays(operated: Operated, point: str) -> None:
    payloads = messages(9)
    operated.put(*payloads)
    assert run_driver(operated.cell, f"{point}=kill@3") == KILLED
    (report,) = operated.command("ledger", "prune", "--older-than", "0s")["topologies"]
    (open_txid,) = operated.sql("select min(txid) from stormproof.txn where ended_at is null")[0]
    assert report["upto"] < open_txid
    operated.verify()
    operated.run()
    exact(operated, payloads)
    operated.verify()


def test_a_driver_that_runs_meanwhile_is_not_disturbed(operated: Operated) -> None:
    payloads = messages(9)
    operated.put(*payloads)
    with paused_driver(operated.cell, "postgres.after_commit=pause@5") as driver:
        (report,) = operated.command("ledger", "prune", "--older-than", "0s")["topologies"]
        assert report["upto"] >= 1
        resume(driver)
        assert ended(driver, "the driver") == 0
    exact(operated, payloads)
    operated.verify()


class Killed(Exception):
    pass


def by_hand(operated: Operated, chunk_txids: int, *, dies_at: int | None = None) -> PruneReport:
    def between(upto: int) -> None:
        if upto == dies_at:
            raise Killed

    engine = sa.create_engine(operated.cell.database.sqlalchemy_url)
    now = datetime.now(UTC)
    try:
        return prune(
            Ledger(engine, SystemClock(), lambda: "none"),
            AuditLedger(engine),
            NAME,
            ended_before=now + timedelta(seconds=1),
            now=now,
            by="tests",
            chunk_txids=chunk_txids,
            between=between,
        )
    finally:
        engine.dispose()


def test_a_prune_that_is_killed_between_two_chunks_is_a_shorter_prune(operated: Operated) -> None:
    operated.put(*messages(12))
    operated.run()
    with pytest.raises(Killed):
        by_hand(operated, 2, dies_at=2)
    assert pruned_upto(operated) == [2]
    report = by_hand(operated, 1)
    assert report.before == 2
    assert pruned_upto(operated) == [report.upto]
    assert operated.sql("select upto from stormproof.prune order by 1") == [(2,), (report.upto,)]


@pytest.mark.parametrize(
    ("needed", "kind"),
    [
        ("delete from stormproof.txn_sink where sink = 'delta-fold'", "sink_row_missing"),
        ("delete from stormproof.event where kind in ('failure', 'dead_letter')", "message_unknown"),
        ("delete from stormproof.prune", "txid_missing"),
    ],
)
def test_control_without_what_a_prune_leaves_the_audit_complains(operated: Operated, needed: str, kind: str) -> None:
    operated.put(*messages(9))
    operated.run()
    by_hand(operated, 3)
    operated.verify()
    operated.sql(needed)
    assert kind in operated.kinds("violations", operated.verify(status=1))
