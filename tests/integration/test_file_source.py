"""Files as a topology's source: Parquet rows without a detour, bad rows by name, files that change, disk and database."""

from __future__ import annotations

import datetime
import decimal
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from support.jobs import SEED, run_job
from support.queues import prepared_database

from stormproof.core.base.errors import PositionMismatch, TopologyError, UsageError
from stormproof.core.base.message import MessageFailure
from stormproof.core.contract.schema import parse_schema
from stormproof.core.contract.source import Lease, Limit, Slice
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.files import FileSource
from stormproof.core.source.files.rows import RowDecoder, shown_payload
from stormproof.core.tracking.verdict import mismatches
from stormproof.sinks.stores.memory import MemorySink
from stormproof.testing import Message, messages_of
from stormproof.trident.topology.aggregate import sum_
from stormproof.trident.topology.stream import Topology

pytestmark = pytest.mark.postgres

ANY = Limit(1_000_000)


@pytest.fixture
def sources(database: Database) -> Iterator[list[FileSource]]:
    made: list[FileSource] = []
    prepared_database(database)
    yield made
    for source in made:
        source.close()


def opened(source: FileSource, owner: str = "a", limit: Limit = ANY) -> Slice:
    slice_ = source.open(Lease(owner, 1), limit, 7)
    assert slice_ is not None
    return slice_


def rows_of(source: FileSource, slice_: Slice, parallelism: int = 1) -> pa.Table:
    batches = [
        source.decoder.decode(batch.column("payload")).rows
        for reader in source.readers(slice_, parallelism)
        for batch in reader.read(7, frozenset(), 1_000)
    ]
    return pa.Table.from_batches(batches)


