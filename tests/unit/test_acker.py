"""The acker: the literature's worked examples bit by bit, Storm's own cases by name, time-outs, memory, broken variants."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from support.tuple_trees import (
    Fate,
    Form,
    Node,
    Notice,
    Trees,
    Verdict,
    classic,
    classic_notices,
    deliver,
    ids_of,
    open_shares,
    replay,
    share_notices,
    split_shares,
    tell,
    word,
    words_of,
)

from stormproof.core.arrays import Words
from stormproof.core.errors import UsageError
from stormproof.core.source.protocol import Expectation
from stormproof.core.tracking.acker import OWNERS, SLOTS_MAX, Acker, acker_of, incomplete
from stormproof.core.tracking.report import JobReport
from stormproof.core.tracking.share import mix64, signed, tokens, xor_reduce
from stormproof.core.tracking.sorted_run import Found
from stormproof.core.tracking.verdict import mismatches

TIMEOUT_S = 30.0
MESSAGE, OTHER = 1, 2
FORMS: list[Form] = [classic, open_shares, split_shares]


def ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return ids_of(numbers)


def words(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return words_of(numbers)


# --- the worked examples -------------------------------------------------------------------------------------------

# Example 1: bolt 1 makes tid1 of both spout tuples, so each acker has one entry; bolt 2 ends tid1.
STID1, STID2, TID1 = 0b1010, 0b1011, 0b1100
# Example 2: message 1 is the source tuples 0010 and 1011; bolts 1 and 2 turn them into 0110 and 0111; bolt 3 ends both.
EXAMPLE_2 = [0b0010 ^ 0b1011, 0b0010 ^ 0b0110, 0b1011 ^ 0b0111, 0b0110, 0b0111]

EXAMPLES = {
    "1, acker 1": [STID1, STID1 ^ TID1, TID1],
    "1, acker 2": [STID2, STID2 ^ TID1, TID1],
    "2": EXAMPLE_2,
    "3: C is replaced by D and E": [0b1001, 0b1001 ^ 0b0101 ^ 0b1110, 0b0101, 0b1110],
    "1 as shares, acker 1": [STID1, STID1],
    "1 as shares, acker 2": [STID2, STID2],
    "2 as shares: the token 1001 split in two": [0b1001, 0b0110, 0b1001 ^ 0b0110],
}


def notices(values: Sequence[int]) -> list[Notice]:
    """The first value is the init, the others are acks."""
    return [Notice("ack" if place else "init", MESSAGE, value) for place, value in enumerate(values)]


def accidents(values: Sequence[int]) -> list[tuple[int, ...]]:
    """The proper subsets with the init that XOR to 0, as places: after just these, an acker would answer too early."""
    rest = range(1, len(values))
    subsets = [(0, *some) for size in range(len(values) - 1) for some in combinations(rest, size)]
    return [places for places in subsets if xor_reduce(words(*(values[place] for place in places))) == 0]


@pytest.mark.parametrize("values", EXAMPLES.values(), ids=EXAMPLES)
def test_a_worked_example_is_complete_after_its_last_notice_in_every_order(values: list[int]) -> None:
    assert accidents(values) == []
    for order in permutations(notices(values)):
        acker = Acker(bits=4)
        answered = [tell(acker, [notice]) for notice in order]
        assert answered == [{}] * (len(order) - 1) + [{MESSAGE: Verdict.COMPLETE}]
        assert len(acker) == 0


def test_the_ack_vals_of_example_1_are_those_of_the_table() -> None:
    one, two = Acker(bits=4), Acker(bits=4)
    seen: list[tuple[int, int]] = []
    for kind, value_1, value_2 in [
        ("init", STID1, STID2),  # the spouts emit
        ("ack", TID1, TID1),  # bolt 1 emits tid1 anchored to both
        ("ack", STID1, STID2),  # bolt 1 acks both inputs
        ("ack", TID1, TID1),  # bolt 2 acks tid1
    ]:
        answered = [tell(one, [Notice(kind, 1, value_1)]), tell(two, [Notice(kind, 2, value_2)])]
        seen.append((int(one.ack_vals(ids(1))[0]), int(two.ack_vals(ids(2))[0])))
    assert seen == [(0b1010, 0b1011), (0b0110, 0b0111), (0b1100, 0b1100), (0b0000, 0b0000)]
    assert answered == [{1: Verdict.COMPLETE}, {2: Verdict.COMPLETE}]


def test_the_ack_vals_of_example_2_are_those_of_the_table() -> None:
    acker, seen = Acker(bits=4), list[int]()
    for notice in notices(EXAMPLE_2):
        tell(acker, [notice])
        seen.append(int(acker.ack_vals(ids(MESSAGE))[0]))
    assert seen == [0b1001, 0b1101, 0b0001, 0b0111, 0b0000]


@pytest.mark.parametrize("width", [4, 64])
def test_emit_and_ack_told_apart_are_complete_too_early_at_any_width_and_told_together_never(width: int) -> None:
    """Why one notice takes a tuple out and puts its children in (example 3): split up, the ack may come first."""
    rng = Random(width)
    spout_tuple, child = (STID1, TID1) if width == 4 else (word(rng), word(rng))
    assert accidents([spout_tuple, child, spout_tuple, child]) == [(0, 2)]
    early = deliver(notices([spout_tuple, spout_tuple]), Acker(bits=width))
    assert early == {MESSAGE: Verdict.COMPLETE}
    assert accidents([spout_tuple, spout_tuple ^ child, child]) == []


def random_tree(rng: Random, nodes: int) -> Trees:
    """A message of two source tuples; every further tuple has one to three anchors among those before."""
    made = [Node(0), Node(0)]
    for number in range(2, nodes):
        made.append(Node(None, tuple(rng.randrange(number) for _ in range(rng.randint(1, 3)))))
    return Trees((MESSAGE,), tuple(made))


@pytest.mark.parametrize("form", FORMS)
def test_accidents_happen_at_4_bits_exactly_where_computed_and_never_at_full_width(form: Form) -> None:
    seen_at_4_bits = 0
    for seed in range(40):
        told = form(random_tree(Random(seed), 7), Random(seed))
        assert {notice.kind for notice in told[1:]} <= {"ack"}
        assert accidents([notice.value for notice in told]) == []
        short = [notice.value % 16 for notice in told]
        order = [0, *Random(seed).sample(range(1, len(told)), len(told) - 1)]
        arrived = [xor_reduce(words(*(short[place] for place in order[: n + 1]))) == 0 for n in range(len(order))]
        acker = Acker(bits=4)
        first = next(n for n, place in enumerate(order) if tell(acker, [told[place]]))
        assert first == arrived.index(True)
        seen_at_4_bits += first < len(order) - 1
    assert seen_at_4_bits > 0


@pytest.mark.parametrize("form", FORMS)
def test_every_order_of_a_diamonds_notices_gives_complete(form: Form) -> None:
    diamond = Trees((MESSAGE,), (Node(0), Node(None, (0,)), Node(None, (0,)), Node(None, (1, 2))))
    told = form(diamond, Random(7))
    for order in permutations(told):
        acker = Acker()
        answered = [tell(acker, [notice]) for notice in order]
        assert answered[:-1] == [{}] * (len(order) - 1)
        assert answered[-1] == {MESSAGE: Verdict.COMPLETE}


# --- Storm's own cases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_acking(form: Form) -> None:
    """`testAcking`: three messages through chains, each complete as soon as its last tuple is acked."""
    trees = Trees((1, 2, 3), (Node(0), Node(1), Node(2), Node(None, (0,)), Node(None, (1,)), Node(None, (3,))))
    told = form(trees, Random(1))
    assert deliver(told, Acker()) == {1: Verdict.COMPLETE, 2: Verdict.COMPLETE, 3: Verdict.COMPLETE}
    held_back = [notice for notice in told if notice != told[-1]]
    assert deliver(held_back, Acker())[told[-1].id] is Verdict.PENDING


@pytest.mark.parametrize("form", FORMS)
def test_ack_branching(form: Form) -> None:
    """`testAckBranching`: a tuple goes to two bolts, whose outputs a third one joins into one tuple of both anchors."""
    trees = Trees((1,), (Node(0), Node(None, (0,)), Node(None, (0,)), Node(None, (1, 2))))
    told = form(trees, Random(2))
    assert deliver(told, Acker()) == {1: Verdict.COMPLETE}
    for lost in range(1, len(told)):
        assert deliver(told[:lost] + told[lost + 1 :], Acker()) == {1: Verdict.PENDING}


@pytest.mark.parametrize("form", FORMS)
def test_self_anchor(form: Form) -> None:
    """`testAckingSelfAnchor`: one emit with the same anchor twice. One value for both would cancel: the XOR trap."""
    trees = Trees((1,), (Node(0), Node(None, (0, 0)), Node(None, (1, 1, 1))))
    told = form(trees, Random(3))
    assert deliver(told, Acker()) == {1: Verdict.COMPLETE}
    assert deliver(told[:-1], Acker()) == {1: Verdict.PENDING}


def test_self_anchor_with_one_share_for_both_loses_the_child_unseen() -> None:
    """Negative control of the trap: the child's share is 0, so nobody misses its ack."""
    token, piece = word(Random(4)), word(Random(5))
    told = [Notice("init", 1, token), Notice("ack", 1, token ^ piece ^ piece)]
    assert deliver(told, Acker()) == {1: Verdict.COMPLETE}


