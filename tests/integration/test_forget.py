"""`stormproof forget`: the ledger is as if the topology had never run, its tables stay, and what stays is said."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final, TypeAlias

import pytest
from support.crashes import FENCED, KILLED, ended, paused_driver, resume, run_driver
from support.databases import at
from support.once_runs import run_keys
from support.operated import Operated
from support.streams import ArrowFrames, Form, Opener, StreamCell, first_column, handout, postgres_rows
from support.topologies import POISON, SinkMode, source_of, table_of, topology
from support.untouched import everything, rows_that_name
from support.web import READER, client, page_of

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology
from stormproof.core.base.errors import PositionMismatch
from stormproof.core.pending.tables import metadata as pending
from stormproof.core.source.files.entries import metadata as files
from stormproof.topology import StreamOutcome, StreamResult
from stormproof.trident.cli import app as _loads_every_table
from stormproof.trident.ledger.tables import metadata as ledger
from stormproof.trident.web.people import WebOptions

assert _loads_every_table
pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.4)]

Ran: TypeAlias = Callable[[], None]
NAME: Final = "forgotten-one"
RECORD: Final = "stormproof.forgotten"
APPENDED: Final = table_of(SinkMode.POSTGRES_APPEND, NAME)
OF_NO_TOPOLOGY: Final = {"forgotten"}
"""Tables of the ledger in which a topology has no row."""

OTHERWISE: Final = """
insert into stormproof.confirmation select 'digest', incarnation, 'pause', 'ann', now(), 'click' from it;
insert into stormproof.handed_in (incarnation, number, key, txid, taken_at) select incarnation, 1, 'a day', 1, now() from it;
insert into stormproof.prune select incarnation, 0, now(), 'ann', now(), '{}' from it;
insert into stormproof.pending_lapse (subscription, owner, epoch) select id, 'o', 1 from read;
insert into stormproof.pending_message (subscription, number, stable_id, digest) select id, 1, 'one', '' from read;
insert into stormproof.pending_retry
    select id, 9, 9, '', 1, 1, now(), 'error', '[]' from read on conflict do nothing;
insert into stormproof.handed_in (incarnation, number, key, query, batch, taken_at)
    select incarnation, 2, 'q:0', 'q', 0, now() from it;
insert into stormproof.heartbeat
    select incarnation, 1, now() - interval '1 day', 'running', 0 from it on conflict do nothing;
insert into stormproof.file_entry (source, subscription, number, path, first_id, rows, size_bytes, modified_ns,
    fingerprint, marks, digests, digested)
    select 'files', incarnation || ':spout', 1, 'a', 1, 1, 1, 1, '', '', '', '{}' from it
"""
"""What topologies of other kinds leave: jobs, streams, brokers, files, several spouts, a page's forms."""


def declared() -> set[str]:
    """Every table of the ledger and of the pending store that is declared anywhere."""
    tables = {table.name for part in (ledger, pending, files) for table in part.sorted_tables}
    return tables - OF_NO_TOPOLOGY


def held(operated: Operated) -> dict[str, object]:
    """Every row of the ledger's schema, with the transaction that wrote it."""
    found = everything(operated.cell.folder / "none", operated.cell.database)
    return {name: rows for name, rows in found.items() if name.startswith("stormproof.") and RECORD not in name}


def life_of(operated: Operated, name: str = NAME) -> str:
    ((life,),) = operated.sql(f"select incarnation from stormproof.topology where name = '{name}'")
    return str(life)


def forget(operated: Operated, *more: str, status: int = 0) -> dict[str, Any]:
    report: dict[str, Any] = operated.command("forget", NAME, "--by", "ann", *more, status=status)
    return report


def words(operated: Operated) -> Counter[str]:
    return Counter(word for (word,) in operated.sql(f"select word from {APPENDED}"))


@pytest.fixture
def ran(operated: Operated) -> Ran:
    """Runs it: four sinks, with rows and a reject, a dead letter, and a batch that a killed driver had prepared."""

    def run() -> None:
        operated.put(b"a b", POISON, b"c")
        operated.run()
        operated.sql(f"alter table {APPENDED} add check (word <> 'refused')")
        operated.put(b"d", b"refused")
        operated.run(rejects_max_share=1.0)
        operated.command("pause", NAME)
        operated.command("resume", NAME)
        operated.verify()
        operated.put(b"never written")
        assert run_driver(operated.cell, "prepare.after=kill") == KILLED

    return run


def with_every_kind_of_row(operated: Operated) -> None:
    """Add what this topology's kind has no row of."""
    with at(operated.cell.database) as connection:
        life = life_of(operated)
        for view, text in (
            ("it", f"select * from stormproof.topology where incarnation = '{life}'"),
            ("read", f"select * from stormproof.pending_subscription where subscription = '{life}'"),
        ):
            connection.execute(f"create temporary view {view} as {text}".encode())
        for statement in OTHERWISE.split(";"):
            connection.execute(statement.encode())


