"""A topology that changes: what is taken by itself, what a person accepts, and by which fingerprint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.command_line import CommandLine, command_line_in
from support.crashes import Cell
from support.databases import at
from support.operated import Operated
from support.streams import ArrowFrames, Handout

from stormproof import DeltaSink, PostgresSink, Settings, exactly_once
from stormproof.core.postgres.database import Database
from stormproof.errors import PositionMismatch

pytestmark = pytest.mark.postgres
NAME = "jobs"

FILE = """
from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology

queue = PostgresQueue("orders", schema="line string", max_attempts=1)


def read(line: str) -> {returns}:
    number, _, event = line.partition(",")
    return {row}


topology = Topology("orders")
topology.stream("lines", queue).map(read, "line", schema="{schema}").into({sinks})
"""
POSTGRES = 'PostgresSink("orders"{more})'
BEFORE = {"returns": "int", "row": "int(number)", "schema": "number int"}
AFTER = {"returns": "tuple[int, str]", "row": "int(number), event", "schema": "number int, last_event string"}
ADDED = "column last_event string was added"


class Deployed:
    """The file of a topology, which is changed from one run to the next, and the command line beside it."""

    def __init__(self, folder: Path, database: Database, command: CommandLine) -> None:
        self.folder, self.database, self.command = folder, database, command

    def deploy(self, how: dict[str, str], sinks: str = POSTGRES, more: str = "") -> None:
        (self.folder / "orders.py").write_text(FILE.format(**how, sinks=sinks.replace("{more}", more)))

    def run(self, *options: str, status: int = 0) -> Any:
        return self.command("run", "orders.py:topology", "--engine", "inline", "--until-idle", *options, status=status)

    def refused(self, *options: str, status: int = 1) -> str:
        message: str = self.run(*options, status=status)["error"]["message"]
        return message

    def put(self, *lines: str) -> None:
        for line in lines:
            (self.folder / "lines.txt").write_text(f"{line}\n")
            self.command("queue", "put", "orders", "--lines", "lines.txt")

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with at(self.database) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def rows(self, table: str = "orders") -> list[tuple[Any, ...]]:
        return self.sql(f"select * from {table} order by 1")


@pytest.fixture
def deployed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Deployed:
    command = command_line_in(tmp_path, database, "orders.py", "", monkeypatch, capsys)
    return Deployed(tmp_path, database, command)


@pytest.fixture
def changed(deployed: Deployed) -> Deployed:
    """One batch by the old file; then the new one, whose rows have a column more, and the table has it, too."""
    deployed.deploy(BEFORE)
    deployed.run()
    deployed.put("1,paid")
    deployed.run()
    deployed.sql("alter table orders add column last_event text")
    deployed.deploy(AFTER)
    deployed.put("2,sent")
    return deployed


def fingerprint_in(text: str) -> str:
    found = re.search(r"--accept-change (\w+)", text)
    assert found is not None, text
    return found[1]


def test_dry_run_start_and_accept_change_show_one_fingerprint(changed: Deployed) -> None:
    told = changed.run("--dry-run", status=1)
    shown = fingerprint_in(" ".join(told["notes"]))
    assert ADDED in " ".join(told["notes"])
    assert fingerprint_in(changed.refused()) == shown
    changed.command("ledger", "accept-change", "orders", shown)
    assert changed.run()["messages"] == 1
    assert changed.rows() == [(1, None), (2, "sent")]


def test_what_a_dry_run_showed_is_accepted_by_the_run(changed: Deployed) -> None:
    shown = fingerprint_in(" ".join(changed.run("--dry-run", status=1)["notes"]))
    # Without the code at hand only what a refused start put on record can be accepted.
    message = changed.command("ledger", "accept-change", "orders", shown, status=2)["error"]["message"]
    assert f"--accept-change {shown}" in message
    assert changed.run("--accept-change", shown)["messages"] == 1
    changed.put("3,back")
    assert changed.run("--accept-change", shown)["messages"] == 1  # a deployment goes on with its arguments
    assert changed.sql("select action, message from stormproof.event where kind = 'operator'") == [
        ("accept_change", shown)
    ]


def test_a_fingerprint_that_was_never_shown_is_refused(changed: Deployed) -> None:
    message = changed.refused("--accept-change", "0123456789ab")
    assert "'0123456789ab' was accepted, which is not the fingerprint of this change" in message
    changed.deploy(BEFORE)
    assert "fingerprint of no change that was shown" in changed.refused("--accept-change", "0123456789ab", status=2)
    changed.command("ledger", "accept-change", "orders", "0123456789ab", status=2)
    assert changed.rows() == [(1, None)]


def test_an_accepted_change_is_not_accepted_once_more_after_the_way_back(changed: Deployed) -> None:
    shown = fingerprint_in(changed.refused())
    changed.command("ledger", "accept-change", "orders", shown)
    changed.run()
    changed.deploy(BEFORE)
    back = fingerprint_in(changed.refused())
    assert back != shown
    changed.put("3,back")
    changed.run("--accept-change", back)
    changed.deploy(AFTER)
    assert fingerprint_in(changed.refused()) == shown
    changed.put("4,again")
    changed.run("--accept-change", shown)
    assert changed.rows() == [(1, None), (2, "sent"), (3, None), (4, "again")]


def test_evolve_takes_an_added_column_and_a_wider_type_by_itself(deployed: Deployed) -> None:
    deployed.deploy(BEFORE, more=', schema_contract="evolve"')
    deployed.run()
    deployed.put("1,paid")
    deployed.run()
    deployed.deploy({**AFTER, "schema": "number long, last_event string"}, more=', schema_contract="evolve"')
    deployed.put(f"{2**40},sent")
    dry = deployed.run("--dry-run")
    assert f"sink 'postgres.orders': {ADDED}; column number was int, is bigint" in " ".join(dry["notes"])
    deployed.run()
    assert deployed.rows() == [(1, None), (2**40, "sent")]
    recorded = deployed.sql("select error from stormproof.event where kind = 'graph' and reason = 'sink_changed'")
    assert recorded == [
        (
            f"sink 'postgres.orders': {ADDED}; column number was int, is bigint, which its schema_contract='evolve' takes",
        )
    ]
    assert deployed.command("audit", "verify", "orders")["verdict"] == "clean"
    # A column that goes, a narrower type: not by itself.
    deployed.deploy(BEFORE, more=', schema_contract="evolve"')
    assert "column number was bigint, is int; column last_event string was removed" in deployed.refused()


def test_evolve_takes_an_added_column_in_delta_and_postgres_at_once(deployed: Deployed) -> None:
    sinks = 'DeltaSink("lake/orders", schema_contract="evolve"), PostgresSink("orders", schema_contract="evolve")'
    deployed.deploy(BEFORE, sinks)
    deployed.run()
    deployed.put("1,paid")
    deployed.run()
    deployed.deploy(AFTER, sinks)
    deployed.put("2,sent")
    deployed.run()
    assert deployed.rows() == [(1, None), (2, "sent")]
    assert deployed.command("audit", "verify", "orders")["verdict"] == "clean"


def frame(**columns: list[object]) -> Handout:
    table = pa.table(columns)
    return Handout("", lambda: table, table.schema)


def test_a_writer_that_is_open_takes_a_frame_with_another_column(operated: Operated, tmp_path: Path) -> None:
    cell: Cell = operated.cell
    sinks = (
        DeltaSink(tmp_path / "lake", name="delta", schema_contract="evolve"),
        PostgresSink("rows", name="postgres", database=cell.database, schema_contract="evolve"),
    )
    settings = Settings(
        database_url=cell.database.sqlalchemy_url.render_as_string(hide_password=False), home=tmp_path / "home"
    )
    with exactly_once(*sinks, name="jobs", settings=settings, frames=ArrowFrames()) as write:
        write.once(frame(n=[1]), "a")
        write.once(frame(n=[2], event=["sent"]), "b")
        assert operated.sql("select n, event from rows order by n") == [(1, None), (2, "sent")]
        with pytest.raises(PositionMismatch, match="column event string was removed"):
            write.once(frame(n=[3]), "c")
        write.once(frame(n=[3], event=["back"]), "c")  # and it goes on
    operated.command("audit", "verify", "jobs")


NAMES = """
from stormproof import PostgresQueue, PostgresSink, Topology

