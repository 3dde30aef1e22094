"""Bolts of random steps against a plain model of what they may do: what is given out, acked and failed is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormproof.core.base.errors import JobFailed
from stormproof.core.base.message import FailureReason
from stormproof.core.bolt import BasicBolt, Bolt, BoltContext, Emit, FailTuple, Ran, Tuple
from stormproof.core.bolt.runner import BoltRunner
from stormproof.core.contract.schema import parse_schema

STREAMS = {"default": parse_schema("n long"), "other": parse_schema("n long, m long")}
FAILED, ERROR, UNACKED = FailureReason.FAILED, FailureReason.ERROR, FailureReason.UNACKED


@dataclass(frozen=True)
class Step:
    """One thing that a bolt does. `tuples` are numbers of tuples that it saw, modulo how many it saw."""

    what: str  # emit, emit_bad, ack, fail, raise, raise_fail
    tuples: tuple[int, ...] = ()
    stream: str = "default"


Script: TypeAlias = list[Step]

indexes = st.integers(0, 7)
steps = st.one_of(
    st.builds(
        Step,
        st.sampled_from(["emit", "emit", "emit_bad"]),
        st.lists(indexes, max_size=3).map(tuple),
        st.sampled_from(["default", "other"]),
    ),
    st.builds(Step, st.sampled_from(["ack", "ack", "ack", "fail"]), st.tuples(indexes)),
    st.builds(Step, st.sampled_from(["raise", "raise_fail"])),
)
scripts = st.lists(st.lists(steps, max_size=5), max_size=8)


def values_of(step: Step) -> object:
    good: object = 1 if step.stream == "default" else (1, 2)
    return good if step.what == "emit" else "bad"


class Scripted(Bolt):
    """Does the steps of one script for each tuple, the last one in finish."""

    def __init__(self, scripts: Sequence[Script], last: Script) -> None:
        self.scripts = iter(scripts)
        self.last = last
        self.seen: list[Tuple] = []

    def execute(self, tuple: Tuple) -> None:
        self.seen.append(tuple)
        self.follow(next(self.scripts))

    def finish(self) -> None:
        self.follow(self.last)

    def follow(self, script: Script) -> None:
        for step in script:
            chosen = [self.seen[i % len(self.seen)] for i in step.tuples] if self.seen else []
            match step.what:
                case "ack" if chosen:
                    self.collector.ack(chosen[0])
                case "fail" if chosen:
                    self.collector.fail(chosen[0])
                case "emit" | "emit_bad":
                    anchors = chosen[0] if len(chosen) == 1 else chosen
                    self.collector.emit(values_of(step), stream=step.stream, anchors=anchors)
                case "raise":
                    raise ValueError
                case "raise_fail":
                    raise FailTuple
                case _:
                    pass


class Refused(Exception):
    """The model's word for misuse."""


@dataclass
class Model:
    """The rules, one at a time. A tuple is open, acked, failed (by its bolt) or given up (without its bolt knowing)."""

    state: list[str] = field(default_factory=list[str])
    links: list[int] = field(default_factory=list[int])
    acked: list[int] = field(default_factory=list[int])
    failed: dict[int, FailureReason] = field(default_factory=dict[int, FailureReason])
    emitted: list[tuple[Step, list[tuple[int, int]], int | None]] = field(
        default_factory=list[tuple[Step, list[tuple[int, int]], int | None]]
    )

    def call(self, scripts: Sequence[Script]) -> None:
        self.acked, self.failed, self.emitted = [], {}, []
        for script in scripts:
            hand = len(self.state)
            self.state.append("open")
            self.links.append(0)
            reason = self.follow(script, hand)
            if reason is not None:
                self.give_up(hand, reason)
        self.values_are_checked()

    def last_call(self, script: Script) -> None:
        self.acked, self.failed, self.emitted = [], {}, []
        reason = self.follow(script, None)
        still_open = [handle for handle, state in enumerate(self.state) if state == "open"]
        if reason is not None:
            if not still_open:
                raise Refused
            for handle in still_open:
                self.give_up(handle, reason)
        self.values_are_checked()
        for handle, state in enumerate(self.state):
            if state == "open":
                self.give_up(handle, UNACKED)

    def follow(self, script: Script, hand: int | None) -> FailureReason | None:
        try:
            for step in script:
                self.do(step, hand)
        except Refused:
            return ERROR
        except FailTuple:
            return FAILED
        return None

    def do(self, step: Step, hand: int | None) -> None:
        chosen = [i % len(self.state) for i in step.tuples] if self.state else []
        if step.what == "raise":
            raise Refused
        if step.what == "raise_fail":
            raise FailTuple
        for handle in chosen:
            if self.state[handle] in ("acked", "failed"):
                raise Refused
        alive = [handle for handle in chosen if self.state[handle] == "open"]
        if step.what in ("emit", "emit_bad"):
            if alive or not chosen:
                made: list[tuple[int, int]] = []
                for handle in alive:
                    made.append((handle, self.links[handle]))
                    self.links[handle] += 1
                self.emitted.append((step, made, hand))
        elif alive and step.what == "ack":
            self.state[alive[0]] = "acked"
            self.acked.append(alive[0])
        elif alive:
            self.state[alive[0]] = "failed"
            self.failed[alive[0]] = FAILED

    def give_up(self, handle: int, reason: FailureReason) -> None:
        if self.state[handle] != "failed" and handle not in self.failed:
            self.state[handle] = "given up"
            self.failed[handle] = reason

    def values_are_checked(self) -> None:
        # Stream by stream, as the runner does; whom it blames does not depend on the order.
        for step, made, hand in self.emitted:
            if step.what == "emit_bad":
                blamed = [handle for handle, _ in made]
                if not blamed:
                    if hand is None:
                        raise Refused
                    blamed = [hand]
                for handle in blamed:
                    self.give_up(handle, ERROR)
        self.acked = [handle for handle in self.acked if handle not in self.failed]

    def check(self, ran: Ran) -> None:
        assert ran.acked.tolist() == self.acked
        assert {f.handle: f.reason for f in ran.failed} == self.failed
        assert len(ran.failed) == len(self.failed)
        for stream in STREAMS:
            wanted = [made for step, made, _ in self.emitted if step.stream == stream and step.what == "emit"]
            assert links(ran, stream) == wanted


