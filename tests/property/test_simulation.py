"""Two thousand random topologies under random faults: whatever goes wrong, each guarantee holds and the counters add up.

A run of the tests takes a quarter of the seeds, drawn by its own; `--all` takes all. A seed that fails is printed;
`check_seed(SEED)` in `support/random_topologies.py` repeats it exactly.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from support import broken_tracking
from support.broken_tracking import Break
from support.random_topologies import check_seed, judge, random_case

from stormproof.core.base.message import Guarantee
from stormproof.testing import Faults

SEEDS = 2_000
CHUNK = 100
CONTROL_SEEDS = 300

ONCE_OR_MORE, ONCE_OR_LESS, ONCE = Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE, Guarantee.EXACTLY_ONCE


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every attempt that fails writes a line, and a chunk has thousands."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_whatever_goes_wrong_the_guarantee_holds(first: int) -> None:
    seen, doubled, lost, rejected = set[Guarantee](), 0, 0, Counter[str]()
    for seed in range(first, first + CHUNK):
        case, verdict = check_seed(seed)
        seen.add(case.guarantee)
        doubled += verdict.doubled if case.guarantee is ONCE_OR_MORE else 0
        lost += verdict.lost if case.guarantee is ONCE_OR_LESS else 0
        rejected += verdict.rejected
    assert seen == set(Guarantee)
    # What each of them does not promise is seen to happen: else nothing went wrong in these seeds.
    assert doubled
    assert lost
    assert rejected["rows"]


def test_groups_are_rejected_in_some_of_the_seeds() -> None:
    assert any(check_seed(seed)[1].rejected["groups"] for seed in range(CHUNK))


# What each variant is tried on: None stands for the faults that the seeds above draw.
CONTROLS: dict[Break, tuple[Guarantee, Faults | None]] = {
    broken_tracking.runs_not_compared: (
        ONCE_OR_LESS,
        Faults(misreads=0.3, worker_deaths={"stage 0": 0.5}),
    ),
    broken_tracking.tokens_reused: (ONCE_OR_MORE, None),
    broken_tracking.tokens_counted_by_the_reader: (ONCE_OR_MORE, None),
    broken_tracking.one_share_for_two_subscribers: (ONCE_OR_MORE, Faults()),
    broken_tracking.ack_dropped: (ONCE_OR_MORE, Faults()),
    broken_tracking.rows_not_counted: (ONCE, Faults(duplicates=0.05)),
    broken_tracking.failure_explains_a_loss: (ONCE_OR_MORE, None),
    broken_tracking.failed_message_confirmed: (ONCE_OR_MORE, None),
}


@pytest.mark.parametrize("broken", CONTROLS, ids=lambda broken: broken.__name__)
def test_control_the_seeds_catch(broken: Break) -> None:
    guarantee, faults = CONTROLS[broken]
    for seed in range(CONTROL_SEEDS):
        case = random_case(seed, guarantee=guarantee, faults=faults)
        with pytest.MonkeyPatch.context() as patch:
            broken(patch)
            found = judge(case, case.run()).broken
        if found:
            assert judge(case, case.run()).broken == []  # it is the variant that was caught
            return
    pytest.fail(f"{CONTROL_SEEDS} seeds and nothing was seen")


def test_control_the_seeds_catch_a_verdict_before_init() -> None:
    """Counts see a lost init first, so they are off: then all stands on the acker, which must not do without it."""
    for seed in range(180, 180 + CONTROL_SEEDS):
        case = random_case(seed, guarantee=ONCE_OR_MORE, faults=Faults(drops=0.08))
        with pytest.MonkeyPatch.context() as patch:
            broken_tracking.rows_not_counted(patch)
            with pytest.MonkeyPatch.context() as worse:
                broken_tracking.verdict_before_init(worse)
                found = judge(case, case.run()).broken
            if not found or judge(case, case.run()).broken:
                continue  # nothing is seen, or without counts already
        assert any("lost" in text for text in found)
        return
    pytest.fail(f"{CONTROL_SEEDS} seeds and nothing was seen")


def test_a_seed_says_everything() -> None:
    for seed in range(20):
        assert random_case(seed).run() == random_case(seed).run()
