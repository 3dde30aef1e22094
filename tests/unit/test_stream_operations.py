"""Every operation of a stream: its rows, its tracking in each mode, what fails and who answers for it, what is refused."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.jobs import Ran, run_job, source
from support.operations import COUNTS, LINES, OPERATIONS, WORDS, Greatest, Letters, Ranked, add_all, doubled, words_of

from stormproof.core.base.errors import JobFailed, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.graph.aggregation import Aggregator, CombinerAggregator, EmitRow, ReducerAggregator
from stormproof.core.graph.plan import compile_topology
from stormproof.core.task import join, task
from stormproof.core.task.combine import evaluate as evaluate_rightly
from stormproof.core.task.job import WireRow
from stormproof.core.tracking.share import Anchors, overlaid
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.topology.aggregate import count, distinct_count, max_, mean, min_, sum_
from stormproof.trident.topology.stream import Stream, Topology


def good(ran: Ran) -> Ran:
    assert ran.mismatches == ()
    assert ran.report.violations == ()
    assert ran.lost() == []
    return ran


def counted(ran: Ran, sink: str) -> Counter[tuple[object, ...]]:
    return Counter(tuple(row.values()) for row in ran.rows[sink])


def one(tmp: Path, build: Callable[[Stream], Stream], payloads: list[bytes] | None = None, **options: Any) -> Ran:
    topology = Topology("one")
    build(words_of(topology, source())).into(MemorySink("out", staging=tmp))
    return run_job(options.pop("engine", InlineEngine(2)), topology, payloads or LINES, tmp, **options)


@pytest.mark.parametrize("per_message", [False, True])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_and_tracking(tmp_path: Path, name: str, tracked: bool, per_message: bool) -> None:
    build, rows = OPERATIONS[name]
    ran = good(one(tmp_path, build, tracked=tracked, per_message=per_message))
    assert counted(ran, "out") == Counter(rows)
    assert ran.report.failures == ()
    assert ran.report.late == ()


@pytest.mark.parametrize("parallelism", [1, 3])
def test_all_operations_in_one_topology_in_any_order_of_tasks(tmp_path: Path, parallelism: int) -> None:
    topology = add_all(Topology("all"), source(), tmp_path)
    ran = good(run_job(InlineEngine(parallelism, rng=Random(7)), topology, LINES, tmp_path))
    for name, (_, rows) in OPERATIONS.items():
        assert counted(ran, f"{name}_out") == Counter(rows), name


def test_the_plan_of_every_operation_is_picklable() -> None:
    topology = Topology("p")
    words_of(topology, source()).group_by("word").agg(Ranked(), g=Greatest(), n=distinct_count("word")).into(
        MemorySink("out")
    )
    stages = compile_topology(topology, Guarantee.EXACTLY_ONCE).stages
    assert pickle.loads(pickle.dumps(stages)) is not None  # noqa: S301 - just made


# -- what is filled again ----------------------------------------------------------------------------------------------

HELD: dict[str, Any] = {
    "list": ["", 0],
    "dict": {"w": "", "n": 0},
    "inner": [0],
    "bytes": bytearray(1),
    "array": np.zeros(1, np.int64),
    "words": [""],
}
"""What the functions below give for every word, with the word's values in it."""


def filled(kind: str, word: str) -> Any:
    held, values = HELD[kind], {"w": word, "n": ord(word)}
    match kind:
        case "list":
            held[:] = values.values()
        case "dict":
            held |= values
        case _:
            held[0] = values["n"]
    return held


class Filled(Aggregator):
    """A row for each group: the same list, filled again."""

    result = "w string, n int"

    def init(self) -> None:
        return None

    def aggregate(self, state: Any, emit: EmitRow, /, word: str) -> str:
        return word

    def complete(self, state: str, emit: EmitRow, /) -> None:
        emit(filled("list", state))


class Kept(ReducerAggregator):
    result = "array<int>"

    def init(self) -> list[int]:
        return list[int](filled("inner", "x"))

    def reduce(self, value: list[int], /, word: str) -> list[int]:
        return list[int](filled("inner", word))


def points(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray[Any, Any]]:
    found = NUMBERS[: rows.num_rows]
    found[:] = [ord(word) for word in rows.column("word").to_pylist()]
    if len(found) > 1:
        raise ValueError("one word at a time")
    return pa.record_batch({"n": pa.array(found)}), np.arange(rows.num_rows)


NUMBERS = np.zeros(9, np.int64)


