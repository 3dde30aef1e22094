"""A dry run of a topology says what its first batch would do, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema
from support.crashes import KILLED, Cell, child_of, ended, run_driver
from support.operated import Operated
from support.streams import clean_environment
from support.topologies import source_of
from support.untouched import everything

from stormproof import (
    DeltaSink,
    FileSource,
    IteratorSource,
    MemoryMap,
    MemorySink,
    PostgresQueue,
    PostgresSink,
    Topology,
    count,
)
from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.source import Source
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.sink import TableAction
from stormproof.sinks.contract.preview import RowsPreview
from stormproof.source import MicroBatches
from stormproof.topology import DryRunOutcome, TopologyDryRun
from stormproof.trident.driver import dry_run

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]
NAME = "rehearsed"
LINES = [b"a b", b"c fail", b"d d", b"e"]


def words_of(line: str) -> list[str]:
    if "fail" in line:
        raise ValueError("not this one")
    return line.split()


def build(cell: Cell) -> Topology:
    t = Topology(NAME)
    words = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(words_of, "line", schema="word string")
    words.into(DeltaSink(cell.folder / "lake" / "words"), PostgresSink("words", database=cell.database))
    words.group_by("word").persistent_aggregate(n=count()).into(PostgresSink("counts", database=cell.database))
    return t


@pytest.fixture
def rehearsed(operated: Operated) -> Operated:
    return replace(operated, cell=replace(operated.cell, build=build, batch_messages=100))


def settings_of(cell: Cell, **more: Any) -> Settings:
    url = cell.database.sqlalchemy_url.render_as_string(hide_password=False)
    return Settings(database_url=url, home=cell.folder / "home", **{"batch_messages": 100, **more})


def dry(operated: Operated, built: Topology | None = None, **more: Any) -> TopologyDryRun:
    """A dry run, after which everything is as it was."""
    cell = operated.cell
    before = everything(cell.folder, cell.database)
    told = (built or build(cell)).dry_run(settings=settings_of(cell, **more))
    assert everything(cell.folder, cell.database) == before
    return told


def rows_of(told: TopologyDryRun) -> dict[str, tuple[int, int]]:
    return {one.sink: (one.rows.rows, one.rows.files) for one in told.sinks}


def test_what_it_says_is_what_happens(rehearsed: Operated) -> None:
    """Before the first run, and for the messages that came after it."""
    rehearsed.put(*LINES)
    told = dry(rehearsed)
    assert (told.outcome, told.txid, told.messages, told.failed) == (DryRunOutcome.COMMIT, 1, 4, 1)
    assert {one.table.action for one in told.sinks} == {TableAction.CREATE}
    assert "at words_of, error: ValueError: not this one" in told.examples[0]
    ran = rehearsed.run(build(rehearsed.cell))
    assert ran.messages == 3
    prepared = rehearsed.sql("select sink, rows from stormproof.txn_sink where txid = 1")
    assert {sink: rows for sink, (rows, _) in rows_of(told).items()} == dict(prepared)

    assert dry(rehearsed).outcome is DryRunOutcome.WAIT
    rehearsed.put(b"f g", b"h")
    told = dry(rehearsed)
    assert (told.messages, rows_of(told)["postgres.words"][0], told.outcome) == (2, 3, DryRunOutcome.COMMIT)
    assert {one.table.action for one in told.sinks} == {TableAction.USE}
    assert dry(rehearsed, batch_messages=1).messages == 1


def test_beside_a_killed_driver(rehearsed: Operated) -> None:
    """What is prepared is said to come first, and nobody is fenced."""
    rehearsed.put(*LINES)
    assert run_driver(rehearsed.cell, "prepare.after=kill") == KILLED
    told = dry(rehearsed)
    assert any("txid 1 is prepared: a start would complete it first" in note for note in told.notes)
    assert any("has not ended in order" in note for note in told.notes)
    assert told.txid == 2


def test_a_table_that_cannot_take_the_rows_is_refused(rehearsed: Operated) -> None:
    rehearsed.put(*LINES)
    rehearsed.sql("create table words (word integer)")
    told = dry(rehearsed)
    assert told.refused
    (refusing,) = [one for one in told.sinks if one.table.action is TableAction.REFUSE]
    assert "integer in the table and string in the rows" in refusing.table.why


def test_a_row_that_its_column_cannot_hold_fails_its_message(rehearsed: Operated) -> None:
    rehearsed.put(b"a", b"long-word b")
    rehearsed.sql("create table words (word varchar(3))")
    told = dry(rehearsed)
    assert (told.messages, told.failed) == (2, 1)
    assert rows_of(told) == {"delta.words": (1, 1), "postgres.words": (1, 1), "postgres.counts": (1, 1)}


def coded(line: str) -> list[tuple[str, int | None]]:
    return [(word, None if "long" in word else len(word)) for word in words_of(line)]


def discarding(cell: Cell) -> Topology:
    """Each sink but the last rejects the messages of rows that do not fit, and of each the reason is another one."""
    t = Topology(NAME)
    lines = t.stream("lines", source_of(cell.queue, cell.database))
    words = lines.flat_map(coded, "line", schema="word string, code int")
    discard: dict[str, Any] = {"schema_contract": "discard_row"}
    words.into(
        DeltaSink(cell.folder / "lake" / "words", name="lake", **discard),
        PostgresSink("short_words", name="short", database=cell.database, **discard),
        PostgresSink(
            "latest", name="latest", mode="upsert", key="code", order_by="word", database=cell.database, **discard
        ),
    )
    words.group_by("word").agg(n=count()).into(
        PostgresSink("short_counts", name="counts", database=cell.database, **discard),
        PostgresSink("counts", name="all", database=cell.database),
    )
    return t


@pytest.fixture
def with_misfits(rehearsed: Operated) -> Operated:
    rehearsed.sql(
        "create table short_words (word varchar(3) not null, code int);"
        "create table latest (word varchar(3), code int primary key);"
        "create table short_counts (word varchar(3), n bigint)"
    )
    strict = pa.schema([("word", pa.string()), pa.field("code", pa.int32(), nullable=False)])
    DeltaTable.create(rehearsed.cell.folder / "lake" / "words", Schema.from_arrow(strict))
    return replace(rehearsed, cell=replace(rehearsed.cell, build=discarding))


def held_rows(operated: Operated) -> dict[str, int]:
    tables = {"short": "short_words", "latest": "latest", "counts": "short_counts", "all": "counts"}
    found = {sink: operated.sql(f"select count(*) from {table}")[0][0] for sink, table in tables.items()}
    return {"lake": DeltaTable(operated.cell.folder / "lake" / "words").to_pyarrow_table().num_rows, **found}


@pytest.mark.parametrize("seed", range(4))
def test_messages_that_a_commit_would_reject_are_told_as_such(with_misfits: Operated, seed: int) -> None:
    """As many as the commit then rejects, and as many rows as the tables then have."""
    random = Random(seed)
    words = ["a", "b", "ab", "ba", "long", "c", "long-1"]
    lines = [" ".join(random.choices(words, k=random.randint(1, 4))).encode() for _ in range(40)]
    with_misfits.put(*lines, b"a fail")
    told = dry(with_misfits, discarding(with_misfits.cell), rejects_max_share=1.0)
    assert (told.outcome, told.messages, told.failed) == (DryRunOutcome.COMMIT, 41, 1)
    assert "messages would be rejected, with all of their rows here" in str(told)
    ran = with_misfits.run(discarding(with_misfits.cell), rejects_max_share=1.0)
    assert ran.failed >= 1  # it is tried again
    assert {one.sink: one.rows.rows for one in told.sinks} == held_rows(with_misfits)
    rejects = dict(with_misfits.sql("select sink, count(distinct message) from stormproof.reject group by sink"))
    assert {one.sink: one.rows.rejected for one in told.sinks} == {"all": 0, **rejects}
    bad = sum(b"long" in line for line in lines)
    assert rejects == {"lake": bad, "short": bad, "latest": bad, "counts": bad}


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_more_messages_than_may_be_rejected_would_block(with_misfits: Operated, share: float) -> None:
    with_misfits.put(*(b"long a" for _ in range(11)))
    told = dry(with_misfits, discarding(with_misfits.cell), rejects_max_share=share)
    assert told.refused
    blocked = {one.sink: one.rows.blocked for one in told.sinks if one.refuses}
    assert blocked.keys() == {"lake", "short", "latest", "counts"}
    if share:
        assert all("more than 10 messages" in why for why in blocked.values())
    with pytest.raises(SinkRefused):
        with_misfits.run(discarding(with_misfits.cell), rejects_max_share=share)


def test_control_where_only_the_misfit_is_left_out_the_rows_are_others(
    with_misfits: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "stormproof.trident.driver.dry_run.rows_without_misfits", lambda _, files, *__, **___: RowsPreview.of(files)
    )
    with_misfits.put(b"a long b", b"c")
    told = dry(with_misfits, discarding(with_misfits.cell))
    with_misfits.run(discarding(with_misfits.cell))
    assert {one.sink: one.rows.rows for one in told.sinks} != held_rows(with_misfits)


def lines_into(source: Source) -> Topology:
    t = Topology(NAME)
    t.stream("lines", source).flat_map(words_of, "line", schema="word string").into(MemorySink("m"))
    return t


def test_files_are_read_and_not_registered(operated: Operated) -> None:
    folder = operated.cell.folder / "in"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.txt").write_text(f"{name} 1\n{name} 2\n")
    source = FileSource(folder, "text", name="files", database=operated.cell.database)
    built = lines_into(source)
    assert (dry(operated, built).messages, dry(operated, built, batch_messages=3).messages) == (6, 3)
    operated.run(lines_into(source))
    (folder / "d.txt").write_text("d\n")
    assert dry(operated, built).messages == 1


def iterated(cell: Cell) -> Source:
    return IteratorSource("lines", [b"a"], confirm=lambda ids: None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (iterated, "an iterator gives each item once"),
        (lambda _: MicroBatches("lines", "line string"), "its messages come with a streaming query"),
    ],
)
def test_a_source_that_cannot_be_read_so_is_named(
    operated: Operated, make: Callable[[Cell], Source], said: str
) -> None:
    t = Topology(NAME, guarantee="at-least-once")
    t.stream("lines", make(operated.cell)).into(MemorySink("m"))
    told = dry(operated, t)
    assert (told.outcome, told.messages) == (DryRunOutcome.CANNOT_TELL, 0)
    assert said in told.unread


def test_of_several_spouts_those_that_can_be_read_are(operated: Operated) -> None:
    operated.put(*LINES[2:])
    t = Topology(NAME, guarantee="at-least-once")
    queued = t.stream("queued", source_of(operated.cell.queue, operated.cell.database))
    queued.merge(t.stream("given", iterated(operated.cell))).into(MemorySink("m"))
    told = dry(operated, t)
    assert (told.messages, rows_of(told)) == (2, {"m": (2, 1)})
    assert told.unread.startswith("spout 'given': ")


def test_a_state_has_no_preview(operated: Operated) -> None:
    operated.put(b"a")
    t = Topology(NAME)
    t.stream("lines", source_of(operated.cell.queue, operated.cell.database)).group_by("line").persistent_aggregate(
        state=MemoryMap(), n=count()
    )
    told = dry(operated, t)
    assert (told.outcome, told.messages) == (DryRunOutcome.CANNOT_TELL, 1)


def test_without_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No embedded Postgres is made to look into."""
    for name in ("STORMPROOF_DATABASE_URL", "PGHOST", "PGDATABASE", "PGUSER", "PGPORT", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    t = Topology(NAME)
    t.stream("lines", FileSource(tmp_path / "in", "text", name="files")).into(DeltaSink(tmp_path / "lake" / "t"))
    told = t.dry_run(settings=Settings(home=tmp_path / "home"))
    assert told.outcome is DryRunOutcome.CANNOT_TELL
    assert "keeps what is pending in a database, and there is none yet" in told.unread
    assert list(tmp_path.iterdir()) == []


def test_a_database_without_a_ledger(database: Database, tmp_path: Path) -> None:
    """Nothing is made in it, and what lacks is named."""
    told_to = Settings(database_url=database.sqlalchemy_url.render_as_string(hide_password=False), home=tmp_path)
    t = Topology(NAME)
    t.stream("lines", PostgresQueue("q", schema="line string")).into(PostgresSink("lines"))
    before = everything(tmp_path, database)
    told = t.dry_run(settings=told_to)
    assert everything(tmp_path, database) == before
    assert told.outcome is DryRunOutcome.CANNOT_TELL
    assert "a table is missing" in told.unread
    assert any("stormproof ledger migrate" in note for note in told.notes)


def test_a_role_that_may_only_read(rehearsed: Operated) -> None:
    """It is told that it could not start; nothing is read then."""
    rehearsed.put(*LINES)
    rehearsed.run(build(rehearsed.cell))
    rehearsed.sql("drop role if exists only_looks")
    rehearsed.sql("create role only_looks login password 'x'")
    for schema in ("public", "stormproof", "stormproof_sink", "stormproof_queue"):
        rehearsed.sql(f"grant usage on schema {schema} to only_looks")
        rehearsed.sql(f"grant select on all tables in schema {schema} to only_looks")
    reader = Database.of({**dict(rehearsed.cell.database.parameters), "user": "only_looks", "password": "x"})
    told = dry(replace(rehearsed, cell=replace(rehearsed.cell, database=reader)))
    assert told.refused
    assert any("this role cannot write to the ledger" in note for note in told.notes)
    rehearsed.sql("drop owned by only_looks; drop role only_looks")


def _killed(cell: Cell) -> None:
    clean_environment("task.after_file=kill")
    build(cell).dry_run(settings=settings_of(cell))


def test_killed_it_leaves_nothing(rehearsed: Operated) -> None:
    rehearsed.put(*LINES)
    before = everything(rehearsed.cell.folder, rehearsed.cell.database)
    assert ended(child_of(_killed, (rehearsed.cell,)), "a dry run") == KILLED
    assert everything(rehearsed.cell.folder, rehearsed.cell.database) == before


def test_the_command(rehearsed: Operated) -> None:
    rehearsed.put(*LINES)
    file = rehearsed.cell.folder / "mine.py"
    file.write_text(
        "from stormproof import PostgresQueue, PostgresSink, Topology\n"
        f"topology = Topology('{NAME}')\n"
        f"lines = topology.stream('lines', PostgresQueue('{rehearsed.cell.queue}', schema='line string'))\n"
        "lines.into(PostgresSink('lines'))\n"
    )
    target = f"{file}:topology"
    told = rehearsed.command("run", target, "--dry-run")
    assert (told["outcome"], told["messages"], told["sinks"][0]["rows"]["rows"]) == ("would commit", 4, 4)
    assert "would create the table" in rehearsed.text("run", target, "--dry-run", "--max-messages", "2")
    rehearsed.sql("create table lines (line integer)")
    assert rehearsed.command("run", target, "--dry-run", status=1)["outcome"] == "would refuse"
    assert rehearsed.sql("select count(*) from stormproof.topology") == [(0,)]


def test_control_a_dry_run_that_takes_messages_is_seen(rehearsed: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed.put(*LINES)
    whole = dry_run.look

    def taking(*given: Any) -> Any:
        source = source_of(rehearsed.cell.queue, rehearsed.cell.database)
        source.subscribe("life", 1)
        source.close()
        return whole(*given)

    monkeypatch.setattr("stormproof.trident.driver.dry_run.look", taking)
    with pytest.raises(AssertionError):
        dry(rehearsed)