def test_nothing_of_it_is_left_in_any_table_of_the_ledger(operated: Operated, ran: Ran) -> None:
    neighbour = Topology("neighbour")
    neighbour.stream("lines", source_of(NAME, operated.cell.database)).into(PostgresSink("beside", name="beside"))
    operated.put(b"for both")
    operated.run(neighbour)
    before = held(operated)
    ran()
    with_every_kind_of_row(operated)
    life, now = life_of(operated), held(operated)
    same = {table for table in declared() if now[f"stormproof.{table}: rows"] == before[f"stormproof.{table}: rows"]}
    assert not same, "a table in which this topology has no row: add one to OTHERWISE"

    would = forget(operated, "--dry-run")
    assert held(operated) == now
    done = forget(operated, "--why", "a trial")
    assert done == {**would, "dry_run": False, "why": "a trial"}
    assert set(done["removed"]) == declared()
    assert held(operated) == before
    assert {table for table in rows_that_name(operated.cell.database, life) if "stormproof." in table} == {RECORD}
    assert operated.sql("select name, life, by, why from stormproof.forgotten") == [(NAME, life, "ann", "a trial")]
    operated.command("audit", "verify", "neighbour")


def test_what_it_leaves_is_said(operated: Operated, ran: Ran) -> None:
    ran()
    life, last = life_of(operated), operated.sql("select max(txid) from stormproof.txn")[0][0]
    text = operated.text("forget", NAME, "--by", "ann")
    assert text.startswith(f"{NAME} ({life}) is forgotten: ")
    said = " ".join(text.split())
    for part in (
        f"table {APPENDED} at ",
        "(sink postgres-append) keeps its rows, up to txid 3, and its record of them",
        f"txid {last} of 1 message is prepared, and is not finished any more; it may be missing at",
        "1 dead letter, 1 reject",
        f"queue {NAME} stays, and keeps nothing back for it",
        f"stormproof ledger adopt {NAME} {life}",
    ):
        assert part in said, (part, said)
    assert words(operated) == Counter("abcd"), "its tables stay"


def test_status_metrics_audit_page_and_queue_forget_it(operated: Operated, ran: Ran) -> None:
    ran()
    with closing(PostgresQueue(NAME, partition_messages=2, database=operated.cell.database)) as queue:
        assert set(queue.stats().subscriptions) == {life_of(operated)}
        forget(operated)
        assert operated.command("status")["topologies"] == []
        assert NAME not in operated.text("metrics")
        for command in (("status",), ("audit", "verify"), ("audit", "actions"), ("dead-letters", "list"), ("metrics",)):
            error = operated.command(*command, NAME, status=2)["error"]["message"]
            assert "(it was forgotten here by ann on " in error, command
        app = page_of(operated.cell.database, WebOptions(lambda _: READER))
        with closing(app):
            assert NAME not in client(app).get("/").text
        assert queue.stats().subscriptions == {}
        queue.subscribe("next", 1)
        assert queue.stats().subscriptions["next"].ready == 6


def test_a_topology_of_its_name_starts_from_the_beginning(operated: Operated, ran: Ran) -> None:
    ran()
    life = life_of(operated)
    forget(operated)
    with pytest.raises(PositionMismatch, match=f"which was forgotten here by ann on .*ledger adopt {NAME} {life}"):
        operated.run()
    cell = operated.cell
    rehearsed = topology(cell.name, cell.mode, cell.folder, cell.database, cell.queue).dry_run()
    told = [sink.table.why for sink in rehearsed.sinks]
    assert all("which was forgotten here by ann on " in why for why in told if "holds transactions" in why), told
    assert any("which was forgotten here by ann on " in why for why in told)
    assert words(operated) == Counter("abcd")
    operated.command("ledger", "adopt", NAME, life, "--by", "ann")
    operated.run(rejects_max_share=1.0)
    assert life_of(operated) != life
    assert words(operated) == Counter({**dict.fromkeys("abcd", 2), "never": 1, "written": 1}), "as was said"
    operated.verify()
    letters = operated.command("dead-letters", "list", NAME)["dead_letters"]
    assert [one["sink"] for one in letters] == [None, "postgres-append"]


def test_a_topology_of_another_name_takes_its_table_over_and_its_queue(operated: Operated, ran: Ran) -> None:
    ran()
    life = life_of(operated)
    forget(operated)
    other = Topology("other")
    lines = other.stream("lines", source_of(NAME, operated.cell.database))
    lines.map(str, "line", schema="word string").into(PostgresSink(APPENDED))
    with pytest.raises(PositionMismatch, match=f"ledger adopt other {NAME}/{life}"):
        operated.run(other)
    operated.command("ledger", "adopt", "other", f"{NAME}/{life}", "--by", "ann")
    operated.run(other, rejects_max_share=1.0)
    assert words(operated)["never written"] == 1
    operated.command("audit", "verify", "other")


def test_tables_that_were_dropped_are_made_again(operated: Operated, ran: Ran) -> None:
    ran()
    forget(operated)
    for mode in SinkMode:
        if mode.store == "postgres":
            operated.sql(f"drop table {table_of(mode, NAME)}")
    shutil.rmtree(operated.cell.folder / "lake")
    operated.run()
    assert words(operated) == Counter(["a", "b", "c", "d", "refused", "never", "written"])
    operated.verify()


