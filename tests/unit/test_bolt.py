"""Bolts: what each kind promises, what an error costs whom, and what its text says."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.heartbeats import hearing, published

from stormproof.core.base.errors import BoltUnavailable, JobFailed, UsageError
from stormproof.core.base.message import INPUT_TEXT_MAX, FailureReason
from stormproof.core.base.process import ALLOCATIONS, fewer_collections
from stormproof.core.bolt import (
    AnyBolt,
    ArrowBolt,
    ArrowRows,
    BasicBolt,
    Bolt,
    BoltContext,
    Collector,
    Emit,
    FailTuple,
    Ran,
    Tuple,
    link_counts,
)
from stormproof.core.bolt import runner as runner_module
from stormproof.core.bolt.runner import BoltRunner, fresh
from stormproof.core.contract.schema import parse_schema
from stormproof.core.heartbeat.listener import JobSigns
from stormproof.core.heartbeat.task import running
from stormproof.core.user_code.functions import blame

FAILED, ERROR, UNACKED = FailureReason.FAILED, FailureReason.ERROR, FailureReason.UNACKED


def runner(bolt: AnyBolt, direct: Mapping[str, int] | None = None, **streams: str) -> BoltRunner:
    schemas = {name: parse_schema(ddl) for name, ddl in streams.items()}
    return BoltRunner("me", bolt, schemas, direct or {}, BoltContext("me"))


def words(*values: str | None) -> pa.RecordBatch:
    return pa.record_batch({"word": pa.array(values, pa.string())})


def run(it: BoltRunner, *values: str | None) -> Ran:
    return it.run(words(*values), "split", "default")


def links(ran: Ran, stream: str = "default") -> list[tuple[int, int, int]]:
    """(row, handle, ordinal) of every link."""
    if stream not in ran.emitted:
        return []
    e = ran.emitted[stream]
    columns = (e.anchor_row.tolist(), e.anchor_input.tolist(), e.anchor_ordinal.tolist())
    return list(zip(*columns, strict=True))


def rows(ran: Ran, stream: str = "default") -> list[Any]:
    return [tuple(row.values()) for row in ran.emitted[stream].rows.to_pylist()] if stream in ran.emitted else []


def failures(ran: Ran) -> list[tuple[int, FailureReason]]:
    return [(f.handle, f.reason) for f in ran.failed]


def unbalanced(runs: Sequence[Ran], inputs: int) -> list[str]:
    """What is wrong with a bolt's whole life: each handle ends once, and nothing is anchored to what ended before."""
    wrong: list[str] = []
    ended: set[int] = set()
    ordinals: dict[int, list[int]] = {}
    for ran in runs:
        for stream in ran.emitted:
            for _, handle, ordinal in links(ran, stream):
                ordinals.setdefault(handle, []).append(ordinal)
                if handle in ended:
                    wrong.append(f"{handle} is anchored after its end")
        for handle in [*ran.acked.tolist(), *(f.handle for f in ran.failed)]:
            if handle in ended:
                wrong.append(f"{handle} ended twice")
            ended.add(handle)
    wrong += [f"{handle} never ended" for handle in range(inputs) if handle not in ended]
    wrong += [f"ordinals of {h}: {o}" for h, o in ordinals.items() if len(set(o)) < len(o)]
    return wrong


class Each(Bolt):
    """An explicit bolt made of functions; `held` is for them to use."""

    def __init__(
        self,
        execute: Callable[[Each, Tuple], object],
        finish: Callable[[Each], object] = lambda _: None,
        cleanup: Callable[[], object] = lambda: None,
    ) -> None:
        self.parts = execute, finish, cleanup
        self.held: list[Tuple] = []

    def execute(self, tuple: Tuple) -> None:
        self.parts[0](self, tuple)

    def finish(self) -> None:
        self.parts[1](self)

    def cleanup(self) -> None:
        self.parts[2]()


class Basic(BasicBolt):
    def __init__(self, execute: Callable[[Tuple, Emit], object]) -> None:
        self.function = execute

    def execute(self, tuple: Tuple, emit: Emit) -> None:
        self.function(tuple, emit)


class Arrow(ArrowBolt):
    def __init__(self, execute: Callable[[pa.RecordBatch], Any]) -> None:
        self.function = execute
        self.calls: list[int] = []

    def execute(self, rows: pa.RecordBatch) -> ArrowRows | Mapping[str, ArrowRows]:
        self.calls.append(rows.num_rows)
        result: ArrowRows | Mapping[str, ArrowRows] = self.function(rows)
        return result


def echo(self: Each, t: Tuple) -> None:
    self.collector.emit(t["word"], anchors=t)
    self.collector.ack(t)


def hold(self: Each, t: Tuple) -> None:
    self.held.append(t)


def ack_held(self: Each) -> None:
    for t in self.held:
        self.collector.ack(t)


# -- the tuple


def test_what_a_tuple_shows() -> None:
    seen: list[Tuple] = []
    it = runner(Basic(lambda t, emit: seen.append(t)))
    it.run(pa.record_batch({"word": ["a"], "n": [3]}), "split", "pairs")
    (t,) = seen
    assert (t["word"], t["n"]) == ("a", 3)
    assert (t.values, t.fields, t.as_dict()) == (("a", 3), ("word", "n"), {"word": "a", "n": 3})
    assert (t.component, t.stream) == ("split", "pairs")
    assert repr(t) == "Tuple(word='a', n=3) of split/pairs"
    with pytest.raises(
        UsageError, match=r"component 'split', stream 'pairs', has no field 'x'; known: word, n"
    ) as said:
        t["x"]
    assert said.value.details == {"component": "split", "stream": "pairs", "field": "x"}


