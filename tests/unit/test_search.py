"""A batch in which messages meet is not divided: what ends its job is searched for in attempts that commit nothing."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np
import pytest
from support.scripted import Says, Script

from stormproof.core.base.message import FailureReason, Guarantee
from stormproof.core.tracking.attempts import Attempt, JobDied
from stormproof.core.tracking.partners import Meetings
from stormproof.core.tracking.verdict import AllFailed, Complete, GivenUp, JobReport

MESSAGES = 12
MEET = Meetings(frozenset({"split"}))


def killing(killers: AbstractSet[int], *, together: bool = False, suspects: tuple[int, ...] = ()) -> Script:
    """Its job dies where one of the killers runs, or only where all do."""

    def job(attempt: Attempt) -> JobReport | JobDied:
        running = killers - attempt.excluded
        if running == killers if together else running:
            return JobDied("its worker was killed", suspects=suspects)
        return Says().report(range(MESSAGES), attempt)

    return Script([job], MESSAGES, meetings=MEET)


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
@pytest.mark.parametrize("suspects", [(), (3, 7), (3,)])
def test_a_message_that_ends_its_job_is_found_and_the_others_go_on_together(
    guarantee: Guarantee, suspects: tuple[int, ...]
) -> None:
    script = killing({7}, suspects=suspects)
    script.guarantee = guarantee
    outcome = script.run()
    assert isinstance(outcome, AllFailed)
    failures = {one.failure.id: one.failure for one in outcome.failed}
    assert sorted(failures) == list(range(MESSAGES))
    assert [id_ for id_, failure in failures.items() if failure.counted] == [7]
    assert failures[7].reason is FailureReason.WORKER_LOST  # type: ignore[index]
    assert {failure.mates for failure in failures.values()} == {MESSAGES}
    assert len(script.attempts) <= 15


def test_a_job_that_died_by_chance_runs_again_whole() -> None:
    script = killing({7})
    dies = script.lines[0]
    script.lines = [dies, dies, *[Says()] * 3]
    assert isinstance(script.run(), Complete)
    assert script.attempts[-1].excluded == frozenset()


def test_a_batch_that_only_the_whole_of_it_ends_stops_the_run_by_name() -> None:
    outcome = killing({2, 9}, together=True).run()
    assert isinstance(outcome, GivenUp)
    assert outcome.hint == GivenUp.TOO_MUCH
    assert "though each part of it runs by itself" in outcome.error


def test_where_some_message_fails_in_every_attempt_half_of_the_others_come_again_later() -> None:
    def job(attempt: Attempt) -> JobReport:
        left = [id_ for id_ in range(MESSAGES) if id_ not in attempt.excluded]
        report = Says(late=left[:1] if len(left) > 1 else []).report(range(MESSAGES), attempt)
        return replace(report, met=np.array([[id_, 100 + id_ // 2] for id_ in left]))

    script = Script([job], MESSAGES, meetings=Meetings(frozenset()))
    outcome = script.run()
    assert isinstance(outcome, Complete | AllFailed)
    assert [len(attempt.excluded) for attempt in script.attempts[:5]] == [0, 1, 2, 3, 8]
    assert len(script.attempts) <= 7
    together = {one.failure.id // 2 for one in outcome.failed if not one.failure.counted}
    assert {2 * pair + half for pair in together for half in (0, 1)} <= {one.failure.id for one in outcome.failed}
