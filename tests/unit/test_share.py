"""Share splitting on small cases; the equations stand in tests/property."""

from __future__ import annotations

import numpy as np
from support.plain_shares import plain_shares

from stormproof.core.tracking.share import (
    mix64,
    signed,
    split_one,
    split_runs,
    tokens,
    unsigned,
    xor_reduce,
    xor_signed,
)


def test_mix64_is_the_splitmix64_finaliser() -> None:
    # The first outputs of splitmix64 seeded with 0: the finaliser of 1, 2 and 3 times its increment.
    gamma = 0x9E3779B97F4A7C15
    states = np.array([gamma, 2 * gamma % 2**64, 3 * gamma % 2**64], np.uint64)
    assert [hex(int(x)) for x in mix64(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_one_child_carries_its_parent_share() -> None:
    shares = np.array([7, 8, 9], np.uint64)
    assert split_runs(shares, np.array([1, 1, 1])).tolist() == [7, 8, 9]
    assert split_runs(shares, np.array([1, 0, 1])).tolist() == [7, 9]


def test_no_children_no_shares() -> None:
    assert split_runs(np.array([7], np.uint64), np.array([0])).tolist() == []
    assert split_runs(np.array([], np.uint64), np.array([], np.int64)).tolist() == []
    assert len(split_one(5, 0)) == 0


def test_two_subscribers_never_carry_the_same_share() -> None:
    pair = plain_shares(np.array([5], np.uint64), np.array([0, 0]), np.array([0, 1]), np.array([2, 2]))
    assert pair[0] != pair[1]
    assert int(pair[0] ^ pair[1]) == 5


def test_signed_and_back() -> None:
    assert signed(unsigned(-1)) == -1
    assert signed(2**63) == -(2**63)
    assert xor_reduce(np.array([2**63], np.uint64)) == -(2**63)
    assert xor_reduce(np.array([], np.uint64)) == 0
    assert xor_signed([-1, 1, -1]) == 1


def test_tokens_depend_on_id_and_seed() -> None:
    ids = np.array([1, 2, -3], np.int64)
    a, b = tokens(ids, 1), tokens(ids, 2)
    assert len({*a.tolist(), *b.tolist()}) == 6
    assert tokens(ids, -1).tolist() == tokens(ids, 2**64 - 1).tolist()
