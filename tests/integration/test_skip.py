"""A batch that a sink refuses for good: retried after a repair, or given up at that sink, on record."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace

import pytest
from support.contents import content
from support.crashes import FENCED, KILLED, ended, paused_driver, resume, run_driver
from support.operated import Operated
from support.topologies import SinkMode, expected, messages, table_of

from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.core.base.message import Guarantee

pytestmark = pytest.mark.postgres

NAME = "skipping"
REFUSING = SinkMode.POSTGRES_APPEND
TABLE = table_of(REFUSING, NAME)


@pytest.fixture(autouse=True)
def every_refused_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")


def held(operated: Operated, mode: SinkMode) -> Counter[str]:
    return content(mode, NAME, operated.cell.folder, operated.cell.database)


def blocked(operated: Operated) -> None:
    """Txid 1 is prepared, and one sink refuses a row of it, for good."""
    operated.put(*messages(9))
    assert run_driver(operated.cell, "prepare.after=kill") == KILLED
    operated.sql(f"alter table {TABLE} add constraint no_m1 check (word <> 'm1')")
    with pytest.raises(SinkRefused, match=rf"no_m1.*stormproof retry {NAME} 1.*ledger skip {NAME} 1 {REFUSING}"):
        operated.run()


def first_message(operated: Operated) -> str:
    """A message of txid 1, which succeeded at once: nothing is on record of it but its batch."""
    return str(operated.command("queue", "peek", NAME, "-n", "1")["messages"][0]["id"])


def test_a_skipped_sink_goes_on_without_the_batch_and_the_others_have_it(operated: Operated) -> None:
    blocked(operated)
    with pytest.raises(SinkRefused, match=rf"ledger skip {NAME} 1"):
        operated.run()  # it stays blocked until somebody decides
    (reason,) = [txn["reason"] for txn in operated.command("status", NAME, status=1)["topologies"][0]["unresolved"]]
    assert reason.count(f"sink '{REFUSING}'") == 1, reason
    wrong = operated.command("ledger", "skip", NAME, "1", SinkMode.DELTA_APPEND, status=2)
    assert "holds it by its own record" in wrong["error"]["message"]
    assert "writes nothing" in operated.command("ledger", "skip", NAME, "1", "x", status=2)["error"]["message"]
    report = operated.command("ledger", "skip", NAME, "1", REFUSING, "--by", "Ada", "--why", "m1 is wrong")
    rejected = Counter(
        json.loads(text)["word"] for (text,) in operated.sql("select input from stormproof.event where kind = 'reject'")
    )
    assert report["rows"] == report["listed"] == rejected.total() > 0
    assert report["kept_out_from"] is None  # a Postgres table: a transaction that ended cannot arrive late
    assert rejected["m1"]
    assert "skipped already" in operated.command("ledger", "skip", NAME, "1", REFUSING, status=2)["error"]["message"]
    operated.run()
    should = expected(messages(9))
    assert held(operated, REFUSING) == should - rejected
    for mode in set(SinkMode) - {REFUSING}:
        assert held(operated, mode) == should, mode
    assert operated.sql("select count(*) from stormproof.pending_slice") == [(0,)]  # its messages are confirmed
    told = operated.command("audit", "message", NAME, first_message(operated))
    assert {name: told["end"][name] for name in ("kind", "txid", "by", "why")} == {
        "kind": "skipped",
        "txid": 1,
        "by": "Ada",
        "why": "m1 is wrong",
    }
    (opening,) = told["openings"]
    assert [(one["sink"], one["rows"], one["by"]) for one in opening["skipped"]] == [(REFUSING, report["rows"], "Ada")]
    assert {one["sink"] for one in opening["held"]} == set(SinkMode) - {REFUSING}
    assert [(one["action"], one["sink"], one["by"]) for one in told["operator"]] == [("skip", REFUSING, "Ada")]
    text = operated.text("audit", "message", NAME, first_message(operated))
    assert f"the batch's {report['rows']} rows there were given up by Ada: m1 is wrong" in text
    (letter,) = operated.command("audit", "dead-letters", NAME, "--what", "skip")["rows"]
    assert {name: letter[name] for name in ("what", "message", "sink", "txid", "rows", "state", "decided_by")} == {
        "what": "skip",
        "message": None,
        "sink": REFUSING,
        "txid": 1,
        "rows": report["rows"],
        "state": "dropped",
        "decided_by": "Ada",
    }
    verified = operated.verify()
    (notice,) = [n for n in verified["notices"] if n["kind"] == "skipped"]
    assert f"{report['rows']} rows are rejects, skipped by Ada: m1 is wrong" in notice["text"]
    assert (notice["txid"], notice["sink"]) == (1, REFUSING)
    operated.put(b"more words")
    operated.run()
    operated.verify()
    (last,) = [one["id"] for one in operated.command("queue", "peek", NAME)["messages"]][-1:]
    assert operated.command("audit", "message", NAME, last)["end"]["kind"] == "committed"
    assert "m1" in operated.text("audit", "txn", NAME, "1")


def test_messages_of_a_batch_whose_prepared_files_are_gone_are_run_again_for_that_sink(operated: Operated) -> None:
    """As where a rule of an object store removed them."""
    operated.put(*messages(9))
    assert run_driver(operated.cell, "prepare.after=kill") == KILLED
    ((files,),) = operated.sql(f"select files from stormproof.txn_sink where txid = 1 and sink = '{REFUSING}'")
    for file in files:
        (found,) = operated.cell.folder.rglob(os.path.basename(file["path"]))
        found.unlink()
    with pytest.raises(SinkRefused, match=rf"ledger skip {NAME} 1 {REFUSING}"):
        operated.run()
    refused = operated.command("ledger", "skip", NAME, "1", REFUSING, "--rows", "--messages", status=2)
    assert "give --rows or --messages" in refused["error"]["message"]
    assert operated.command("ledger", "skip", NAME, "1", REFUSING, "--messages", "--by", "Ada")["unreadable"]
    operated.run()
    assert held(operated, REFUSING) < expected(messages(9))
    rejected = {one["id"] for one in operated.command("dead-letters", "list", NAME)["dead_letters"]}
    operated.verify()
    assert rejected
    operated.command("dead-letters", "requeue", NAME, *sorted(rejected), "--why", "the files are gone")
    operated.run()
    for mode in SinkMode:
        assert held(operated, mode) == expected(messages(9)), mode
    operated.verify()


def test_a_retry_after_the_repair_loses_nothing(operated: Operated) -> None:
    blocked(operated)
    operated.sql(f"alter table {TABLE} drop constraint no_m1")
    operated.command("retry", NAME, "1", "--why", "constraint dropped")
    operated.run()
    for mode in SinkMode:
        assert held(operated, mode) == expected(messages(9)), mode
    assert not operated.verify()["notices"]


def test_batches_that_were_prepared_behind_a_skipped_one_follow_what_it_would_have_followed(operated: Operated) -> None:
    blocked(operated)
    operated.sql(
        "insert into stormproof.txn_sink select incarnation, 2, sink, 1, rows, bytes, digest, files from"
        f" stormproof.txn_sink where txid = 1 and sink = '{REFUSING}'"
    )
    operated.command("ledger", "skip", NAME, "1", REFUSING)
    assert operated.sql(f"select previous from stormproof.txn_sink where txid = 2 and sink = '{REFUSING}'") == [(None,)]


def test_a_prepared_batch_is_skipped_only_while_no_driver_can_be_committing_it(operated: Operated) -> None:
    operated.put(*messages(9))
    with paused_driver(operated.cell, "prepare.after") as driver:
        refused = operated.command("ledger", "skip", NAME, "1", REFUSING, status=2)
        assert "may be committing it" in refused["error"]["message"]
        driver.kill()
        driver.join()
    operated.command("ledger", "skip", NAME, "1", REFUSING)
    operated.run()
    operated.verify()


def test_a_prepared_batch_is_skipped_right_after_its_run_raised_in_a_process_that_lives_on(operated: Operated) -> None:
    operated.put(*messages(9))
    with pytest.raises(FailpointError), armed("commit.before_sink=error"):
        operated.run()
    (found,) = operated.command("status")["topologies"]
    assert (found["driver"], found["unresolved"][0]["state"], found["in_flight"]) == ("stopped", "prepared", 0)
    operated.command("ledger", "skip", NAME, "1", REFUSING)
    operated.run()
    operated.verify()


def test_control_a_skip_that_nobody_decided_is_a_violation(operated: Operated) -> None:
    blocked(operated)
    operated.sql(f"update stormproof.txn_sink set outcome = 'skipped' where txid = 1 and sink = '{REFUSING}'")
    assert "state" in operated.kinds("violations", operated.verify(status=1))


@pytest.mark.parametrize("then", ["prepare.after", "open.after"])
def test_a_driver_that_wakes_behind_its_successors_check_is_taken_in(operated: Operated, then: str) -> None:
    """At-least-once, it stands still before it puts its log entry, and its successor opens or prepares the next batch."""
    cell = replace(operated.cell, mode=SinkMode.DELTA_APPEND)
    weaker = replace(cell, guarantee=Guarantee.AT_LEAST_ONCE)
    operated.put(*messages(3))
    with paused_driver(weaker, "delta.after_check") as zombie, paused_driver(cell, then) as successor:
        resume(zombie)
        assert ended(zombie, "the zombie") == FENCED
        resume(successor)
        assert ended(successor, "the successor") == 0
    found = content(SinkMode.DELTA_APPEND, NAME, cell.folder, cell.database)
    assert not expected(messages(3)) - found
    report = operated.verify()
    assert "duplicate_possible" in operated.kinds("notices", report)  # of the weaker batch alone
    assert operated.sql("select txid, sink from stormproof.event where kind = 'late_commit'") == [(1, "delta-append")]
    operated.put(b"more words")
    operated.run(None)


def test_staging_files_of_a_batch_that_was_killed_behind_its_commit_are_swept(operated: Operated) -> None:
    cell = replace(operated.cell, mode=SinkMode.POSTGRES_FOLD)
    operated.put(*messages(3))
    assert run_driver(cell, "finish.after=kill") == KILLED
    assert list(cell.folder.rglob("stormproof-*.parquet"))
    assert run_driver(cell) == 0
    assert not list(cell.folder.rglob("stormproof-*.parquet"))


def test_status_says_what_the_last_recovery_did(operated: Operated) -> None:
    operated.put(*messages(3))
    assert run_driver(operated.cell, "commit.after_sink=kill") == KILLED
    operated.run()
    (found,) = operated.command("status")["topologies"]
    did = found["recovered"]["did"]
    assert (found["recovered"]["epoch"], did["rolled_forward"], did["suppressed"]) == (2, [1], [[1, "delta-append"]])
    assert did["took_over_from"]
    assert "committed txid 1; suppressed a duplicate of txid 1 at delta-append; took over from" in operated.text(
        "status"
    )