def test_tuples_are_never_equal() -> None:
    seen: list[Tuple] = []
    run(runner(Basic(lambda t, emit: seen.append(t))), "a", "a")
    assert len({*seen}) == 2


# -- the explicit bolt


def test_emit_and_ack() -> None:
    it = runner(Each(echo), default="word string")
    first, second, last = run(it, "a", "b"), run(it, "c"), it.finish()
    assert (rows(first), rows(second), rows(last)) == ([("a",), ("b",)], [("c",)], [])
    assert links(first) == [(0, 0, 0), (1, 1, 0)]
    assert links(second) == [(0, 2, 0)]  # handles go on
    assert (first.acked.tolist(), second.acked.tolist()) == ([0, 1], [2])
    assert unbalanced([first, second, last], 3) == []
    assert it.holds
    assert first.emitted["default"].task is None


def test_values_of_several_fields_are_tuples_lists_or_dicts() -> None:
    def execute(self: Each, t: Tuple) -> None:
        for values in [("a", 1), ["b", 2], {"n": 3, "word": "c"}]:
            self.collector.emit(values, anchors=t)
        self.collector.ack(t)

    ran = run(runner(Each(execute), default="word string, n long"), "x")
    assert rows(ran) == [("a", 1), ("b", 2), ("c", 3)]
    assert links(ran) == [(0, 0, 0), (1, 0, 1), (2, 0, 2)]


@pytest.mark.parametrize("kind", [list, dict])
def test_values_that_are_changed_after_the_emit_were_read_before(kind: type[Any]) -> None:
    def execute(self: Each, t: Tuple) -> None:
        values = kind([("word", "a"), ("n", 1)]) if kind is dict else ["a", 1]
        self.collector.emit(values, anchors=t)
        values.clear()
        self.collector.ack(t)

    def basic(t: Tuple, emit: Emit) -> None:
        values = kind([("word", "a"), ("n", 1)]) if kind is dict else ["a", 1]
        emit(values)
        values.clear()

    for bolt in (Each(execute), Basic(basic)):
        assert rows(run(runner(bolt, default="word string, n long"), "x")) == [("a", 1)]


@pytest.mark.parametrize(
    ("schema", "given", "kept"),
    [("n array<long>", [[1]], [1]), ("s struct<n: long>", [{"n": 1}], {"n": 1}), ("b binary", [bytearray(b"a")], b"a")],
)
def test_a_value_inside_that_is_changed_after_the_emit_was_read_before(schema: str, given: Any, kept: object) -> None:
    def execute(self: Each, t: Tuple) -> None:
        basic(t, lambda values: self.collector.emit(values, anchors=t))
        self.collector.ack(t)

    def basic(t: Tuple, emit: Callable[[object], object]) -> None:
        (value,) = given
        held = value.copy()
        emit((t["word"], held))
        held.clear()

    for bolt in (Each(execute), Basic(basic)):
        assert rows(run(runner(bolt, default=f"word string, {schema}"), "x")) == [("x", kept)]


def test_held_tuples_are_acked_together_in_finish() -> None:
    def finish(self: Each) -> None:
        self.collector.emit(len(self.held), anchors=self.held)
        ack_held(self)

    it = runner(Each(hold, finish), default="n long")
    runs = [run(it, "a", "b"), run(it, "c")]
    assert [r.acked.tolist() for r in runs] == [[], []]
    assert it.held.tolist() == [0, 1, 2]
    last = it.finish()
    assert (rows(last), last.acked.tolist()) == ([(3,)], [0, 1, 2])
    assert links(last) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert it.held.tolist() == []
    assert unbalanced([*runs, last], 3) == []


def test_held_tuples_end_in_later_calls_in_any_order() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.held.append(t)
        if t["word"] == "go":
            a, b, c, go = self.held
            self.collector.emit("late", anchors=[c, a])
            self.collector.ack(c)
            self.collector.fail(b, "not needed")
            self.collector.ack(go)
            self.collector.emit("later", anchors=a)
            self.collector.ack(a)

    it = runner(Each(execute), default="word string")
    runs = [run(it, "a", "b"), run(it, "c", "go"), it.finish()]
    assert runs[1].acked.tolist() == [2, 3, 0]
    assert failures(runs[1]) == [(1, FAILED)]
    assert (runs[1].failed[0].error, runs[1].failed[0].input) == ("not needed", "{'word': 'b'}")
    assert links(runs[1]) == [(0, 2, 0), (0, 0, 0), (1, 0, 1)]
    assert unbalanced(runs, 4) == []


def test_anchors_none_one_and_several_side_by_side() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.held.append(t)
        if len(self.held) == 2:
            one, two = self.held
            given: list[tuple[str, Tuple | Sequence[Tuple]]] = [
                ("0", ()),
                ("1", one),
                ("[1]", [one]),
                ("2", (one, two)),
            ]
            for name, anchors in [*given, ("0", []), ("1", two)]:
                self.collector.emit(name, anchors=anchors)
            ack_held(self)

    ran = run(runner(Each(execute), default="word string"), "a", "b")
    assert [w for (w,) in rows(ran)] == ["0", "1", "[1]", "2", "0", "1"]
    assert links(ran) == [(1, 0, 0), (2, 0, 1), (3, 0, 2), (3, 1, 0), (5, 1, 1)]
    assert link_counts(ran, 0, 2).tolist() == [3, 2]


def test_the_same_anchor_twice_is_two_links() -> None:
    """Storm's self-anchor: one link for both would cancel in an XOR, or be counted once and arrive twice."""

    def execute(self: Each, t: Tuple) -> None:
        self.collector.emit("x", anchors=(t, t))
        self.collector.ack(t)

    assert links(run(runner(Each(execute), default="word string"), "a")) == [(0, 0, 0), (0, 0, 1)]