def doubles(word: str) -> Iterator[Any]:
    yield filled("list", word)
    yield filled("list", word.upper())


async def awaited(word: str) -> AsyncIterator[Any]:
    for one in doubles(word):
        yield one


async def one_row(word: str) -> Any:
    return filled("list", word)


async def some_rows(word: str) -> Any:
    return [filled("list", word)]


async def some_words(word: str) -> Any:
    held: list[Any] = HELD["words"]
    held[:] = [word]
    return held


PAIRS: dict[str, Any] = {"schema": "w string, n int"}


@pytest.mark.parametrize(
    "build",
    [
        lambda w: w.flat_map(doubles, **PAIRS),
        lambda w: w.flat_map(doubles, concurrency=3, **PAIRS),
        lambda w: w.flat_map(awaited, **PAIRS),
    ],
)
def test_what_a_generator_gives_and_fills_again_was_taken_before(
    tmp_path: Path, build: Callable[[Stream], Stream]
) -> None:
    ran = good(one(tmp_path, build, [b"a"]))
    assert [tuple(row.values()) for row in ran.rows["out"]] == [("a", 97), ("A", 65)]


@pytest.mark.parametrize(
    ("build", "shown"),
    [
        (lambda w: w.map(lambda x: filled("list", x), schema="w string, n int"), lambda w, n: (w, n)),
        (lambda w: w.map(lambda x: filled("dict", x), schema="w string, n int"), lambda w, n: (w, n)),
        (lambda w: w.map(lambda x: (x, filled("inner", x)), schema="w string, n array<int>"), lambda w, n: (w, [n])),
        (lambda w: w.map(lambda x: filled("array", x), schema="n array<long>"), lambda w, n: ([n],)),
        (lambda w: w.map(lambda x: filled("dict", x), schema="s struct<w: string>"), lambda w, n: ({"w": w},)),
        (lambda w: w.map(lambda x: filled("bytes", x), schema="b binary"), lambda w, n: (w.encode(),)),
        (lambda w: w.map(lambda x: memoryview(filled("bytes", x)), schema="b binary"), lambda w, n: (w.encode(),)),
        (lambda w: w.map(lambda x: filled("list", x), concurrency=1, **PAIRS), lambda w, n: (w, n)),
        (lambda w: w.map(one_row, **PAIRS), lambda w, n: (w, n)),
        (lambda w: w.flat_map(some_rows, **PAIRS), lambda w, n: (w, n)),
        (lambda w: w.flat_map(some_words, schema="w string"), lambda w, n: (w,)),
        (lambda w: w.each(lambda x: filled("inner", x), schema="n array<int>"), lambda w, n: (w, [n])),
        (lambda w: w.flat_map(lambda x: [filled("list", x)], schema="w string, n int"), lambda w, n: (w, n)),
        (
            lambda w: w.group_by("word").agg(Filled()).map(lambda _, *x: x, schema="w string, n int"),
            lambda w, n: (w, n),
        ),
        (lambda w: w.group_by("word").agg(k=Kept()), lambda w, n: (w, [n])),
        (lambda w: w.arrow(points, schema="n long"), lambda w, n: (n,)),
    ],
)
def test_what_a_function_gives_and_fills_again_was_taken_before(
    tmp_path: Path, build: Callable[[Stream], Stream], shown: Callable[[str, int], tuple[object, ...]]
) -> None:
    ran = good(one(tmp_path, build, [b"a b", b"c d"], engine=InlineEngine(1)))
    assert [tuple(row.values()) for row in ran.rows["out"]] == [shown(w, ord(w)) for w in "abcd"]


# -- what fails --------------------------------------------------------------------------------------------------------

BAD = [b"a b", b"a bad b", b"c"]
GOOD = Counter({"a": 1, "b": 1, "c": 1})


def refuse_bad(word: str) -> int:
    if word == "bad":
        raise ValueError("a bad word")
    return len(word)


@pytest.mark.parametrize(
    "build",
    [
        lambda w: w.each(refuse_bad, schema="n int"),
        lambda w: w.each(lambda x: [refuse_bad(x)], schema="n int", many=True),
        lambda w: w.peek(refuse_bad),
        lambda w: w.each(lambda x: "no number" if x == "bad" else 1, schema="n int"),
        lambda w: w.group_by("word").agg(g=Greatest()),
        lambda w: w.aggregate(g=Greatest(), n=count()),
        lambda w: w.group_by("word").partition_aggregate(g=Greatest()),
    ],
)
def test_what_fails_before_an_exchange_fails_early_and_leaves_nothing(
    tmp_path: Path, build: Callable[[Stream], Stream]
) -> None:
    ran = good(one(tmp_path, build, BAD))
    assert list(ran.failed()) == [1]
    assert ran.late() == {}
    assert counted(ran, "out") == counted(good(one(tmp_path, build, [BAD[0], b"", BAD[2]])), "out")


