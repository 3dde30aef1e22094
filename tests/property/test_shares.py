"""The equations of share splitting, for any shares and any numbers of children."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.plain_shares import plain_shares

from stormproof.core.tracking.share import split_runs, xor_reduce

WORDS = st.integers(0, 2**64 - 1)
PARENTS = st.lists(st.tuples(WORDS, st.integers(0, 9)), max_size=20)


def split(parents: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    shares = np.array([s for s, _ in parents], np.uint64)
    counts = np.array([n for _, n in parents], np.int64)
    parent = np.repeat(np.arange(len(parents)), counts)
    ordinal = np.concatenate([np.arange(n) for _, n in parents]) if parents else np.empty(0, np.int64)
    return shares, counts, parent, ordinal, counts[parent]


@given(PARENTS)
def test_children_xor_to_their_parent(parents: list[tuple[int, int]]) -> None:
    shares, counts, parent, _, _ = split(parents)
    children = split_runs(shares, counts)
    for i, (share, n) in enumerate(parents):
        own = children[parent == i]
        assert len(own) == n
        if n:
            assert xor_reduce(own) % 2**64 == share


@given(PARENTS, st.randoms(use_true_random=False))
def test_a_share_does_not_depend_on_where_its_row_stands(parents: list[tuple[int, int]], random: object) -> None:
    shares, counts, parent, ordinal, n = split(parents)
    order = np.array(sorted(range(len(parent)), key=lambda _: random.random()), np.int64)  # type: ignore[attr-defined]
    shuffled = plain_shares(shares, parent[order], ordinal[order], n[order])
    assert shuffled.tolist() == split_runs(shares, counts)[order].tolist()


@given(st.lists(st.tuples(WORDS, st.integers(1, 9)), min_size=1, max_size=20), st.data())
def test_a_lost_child_is_seen(parents: list[tuple[int, int]], data: st.DataObject) -> None:
    """Negative control: the equation fails without any one child, but for a share of 0."""
    shares, counts, _, _, _ = split(parents)
    children = split_runs(shares, counts)
    lost = data.draw(st.integers(0, len(children) - 1))
    rest = np.delete(children, lost)
    assert (xor_reduce(rest) == xor_reduce(shares)) == (int(children[lost]) == 0)