def test_a_table_that_it_never_wrote_to_is_free_for_another(operated: Operated) -> None:
    def made(name: str) -> Topology:
        t = Topology(name)
        lines = t.stream("lines", source_of(NAME, operated.cell.database))
        lines.into(PostgresSink("unused", name="s"), DeltaSink(str(operated.cell.folder / "unused"), name="d"))
        return t

    operated.run(made(NAME))
    report = forget(operated)
    assert [line for line in report["kept"] if line.endswith("is free for another topology")] == [
        line for line in report["kept"] if line.startswith("table ")
    ]
    assert operated.sql("select count(*) from stormproof.topology_sink") == [(0,)]
    operated.put(b"a")
    operated.run(made("other"))
    assert operated.sql("select line from unused") == [("a",)]
    operated.command("audit", "verify", "other")


def test_it_is_refused_while_a_driver_lives(operated: Operated) -> None:
    operated.put(b"a")
    with paused_driver(operated.cell, "prepare.after"):
        now = held(operated)
        error = forget(operated, status=2)["error"]["message"]
        assert f"is running: nothing was forgotten. Stop it first: stormproof stop {NAME}" in error
        assert held(operated) == now
    operated.sql("update stormproof.topology set driver_host = 'elsewhere'")
    operated.sql("update stormproof.heartbeat set at = now() - interval '9 minutes'")
    assert "may be running, on another host" in forget(operated, status=2)["error"]["message"]
    operated.sql("update stormproof.heartbeat set at = now() - interval '11 minutes'")
    assert forget(operated)["name"] == NAME


def test_a_driver_that_lives_unseen_is_fenced(operated: Operated) -> None:
    operated.put(b"a", b"b")
    with paused_driver(operated.cell, "prepare.after") as driver:
        operated.sql("update stormproof.topology set driver_host = 'elsewhere'")
        operated.sql("update stormproof.heartbeat set at = now() - interval '11 minutes'")
        forget(operated)
        resume(driver)
        assert ended(driver, NAME) == FENCED
    assert operated.sql("select count(*) from stormproof.topology") == [(0,)]


def test_it_may_be_killed_at_any_statement_and_repeated(operated: Operated, ran: Ran) -> None:
    ran()
    with_every_kind_of_row(operated)
    life, now = life_of(operated), held(operated)
    operated.sql(
        "create function killed() returns trigger language plpgsql as"
        " $$ begin perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(9); return null; end $$"
    )
    for table in sorted(declared() | OF_NO_TOPOLOGY):
        operated.sql(f"create trigger killed before insert or delete on stormproof.{table} execute function killed()")
        error = forget(operated, status=1)["error"]["message"]
        operated.sql(f"drop trigger killed on stormproof.{table}")
        assert held(operated) == now, (table, error)
    operated.sql("drop function killed")
    assert set(forget(operated)["removed"]) == declared()
    assert (
        rows_that_name(operated.cell.database, life).keys() & {f"stormproof.{table}" for table in declared()} == set()
    )


@pytest.mark.parametrize("form", list(Form))
def test_a_streaming_query_goes_on_by_its_checkpoint_once_that_is_adopted(
    operated: Operated, opened: Opener, form: Form
) -> None:
    cell = StreamCell(NAME, form, operated.cell.folder, operated.cell.database)

    query = "0f7e2a1c-5a0d-4f5e-9d4b-5d1f6c2e8a90"

    def feed(batch: int, value: str) -> None:
        function = opened(cell, ArrowFrames(), list[StreamResult]().append)
        function(handout(query, value), batch)
        function.close()

    feed(0, "a")
    for batch, value in ((1, "b"), (2, "c")):
        assert f"streaming query {query}: its checkpoint stays" in "\n".join(forget(operated)["kept"])
        with pytest.raises(PositionMismatch, match="which was forgotten here by ann on ") as refused:
            feed(batch, value)
        lives = refused.value.details["unknown"]
        assert isinstance(lives, list)
        assert len(lives) == batch
        for life in lives:
            operated.command("ledger", "adopt", NAME, str(life), "--by", "ann")
        feed(batch, value)
    assert first_column(postgres_rows(cell, "rows")) == Counter("abc")
    operated.verify()


def test_keys_of_jobs_are_forgotten_with_their_name(operated: Operated) -> None:
    cell = StreamCell(NAME, Form.SINKS, operated.cell.folder, operated.cell.database)
    assert [result.outcome for result in run_keys(cell, ["a", "b", "a"])][2] is StreamOutcome.SUPPRESSED
    life, kept = life_of(operated), forget(operated)["kept"]
    assert "2 keys of jobs: a job of such a key would be written again" in kept
    with pytest.raises(PositionMismatch, match=f"which was forgotten here by ann on .*ledger adopt {NAME} {life}"):
        run_keys(cell, ["a"])
    operated.command("ledger", "adopt", NAME, life, "--by", "ann")
    assert [result.outcome for result in run_keys(cell, ["a"])] == [StreamOutcome.COMMITTED]
    operated.verify()
