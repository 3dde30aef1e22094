"""Prepared files: names, bytes, digests, statistics."""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import PreparedFile, TaskContext
from stormproof.sinks.prepare import writer as writer_module
from stormproof.sinks.prepare.staging import (
    FileStatistics,
    PreparedName,
    file_digest,
    parse_prepared_name,
    prepared_batches,
    prepared_name,
    require_files,
    sweep_folder,
)
from stormproof.sinks.prepare.writer import FileWriter

CONTEXT = TaskContext("inc-1", 7, 2, 3)
SCHEMA = pa.schema([("word", pa.string()), ("n", pa.int64())])


def rows(*pairs: tuple[str | None, int | None]) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array([w for w, _ in pairs], pa.string()), pa.array([n for _, n in pairs], pa.int64())], schema=SCHEMA
    )


def write(folder: Path, *batches: pa.RecordBatch) -> tuple[PreparedFile, ...]:
    writer = FileWriter("sink", str(folder)).open_task(CONTEXT, SCHEMA)
    for batch in batches:
        writer.write(batch)
    return tuple(writer.close())


@given(
    st.from_regex(r"[A-Za-z0-9_.-]{1,30}", fullmatch=True),
    st.integers(0, 2**62),
    st.integers(0, 99),
    st.integers(0, 999),
)
def test_a_name_reads_back(incarnation: str, txid: int, attempt: int, task: int) -> None:
    context = TaskContext(incarnation, txid, attempt, task)
    assert parse_prepared_name(prepared_name(context)) == PreparedName(incarnation, txid, attempt, task)


