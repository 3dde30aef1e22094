"""`audit verify --deep`: changes that somebody plants in a sink's table are found, or are said not to be looked at."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from support.brokers.object_store import ObjectStore
from support.crashes import KILLED, Cell, run_driver
from support.operated import Operated
from support.plants import APPENDS, EVERY, FOUND, TABLES, TRACED, can_be, plant
from support.topologies import source_of
from support.web import READER, client, page_of

from stormproof import DeltaSink, MemorySource, PostgresSink, Topology
from stormproof.core.postgres.database import Database
from stormproof.core.storage.protocol import use_storage
from stormproof.sinks.contract.protocol import Sink
from stormproof.sinks.delta import compare
from stormproof.sinks.prepare.staging import file_digest
from stormproof.sinks.rows.comparison import Compared, RowProblem
from stormproof.sinks.rows.content import Content
from stormproof.trident.web.people import WebOptions

pytestmark = [pytest.mark.postgres]
NAME = "deep"
LINES = [f"{i}|k{i % 5},{i};k{i % 3},{i + 100}".encode() for i in range(12)]
SCHEMA = "k string, at bigint, made string"
UPSERT: dict[str, Any] = {"mode": "upsert", "key": "k", "order_by": "at"}


def rows_of(line: str) -> list[tuple[str, int, str]]:
    number, _, pieces = line.partition("|")
    return [(k, int(at), number) for k, at in (one.split(",") for one in pieces.split(";") if one)]


def sinks_of(folder: Path, database: Database) -> list[Sink]:
    lake = folder / "lake"
    return [
        DeltaSink(lake / "plain", name="delta", content_digests=True),
        DeltaSink(lake / "traced", name="delta-lineage", lineage=True, content_digests=True),
        DeltaSink(lake / "newest", name="delta-upsert", **UPSERT),
        DeltaSink(lake / "newest_traced", name="delta-upsert-lineage", **UPSERT, lineage=True),
        PostgresSink("plain", name="postgres", database=database),
        PostgresSink("traced", name="postgres-lineage", database=database, lineage=True),
        PostgresSink("newest", name="postgres-upsert", database=database, **UPSERT),
        PostgresSink("newest_traced", name="postgres-upsert-lineage", database=database, **UPSERT, lineage=True),
    ]


def build(cell: Cell) -> Topology:
    t = Topology(NAME)
    rows = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(rows_of, "line", schema=SCHEMA)
    rows.into(*sinks_of(cell.folder, cell.database))
    return t


def build_without_digests(cell: Cell) -> Topology:
    t = Topology(cell.name)
    rows = t.stream("lines", MemorySource("lines", LINES)).flat_map(rows_of, "line", schema=SCHEMA)
    rows.into(
        DeltaSink(cell.folder / "lake" / "undigested", name="delta", content_digests=False),
        PostgresSink("undigested", name="postgres", database=cell.database, content_digests=False),
    )
    return t


def build_in_store(cell: Cell, url: str) -> Topology:
    t = Topology(cell.name)
    rows = t.stream("lines", MemorySource("lines", LINES)).flat_map(rows_of, "line", schema=SCHEMA)
    rows.into(DeltaSink(f"{url}/plain", name="delta"))
    return t


@pytest.fixture
def run(operated: Operated) -> Operated:
    found = replace(operated, cell=replace(operated.cell, build=build, batch_messages=3))
    found.put(*LINES)
    found.run(build(found.cell))
    return found


def test_an_untouched_run_is_clean(run: Operated) -> None:
    report = run.command("audit", "verify", NAME, "--deep", status=4)  # of the upserts, no values
    assert report["violations"] == []
    assert report["verdict"] == "not_compared"
    upserts = ", ".join(name for name in TABLES if name not in {*APPENDS, *TRACED})
    assert report["reach"] == f"clean, 2 of 8 sinks not compared (or not in full): {upserts}"
    assert report["kept"]["messages"] == len(LINES)
    assert {table["sink"]: table["rows"] for table in report["tables"]} == {
        name: 24 if name in APPENDS else 5 for name in TABLES
    }


def test_how_far_a_verdict_reaches_is_said_by_the_command_the_page_and_the_report(run: Operated) -> None:
    reach = run.command("audit", "verify", NAME, "--deep", status=4)["reach"]
    lines = run.text("audit", "verify", NAME, "--deep", status=4).splitlines()
    assert ".verdict of --json" in lines[lines.index(f"verdict: {reach}") + 1]
    out = run.cell.folder / "report.json"
    assert run.command("audit", "report", NAME, "--deep", "--out", str(out), status=4)["verdict"] == "not_compared"
    assert json.loads(out.read_text())["verdict"]["verdict"] == "not_compared"
    assert colours(run) == {"not compared": {"part"}}
    run.command("audit", "verify", NAME, "--deep", "--sink", "delta")
    assert colours(run)["clean"] == {"ok"}


def colours(run: Operated) -> Mapping[str, set[str]]:
    """The kept verdicts on the page's views, each with the classes that it is shown by."""
    app, found = page_of(run.cell.database, WebOptions(lambda _: READER)), dict[str, set[str]]()
    for address in ("/", f"/topology?topology={NAME}", f"/question?name=verdicts&topology={NAME}"):
        shown = re.findall(r'<span class="st (\w*)">(not compared|clean)</span>', client(app).get(address).text)
        assert shown, address
        for colour, verdict in shown:
            found.setdefault(verdict, set()).add(colour)
    app.close()
    return found


