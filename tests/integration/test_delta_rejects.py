"""A row that a CHECK constraint of a Delta table refuses fails its one message at that sink; all others are committed."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from support.crashes import Cell
from support.duck import connected
from support.operated import Operated
from support.rejecting import BAD, words_of
from support.sink_harness import SCHEMA, SinkHarness
from support.topologies import source_of

from stormproof import DeltaSink, Topology, count
from stormproof.core.base.errors import CannotTell, SinkRefused
from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.core.contract.sink import MESSAGE_COLUMNS
from stormproof.sinks.contract.protocol import CommitOutcome, RefusedRow, SinkSession
from stormproof.sinks.delta import judge
from stormproof.sinks.prepare.rejected_messages import Rejects
from stormproof.trident.terms.observers import BatchResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.sampled(0.5)

NAME = "strict-lake"
ROWS = [("a", 1), ("b", 200), ("c", 3), ("d", 4)]
MESSAGES = [10, 20, 20, 30]


def strict(folder: Path, how: str, partitions: list[str] | None = None, rule: str = "n < 100") -> SinkHarness:
    harness = SinkHarness(f"delta-{how}", folder, None)
    table = DeltaTable.create(harness.delta_path, Schema.from_arrow(SCHEMA), partition_by=partitions or [])
    table.alter.add_constraint({"few": rule})
    return harness


def make_required(path: Path, column: str) -> None:
    """Make a column NOT NULL, as another writer does: by a log entry."""
    log = path / "_delta_log"
    entries = sorted(log.glob("*.json"))
    actions = [json.loads(line) for entry in entries for line in entry.read_text().splitlines()]
    metadata = [action["metaData"] for action in actions if "metaData" in action][-1]
    schema = json.loads(metadata["schemaString"])
    for field in schema["fields"]:
        field["nullable"] = field["nullable"] and field["name"] != column
    metadata["schemaString"] = json.dumps(schema)
    (log / f"{len(entries):020}.json").write_text(json.dumps({"metaData": metadata}) + "\n")


def names(path: Path) -> set[str]:
    """The table's files, with the second names of prepared ones."""
    return {file.name for file in path.iterdir() if file.name.endswith(".parquet")}


@pytest.mark.parametrize("how", ["append", "upsert"])
@pytest.mark.parametrize("partitions", [[], ["word"], ["n"]])
def test_a_refused_row_takes_its_message_and_no_other(tmp_path: Path, how: str, partitions: list[str]) -> None:
    harness = strict(tmp_path, how, partitions)
    opened = harness.open()
    transaction = harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, tasks=2, rejects_max=1)
    result = opened.commit(transaction, checked=True)
    assert harness.rows() == Counter([("a", 1), ("d", 4)])
    assert {(row.messages, row.goes_with_others) for row in result.refused} == {(((20, 0),), False), (((20, 0),), True)}
    assert "CHECK constraint 'few' (n < 100)" in result.refused[0].error
    (entry,) = opened.evidence(0, None).entries
    assert (entry.rows + entry.rejected, entry.problem) == (transaction.rows + entry.reinstated, None)


def test_only_files_with_refused_rows_are_written_anew(tmp_path: Path) -> None:
    harness = strict(tmp_path, "append")
    opened = harness.open()
    transaction = harness.prepare(opened, 1, None, ROWS, messages=[1, 2, 3, 4], tasks=4, rejects_max=1)
    before = names(harness.delta_path)
    opened.commit(transaction, checked=True)
    opened.finished(transaction)
    after = names(harness.delta_path)
    assert len(after) == 3  # the file that had the refused row alone is gone, and none came
    assert after < before
    assert opened.sweep(lambda *_: True) == 0


def test_a_foreign_compaction_keeps_the_rows_and_drops_the_message_columns(tmp_path: Path) -> None:
    harness = strict(tmp_path, "append")
    opened = harness.open()
    opened.commit(harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, tasks=2, rejects_max=1), checked=True)
    opened.commit(harness.prepare(opened, 2, 1, [("e", 5)], messages=[40], rejects_max=1), checked=True)
    table = DeltaTable(harness.delta_path)
    table.optimize.compact()
    (uri,) = table.file_uris()
    assert pq.read_schema(uri).names == SCHEMA.names
    assert harness.rows() == Counter([("a", 1), ("d", 4), ("e", 5)])
    report = opened.evidence(0, None)
    assert (report.problems, [entry.problem for entry in report.entries]) == ((), [None, None])


