"""Canaries over a driver in a process of its own: dead letters and rejects are handed out again wave by wave."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.brokers import until
from support.command_line import command_line_in
from support.driven import FILE, NAME, Driven
from support.queues import prepared_database

from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres


@pytest.fixture
def run(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Driven:
    prepared_database(database)
    return Driven(database, command_line_in(tmp_path, database, "orders.py", FILE, monkeypatch, capsys))


@contextmanager
def dead(run: Driven, *lines: str) -> Generator[None]:
    """These lines are dead letters, since a cause that is repaired by now; the driver runs."""
    Path("broken").touch()
    run.put(*lines)
    with run.driver():
        run.until_dead(len(lines))
        Path("broken").unlink()
        yield


def test_a_canary_hands_everything_out_once_the_cause_is_repaired(run: Driven) -> None:
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


def test_a_canary_stops_at_the_first_wave_with_too_many_failures(run: Driven) -> None:
    with dead(run, "1", "poison", "2", "3", "4", "5"):
        done = run.command("dead-letters", "requeue", NAME, "--all", "--canary", "2", "--by", "ann", status=1)
        assert (done["end"], done["waves"][0]["failed"], len(done["left"])) == ("failures", 1, 4)
        run.until_dead(5)
        done = run.command("dead-letters", "requeue", NAME, "--all", "--canary", "1", "--max-failures", "0.5")
        assert (done["end"], len(done["failed"]), done["left"]) == ("done", 1, [])
    assert run.numbers() == [1, 2, 3, 4, 5]


def test_a_canary_without_a_driver_hands_nothing_out(run: Driven) -> None:
    with dead(run, "1", "2"):
        run.command("pause", NAME, "--wait", "30")
        refused = run.command("dead-letters", "requeue", NAME, "--all", "--canary", "1", status=2)
        assert "'orders' is paused" in refused["error"]["message"]
    refused = run.command("dead-letters", "requeue", NAME, "--all", "--canary", "1", status=2)
    assert "no driver of 'orders' runs" in refused["error"]["message"]
    run.until_dead(2)
    refused = run.command("dead-letters", "requeue", NAME, "--all", "--max-failures", "0.1", status=2)
    assert "belong to a canary" in refused["error"]["message"]


def test_a_canary_of_rejects_counts_those_that_are_rejected_again(run: Driven) -> None:
    with run.driver():
        run.put("0")
        until(lambda: run.rows("select to_regclass('numbers') is not null") == [(True,)], "there is no table")
        until(lambda: run.numbers() == [0], "the first message is not there")
        run.rows("alter table numbers add constraint small check (n < 3) not valid")
        run.put(*map(str, range(3, 9)))
        until(lambda: run.rows("select count(*)::int from stormproof.reject") == [(6,)], "nothing is rejected")
        run.rows("alter table numbers drop constraint small")
        run.rows("alter table numbers add constraint small check (n < 7) not valid")
        done = run.command("dead-letters", "requeue", NAME, "--all", "--canary", "2", "--by", "ann", status=1)
        assert (done["end"], [(w["passed"], w["failed"]) for w in done["waves"]]) == ("failures", [(2, 0), (2, 2)])
        assert done["left"] == []
    assert run.numbers() == [0, 3, 4, 5, 6]
    assert run.command("audit", "verify", NAME)["violations"] == []