def links(ran: Ran, stream: str) -> list[list[tuple[int, int]]]:
    if stream not in ran.emitted:
        return []
    emitted = ran.emitted[stream]
    found: list[list[tuple[int, int]]] = [[] for _ in range(emitted.rows.num_rows)]
    rows = emitted.anchor_row.tolist()
    assert rows == sorted(rows)
    for row, handle, ordinal in zip(rows, emitted.anchor_input.tolist(), emitted.anchor_ordinal.tolist(), strict=True):
        found[row].append((handle, ordinal))
    return found


def numbers(count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(count), pa.int64())})


def play(calls: Sequence[Sequence[Script]], last: Script, model: Model) -> list[Ran]:
    """Run the bolt beside the model."""
    bolt = Scripted([script for call in calls for script in call], last)
    it = BoltRunner("me", bolt, STREAMS, {}, BoltContext("me"))
    runs: list[Ran] = []
    for call in calls:
        model.call(call)
        runs.append(it.run(numbers(len(call)), "from", "default"))
        model.check(runs[-1])
        assert it.held.tolist() == [handle for handle, state in enumerate(model.state) if state == "open"]
    try:
        model.last_call(last)
    except Refused:
        with pytest.raises(JobFailed):
            it.finish()
        return []
    runs.append(it.finish())
    model.check(runs[-1])
    assert it.held.tolist() == []
    return runs


@settings(deadline=None, max_examples=300)
@given(st.lists(scripts, max_size=4), st.lists(steps, max_size=6))
def test_a_bolt_does_what_the_model_does(calls: list[list[Script]], last: Script) -> None:
    model = Model()
    runs = play(calls, last, model)
    if not runs:
        return
    # Every tuple ended once; the links of an acked one are numbered without a gap, so that its acks cancel.
    ended = [handle for ran in runs for handle in (*ran.acked.tolist(), *(f.handle for f in ran.failed))]
    assert sorted(ended) == list(range(len(model.state)))
    given_out: dict[int, list[int]] = {}
    for ran in runs:
        for stream in STREAMS:
            for row in links(ran, stream):
                for handle, ordinal in row:
                    given_out.setdefault(handle, []).append(ordinal)
    for ran in runs:
        for handle in ran.acked.tolist():
            assert sorted(given_out.get(handle, [])) == list(range(model.links[handle]))


class Forgetful(Model):
    """Negative control: it keeps an ack whose tuple failed in the same call."""

    def values_are_checked(self) -> None:
        before = list(self.acked)
        super().values_are_checked()
        self.acked = before


def test_the_comparison_sees_an_ack_that_is_kept_after_a_failure() -> None:
    with pytest.raises(AssertionError):
        play([[[Step("ack", (0,)), Step("raise")]]], [], Forgetful())


class Basic(BasicBolt):
    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = iter(scripts)

    def execute(self, tuple: Tuple, emit: Emit) -> None:
        for step in next(self.scripts):
            if step.what in ("raise", "raise_fail"):
                raise ValueError if step.what == "raise" else FailTuple
            emit(values_of(step), step.stream)


emits_and_raises = st.lists(
    st.builds(
        Step,
        st.sampled_from(["emit"] * 6 + ["emit_bad", "raise", "raise_fail"]),
        st.just(()),
        st.sampled_from(["default", "other"]),
    ),
    max_size=5,
)


@settings(deadline=None)
@given(st.lists(emits_and_raises, max_size=12))
def test_a_basic_bolt_gives_out_all_of_a_tuple_or_nothing(scripts: list[Script]) -> None:
    it = BoltRunner("me", Basic(scripts), STREAMS, {}, BoltContext("me"))
    ran = it.run(numbers(len(scripts)), "from", "default")
    failed: dict[int, FailureReason] = {}
    wanted: dict[str, list[int]] = {stream: [] for stream in STREAMS}
    for handle, script in enumerate(scripts):
        ends = [step.what for step in script if step.what.startswith("raise")]
        if ends:
            failed[handle] = ERROR if ends[0] == "raise" else FAILED
        elif any(step.what == "emit_bad" for step in script):
            failed[handle] = ERROR
        else:
            for step in script:
                wanted[step.stream].append(handle)
    assert {f.handle: f.reason for f in ran.failed} == failed
    assert ran.acked.tolist() == [handle for handle in range(len(scripts)) if handle not in failed]
    ordinals: dict[int, list[int]] = {}
    for stream in STREAMS:
        found = [row[0] for row in links(ran, stream)]
        assert [handle for handle, _ in found] == wanted[stream]
        for handle, ordinal in found:
            ordinals.setdefault(handle, []).append(ordinal)
    for numbers_ in ordinals.values():
        assert sorted(numbers_) == list(range(len(numbers_)))
    assert it.finish().failed == ()
