"""`stormproof audit report` over a ledger with failures, dead letters, rejects, decisions and a prune."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
from support.command_line import CommandLine, command_line_in

from stormproof.core.postgres.database import Database, connect
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.report_file import Wanted, file_bytes, record
from stormproof.trident.audit.verify import verify
from stormproof.trident.cli.options import opened

pytestmark = pytest.mark.postgres

NAME: Final = "reported"
PAYLOAD: Final = "secret-7f3a"
FILE: Final = f"""
from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology

def number(line: str) -> int:
    return -1 if line == "refused" else int(line)

def topology() -> Topology:
    t = Topology("{NAME}")
    source = PostgresQueue("reported", max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)
    numbers = t.stream("lines", source).map(number, "line", schema="n int")
    numbers.into(DeltaSink("lake/numbers", name="lake"), PostgresSink("numbers", name="pg"))
    return t
"""
RUN: Final = ("run", "reported_topology.py:topology", "--engine", "inline", "--until-idle")


def sql(database: Database, statement: str) -> None:
    with connect(database, application_name="tests", autocommit=True) as connection:
        connection.execute(statement.encode())


@pytest.fixture
def reported(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """A run with a dead letter that was dropped with a hostile reason, and an open reject."""
    command = command_line_in(tmp_path, database, "reported_topology.py", FILE, monkeypatch, capsys)
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "1")
    command("ledger", "migrate")
    sql(database, "create table numbers (n int check (n >= 0))")
    Path("lines").write_text("\n".join(["1", "2", "refused", PAYLOAD]))
    command("queue", "put", NAME, "--lines", "lines")
    command(*RUN)
    letter = command("dead-letters", "list", NAME)["dead_letters"][0]
    why = "<script>alert(1)</script>\u202e"
    command("dead-letters", "drop", NAME, letter["id"], "--by", "ann", "--why", why)
    return command


def made(command: CommandLine, *options: str, status: int = 0) -> dict[str, Any]:
    """The record of a report that was made just now."""
    out = f"report-{len(list(Path().glob('report-*')))}.json"
    command("audit", "report", NAME, "--out", out, *options, status=status)
    record: dict[str, Any] = json.loads(Path(out).read_bytes())
    return record


def question(record: dict[str, Any], command: str) -> dict[str, Any]:
    (found,) = [one for one in record["questions"] if one["command"] == f"stormproof audit {command}"]
    return dict(found)


def a_report_answers_each_question_with_a_digest(command: CommandLine) -> None:
    record = made(command, "--by", "auditor")
    assert [one["number"] for one in record["questions"]] == list(range(1, 13))
    for one in record["questions"]:
        of = json.dumps({k: v for k, v in one.items() if k != "sha256"}, separators=(",", ":"), sort_keys=True)
        assert hashlib.sha256(of.encode()).hexdigest() == one["sha256"]
    assert (record["verdict"]["verdict"], record["verdict"]["from"]) == ("clean", "verification")
    assert record["verdict"]["recorded"] == command("audit", "verdicts", NAME)["rows"][0]["id"]
    letters = question(record, "dead-letters")
    assert {(one["what"], one["state"]) for one in letters["rows"]} == {
        ("dead_letter", "drop"),
        ("reject", "undecided"),
    }
    (action,) = question(record, "actions")["rows"]
    assert (action["by"], action["action"]) == ("ann", "drop")
    txn = question(record, "txn")
    assert {(one["sink"], one["outcome"]) for one in txn["by_sink"]} == {("lake", "applied"), ("pg", "applied")}
    assert {one["step"] for one in txn["by_step"]} >= {"open", "job", "commit"}


def told_by_the_ledger(database: Database) -> str:
    with connect(database, application_name="tests", autocommit=True) as connection:
        return repr(connection.execute("select error from stormproof.event where error is not null").fetchall())


def the_file_has_no_payload_no_error_text_and_nothing_but_ascii(database: Database) -> None:
    text = Path("report-0.json").read_text()
    assert "invalid literal" in told_by_the_ledger(database)  # the control
    assert [bad for bad in (PAYLOAD, "invalid literal", "\u202e", "numbers_n_check") if bad in text] == []
    assert "<script>alert(1)</script>" in text  # data: whoever shows it in a page has to escape it
    assert text.isascii()


def histories_come_if_asked_for(command: CommandLine) -> None:
    (letter,) = [one["message"] for one in command("audit", "dead-letters", NAME, "--what", "dead_letter")["rows"]]
    record = made(command, "--message", letter)
    (history,) = question(record, "message")["histories"]
    assert (history["end"]["kind"], history["decisions"][0]["action"]) == ("dropped", "drop")
    assert len(history["failures"]) == 2


def a_time_without_batches_is_not_green(command: CommandLine) -> None:
    record = made(command, "--since", "2099-01-01T00:00:00Z", status=4)
    assert (record["scope"]["batches"], record["verdict"]["from"]) == (0, "nothing")
    assert question(record, "actions")["rows"] == []


def no_file_is_written_over_and_wrong_options_are_named(command: CommandLine) -> None:
    before = Path("report-0.json").read_bytes()
    error = command("audit", "report", NAME, "--out", "report-0.json", status=2)["error"]
    assert "is there already" in error["message"]
    assert Path("report-0.json").read_bytes() == before
    assert "no topology" in command("audit", "report", "nobody", "--out", "x", status=2)["error"]["message"]
    assert not Path("x").exists()


def a_violation_is_the_status(command: CommandLine, database: Database) -> None:
    sql(database, "update stormproof.txn_sink set digest = digest || 'x' where sink = 'pg'")
    record = made(command, status=1)
    assert record["verdict"]["violations"] != []
    sql(database, "update stormproof.txn_sink set digest = left(digest, 64) where sink = 'pg'")


def tables_are_read_if_that_is_asked_for(command: CommandLine, database: Database) -> None:
    record = made(command, "--deep")
    assert (record["verdict"]["verdict"], record["verdict"]["deep"]) == ("clean", True)
    assert {one["sink"]: one["rows"] for one in record["verdict"]["tables"]} == {"lake": 3, "pg": 2}
    sql(database, "update numbers set n = 7 where n = 1")
    found = made(command, "--deep", status=1)["verdict"]["violations"]
    assert [(one["sink"], one["kind"]) for one in found] == [("pg", "rows_changed")]
    record = made(command)  # the control: the sinks' own records agree
    assert any("(--deep reads them)" in one for one in record["not_looked_at"])
    sql(database, "update numbers set n = 1 where n = 7")


def what_was_pruned_is_said(command: CommandLine) -> None:
    command("ledger", "prune", NAME, "--older-than", "0s", "--by", "ann", "--why", "a year is over")
    record = made(command, status=0)
    assert record["scope"]["pruned_upto"] > 0
    assert any("pruned" in one for one in record["not_looked_at"])
    pruned = [one for one in question(record, "actions")["rows"] if one["action"] == "prune"]
    assert [one["why"] for one in pruned] == ["a year is over"]


def test_what_a_report_says(reported: CommandLine, database: Database) -> None:
    """One test, since each run of the topology takes seconds."""
    a_report_answers_each_question_with_a_digest(reported)
    the_file_has_no_payload_no_error_text_and_nothing_but_ascii(database)
    histories_come_if_asked_for(reported)
    a_time_without_batches_is_not_green(reported)
    no_file_is_written_over_and_wrong_options_are_named(reported)
    a_violation_is_the_status(reported, database)
    tables_are_read_if_that_is_asked_for(reported, database)
    what_was_pruned_is_said(reported)


def test_a_large_ledger_makes_a_small_report(reported: CommandLine, database: Database) -> None:
    sql(
        database,
        "insert into stormproof.txn (incarnation, txid, state, guarantee, epoch, attempt, source, position, messages,"
        " failed, bytes, retry, opened_at, ended_at, cause, reason)"
        " select incarnation, 1000 + g, 'aborted', 'exactly-once', 1, 1, source, '{}', 1, 0, 1, false,"
        " now() - interval '1 day', now(), 'driver_ended', 'test' from stormproof.topology, generate_series(1, 20000) g",
    )
    with opened() as stores:
        found = verify(stores.audit, NAME, opener_for(stores.database), last=1)  # the planted ones have no attempts
        told = record(
            *(stores.audit, Wanted(NAME, rows=10), lambda _first, _last: found),
            now=datetime.now(UTC),
            by="",
            version="",
        )
    written: dict[str, Any] = json.loads(file_bytes(told))
    aborted = question(written, "aborted")
    assert (len(aborted["rows"]), aborted["left_out"]) == (10, 20_000 - 10 + aborted["number_of_rows"] - 20_000)
    assert aborted["number_of_rows"] >= 20_000
    assert any("question 10" in one for one in written["not_looked_at"])
    assert written["digest"]["lines"] >= 20_000
    assert len(file_bytes(told)) < 400_000


def test_two_reports_of_one_time_have_one_digest_and_any_change_another(
    reported: CommandLine, database: Database
) -> None:
    first, second = made(reported), made(reported)
    assert first["digest"] == second["digest"]
    sql(database, "update stormproof.txn_sink set rows = rows + 1 where txid = 1 and sink = 'lake'")
    assert made(reported, status=1)["digest"] != first["digest"]


def ssh_keygen(*arguments: str, given: bytes = b"") -> int:
    ended = subprocess.run(["ssh-keygen", *arguments], input=given, capture_output=True, check=False, timeout=60)
    return ended.returncode


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen here")
def test_a_report_is_signed_and_checked_by_ssh_keygen(reported: CommandLine) -> None:
    """As docs/audit.md shows it."""
    made(reported)
    assert ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", "auditkey") == 0
    assert ssh_keygen("-Y", "sign", "-n", "stormproof-report", "-f", "auditkey", "report-0.json") == 0
    Path("signers").write_text("ann@shop " + Path("auditkey.pub").read_text())
    check = ("-Y", "verify", "-f", "signers", "-I", "ann@shop", "-n", "stormproof-report", "-s", "report-0.json.sig")
    report = Path("report-0.json").read_bytes()
    assert ssh_keygen(*check, given=report) == 0
    assert ssh_keygen(*check, given=report.replace(b"ann", b"bob", 1)) != 0
