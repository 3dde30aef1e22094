"""Any trees, any order of notices: Storm's form, shares, and a look at every node agree on which messages are complete."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from support.tuple_trees import (
    Fate,
    Form,
    Node,
    Trees,
    classic,
    ids_of,
    incomplete,
    open_shares,
    split_shares,
    words_of,
)

from stormproof.core.tracking.acker import Acker

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


RANDOMS = st.randoms(use_true_random=False)
FATES = [*[Fate.ACKED] * 6, Fate.DROPPED, Fate.TWICE]


@given(trees(fates=FATES, leaves_only=True), RANDOMS, st.integers(1, 8), st.booleans())
def test_both_forms_and_brute_force_agree_in_any_order(case: Trees, rng: Random, ackers: int, at_once: bool) -> None:
    for form in (classic, open_shares, split_shares):
        sent = form(case, Random(rng.randrange(2**32)))
        rng.shuffle(sent)
        assert incomplete(sent, ackers, at_once=at_once) == case.incomplete()


@given(trees(fates=FATES), RANDOMS, st.sampled_from(INNER))
def test_an_inner_tuple_that_is_not_acked_is_missed(case: Trees, rng: Random, form: Form) -> None:
    sent = form(case, Random(rng.randrange(2**32)))
    rng.shuffle(sent)
    assert incomplete(sent) == case.incomplete()


@given(trees(fates=FATES, leaves_only=True), RANDOMS, st.data())
def test_a_message_that_is_read_twice_is_incomplete(case: Trees, rng: Random, data: st.DataObject) -> None:
    again = data.draw(st.sets(st.sampled_from(case.ids)))
    sent = split_shares(case, Random(rng.randrange(2**32)))
    sent += [notice for notice in sent if notice.id in again]
    rng.shuffle(sent)
    assert incomplete(sent) == case.incomplete() | again


SMALL = st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 15)), max_size=60)


@given(SMALL, st.lists(SMALL, max_size=4))
def test_ids_that_come_again_and_again_agree_with_a_dict(
    inits: list[tuple[int, int]], acks: list[list[tuple[int, int]]]
) -> None:
    begun = [id_ for id_, _ in inits]
    vals = dict.fromkeys(begun, 0)
    acker = Acker(ids_of(begun))
    for call in (inits, *acks):
        acker.tell(ids_of(id_ for id_, _ in call), words_of(value for _, value in call))
        for id_, value in call:
            vals[id_] = vals.get(id_, 0) ^ value
    assert acker.incomplete().tolist() == sorted(id_ for id_ in vals if vals[id_] or begun.count(id_) != 1)
