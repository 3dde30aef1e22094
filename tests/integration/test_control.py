"""`pause`, `resume`, `drain` and `stop` reach a driver in a process of its own, and are on record."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.brokers import until
from support.command_line import command_line_in
from support.driven import FILE, NAME, Driven
from support.queues import prepared_database

from stormproof.core.postgres.database import Database, connect
from stormproof.trident.decisions import driver as decisions
from stormproof.trident.ledger import control

pytestmark = pytest.mark.postgres


class Run(Driven):
    """A driver whose output is read, and an operator."""

    def reporting(self, *more: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """A driver of which what it prints can be read."""
        return self.driver(*more, output=subprocess.PIPE)

    def one(self, query: str) -> Any:
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            row = connection.execute(query.encode()).fetchone()
        return None if row is None else row[0]

    def until_doing(self, doing: str, epoch: int = 1) -> None:
        query = f"select doing from stormproof.heartbeat where epoch = {epoch}"
        until(lambda: self.one(query) == doing, f"the driver of epoch {epoch} is not {doing}")

    def until_committed(self, number: int) -> None:
        query = (
            "select coalesce(sum(messages - failed - returned), 0)::int from stormproof.txn where state = 'committed'"
        )
        until(lambda: self.one(query) == number, f"{number} messages are not committed")

    def signs(self, number: int) -> None:
        """Wait for so many further signs of life: a driver that could open a batch has had the time to."""
        query = "select at from stormproof.heartbeat"
        for _ in range(number):
            before = self.one(query)
            until(lambda: self.one(query) != before, "the driver gives no further sign of life")  # noqa: B023

    def status(self, status: int = 0) -> Any:
        (found,) = self.command("status", NAME, status=status)["topologies"]
        return found


@pytest.fixture
def run(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    prepared_database(database)
    return Run(database, command_line_in(tmp_path, database, "orders.py", FILE, monkeypatch, capsys))


def test_a_pause_holds_through_a_restart_until_it_is_resumed(run: Run) -> None:
    run.put("1", "2")
    with run.reporting() as child:
        run.until_committed(2)
        asked = run.command("pause", NAME, "--by", "ann", "--why", "the lake is moved", "--wait", "30")
        assert (asked["heard"], asked["done"], asked["doing"], asked["in_flight"]) == (True, True, "paused", 0)
        run.put("3")
        run.signs(2)
        assert run.one("select count(*) from stormproof.txn") == 1
        found = run.status()
        assert (found["driver"], found["doing"], found["backlog"]["ready"]) == ("running", "paused", 1)
        assert (found["asked"]["what"], found["asked"]["by"], found["asked"]["why"]) == (
            "pause",
            "ann",
            "the lake is moved",
        )
        assert "it goes on after: stormproof resume orders" in run.command.text("status", NAME)
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=60)
        assert '"stopped": "signal"' in out
    with run.reporting("--until-idle") as child:
        run.until_doing("paused", epoch=2)
        run.signs(2)
        assert run.one("select count(*) from stormproof.txn") == 1
        asked = run.command("resume", NAME, "--by", "ben", "--wait", "30")
        assert (asked["heard"], asked["done"]) == (True, True)
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0
        assert "opens no batch until: stormproof resume orders; asked for by ann (the lake is moved)" in err
        assert "goes on, asked for by ben" in err
    run.until_committed(3)
    assert [
        run.one(f"select detail ->> 'by' from stormproof.event where action = '{a}'") for a in ("pause", "resume")
    ] == [
        "ann",
        "ben",
    ]
    assert run.command("audit", "verify", NAME)["violations"] == []


def test_a_stop_ends_the_driver_and_no_later_one(run: Run) -> None:
    run.put("1")
    with run.reporting() as child:
        run.until_committed(1)
        asked = run.command("stop", NAME, "--wait", "60")
        assert (asked["heard"], asked["done"]) == (True, True)
        out, _ = child.communicate(timeout=60)
        assert (child.returncode, '"stopped": "stop"' in out) == (0, True)
    run.put("2")
    with run.reporting("--until-idle") as child:
        assert child.wait(timeout=60) == 0
    run.until_committed(2)
    assert run.status()["asked"] is None


def test_a_drain_leaves_no_message_that_waits_for_its_retry(run: Run) -> None:
    run.put("1", "poison")
    with run.reporting() as child:
        run.until_committed(1)
        assert run.command("drain", NAME, "--wait", "60")["done"] is True
        out, _ = child.communicate(timeout=60)
        assert (child.returncode, '"stopped": "drain"' in out) == (0, True)
    found = run.status()
    assert (found["backlog"]["waiting"], found["backlog"]["pending"], found["backlog"]["dead"]) == (0, 0, 1)


def test_what_cannot_be_asked_for_is_refused_by_name(run: Run) -> None:
    run.put("1")
    with run.reporting("--until-idle") as child:
        assert child.wait(timeout=60) == 0
    assert "run it with --until-idle" in run.command("drain", NAME, status=2)["error"]["message"]
    assert run.command("stop", NAME)["done"] is True
    assert run.command.text("resume", NAME) == "orders is not paused\n"
    assert run.one("select count(*) from stormproof.control") == 0
    asked = run.command("pause", NAME)
    assert (asked["driver"], asked["heard"]) == ("", False)
    assert "no driver runs; the next one opens batches again" in run.command.text("resume", NAME)
    assert "knows no topology 'nobody'" in run.command("pause", "nobody", status=2)["error"]["message"]


def test_a_driver_that_does_not_answer_is_shown_as_such(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SILENT_S", 1.0)
    monkeypatch.setattr(decisions, "ANSWER_S", 1.0)
    run.put("1")
    with run.reporting() as child:
        run.until_committed(1)
        os.kill(child.pid, signal.SIGSTOP)
        asked = run.command("pause", NAME, status=4)
        assert (asked["heard"], asked["done"]) == (False, False)
        age = "select extract(epoch from clock_timestamp() - at) > 1.5 from stormproof.heartbeat"
        until(lambda: run.one(age), "the sign of life does not grow old")
        found = run.status(status=1)
        assert [problem["kind"] for problem in found["problems"]] == ["driver_silent"]
        assert found["asked"]["heard_at"] is None
        assert "does not answer (its newest sign of life:" in run.command.text("pause", NAME, status=4)
        os.kill(child.pid, signal.SIGCONT)
        run.until_doing("paused")
        assert run.status()["problems"] == []


def test_a_driver_hears_within_two_seconds_while_its_job_runs(run: Run, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    text = FILE.replace("    return int(line)", f"    open({str(gate)!r}).read()\n    return int(line)")
    (tmp_path / "orders.py").write_text(text)
    run.put("1")
    with run.reporting() as child:
        until(lambda: run.one("select count(*) from stormproof.txn") == 1, "no batch is opened")
        asked = run.command("pause", NAME)
        assert (asked["heard"], asked["doing"], asked["in_flight"]) == (True, "pausing", 1)
        took_s = run.one("select extract(epoch from heard_at - asked_at) from stormproof.control")
        assert took_s < 2
        gate.open("w").close()
        run.until_doing("paused")
        run.until_committed(1)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)


def test_a_database_that_goes_away_and_comes_back_is_heard_again(run: Run) -> None:
    run.put("1")
    with run.reporting() as child:
        run.until_committed(1)
        run.one(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            " where application_name like 'stormproof%' and datname = current_database() and pid <> pg_backend_pid()"
        )
        assert run.command("stop", NAME, "--wait", "60")["done"] is True
        assert child.wait(timeout=60) == 0
