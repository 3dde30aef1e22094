"""Joins of two spouts whose functions fail now and then, while drivers and workers die: as if one batch had had all of them.

`drawn(SEED, GUARANTEE).check()` in `support/flaky_joins.py` repeats a seed exactly; `chain(SEED).check(GUARANTEE)` in
`support/flaky_chains.py` likewise, for a join behind a join.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest
from support.flaky_chains import Chain, Row, chain
from support.flaky_joins import MAX_ATTEMPTS, POISON, drawn

from stormproof.core.base.message import Guarantee
from stormproof.core.graph import plan
from stormproof.core.source import group
from stormproof.core.tracking import partners
from stormproof.testing import End, Faults

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


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_partners_in_a_chain_of_joins_come_again_together(first: int) -> None:
    for guarantee in TRACKED:
        for seed in range(first, first + CHUNK):
            chain(seed).check(guarantee)


TWO_KEYS = Chain(
    orders={0: 0, 1: 1},
    payments={0: 0},
    regions={region: region for region in range(4)},
    hows=("left", "left"),
    fails={("payments", 1, 0): [0, 1]},
    faults=Faults(),
    seed=1,
)
"""Payment 0 reaches the join by its first key, and twice fails before it by its second one."""

IN_TURNS = Chain(
    orders={1: 0},
    payments={1: 0},
    regions={0: 2},
    hows=("inner", "right"),
    fails={("orders", 0, 1): [0], ("payments", 0, 1): [1]},
    faults=Faults(),
    seed=1,
)
"""First the order fails, then the payment: nobody has seen that their pair has a partner at the second join."""


def test_a_key_that_a_failed_message_did_not_reach_takes_its_partners_along() -> None:
    TWO_KEYS.check(Guarantee.EXACTLY_ONCE)


def test_a_key_that_depends_on_a_missing_partner_takes_its_partners_along() -> None:
    IN_TURNS.check(Guarantee.EXACTLY_ONCE)


def test_a_failure_in_an_attempt_that_lost_rows_takes_everyone_along() -> None:
    drawn(197, Guarantee.EXACTLY_ONCE).check()


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_partners_of_a_dead_letter_are_applied_without_it(how: str) -> None:
    """Each attempt counts a failure of somebody: so many attempts at most does an innocent partner wait for."""
    for seed in range(10):
        case = drawn(seed, Guarantee.EXACTLY_ONCE)
        poison, key = Random(seed).choice([*case.payments.items()])
        fails: dict[object, int] = {("orders", key, o): 1 for o, key in case.orders.items() if o % 2}
        case = replace(case, how=how, faults=Faults(), fails=fails | {("payments", key, poison): POISON})
        run = case.run()
        rows = Counter[Row]((row["key"], row["o"], row["p"]) for row in run.rows("paid"))
        assert [(m.spout, m.number) for m in run.ended(End.DEAD)] == [("payments", poison)]
        assert rows == case.joined(run)
        assert max(m.times_opened for m in run.messages) <= 1 + MAX_ATTEMPTS + len(fails)


def an_attempt_that_lost_rows_is_believed(patch: pytest.MonkeyPatch) -> None:
    spread = partners.Partners.spread
    patch.setattr(partners.Partners, "spread", lambda self, failures, report, **_: spread(self, failures, report))


def test_control_what_an_attempt_says_that_lost_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    an_attempt_that_lost_rows_is_believed(monkeypatch)
    with pytest.raises(AssertionError):
        drawn(197, Guarantee.EXACTLY_ONCE).check()


def test_control_chained_joins_that_count_as_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = plan._meetings  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(plan, "_meetings", lambda t: (m := meetings(t)) and replace(m, chained=False))
    with pytest.raises(AssertionError):
        IN_TURNS.check(Guarantee.EXACTLY_ONCE)