def test_timeout() -> None:
    """`testTimeout`: what is not acked in time is answered, with its owner, once."""
    acker = Acker(TIMEOUT_S)
    acker.init(ids(1, 2), words(5, 6), 7)
    acker.ack(ids(1), words(5))
    assert len(acker.tick(TIMEOUT_S).timed_out) == 0
    answers = acker.tick(2 * TIMEOUT_S)
    assert (answers.timed_out.ids.tolist(), answers.timed_out.owners.tolist()) == ([2], [7])
    assert len(acker) == acker.pending == 0
    assert len(acker.tick(9 * TIMEOUT_S).timed_out) == 0


def test_reset_timeout() -> None:
    """`testResetTimeout`: a message whose bolt asks for time outlives one whose bolt does not."""
    acker = Acker(TIMEOUT_S)
    acker.init(ids(1, 2), words(5, 6))
    timed_out: dict[int, float] = {}
    for second in range(1, 100):
        for message_id in acker.tick(float(second)).timed_out.ids.tolist():
            timed_out[message_id] = second
        if second == 20:
            assert acker.reset_timeout(ids(1, 1, 99)) == 1
    assert timed_out[2] < timed_out[1]
    assert 50 <= timed_out[1] <= 50 + TIMEOUT_S / 10 + 2


