"""Postgres's hash, computed here: the values that a server gave."""

from __future__ import annotations

import numpy as np

from stormproof.core.source.postgres_queue import reader

IDS = np.array([0, 1, -1, 2**31, 2**63 - 1, -(2**63)], np.int64)
FROM_A_SERVER = {
    0: [
        4154612158245552303,
        -3670598878359251130,
        -1888257769727981238,
        1977219185673256887,
        1977219185673256887,
        -9109110466470504941,
    ],
    1: [
        434346878670890809,
        -7620678293940249823,
        3987656643895367148,
        3044001184559810835,
        3044001184559810835,
        2560836655869490746,
    ],
    -1: [
        -4140905993450701875,
        1505930170527472848,
        6481520839006961279,
        6110074166949006181,
        6110074166949006181,
        8384907054876656385,
    ],
    4611686018427375559: [
        2453263698708551366,
        3611379575707839200,
        -1909800244518168302,
        3045887522143677464,
        3045887522143677464,
        -4253523381965277597,
    ],
}


def test_the_hash_is_that_of_a_server() -> None:
    assert {seed: reader.tokens(IDS, seed).tolist() for seed in FROM_A_SERVER} == FROM_A_SERVER


def test_no_ids_have_no_tokens() -> None:
    assert reader.tokens(IDS[:0], 7).tolist() == []


def test_a_server_with_another_hash_does_not_agree() -> None:
    assert not reader.agrees([])
    assert not reader.agrees(list(range(40)))
