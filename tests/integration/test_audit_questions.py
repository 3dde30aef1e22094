"""Each question of the audit: its command, its view, and a role that may read only the views."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from support.command_line import CommandLine
from support.shown import NAME, PAYLOAD, TARGET, shown_in, sql

from stormproof.core.postgres.database import Database
from stormproof.trident.declarations.questions import QUESTIONS

pytestmark = pytest.mark.postgres

ALONE: Final = {question.view for question in QUESTIONS.values()} | {
    "stormproof.audit_components",
    "stormproof.audit_edges",
    "stormproof.replay_causes",
}


@pytest.fixture
def asked(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """A run with a message that failed once, a dead letter, a reject, a verdict and a decision."""
    command = shown_in(tmp_path, database, monkeypatch, capsys)
    letter = command("dead-letters", "list", NAME)["dead_letters"][0]
    command("dead-letters", "drop", NAME, letter["id"], "--by", "ann", "--why", "not a number")
    return command


def rows(command: CommandLine, *call: str, status: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = command("audit", *call, status=status)["rows"]
    return found


def each_question_is_answered(asked: CommandLine) -> None:
    (recovered,) = rows(asked, "recovered", NAME)
    assert (recovered["failures"], recovered["reasons"]) == (1, ["error"])
    once = recovered["message"]
    replayed = rows(asked, "replays", NAME, "--what", "message")
    assert {row["error_class"] for row in replayed} == {"ValueError"}
    assert once in {row["message"] for row in replayed}
    (counted,) = rows(asked, "replays", NAME, "--group", "reason", "--group", "component", "--group", "hour")
    assert (counted["reason"], counted["number"]) == ("error", len(replayed))
    letters = {row["what"]: row for row in rows(asked, "dead-letters", NAME)}
    dead = letters["dead_letter"]
    assert (dead["error_class"], dead["state"], dead["decided_by"]) == ("ValueError", "drop", "ann")
    assert (letters["reject"]["reason"], letters["reject"]["state"]) == ("23514", "undecided")
    (failed,) = rows(asked, "dead-letters", NAME, "--class", "ValueError")
    assert failed == dead
    histogram = {(row["what"], row["times"]): row["number"] for row in rows(asked, "attempts", NAME)}
    assert [histogram["message", times] for times in (0, 1, 2)] == [3, 1, 1]
    (source,) = rows(asked, "pending", NAME)
    assert (source["source"], source["waiting"], source["leased"], source["ready"]) == (NAME, 0, 0, 0)
    (sink,) = rows(asked, "behind", NAME)
    assert (sink["behind_txids"], sink["blocked_txid"]) == (0, None)
    assert sink["held_txid"] is not None
    (action,) = rows(asked, "actions", NAME)
    assert (action["action"], action["by"], action["why"]) == ("drop", "ann", "not a number")
    assert action["message"] == dead["message"]
    (verdict,) = rows(asked, "verdicts", NAME)
    assert (verdict["verdict"], verdict["by"], verdict["first_txid"]) == ("clean", "auditor", 1)
    assert rows(asked, "duplicates", NAME) == []


def a_rejects_reason_is_the_same_in_command_and_view(asked: CommandLine, database: Database) -> None:
    ((message,),) = sql(database, "select message from stormproof.reject")
    (letter,) = rows(asked, "dead-letters", NAME, "--message", message)
    told = asked("audit", "message", NAME, message)
    (reject,) = told["rejects"]
    ((reason, error_class),) = sql(
        database, "select reason, error_class from stormproof.audit_message where what = 'reject'"
    )
    assert letter["reason"] == reject["reason"] == reason == "23514"
    assert letter["error_class"] == error_class == "23514"
    assert (told["end"]["kind"], reject["rows"], reject["state"]) == ("rejected", 1, "open")
    assert "1 row, open: 23514: " in asked.text("audit", "message", NAME, message)


def replays_of_a_topology_are_those_of_all(asked: CommandLine) -> None:
    whole, everywhere = asked("audit", "replays", NAME), asked("audit", "replays")
    assert whole.keys() == everywhere.keys()
    assert whole["rows"] == everywhere["rows"] != []


def each_component_is_counted(asked: CommandLine) -> None:
    found = {one["component"]: one for one in asked("audit", "components", NAME)["components"]}
    lines, number, numbers, acker = (found[name] for name in ("lines", "number", "postgres.numbers", "__acker"))
    assert [one["failed"] for one in (lines, number, numbers, acker)] == [3, 3, 0, 3]  # once, and a dead letter twice
    assert [one["acked"] for one in (lines, number, numbers, acker)] == [4, 4, 4, 4]
    edges = {(one["origin"], one["target"]): one["tuples"] for one in asked("audit", "components", NAME)["edges"]}
    assert edges == {("lines", "number"): number["executed"], ("number", "postgres.numbers"): 4}
    assert asked("audit", "components", NAME, "--since", "2099-01-01T00:00:00Z")["components"] == []
    assert "numbers" in asked.text("audit", "components", NAME, "--since", "1h")


def every_verdict_is_kept_with_its_scope_and_the_newest_is_the_status(asked: CommandLine, database: Database) -> None:
    ran = asked("audit", "verify", NAME, "--first", "1", "--last", "1")
    kept = rows(asked, "verdicts", NAME)
    assert (kept[0]["id"], kept[0]["last_txid"], len(kept)) == (ran["recorded"], 1, 2)
    sql(database, "update stormproof.txn_sink set digest = 'other' where txid = 1")
    assert asked("audit", "verify", NAME, status=1)["recorded"] == kept[0]["id"] + 1
    newest = rows(asked, "verdicts", NAME, status=1)[0]
    assert newest["verdict"] == "violation"
    assert newest["kinds"]["evidence_differs"] == 1


def a_topology_without_a_verdict_is_not_green(asked: CommandLine, database: Database) -> None:
    sql(database, "delete from stormproof.verdict")
    assert rows(asked, "verdicts", NAME, status=4) == []
    assert rows(asked, "verdicts", status=4) == []


def a_limit_says_what_it_left_out(asked: CommandLine) -> None:
    whole = rows(asked, "replays", NAME, "--what", "message")
    part = asked("audit", "replays", NAME, "--what", "message", "--limit", "1")
    assert (part["rows"], part["left_out"]) == (whole[:1], len(whole) - 1)
    assert f"{len(whole) - 1} more left out" in asked.text(
        "audit", "replays", NAME, "--limit", "1", "--what", "message"
    )


def times_and_wrong_filters(asked: CommandLine) -> None:
    assert rows(asked, "recovered", NAME, "--since", "1h") != []
    assert rows(asked, "recovered", NAME, "--until", "1h") == []
    assert rows(asked, "recovered", NAME, "--since", "2099-01-01T00:00:00Z") == []
    assert "is no time" in asked("audit", "recovered", NAME, "--since", "soon", status=2)["error"]["message"]
    error = asked("audit", "replays", NAME, "--group", "payload", status=2)["error"]
    assert "known: topology, what, message" in error["message"]
    assert "knows no topology" in asked("audit", "behind", "nobody", status=2)["error"]["message"]


def a_batch_that_a_sink_held_already_is_a_duplicate_with_its_evidence(asked: CommandLine, database: Database) -> None:
    sql(
        database,
        "insert into stormproof.event (incarnation, at, kind, txid, sink)"
        " select incarnation, now(), 'suppressed', txid, sink from stormproof.txn_sink order by txid limit 1",
    )
    (row,) = rows(asked, "duplicates", NAME)
    ((digest, count),) = sql(database, "select digest, rows from stormproof.txn_sink order by txid limit 1")
    assert (row["what"], row["digest"], row["rows"]) == ("batch", digest, count)
    assert row["evidence"] == f"the own record of sink {row['sink']} has txid {row['txid']}"


def a_blocked_batch_is_behind_and_aborted_with_status_1(
    asked: CommandLine, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")
    (tmp_path / "more").write_text("refused")
    asked("queue", "put", NAME, "--lines", "more")
    asked.ended("run", TARGET, "--engine", "inline", "--until-idle")
    (sink,) = rows(asked, "behind", NAME, status=1)
    assert sink["behind_txids"] == 1
    (blocked,) = rows(asked, "aborted", NAME, "--what", "blocked", status=1)
    assert blocked["txid"] == sink["blocked_txid"]
    assert "numbers_n_check" in blocked["reason"]
    asked("retry", NAME, str(blocked["txid"]), "--by", "ann")
    assert [row["what"] for row in rows(asked, "aborted", NAME, "--txid", str(blocked["txid"]))] == ["was_blocked"]
    assert rows(asked, "behind", NAME)[0]["behind_txids"] == 1


@contextmanager
def reader(database: Database) -> Generator[Database]:
    """A role with USAGE on the schema and SELECT on the views, and nothing else."""
    role = f"test_reader_{os.getpid()}"
    sql(database, f"create role {role} login")
    try:
        sql(database, f"grant usage on schema stormproof to {role}")
        sql(database, f"grant select on {', '.join(sorted(ALONE))} to {role}")
        yield Database.of({**dict(database.parameters), "user": role})
    finally:
        sql(database, f"drop owned by {role}")
        sql(database, f"drop role {role}")


def select_on_the_views_is_all_that_a_reader_needs_and_they_show_no_payload(
    asked: CommandLine, database: Database
) -> None:
    rows(asked, "pending", NAME)
    shown: dict[str, str] = {}
    with reader(database) as alone:
        for view in ALONE:
            shown[view] = repr(sql(alone, f"select * from {view}"))
        for table in ("txn", "event", "dead_letter", "pending_retry", "verdict"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                sql(alone, f"select * from stormproof.{table}")
    assert NAME in shown["stormproof.audit_message"]
    assert NAME in shown["stormproof.audit_txn"]
    leaking = [view for view, text in shown.items() if PAYLOAD in text or "the first time" in text]
    assert leaking == []
    # The control: the tables behind the views have both.
    assert PAYLOAD in repr(sql(database, "select error, input from stormproof.event"))


def every_view_and_column_is_described_and_every_filter_is_a_column(database: Database) -> None:
    found = sql(
        database,
        "select 'stormproof.' || c.relname, a.attname, col_description(c.oid, a.attnum), obj_description(c.oid)"
        " from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0"
        " where c.relkind = 'v' and c.relnamespace = 'stormproof'::regnamespace",
    )
    assert {view for view, *_ in found} == ALONE
    assert all(column and whole for _, _, column, whole in found)
    for question in QUESTIONS.values():
        assert {name for view, name, *_ in found if view == question.view} == question.columns.keys()
        assert {"topology", *filter(None, (question.time, question.txid))} <= question.columns.keys()


def test_what_is_read_of_one_run(asked: CommandLine, database: Database) -> None:
    """One test, since each run of the topology takes seconds."""
    each_question_is_answered(asked)
    a_rejects_reason_is_the_same_in_command_and_view(asked, database)
    replays_of_a_topology_are_those_of_all(asked)
    each_component_is_counted(asked)
    a_limit_says_what_it_left_out(asked)
    times_and_wrong_filters(asked)
    select_on_the_views_is_all_that_a_reader_needs_and_they_show_no_payload(asked, database)
    every_view_and_column_is_described_and_every_filter_is_a_column(database)


def test_what_changes_the_answers(
    asked: CommandLine, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, since each run of the topology takes seconds."""
    a_batch_that_a_sink_held_already_is_a_duplicate_with_its_evidence(asked, database)
    every_verdict_is_kept_with_its_scope_and_the_newest_is_the_status(asked, database)
    a_topology_without_a_verdict_is_not_green(asked, database)
    a_blocked_batch_is_behind_and_aborted_with_status_1(asked, database, tmp_path, monkeypatch)
