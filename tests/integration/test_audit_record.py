"""What the ledger records of each batch and of operators: tables' versions, durations, the upkeep of tables, prunes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from deltalake import DeltaTable
from support.command_line import CommandLine, command_line_in

from stormproof.core.base.failpoint import armed
from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres

NAME: Final = "recorded"
FILE: Final = f"""
from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology

def topology() -> Topology:
    t = Topology("{NAME}")
    source = PostgresQueue("recorded", max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)
    numbers = t.stream("lines", source).map(int, "line", schema="n int")
    numbers.into(DeltaSink("lake/numbers", name="lake"), PostgresSink("numbers", name="pg"))
    return t
"""
RUN: Final = ("run", "recorded_topology.py:topology", "--engine", "inline", "--until-idle")


def sql(database: Database, statement: str) -> list[tuple[Any, ...]]:
    with connect(database, application_name="tests", autocommit=True) as connection:
        found = connection.execute(statement.encode())
        return [] if found.description is None else found.fetchall()


@pytest.fixture
def recorded(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    command = command_line_in(tmp_path, database, "recorded_topology.py", FILE, monkeypatch, capsys)
    command("ledger", "migrate")
    return command


def put(command: CommandLine, *lines: str) -> None:
    Path("lines").write_text("\n".join(lines))
    command("queue", "put", NAME, "--lines", "lines")


def versions_by_the_table() -> dict[int, int]:
    """The version of each txid by the table's own history."""
    history = DeltaTable("lake/numbers").history()
    found = {entry.get("stormproof.txid"): entry["version"] for entry in history}
    return {int(txid): int(version) for txid, version in found.items() if txid is not None}


def test_a_message_is_followed_to_the_versions_that_hold_it(recorded: CommandLine, database: Database) -> None:
    put(recorded, "1", "2")
    first = recorded("queue", "peek", NAME)["messages"][0]["id"]
    recorded(*RUN)
    put(recorded, "3", "x")
    recorded(*RUN)
    by_table = versions_by_the_table()
    assert len(by_table) >= 2
    txns = sql(
        database, "select txid, sinks -> 'lake' ->> 'version' from stormproof.audit_txn where state = 'committed'"
    )
    assert {txid: int(version) for txid, version in txns} == by_table
    assert sql(database, "select version from stormproof.txn_sink where sink = 'pg' and version is not null") == []
    opening = recorded("audit", "message", NAME, first)["openings"][0]
    held = {one["sink"]: one["version"] for one in opening["held"]}
    assert held == {"lake": by_table[opening["txid"]], "pg": None}
    assert f"version {held['lake']} of the table" in recorded.text("audit", "message", NAME, first)


def test_a_message_that_failed_is_held_by_nobody(recorded: CommandLine, database: Database) -> None:
    put(recorded, "1", "x")
    recorded(*RUN)
    ((failed,),) = sql(database, "select distinct message from stormproof.event where kind = 'failure'")
    assert [one["held"] for one in recorded("audit", "message", NAME, failed)["openings"]] == [[], []]
    assert sql(database, f"select distinct held from stormproof.audit_message where message = '{failed}'") == [(None,)]


def test_a_batch_that_is_given_back_has_its_durations(recorded: CommandLine, database: Database) -> None:
    put(recorded, "x")
    recorded(*RUN)
    aborted = sql(database, "select open_ms, job_ms from stormproof.audit_txn where state = 'aborted'")
    assert len(aborted) == 2
    assert all(open_ms > 0 and job_ms > 0 for open_ms, job_ms in aborted)


def test_a_batch_that_recovery_commits_keeps_its_durations_and_version(
    recorded: CommandLine, database: Database
) -> None:
    put(recorded, "1")
    with armed("commit.after_sink=error"):
        recorded.ended(*RUN)
    assert sql(database, "select state, job_ms > 0 from stormproof.audit_txn") == [("prepared", True)]
    recorded(*RUN)
    ((state, took, version),) = sql(
        database, "select state, job_ms, (sinks -> 'lake' ->> 'version')::int from stormproof.audit_txn"
    )
    assert (state, version) == ("committed", versions_by_the_table()[1])
    assert took > 0
    (again,) = recorded("audit", "duplicates", NAME)["rows"]
    assert again["sink"] == "lake"


def test_the_care_of_tables_and_a_prune_are_on_record_with_by_and_why(recorded: CommandLine) -> None:
    for line in ("1", "2"):
        put(recorded, line)
        recorded(*RUN)
    who = ("--by", "ann", "--why", "the disk is full")
    recorded("vacuum", NAME, "--dry-run", *who)
    assert recorded("audit", "actions", NAME)["rows"] == []
    recorded("repair", NAME, "--dry-run", *who)
    assert recorded("audit", "actions", NAME)["rows"] == []
    recorded("compact", NAME, *who)
    recorded("vacuum", NAME, "lake", *who)
    (table,) = recorded("repair", "lake/numbers", *who)["tables"]
    assert (table["sink"], table["files"], table["doubled_keys"], table["left"]) == ("lake", [], 0, [])
    recorded("ledger", "prune", NAME, "--older-than", "0s", *who)
    found = recorded("audit", "actions", NAME)["rows"]
    assert {(one["action"], one["sink"]) for one in found} == {
        ("compact", "lake"),
        ("vacuum", "lake"),
        ("repair", "lake"),
        ("prune", None),
    }
    assert {(one["by"], one["why"]) for one in found} == {("ann", "the disk is full")}
