"""Lineage columns in Delta and Postgres: each row names its transaction and its message, after kills and by every writer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import PrimitiveType
from support.crashes import KILLED, Cell, run_driver
from support.operated import Operated
from support.streams import ArrowFrames, Handout, handout
from support.topologies import source_of

from stormproof import DeltaSink, PostgresSink, Topology, count, exactly_once
from stormproof.core.base.errors import SinkRefused
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.sink import Lineage
from stormproof.sinks.contract.protocol import Sink

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]
NAME = "traced"
LINES = [b"0|a,1;b,1", b"1|a,3", b"2|c,1;b,2;a,2", b"3|c,4", b"4|d,1", b"5|", b"6|b,9;d,2"]
SCHEMA = "k string, at bigint, made string"
UPSERT: dict[str, Any] = {"mode": "upsert", "key": "k", "order_by": "at"}


def rows_of(line: str) -> list[tuple[str, int, str]]:
    number, _, pieces = line.partition("|")
    return [(k, int(at), number) for k, at in (one.split(",") for one in pieces.split(";") if one)]


def sinks_of(folder: Path, database: Database, **more: Any) -> list[Sink]:
    """An append and an upsert of each kind."""
    return [
        DeltaSink(folder / "lake" / "added", lineage=True, **more),
        DeltaSink(folder / "lake" / "newest", **UPSERT, lineage=True, **more),
        PostgresSink("added", database=database, lineage=True, **more),
        PostgresSink("newest", database=database, **UPSERT, lineage=True, **more),
    ]


def build(cell: Cell) -> Topology:
    t = Topology(NAME)
    rows = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(rows_of, "line", schema=SCHEMA)
    rows.into(*sinks_of(cell.folder, cell.database))
    rows.group_by("k").persistent_aggregate(n=count()).into(
        PostgresSink("counted", database=cell.database, lineage=Lineage(message=None))
    )
    return t


def delta(folder: Path, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(folder / "lake" / table).to_pyarrow_table().to_pylist()
    return found


def postgres(operated: Operated, table: str) -> list[dict[str, Any]]:
    rows = operated.sql(f"select to_jsonb(t) from {table} t")
    return [row for (row,) in rows]


@pytest.fixture
def traced(operated: Operated) -> Operated:
    return replace(operated, cell=replace(operated.cell, build=build, batch_messages=2))


def test_rows_name_their_message_and_transaction(traced: Operated) -> None:
    """Drivers are killed before and after a commit of each kind; what recovery writes has the same values."""
    traced.put(*LINES)
    queue = source_of(traced.cell.queue, traced.cell.database)
    try:
        queue.subscribe("reader", 1)
        shown = {one.payload[:1].decode(): one.shown_id for one in queue.peek(100)}
    finally:
        queue.close()
    for place in ("delta.after_log_entry", "postgres.after_rows"):
        assert run_driver(traced.cell, f"{place}=kill@2") == KILLED
    traced.run(build(traced.cell))

    wanted = [row for line in LINES for row in rows_of(line.decode())]
    txid_of = dict[str, int]()
    for found in (delta(traced.cell.folder, "added"), postgres(traced, "added")):
        assert Counter((r["k"], r["at"], r["made"]) for r in found) == Counter(wanted)
        assert all(r["_message_id"] == shown[r["made"]] for r in found)
        txid_of = {r["_message_id"]: r["_txid"] for r in found}
        committed = dict(traced.sql("select txid, rows from stormproof.txn_sink where sink = 'postgres.added'"))
        assert Counter(r["_txid"] for r in found) == Counter({n: rows for n, rows in committed.items() if rows})
    last = {k: max(row for row in wanted if row[0] == k) for k in "abcd"}
    for found in (delta(traced.cell.folder, "newest"), postgres(traced, "newest")):
        assert {r["k"]: (r["k"], r["at"], r["made"]) for r in found} == last
        assert all(r["_message_id"] == shown[r["made"]] and r["_txid"] == txid_of[r["_message_id"]] for r in found)
    newest = {k: max(txid_of[shown[made]] for key, _, made in wanted if key == k) for k in "abcd"}
    assert {r["k"]: r["_txid"] for r in postgres(traced, "counted")} == newest
    joined = traced.sql(
        "select a._message_id, x.state from added a join stormproof.txn x on x.txid = a._txid"
        " join stormproof.topology t on t.incarnation = x.incarnation and t.name = 'traced'"
    )  # as docs/sinks.md has it
    assert Counter(joined) == Counter((r["_message_id"], "committed") for r in postgres(traced, "added"))
    told = traced.command("audit", "message", NAME, shown["0"])
    assert {(one["sink"], one["column"]) for one in told["stored_in"]} == {
        (sink.name, "_message_id") for sink in sinks_of(traced.cell.folder, traced.cell.database)
    }
    assert "rows in postgres.added (added" in traced.text("audit", "message", NAME, shown["0"])
    traced.verify()


def rows_from(operated: Operated, *sinks: Sink) -> Topology:
    t = Topology(NAME)
    stream = t.stream("lines", source_of(operated.cell.queue, operated.cell.database))
    stream.flat_map(rows_of, "line", schema=SCHEMA).into(*sinks)
    return t


def test_a_table_without_the_columns_is_refused_or_gets_them(operated: Operated) -> None:
    """By `schema_contract`. The rows that are there have NULL."""
    folder, database = operated.cell.folder, operated.cell.database
    write_deltalake(folder / "lake" / "added", pa.table({"k": ["z"], "at": [1], "made": ["-"]}))
    operated.sql("create table added (k text, at bigint, made text); insert into added values ('z', 1, '-')")
    operated.put(b"0|a,1")
    for sink in (sinks_of(folder, database)[0], sinks_of(folder, database)[2]):
        with pytest.raises(SinkRefused, match="the table has no column '_txid'"):
            operated.run(rows_from(operated, sink))
    added = sinks_of(folder, database, schema_contract="evolve")
    operated.run(rows_from(operated, added[0], added[2]))
    for found in (delta(folder, "added"), postgres(operated, "added")):
        assert {r["k"]: r["_txid"] is None or r["_message_id"] is None for r in found} == {"z": True, "a": False}
    operated.verify()


def test_rows_that_are_appended_or_kept_or_cut_have_them(operated: Operated) -> None:
    """Plain appends, kept columns, partitions, and values that are discarded."""
    folder, database = operated.cell.folder, operated.cell.database
    keep: dict[str, Any] = {**UPSERT, "keep": "made", "lineage": True}
    operated.sql("create table discarded (k varchar(1), at bigint, made text, _txid bigint, _message_id text)")
    operated.put(b"0|a,1", b"1|a,2;b,1", b"2|a,0;wide,7")
    operated.run(
        rows_from(
            operated,
            PostgresSink("appended", database=database, lineage=True),
            PostgresSink("kept", database=database, **keep),
            DeltaSink(folder / "lake" / "kept", **keep),
            DeltaSink(folder / "lake" / "cut", partition_by=["k"], lineage=True),
            PostgresSink("discarded", database=database, lineage=True, schema_contract="discard_value"),
        )
    )
    ids = dict(operated.sql("select made, _message_id from appended"))
    assert sorted(ids) == ["0", "1", "2"]
    for found in (postgres(operated, "appended"), delta(folder, "cut"), postgres(operated, "discarded")):
        assert len(found) == 5
        assert all((r["_txid"], r["_message_id"]) == (1, ids[r["made"]]) for r in found)
    for found in (delta(folder, "kept"), postgres(operated, "kept")):
        # The kept column is the first message's, the row the newest one's.
        assert [(r["at"], r["made"], r["_message_id"]) for r in found if r["k"] == "a"] == [(2, "0", ids["1"])]
    operated.verify()


@pytest.mark.parametrize("by_hand", [False, True])
def test_rows_that_take_a_rejected_ones_place_have_their_own(
    operated: Operated, monkeypatch: pytest.MonkeyPatch, *, by_hand: bool
) -> None:
    """At the commit, and by `ledger skip --rows`, which knows the sink from the ledger alone."""
    if by_hand:
        monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")
    operated.sql(
        "create table newest (k text primary key, at bigint, made text check (made <> '1'), _txid bigint, _message_id text)"
    )
    operated.put(b"0|a,1", b"1|a,2;b,1", b"2|c,1")
    built = rows_from(operated, PostgresSink("newest", database=operated.cell.database, **UPSERT, lineage=True))
    if by_hand:
        with pytest.raises(SinkRefused, match="check constraint"):
            operated.run(built)
        operated.command("ledger", "skip", NAME, "1", "postgres.newest", "--rows", "--by", "Ada", "--why", "known")
    assert operated.run(built).rejected == 1
    (rejected,) = operated.sql("select message from stormproof.reject")
    before, after = (f"{rejected[0].partition('-')[0]}-{int(rejected[0].partition('-')[2]) + n}" for n in (-1, 1))
    found = sorted((r["k"], r["made"], r["_txid"], r["_message_id"]) for r in postgres(operated, "newest"))
    assert found == [("a", "0", 1, before), ("c", "2", 1, after)]
    operated.verify()


def test_a_fold_that_gets_the_column_has_the_txid_of_its_next_change(operated: Operated) -> None:
    folder, database = operated.cell.folder, operated.cell.database
    write_deltalake(folder / "lake" / "counted", pa.table({"k": ["a", "z"], "n": [5, 5]}))
    operated.sql("create table counted (k text primary key, n bigint); insert into counted values ('a', 5), ('z', 5)")
    operated.put(b"0|a,1;b,1")
    more: dict[str, Any] = {"lineage": Lineage(message=None), "schema_contract": "evolve"}
    t = Topology(NAME)
    rows = t.stream("lines", source_of(operated.cell.queue, database)).flat_map(rows_of, "line", schema=SCHEMA)
    rows.group_by("k").persistent_aggregate(n=count()).into(
        DeltaSink(folder / "lake" / "counted", **more), PostgresSink("counted", database=database, **more)
    )
    operated.run(t)
    operated.put(b"1|a,2")
    operated.run(t)
    for found in (delta(folder, "counted"), postgres(operated, "counted")):
        assert {r["k"]: (r["n"], r["_txid"]) for r in found} == {"a": (7, 2), "b": (1, 1), "z": (5, None)}


def test_a_column_that_takes_no_null_is_refused(operated: Operated) -> None:
    """A file with a NULL would be adopted by Delta as it is."""
    folder, database = operated.cell.folder, operated.cell.database
    fields = [
        Field("k", PrimitiveType("string")),
        Field("at", PrimitiveType("long")),
        Field("made", PrimitiveType("string")),
    ]
    id_ = Field("_message_id", PrimitiveType("string"), nullable=False)
    DeltaTable.create(folder / "lake" / "added", Schema([*fields, Field("_txid", PrimitiveType("long")), id_]))
    operated.sql("create table added (k text, at bigint, made text, _txid bigint, _message_id text not null)")
    for sink in (sinks_of(folder, database)[0], sinks_of(folder, database)[2]):
        with pytest.raises(SinkRefused, match="column '_message_id' is NOT NULL"):
            operated.run(rows_from(operated, sink))


def test_a_group_has_its_txid_alone(operated: Operated) -> None:
    sink = PostgresSink("groups", database=operated.cell.database, lineage=True)
    t = Topology(NAME)
    lines = t.stream("lines", source_of(operated.cell.queue, operated.cell.database))
    lines.flat_map(rows_of, "line", schema=SCHEMA).group_by("k").agg(n=count()).into(sink)
    operated.put(*LINES[:2])
    operated.run(t)
    found = sorted((r["k"], r["n"], r["_txid"], r["_message_id"]) for r in postgres(operated, "groups"))
    assert found == [("a", 2, 1, None), ("b", 1, 1, None)]


def test_a_job_writes_its_key(operated: Operated) -> None:
    """And a dry run tells the bytes of its files with the columns."""
    folder, database = operated.cell.folder, operated.cell.database
    settings = Settings(database_url=database.sqlalchemy_url.render_as_string(hide_password=False), home=folder)

    def frame(*ks: str) -> Handout:
        table = pa.table({"k": [*ks], "at": [1] * len(ks)})
        return Handout("", lambda: table, table.schema)

    with exactly_once(*sinks_of(folder, database), name="daily", settings=settings, frames=ArrowFrames()) as write:
        told = write.dry_run(frame("a", "b"), "monday")
        write.once(frame("a", "b"), "monday")
        write.once(frame("c", "a"), "tuesday")
    wanted = {("a", 1, "monday"), ("b", 1, "monday"), ("c", 2, "tuesday"), ("a", 2, "tuesday")}
    for found in (delta(folder, "added"), postgres(operated, "added")):
        assert {(r["k"], r["_txid"], r["_message_id"]) for r in found} == wanted
    for found in (delta(folder, "newest"), postgres(operated, "newest")):
        assert {(r["k"], r["_txid"], r["_message_id"]) for r in found} == wanted - {("a", 2, "tuesday")}
    files = operated.sql(
        "select sink, sum((f ->> 'bytes')::bigint) from stormproof.txn_sink, jsonb_array_elements(files) f"
        " where txid = 1 group by sink"
    )
    assert {sink.sink: sink.rows.bytes for sink in told.sinks} == {name: int(size) for name, size in files}
    operated.command("audit", "verify", "daily")


def test_a_micro_batch_writes_its_key(operated: Operated) -> None:
    """Whichever time it is handed out: what is written is of the first time."""
    folder, database = operated.cell.folder, operated.cell.database
    settings = Settings(database_url=database.sqlalchemy_url.render_as_string(hide_password=False), home=folder)
    sinks = sinks_of(folder, database)
    with exactly_once(sinks[0], sinks[2], name="stream", settings=settings, frames=ArrowFrames()) as write:
        for batch, value in ((0, "x"), (1, "y"), (1, "y")):
            write(handout("query", value), batch)
    for found in (delta(folder, "added"), postgres(operated, "added")):
        assert sorted((r["value"], r["_txid"], r["_message_id"]) for r in found) == [
            ("x", 1, "query:0"),
            ("y", 2, "query:1"),
        ]
    operated.command("audit", "verify", "stream")
    told = operated.command("audit", "message", "stream", "query:1")
    assert [opening["txid"] for opening in told["openings"]] == [2]