def test_ack_before_init() -> None:
    acker = Acker()
    assert len(acker.ack(ids(1), words(5)).completed) == 0
    assert (acker.early, acker.pending) == (1, 0)
    answers = acker.init(ids(1), words(5), 3)
    assert (answers.completed.ids.tolist(), answers.completed.owners.tolist()) == ([1], [3])
    assert len(acker) == 0


def test_fail_before_init() -> None:
    acker = Acker()
    assert len(acker.fail(ids(1)).failed) == 0
    acker.ack(ids(1), words(4))
    answers = acker.init(ids(1), words(5), 3)
    assert (answers.failed.ids.tolist(), answers.failed.owners.tolist()) == ([1], [3])
    assert len(acker) == 0


def test_fail_after_complete_is_a_ghost() -> None:
    acker = Acker(TIMEOUT_S)
    acker.init(ids(1), words(5))
    assert acker.ack(ids(1), words(5)).completed.ids.tolist() == [1]
    assert len(acker.fail(ids(1)).failed) == 0
    acker.tick(5.0)
    answers = acker.tick(40.0)
    assert (answers.ghosts.tolist(), len(answers.timed_out)) == ([1], 0)
    assert (acker.ghosts, len(acker)) == (1, 0)


def test_a_failed_message_whose_ack_val_is_0_by_then_is_failed() -> None:
    """Storm answers "complete" here."""
    acker = Acker()
    acker.fail(ids(1))
    acker.ack(ids(1), words(5))
    answers = acker.init(ids(1), words(5))
    assert (answers.failed.ids.tolist(), len(answers.completed)) == ([1], 0)


@pytest.mark.parametrize("form", FORMS)
def test_mod_hash_over_several_ackers(form: Form) -> None:
    rng = Random(11)
    made = [Node(place) for place in range(40) for _ in range(2)]
    made += [Node(None, tuple(rng.randrange(80) for _ in range(rng.randint(1, 2)))) for _ in range(80)]
    trees = Trees(tuple(rng.randrange(-(2**63), 2**63) for _ in range(40)), tuple(made))
    fates = [Fate.ACKED] * 110 + [Fate.FAILED, Fate.DROPPED, Fate.ACKED, Fate.ACKED, Fate.ACKED] * 10
    trees = trees.with_fates(fates, leaves_only=True)
    told = form(trees, rng)
    rng.shuffle(told)
    expected = trees.brute_force()
    assert set(expected.values()) == {Verdict.COMPLETE, Verdict.FAILED, Verdict.PENDING}
    for ackers in range(1, 9):
        assert deliver(told, *(Acker() for _ in range(ackers)), at_once=True) == expected