@given(st.lists(st.sampled_from("aehxfbr"), min_size=1, max_size=24), st.integers(1, 6))
def test_many_rows_are_taken_in_blocks_as_if_they_were_one_call(values: list[str], at_once: int) -> None:
    """Acks, emits, holds, failures, values that the stream refuses, in any order: the outcome does not know the blocks."""

    class Anything(Bolt):
        streams = {"default": "n int", "other": "word string"}  # noqa: RUF012 - as users write it

        def prepare(self, context: BoltContext, collector: Collector) -> None:
            super().prepare(context, collector)
            self.open: list[Tuple] = []

        def execute(self, t: Tuple) -> None:
            word = t["word"]
            if word == "h":
                self.open.append(t)
                return
            if word == "x":
                raise ValueError("x")
            if word == "f":
                self.collector.fail(t, "asked for")
                return
            self.collector.emit("none" if word == "b" else len(self.open), anchors=[t, *self.open[-1:]])
            self.collector.emit(word, stream="other", anchors=t)
            if word == "e":
                self.collector.emit(0)
            if word == "r" and self.open:
                self.collector.ack(self.open.pop())
            self.collector.ack(t)

        def finish(self) -> None:
            for t in self.open:
                self.collector.ack(t)

    outcomes: list[object] = []
    for size in (len(values), at_once):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner_module, "TUPLES_AT_ONCE", size)
            it = runner(Anything(), default="n int", other="word string")
            ran, rest = run(it, *values), it.finish()
            found = {(f.handle, f.reason, f.input) for f in (*ran.failed, *rest.failed)}
            ended = sorted((*ran.acked.tolist(), *rest.acked.tolist()))
            dead = {handle for handle, *_ in found}
            kept = [
                (stream, row, [link[1:] for link in links(ran, stream) if link[0] == number and link[1] not in dead])
                for stream in ("default", "other")
                for number, row in enumerate(rows(ran, stream))
            ]
            alive = [one for one in kept if one[2]]
            assert set(ended) | dead == set(range(len(values)))
            assert not set(ended) & dead
            outcomes.append((ended, found, alive))
    assert outcomes[0] == outcomes[1]


def test_ordinals_count_over_streams_and_calls() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.held.append(t)
        self.collector.emit("x", anchors=self.held[0])
        self.collector.emit("y", stream="other", anchors=self.held[0])

    it = runner(Each(execute, ack_held), default="word string", other="word string")
    runs = [run(it, "a"), run(it, "b"), it.finish()]
    assert [links(r) + links(r, "other") for r in runs] == [[(0, 0, 0), (0, 0, 1)], [(0, 0, 2), (0, 0, 3)], []]
    assert unbalanced(runs, 2) == []


def test_only_streams_with_rows_are_given_out() -> None:
    it = runner(Each(echo), default="word string", other="n long")
    assert list(run(it, "a").emitted) == ["default"]
    assert run(it).emitted == {}


def test_reset_timeout_is_counted() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.collector.reset_timeout(t)
        self.collector.reset_timeout(t)
        self.collector.ack(t)

    it = runner(Each(execute))
    assert [run(it, "a").resets, run(it, "a", "b").resets, it.finish().resets] == [2, 4, 0]


def test_each_call_and_each_reset_is_a_sign_of_life(tmp_path: Path) -> None:
    def execute(self: Each, t: Tuple) -> None:
        if t["word"] == "slow":
            self.collector.reset_timeout(t)
        hold(self, t)

    def finish(self: Each) -> None:
        self.collector.reset_timeout(self.held[0])
        ack_held(self)

    seen: list[int] = []
    for bolt in (Each(execute, finish), Basic(lambda t, emit: None), Arrow(lambda batch: {})):
        with hearing() as heard, running(heard.place, 0, 0) as heartbeat:
            assert heartbeat is not None
            it = runner(bolt)
            it.run(words("a", "slow", "b"), "split", "default", heartbeat)
            it.finish(heartbeat)
            published(heartbeat)
            seen.append(heard.progress().rows)
    assert seen == [5, 3, 1]


def test_the_message_in_hand_is_noted_where_the_heartbeat_is_careful(tmp_path: Path) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    def noting(bolt: AnyBolt, heard: JobSigns) -> None:
        with running(heard.place, 0, 0, careful=True) as heartbeat:
            assert heartbeat is not None
            heartbeat.at(np.array([41, 42], np.int64))
            runner(bolt).run(words("a", "b"), "split", "default", heartbeat)

    bolts: list[AnyBolt] = [Each(die), Basic(die)]
    for bolt in bolts:
        with hearing() as heard:
            with pytest.raises(KeyboardInterrupt):
                noting(bolt, heard)
            assert heard.suspects() == (41,)


def test_prepare_is_given_the_context_and_keeps_the_collector() -> None:
    seen: list[BoltContext] = []

    class Prepared(Bolt):
        def prepare(self, context: BoltContext, collector: Collector) -> None:
            super().prepare(context, collector)
            seen.append(context)

        def execute(self, tuple: Tuple) -> None:
            self.collector.ack(tuple)

    context = BoltContext("me", task=1, tasks=3, consumers={"next": 2}, seed=7, params={"a": 1})
    it = BoltRunner("me", Prepared(), {}, {}, context)
    assert run(it, "a").acked.tolist() == [0]
    assert seen == [context]


# -- what fails whom