@pytest.mark.parametrize("what", sorted(FOUND))
def test_a_planted_change_is_found_or_said_not_to_be_looked_for(run: Operated, what: str) -> None:
    planted = set[str]()
    for name, table in TABLES.items():
        if not can_be(what, name):
            continue
        plant(run, name.partition("-")[0], table, what)
        planted.add(name)
    report = run.command("audit", "verify", NAME, "--deep", status=1)
    found = {violation["sink"] for violation in report["violations"]}
    assert found == FOUND[what] & planted
    left_out = {table["sink"] for table in report["tables"] if table["left_out"]}
    assert planted - found <= left_out


CONTROLS: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str, str]] = {
    "rows are counted, and not hashed": (
        lambda patch: patch.setattr(Compared, "differs", _by_number),
        "two rows swap a value",
        "postgres-lineage",
    ),
    "contents are not compared": (
        lambda patch: patch.setattr(Compared, "differs", lambda *_: False),
        "a row is doubled",
        "postgres",
    ),
    "bytes are not compared": (
        lambda patch: patch.setattr(compare, "file_digest", _as_on_record),
        "a file is replaced",
        "delta",
    ),
    "files that rows were moved to are not read": (
        lambda patch: patch.setattr("stormproof.sinks.delta.compare._Files._moved", lambda *_: None),
        "an OPTIMIZE changes a row",
        "delta",
    ),
    "other writers' files are not looked for": (
        lambda patch: patch.setattr("stormproof.sinks.delta.compare._Files._others", lambda *_: None),
        "a row is doubled",
        "delta",
    ),
    "rows of no txid are not looked for": (
        lambda patch: patch.setattr(Compared, "strangers", lambda *_, **_options: None),
        "a row is added",
        "postgres-lineage",
    ),
    "the content of an upsert is not compared": (
        lambda patch: patch.setattr(Compared, "_by_content", lambda *_: None),
        "a row is changed",
        "postgres-upsert-lineage",
    ),
    "rows of a fold or upsert are not counted": (
        lambda patch: (
            patch.setattr(compare, "_foreign_versions", lambda *_: None),
            patch.setattr(Compared, "by_key", lambda *_: None),
        ),
        "a row is added",
        "delta-upsert",
    ),
}


def _by_number(self: Compared, what: str, expected: Content, found: Content, txid: int | None = None) -> bool:
    """As `differs`, by the number of rows alone."""
    if expected.rows == found.rows:
        return False
    self.add(RowProblem.ROWS_ADDED, what, txid)
    return True


def _as_on_record(path: str) -> str:
    """The digest that the file had."""
    return DIGESTS[os.path.basename(path)]


DIGESTS: dict[str, str] = {}