def test_an_acker_task_is_found_by_the_mixed_id() -> None:
    keys = np.arange(-5_000, 5_000)
    for ackers in range(1, 9):
        tasks = acker_of(keys, ackers)
        assert tasks.tolist() == [int(n) % ackers for n in mix64(keys.view(np.uint64))]
        counts = np.bincount(tasks, minlength=ackers)
        assert counts.min() > 0.85 * len(keys) / ackers
    with pytest.raises(UsageError, match="at least 1"):
        acker_of(keys, 0)


# --- notices in arrays ---------------------------------------------------------------------------------------------


def test_a_token_of_0_is_complete_at_once() -> None:
    answers = Acker().init(ids(3, 1, 2), words(0, 7, 0), 5)
    assert (answers.completed.ids.tolist(), answers.completed.owners.tolist()) == ([2, 3], [5, 5])


def test_notices_of_one_call_to_one_id_are_xored() -> None:
    acker = Acker()
    acker.init(ids(2, 1), words(7, 6), np.array([1_000, 20], np.uint16))
    answers = acker.ack(ids(1, 2, 1, 2, 2), words(2, 1, 4, 2, 4))
    assert (answers.completed.ids.tolist(), answers.completed.owners.tolist()) == ([1, 2], [20, 1_000])


def test_each_spout_gets_its_own_answers() -> None:
    acker = Acker(TIMEOUT_S)
    acker.init(ids(5, 3, 4), words(1, 2, 3), np.array([9, 8, 7], np.uint16))
    assert acker.fail(ids(4, 4)).failed.owners.tolist() == [7]
    acker.tick(5.0)
    answers = acker.tick(99.0)
    assert dict(zip(answers.timed_out.ids.tolist(), answers.timed_out.owners.tolist(), strict=True)) == {3: 8, 5: 9}


@pytest.mark.parametrize("at_once", [True, False])
def test_a_message_that_is_read_twice_is_doubled_and_never_complete(at_once: bool) -> None:
    acker = Acker()
    told = [Notice("init", 1, 5), Notice("init", 1, 5)]
    assert deliver(told, acker, at_once=at_once) == {1: Verdict.DOUBLED}
    assert (len(acker), acker.pending) == (0, 0)


def test_signed_values_are_the_same_bits() -> None:
    acker = Acker()
    acker.init(ids(1), np.array([-1]))
    assert acker.ack(ids(1), words(2**64 - 1)).completed.ids.tolist() == [1]


def test_no_notices_are_no_answers() -> None:
    acker = Acker()
    for answers in (acker.init(ids(), words()), acker.ack(ids(), words()), acker.fail(ids())):
        assert len(answers.completed) == len(answers.failed) == 0
    assert acker.reset_timeout(ids()) == 0


def test_wrong_calls_are_refused() -> None:
    acker = Acker()
    with pytest.raises(UsageError, match="timeout_s is 0"):
        Acker(0)
    with pytest.raises(UsageError, match="slots are 15"):
        Acker(slots=SLOTS_MAX + 1)
    with pytest.raises(UsageError, match="bits are 3"):
        Acker(bits=3)
    with pytest.raises(UsageError, match="owner is 1024"):
        acker.init(ids(1), words(1), OWNERS)
    with pytest.raises(UsageError, match="owner is -1"):
        acker.init(ids(1), words(1), -1)
    with pytest.raises(UsageError, match="2 owners"):
        acker.init(ids(1), words(1), np.array([1, 2], np.uint16))
    with pytest.raises(UsageError, match="one for each id"):
        acker.ack(ids(1), words(1, 2))
    with pytest.raises(UsageError, match="must be int64"):
        acker.fail(cast("Any", np.array([1], np.int32)))
    acker.tick(5.0)
    with pytest.raises(UsageError, match="must not go back"):
        acker.tick(4.0)


# --- the verdicts of a whole batch ---------------------------------------------------------------------------------


def test_incomplete_names_what_was_lost_doubled_or_never_read() -> None:
    init_ids, init_tokens = ids(5, 1, 2, 3, 3, -7), words(50, 10, 20, 30, 30, 70)
    ack_ids, ack_shares = ids(2, 5, 9, 1, 3, 3, 2, -7), words(8, 50, 90, 1, 30, 30, 20 ^ 8, 70)
    assert incomplete(init_ids, init_tokens, ack_ids, ack_shares).tolist() == [1, 3, 9]
    assert incomplete(ids(), words(), ids(), words()).tolist() == []
    assert incomplete(ids(), words(), ids(4), words(0)).tolist() == [4]
    assert incomplete(ids(4), words(0), ids(), words()).tolist() == []