def test_a_raise_fails_the_tuple_in_hand_and_no_other() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.collector.emit(t["word"], anchors=t)
        if t["word"] == "bad":
            raise ValueError("no \0 good")
        self.collector.ack(t)

    it = runner(Each(execute), default="word string")
    ran = run(it, "a", "bad", "c")
    assert ran.acked.tolist() == [0, 2]
    assert failures(ran) == [(1, ERROR)]
    assert re.fullmatch(r"ValueError: no \\x00 good \(test_bolt.py:\d+ in execute\)", ran.failed[0].error)
    assert ran.failed[0].input == "{'word': 'bad'}"
    assert rows(ran) == [("a",), ("bad",), ("c",)]  # what was emitted before stays emitted, as in Storm
    assert unbalanced([ran, it.finish()], 3) == []


def test_fail_tuple_fails_with_the_reason_failed() -> None:
    def execute(self: Each, t: Tuple) -> None:
        raise FailTuple("too late") if t["word"] == "a" else FailTuple

    ran = run(runner(Each(execute)), "a", "b")
    assert failures(ran) == [(0, FAILED), (1, FAILED)]
    assert re.fullmatch(r"too late \(test_bolt.py:\d+ in execute\)", ran.failed[0].error)
    assert ran.failed[1].error.startswith("raised FailTuple without a reason (")


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), MemoryError()])
def test_whatever_is_thrown_fails_the_tuple(error: BaseException) -> None:
    def throw(*_: object) -> None:
        raise error

    for bolt in (Each(throw), Basic(throw), Arrow(throw)):
        ran = run(runner(bolt), "a")
        assert failures(ran) == [(0, ERROR)]
        assert ran.failed[0].error.startswith(type(error).__name__)


def test_ctrl_c_goes_through() -> None:
    def throw(*_: object) -> None:
        raise KeyboardInterrupt

    for bolt in (Each(throw), Basic(throw), Arrow(throw)):
        with pytest.raises(KeyboardInterrupt):
            run(runner(bolt), "a")
    with pytest.raises(KeyboardInterrupt):
        runner(Each(hold, throw)).finish()


def test_a_raise_takes_the_ack_of_the_same_call_back() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.collector.ack(t)
        raise ValueError

    it = runner(Each(execute))
    ran = run(it, "a")
    assert (ran.acked.tolist(), failures(ran)) == ([], [(0, ERROR)])
    assert unbalanced([ran, it.finish()], 1) == []


def test_a_raise_after_a_fail_changes_nothing() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.collector.fail(t)
        raise ValueError

    ran = run(runner(Each(execute)), "a")
    assert failures(ran) == [(0, FAILED)]
    assert ran.failed[0].error == "the bolt called fail without a reason"


def test_a_raise_fails_no_held_tuple() -> None:
    def execute(self: Each, t: Tuple) -> None:
        if t["word"] == "bad":
            raise ValueError
        self.held.append(t)

    it = runner(Each(execute, ack_held))
    runs = [run(it, "a"), run(it, "bad", "b")]
    assert failures(runs[1]) == [(1, ERROR)]
    last = it.finish()
    assert last.acked.tolist() == [0, 2]
    assert unbalanced([*runs, last], 3) == []


def test_a_bolt_may_end_what_failed_without_its_knowledge() -> None:
    """It held the tuple before it raised, and cannot know that this failed it; that must cost no other tuple."""

    def execute(self: Each, t: Tuple) -> None:
        self.held.append(t)
        if t["word"] == "bad":
            raise ValueError

    def finish(self: Each) -> None:
        bad, good = self.held
        self.collector.emit("gone", anchors=bad)
        self.collector.emit("stays", anchors=self.held)
        self.collector.reset_timeout(bad)
        self.collector.fail(bad)
        self.collector.ack(bad)
        self.collector.ack(good)

    it = runner(Each(execute, finish), default="word string")
    ran, last = run(it, "bad", "good"), it.finish()
    assert failures(ran) == [(0, ERROR)]
    assert (rows(last), links(last), last.acked.tolist(), failures(last)) == ([("stays",)], [(0, 1, 0)], [1], [])
    assert unbalanced([ran, last], 2) == []


def test_what_is_neither_acked_nor_failed_names_the_bolt() -> None:
    it = runner(Each(hold))
    run(it, "a", "b")
    last = it.finish()
    assert failures(last) == [(0, UNACKED), (1, UNACKED)]
    assert last.failed[0].error.startswith("bolt 'me' neither acked nor failed the tuple by the end of its batch")
    assert last.failed[1].input == "{'word': 'b'}"


def test_a_raise_in_finish_fails_what_is_still_held() -> None:
    def finish(self: Each) -> None:
        self.collector.ack(self.held[0])
        raise OSError("full")

    it = runner(Each(hold, finish))
    run(it, "a", "b", "c")
    last = it.finish()
    assert (last.acked.tolist(), failures(last)) == ([0], [(1, ERROR), (2, ERROR)])
    assert "OSError: full" in last.failed[0].error


def test_a_raise_in_finish_that_nobody_answers_for_fails_the_job() -> None:
    def finish(self: Each) -> None:
        raise OSError("full")

    it = runner(Each(lambda self, t: self.collector.ack(t), finish))
    run(it, "a")
    with pytest.raises(JobFailed, match="bolt 'me' raised in finish, where no message answers for it: OSError: full"):
        it.finish()


# -- misuse


def swallowing(*steps: Callable[[Each, Tuple], object]) -> tuple[Ran, str]:
    """Run a bolt of these steps; the error of its tuple."""

    def execute(self: Each, t: Tuple) -> None:
        for step in steps:
            step(self, t)

    ran = run(runner(Each(execute), default="word string"), "a")
    (failed,) = ran.failed
    return ran, failed.error