queue = PostgresQueue("orders", schema="{source}", max_attempts=1)


def {function}(number: int) -> int:
    return number


topology = Topology("{topology}")
topology.stream("{stream}", queue).map({function}, "number", schema="number int", name={step!r}).into(
    PostgresSink("orders", name={sink!r})
)
"""
NAMED = {
    "source": "number int",
    "function": "read",
    "topology": "orders",
    "stream": "lines",
    "step": "step",
    "sink": "pg",
}


def renamed(deployed: Deployed, **how: str | None) -> None:
    (deployed.folder / "orders.py").write_text(NAMES.format(**{**NAMED, **how}))


@pytest.fixture
def named(deployed: Deployed) -> Deployed:
    """A batch by the old names."""
    renamed(deployed)
    deployed.command("ledger", "migrate")
    deployed.put('{"number": 1}')
    deployed.run()
    assert deployed.rows() == [(1,)]
    deployed.put('{"number": 2, "note": "new"}')
    return deployed


@pytest.mark.parametrize(
    "how",
    [
        {"function": "parse"},
        {"function": "parse", "step": None},
        {"step": "other"},
        {"stream": "orders"},
        {"source": "number int, note string"},
    ],
    ids=["function", "function_and_step", "step", "stream", "source_column"],
)
def test_what_is_renamed_before_the_sink_needs_nobody(named: Deployed, how: dict[str, str | None]) -> None:
    renamed(named, **how)
    assert named.run()["messages"] == 1
    assert named.rows() == [(1,), (2,)]
    assert named.command("audit", "verify", "orders")["verdict"] == "clean"


def test_a_renamed_sink_goes_on_with_its_table(named: Deployed) -> None:
    renamed(named, sink="postgres")
    assert named.run()["messages"] == 1
    assert named.rows() == [(1,), (2,)]
    recorded = named.sql("select error from stormproof.event where kind = 'graph' and sink is not null order by id")
    assert recorded == [
        ("sink 'postgres' is new, and does not have txid 1 (1 message), committed before it joined",),
        ("sink 'pg' is gone",),
    ]
    assert named.command("audit", "verify", "orders")["violations"] == []


TABLE_KEPT = """
from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count, sum_

