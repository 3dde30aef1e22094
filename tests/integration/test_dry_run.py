"""`exactly_once(...).dry_run(frame, key)`: it says what `once` then does, and changes nothing at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from support.crashes import KILLED, child_of, ended
from support.databases import at
from support.once_runs import frame_of, run_keys, run_program
from support.queues import prepared_database
from support.streams import ArrowFrames, Form, Handout, Opener, StreamCell, clean_environment, handout, sinks_of
from support.untouched import everything

from stormproof import DeltaSink, MemorySink, PostgresSink, exactly_once
from stormproof.core.postgres.database import Database
from stormproof.errors import JobFailed, PositionMismatch, SinkRefused, UsageError
from stormproof.sink import Sink, TableAction
from stormproof.sinks.prepare.staging import parse_prepared_name
from stormproof.sinks.prepare.writer import FileWriter, Rehearsal
from stormproof.topology import DryRun, DryRunOutcome, ExactlyOnce, StreamOutcome

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]
COMMIT, SUPPRESS, ROLL_FORWARD, REFUSE = (
    DryRunOutcome.COMMIT,
    DryRunOutcome.SUPPRESS,
    DryRunOutcome.ROLL_FORWARD,
    DryRunOutcome.REFUSE,
)


@pytest.fixture
def cell(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamCell:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return StreamCell("daily", Form.SINKS, tmp_path, prepared_database(database))


def writer(cell: StreamCell, *sinks: Sink, frames: ArrowFrames | None = None) -> ExactlyOnce:
    return exactly_once(
        *(sinks or sinks_of(cell, "rows")), name=cell.name, settings=cell.settings(), frames=frames or ArrowFrames()
    )


def dry(cell: StreamCell, frame: Handout, key: str = "a", *sinks: Sink) -> DryRun:
    """A dry run, after which everything is as it was."""
    before = everything(cell.folder, cell.database)
    found = writer(cell, *sinks).dry_run(frame, key)
    assert everything(cell.folder, cell.database) == before
    json.dumps(found.to_json())
    return found


def table_of(**columns: list[object]) -> Handout:
    table = pa.table(columns)
    return Handout("", lambda: table, table.schema)


def actions(run: DryRun) -> list[TableAction]:
    return [sink.table.action for sink in run.sinks]


# -- what it says is what happens ------------------------------------------------------------------------------------


def test_a_first_call_and_those_after_it(cell: StreamCell) -> None:
    told = dry(cell, frame_of("a"))
    assert (told.outcome, told.txid, told.rows, actions(told)) == (COMMIT, 1, 3, [TableAction.CREATE] * 2)
    assert [(s.rows.rows, s.rows.files, s.rows.bytes > 0) for s in told.sinks] == [(3, 2, True)] * 2
    assert told.notes == ()
    assert run_keys(cell, ["a"])[0].txid == 1
    again = dry(cell, frame_of("a"))
    assert (again.outcome, again.txid, again.rows) == (SUPPRESS, 1, None)
    other = dry(cell, frame_of("b"), "b")
    assert (other.outcome, other.txid, actions(other)) == (COMMIT, 2, [TableAction.USE] * 2)
    assert run_keys(cell, ["a", "b"])[1].txid == 2
    assert "dry run of daily, key 'b': would commit, txid 2, 3 rows" in str(other)


def test_files_and_bytes_are_those_of_the_call(cell: StreamCell) -> None:
    frame = table_of(value=[f"value {n}" for n in range(1000)], id=["i"] * 1000)
    told = dry(cell, frame)
    with writer(cell) as write:
        write.once(frame, "a")
    lake = cell.folder / "lake" / cell.table("delta", "rows")
    sizes = [path.stat().st_size for path in lake.glob("*.parquet") if parse_prepared_name(path.name)]
    assert (told.sinks[0].rows.files, told.sinks[0].rows.bytes) == (len(sizes), sum(sizes))


def test_beside_an_open_writer_nobody_is_fenced(cell: StreamCell) -> None:
    with writer(cell) as running:
        running.once(frame_of("a"), "a")
        assert dry(cell, frame_of("b"), "b").outcome is COMMIT
        assert running.dry_run(frame_of("b"), "b").outcome is COMMIT
        assert running.once(frame_of("b"), "b").outcome is StreamOutcome.COMMITTED


@pytest.mark.parametrize(
    ("place", "outcome", "note"),
    [("run.after", COMMIT, "txid 1 is open"), ("prepare.after", ROLL_FORWARD, "txid 1 is prepared")],
)
def test_after_a_job_that_was_killed(cell: StreamCell, place: str, outcome: DryRunOutcome, note: str) -> None:
    assert run_program(cell, ["a"], f"{place}=kill") == KILLED
    told = dry(cell, frame_of("a"))
    assert told.outcome is outcome
    assert any(text.startswith(note) for text in told.notes)
    assert run_keys(cell, ["a"])[0].txid == told.txid


# -- tables ----------------------------------------------------------------------------------------------------------


def test_columns_that_would_be_added_are_named(cell: StreamCell) -> None:
    delta, postgres = cell.folder / "lake" / cell.table("delta", "rows"), cell.table("postgres", "rows")
    write_deltalake(str(delta), pa.table({"value": ["old"], "id": ["0"]}))
    with at(cell.database) as connection:
        connection.execute(f'create table "{postgres}" (value text, id text)'.encode())
    evolving = (
        DeltaSink(delta, name="delta-rows", schema_contract="evolve"),
        PostgresSink(postgres, name="postgres-rows", database=cell.database, schema_contract="evolve"),
    )
    wider = table_of(value=["v"], id=["1"], n=[1])
    frozen = dry(cell, wider)
    assert (frozen.outcome, actions(frozen)) == (REFUSE, [TableAction.REFUSE] * 2)
    assert all("no column 'n'" in sink.table.why for sink in frozen.sinks)
    told = dry(cell, wider, "a", *evolving)
    assert (told.outcome, actions(told)) == (COMMIT, [TableAction.ALTER] * 2)
    assert all("added column 'n'" in sink.table.changes[0] for sink in told.sinks)
    with writer(cell, *evolving) as write:
        assert write.once(wider, "a").rows == 1


def test_other_columns_than_before_are_refused_as_a_call_refuses_them(cell: StreamCell) -> None:
    run_keys(cell, ["a"])
    told = dry(cell, table_of(value=["v"], id=["1"], n=[1]), "b")
    assert told.outcome is REFUSE
    with writer(cell) as write, pytest.raises(PositionMismatch) as refused:
        write.once(table_of(value=["v"], id=["1"], n=[1]), "b")
    assert told.notes == (refused.value.message,)


def test_a_table_that_is_gone_or_another_ones_is_refused(cell: StreamCell) -> None:
    run_keys(cell, ["a"])
    stranger = replace(cell, name="stranger")
    sinks = sinks_of(cell, "rows")
    found = dry(stranger, frame_of("a"), "a", *sinks)
    assert (found.outcome, actions(found)) == (REFUSE, [TableAction.REFUSE] * 2)
    assert all("stormproof ledger adopt stranger daily/" in sink.table.why for sink in found.sinks)
    with at(cell.database) as connection:
        connection.execute(f'drop table "{cell.table("postgres", "rows")}"'.encode())
    gone = dry(cell, frame_of("b"), "b")
    assert (gone.outcome, actions(gone)) == (REFUSE, [TableAction.USE, TableAction.REFUSE])
    assert "is gone" in gone.sinks[1].table.why


def test_what_a_table_may_refuse_is_named_and_not_tried(cell: StreamCell) -> None:
    columns = "value text constraint short check (length(value) < 3), id text"
    with at(cell.database) as connection:
        connection.execute(f'create table "{cell.table("postgres", "rows")}" ({columns})'.encode())
    told = dry(cell, table_of(value=["long"], id=["1"]))
    assert told.outcome is COMMIT
    assert told.sinks[1].table.can_refuse == ("CHECK short: CHECK ((length(value) < 3))",)


# -- rows ------------------------------------------------------------------------------------------------------------


def test_refused_rows_are_counted_and_some_are_shown(cell: StreamCell) -> None:
    frame = table_of(value=["ok", *["nul \0"] * 20], id=[str(n) for n in range(21)])
    told = dry(cell, frame)
    delta, postgres = told.sinks
    assert told.outcome is REFUSE
    assert (delta.rows.refused, delta.rows.rows) == (0, 21)
    assert (postgres.rows.refused, postgres.rows.rows, len(postgres.rows.examples)) == (20, 1, 5)
    assert "NUL" in postgres.rows.examples[0]
    with writer(cell) as write, pytest.raises(SinkRefused):
        write.once(frame, "a")


def test_keys_that_come_again_are_counted(cell: StreamCell) -> None:
    sinks = (
        DeltaSink(cell.folder / "latest", mode="upsert", key="id", order_by="n"),
        PostgresSink("latest", mode="upsert", key="id", order_by="n", database=cell.database),
        MemorySink("latest", mode="upsert", key="id", order_by="n", staging=cell.folder / "memory"),
    )
    frame = table_of(id=["a", "b"] * 50, n=list(range(100)))
    told = dry(cell, frame, "k", *sinks)
    assert [(sink.mode, sink.rows.rows, sink.rows.superseded) for sink in told.sinks] == [("upsert", 2, 98)] * 3


def test_values_that_would_be_discarded(cell: StreamCell) -> None:
    with at(cell.database) as connection:
        connection.execute(b"create table small (n smallint)")
    sink = PostgresSink("small", database=cell.database, schema_contract="discard_value")
    told = dry(cell, table_of(n=[1, 70_000, 80_000]), "k", sink)
    assert (told.outcome, dict(told.sinks[0].rows.discarded)) == (COMMIT, {"n": 2})


# -- without rights, without a ledger, killed ------------------------------------------------------------------------


def test_a_role_that_may_only_read(cell: StreamCell) -> None:
    run_keys(cell, ["a"])
    with at(cell.database) as connection:
        connection.execute(b"drop role if exists only_reads")
        connection.execute(b"create role only_reads login password 'x'")
        for schema in ("public", "stormproof", "stormproof_sink"):
            connection.execute(f"grant usage on schema {schema} to only_reads".encode())
            connection.execute(f"grant select on all tables in schema {schema} to only_reads".encode())
    reader = Database.of({**dict(cell.database.parameters), "user": "only_reads", "password": "x"})
    found = dry(replace(cell, database=reader), frame_of("b"), "b")
    assert (found.outcome, actions(found)) == (REFUSE, [TableAction.USE, TableAction.REFUSE])
    assert "role 'only_reads' has not the rights" in found.sinks[1].table.why
    assert "cannot write to the ledger" in found.notes[-1]
    alone = dry(replace(cell, database=reader), frame_of("b"), "b", DeltaSink(cell.folder / "new"))
    assert (alone.outcome, actions(alone)) == (REFUSE, [TableAction.CREATE])
    with at(cell.database) as connection:
        connection.execute(b"drop owned by only_reads; drop role only_reads")


def test_without_a_ledger(database: Database, tmp_path: Path) -> None:
    empty = StreamCell("first", Form.SINKS, tmp_path, database)
    told = dry(empty, frame_of("a"))
    assert (told.outcome, actions(told)) == (COMMIT, [TableAction.CREATE] * 2)
    assert "stormproof ledger migrate" in told.notes[0]


def test_no_embedded_postgres_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORMPROOF_DATABASE_URL", "PGHOST", "PGDATABASE", "PGUSER", "PGPORT", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STORMPROOF_HOME", str(tmp_path / "home"))
    write = exactly_once(DeltaSink(tmp_path / "lake" / "t"), PostgresSink("t"), name="first", frames=ArrowFrames())
    told = write.dry_run(frame_of("a"), "a")
    assert (told.outcome, actions(told), told.rows) == (COMMIT, [TableAction.CREATE] * 2, 3)
    assert list(tmp_path.iterdir()) == []


def _killed(cell: StreamCell) -> None:
    clean_environment("task.after_file=kill")
    writer(cell).dry_run(frame_of("b"), "b")


def test_killed_it_leaves_nothing(cell: StreamCell) -> None:
    run_keys(cell, ["a"])
    before = everything(cell.folder, cell.database)
    assert ended(child_of(_killed, (cell,)), "a dry run") == KILLED
    assert everything(cell.folder, cell.database) == before


# -- what it refuses -------------------------------------------------------------------------------------------------


def test_a_failing_job_raises(cell: StreamCell) -> None:
    class Failing(ArrowFrames):
        def write(self, *arguments: object) -> object:  # type: ignore[override]
            raise JobFailed("no such file")

    with pytest.raises(JobFailed):
        writer(cell, frames=Failing()).dry_run(frame_of("a"), "a")
    with pytest.raises(UsageError, match="once"):
        writer(cell).dry_run(frame_of("a"), "")


def test_a_name_of_a_streaming_query_is_refused(cell: StreamCell, opened: Opener) -> None:
    opened(cell)(handout("q", "x"), 0)
    with pytest.raises(UsageError, match="used by a streaming query"):
        dry(cell, frame_of("a"))


def test_a_sink_without_a_preview_is_named(cell: StreamCell) -> None:
    class Plain(MemorySink):
        preview = Sink.preview

    told = dry(cell, frame_of("a"), "a", Plain("own", staging=cell.folder / "memory"))
    assert (told.outcome, actions(told), told.rows) == (DryRunOutcome.CANNOT_TELL, [TableAction.CANNOT_TELL], None)


# -- negative controls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("control", ["once", "staged", "opened"])
def test_control_what_a_broken_dry_run_leaves_is_seen(
    cell: StreamCell, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_keys(cell, ["a"])
    if control == "staged":
        staging = FileWriter("delta-rows", str(cell.folder / "lake"))
        monkeypatch.setattr(Rehearsal, "open_task", lambda _, context, schema: staging.open_task(context, schema))
    else:
        broken = _opening if control == "opened" else ExactlyOnce.once
        monkeypatch.setattr(ExactlyOnce, "dry_run", broken)
    before = everything(cell.folder, cell.database)
    with writer(cell) as write:
        write.dry_run(frame_of("b"), "b")
    assert everything(cell.folder, cell.database) != before


def _opening(self: ExactlyOnce, frame: Handout, key: str) -> None:
    """It opens the sinks, and so raises the epoch."""
    with self._opened(frame, None, lambda _: None):  # pyright: ignore[reportPrivateUsage]
        del key