def ack(self: Each, t: Tuple) -> None:
    self.collector.ack(t)


def fail(self: Each, t: Tuple) -> None:
    self.collector.fail(t)


def emit(self: Each, t: Tuple) -> None:
    self.collector.emit("x", anchors=t)


def emit_with_others(self: Each, t: Tuple) -> None:
    self.collector.emit("x", anchors=[t, t])


def reset(self: Each, t: Tuple) -> None:
    self.collector.reset_timeout(t)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (ack, ack, "cannot ack the tuple {'word': 'a'} of 'split': it acked it before"),
        (ack, fail, "cannot fail the tuple {'word': 'a'} of 'split': it acked it before"),
        (ack, emit, "cannot emit anchored to the tuple {'word': 'a'} of 'split': it acked it before"),
        (ack, emit_with_others, "cannot emit anchored to the tuple {'word': 'a'} of 'split': it acked it before"),
        (ack, reset, "cannot reset_timeout the tuple {'word': 'a'} of 'split': it acked it before"),
    ],
)
def test_what_was_acked_cannot_be_used_again(
    first: Callable[[Each, Tuple], object], second: Callable[[Each, Tuple], object], said: str
) -> None:
    ran, error = swallowing(first, second)
    assert error.startswith(f"UsageError: bolt 'me' {said}")
    assert re.search(r"\(test_bolt.py:\d+ in (ack|fail|emit|emit_with_others|reset)\)$", error)  # the user's own line
    assert (failures(ran), ran.acked.tolist(), ran.emitted) == ([(0, ERROR)], [], {})


@pytest.mark.parametrize("second", [ack, fail, emit, emit_with_others, reset])
def test_what_was_failed_cannot_be_used_again(second: Callable[[Each, Tuple], object]) -> None:
    said: list[str] = []

    def execute(self: Each, t: Tuple) -> None:
        self.collector.fail(t, "first")
        with pytest.raises(UsageError) as error:
            second(self, t)
        said.append(str(error.value))

    ran = run(runner(Each(execute), default="word string"), "a")
    assert "it failed it before" in said[0]
    assert [f.error for f in ran.failed] == ["first"]
    assert ran.emitted == {}


def test_a_double_ack_of_a_held_tuple_fails_the_tuple_in_hand() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.held.append(t)
        self.collector.ack(self.held[0])

    it = runner(Each(execute))
    ran = run(it, "a", "b")
    assert (ran.acked.tolist(), failures(ran)) == ([0], [(1, ERROR)])
    assert unbalanced([ran, it.finish()], 2) == []


def test_the_balance_sees_a_double_ack_that_nothing_refused() -> None:
    """Negative control: a bolt that makes its tuple look open again gets by, and `unbalanced` catches it."""

    def execute(self: Each, t: Tuple) -> None:
        for _ in range(2):
            t._links = 0  # pyright: ignore[reportPrivateUsage]
            self.collector.emit("x", anchors=t)
            self.collector.ack(t)

    it = runner(Each(execute), default="word string")
    assert unbalanced([run(it, "a"), it.finish()], 1) == ["0 ended twice", "ordinals of 0: [0, 0]"]


@pytest.mark.parametrize("second", [ack, fail, emit, emit_with_others, reset])
def test_tuples_of_another_batch_or_task_are_refused(second: Callable[[Each, Tuple], object]) -> None:
    other = Each(hold)
    run(runner(other), "theirs")

    def execute(self: Each, t: Tuple) -> None:
        second(self, other.held[0])

    ran = run(runner(Each(execute), default="word string"), "mine")
    assert failures(ran) == [(0, ERROR)]
    assert "it is of another bolt, task or batch" in ran.failed[0].error
    assert "theirs" in ran.failed[0].error


@pytest.mark.parametrize("thing", ["a", None, ("a",), 5])
def test_what_is_no_tuple_is_refused(thing: Any) -> None:
    def give(step: Callable[[Each, Tuple], object]) -> Callable[[Each, Tuple], object]:
        return lambda self, _: step(self, thing)

    for step in (ack, fail, reset, emit_with_others):
        _, error = swallowing(give(step))
        assert f"a {type(thing).__name__}; give it the tuple that execute got" in error
    _, error = swallowing(lambda self, _: self.collector.emit("x", anchors=5))  # type: ignore[arg-type]
    assert "emit(anchors=...) takes a tuple or a sequence of tuples, got a int" in error


def test_an_emit_that_fails_half_way_links_nothing() -> None:
    other = Each(hold)
    run(runner(other), "theirs")

    def execute(self: Each, t: Tuple) -> None:
        with pytest.raises(UsageError):
            self.collector.emit("x", anchors=[t, other.held[0]])
        self.collector.emit("y", anchors=t)
        self.collector.ack(t)

    ran = run(runner(Each(execute), default="word string"), "mine")
    assert (rows(ran), links(ran)) == ([("y",)], [(0, 0, 0)])


def test_unknown_streams() -> None:
    def explicit(self: Each, t: Tuple) -> None:
        self.collector.emit("x", stream="wrods", anchors=t)

    for bolt in (Each(explicit), Basic(lambda t, emit: emit("x", "wrods"))):
        ran = run(runner(bolt, default="word string", words="word string"), "a")
        assert ran.failed[0].error.startswith(
            "UsageError: component 'me' has no stream 'wrods'; known: default, words (test_bolt.py:"
        )
        assert "known: none, declare it in streams" in run(runner(bolt), "a").failed[0].error


