"""Any trees, any order of notices: Storm's form, shares, and a look at every node agree on each message's verdict."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.tuple_trees import (
    Fate,
    Form,
    Node,
    Trees,
    Verdict,
    classic,
    deliver,
    ids_of,
    open_shares,
    replay,
    split_shares,
    words_of,
)

from stormproof.core.tracking.acker import Acker, Answers, incomplete

IDS = st.integers(-(2**63), 2**63 - 1)
INNER: list[Form] = [classic, open_shares]
"""The forms in which every node tells something."""


@st.composite
def trees(draw: st.DrawFn, *, fates: list[Fate], leaves_only: bool = False) -> Trees:
    """Up to five messages of up to three source tuples; every other node has anchors before it, maybe one of them twice."""
    ids = draw(st.lists(IDS, min_size=1, max_size=5, unique=True))
    nodes = [Node(place) for place in range(len(ids)) for _ in range(draw(st.integers(0, 3)))]
    for _ in range(draw(st.integers(0, 8)) if nodes else 0):
        anchors = draw(st.lists(st.integers(0, len(nodes) - 1), min_size=1, max_size=3))
        nodes.append(Node(None, tuple(anchors)))
    drawn = draw(st.lists(st.sampled_from(fates), min_size=len(nodes), max_size=len(nodes)))
    return Trees(tuple(ids), tuple(nodes)).with_fates(drawn, leaves_only=leaves_only)


MOSTLY_ACKED = [Fate.ACKED] * 6
RANDOMS = st.randoms(use_true_random=False)


@given(
    trees(fates=[*MOSTLY_ACKED, Fate.DROPPED, Fate.FAILED], leaves_only=True), RANDOMS, st.integers(1, 8), st.booleans()
)
def test_both_forms_and_brute_force_agree_in_any_order(case: Trees, rng: Random, ackers: int, at_once: bool) -> None:
    expected = case.brute_force()
    for form in (classic, open_shares, split_shares):
        told = form(case, Random(rng.randrange(2**32)))
        rng.shuffle(told)
        assert deliver(told, *(Acker() for _ in range(ackers)), at_once=at_once) == expected


@given(trees(fates=[*MOSTLY_ACKED, Fate.DROPPED]), RANDOMS, st.sampled_from(INNER))
def test_an_inner_tuple_that_is_not_acked_is_missed(case: Trees, rng: Random, form: Form) -> None:
    told = form(case, Random(rng.randrange(2**32)))
    rng.shuffle(told)
    assert deliver(told, Acker()) == case.brute_force()


@given(trees(fates=[*MOSTLY_ACKED, Fate.DROPPED, Fate.TWICE, Fate.FAILED]), RANDOMS, st.booleans())
def test_doubled_acks_agree_with_a_replay_by_hand(case: Trees, rng: Random, at_once: bool) -> None:
    for form in INNER:
        told = form(case, Random(rng.randrange(2**32)))
        rng.shuffle(told)
        verdicts = deliver(told, Acker(), at_once=at_once)
        assert verdicts == replay(case, told, at_once=at_once)
        assert_safe(case, verdicts)


@given(trees(fates=[*MOSTLY_ACKED, Fate.DROPPED, Fate.TWICE, Fate.FAILED], leaves_only=True), RANDOMS, st.booleans())
def test_doubled_acks_of_leaves_agree_with_a_replay_by_hand(case: Trees, rng: Random, at_once: bool) -> None:
    told = split_shares(case, Random(rng.randrange(2**32)))
    rng.shuffle(told)
    verdicts = deliver(told, Acker(), at_once=at_once)
    assert verdicts == replay(case, told, at_once=at_once, leaves_only=True)
    assert_safe(case, verdicts)


def assert_safe(case: Trees, verdicts: dict[int, Verdict]) -> None:
    """Whatever is complete had every tuple acked at least once and none failed."""
    for place, message_id in enumerate(case.ids):
        if verdicts[message_id] is Verdict.COMPLETE:
            fates = {node.fate for node, of in zip(case.nodes, case.reached(), strict=True) if place in of}
            assert not fates & {Fate.FAILED, Fate.DROPPED}


@given(trees(fates=[*MOSTLY_ACKED, Fate.DROPPED, Fate.TWICE], leaves_only=True), RANDOMS, st.data())
def test_the_verdicts_of_a_whole_batch_are_the_same(case: Trees, rng: Random, data: st.DataObject) -> None:
    """`incomplete` decides after all notices, so a doubled ack is always missed; and so is a message that is read twice."""
    told = split_shares(case, Random(rng.randrange(2**32)))
    again = data.draw(st.sets(st.sampled_from(case.ids)))
    inits = [notice for notice in told if notice.kind == "init"]
    inits += [notice for notice in inits if notice.id in again]
    acks = [notice for notice in told if notice.kind == "ack"]
    rng.shuffle(inits)
    rng.shuffle(acks)
    found = incomplete(
        ids_of(notice.id for notice in inits),
        words_of(notice.value for notice in inits),
        ids_of(notice.id for notice in acks),
        words_of(notice.value for notice in acks),
    )
    verdicts = case.brute_force()
    assert found.tolist() == sorted(again | {key for key in verdicts if verdicts[key] is not Verdict.COMPLETE})


class Model(RuleBasedStateMachine):
    """The acker beside a dict of plain entries, over ids that come again and again: what both say is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[int, dict[str, int | bool]] = {}
        self.now = 0
        self.ghosts = 0

    @initialize(span=st.sampled_from([8, 200, 4_000]), seed=st.integers(0, 2**32))
    def begin(self, span: int, seed: int) -> None:
        self.acker = Acker(100.0, slots=10, bits=4)
        self.span = span
        self.rng = np.random.default_rng(seed)

    def some(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self.rng.integers(-self.span, self.span, number)

    @rule(number=st.sampled_from([1, 5, 50, 1_500]))
    def init(self, number: int) -> None:
        ids, values = self.some(number), self.rng.integers(0, 16, number).astype(np.uint64)
        owners = (ids % 1_024).astype(np.uint16)
        answers = self.acker.init(ids, values, owners)
        seen: dict[int, list[int]] = {}
        for key, value in zip(ids.tolist(), values.tolist(), strict=True):
            seen.setdefault(key, []).append(value)
        doubled = {key for key in seen if len(seen[key]) > 1 or self.entries.get(key, {}).get("begun")}
        for key in doubled:
            self.entries.pop(key, None)
        for key, given_values in seen.items():
            if key not in doubled:
                entry = self.entry(key)
                entry |= {"val": entry["val"] ^ given_values[0], "begun": True, "at": self.now}
        self.compare(answers, set(seen) - doubled, doubled)

    @rule(number=st.sampled_from([1, 5, 50, 1_500]))
    def ack(self, number: int) -> None:
        ids, values = self.some(number), self.rng.integers(0, 16, number).astype(np.uint64)
        answers = self.acker.ack(ids, values)
        for key, value in zip(ids.tolist(), values.tolist(), strict=True):
            self.entry(key)["val"] ^= value
        self.compare(answers, set(ids.tolist()), set())

    @rule(number=st.sampled_from([1, 5, 50]))
    def fail(self, number: int) -> None:
        ids = self.some(number)
        answers = self.acker.fail(ids)
        for key in ids.tolist():
            self.entry(key)["failed"] = True
        self.compare(answers, set(ids.tolist()), set())

    @rule(number=st.sampled_from([1, 5, 50]))
    def reset(self, number: int) -> None:
        ids = self.some(number)
        known = set(ids.tolist()) & self.entries.keys()
        assert self.acker.reset_timeout(ids) == len(known)
        for key in known:
            self.entries[key]["at"] = self.now

    @rule(slots=st.integers(1, 12))
    def tick(self, slots: int) -> None:
        """Ticks fall on whole slots here: then the bound is one slot, and the model needs no buckets."""
        for _ in range(slots):
            self.now += 10
            answers = self.acker.tick(float(self.now))
            late = {key for key, entry in self.entries.items() if entry["at"] < self.now - 100}
            assert set(answers.ghosts.tolist()) == {key for key in late if not self.entries[key]["begun"]}
            assert answers.timed_out.ids.tolist() == sorted(key for key in late if self.entries[key]["begun"])
            assert answers.timed_out.owners.tolist() == [key % 1_024 for key in answers.timed_out.ids.tolist()]
            self.ghosts += len(answers.ghosts)
            for key in late:
                del self.entries[key]

    @invariant()
    def sizes_agree(self) -> None:
        if hasattr(self, "acker"):
            assert len(self.acker) == len(self.entries)
            assert self.acker.pending == sum(bool(entry["begun"]) for entry in self.entries.values())
            assert self.acker.early == len(self.entries) - self.acker.pending
            assert self.acker.ghosts == self.ghosts
            keys = sorted(self.entries)
            assert self.acker.ack_vals(ids_of(keys)).tolist() == [self.entries[key]["val"] for key in keys]

    def entry(self, key: int) -> dict[str, int | bool]:
        return self.entries.setdefault(key, {"val": 0, "begun": False, "failed": False, "at": self.now})

    def compare(self, answers: Answers, touched: set[int], doubled: set[int]) -> None:
        begun = {key for key in touched if self.entries[key]["begun"]}
        failed = {key for key in begun if self.entries[key]["failed"]}
        complete = {key for key in begun - failed if self.entries[key]["val"] == 0}
        for messages, expected in [
            (answers.completed, complete),
            (answers.failed, failed),
            (answers.doubled, doubled),
        ]:
            assert messages.ids.tolist() == sorted(expected)
            assert messages.owners.tolist() == [key % 1_024 for key in messages.ids.tolist()]
        for key in complete | failed:
            del self.entries[key]


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
