"""Joins of two spouts whose functions fail now and then, while drivers and workers die: as if one batch had had all of them.

`drawn(SEED, GUARANTEE).check()` in `support/flaky_joins.py` repeats a seed exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from support.flaky_joins import drawn

from stormproof.core.guarantee import Guarantee
from stormproof.core.source import group
from stormproof.core.tracking import partners

SEEDS = 200
CHUNK = 20
TRACKED = (Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every attempt that fails writes a line."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(seeds: range, guarantee: Guarantee) -> None:
    for seed in seeds:
        drawn(seed, guarantee).check()


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_partners_of_a_join_come_again_together(first: int) -> None:
    for guarantee in TRACKED:
        check(range(first, first + CHUNK), guarantee)


def failures_before_a_join_spread_to_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partners.Partners, "_absent", lambda *_: set[int]())


def mates_come_when_they_are_due_each(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(group, "_mates_of", lambda *_: None)


@pytest.mark.parametrize("broken", [failures_before_a_join_spread_to_nobody, mates_come_when_they_are_due_each])
def test_control_the_seeds_catch(broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        check(range(SEEDS), Guarantee.EXACTLY_ONCE)