class TestParquet:
    SCHEMA = "n bigint not null, price decimal(9,2), at timestamp, raw binary, tags array<string>"

    def table(self, rows: int, start: int = 0) -> pa.Table:
        numbers = range(start, start + rows)
        at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        return pa.table(
            {
                "left_out": ["x"] * rows,
                "tags": [["a", str(n)] for n in numbers],
                "n": pa.array(numbers, pa.int64()),
                "price": pa.array([decimal.Decimal(n) / 4 for n in numbers], pa.decimal128(9, 2)),
                "at": pa.array([at] * rows, pa.timestamp("us", "UTC")),
                "raw": [b"\xff%d" % n for n in numbers],
            }
        )

    def source(self, sources: list[FileSource], database: Database, folder: Path, **options: object) -> FileSource:
        arguments = {"schema": self.SCHEMA, "name": "rows", "database": database, "look_interval_s": 0.0, **options}
        source = FileSource(folder, "parquet", **arguments)  # type: ignore[arg-type]
        source.subscribe("s", 1)
        sources.append(source)
        return source

    def test_every_type_reaches_the_stream(self, database: Database, sources: list[FileSource], tmp_path: Path) -> None:
        table = self.table(10)
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
        source = self.source(sources, database, tmp_path)
        slice_ = opened(source)
        for parallelism in (1, 2, 5):
            assert rows_of(source, slice_, parallelism) == table.select(source.decoder.schema.names).cast(
                source.decoder.schema
            )

    def test_a_slice_ends_with_a_row_group_and_parts_do(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        pq.write_table(self.table(1_000), tmp_path / "a.parquet", row_group_size=100)
        source = self.source(sources, database, tmp_path)
        slice_ = opened(source, limit=Limit(450))
        assert slice_.expected.messages == 400
        parts = [sum(b.num_rows for b in r.read(7, frozenset(), 1_000)) for r in source.readers(slice_, 3)]
        assert parts == [100, 200, 100]
        assert opened(source, "b", Limit(50)).expected.messages == 50  # smaller than a row group: there is no way round

    def test_a_part_of_a_row_group_is_read_once_by_a_process(
        self, database: Database, sources: list[FileSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pq.write_table(self.table(1_000), tmp_path / "a.parquet")
        source = self.source(sources, database, tmp_path)
        read, real = list[int](), pq.ParquetFile.read_row_group

        def reading(file: pq.ParquetFile, group: int, **options: Any) -> pa.Table:
            read.append(group)
            return real(file, group, **options)

        monkeypatch.setattr(pq.ParquetFile, "read_row_group", reading)
        numbers = list[int]()
        for owner in range(10):
            numbers += rows_of(source, opened(source, str(owner), Limit(100))).column("n").to_pylist()
        assert numbers == list(range(1_000))
        assert read == [0]

    def test_a_value_that_its_field_cannot_hold_fails_its_message(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        pq.write_table(pa.table({"n": pa.array([1, None, 2**40, 4], pa.int64())}), tmp_path / "a.parquet")
        source = self.source(sources, database, tmp_path, schema="n int not null")
        (reader,) = source.readers(opened(source), 1)
        (batch,) = reader.read(7, frozenset(), 1_000)
        decoded = source.decoder.decode(batch.column("payload"))
        assert [row for row, _ in decoded.failed] == [1, 2]
        assert "NOT NULL" in decoded.failed[0][1]
        assert "n" in decoded.failed[1][1]
        assert [decoded.rows.column(0)[row].as_py() for row in (0, 3)] == [1, 4]

    def test_a_failed_row_is_kept_with_its_types_when_the_file_is_gone(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        table = self.table(5)
        path = tmp_path / "a.parquet"
        pq.write_table(table, path)
        source = self.source(sources, database, tmp_path, max_attempts=2, backoff_base_s=0.0)
        slice_ = opened(source)
        (batch,) = source.readers(slice_, 1)[0].read(7, frozenset(), 1_000)
        failed = [failure(batch, row) for row in (1, 3)]
        assert source.confirm(Lease("a", 1), failed).retried == ("1-1", "1-3")
        path.unlink()
        retry = opened(source, "b")
        assert retry.retry
        wanted = table.select(source.decoder.schema.names).cast(source.decoder.schema).take([1, 3])
        assert rows_of(source, retry, 2) == wanted
        assert source.confirm(Lease("b", 1), failed).dead == ("1-1", "1-3")
        letter = source.dead_letters()[0]
        assert shown_payload(letter.payload).startswith('{"n": 1, "price": "0.25"')

    def test_a_retry_and_a_dead_letter_have_columns_that_the_source_reads_only_by_now(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        """Rows of several row groups, and a column whose name another one has, too."""
        path = tmp_path / "a.parquet"
        table = pa.table([[*range(9)], ["x", *"abcdefgh"], [0] * 9, [0] * 9], names=["n", "m", "twice", "twice"])
        pq.write_table(table, path, row_group_size=4)
        before = self.source(sources, database, tmp_path, schema="n bigint", max_attempts=1)
        slice_ = opened(before)
        groups = list(before.readers(slice_, 1)[0].read(7, frozenset(), 1_000))
        failed = [failure(groups[row // 4], row % 4) for row in (1, 3, 8)]
        assert before.confirm(Lease("a", 1), failed).dead == ("1-1", "1-3", "1-8")
        path.unlink()
        after = self.source(sources, database, tmp_path, schema="n bigint, m string")
        after.requeue(["1-1", "1-3", "1-8"], by="me", why="test")
        assert rows_of(after, opened(after, "b")).to_pylist() == [
            {"n": 1, "m": "a"},
            {"n": 3, "m": "c"},
            {"n": 8, "m": "h"},
        ]

    def test_a_row_that_was_stored_without_a_column_fails_its_message_by_name(self) -> None:
        rows = pa.array([{"n": 1}, {"n": 2}], pa.struct({"n": pa.int64()}))
        made = RowDecoder(parse_schema("n bigint, m string")).decode(rows)
        assert [(row, "stored before field 'm' was read" in text) for row, text in made.failed] == [
            (0, True),
            (1, True),
        ]
        assert made.rows.column(0).to_pylist() == [1, 2]

    def test_a_file_without_the_columns_is_refused(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        source = self.source(sources, database, tmp_path, schema="n bigint, m string")
        pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
        with pytest.raises(UsageError, match=r"a\.parquet has no column 'm'; it has n"):
            opened(source)
        twice = pa.Table.from_arrays([pa.array([1]), pa.array(["x"]), pa.array(["y"])], names=["n", "m", "m"])
        pq.write_table(twice, tmp_path / "a.parquet")
        with pytest.raises(UsageError, match=r"a\.parquet has several columns 'm'; it has n, m, m"):
            opened(source)
        pq.write_table(pa.table({"n": [[1]], "m": ["x"]}), tmp_path / "a.parquet")
        with pytest.raises(UsageError, match="column 'n' is list<element: int64>, which cannot be read as int64"):
            opened(source)
        (tmp_path / "a.parquet").write_bytes(b"half a file")
        with pytest.raises(UsageError, match=r"a\.parquet is not a Parquet file"):
            opened(source)


def failure(batch: pa.RecordBatch, row: int) -> MessageFailure:
    cells = {name: batch.column(name)[row].as_py() for name in ("id", "origin", "token")}
    return Message(**cells, payload=b"").failed()


class TestLines:
    def source(self, sources: list[FileSource], database: Database, path: Path, **options: object) -> FileSource:
        arguments = {
            "schema": "payload binary",
            "name": "lines",
            "database": database,
            "look_interval_s": 0.0,
            **options,
        }
        source = FileSource(path, "text", **arguments)  # type: ignore[arg-type]
        source.subscribe("s", 1)
        sources.append(source)
        return source

    @pytest.mark.parametrize("ending", [b"\n", b""])
    def test_long_files_cut_anywhere(
        self, database: Database, sources: list[FileSource], tmp_path: Path, seed: int, ending: bytes
    ) -> None:
        random = np.random.default_rng(seed)
        lines = [b"x" * int(size) for size in random.integers(0, 40, 5_000)] + [b"last"]
        (tmp_path / "a.txt").write_bytes(b"\n".join(lines) + ending)
        (tmp_path / "b.txt").write_bytes(b"")
        (tmp_path / "c.txt").write_bytes(b"\nx")
        lines += [b"", b"x"]
        source = self.source(sources, database, tmp_path)
        found = list[bytes]()
        for owner in range(10_000):
            limit = Limit(int(random.integers(1, 3_000)), bytes=int(random.integers(1, 20_000)))
            slice_ = source.open(Lease(str(owner), 1), limit, 7)
            if slice_ is None:
                break
            messages = messages_of(source, slice_, parallelism=int(random.integers(1, 6)), batch_rows=700)
            payloads = [message.payload for message in messages]
            assert slice_.bytes == sum(map(len, payloads))
            assert len(payloads) == 1 or (len(payloads) <= limit.messages and slice_.bytes <= limit.bytes)
            rest = lines[len(found) + len(payloads) : len(found) + len(payloads) + 1]
            full = len(payloads) == limit.messages or not rest or slice_.bytes + len(rest[0]) > limit.bytes
            assert full, "the slice could have held one more"
            found += payloads
        assert found == lines

    def test_a_file_that_symbolic_links_lead_to_is_read_once(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        folder = tmp_path / "days" / "b"
        folder.mkdir(parents=True)
        (folder / "a.txt").write_bytes(b"x")
        (folder / "c.txt").symlink_to("a.txt")
        (tmp_path / "days" / "a").symlink_to("b")  # as "latest" is
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "d.txt").write_bytes(b"y")
        (tmp_path / "days" / "c").symlink_to(elsewhere)
        source = self.source(sources, database, tmp_path / "days" / "**" / "*.txt")
        found = messages_of(source, opened(source))
        assert [(m.payload, source.place_of(m.id)[0]) for m in found] == [
            (b"x", str(folder / "a.txt")),
            (b"y", str(tmp_path / "days" / "c" / "d.txt")),
        ]

    def test_a_name_that_is_not_utf8_is_refused(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        (tmp_path / os.fsdecode(b"\xff.txt")).write_bytes(b"x")
        source = self.source(sources, database, tmp_path / "*")
        with pytest.raises(UsageError, match=r"the name of file '.*\\udcff\.txt' is not UTF-8: rename it"):
            opened(source)

    def test_new_files_are_found_and_hidden_ones_are_not(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        for name in ("b.txt", "_SUCCESS", ".part.txt"):
            (tmp_path / name).write_bytes(name.encode())
        source = self.source(sources, database, tmp_path / "*")
        assert [m.payload for m in messages_of(source, opened(source))] == [b"b.txt"]
        (tmp_path / "a.txt").write_bytes(b"a.txt")
        (message,) = messages_of(source, opened(source, "b"))
        assert (message.payload, message.id, message.origin) == (b"a.txt", 1, 2)
        assert source.place_of(1) == (str(tmp_path / "a.txt"), 0)

    def test_a_changed_file_is_refused_by_name(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(b"one\ntwo\n")
        source = self.source(sources, database, tmp_path)
        slice_ = opened(source)
        readers = source.readers(slice_, 1)
        path.write_bytes(b"one\ntwo\nthree\n")
        with pytest.raises(PositionMismatch, match=r"a\.txt has changed .* 8 bytes.*14 bytes"):
            list(readers[0].read(7, frozenset(), 10))
        with pytest.raises(PositionMismatch, match=r"a\.txt has changed"):
            source.open(Lease("b", 1), ANY, 7)
        path.write_bytes(b"one\nTWO\n")
        os.utime(path, ns=(1, 1))
        with pytest.raises(PositionMismatch, match="hash"):
            source.open(Lease("b", 1), ANY, 7)

    def test_a_file_that_was_only_touched_goes_on(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(b"one\ntwo\n")
        source = self.source(sources, database, tmp_path)
        opened(source, "a", Limit(1))
        os.utime(path, ns=(1, 1))
        assert [m.payload for m in messages_of(source, opened(source, "b"))] == [b"two"]
        again = self.source(sources, database, tmp_path)  # it is written down, too
        assert again.open(Lease("c", 1), ANY, 7) is None

    def test_a_file_may_go_once_its_messages_are_resolved(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(b"one\ntwo\n")
        source = self.source(sources, database, tmp_path)
        slice_ = opened(source)
        path.rename(tmp_path / ".gone")
        with pytest.raises(PositionMismatch, match=r"a\.txt was registered and is gone"):
            source.open(Lease("b", 1), ANY, 7)
        with pytest.raises(PositionMismatch, match="gone"):
            messages_of(source, slice_)
        source.confirm(Lease("a", 1))
        assert source.open(Lease("b", 1), ANY, 7) is None

    def test_bad_arguments(self, database: Database, sources: list[FileSource], tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no format 'csv'; known: parquet, jsonl, text"):
            FileSource(tmp_path, "csv")  # type: ignore[arg-type]
        with pytest.raises(TopologyError, match="take format='jsonl'"):
            FileSource(tmp_path, "text", schema="a string, b string")
        with pytest.raises(TopologyError, match="binary"):
            FileSource(tmp_path, "jsonl", schema="a string, b binary")
        (tmp_path / "a.txt.gz").write_bytes(b"")
        with pytest.raises(UsageError, match="is compressed"):
            opened(self.source(sources, database, tmp_path))
        sources.append(FileSource(tmp_path, "jsonl", name="lines", database=database))
        with pytest.raises(UsageError, match="made for text files, not jsonl"):
            sources[-1].subscribe("s", 1)

    def test_open_takes_part_in_a_transaction(
        self, database: Database, sources: list[FileSource], tmp_path: Path
    ) -> None:
        (tmp_path / "a.txt").write_bytes(b"one\ntwo\n")
        source = self.source(sources, database, tmp_path)
        with connect(database, application_name="tests") as tx:
            assert source.joins(tx)
            assert source.open(Lease("a", 1), ANY, 7, tx) is not None
            tx.rollback()
            assert source.open(Lease("a", 1), ANY, 7, tx) is not None
            tx.commit()
            source.confirm(Lease("a", 1), tx=tx)
            tx.rollback()
        assert source.backlog().pending == 2


def test_a_path_that_is_too_long_for_an_index_is_read(
    sources: list[FileSource], database: Database, tmp_path: Path
) -> None:
    rng = Random(1)
    names = ["".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(80)) for _ in range(14)]
    folder = tmp_path.joinpath(*names)
    folder.mkdir(parents=True)
    assert len(str(folder).encode()) > 2_704
    pq.write_table(pa.table({"n": pa.array([1, 2], pa.int64())}), folder / "a.parquet")
    source = FileSource(str(folder / "*.parquet"), schema="n bigint", name="long", database=database)
    sources.append(source)
    source.subscribe("s", 1)
    assert rows_of(source, opened(source)).to_pydict() == {"n": [1, 2]}


@pytest.mark.spark
def test_rows_of_columns_reach_the_sinks_on_spark(
    spark: SparkSession, database: Database, sources: list[FileSource], tmp_path: Path
) -> None:
    table = pa.table({"word": [f"w{n % 7}" for n in range(1_000)], "n": [*range(999), None]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=300)
    source = FileSource(tmp_path / "rows.parquet", schema="word string, n int not null", name="rows", database=database)
    source.subscribe("s", 1)
    sources.append(source)
    topology = Topology("files")
    topology.stream("rows", source).group_by("word").agg(total=sum_("n")).into(MemorySink("totals", staging=tmp_path))
    slice_ = source.open(Lease("a", 1), ANY, SEED)
    assert slice_ is not None
    ran = run_job(SparkEngine(spark, 2), topology, [], tmp_path, readers=source.readers(slice_, 2))
    assert mismatches(ran.report, slice_.expected, tracked=True) == ()
    assert [(f.id, f.reason, f.input) for f in ran.report.failures] == [
        (999, "bad_message", "{'word': 'w5', 'n': None}")
    ]
    wanted = {f"w{k}": sum(n for n in range(999) if n % 7 == k) for k in range(7)}
    assert {row["word"]: row["total"] for row in ran.rows["totals"]} == wanted