def test_after_the_end_nothing_goes() -> None:
    bolt = Each(hold)
    it = runner(bolt, default="word string")
    run(it, "a")
    it.finish()
    for step, said in [(ack, "the batch is over"), (fail, "the batch is over"), (emit, "outside its call")]:
        with pytest.raises(UsageError, match=said):
            step(bolt, bolt.held[0])
    with pytest.raises(UsageError, match="component 'me' emitted to 'default' outside its call"):
        bolt.collector.emit("x")
    with pytest.raises(AssertionError, match="has ended"):
        run(it, "b")


def test_a_basic_bolts_emit_is_good_for_its_call_only() -> None:
    kept: list[Emit] = []
    run(runner(Basic(lambda t, emit: kept.append(emit)), default="word string"), "a")
    with pytest.raises(UsageError, match="outside its call"):
        kept[0]("x")


# -- values that their stream cannot hold


def test_values_that_do_not_fit_fail_their_own_tuple_only() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.collector.emit(1, anchors=t)
        self.collector.emit(t["word"] if t["word"] == "bad" else 2, anchors=t)
        self.collector.ack(t)

    it = runner(Each(execute), default="n long")
    ran = run(it, "a", "bad", "c")
    assert (ran.acked.tolist(), failures(ran)) == ([0, 2], [(1, ERROR)])
    assert ran.failed[0].error == (
        "component 'me' emitted to its stream 'default' what that cannot hold: field 'n' is int64, got 'bad' (str)"
    )
    assert rows(ran) == [(1,), (2,), (1,), (1,), (2,)]
    assert links(ran) == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 2, 0), (4, 2, 1)]
    assert unbalanced([ran, it.finish()], 3) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("a",), "got 1 values; the schema has 2: word, n"),
        ({"word": "a", "m": 1}, "got the keys 'word', 'm'; the schema has word, n"),
        ("a", "got a str; a tuple or dict of word, n is wanted"),
        (("a", 1.5), "field 'n' is int64, got 1.5 (float)"),
        (("a", None), "field 'n' is NOT NULL and got None"),
    ],
)
def test_what_is_said_of_values_that_do_not_fit(values: object, said: str) -> None:
    def explicit(self: Each, t: Tuple) -> None:
        self.collector.emit(values if t["word"] == "bad" else ("x", 1), anchors=t)
        self.collector.ack(t)

    def basic(t: Tuple, emit: Emit) -> None:
        emit(("x", 1))
        emit(values if t["word"] == "bad" else ("x", 1))

    for bolt, good in ((Each(explicit), 1), (Basic(basic), 2)):
        ran = run(runner(bolt, default="word string, n long not null"), "a", "bad")
        assert failures(ran) == [(1, ERROR)]
        assert ran.failed[0].error == f"component 'me' emitted to its stream 'default' what that cannot hold: {said}"
        assert (len(rows(ran)), ran.acked.tolist()) == (good, [0])


def test_a_wrapped_value_of_one_field_is_explained() -> None:
    ran = run(runner(Basic(lambda t, emit: emit(["a"])), default="word string"), "a")
    assert ran.failed[0].error.endswith("a stream of one field is given the value itself")


def test_bad_values_of_a_held_tuple_fail_its_anchors() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.held.append(t)
        if t["word"] == "c":
            self.collector.emit(1.5, anchors=self.held[:2])
            self.collector.ack(self.held[0])
        elif t["word"] == "d":
            self.collector.ack(self.held[1])  # it cannot know
            for late in self.held[2:]:
                self.collector.ack(late)

    it = runner(Each(execute), default="n long")
    runs = [run(it, "a", "b"), run(it, "c"), run(it, "d"), it.finish()]
    assert [failures(r) for r in runs] == [[], [(0, ERROR), (1, ERROR)], [], []]
    assert [r.acked.tolist() for r in runs] == [[], [], [2, 3], []]
    assert unbalanced(runs, 4) == []


def test_bad_values_without_anchors_fail_the_tuple_in_hand() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.collector.emit(1 if t["word"] != "bad" else "x")
        self.collector.ack(t)

    ran = run(runner(Each(execute), default="n long"), "a", "bad", "c")
    assert (ran.acked.tolist(), failures(ran), rows(ran)) == ([0, 2], [(1, ERROR)], [(1,), (1,)])


def test_bad_values_that_nobody_answers_for_fail_the_job() -> None:
    it = runner(Each(ack, lambda self: self.collector.emit("x")), default="n long")
    run(it, "a")
    with pytest.raises(JobFailed, match=r"field 'n' is int64, got 'x' \(str\).*no message answers for it"):
        it.finish()


def test_bad_values_in_finish_fail_their_anchors_as_error_not_as_unacked() -> None:
    it = runner(Each(hold, lambda self: self.collector.emit("x", anchors=self.held[0])), default="n long")
    run(it, "a", "b")
    assert failures(it.finish()) == [(0, ERROR), (1, UNACKED)]


# -- direct streams