def test_the_same_context_never_names_one_file_twice() -> None:
    assert len({prepared_name(CONTEXT) for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "name", ["part-0.parquet", "stormproof-x-1-1-1.parquet", "stormproof-x-1-1-1-0123abcd.parquet.tmp"]
)
def test_foreign_names_are_left_alone(name: str) -> None:
    assert parse_prepared_name(name) is None


def test_an_incarnation_cannot_leave_the_folder() -> None:
    with pytest.raises(ValueError, match="incarnation"):
        prepared_name(TaskContext("../x", 1, 1, 1))


def test_a_file_is_what_it_says(tmp_path: Path) -> None:
    (file,) = write(tmp_path, rows(("a", 1)), rows(), rows(("b", None), (None, 3)))
    path = tmp_path / file.path
    assert (file.rows, file.bytes, file.digest) == (3, path.stat().st_size, file_digest(str(path)))
    assert pq.read_table(path).to_pylist() == [{"word": "a", "n": 1}, {"word": "b", "n": None}, {"word": None, "n": 3}]
    assert json.loads(file.statistics) == {
        "numRecords": 3,
        "minValues": {"word": "a", "n": 1},
        "maxValues": {"word": "b", "n": 3},
        "nullCount": {"word": 1, "n": 1},
    }


def test_no_rows_no_file(tmp_path: Path) -> None:
    assert write(tmp_path, rows()) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_task_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ROW_GROUP_ROWS_MAX", 1)
    writer = FileWriter("sink", str(tmp_path)).open_task(CONTEXT, SCHEMA)
    writer.write(rows(("a", 1)))
    assert len(list(tmp_path.iterdir())) == 1
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_rows_are_not_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ROW_GROUP_ROWS_MAX", 2)
    (file,) = write(tmp_path, *[rows((str(i), i)) for i in range(5)])
    with pq.ParquetFile(tmp_path / file.path) as parquet:
        assert parquet.num_row_groups == 3
    assert [r["n"] for b in prepared_batches(str(tmp_path), [file]) for r in b.to_pylist()] == list(range(5))


def test_a_file_that_goes_while_it_is_committed_is_named(tmp_path: Path) -> None:
    """As a driver that took over does it to one that stood still."""
    (file,) = write(tmp_path, rows(("a", 1)))
    require_files(str(tmp_path), [file], where="sink", digests=True)
    reading = prepared_batches(str(tmp_path), [file])
    (tmp_path / file.path).unlink()
    with pytest.raises(SinkRefused, match=f"the prepared file .*{file.path} is missing"):
        next(reading)


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    writer = FileWriter("sink", str(tmp_path)).open_task(CONTEXT, SCHEMA)
    with pytest.raises(ValueError, match="takes word string, n int64"):
        writer.write(rows(("a", 1)).select(["n", "word"]))


def test_a_changed_byte_is_seen_by_its_digest(tmp_path: Path) -> None:
    (file,) = write(tmp_path, rows(("a", 1)))
    content = bytearray((tmp_path / file.path).read_bytes())
    content[10] ^= 1
    (tmp_path / file.path).write_bytes(content)
    require_files(str(tmp_path), [file], where="sink")
    with pytest.raises(SinkRefused, match="digest"):
        require_files(str(tmp_path), [file], where="sink", digests=True)


def statistics(kind: pa.DataType, *values: Any) -> tuple[Any, Any]:
    gathered = FileStatistics(pa.schema([("x", kind)]))
    for value in values:
        gathered.add(pa.record_batch([pa.array([value], kind)], names=["x"]))
    read = json.loads(gathered.to_json())
    return read.get("minValues", {}).get("x"), read.get("maxValues", {}).get("x")


_DAY, _FIRST, _LAST = "2026-01-01T00:00:00", "0001-01-01T00:00:00", "9999-12-31T23:59:59"


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.int64(), [3, -(2**63), 2**63 - 1], (-(2**63), 2**63 - 1)),
        (pa.float64(), [1.5, math.nan, 2.5], (None, None)),
        (pa.float64(), [1.5, math.inf], (1.5, "Infinity")),
        (pa.float32(), [-math.inf, 0.5], ("-Infinity", 0.5)),
        (pa.date32(), [date(2020, 1, 2), date(1969, 1, 1)], ("1969-01-01", "2020-01-02")),
        (pa.string(), [None, None], (None, None)),
        (pa.string(), ["b", "", None], ("", "b")),
        (pa.string(), ["x" * 40], ("x" * 32, "x" * 32 + "\U0010ffff")),
        (pa.string(), ["x" * 32 + "\U0010ffff"], ("x" * 32, "x" * 32 + "\U0010ffff")),
        (pa.string(), ["x" * 32 + "\U0010ffffy" + "z"], ("x" * 32, "x" * 32 + "\U0010ffff" * 2)),
        (pa.bool_(), [True], (True, True)),
        (pa.binary(), [b"a"], (None, None)),
        (pa.decimal128(38, 2), [Decimal("-0.01"), Decimal("1E+20")], (-0.01, 1e20)),
        (pa.timestamp("us"), [datetime(2026, 1, 1, 0, 0, 0, 1_001)], (f"{_DAY}.001", f"{_DAY}.002")),  # noqa: DTZ001
        (pa.timestamp("us"), [datetime(2026, 1, 1, 0, 0, 0, 1_000)], (f"{_DAY}.001", f"{_DAY}.001")),  # noqa: DTZ001
        (pa.timestamp("us", tz="UTC"), [datetime(1, 1, 1, tzinfo=UTC)], (f"{_FIRST}.000Z", f"{_FIRST}.000Z")),
        (pa.timestamp("us"), [datetime.max], (f"{_LAST}.999", f"{_LAST}.999999")),  # noqa: DTZ901
    ],
)
def test_statistics(kind: pa.DataType, values: list[Any], expected: tuple[Any, Any]) -> None:
    assert statistics(kind, *values) == expected


def test_a_file_with_a_nan_has_no_bounds_at_all() -> None:
    """A reader that takes a missing bound beside others for "no match" would lose its rows."""
    gathered = FileStatistics(pa.schema([("x", pa.float64()), ("y", pa.int64())]))
    for value in (1.0, math.nan, 2.0):
        gathered.add(pa.record_batch([pa.array([value]), pa.array([1])], names=["x", "y"]))
    assert json.loads(gathered.to_json()) == {"numRecords": 3, "nullCount": {"x": 0, "y": 0}}