def test_where_a_message_is_left_out_the_row_that_it_superseded_is_committed(tmp_path: Path) -> None:
    harness = strict(tmp_path, "upsert")
    opened = harness.open()
    transaction = harness.prepare(opened, 1, None, [("a", 1), ("a", 200), ("b", 2)], messages=[1, 2, 3], rejects_max=1)
    opened.commit(transaction, checked=True)
    assert harness.rows() == Counter([("a", 1), ("b", 2)])
    (entry,) = opened.evidence(0, None).entries
    assert (entry.rows, entry.rejected, entry.superseded, entry.reinstated) == (2, 1, 0, 1)
    assert entry.rows + entry.rejected == transaction.rows + entry.reinstated


@pytest.mark.parametrize(
    ("rule", "refused"), [("extra > 0", {"c"}), ("extra IS NULL OR n < extra", {"a"})], ids=["held", "compared"]
)
def test_an_upsert_that_leaves_columns_alone_is_asked_of_the_merged_rows(
    tmp_path: Path, rule: str, refused: set[str]
) -> None:
    """The table holds a value of the column that decides; the batch does not write it."""
    harness = SinkHarness("delta-upsert", tmp_path, None)
    schema = pa.schema([*SCHEMA, pa.field("extra", pa.int64())])
    held = {"word": ["a", "b"], "n": [1, 1], "extra": [5, 500]}
    write_deltalake(harness.delta_path, pa.table(held, schema))
    DeltaTable(harness.delta_path).alter.add_constraint({"few": rule})
    opened = harness.open()
    added = [("a", 7), ("b", 7), ("c", 7)]
    result = opened.commit(harness.prepare(opened, 1, None, added, messages=[1, 2, 3], rejects_max=1), checked=True)
    assert {json.loads(row.text)["word"] for row in result.refused} == refused
    taken = {word: n for word, n in added if word not in refused}
    assert harness.rows() == Counter(({"a": 1, "b": 1} | taken).items())


def test_control_rules_that_are_asked_of_the_added_rows_alone_reject_rows_that_the_table_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "_merged", lambda *_: "SELECT * FROM added")
    with pytest.raises(SinkRefused, match="more than 1 messages"):
        test_an_upsert_that_leaves_columns_alone_is_asked_of_the_merged_rows(tmp_path, "extra > 0", {"c"})


def refused_twice(harness: SinkHarness, opened: SinkSession, place: str) -> tuple[RefusedRow, ...]:
    """What the second commit says of a transaction in whose first commit the driver died."""
    transaction = harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, rejects_max=1)
    with pytest.raises(FailpointError), armed(f"{place}=error"):
        opened.commit(transaction, checked=True)
    with closing(harness.open(epoch=2)) as again:
        result = again.commit(transaction, checked=True)
        assert result.outcome is (
            CommitOutcome.ALREADY_HELD
            if place in ("delta.after_log_entry", "delta.after_sync")
            else CommitOutcome.APPLIED
        )
        assert harness.rows() == Counter([("a", 1), ("d", 4)])
        again.finished(transaction)
        again.sweep(lambda _txid, _attempt, name: name not in {file.path for file in transaction.files})
        return result.refused


@pytest.mark.parametrize("how", ["append", "upsert"])
@pytest.mark.parametrize("place", ["task.after_file", "delta.after_check", "delta.after_log_entry", "delta.after_sync"])
def test_a_driver_that_died_in_the_commit_is_told_the_same_rejects(tmp_path: Path, how: str, place: str) -> None:
    harness = strict(tmp_path, how)
    opened = harness.open()
    if place == "task.after_file":  # the files of tasks reach it, too: the one that the commit writes is meant
        transaction = harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, rejects_max=1)
        with pytest.raises(FailpointError), armed(f"{place}=error"):
            opened.commit(transaction, checked=True)
        assert harness.rows() == Counter()
        assert len(harness.open(epoch=2).commit(transaction, checked=True).refused) == 2
        assert harness.rows() == Counter([("a", 1), ("d", 4)])
        return
    assert len(refused_twice(harness, opened, place)) == 2
    live = {Path(uri).name for uri in DeltaTable(harness.delta_path).file_uris()}
    assert names(harness.delta_path) == live


def test_control_without_the_record_a_repeat_knows_no_rejects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "recorded", lambda _: "")
    harness = strict(tmp_path, "append")
    assert refused_twice(harness, harness.open(), "delta.after_log_entry") == ()