queue = PostgresQueue("orders", schema="number int, n int", max_attempts=1)
topology = Topology("orders")
topology.stream("lines", queue){stream}.into({sink}, name="{name}"))
"""
FOLDED = '.group_by("number").persistent_aggregate(seen=count(), total=sum_("n"))'
UPSERT = ', mode="upsert", key="number", order_by="n"'


@pytest.mark.parametrize(
    ("stream", "how"),
    [("", ""), ("", ", lineage=True"), ("", UPSERT), ("", f"{UPSERT}, lineage=True"), (FOLDED, "")],
    ids=["append", "append_with_lineage", "upsert", "upsert_with_lineage", "fold"],
)
@pytest.mark.parametrize("sink", ['PostgresSink("held"', 'DeltaSink("lake"'], ids=["postgres", "delta"])
def test_the_rows_of_a_renamed_sink_are_no_violation(deployed: Deployed, sink: str, stream: str, how: str) -> None:
    deployed.command("ledger", "migrate")
    for batch, name in enumerate(("old", "new", "newer")):
        (deployed.folder / "orders.py").write_text(TABLE_KEPT.format(stream=stream, sink=sink + how, name=name))
        deployed.put(f'{{"number": 1, "n": {batch}}}', f'{{"number": {batch}, "n": 1}}')
        deployed.run()
    verified = deployed.command.ended("audit", "verify", "orders", "--deep", "--json")[1]
    report = json.loads(verified)
    assert not report["violations"], verified
    assert report["verdict"] in {"clean", "not_compared"}
    if (sink, stream, how) == ('PostgresSink("held"', "", ""):
        assert report["verdict"] == "clean"
        deployed.sql("insert into held select * from held limit 1")
        report = deployed.command("audit", "verify", "orders", "--deep", status=1)
        assert {one["kind"] for one in report["violations"]} == {"rows_added"}


def test_a_renamed_topology_is_refused_since_it_would_read_its_source_again(named: Deployed) -> None:
    renamed(named, topology="orders2")
    assert "Use another table or the old name" in named.refused()
    assert named.rows() == [(1,)]
    renamed(named)
    assert named.run()["messages"] == 1
    assert named.rows() == [(1,), (2,)]


WIDER = """
from stormproof import PostgresQueue, PostgresSink, Topology

queue = PostgresQueue("orders", schema="number int, note string", max_attempts=1)

topology = Topology("orders")
rows = topology.stream("lines", queue).map(lambda *row: row, "number", "note", schema="number int, note string")
rows.into(PostgresSink("orders", name="pg"{more}))
"""


@pytest.mark.parametrize("evolves", [True, False], ids=["evolves", "by_hand"])
def test_a_deployment_adds_a_column_to_source_function_and_table_at_once(named: Deployed, *, evolves: bool) -> None:
    more = ', schema_contract="evolve"' if evolves else ""
    (named.folder / "orders.py").write_text(WIDER.replace("{more}", more))
    options: list[str] = []
    if not evolves:
        assert "note" in named.refused()  # the table lacks it
        named.sql("alter table orders add column note text")
        options = ["--accept-change", fingerprint_in(" ".join(named.run("--dry-run", status=1)["notes"]))]
    assert named.run(*options)["messages"] == 1
    named.put('{"number": 3}')
    assert named.run(*options)["messages"] == 1
    assert named.rows() == [(1, None), (2, "new"), (3, None)]
    assert named.command("audit", "verify", "orders")["verdict"] == "clean"
