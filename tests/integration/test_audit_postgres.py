"""The command line over a real queue, ledger, Delta table and Postgres table; and each planted corruption named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from support.command_line import CommandLine

from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres

FILE = """
from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count

def split(line: str) -> list[str]:
    if line == "poison":
        raise ValueError("never \\x00 works")
    return line.split()

def topology(lake: str, queue: str = "lines") -> Topology:
    t = Topology("words")
    source = PostgresQueue(queue, max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)
    (t.stream("lines", source).flat_map(split, "line", schema="word string").group_by("word")
      .persistent_aggregate(n=count()).into(DeltaSink(f"{lake}/counts", name="delta"), PostgresSink("counts", name="pg")))
    return t
"""


@dataclass
class Shell:
    """Runs commands in this process, against one database."""

    database: Database
    folder: Path
    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, status: int = 0) -> Any:
        return CommandLine(self.capture)(*arguments, status=status)

    def run(self, *more: str, status: int = 0) -> Any:
        target = f"{self.folder / 'audited_words.py'}:topology"
        options = (
            "--param",
            f"lake={self.folder / 'lake'}",
            "--engine",
            "inline",
            "--until-idle",
            "--max-messages",
            "4",
        )
        return self("run", target, *options, *more, status=status)

    def violations(self, status: int = 1) -> set[str]:
        return {v["kind"] for v in self("audit", "verify", "words", status=status)["violations"]}

    def sql(self, statement: str) -> None:
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            assert connection.execute(statement.encode()).rowcount >= 1


@pytest.fixture
def shell(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "audited_words.py").write_text(FILE)
    return Shell(database, tmp_path, capsys)


@pytest.fixture
def done(shell: Shell) -> Shell:
    """A run to its end: ten lines, an empty one, and a poison that became a dead letter."""
    shell("ledger", "migrate")
    lines = shell.folder / "lines.txt"
    lines.write_text("".join(f"a m{i}\n" for i in range(10)) + "\npoison\n")
    assert shell("queue", "put", "lines", "--lines", str(lines))["messages"] == 12
    shell.run()
    return shell


def test_an_empty_database_gets_its_schema_at_the_first_use_and_not_from_a_read(shell: Shell) -> None:
    assert "has no Stormproof schema yet" in shell("status", status=2)["error"]["message"]
    assert "has no Stormproof schema yet" in shell("status", status=2)["error"]["message"]
    (shell.folder / "lines.txt").write_text("a b\n")
    shell("queue", "put", "lines", "--lines", str(shell.folder / "lines.txt"))
    assert shell("status") == {"topologies": []}


def test_a_latency_target_alone_has_size_and_number_tuned_and_status_says_so(shell: Shell) -> None:
    shell("ledger", "migrate")
    (shell.folder / "lines.txt").write_text("a b\n" * 60)
    shell("queue", "put", "lines", "--lines", str(shell.folder / "lines.txt"))
    ran = shell.run("--latency-target", "0.001")  # which nothing holds
    assert ran["messages"] == 60
    assert (ran["tuning"]["in_flight_max"], ran["tuning"]["latency_target_s"]) == (4, 0.001)
    (topology,) = shell("status")["topologies"]
    assert topology["tuning"]["latency_target_s"] == 0.001
    assert topology["tuning"]["floor_s"] > 0.001
    assert "below reach" in topology["tuning"]["why"]
    text = CommandLine(shell.capture).text("status")
    assert "tuned to commit within 0.001 s of the open, with at most 4 in flight, which is below reach" in text
    assert "last step: " in text


def test_an_untouched_run_verifies_clean_and_every_question_is_answered(done: Shell) -> None:
    report = done("audit", "verify", "words")
    assert report["violations"] == report["unknowns"] == report["notices"] == []
    assert report["checked"]["evidence"] == 2 * report["checked"]["committed"]
    (topology,) = done("status")["topologies"]
    assert topology["driver"] == "stopped"
    assert topology["backlog"]["dead"] == 1
    tuning = topology["tuning"]
    assert (tuning["in_flight"], tuning["in_flight_max"], tuning["latency_target_s"]) == (1, 1, None)
    assert 0 < topology["pace"]["back_pressure"] < 1
    replayed = done("audit", "replays", "words", "--what", "message")["rows"]
    assert {row["reason"] for row in replayed} == {"error"}
    (letter,) = done("dead-letters", "list", "words")["dead_letters"]
    assert {row["message"] for row in replayed} == {letter["id"]}
    assert done("audit", "message", "words", letter["id"])["end"]["kind"] == "dead_letter"
    assert letter["text"] == "poison"
    first = done("queue", "peek", "lines", "-n", "1")["messages"][0]
    assert first["text"] == "a m0"
    followed = done("audit", "message", "words", first["id"])
    assert (followed["end"]["kind"], followed["end"]["txid"], followed["in_source"]) == ("committed", 1, True)
    assert {s["sink"] for s in done("audit", "txn", "words", "1")["sinks"]} == {"delta", "pg"}
    done("audit", "message", "words", "1-1", status=2)


def test_an_id_inside_a_slice_that_no_message_ever_had_is_refused(done: Shell) -> None:
    xid = str(done("queue", "peek", "lines", "-n", "1")["messages"][0]["id"]).partition("-")[0]
    error = done("audit", "message", "words", f"{xid}-0", status=2)["error"]["message"]
    assert "there is no such message. Its id lies inside the slice that txid 1 of topology 'words' read" in error
    assert "still has all 4 messages" in error


def test_a_message_that_the_source_may_have_removed_is_not_called_committed(done: Shell) -> None:
    first = done("queue", "peek", "lines", "-n", "1")["messages"][0]["id"]
    xid = str(first).partition("-")[0]
    done.sql("delete from stormproof_queue.lines where id = 1")
    for shown_id in (first, f"{xid}-0"):
        told = done("audit", "message", "words", shown_id)
        assert (told["end"]["kind"], told["end"]["txid"], told["in_source"]) == ("unproven", 1, False)
        assert [(one["txid"], one["state"], one["held"]) for one in told["openings"]] == [(1, "committed", [])]
        text = CommandLine(done.capture).text("audit", "message", "words", shown_id)
        assert "unproven. Its id lies inside the slice that txid 1 read" in text
        assert "or there was never such a message" in text


def test_a_message_that_was_not_opened_yet_is_said_to_be_so(done: Shell) -> None:
    more = done.folder / "more.txt"
    more.write_text("later\n")
    receipt = done("queue", "put", "lines", "--lines", str(more))
    assert done("audit", "message", "words", receipt["first"])["end"]["kind"] == "not_opened"
    done("audit", "verify", "words")


def test_a_requeued_and_a_dropped_dead_letter_keep_the_audit_clean(done: Shell) -> None:
    (letter,) = done("dead-letters", "list", "words")["dead_letters"]
    assert done("dead-letters", "requeue", "words", letter["id"], "--why", "try")["requeued"] == [letter["id"]]
    done("audit", "verify", "words")
    done.run()
    done("audit", "verify", "words")
    done("dead-letters", "drop", "words", "--all", "--why", "bad")
    assert done("audit", "message", "words", letter["id"])["end"]["kind"] == "dropped"
    done("audit", "verify", "words")
    done("dead-letters", "drop", "words", letter["id"], status=1)


SPOILED: dict[str, tuple[str, str]] = {
    "evidence row deleted": ("delete from stormproof_sink.evidence where txid = 2", "evidence_missing"),
    "evidence row doubled": (
        "insert into stormproof_sink.evidence (topology, incarnation, sink, txid, rows, digest, epoch)"
        " select topology, incarnation, sink, 99, rows, digest, epoch from stormproof_sink.evidence where txid = 2",
        "evidence_unknown_txid",
    ),
    "evidence's digest": ("update stormproof_sink.evidence set digest = 'x' where txid = 2", "evidence_differs"),
    "guard set back": ("update stormproof_sink.guard set last_txid = 1", "guard"),
    "ledger row altered": ("update stormproof.txn_sink set digest = 'x' where txid = 2 and sink = 'pg'", "digest"),
    "ledger row deleted": ("delete from stormproof.txn where txid = 2", "txid_missing"),
    "dead letter deleted": ("delete from stormproof.dead_letter", "message_lost"),
    "failures deleted": ("delete from stormproof.event where kind = 'failure'", "message_unknown"),
    "slice skipped": (
        "update stormproof.txn set position = jsonb_set(position, '{span}',"
        " (select position -> 'span' from stormproof.txn where txid = 1)) where txid = 2",
        "slices",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_planted_corruption_is_named(name: str, done: Shell) -> None:
    statement, kind = SPOILED[name]
    done.sql(statement)
    assert kind in done.violations()


def _newest_entry_deleted(lake: Path) -> None:
    max((lake / "counts" / "_delta_log").glob("*.json")).unlink()


def _restored(lake: Path) -> None:
    table = DeltaTable(str(lake / "counts"))
    table.restore(table.version() - 1)


def _file_deleted(lake: Path) -> None:
    for uri in DeltaTable(str(lake / "counts")).file_uris():
        Path(uri).unlink()


@pytest.mark.parametrize("spoil", [_newest_entry_deleted, _restored, _file_deleted])
def test_a_spoiled_delta_table_is_named(spoil: Callable[[Path], None], done: Shell) -> None:
    spoil(done.folder / "lake")
    report = done("audit", "verify", "words", status=1)
    assert {v["sink"] for v in report["violations"]} == {"delta"}


def test_a_blocked_txid_can_be_retried_and_nothing_else(done: Shell) -> None:
    done("retry", "words", "1", status=2)
    done.sql(
        "update stormproof.txn set state = 'blocked', cause = 'sink_refused', reason = 'test', ended_at = null"
        " where txid = 3"
    )
    (topology,) = done("status")["topologies"]
    assert [(u["txid"], u["state"]) for u in topology["unresolved"]] == [(3, "blocked")]
    assert done("retry", "words", "3", "--why", "repaired")["state"] == "prepared"
    assert "operator" in {e["kind"] for e in done("audit", "txn", "words", "3")["events"]}


def test_the_second_signal_ends_at_once_with_130() -> None:
    code = (
        "import os, signal\n"
        "from stormproof.trident.cli.run import _end_process\n"
        "from stormproof.trident.driver.control_line import Stopping\n"
        "with Stopping(iter([0.0, 0.1, 9.0]).__next__, at_once=_end_process):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('one wish', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "still here" not in done.stdout
    assert "one wish" in done.stdout
    assert done.stderr.count("stopped at once") == 1