@pytest.mark.parametrize("per_message", [False, True])
@pytest.mark.parametrize(
    ("build", "rows"),
    [
        (lambda w: w.global_().partition_aggregate(r=Letters()), [("aabbc",)]),
        (lambda w: w.aggregate(r=Letters(), n=count()), [("aabbc", 5)]),
        (lambda w: w.aggregate(Ranked()), [(w, i) for i, w in enumerate("aabbc")]),
        (lambda w: w.global_().each(refuse_bad, schema="n int"), [("a", 1), ("a", 1), ("b", 1), ("b", 1), ("c", 1)]),
    ],
)
def test_a_row_that_makes_an_aggregate_raise_fails_its_message_alone(
    tmp_path: Path, build: Callable[[Stream], Stream], rows: list[tuple[object, ...]], per_message: bool
) -> None:
    ran = good(one(tmp_path, build, BAD, per_message=per_message))
    assert list(ran.late()) == [1]
    assert ran.report.failures == ()
    assert counted(ran, "out") == Counter(rows)


class Picky(Greatest):
    def combine(self, one: str, other: str, /) -> str:
        if "bad" in {one, other}:
            raise ValueError("a bad pair")
        return max(one, other)

    def init(self, word: str) -> str:
        return word


class BadEnd(Ranked):
    def complete(self, state: list[str], emit: object, /) -> None:
        raise ValueError("no end")


class NoNumber(Letters):
    result = "long"


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda w: w.aggregate(g=Picky()), "Picky.combine failed for a group.*a bad pair"),
        (lambda w: w.aggregate(BadEnd()), "BadEnd.complete failed for a group.*no end"),
        (lambda w: w.aggregate(r=NoNumber()), r"NoNumber.*failed for a group"),
    ],
)
def test_what_belongs_to_no_single_message_fails_the_job_by_name(
    tmp_path: Path, build: Callable[[Stream], Stream], said: str
) -> None:
    with pytest.raises(JobFailed, match=said):
        one(tmp_path, build, [b"a", b"bad", b"bad"])


def test_a_null_key_fails_a_group_and_matches_nothing_in_a_join(tmp_path: Path) -> None:
    def nulled(w: Stream) -> Stream:
        return w.map(lambda x: None if x == "a" else x, schema="word string")

    ran = good(one(tmp_path, lambda w: nulled(w).group_by("word").agg(n=count()), [b"a b", b"c", b"b"]))
    assert ran.failed() == {0: "sink_error at aggregate"}
    keys: dict[str, list[str | None]] = {
        "inner": ["b", "c"],
        "left": [None, None, "b", "c"],
        "full": [None, None, None, None, "b", "c"],
    }
    for how, found in keys.items():

        def build(w: Stream, how: str = how) -> Stream:
            return nulled(w).join(nulled(w), "word", how=how)

        ran = good(one(tmp_path, build, [b"a b", b"c a"]))
        assert counted(ran, "out") == Counter((key,) for key in found)


# -- joins and their anchors -------------------------------------------------------------------------------------------


def pairs(tmp: Path, payloads: list[bytes], **options: Any) -> Ran:
    """Messages "key value": all pairs of one key, each anchored to two messages, and "bad" ones refused behind."""

    def build(w: Stream) -> Stream:
        left = w.map(lambda x: (x[0], x), schema="k string, one string")
        right = w.map(lambda x: (x[0], x), schema="k string, other string")
        return left.join(right, "k").filter(refuse_bad_pair, "one", "other")

    return one(tmp, build, payloads, **options)


def refuse_bad_pair(one_: str, other: str) -> bool:
    if one_ == "xbad" and other == "xok":
        raise ValueError("a bad pair")
    return True


@pytest.mark.parametrize("per_message", [False, True])
def test_what_a_join_gives_is_anchored_to_both_sides(tmp_path: Path, per_message: bool) -> None:
    ran = good(pairs(tmp_path, [b"xbad", b"xok", b"y1", b"y2"], per_message=per_message))
    assert sorted(ran.late()) == [0, 1]
    linked = {tuple(pair) for pair in (ran.report.together - 100).tolist()}
    assert linked == {(0, 1), (2, 3)}
    assert counted(ran, "out")["x", "xbad", "xok"] == 0
    assert sum(counted(ran, "out").values()) == 7