def test_incomplete_says_what_an_acker_says() -> None:
    rng = np.random.default_rng(12)
    init_ids = rng.permutation(np.arange(500))
    token = tokens(init_ids, 3)
    children, own = share_notices(token, np.full(500, 2))
    ack_ids = np.repeat(init_ids, 2)
    kept = rng.random(1_000) > 0.05
    acker = Acker()
    acker.init(init_ids, token)
    done = acker.ack(ack_ids[kept], children[kept]).completed.ids
    assert not own.any()
    assert incomplete(init_ids, token, ack_ids[kept], children[kept]).tolist() == np.setdiff1d(init_ids, done).tolist()


def test_storms_notices_and_those_of_shares_cancel_alike() -> None:
    roots, new, parent = words(1, 2, 3), words(16, 32, 64), np.array([0, 0, 2])
    assert classic_notices(roots, new, parent).tolist() == [1 ^ 16 ^ 32, 2, 3 ^ 64]
    children, own = share_notices(roots, np.array([2, 0, 1]))
    assert own.tolist() == [0, 2, 0]
    assert xor_reduce(children[:2]) == 1
    assert int(children[2]) == 3


# --- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3, 10, SLOTS_MAX])
@pytest.mark.parametrize("interval_s", [0.1, 0.9, 7.0, 45.0])
def test_a_message_times_out_not_before_its_timeout_and_soon_after_it(slots: int, interval_s: float) -> None:
    acker = Acker(TIMEOUT_S, slots=slots)
    rng = Random(slots)
    begun: dict[int, float] = {}
    ages: list[float] = []
    now_s, number = 0.0, 0
    while now_s < 100 or (begun and now_s < 300):
        if now_s < 100:
            begun[number] = now_s + rng.random() * interval_s  # between two ticks
            acker.init(ids(number), words(1))
            number += 1
        now_s += interval_s
        answers = acker.tick(now_s)
        ages += [now_s - begun.pop(message_id) for message_id in answers.timed_out.ids.tolist()]
    assert not begun
    assert min(ages) >= TIMEOUT_S
    assert max(ages) <= TIMEOUT_S * (1 + 1 / slots) + 2 * interval_s + 1e-6


def test_without_ticks_nothing_times_out() -> None:
    acker = Acker(0.001)
    acker.init(ids(1), words(5))
    assert len(acker.init(ids(2), words(5)).timed_out) == 0
    assert acker.pending == 2


def test_notices_without_an_init_do_not_stay() -> None:
    """Storm's ackers ran out of memory on these when their ticks were off."""
    acker = Acker(TIMEOUT_S)
    ghosts: list[int] = []
    for second in range(200):
        acker.ack(ids(*range(second * 10, second * 10 + 10)), words(*range(1, 11)))
        ghosts += acker.tick(float(second)).ghosts.tolist()
        assert acker.early <= 10 * (TIMEOUT_S * 1.1 + 3)
    assert sorted(ghosts) == list(range(len(ghosts)))
    assert acker.ghosts == len(ghosts) > 1_500


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("order", ["rising", "random"])
def test_a_pending_message_takes_20_bytes_at_most(order: str) -> None:
    pending, at_once = 60_000, 500
    total = pending + 30_000
    rng = np.random.default_rng(13)
    all_ids = np.arange(total) if order == "rising" else np.unique(rng.integers(-(2**62), 2**62, total))
    if order == "random":
        all_ids = rng.permutation(all_ids)
    all_tokens = tokens(all_ids, 1)
    before, _ = tracemalloc.get_traced_memory()
    acker = Acker()
    for begin in range(0, pending, at_once):
        acker.init(all_ids[begin : begin + at_once], all_tokens[begin : begin + at_once])
    tracemalloc.reset_peak()
    for begin in range(pending, total, at_once):
        oldest = slice(begin - pending, begin - pending + at_once)
        acker.init(all_ids[begin : begin + at_once], all_tokens[begin : begin + at_once])
        assert len(acker.ack(all_ids[oldest], all_tokens[oldest]).completed) == at_once
    _, peak = tracemalloc.get_traced_memory()
    assert acker.pending == pending
    # What does not grow with the messages: room for 1,024 new entries, the blocks of a move, the notices of a call.
    fixed_bytes = 550_000
    assert (peak - before - fixed_bytes) / pending <= 20
    assert acker.nbytes / pending <= 20 + 2 * 1_024 * 18 / pending


