"""Whole jobs in one process: what is written, what fails, and what the verdict sees."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from support.jobs import FIRST_ID, Ran, readers_of, run_job, source

from stormproof.core.base.arrow import Rows, Words
from stormproof.core.base.errors import JobFailed
from stormproof.core.contract.sink import SinkWriter, TaskContext, TaskWriter
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.pending.memory import MemorySliceReader
from stormproof.core.task.job import CONTROL, WireRow
from stormproof.core.tracking import share as tracking
from stormproof.core.tracking.share import split_runs
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.topology.aggregate import count, sum_
from stormproof.trident.topology.stream import Topology

LINES = [b"a b a", b"", b"b", b"  ", b"c a\tb", b"b b"]
COUNTS = [("a", 3), ("b", 5), ("c", 1)]


def word_count(tmp: Path, function: Callable[[str], object] = str.split) -> Topology:
    t = Topology("words")
    words = t.stream("lines", source()).flat_map(function, "line", schema="word string", name="split")
    words.group_by("word").persistent_aggregate(n=count()).into(MemorySink("counts", staging=tmp))
    return t


def good(ran: Ran) -> Ran:
    assert ran.mismatches == ()
    return ran


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7])
@pytest.mark.parametrize("tracked", [True, False])
def test_word_count(tmp_path: Path, parallelism: int, tracked: bool) -> None:
    ran = good(run_job(InlineEngine(parallelism), word_count(tmp_path), LINES, tmp_path, tracked=tracked))
    assert ran.sorted("counts") == COUNTS
    assert ran.report.read_messages == len(LINES)
    assert (ran.report.ack_xor == 0) is not tracked


def test_a_report_does_not_depend_on_the_order_of_tasks_and_rows(tmp_path: Path) -> None:
    lines = [f"w{i % 7} w{i % 3}".encode() for i in range(50)]
    reports = [
        run_job(InlineEngine(3, rng=rng), word_count(tmp_path), lines, tmp_path).report
        for rng in (None, Random(1), Random(2))
    ]
    digests = [sorted((f.rows, f.digest) for f in r.files) for r in reports]
    assert digests[0] == digests[1] == digests[2]
    assert {r.ack_xor for r in reports} == {reports[0].read_xor}


def test_nothing_to_read(tmp_path: Path) -> None:
    ran = good(run_job(InlineEngine(), word_count(tmp_path), [], tmp_path))
    assert ran.rows == {"counts": []}
    assert (ran.report.read_messages, ran.report.files, ran.report.ack_xor) == (0, (), 0)


def test_lines_without_words(tmp_path: Path) -> None:
    ran = good(run_job(InlineEngine(), word_count(tmp_path), [b"", b" "], tmp_path))
    assert ran.rows == {"counts": []}


def test_empty_and_odd_keys(tmp_path: Path) -> None:
    payloads = [b"", b"", "\u00e9".encode(), b"\x00", b"", "\u00e9".encode()]
    t = Topology("lines")
    t.stream("lines", source()).group_by("line").agg(n=count()).into(MemorySink("counts", staging=tmp_path))
    assert good(run_job(InlineEngine(3), t, payloads, tmp_path)).sorted("counts") == [
        ("", 3),
        ("\x00", 1),
        ("\u00e9", 2),
    ]


def test_excluded_messages_are_left_out(tmp_path: Path) -> None:
    ran = good(run_job(InlineEngine(), word_count(tmp_path), LINES, tmp_path, excluded=frozenset({FIRST_ID + 5})))
    assert ran.sorted("counts") == [("a", 3), ("b", 3), ("c", 1)]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def picky(line: str) -> Iterator[str]:
    for word in line.split():
        match word:
            case "raise":
                raise ValueError("bad \x00 \udcff")
            case "exit":
                sys.exit(3)
            case "unprintable":
                raise Unprintable
            case "number":
                yield 5  # type: ignore[misc]
            case "surrogate":
                yield "\ud800"
            case _:
                yield word


FAILING = [b"a raise", b"b exit", b"c unprintable", b"d number", b"e surrogate", b"f \xff"]


def test_what_fails_a_message_fails_it_alone(tmp_path: Path) -> None:
    payloads = [*LINES[:3], *FAILING, *LINES[3:]]
    ran = good(run_job(InlineEngine(), word_count(tmp_path, picky), payloads, tmp_path))
    assert ran.sorted("counts") == COUNTS
    assert ran.failed() == {3: "error at split", 4: "error at split", 5: "error at split", 6: "error at split"} | {
        7: "error at split",
        8: "bad_message at lines",
    }
    by_id = {f.id - FIRST_ID: f for f in ran.report.failures}
    line = picky.__code__.co_firstlineno + 4
    assert by_id[3].error == f"ValueError: bad \\x00 \\udcff (test_inline_engine.py:{line} in picky)"
    assert by_id[3].input == "{'line': 'a raise'}"
    assert by_id[4].error.startswith("SystemExit: 3 (test_inline_engine.py:")
    assert "Unprintable" in by_id[5].error
    assert by_id[6].error == "field 'word' is string, got 5 (int): Expected bytes, got a 'int' object"
    assert "surrogate" in by_id[7].error
    assert "UTF-8" in by_id[8].error
    for failure in ran.report.failures:
        assert "\x00" not in failure.error
        failure.error.encode()


def test_every_message_fails(tmp_path: Path) -> None:
    ran = good(run_job(InlineEngine(), word_count(tmp_path, picky), FAILING, tmp_path))
    assert len(ran.report.failures) == len(FAILING)
    assert (ran.rows, ran.report.files) == ({"counts": []}, ())


def test_ten_thousand_failures(tmp_path: Path) -> None:
    payloads = [b"raise" + b" x" * 100] * 10_000
    ran = good(run_job(InlineEngine(), word_count(tmp_path, picky), payloads, tmp_path))
    assert len({f.id for f in ran.report.failures}) == 10_000


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda line: line, "iterable of values, got the text"),
        (lambda line: None, "got None; give [] for nothing"),
        (lambda line: [None], "NOT NULL"),
    ],
)
def test_a_function_that_gives_something_else(tmp_path: Path, function: Callable[[str], object], said: str) -> None:
    t = Topology("words")
    words = t.stream("lines", source()).flat_map(function, "line", schema="word string not null")
    words.into(MemorySink("words", staging=tmp_path))
    ran = good(run_job(InlineEngine(), t, [b"a"], tmp_path))
    assert said in ran.report.failures[0].error


def test_map_filter_and_rows_of_several_fields(tmp_path: Path) -> None:
    t = Topology("pairs")
    pairs = t.stream("lines", source()).map(lambda s: (s, len(s)), schema="line string, size long", name="measure")
    kept = pairs.filter(lambda size: size % 2 == 0, "size", name="even")
    doubled = kept.map(lambda line, size: {"size": size * 2, "line": line + line}, schema="line string, size long")
    doubled.into(MemorySink("rows", staging=tmp_path))
    ran = good(run_job(InlineEngine(), t, [b"", b"a", b"ab", b"abcd"], tmp_path))
    assert ran.sorted("rows") == [("", 0), ("abab", 4), ("abcdabcd", 8)]


def broken_pair(line: str) -> object:
    return {
        "short": ("a",),
        "text": "ab",
        "keys": {"line": "a"},
        "float": ("a", 1.5),
        "bool": ("a", True),
        "big": ("a", 2**70),
    }.get(line, (line, 1))


def test_rows_that_do_not_fit_their_schema(tmp_path: Path) -> None:
    t = Topology("pairs")
    pairs = t.stream("lines", source()).map(broken_pair, schema="line string, n long")
    pairs.into(MemorySink("rows", staging=tmp_path))
    payloads = [b"ok", b"short", b"text", b"keys", b"float", b"bool", b"big", b"fine"]
    ran = good(run_job(InlineEngine(), t, payloads, tmp_path))
    assert ran.sorted("rows") == [("fine", 1), ("ok", 1)]
    said = {f.id - FIRST_ID: f.error for f in ran.report.failures}
    assert "1 values" in said[1]
    assert "str" in said[2]
    assert "keys 'line'" in said[3]
    assert "'n'" in said[4]
    assert "1.5" in said[4]
    assert "True" in said[5]
    assert "'n'" in said[6]


def halves(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    """Each line twice, upside down."""
    lines = rows.column("line").to_pylist()
    if "bad" in lines:
        raise ValueError("bad among them")
    parent = np.array([i for i in range(len(lines)) for _ in range(2)][::-1], np.int64)
    out = pa.array([lines[i] for i in parent], pa.string())
    return pa.RecordBatch.from_arrays([pa.array(parent * 10), out], names=["n", "word"]), parent


def test_an_arrow_wise_operation(tmp_path: Path) -> None:
    t = Topology("arrow")
    t.stream("lines", source()).arrow(halves, schema="word string, n long").into(MemorySink("rows", staging=tmp_path))
    ran = good(run_job(InlineEngine(1), t, [b"x", b"y", b"bad", b"z"], tmp_path))
    assert [row["word"] for row in ran.rows["rows"]] == ["x", "x", "y", "y", "z", "z"]
    assert ran.failed() == {2: "error at halves"}


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows,
        lambda rows: (rows, np.full(rows.num_rows, 99)),
        lambda rows: (rows.rename_columns(["other"]), np.arange(rows.num_rows)),
        lambda rows: (rows.to_pylist(), np.arange(rows.num_rows)),
    ],
)
def test_an_arrow_wise_operation_is_held_to_its_promise(tmp_path: Path, function: Callable[..., object]) -> None:
    t = Topology("arrow")
    t.stream("lines", source()).arrow(function, schema="line string").into(MemorySink("rows", staging=tmp_path))
    ran = good(run_job(InlineEngine(1), t, [b"x", b"y"], tmp_path))
    assert len(ran.report.failures) == 2
    assert all("Error" in f.error for f in ran.report.failures)


def test_branches_share_a_message(tmp_path: Path) -> None:
    t = Topology("branches")
    lines = t.stream("lines", source())
    words = lines.flat_map(picky, "line", schema="word string")
    words.into(MemorySink("words", staging=tmp_path), MemorySink("again", staging=tmp_path))
    words.group_by("word").persistent_aggregate(n=count()).into(MemorySink("counts", staging=tmp_path))
    sizes = lines.map(len, "line", schema="size long", name="size")
    sizes.group_by("size").agg(n=count(), total=sum_("size")).into(MemorySink("sizes", staging=tmp_path))
    payloads = [*LINES, b"zz raise", b"b"]
    ran = good(run_job(InlineEngine(), t, payloads, tmp_path))
    words_expected = sorted((w,) for p in [*LINES, b"b"] for w in p.decode().split())
    assert ran.sorted("words") == words_expected == ran.sorted("again")
    assert ran.sorted("counts") == sorted(Counter(w for (w,) in words_expected).items())
    sizes_expected = Counter(len(p) for p in [*LINES, b"b"])
    assert ran.sorted("sizes") == [(size, n, size * n) for size, n in sorted(sizes_expected.items())]


def test_groups_of_groups(tmp_path: Path) -> None:
    t = Topology("chain")
    words = t.stream("lines", source()).flat_map(str.split, "line", schema="word string")
    often = words.group_by("word").agg(n=count())
    often.into(MemorySink("counts", staging=tmp_path))
    often.map(lambda n: n, "n", schema="n long").group_by("n").agg(words=count()).into(
        MemorySink("by_n", staging=tmp_path)
    )
    ran = good(run_job(InlineEngine(3), t, [*LINES, b"d"], tmp_path))
    assert ran.sorted("counts") == [*COUNTS, ("d", 1)]
    assert ran.sorted("by_n") == [(1, 2), (3, 1), (5, 1)]


def test_a_null_key_fails_its_message(tmp_path: Path) -> None:
    t = Topology("nulls")
    rows = t.stream("lines", source()).map(lambda s: (s or None, 1), schema="word string, n long")
    rows.group_by("word").agg(total=sum_("n")).into(MemorySink("rows", staging=tmp_path))
    ran = good(run_job(InlineEngine(), t, [b"a", b"", b"a"], tmp_path))
    assert ran.sorted("rows") == [("a", 2)]
    assert list(ran.failed().values()) == ["sink_error at aggregate"]


@dataclass(frozen=True)
class Refusing:
    """A writer that cannot hold the word "b"."""

    writer: SinkWriter

    @property
    def sink(self) -> str:
        return self.writer.sink

    def check(self, rows: pa.RecordBatch) -> list[tuple[int, str]]:
        words = rows.column("word").to_pylist()
        return [(i, "column 'word': no b here") for i, word in enumerate(words) if word == "b"]

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        return self.writer.open_task(context, schema)

    def files_in(self) -> str | None:
        return self.writer.files_in()

    @property
    def names_messages(self) -> bool:
        return self.writer.names_messages

    def resource(self) -> object | None:
        return self.writer.resource()


@pytest.mark.parametrize("grouped", [True, False])
def test_what_a_sink_cannot_hold_fails_its_messages(tmp_path: Path, grouped: bool) -> None:
    t = Topology("refused")
    words = t.stream("lines", source()).flat_map(str.split, "line", schema="word string")
    if grouped:
        words = words.group_by("word").agg(n=count())
    words.into(MemorySink("words", staging=tmp_path))
    ran = good(run_job(InlineEngine(), t, [b"a b", b"b b", b"a", b"c a"], tmp_path, wrap=Refusing))
    assert [row["word"] for row in sorted(ran.rows["words"], key=str)] == (["a", "c"] if grouped else ["a", "a", "c"])
    assert ran.failed() == {0: "sink_error at words", 1: "sink_error at words"}
    assert "no b here" in ran.report.failures[0].error


def test_a_sum_that_does_not_fit_ends_the_job(tmp_path: Path) -> None:
    t = Topology("sums")
    rows = t.stream("lines", source()).map(lambda s: ("k", int(s)), schema="key string, x long")
    rows.group_by("key").agg(total=sum_("x")).into(MemorySink("rows", staging=tmp_path))
    most = 2**63 - 1
    assert run_job(InlineEngine(), t, [b"1", str(most - 1).encode()], tmp_path).sorted("rows") == [("k", most)]
    with pytest.raises(JobFailed, match="'total' does not fit"):
        run_job(InlineEngine(), t, [b"1", str(most).encode()], tmp_path)


def test_a_failure_after_a_group_ends_the_job_and_leaves_no_file(tmp_path: Path) -> None:
    t = Topology("late")
    words = t.stream("lines", source()).flat_map(str.split, "line", schema="word string")
    words.into(MemorySink("words", staging=tmp_path))
    words.group_by("word").agg(n=count()).map(lambda w: 1 // 0, "word", schema="x long", name="div").into(
        MemorySink("rows", staging=tmp_path)
    )
    with pytest.raises(JobFailed, match=r"'div' failed after a group.*ZeroDivisionError"):
        run_job(InlineEngine(), t, LINES, tmp_path)


def drop(rows: list[WireRow], which: Callable[[WireRow], bool], copies: int) -> list[WireRow]:
    """The wire rows with the first one that fits kept `copies` times."""
    hit = next(row for row in rows if which(row))
    return [kept for row in rows for kept in [row] * (copies if row is hit else 1)]


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("copies", [0, 2, 3])
@pytest.mark.parametrize("control", [True, False])
def test_rows_lost_doubled_or_tripled_between_stages_are_seen(
    tmp_path: Path, tracked: bool, copies: int, control: bool
) -> None:
    def tamper(stage: int, rows: list[WireRow]) -> list[WireRow]:
        return drop(rows, lambda row: (row.edge == CONTROL) == control, copies)

    untouched = InlineEngine(tamper=lambda stage, rows: drop(rows, lambda row: True, 1))
    assert run_job(untouched, word_count(tmp_path), LINES, tmp_path, tracked=tracked).mismatches == ()
    ran = run_job(InlineEngine(tamper=tamper), word_count(tmp_path), LINES, tmp_path, tracked=tracked)
    assert ran.report.violations


@dataclass(frozen=True)
class RepeatsOne(MemorySliceReader):
    """Returns its first message twice and its second one never: the number is right."""

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for batch in super().read(seed, excluded, batch_rows):
            yield batch.take(pa.array([0, 0, *range(2, batch.num_rows)]))


def test_a_reader_that_repeats_one_message_and_skips_another_is_seen(tmp_path: Path) -> None:
    ids = tuple(FIRST_ID + i for i in range(len(LINES)))
    ran = run_job(InlineEngine(), word_count(tmp_path), LINES, tmp_path, readers=(RepeatsOne(ids, tuple(LINES)),))
    assert ran.report.read_messages == len(LINES)
    assert ran.report.ack_xor == ran.report.read_xor  # every tuple of what it did read was acked
    assert any("not those that were opened" in text for text in ran.mismatches)


def test_a_tuple_that_is_never_acked_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(shares: Words, counts: Rows) -> Words:
        children = split_runs(shares, counts)
        children[:1] = 0
        return children

    monkeypatch.setattr(tracking, "split_runs", losing)
    ran = run_job(InlineEngine(), word_count(tmp_path), LINES, tmp_path)
    assert any("ack val" in text for text in ran.mismatches)


@dataclass(frozen=True)
class Breaking(MemorySliceReader):
    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        raise LookupError("gone")


def test_any_error_of_a_task_is_a_failed_job_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="LookupError: gone") as raised:
        run_job(InlineEngine(), word_count(tmp_path), LINES, tmp_path, readers=(Breaking((), ()),))
    assert isinstance(raised.value.__cause__, LookupError)
    assert str(raised.value.details["outside"]).startswith("LookupError (test_inline_engine.py:")


def test_a_job_is_cancelled_from_within(tmp_path: Path) -> None:
    engine = InlineEngine()

    def split(line: str) -> list[str]:
        engine.cancel(("life", 1, 1))
        return line.split()

    with pytest.raises(JobFailed, match="cancelled"):
        run_job(engine, word_count(tmp_path, split), LINES, tmp_path)
    assert run_job(engine, word_count(tmp_path), LINES, tmp_path, readers=readers_of(LINES)).mismatches == ()