def test_tasks_of_a_direct_stream() -> None:
    def explicit(self: Each, t: Tuple) -> None:
        for anchors in (t, (), (t, t)):
            self.collector.emit("x", anchors=anchors, task=len(t["word"]))
        self.collector.ack(t)

    def basic(t: Tuple, emit: Emit) -> None:
        for _ in range(3):
            emit("x", task=np.int64(len(t["word"])))  # type: ignore[arg-type]

    for bolt in (Each(explicit), Basic(basic)):
        ran = run(runner(bolt, {"default": 3}, default="word string"), "a", "", "bb")
        task = ran.emitted["default"].task
        assert task is not None
        assert task.tolist() == [1, 1, 1, 0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("direct", "task", "said"),
    [
        ({"default": 3}, None, "has a direct() subscriber, so each tuple names its task: emit(..., task=0 to 2)"),
        ({"default": 3}, 3, "emit(task=3), but the direct() subscriber has the tasks 0 to 2"),
        ({"default": 3}, -1, "emit(task=-1), but the direct() subscriber has the tasks 0 to 2"),
        ({"default": 3}, "a", "emit(task='a'), but the direct() subscriber has the tasks 0 to 2"),
        ({"default": 3}, True, "emit(task=True), but the direct() subscriber has the tasks 0 to 2"),
        ({}, 0, "emit(task=0), but nobody subscribes to it with direct()"),
    ],
)
def test_tasks_that_are_wrong(direct: dict[str, int], task: Any, said: str) -> None:
    def explicit(self: Each, t: Tuple) -> None:
        self.collector.emit("x", anchors=t, task=task)

    for bolt in (Each(explicit), Basic(lambda t, emit: emit("x", task=task))):
        ran = run(runner(bolt, direct, default="word string"), "a")
        assert failures(ran) == [(0, ERROR)]
        assert "component 'me', stream 'default'" in ran.failed[0].error
        assert said in ran.failed[0].error
        assert ran.emitted == {}


def test_tasks_stay_with_their_rows_when_others_go() -> None:
    def explicit(self: Each, t: Tuple) -> None:
        self.collector.emit(t["word"] if t["word"] == "bad" else 1, anchors=t, task=len(t["word"]))
        self.collector.ack(t)

    def basic(t: Tuple, emit: Emit) -> None:
        emit(1, task=len(t["word"]))
        if t["word"] == "bad":
            raise ValueError

    for bolt in (Each(explicit), Basic(basic)):
        task = run(runner(bolt, {"default": 5}, default="n long"), "a", "bad", "cc").emitted["default"].task
        assert task is not None
        assert task.tolist() == [1, 2]


# -- the basic bolt


def split(t: Tuple, emit: Emit) -> None:
    for word in t["word"].split():
        emit(word)
        if word == "bad":
            raise ValueError(word)
        emit(len(word), "lengths")


def test_a_basic_bolt_anchors_and_acks() -> None:
    it = runner(Basic(split), default="word string", lengths="n long")
    first, second, last = run(it, "a bb", "", "c"), run(it, "d"), it.finish()
    assert rows(first) == [("a",), ("bb",), ("c",)]
    assert links(first) == [(0, 0, 0), (1, 0, 1), (2, 2, 0)]
    assert links(first, "lengths") == [(0, 0, 2), (1, 0, 3), (2, 2, 1)]
    assert links(second) == [(0, 3, 0)]
    assert first.acked.tolist() == [0, 1, 2]
    assert link_counts(first, 0, 3).tolist() == [4, 0, 2]
    assert unbalanced([first, second, last], 4) == []
    assert not it.holds
    assert it.held.tolist() == []


def test_a_basic_bolt_takes_back_what_a_failed_tuple_emitted() -> None:
    it = runner(Basic(split), default="word string", lengths="n long")
    ran = run(it, "a", "b bad c", "d", "bad")
    assert (rows(ran), rows(ran, "lengths")) == ([("a",), ("d",)], [(1,), (1,)])
    assert (ran.acked.tolist(), failures(ran)) == ([0, 2], [(1, ERROR), (3, ERROR)])
    assert links(ran) == [(0, 0, 0), (1, 2, 0)]
    assert unbalanced([ran, it.finish()], 4) == []


def test_a_basic_bolt_takes_back_all_streams_for_one_bad_value() -> None:
    def execute(t: Tuple, emit: Emit) -> None:
        emit(t["word"])
        emit(t["word"] if t["word"] == "bad" else 1, "lengths")

    ran = run(runner(Basic(execute), default="word string", lengths="n long"), "a", "bad", "c")
    assert (rows(ran), rows(ran, "lengths")) == ([("a",), ("c",)], [(1,), (1,)])
    assert (ran.acked.tolist(), failures(ran)) == ([0, 2], [(1, ERROR)])


# -- the Arrow bolt


def lengths(batch: pa.RecordBatch) -> Any:
    values = batch.column("word").to_pylist()
    if "bad" in values:
        raise ValueError("a bad one")
    found = [(len(v), i) for i, v in enumerate(values) for _ in range(len(v))]
    return pa.record_batch({"n": pa.array([n for n, _ in found], pa.int64())}), np.array(
        [i for _, i in found], np.int64
    )


def test_an_arrow_bolt_anchors_by_the_parent_index() -> None:
    it = runner(Arrow(lengths), default="n long")
    first, second, last = run(it, "aa", "", "b"), run(it, "c"), it.finish()
    assert (rows(first), links(first)) == ([(2,), (2,), (1,)], [(0, 0, 0), (1, 0, 1), (2, 2, 0)])
    assert links(second) == [(0, 3, 0)]
    assert first.acked.tolist() == [0, 1, 2]
    assert unbalanced([first, second, last], 4) == []


def test_an_arrow_bolt_is_called_with_halves_until_the_culprits_stand_alone() -> None:
    bolt = Arrow(lengths)
    ran = run(runner(bolt, default="n long"), "a", "a", "bad", "a", "a", "a", "a", "bad")
    assert (ran.acked.tolist(), failures(ran)) == ([0, 1, 3, 4, 5, 6], [(2, ERROR), (7, ERROR)])
    assert [h for _, h, _ in links(ran)] == [0, 1, 3, 4, 5, 6]
    assert ran.failed[0].input == "{'word': 'bad'}"
    assert bolt.calls == [8, 4, 2, 2, 1, 1, 4, 2, 2, 1, 1]