def test_a_lost_side_is_seen_in_per_message_mode(tmp_path: Path) -> None:
    """One chunk of one side is lost on its way: exactly messages with tuples in it are named."""
    done: list[int] = []

    def tamper(stage: int, rows: list[WireRow]) -> list[WireRow]:
        if stage != 1:
            return rows
        chunk = next(row for row in rows if row.edge >= 0)
        done.append(chunk.edge)
        return [row for row in rows if row is not chunk]

    payloads = [f"{c}1".encode() for c in "abcdefgh"]
    ran = pairs(tmp_path, payloads, per_message=True, engine=InlineEngine(2, tamper=tamper))
    assert done
    assert 0 < len(ran.lost()) < len(payloads)


Patch = Callable[[pytest.MonkeyPatch], None]


def _acked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the right side without a partner are acked once more."""
    right = join.join_rows

    def join_rows(*args: Any) -> join.Joined:
        made = right(*args)
        return join.Joined(made.rows, made.deliveries, [*made.unmatched, made.unmatched[1]])

    monkeypatch.setattr("stormproof.core.task.task.join_rows", join_rows)


def _not_acked(monkeypatch: pytest.MonkeyPatch) -> None:
    right = join.join_rows

    def join_rows(*args: Any) -> join.Joined:
        made = right(*args)
        return join.Joined(made.rows, made.deliveries, [])

    monkeypatch.setattr("stormproof.core.task.task.join_rows", join_rows)


def _one_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is joined is anchored to its left row alone."""
    right = overlaid
    monkeypatch.setattr(join, "overlaid", lambda rows, parts: right(rows, parts[:1]))


def _unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result carries its rows' whole shares, however many results they are in."""

    def deliveries(self: Anchors, counts: np.ndarray[Any, Any] | None, subscribers: int) -> list[Anchors]:
        assert counts is not None
        return [self.take(np.repeat(np.arange(self.rows), counts))] * subscribers

    monkeypatch.setattr(task, "Anchors", Anchors)
    right = join.join_rows

    def join_rows(on: Any, left: Any, right_: Any, subscribers: int) -> join.Joined:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(Anchors, "deliveries", deliveries)
            return right(on, left, right_, subscribers)

    monkeypatch.setattr("stormproof.core.task.task.join_rows", join_rows)


@pytest.mark.parametrize("per_message", [False, True])
@pytest.mark.parametrize("broken", [_acked_twice, _not_acked, _one_side_only, _unsplit])
def test_a_join_that_accounts_wrongly_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Patch, per_message: bool
) -> None:
    def build(w: Stream) -> Stream:
        return w.filter(lambda x: x != "c").join(doubled(w).filter(lambda x, _: x != "a"), {"word": "x"})

    even = [b"a b a", b"b", b"c a b", b"b"]  # four results of each b: to an odd number of copies an XOR is blind
    good(one(tmp_path, build, even, per_message=per_message))
    broken(monkeypatch)
    ran = one(tmp_path, build, even, per_message=per_message)
    assert ran.mismatches != () or ran.lost() != []
    assert bool(ran.lost()) is per_message


# -- groups: negative controls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_message", [False, True])
def test_a_group_that_drops_what_its_empty_results_were_made_of_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_message: bool
) -> None:
    """`Ranked` gives nothing for a single word: that word must be acked all the same."""
    good(one(tmp_path, lambda w: w.group_by("word").agg(Ranked()), per_message=per_message))
    right = evaluate_rightly

    class Dropped(dict[int, Any]):
        """No row failed, and yet some are to be left out."""

        def __bool__(self) -> bool:
            return True

    def evaluate(*args: Any) -> Any:
        made = right(*args)
        empty = np.isin(made.group_of_row, np.flatnonzero(made.counts == 0))
        return replace(made, group_of_row=np.where(empty, -1, made.group_of_row), failed=Dropped())

    monkeypatch.setattr(task, "evaluate", evaluate)
    ran = one(tmp_path, lambda w: w.group_by("word").agg(Ranked()), per_message=per_message)
    assert ran.mismatches != () or ran.lost() != []


# -- what parallelism means --------------------------------------------------------------------------------------------


def tasks_seen(build: Callable[[Stream], Stream], tmp: Path) -> int:
    """How many tasks had tuples: each gives its number of them."""
    ran = good(one(tmp, lambda w: build(w).partition_aggregate(n=count()), [b"a b c d e f g h i j k l m n o p"] * 8))
    assert sum(row["n"] for row in ran.rows["out"]) % 128 == 0  # type: ignore[misc]
    return len(ran.rows["out"])