def test_floats_have_no_statistics_in_the_parquet_file(tmp_path: Path) -> None:
    """Arrow leaves NaN out of them: readers to which NaN is the greatest number would lose it."""
    schema = pa.schema(
        [("x", pa.float64()), ("l", pa.list_(pa.float32())), ("s", pa.struct([("f", pa.float32())])), ("n", pa.int64())]
    )
    writer = FileWriter("s", str(tmp_path)).open_task(TaskContext("inc", 1, 1, 0), schema)
    writer.write(
        pa.record_batch(
            [
                pa.array([1.0]),
                pa.array([[1.0]], schema.field("l").type),
                pa.array([{"f": 1.0}], schema.field("s").type),
                pa.array([1]),
            ],
            schema=schema,
        )
    )
    (file,) = writer.close()
    group = pq.ParquetFile(tmp_path / file.path).metadata.row_group(0)
    assert [group.column(i).statistics is not None for i in range(4)] == [False, False, False, True]


def test_decimals_have_all_their_digits_in_statistics() -> None:
    gathered = FileStatistics(pa.schema([("x", pa.decimal128(38, 38))]))
    gathered.add(pa.record_batch([pa.array([Decimal("1E-38")], pa.decimal128(38, 38))], names=["x"]))
    assert f'"minValues":{{"x":0.{"0" * 37}1}}' in gathered.to_json()


def test_the_fields_of_a_struct_have_statistics_and_32_columns_at_most() -> None:
    kind = pa.struct([("x", pa.int64()), ("s", pa.struct([("y", pa.string())])), ("l", pa.list_(pa.int64()))])
    rows = [{"x": 3, "s": {"y": "b"}, "l": [1]}, None, {"x": 5, "s": None, "l": None}]
    schema = pa.schema([("a", kind), *((f"c{i}", pa.int64()) for i in range(40))])
    gathered = FileStatistics(schema)
    numbers = [pa.array([1, 2, 3]) for _ in range(40)]
    gathered.add(pa.record_batch([pa.array(rows, kind), *numbers], schema=schema))
    read = json.loads(gathered.to_json())
    assert read["minValues"]["a"] == {"x": 3, "s": {"y": "b"}}
    assert read["maxValues"]["a"] == {"x": 5, "s": {"y": "b"}}
    assert read["nullCount"]["a"] == {"x": 1, "s": {"y": 2}}
    assert list(read["minValues"])[1:] == [f"c{i}" for i in range(30)]


def test_a_zero_has_both_signs_in_statistics() -> None:
    low, high = statistics(pa.float64(), 0.0)
    assert (math.copysign(1, low), math.copysign(1, high)) == (-1, 1)
    low, high = statistics(pa.float64(), -0.0)
    assert (math.copysign(1, low), math.copysign(1, high)) == (-1, 1)


@given(st.lists(st.text(max_size=60), min_size=1, max_size=5))
def test_text_lies_between_its_statistics(values: list[str]) -> None:
    values = [v.encode("utf-8", "replace").decode() for v in values]
    low, high = statistics(pa.string(), *values)
    assert all(low.encode() <= v.encode() <= high.encode() for v in values)


def test_sweep_asks_before_it_removes(tmp_path: Path) -> None:
    (kept,), (gone,) = write(tmp_path, rows(("a", 1))), write(tmp_path, rows(("b", 1)))
    removed = sweep_folder(str(tmp_path), "inc-1", lambda _t, _a, _n: True, lambda: frozenset({kept.path}))
    assert removed == 1
    assert [p.name for p in tmp_path.iterdir()] == [kept.path]
    assert not (tmp_path / gone.path).exists()


def test_sweep_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert sweep_folder(str(tmp_path / "none"), "inc-1", lambda _t, _a, _n: True) == 0


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_staged_files_are_for_their_user_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "staging" / "sink"
    folder.parent.mkdir()
    before = os.umask(umask)
    try:
        (file,) = write(folder, rows(("a", 1)))
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / file.path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_a_tables_own_files_are_as_the_umask_has_it(tmp_path: Path, umask: int) -> None:
    """As those that Spark writes there: its readers are others' processes."""
    before = os.umask(umask)
    try:
        writer = FileWriter("sink", str(tmp_path / "table"), private=False).open_task(CONTEXT, SCHEMA)
        writer.write(rows(("a", 1)))
        (file,) = writer.close()
    finally:
        os.umask(before)
    assert (tmp_path / "table").stat().st_mode & 0o777 == 0o777 & ~umask
    assert (tmp_path / "table" / file.path).stat().st_mode & 0o777 == 0o666 & ~umask