def test_memory_is_given_back() -> None:
    acker = Acker()
    many = np.arange(50_000)
    acker.init(many, tokens(many, 1))
    full = acker.nbytes
    acker.ack(many[:-10], tokens(many[:-10], 1))
    assert acker.pending == 10
    assert acker.nbytes < full / 10


# --- what the tests above must catch -------------------------------------------------------------------------------


class StormsOrder(Acker):
    """Tests for 0 before it looks at failures, as Storm does."""

    def _decide(self, initialised: Found, failed: Found, values: Words) -> tuple[Found, Found]:
        complete = initialised & (values == 0)
        return complete, initialised & failed & ~complete


class BeforeInit(Acker):
    """Gives a verdict on an ack val of 0 without waiting for the init."""

    def _decide(self, initialised: Found, failed: Found, values: Words) -> tuple[Found, Found]:
        return (values == 0) & ~failed, failed


class Deaf(Acker):
    """Never sees a failure."""

    def _decide(self, initialised: Found, failed: Found, values: Words) -> tuple[Found, Found]:
        return initialised & (values == 0), initialised & False


def wrong_verdicts(acker_type: type[Acker]) -> int:
    """How many of 300 trees, told in any order, get another verdict than by hand."""
    wrong = 0
    for seed in range(150):
        rng = Random(seed)
        trees = random_tree(rng, 6).with_fates(rng.choices(list(Fate), [8, 1, 1, 1], k=6))
        both = Trees((MESSAGE,), (Node(0, (), Fate.FAILED),))  # a bolt that fails a tuple, and then acks it, too
        for case, told in [
            (trees, open_shares(trees, rng)),
            (both, [Notice("fail", MESSAGE), Notice("init", MESSAGE, 5), Notice("ack", MESSAGE, 5, node=0)]),
        ]:
            failures = [notice for notice in told if notice.kind == "fail"]
            others = [notice for notice in told if notice.kind != "fail"]
            rng.shuffle(others)
            wrong += deliver(failures + others, acker_type()) != replay(case, failures + others)
    return wrong


def test_the_acker_agrees_with_a_replay_by_hand() -> None:
    assert wrong_verdicts(Acker) == 0


@pytest.mark.parametrize("broken", [StormsOrder, BeforeInit, Deaf])
def test_a_broken_acker_does_not(broken: type[Acker]) -> None:
    """Negative controls: each of these confirms what it must not."""
    assert wrong_verdicts(broken) > 0


def test_a_dropped_ack_is_seen() -> None:
    told = split_shares(random_tree(Random(1), 6), Random(1))
    acks = [place for place, notice in enumerate(told) if notice.kind == "ack"]
    for lost in acks:
        assert deliver(told[:lost] + told[lost + 1 :], Acker()) == {MESSAGE: Verdict.PENDING}


def test_a_tuple_that_fails_after_its_children_were_sent_is_heard_too_late_where_only_leaves_ack() -> None:
    """Negative control: why a bolt that may still fail a tuple has to ack it, too, with the share that is left."""
    trees = Trees((MESSAGE,), (Node(0, (), Fate.FAILED), Node(None, (0,))))
    for form, verdict in [
        (split_shares, Verdict.COMPLETE),
        (open_shares, Verdict.FAILED),
        (classic, Verdict.FAILED),
    ]:
        told = form(trees, Random(1))
        failure_last = [n for n in told if n.kind != "fail"] + [n for n in told if n.kind == "fail"]
        assert deliver(failure_last, Acker()) == {MESSAGE: verdict}


@pytest.mark.parametrize("reused", [True, False])
def test_a_lost_message_hides_behind_a_doubled_one_only_where_tokens_are_reused(reused: bool) -> None:
    """Negative control of a batch's verdict: the reader hands message 1 out twice, and skips message 2."""
    one, two = tokens(ids(1, 1 if reused else 2), 14).tolist()
    seen = mismatches(JobReport(2, one ^ one, one ^ one), Expectation(2, signed(one ^ two)), tracked=True)
    assert bool(seen) is not reused
    # Verdicts of their own see it even then.
    assert incomplete(ids(1, 1), words(one, one), ids(1, 1), words(one, one)).tolist() == [1]