def test_control_a_refused_row_that_is_not_left_out_is_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "violates", lambda *_: False)
    harness = strict(tmp_path, "append")
    opened = harness.open()
    opened.commit(harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, rejects_max=1), checked=True)
    assert harness.rows() == Counter(ROWS)


@pytest.mark.parametrize("how", ["append", "upsert"])
def test_a_column_that_was_made_not_null_since_refuses_one_message(tmp_path: Path, how: str) -> None:
    """The rows were checked before; the constraint of the table has their messages named."""
    harness = strict(tmp_path, how, rule="n < 100 OR n IS NULL")
    opened = harness.open()
    rows = [("a", 1), ("b", None), ("c", 3)]
    transaction = harness.prepare(opened, 1, None, rows, messages=[1, 2, 3], tasks=3, rejects_max=1)
    make_required(harness.delta_path, "n")
    result = opened.commit(transaction, checked=True)
    assert harness.rows() == Counter([("a", 1), ("c", 3)])
    found = [(row.messages, row.error) for row in result.refused]
    assert found == [(((2, 0),), "it violates the NOT NULL of the table's column 'n'")]


def test_many_refused_rows_are_asked_for_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row more than may be rejected ends the question: no further one is held."""
    harness = strict(tmp_path, "append")
    opened = harness.open()
    rows = [(f"w{n}", 200) for n in range(20_000)]
    held = list[int]()
    add = Rejects.add

    def counted(self: Rejects, row: RefusedRow) -> None:
        held.append(row.row)
        add(self, row)

    monkeypatch.setattr(Rejects, "add", counted)
    transaction = harness.prepare(opened, 1, None, rows, messages=list(range(20_000)), rejects_max=10)
    with pytest.raises(SinkRefused, match="more than 10 messages"):
        opened.commit(transaction, checked=True)
    assert len(held) == 11
    assert harness.rows() == Counter()


@pytest.mark.parametrize("refused_rows", [0, 1])
def test_a_commit_whose_log_entry_was_cleaned_up_is_not_committed_again(tmp_path: Path, refused_rows: int) -> None:
    """Where rows were left out, the record of them went with the entry: the next driver cannot tell, and says so."""
    harness = strict(tmp_path, "append")
    opened = harness.open()
    rows = ROWS if refused_rows else [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    transaction = harness.prepare(opened, 1, None, rows, messages=[1, 2, 3, 4], rejects_max=1)
    with pytest.raises(FailpointError), armed("delta.after_log_entry=error"):
        opened.commit(transaction, checked=True)
    before = harness.rows()
    table = DeltaTable(harness.delta_path)
    table.create_checkpoint()
    for entry in (harness.delta_path / "_delta_log").glob("*.json"):
        entry.unlink()
    with closing(harness.open(epoch=2)) as again:
        if refused_rows:
            with pytest.raises(CannotTell, match="evidence of its content has expired"):
                again.commit(transaction, checked=True)
        else:
            assert again.commit(transaction, checked=True).refused == ()
    assert harness.rows() == before


def test_rows_that_name_no_message_are_refused_as_a_whole(tmp_path: Path) -> None:
    """As those are that were prepared before the table got its constraint."""
    harness = strict(tmp_path, "append")
    opened = harness.open()
    with pytest.raises(SinkRefused, match=r"it violates .*'few'"):
        opened.commit(harness.prepare(opened, 1, None, ROWS, rejects_max=9), checked=True)
    assert harness.rows() == Counter()


def test_other_readers_pass_over_the_message_columns(tmp_path: Path) -> None:
    """DuckDB by the table's log; and whoever reads the files by the table's schema. Rewritten files have no such columns."""
    harness = strict(tmp_path, "append")
    opened = harness.open()
    opened.commit(harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, tasks=2, rejects_max=1), checked=True)
    opened.commit(harness.prepare(opened, 2, 1, [("e", 5)], messages=[40], rejects_max=1), checked=True)
    with closing(connected()) as duck:
        found = duck.execute(f"select * from delta_scan('{harness.delta_path}')").to_arrow_table()
    assert found.schema.names == SCHEMA.names
    assert Counter((row["word"], row["n"]) for row in found.to_pylist()) == harness.rows()
    hidden = [Path(uri) for uri in DeltaTable(harness.delta_path).file_uris()]
    named = [path for path in hidden if pq.read_schema(path).names != SCHEMA.names]
    assert named
    assert all(pq.read_schema(path).names == [*SCHEMA.names, *MESSAGE_COLUMNS.names] for path in named)


@pytest.mark.spark
def test_spark_passes_over_the_message_columns(tmp_path: Path, spark: SparkSession) -> None:
    """It reads, rewrites and appends to such a table."""
    harness = strict(tmp_path, "append")
    opened = harness.open()
    opened.commit(harness.prepare(opened, 1, None, ROWS, messages=MESSAGES, tasks=2, rejects_max=1), checked=True)
    path = str(harness.delta_path)
    assert spark.read.format("delta").load(path).columns == SCHEMA.names
    spark.sql(f"UPDATE delta.`{path}` SET n = n + 1 WHERE word = 'a'")
    opened.commit(harness.prepare(opened, 2, 1, [("e", 5)], messages=[40], rejects_max=1), checked=True)
    spark.sql(f"OPTIMIZE delta.`{path}`")
    rows = spark.read.format("delta").load(path).collect()
    assert Counter((row.word, row.n) for row in rows) == Counter([("a", 2), ("d", 4), ("e", 5)]) == harness.rows()


@pytest.mark.postgres
def test_a_topology_rejects_what_a_delta_table_refuses(operated: Operated, tmp_path: Path) -> None:
    path = tmp_path / "words"
    schema = Schema.from_arrow(SCHEMA)
    table = DeltaTable.create(path, Schema([field for field in schema.fields if field.name == "word"]))
    table.alter.add_constraint({"good": f"word <> '{BAD}'"})

    def build(cell: Cell) -> Topology:
        t = Topology(NAME)
        words = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(
            str.split, "line", schema="word string"
        )
        words.into(DeltaSink(path, name="strict"))
        return t

    operated = replace(operated, cell=replace(operated.cell, name=NAME, build=build, mode=None))
    lines = [b"a b", b"bad c", b"d", b"e bad bad f", b"g"]
    operated.run(build(operated.cell))
    operated.put(*lines)
    ran = operated.run(build(operated.cell))
    assert (ran.rejected, ran.messages) == (2, 3)
    held = DeltaTable(path).to_pyarrow_table()
    assert held.schema.names == ["word"]
    assert Counter(held.column("word").to_pylist()) == words_of(lines, {BAD})
    found = operated.sql("select sink, rows, payload, state from stormproof.reject order by number")
    assert found == [("strict", 2, b"bad c", "open"), ("strict", 4, b"e bad bad f", "open")]
    assert operated.kinds("notices", operated.verify()) == ["rejected"]


@pytest.mark.postgres
def test_groups_and_rows_of_before_are_recounted(operated: Operated, tmp_path: Path) -> None:
    """The constraint comes while the topology runs: the files of its second batch name no messages, as groups never do."""
    tables = {"words": tmp_path / "words", "groups": tmp_path / "groups"}

    def build(cell: Cell) -> Topology:
        t = Topology(NAME)
        words = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(
            str.split, "line", schema="word string"
        )
        words.into(DeltaSink(tables["words"], name="words"))
        words.group_by("word").agg(n=count()).into(DeltaSink(tables["groups"], name="groups"))
        return t

    def add_rules(batch: BatchResult) -> None:
        for path in tables.values() if batch.txid == 1 else ():
            DeltaTable(path).alter.add_constraint({"good": f"word <> '{BAD}'"})

    operated = replace(operated, cell=replace(operated.cell, name=NAME, build=build, mode=None, batch_messages=4))
    lines = [b"a", b"b", b"c", b"d", b"a b", b"bad c", b"a d", b"a bad"]
    operated.put(*lines)
    ran = operated.run(build(operated.cell), on_batch=add_rules)
    assert (ran.rejected, ran.messages) == (2, 6)
    held = DeltaTable(tables["words"]).to_pyarrow_table()
    assert Counter(held.column("word").to_pylist()) == words_of(lines, {BAD})
    found: Counter[str] = Counter()
    for row in DeltaTable(tables["groups"]).to_pyarrow_table().to_pylist():
        found[row["word"]] += row["n"]
    assert found == words_of(lines, {BAD})
    rejects = operated.sql("select sink, payload from stormproof.reject order by sink, number")
    assert rejects == [(sink, payload) for sink in ("groups", "words") for payload in (b"bad c", b"a bad")]
    assert set(operated.kinds("notices", operated.verify())) == {"rejected"}