@pytest.mark.parametrize(
    ("build", "tasks"),
    [
        (lambda w: w.shuffle(), 2),
        (lambda w: w.shuffle().parallelism(5), 5),
        (lambda w: w.parallelism(5).map(str.upper, schema="w string").shuffle(), 5),
        (lambda w: w.shuffle().parallelism(5).map(str.upper, schema="w string").shuffle(), 2),
        (lambda w: w.shuffle().parallelism(5).map(str.upper, schema="w string").shuffle().parallelism(1), 1),
        (lambda w: w.global_().parallelism(4), 1),
        (lambda w: w.broadcast().parallelism(4), 4),
        (lambda w: w.shuffle().parallelism(3).merge(w.shuffle().parallelism(3)), 3),
        (lambda w: w.group_by("word").parallelism(3).agg(Ranked().over("word")), 3),
    ],
)
def test_the_number_of_tasks(tmp_path: Path, build: Callable[[Stream], Stream], tasks: int) -> None:
    assert tasks_seen(build, tmp_path) == tasks


def test_stages_of_different_widths_pass_tuples_through(tmp_path: Path) -> None:
    """An edge over two stages, the middle one of which has fewer tasks of its own than where it leads."""
    topology = Topology("widths")
    words = words_of(topology, source())
    narrow = words.shuffle().parallelism(1).map(str.upper, schema="word string").shuffle().parallelism(6)
    both = topology.merge(narrow, words.shuffle().parallelism(6))
    both.into(MemorySink("out", staging=tmp_path))
    for per_message in (False, True):
        ran = good(run_job(InlineEngine(2), topology, LINES, tmp_path, per_message=per_message))
        assert counted(ran, "out") == Counter([(w,) for w in WORDS] + [(w.upper(),) for w in WORDS])


# -- what is refused ---------------------------------------------------------------------------------------------------


def words(**_: object) -> Stream:
    return words_of(Topology("t"), source())


def numbers(schema: str = "n int") -> Stream:
    return words().map(len, schema=schema)


class NoResult(CombinerAggregator):
    def init(self, *values: Any) -> object: ...
    def combine(self, one: Any, other: Any, /) -> object: ...
    def zero(self) -> object: ...


class TwoResults(ReducerAggregator):
    result = "long, m long"

    def init(self) -> object: ...
    def reduce(self, value: Any, /, *values: Any) -> object: ...


def merged_two(one_: Stream, other: Stream) -> Stream:
    return one_.topology.merge(one_, other)