@pytest.mark.parametrize("broken", sorted(CONTROLS))
def test_with_a_check_taken_out_the_change_goes_unnoticed(
    run: Operated, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks, what, sink = CONTROLS[broken]
    lake = run.cell.folder / "lake" / "plain"
    DIGESTS.update({path.name: file_digest(str(path)) for path in lake.glob("*.parquet")})
    plant(run, sink.partition("-")[0], TABLES[sink], what)
    options = ("--deep", "--sink", sink)
    found = run.command("audit", "verify", NAME, *options, status=1)["violations"]
    assert {violation["sink"] for violation in found} == {sink}
    breaks(monkeypatch)
    assert run.command("audit", "verify", NAME, *options)["violations"] == []


def test_rows_of_other_writers_may_be_expected(run: Operated) -> None:
    plant(run, "delta", "plain", "a row is added")
    report = run.command("audit", "verify", NAME, "--deep", "--others-write", status=4)
    assert "others_write" in {notice["kind"] for notice in report["notices"]}


def test_one_sinks_table_may_be_read_alone_and_the_report_says_so(run: Operated) -> None:
    plant(run, "postgres", "plain", "a row is changed")
    report = run.command("audit", "verify", NAME, "--deep", "--sink", "delta")
    assert [table["sink"] for table in report["tables"]] == ["delta"]
    assert report["reach"] == "clean, the rows of 1 sink compared, of 8 in all"
    assert {notice["sink"] for notice in report["notices"] if "--sink" in notice["text"]} == EVERY - {"delta"}
    assert (
        "no sink 'nowhere'"
        in run.command("audit", "verify", NAME, "--deep", "--sink", "nowhere", status=2)["error"]["message"]
    )


def test_rows_without_a_digest_are_said_and_no_alarm(run: Operated) -> None:
    """As an earlier version wrote them."""
    run.sql("update stormproof_sink.evidence set content = null where txid <= 2")
    report = run.command("audit", "verify", NAME, "--deep", status=4)  # of the upserts, no values
    left_out = {table["sink"]: table["left_out"] for table in report["tables"]}
    assert left_out["postgres-lineage"] == [
        "txids 1-2: it has no digest: content_digests was off, or no column can be hashed"
    ]
    assert left_out["postgres"] == left_out["postgres-lineage"]
    run.sql("delete from traced where _txid = 1 and at = 0")
    assert run.command("audit", "verify", NAME, "--deep", status=1)["violations"][0]["kind"] == "rows_missing"


def test_rows_of_sinks_that_make_no_digests_are_said_and_files_are_compared_all_the_same(run: Operated) -> None:
    run.run(build_without_digests(replace(run.cell, name="undigested")))
    report = run.command("audit", "verify", "undigested", "--deep", status=4)  # the source cannot be asked
    left_out = {table["sink"]: table["left_out"] for table in report["tables"]}
    why = "it has no digest: content_digests was off, or no column can be hashed"
    assert left_out == {"delta": [], "postgres": [f"txids 1-4: {why}"]}


def test_tables_in_an_object_store_are_compared(run: Operated, object_store: ObjectStore) -> None:
    url = f"{object_store.url}/{uuid.uuid4().hex}"
    use_storage(url, object_store.options())
    run.run(build_in_store(replace(run.cell, name="stored"), url))
    report = run.command("audit", "verify", "stored", "--deep", status=4)  # the source cannot be asked
    assert [(table["sink"], table["left_out"]) for table in report["tables"]] == [("delta", [])]
    found = DeltaTable(f"{url}/plain", storage_options=object_store.options())
    found.update(predicate="at = 0", updates={"made": "'forged'"})
    assert run.command("audit", "verify", "stored", "--deep", status=1)["violations"]


def test_a_trigger_that_changes_rows_is_no_alarm(run: Operated) -> None:
    run.sql(
        "create function louder() returns trigger language plpgsql as "
        "'begin new.made := upper(new.made) || new.made; return new; end'"
    )
    run.sql("create trigger louder before insert on traced for each row execute function louder()")
    run.put(b"90|k1,900", b"91|k2,901")
    run.run(build(run.cell))
    report = run.command("audit", "verify", NAME, "--deep", status=4)  # of the upserts, no values
    left_out = {table["sink"]: table["left_out"] for table in report["tables"]}
    assert left_out["postgres-lineage"] == ["txids 5: trigger 'louder' of the table may have changed its rows"]


def test_a_driver_that_ends_within_a_commit_is_no_alarm(run: Operated) -> None:
    for place in ("delta.after_log_entry", "postgres.after_commit"):
        run.put(b"95|k1,950", b"96|k2,951")
        assert run_driver(run.cell, f"{place}=kill@1") == KILLED
        assert run.command("audit", "verify", NAME, "--deep", status=4)["violations"] == []
