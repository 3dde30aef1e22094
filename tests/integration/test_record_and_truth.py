"""What is said of a sink while a batch is blocked or its driver is dead: what its own store says, by one source for all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from starlette.testclient import TestClient
from support.crashes import KILLED, paused_driver, run_driver
from support.operated import Operated
from support.topologies import SinkMode, messages, table_of
from support.web import OPERATOR, page_of, signed_in

from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.message import Guarantee
from stormproof.trident.audit.inspect import Holdings
from stormproof.trident.cli.logs import RunProgress
from stormproof.trident.terms.observers import BatchResult, RunStatistics

pytestmark = pytest.mark.postgres

NAME = "truth"
HAVE = (SinkMode.DELTA_APPEND, SinkMode.POSTGRES_APPEND)
LACK = (SinkMode.DELTA_FOLD, SinkMode.POSTGRES_FOLD)
DELTA_TABLE = table_of(SinkMode.DELTA_APPEND, NAME)
BETWEEN_SINKS = "commit.after_sink=kill@2"
TRUTH = dict.fromkeys(HAVE, "has_it") | dict.fromkeys(LACK, "has_it_not")


@pytest.fixture
def page(operated: Operated) -> Iterator[TestClient]:
    app = page_of(operated.cell.database)
    yield signed_in(app, OPERATOR)
    app.close()


def commit_times(operated: Operated) -> dict[str, datetime]:
    """When the sinks that have txid 1 got it, read from their stores."""
    entries = [
        json.loads(line)["commitInfo"]
        for path in sorted(operated.cell.folder.glob(f"lake/{DELTA_TABLE}/_delta_log/*.json"))
        for line in path.read_text().splitlines()
        if "commitInfo" in json.loads(line)
    ]
    (ms,) = [entry["timestamp"] for entry in entries if entry.get("stormproof.txid") == "1"]
    ((row,),) = operated.sql(
        f"select committed_at from stormproof_sink.evidence where sink = '{SinkMode.POSTGRES_APPEND}' and txid = 1"
    )
    return {
        SinkMode.DELTA_APPEND: datetime.fromtimestamp(ms / 1000, UTC),
        SinkMode.POSTGRES_APPEND: row.astimezone(UTC),
    }


def said_by_each(operated: Operated, message: str) -> dict[str, dict[str, str]]:
    """Whether each sink has txid 1, as each command says it."""
    txn = operated.command("audit", "txn", NAME, "1")
    (status,) = operated.command("status", NAME, status=1)["topologies"]
    (unresolved,) = status["unresolved"]
    (opening,) = operated.command("audit", "message", NAME, message)["openings"]
    behind = operated.command("audit", "behind", NAME, status=int(txn["state"] == "blocked"))["rows"]
    assert {one["sink"]: one["held_txid"] for one in behind} == {
        one["sink"]: one["last_txid"] for one in status["sinks"]
    }
    return {
        "audit txn": {one["sink"]: one["has"] for one in txn["sinks"]},
        "status": {one["sink"]: one["has"] for one in unresolved["sinks"]},
        "audit message": {one["sink"]: "has_it" for one in opening["held"]}
        | {one["sink"]: one["has"] for one in opening["not_held"]},
        "audit behind": {one["sink"]: one["has"] for one in behind},
    }


def first_message(operated: Operated) -> str:
    return str(operated.command("queue", "peek", NAME, "-n", "1")["messages"][0]["id"])


@pytest.fixture
def died(operated: Operated) -> Operated:
    """A driver was killed when two of four sinks had adopted txid 1."""
    operated.put(*messages(9))
    assert run_driver(operated.cell, BETWEEN_SINKS) == KILLED
    return operated


def test_of_a_dead_drivers_batch_each_command_and_the_page_say_which_sinks_have_it_and_since_when(
    died: Operated, page: TestClient
) -> None:
    times, message = commit_times(died), first_message(died)
    assert said_by_each(died, message) == dict.fromkeys(("audit txn", "status", "audit message", "audit behind"), TRUTH)
    since = {
        one["sink"]: datetime.fromisoformat(one["committed_at"])
        for one in died.command("audit", "txn", NAME, "1")["sinks"]
        if one["committed_at"]
    }
    assert since == times
    rows = {one["sink"]: one for one in died.command("audit", "behind", NAME)["rows"]}
    assert {sink: (rows[sink]["held_txid"], rows[sink]["behind_txids"]) for sink in rows} == {
        **dict.fromkeys(HAVE, (1, 0)),
        **dict.fromkeys(LACK, (None, 1)),
    }
    batch, topology, told = (
        page.get(f"/{path}", params={"topology": NAME, **more}).text
        for path, more in (("batch", {"txid": 1}), ("topology", {}), ("message", {"id": message}))
    )
    for text in (batch, topology, told):
        assert "not yet" not in text
        assert text.count(">has it not<") == 2
    assert batch.count(">has it<") == topology.count(">has it<") == 2
    assert told.count("held by ") == 2
    for command in (("status", NAME), ("audit", "txn", NAME, "1"), ("audit", "message", NAME, message)):
        text = died.text(*command, status=int(command[0] == "status"))
        assert "has it not" in text


def test_control_where_the_stores_are_not_read_another_thing_is_said(
    died: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Holdings, "_held", lambda *_: None)
    assert all(found != TRUTH for found in said_by_each(died, first_message(died)).values())


def test_what_the_next_run_records_is_the_time_of_each_sinks_commit(died: Operated) -> None:
    times = commit_times(died)
    died.run()
    sinks = {one["sink"]: one for one in died.command("audit", "txn", NAME, "1")["sinks"]}
    assert {sink: datetime.fromisoformat(sinks[sink]["committed_at"]) for sink in times} == times
    assert {one["has"] for one in sinks.values()} == {"has_it"}
    lacked = [datetime.fromisoformat(sinks[sink]["committed_at"]) for sink in LACK]
    assert min(lacked) > max(times.values())
    died.verify()


def test_a_dead_driver_is_dead_since_it_was_last_heard(died: Operated) -> None:
    ((heard,),) = died.sql("update stormproof.heartbeat set at = at - interval '1 hour' returning at")
    (status,) = died.command("status", NAME, status=1)["topologies"]
    assert datetime.fromisoformat(status["last_heard_at"]) == heard
    assert f"driver: dead since {heard.astimezone(UTC):%Y-%m-%d %H:%M:%S}" in died.text("status", NAME, status=1)
    assert f"last heard {heard.astimezone(UTC):%F %T} UTC" in status["problems"][0]["text"]


def test_a_sink_that_cannot_be_reached_was_not_asked_and_why_is_said(died: Operated) -> None:
    log = died.cell.folder / "lake" / DELTA_TABLE / "_delta_log"
    log.rename(log.with_name("gone"))
    for command, found in said_by_each(died, first_message(died)).items():
        assert found == {**TRUTH, SinkMode.DELTA_APPEND: "not_asked"}, command
    (gone,) = [one for one in died.command("audit", "txn", NAME, "1")["sinks"] if one["sink"] == SinkMode.DELTA_APPEND]
    assert "delta-append" in gone["why"]
    assert gone["why"] in died.text("audit", "txn", NAME, "1")


def test_of_a_blocked_batch_the_sinks_before_the_one_that_refuses_have_it(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")
    operated.put(*messages(9))
    assert run_driver(operated.cell, "prepare.after=kill") == KILLED
    operated.sql(f"alter table {table_of(SinkMode.POSTGRES_FOLD, NAME)} add constraint no_m1 check (word <> 'm1')")
    with pytest.raises(SinkRefused, match="no_m1"):
        operated.run()
    truth = {sink.value: "has_it" for sink in SinkMode} | {SinkMode.POSTGRES_FOLD.value: "has_it_not"}
    for command, found in said_by_each(operated, first_message(operated)).items():
        assert found == truth, command
    rows = operated.command("audit", "behind", NAME, status=1)["rows"]
    assert [one["sink"] for one in rows if one["blocked_txid"] == 1] == [SinkMode.POSTGRES_FOLD]


def test_rejected_rows_are_not_counted_as_held(operated: Operated) -> None:
    sink = SinkMode.POSTGRES_APPEND
    operated.put(b"seed")
    operated.run()
    operated.sql(f"alter table {table_of(sink, NAME)} add constraint no_m1 check (word <> 'm1')")
    operated.put(*[f"m{number} x".encode() for number in range(4)])
    cell = replace(operated.cell, rejects_max_share=1.0)
    assert run_driver(cell, "commit.after_sink=kill@2") == KILLED
    (found,) = [one for one in operated.command("audit", "txn", NAME, "2")["sinks"] if one["sink"] == sink]
    assert (found["has"], found["rows"], found["rejected"]) == ("has_it", 8, 2)
    ids = [one["id"] for one in operated.command("queue", "peek", NAME, "-n", "9")["messages"]]
    for one in ids[-4:]:
        (opening,) = operated.command("audit", "message", NAME, one)["openings"]
        (told,) = [held for held in opening["not_held"] if held["sink"] == sink]
        assert told["has"] == "not_asked"
        assert "rejected" in told["why"]
    assert run_driver(cell) == 0
    (found,) = [one for one in operated.command("audit", "txn", NAME, "2")["sinks"] if one["sink"] == sink]
    assert (found["has"], found["rows"], found["rejected"]) == ("has_it", 8, 2)


def test_a_recovering_run_counts_what_it_committed(died: Operated) -> None:
    lines = list[BatchResult]()
    statistics = died.run(on_batch=lines.append)
    ended = Counter(died.sql("select txid from stormproof.txn where state = 'committed'"))
    assert {(one.txid,) for one in lines if one.state == "committed"} == ended.keys()
    ((committed, tuples),) = died.sql(
        "select sum(messages - failed - returned), sum(tuples) from stormproof.txn where state = 'committed'"
    )
    assert (statistics.messages, statistics.recoveries[0].rolled_forward) == (committed, (1,))
    assert statistics.tuples >= tuples
    progress = RunProgress(RunStatistics(NAME, "exactly-once", 1))
    for one in lines:
        progress = progress.after(one)
    assert (progress.done.messages, progress.done.batches) == (statistics.messages, statistics.batches)


def test_while_a_driver_commits_a_batch_no_store_is_asked(operated: Operated) -> None:
    operated.put(*messages(9))
    with paused_driver(operated.cell, "commit.after_sink=pause@2"):
        told = operated.command("audit", "txn", NAME, "1")["sinks"]
        assert {(one["has"], one["why"]) for one in told} == {("not_asked", "a driver is committing it")}
        long_ago = datetime.now(UTC) - timedelta(hours=1)
        operated.sql(f"update stormproof.heartbeat set at = '{long_ago.isoformat()}'")
        told = operated.command("audit", "txn", NAME, "1")["sinks"]  # it is silent: the stores say what they have
        assert {one["sink"]: one["has"] for one in told} == TRUTH


def test_of_a_batch_that_was_given_back_it_is_said_which_sinks_have_it_all_the_same(operated: Operated) -> None:
    cell = replace(operated.cell, guarantee=Guarantee.AT_LEAST_ONCE)
    operated.put(*messages(3))
    assert run_driver(cell, BETWEEN_SINKS) == KILLED
    assert run_driver(cell) == 0  # gives txid 1 back; its messages are in txid 2, too
    report = operated.command("audit", "txn", NAME, "1")
    assert report["state"] == "aborted"
    assert {one["sink"]: one["has"] for one in report["sinks"]} == TRUTH