def test_an_arrow_bolts_streams_and_parents_in_any_order() -> None:
    def both(batch: pa.RecordBatch) -> Any:
        n = batch.num_rows
        back = batch.take(pa.array(range(n - 1, -1, -1)))
        return {"default": (back, np.arange(n)[::-1]), "other": (batch, np.arange(n))}

    ran = run(runner(Arrow(both), default="word string", other="word string"), "a", "b")
    assert (rows(ran), links(ran)) == ([("a",), ("b",)], [(0, 0, 0), (1, 1, 0)])
    assert links(ran, "other") == [(0, 0, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda b: b, "gives (record batch, parent index), got RecordBatch"),
        (lambda b: (b, np.array([5])), "outside 0 to 0"),
        (lambda b: {"oops": (b, np.array([0]))}, "no stream 'oops'; known: default"),
        (lambda b: (b.rename_columns(["x"]), np.array([0])), "the batch has the fields x; the schema has word"),
        (lambda b: (pa.record_batch({"word": [None]}), np.array([0])), "field 'word' is NOT NULL and got None"),
    ],
)
def test_what_an_arrow_bolt_must_give(result: Callable[[pa.RecordBatch], Any], said: str) -> None:
    ran = run(runner(Arrow(result), default="word string not null"), "a")
    assert failures(ran) == [(0, ERROR)]
    assert said in ran.failed[0].error
    assert ran.emitted == {}


def test_an_arrow_bolt_cannot_name_tasks() -> None:
    with pytest.raises(UsageError, match=r"ArrowBolt, which cannot name tasks, but stream 'default' has a direct\(\)"):
        runner(Arrow(lengths), {"default": 2}, default="n long")


# -- a bolt's life


def test_cleanup_is_called_once() -> None:
    calls: list[str] = []
    it = runner(Each(ack, cleanup=lambda: calls.append("cleanup")))
    run(it, "a")
    it.finish()
    it.close()
    assert calls == ["cleanup"]
    given_up = runner(Each(ack, lambda _: calls.append("finish"), lambda: calls.append("cleanup")))
    run(given_up, "a")
    given_up.close()
    assert calls == ["cleanup", "cleanup"]


def test_a_raise_in_prepare_is_no_messages_fault_and_one_in_cleanup_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unprepared(BasicBolt):
        def prepare(self, context: BoltContext) -> None:
            raise OSError("no such host")

        def execute(self, tuple: Tuple, emit: Emit) -> None:
            pass

    with pytest.raises(BoltUnavailable, match="bolt 'me' raised in prepare, where no message answers for it: OSError"):
        runner(Unprepared())

    def cleanup() -> None:
        raise OSError("gone")

    runner(Each(ack, cleanup=cleanup)).finish()
    assert "bolt 'me' raised in cleanup, which changes nothing: OSError: gone" in caplog.text


class Named(BasicBolt):
    streams = "word string"

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def execute(self, tuple: Tuple, emit: Emit) -> None:
        pass


def test_each_task_has_a_bolt_of_its_own() -> None:
    mine = Named([1])
    copy = fresh(mine)
    assert copy.thing == [1]
    assert copy.thing is not mine.thing
    with pytest.raises(UsageError, match=r"bolt Named cannot be copied for a task: TypeError.*in prepare, not in"):
        fresh(Named(x for x in ""))


def test_bolts_without_execute_cannot_be_made() -> None:
    kinds: list[Callable[[], object]] = [Bolt, BasicBolt, ArrowBolt]
    for kind in kinds:
        with pytest.raises(TypeError, match="abstract"):
            kind()


def test_text_that_is_no_utf8_fails_its_own_tuple() -> None:
    broken = pa.array([b"a", b"\xff", b"c"], pa.binary()).cast(pa.binary()).view(pa.string())
    seen: list[str] = []

    def execute(self: Each, t: Tuple) -> None:
        seen.append(t["word"])
        self.collector.ack(t)

    for bolt in (Each(execute), Basic(lambda t, emit: seen.append(t["word"]))):
        ran = runner(bolt).run(pa.record_batch({"word": broken}), "split", "default")
        assert (ran.acked.tolist(), failures(ran)) == ([0, 2], [(1, ERROR)])
        assert ran.failed[0].error.startswith("UnicodeDecodeError")
    assert seen == ["a", "c"] * 2


def test_failures_can_be_stored_anywhere() -> None:
    def execute(self: Each, t: Tuple) -> None:
        self.collector.fail(t, "x\0" * 10_000)

    (failed,) = run(runner(Each(execute)), "y" * 10_000).failed
    assert "\0" not in failed.error
    assert len(failed.input) < INPUT_TEXT_MAX + 100


# -- what is beneath


def test_blame() -> None:
    assert blame(FailTuple("why")) == (FAILED, "why")
    assert blame(ValueError("what")) == (ERROR, "ValueError: what")
    with pytest.raises(KeyboardInterrupt):
        blame(KeyboardInterrupt())


def test_the_cycle_collector_runs_less_often_while_a_bolt_runs() -> None:
    before = gc.get_threshold()
    seen: list[int] = []
    run(runner(Basic(lambda t, emit: seen.append(gc.get_threshold()[0]))), "a")
    assert seen == [ALLOCATIONS]
    assert gc.get_threshold() == before


@pytest.mark.parametrize("set_to", [0, ALLOCATIONS + 1])
def test_a_cycle_collector_that_runs_even_less_often_is_left_alone(set_to: int) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(set_to, *before[1:])
        with fewer_collections():
            assert gc.get_threshold()[0] == set_to
        assert gc.get_threshold()[0] == set_to
    finally:
        gc.set_threshold(*before)
