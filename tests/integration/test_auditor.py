"""An auditor's role has the documented rights and no others: with it every question is answered, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from support.operated import Operated
from support.queues import prepared_database
from support.roles import as_role, roles, used
from support.servers import sql
from support.topologies import POISON, SinkMode, table_of
from support.web import OPERATOR, page_of, signed_in

from stormproof.core.postgres.database import Database
from stormproof.core.postgres.role import RoleKind
from stormproof.trident.cli.ledger import grants_sql

pytestmark = [pytest.mark.postgres]
NAME: Final = "audited"
TABLES: Final = [table_of(mode, NAME) for mode in (SinkMode.POSTGRES_APPEND, SinkMode.POSTGRES_FOLD)]
QUESTIONS: Final = (
    *("replays", "duplicates", "pending", "dead-letters", "attempts", "recovered"),
    *("behind", "aborted", "actions"),
)


@pytest.fixture
def auditor(operated: Operated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operated]:
    """A run with a dead letter; then the role, with what is printed for it, those lines included that name tables."""
    database = prepared_database(operated.cell.database)
    operated.put(b"a b", POISON, b"c")
    operated.run()
    with roles(database) as made:
        role = made[RoleKind.AUDITOR]
        for line in grants_sql(role, RoleKind.AUDITOR, "postgres"):
            statement = line.removeprefix("--   ")
            for table in TABLES if "YOUR_TABLE" in statement else ["-"]:
                if not statement.startswith("--"):
                    sql(database, statement.replace("YOUR_TABLE", table))
        yield used(operated, role, monkeypatch)


def verified(auditor: Operated, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = auditor.command("audit", "verify", NAME, *options)
    assert found["violations"] == found["unknowns"] == []
    assert found["not_recorded"] is None
    return found


def test_every_question_is_answered(auditor: Operated) -> None:
    for question in QUESTIONS:
        auditor.command("audit", question, NAME)
    (letter,) = auditor.command("audit", "dead-letters", NAME)["rows"]
    assert auditor.command("audit", "message", NAME, letter["message"])["end"]["kind"] == "dead_letter"
    assert auditor.command("audit", "txn", NAME, "1")["state"] == "committed"


def test_tables_are_compared_and_verdicts_are_kept(auditor: Operated) -> None:
    verified(auditor)
    assert {one["sink"]: one["rows"] for one in verified(auditor, "--deep")["tables"]} == {
        "delta-append": 3,
        "postgres-append": 3,
        "delta-fold": 3,
        "postgres-fold": 3,
    }
    assert verified(auditor, "--deep", "--since", "last")["chain"]["basis"] is not None
    assert len(auditor.command("audit", "verdicts", NAME)["rows"]) == 3


def test_a_report_is_made(auditor: Operated, tmp_path: Path) -> None:
    made = auditor.command("audit", "report", NAME, "--deep", "--out", str(tmp_path / "report.json"))
    assert made["verdict"] == "clean"


def test_a_report_names_the_right_that_it_lacks(auditor: Operated, database: Database, tmp_path: Path) -> None:
    role, out = dict(auditor.cell.database.parameters)["user"], tmp_path / "report.json"
    sql(database, f"revoke select on stormproof.attempt from {role}")
    said = auditor.command("audit", "report", NAME, "--deep", "--out", str(out), status=1)["error"]["message"]
    assert f'GRANT SELECT ON TABLE stormproof.attempt TO "{role}"' in said
    assert not out.exists()
    sql(database, f"grant select on stormproof.attempt to {role}")
    sql(database, f"revoke select on {TABLES[0]} from {role}")
    auditor.command("audit", "report", NAME, "--deep", "--out", str(out), status=4)
    assert "not compared: the role may not SELECT from the table" in out.read_text()


def test_the_web_page_shows_its_views(auditor: Operated) -> None:
    page = page_of(auditor.cell.database)
    try:
        browser = signed_in(page, OPERATOR)
        for path in ("/", *(f"/{view}?topology={NAME}" for view in ("topology", "batches", "failures", "replays"))):
            assert browser.get(path).status_code == 200, path
        assert browser.get(f"/batch?topology={NAME}&txid=1").status_code == 200
    finally:
        page.close()


def test_nothing_can_be_changed(auditor: Operated) -> None:
    verified(auditor)
    for statement in (
        "update stormproof.verdict set verdict = 'violation'",
        "delete from stormproof.verdict",
        "update stormproof.txn set state = 'aborted'",
        f"delete from {TABLES[0]}",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            sql(auditor.cell.database, statement)


def test_control_without_the_right_on_a_table_that_table_is_said_not_to_be_compared(
    auditor: Operated, database: Database
) -> None:
    role = dict(auditor.cell.database.parameters)["user"]
    sql(database, f"revoke select on {TABLES[0]} from {role}")
    found = auditor.command("audit", "verify", NAME, "--deep", status=4)
    said = {one["kind"]: one["text"] for one in found["notices"] if one["sink"] == "postgres-append"}
    assert said["not_compared"] == ("sink 'postgres-append', not compared: the role may not SELECT from the table")
    owner = replace(auditor, cell=replace(auditor.cell, database=as_role(database, "postgres")))
    assert owner.sql("select count(*) from stormproof.verdict") == [(1,)]
