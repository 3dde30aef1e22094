"""Canaries over a driver in a process of its own: dead letters and rejects are handed out again wave by wave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from support.brokers import until
from support.command_line import CommandLine, command_line_in
from support.queues import prepared_database, put

from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres

NAME: Final = "orders"
FILE: Final = """
import os
from stormproof import PostgresQueue, PostgresSink, Topology

def number(line: str) -> int:
    if os.path.exists("broken") or line.startswith("poison"):
        raise ValueError(line)
    return int(line)

def topology() -> Topology:
    t = Topology("orders")
    source = PostgresQueue("orders", max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)
    t.stream("lines", source).map(number, "line", schema="n bigint").into(PostgresSink("numbers"))
    return t
"""


class Run:
    """A topology in a database of its own, its driver in a child process, and an operator."""

    def __init__(self, database: Database, command: CommandLine) -> None:
        self.database = database
        self.command = command

    @contextmanager
    def driver(self) -> Generator[subprocess.Popen[str]]:
        words = ("run", "orders.py:topology", "--engine", "inline", "--interval", "0.02", "--json")
        with subprocess.Popen(
            [sys.executable, "-m", "stormproof", *words],
            env={**os.environ, "STORMPROOF_LOG_LEVEL": "warning"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as child:
            try:
                yield child
            finally:
                child.kill()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def until_dead(self, number: int) -> None:
        query = "select count(*)::int from stormproof.dead_letter where disposal is null"
        until(lambda: self.rows(query) == [(number,)], f"{number} messages are not dead letters")

    def numbers(self) -> list[int]:
        return [number for (number,) in self.rows("select n from numbers order by n")]


@pytest.fixture
def run(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    prepared_database(database)
    return Run(database, command_line_in(tmp_path, database, "orders.py", FILE, monkeypatch, capsys))


@contextmanager
def dead(run: Run, *lines: str) -> Generator[None]:
    """These lines are dead letters, since a cause that is repaired by now; the driver runs."""
    Path("broken").touch()
    put(run.database, NAME, [line.encode() for line in lines])
    with run.driver():
        run.until_dead(len(lines))
        Path("broken").unlink()
        yield


def test_a_canary_hands_everything_out_once_the_cause_is_repaired(run: Run) -> None:
    with dead(run, *map(str, range(10))):
        counted = run.command("dead-letters", "requeue", NAME, "--all", "--dry-run")
        assert len(counted["would_requeue"]) == 10
        run.until_dead(10)
        done = run.command(
            "dead-letters", "requeue", NAME, "--all", "--canary", "2", "--by", "ann", "--why", "repaired"
        )
        assert (done["end"], [wave["passed"] for wave in done["waves"]], done["left"]) == ("done", [2, 4, 4], [])
    assert run.numbers() == list(range(10))
    assert run.rows("select distinct disposed_by, disposed_why from stormproof.dead_letter order by 2") == [
        ("ann", f"repaired (canary, wave {wave}: {size})") for wave, size in ((1, 2), (2, 4), (3, 4))
    ]
    assert run.command("audit", "verify", NAME)["violations"] == []


def test_a_canary_stops_at_the_first_wave_with_too_many_failures(run: Run) -> None:
    with dead(run, "1", "poison", "2", "3", "4", "5"):
        done = run.command("dead-letters", "requeue", NAME, "--all", "--canary", "2", "--by", "ann", status=1)
        assert (done["end"], done["waves"][0]["failed"], len(done["left"])) == ("failures", 1, 4)
        run.until_dead(5)
        done = run.command("dead-letters", "requeue", NAME, "--all", "--canary", "1", "--max-failures", "0.5")
        assert (done["end"], len(done["failed"]), done["left"]) == ("done", 1, [])
    assert run.numbers() == [1, 2, 3, 4, 5]


def test_a_canary_without_a_driver_hands_nothing_out(run: Run) -> None:
    with dead(run, "1", "2"):
        run.command("pause", NAME, "--wait", "30")
        refused = run.command("dead-letters", "requeue", NAME, "--all", "--canary", "1", status=2)
        assert "'orders' is paused" in refused["error"]["message"]
    refused = run.command("dead-letters", "requeue", NAME, "--all", "--canary", "1", status=2)
    assert "no driver of 'orders' runs" in refused["error"]["message"]
    run.until_dead(2)
    refused = run.command("dead-letters", "requeue", NAME, "--all", "--max-failures", "0.1", status=2)
    assert "belong to --canary" in refused["error"]["message"]


def test_a_canary_of_rejects_counts_those_that_are_rejected_again(run: Run) -> None:
    with run.driver():
        put(run.database, NAME, [b"0"])
        until(lambda: run.rows("select to_regclass('numbers') is not null") == [(True,)], "there is no table")
        until(lambda: run.numbers() == [0], "the first message is not there")
        run.rows("alter table numbers add constraint small check (n < 3) not valid")
        put(run.database, NAME, [str(number).encode() for number in range(3, 9)])
        until(lambda: run.rows("select count(*)::int from stormproof.reject") == [(6,)], "nothing is rejected")
        run.rows("alter table numbers drop constraint small")
        run.rows("alter table numbers add constraint small check (n < 7) not valid")
        done = run.command("rejects", "retry", NAME, "--all", "--canary", "2", "--by", "ann", status=1)
        assert (done["end"], [(w["passed"], w["failed"]) for w in done["waves"]]) == ("failures", [(2, 0), (2, 2)])
        assert done["left"] == []
    assert run.numbers() == [0, 3, 4, 5, 6]
    assert run.command("audit", "verify", NAME)["violations"] == []