def with_words(build: Callable[[Stream], object]) -> Callable[[], object]:
    return lambda: build(words())


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda w: w.each(len, "wrd", schema="n int"), "component 'len': unknown field 'wrd'; known: word"),
        (lambda w: w.each(len, schema="word int"), "'word' stands twice"),
        (lambda w: w.each(len, schema="n int", many=True).each(len, "word", schema="N int"), "'N' stands twice"),
        (lambda w: w.project("wrd"), "project after 'split': unknown field 'wrd'; known: word"),
        (lambda w: w.project("word", word="word"), "'word'"),
        (lambda w: w.project(), "at least one field; known: word"),
        (lambda w: w.partition_by("wrd"), "unknown field 'wrd'; known: word"),
        (lambda w: w.partition_by(), "at least one field"),
        (lambda w: w.partition("no function"), "needs a function"),
        (lambda w: w.parallelism(0), "parallelism is 0; use 1 to 1024"),
        (lambda w: w.shuffle().parallelism(5000), "parallelism is 5000; use 1 to 1024"),
        (lambda w: w.parallelism(True), "parallelism is True"),
        (lambda w: w.parallelism(4).into(MemorySink("out")), r"parallelism\(4\) has no exchange behind it"),
        (lambda w: w.shuffle().parallelism(2).merge(w.shuffle()), "different numbers of tasks: 2 and the engine's"),
        (lambda w: w.parallelism(2).join(w.parallelism(3), "word"), "different numbers of tasks: 2 and 3"),
        (lambda w: w.aggregate(), "no results"),
        (lambda w: w.aggregate(n=len), "is no aggregate"),
        (lambda w: w.aggregate(count()), "only an Aggregator stands without a name"),
        (lambda w: w.aggregate(n=Ranked()), "names its columns itself"),
        (lambda w: w.aggregate(n=NoResult()), "NoResult does not say what it gives; write result = 'long'"),
        (lambda w: w.aggregate(n=TwoResults()), "gives one value"),
        (lambda w: w.aggregate(Ranked(), rank=count()), "'rank' stands twice"),
        (lambda w: w.aggregate(g=Greatest().over("wrd")), "unknown field 'wrd'; known: word"),
        (lambda w: w.aggregate(n=mean("word")), "'word' is string, which has no mean"),
        (lambda w: w.aggregate(n=min_("wrd")), "unknown field 'wrd'; known: word"),
        (
            lambda w: w.map(float, schema="x double").aggregate(n=distinct_count("x")),
            "'x' is double, which has no exact distinct count",
        ),
        (
            lambda w: w.map(list, schema="x array<string>").aggregate(n=max_("x")),
            "'x' is list.*which has no max",
        ),
        (
            lambda w: (
                w.each(len, schema="m_sum int").group_by("word").persistent_aggregate(m=mean("m_sum"), m_sum=count())
            ),
            "'m_sum' stands twice",
        ),
        (
            lambda w: w.each(len, schema="n int").group_by("word").persistent_aggregate(m=distinct_count("n")),
            r"m = distinct\(n\) can't be persisted.*add 'n' to the fields of group_by",
        ),
        (
            lambda w: w.group_by("word").persistent_aggregate(m=Greatest()).into(MemorySink("out")),
            "'m' is folded by a function of yours, which this sink cannot call",
        ),
        (lambda w: w.group_by("word").persistent_aggregate(m=Letters()), "a reducer's values of two batches"),
        (lambda w: w.topology.merge(w), "at least two streams, got 1"),
        (lambda w: w.merge(w.each(len, schema="n int")), "different fields .word string and word string, n int32"),
        (lambda w: w.merge(w.map(len, schema="word int")), "different fields .word string and word int32"),
        (lambda w: w.merge(words()), "belongs to topology 't', not to 't'"),
        (lambda w: w.join(doubled(w), "word"), "right side: unknown field 'word'; known: x, double"),
        (lambda w: w.join(doubled(w), {"wrd": "x"}), "left side: unknown field 'wrd'; known: word"),
        (lambda w: w.join(w.map(len, schema="word int"), "word"), "'word' is string on the left side, 'word' is int32"),
        (lambda w: doubled(w).join(doubled(w), "x"), "both sides have a field 'double'; give one of them another name"),
        (lambda w: w.join(w, "word", how="outer"), "no join 'outer'; known: inner, left, right, full"),
        (lambda w: w.join(w, []), "at least one key"),
        (
            lambda w: w.map(float, schema="x double").join(w.map(float, schema="x double"), "x"),
            "'x' is double, which can't be a key",
        ),
    ],
)
def test_refused_where_it_is_said(build: Callable[[Stream], object], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        build(words())


def test_null_and_not_null_merge_to_null(tmp_path: Path) -> None:
    def build(w: Stream) -> Stream:
        return w.map(str.upper, schema="word string not null").merge(w.map(lambda _: None, schema="word string"))

    ran = good(one(tmp_path, build))
    assert counted(ran, "out") == Counter([(w.upper(),) for w in WORDS] + [(None,)] * len(WORDS))


def test_an_aggregator_that_keeps_no_state_is_shared_by_tasks_without_harm(tmp_path: Path) -> None:
    class Sizes(Aggregator):
        result = "size int"

        def init(self) -> dict[str, int]:
            return {"n": 0}

        def aggregate(self, state: dict[str, int], emit: EmitRow, /, word: str) -> dict[str, int]:
            return {"n": state["n"] + 1}

        def complete(self, state: dict[str, int], emit: EmitRow, /) -> None:
            emit(state["n"])

    ran = good(one(tmp_path, lambda w: w.group_by("word").agg(Sizes(), n=count())))
    assert counted(ran, "out") == Counter((w, n, n) for w, n in COUNTS.items())


def test_a_mean_is_of_the_exact_sum_and_null_of_nothing(tmp_path: Path) -> None:
    def build(w: Stream) -> Stream:
        values = {"a": 2**53, "b": 1, "c": None}
        return w.each(values.get, schema="n long").group_by("word").agg(m=mean("n"), s=sum_("n"), d=distinct_count("n"))

    ran = good(one(tmp_path, build, [b"a b", b"b c"]))
    assert counted(ran, "out") == Counter([("a", 2.0**53, 2**53, 1), ("b", 1.0, 2, 1), ("c", None, 0, 0)])
