"""The acker: the literature's worked examples bit by bit, Storm's own cases by name, a whole batch, memory, controls."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from random import Random

import numpy as np
import pytest
from support.tuple_trees import (
    Fate,
    Form,
    Node,
    Notice,
    Trees,
    classic,
    classic_notices,
    ids_of,
    incomplete,
    open_shares,
    share_notices,
    split_shares,
    word,
    words_of,
)

from stormproof.core.contract.source import Expectation
from stormproof.core.tracking.acker import Acker, acker_of
from stormproof.core.tracking.share import mix64, signed, tokens, xor_reduce
from stormproof.core.tracking.verdict import JobReport, mismatches

MESSAGE = 1
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


def ack_vals(values: Sequence[int]) -> list[int]:
    """The ack val after each notice."""
    acker, seen = Acker(ids(MESSAGE)), list[int]()
    for value in values:
        acker.tell(ids(MESSAGE), words(value))
        seen.append(int(acker.ack_vals[0]))
    return seen


@pytest.mark.parametrize("values", EXAMPLES.values(), ids=EXAMPLES)
def test_a_worked_example_is_complete_after_its_last_notice_in_every_order(values: list[int]) -> None:
    assert accidents(values) == []
    for order in permutations(notices(values)):
        answers = [incomplete(order[:number]) for number in range(1, len(order) + 1)]
        assert answers == [{MESSAGE}] * (len(order) - 1) + [set()]


def test_the_ack_vals_of_example_1_are_those_of_the_table() -> None:
    """The spouts emit; bolt 1 emits tid1 anchored to both; it acks both inputs; bolt 2 acks tid1."""
    assert ack_vals([STID1, TID1, STID1, TID1]) == [0b1010, 0b0110, 0b1100, 0b0000]
    assert ack_vals([STID2, TID1, STID2, TID1]) == [0b1011, 0b0111, 0b1100, 0b0000]


def test_the_ack_vals_of_example_2_are_those_of_the_table() -> None:
    assert ack_vals(EXAMPLE_2) == [0b1001, 0b1101, 0b0001, 0b0111, 0b0000]


@pytest.mark.parametrize("width", [4, 64])
def test_emit_and_ack_told_apart_look_complete_too_early_at_any_width_and_told_together_never(width: int) -> None:
    """Why one notice takes a tuple out and puts its children in (example 3): split up, the ack may come first."""
    rng = Random(width)
    spout_tuple, child = (STID1, TID1) if width == 4 else (word(rng), word(rng))
    assert accidents([spout_tuple, child, spout_tuple, child]) == [(0, 2)]
    assert incomplete(notices([spout_tuple, spout_tuple])) == set()
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
        sent = form(random_tree(Random(seed), 7), Random(seed))
        assert accidents([notice.value for notice in sent]) == []
        short = [notice.value % 16 for notice in sent]
        computed = accidents(short)
        for size in range(len(short)):
            for some in combinations(range(1, len(short)), size):
                answer = incomplete(notices([short[place] for place in (0, *some)]))
                assert (answer == set()) is ((0, *some) in computed or size == len(short) - 1)
        seen_at_4_bits += len(computed)
        assert incomplete(sent) == set()
    assert seen_at_4_bits > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_diamond_is_complete_in_every_order_of_its_notices_and_not_before_the_last(form: Form) -> None:
    diamond = Trees((MESSAGE,), (Node(0), Node(None, (0,)), Node(None, (0,)), Node(None, (1, 2))))
    for order in permutations(form(diamond, Random(7))):
        answers = [incomplete(order[:number]) for number in range(1, len(order) + 1)]
        assert answers == [{MESSAGE}] * (len(order) - 1) + [set()]


# --- Storm's own cases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_acking(form: Form) -> None:
    """`testAcking`: three messages through chains, each complete only once its last tuple is acked."""
    trees = Trees((1, 2, 3), (Node(0), Node(1), Node(2), Node(None, (0,)), Node(None, (1,)), Node(None, (3,))))
    sent = form(trees, Random(1))
    assert incomplete(sent) == set()
    for lost in range(3, len(sent)):
        assert incomplete(sent[:lost] + sent[lost + 1 :]) == {sent[lost].id}


@pytest.mark.parametrize("form", FORMS)
def test_ack_branching(form: Form) -> None:
    """`testAckBranching`: a tuple goes to two bolts, whose outputs a third one joins into one tuple of both anchors."""
    trees = Trees((1,), (Node(0), Node(None, (0,)), Node(None, (0,)), Node(None, (1, 2))))
    sent = form(trees, Random(2))
    assert incomplete(sent) == set()
    for lost in range(len(sent)):
        assert incomplete(sent[:lost] + sent[lost + 1 :]) == {1}


@pytest.mark.parametrize("form", FORMS)
def test_self_anchor(form: Form) -> None:
    """`testAckingSelfAnchor`: one emit with the same anchor twice. One value for both would cancel: the XOR trap."""
    trees = Trees((1,), (Node(0), Node(None, (0, 0)), Node(None, (1, 1, 1))))
    sent = form(trees, Random(3))
    assert incomplete(sent) == set()
    assert incomplete(sent[:-1]) == {1}


def test_self_anchor_with_one_share_for_both_loses_the_child_unseen() -> None:
    """Negative control of the trap: the child's share is 0, so nobody misses its ack."""
    token, piece = word(Random(4)), word(Random(5))
    assert incomplete([Notice("init", 1, token), Notice("ack", 1, token ^ piece ^ piece)]) == set()


@pytest.mark.parametrize("form", FORMS)
def test_mod_hash_over_several_ackers(form: Form) -> None:
    rng = Random(11)
    made = [Node(place) for place in range(40) for _ in range(2)]
    made += [Node(None, tuple(rng.randrange(80) for _ in range(rng.randint(1, 2)))) for _ in range(80)]
    trees = Trees(tuple(rng.randrange(-(2**63), 2**63) for _ in range(40)), tuple(made))
    fates = [Fate.ACKED] * 110 + [Fate.DROPPED, Fate.ACKED, Fate.ACKED, Fate.ACKED, Fate.ACKED] * 10
    trees = trees.with_fates(fates, leaves_only=True)
    sent = form(trees, rng)
    rng.shuffle(sent)
    assert 0 < len(trees.incomplete()) < 40
    for ackers in range(1, 9):
        assert incomplete(sent, ackers, at_once=True) == trees.incomplete()


def test_an_acker_task_is_found_by_the_mixed_id() -> None:
    keys = np.arange(-5_000, 5_000)
    for ackers in range(1, 9):
        tasks = acker_of(keys, ackers)
        assert tasks.tolist() == [int(n) % ackers for n in mix64(keys.view(np.uint64))]
        counts = np.bincount(tasks, minlength=ackers)
        assert counts.min() > 0.85 * len(keys) / ackers


# --- a whole batch -------------------------------------------------------------------------------------------------


def test_what_was_lost_doubled_or_never_begun_is_incomplete() -> None:
    acker = Acker(ids(5, 1, 2, 3, 3, -7, 6))
    acker.tell(ids(5, 1, 2, 3, 3, -7, 6), words(50, 10, 20, 30, 30, 70, 0))
    acker.tell(ids(2, 5, 9, 1, 3, 3, 2, -7), words(8, 50, 90, 1, 30, 30, 20 ^ 8, 70))
    assert acker.incomplete().tolist() == [1, 3, 9]


def test_an_acker_without_messages_knows_what_was_acked_all_the_same() -> None:
    acker = Acker(ids())
    assert acker.incomplete().tolist() == []
    acker.tell(ids(), words())
    acker.tell(ids(4, 4), words(0, 0))
    assert acker.incomplete().tolist() == [4]


def test_storms_notices_and_those_of_shares_cancel_alike() -> None:
    roots, new, parent = words(1, 2, 3), words(16, 32, 64), np.array([0, 0, 2])
    assert classic_notices(roots, new, parent).tolist() == [1 ^ 16 ^ 32, 2, 3 ^ 64]
    children, own = share_notices(roots, np.array([2, 0, 1]))
    assert own.tolist() == [0, 2, 0]
    assert xor_reduce(children[:2]) == 1
    assert int(children[2]) == 3


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
    messages = np.arange(pending)
    if order == "random":
        messages = np.random.default_rng(13).permutation(messages)
    token = tokens(messages, 1)
    before, _ = tracemalloc.get_traced_memory()
    acker = Acker(messages)
    for _ in ("init", "ack"):
        for begin in range(0, pending, at_once):
            part = slice(begin, begin + at_once)
            acker.tell(messages[part], token[part])
    _, peak = tracemalloc.get_traced_memory()
    assert len(acker.incomplete()) == 0
    call_bytes = 60 * at_once  # the notices of a call; it does not grow with the messages
    assert (peak - before - call_bytes) / pending <= 20


# --- what the tests above must catch -------------------------------------------------------------------------------


def test_a_dropped_ack_is_seen() -> None:
    sent = split_shares(random_tree(Random(1), 6), Random(1))
    for lost in range(1, len(sent)):
        assert incomplete(sent[:lost] + sent[lost + 1 :]) == {MESSAGE}


def test_a_tuple_that_is_not_acked_behind_its_children_is_missed_unless_only_leaves_ack() -> None:
    """Negative control: why a bolt that may still fail a tuple has to ack it, too, with the share that is left."""
    trees = Trees((MESSAGE,), (Node(0, (), Fate.DROPPED), Node(None, (0,))))
    assert incomplete(split_shares(trees, Random(1))) == set()
    assert incomplete(open_shares(trees, Random(1))) == incomplete(classic(trees, Random(1))) == {MESSAGE}


@pytest.mark.parametrize("reused", [True, False])
def test_a_lost_message_hides_behind_a_doubled_one_only_where_tokens_are_reused(reused: bool) -> None:
    """Negative control of a batch's verdict: the reader hands message 1 out twice, and skips message 2."""
    one, two = tokens(ids(1, 1 if reused else 2), 14).tolist()
    seen = mismatches(JobReport(2, one ^ one, one ^ one), Expectation(2, signed(one ^ two)), tracked=True)
    assert bool(seen) is not reused
    # Verdicts of their own see it even then.
    assert incomplete([Notice(kind, 1, one) for kind in ("init", "init", "ack", "ack")]) == {1}
