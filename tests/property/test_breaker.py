"""The promises of `stormproof.core.tracking.verdict`, over any sequence of reports and of messages that fail alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormproof.core.tracking import verdict as module
from stormproof.core.tracking.verdict import HOLDS_MAX, LIMIT, ROW_MAX, Breaker, Breaks, Shortages

ERROR: Final = "ValueError (rows.py:7 in cut)"
Step = int | None
"""A message that fails alone; None: a job reports."""

steps = st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=60)


def said(sequence: Sequence[Step], breaker: Breaker | None = None) -> list[Breaks | None]:
    """What the breaker says at each step, until it stops the run."""
    breaker = breaker or Breaker()
    answers: list[Breaks | None] = []
    for step in sequence:
        if step is None:
            breaker.reported()
            answers.append(None)
            continue
        answers.append(breaker.failed_alone(step, ERROR))
        if answers[-1] is Breaks.STOP:
            break
    return answers


def hold_to_promises(sequence: Sequence[Step], breaker: Breaker | None = None) -> None:
    answers = said(sequence, breaker)
    failed_before_report: set[int] = set()
    row: list[int] = []
    for number, (step, answer) in enumerate(zip(sequence, answers, strict=False)):
        if step is None:
            failed_before_report.update(row)
            row = []
            continue
        if step in failed_before_report:
            assert answer is Breaks.COUNT, "poison: others went through since it failed, and it counts"
            continue
        row.append(step)
        alone = set(row) == {step} and len(row) > HOLDS_MAX
        assert (answer is Breaks.COUNT) == alone, "innocent: counted while others failed alike, or had no turn yet"
        full = len(set(row)) >= LIMIT or (len(set(row)) > 1 and len(row) >= ROW_MAX)
        assert (answer is Breaks.STOP) == full, f"bounded: step {number} of {sequence}"


@given(steps)
def test_it_keeps_its_promises(sequence: list[Step]) -> None:
    hold_to_promises(sequence)


@given(st.lists(st.integers(0, 5), min_size=ROW_MAX * 2, max_size=40))
def test_without_a_report_two_unrelated_messages_stop_it(row: list[int]) -> None:
    assert said(row)[-1] is Breaks.STOP or len(set(row)) == 1


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30))
def test_a_topology_whose_every_message_raises_is_never_stopped(messages: list[int]) -> None:
    """Errors of user code, lost workers and hangs have no name outside user code: they count as ever."""
    breaker = Breaker()
    assert {breaker.failed_alone(message, "") for message in messages} == {Breaks.COUNT}


@given(st.integers(1, 9))
def test_poison_is_counted_however_much_of_it_there_is(number: int) -> None:
    """Each was met once, and others went through since: their retries may follow one another."""
    breaker = Breaker()
    for message in range(number):
        assert breaker.failed_alone(message, ERROR) is Breaks.HOLD
        breaker.reported()
    assert {breaker.failed_alone(message, ERROR) for message in range(number)} == {Breaks.COUNT}


def test_the_only_message_there_is_counts_in_the_end() -> None:
    assert said([4] * (HOLDS_MAX + 2)) == [Breaks.HOLD] * HOLDS_MAX + [Breaks.COUNT] * 2


def test_another_error_is_another_cause() -> None:
    breaker = Breaker()
    assert [breaker.failed_alone(n, f"error {n}") for n in range(9)] == [Breaks.HOLD] * 9


class _CountsAtOnce(Breaker):
    def failed_alone(self, message: int, outside: str) -> Breaks:
        answer = super().failed_alone(message, outside)
        return Breaks.COUNT if answer is Breaks.HOLD else answer


class _ForgetsReports(Breaker):
    def reported(self) -> None:
        pass


def test_it_catches_a_breaker_that_blames_at_once() -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="innocent"):
        hold_to_promises([1, 2], _CountsAtOnce())


def test_it_catches_a_breaker_that_never_sees_a_report() -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="poison"):
        hold_to_promises([1, 2, None, 1], _ForgetsReports())


def test_it_catches_a_breaker_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(module, "LIMIT", 99)
    with pytest.raises(AssertionError, match="bounded"):
        hold_to_promises([1, 2, 3])


# -- shortages that users' functions meet --------------------------------------------------------------------------------

reports = st.lists(st.frozensets(st.integers(0, 5), max_size=4), max_size=40)


@given(reports)
def test_unrelated_messages_that_meet_a_shortage_are_never_counted(met: list[frozenset[int]]) -> None:
    shortages, times = Shortages(), Counter[int]()
    known, row = set[int](), set[int]()  # those that met one before a report without, and those since
    for messages in met:
        held = shortages.met_by(messages)
        if not messages:
            assert held == frozenset()
            known, row, times = known | row, set(), Counter()
            continue
        fresh = messages - known
        row |= fresh
        if len(row) >= LIMIT:
            assert held is None, "bounded: it is the machine's"
            assert shortages.met_by(messages) is None, "and stays so until a job goes without"
            return
        times.update(fresh)
        assert held == {message for message in fresh if times[message] <= HOLDS_MAX}


def test_a_message_that_fills_the_disk_by_itself_is_held_once() -> None:
    shortages = Shortages()
    assert shortages.met_by({7}) == {7}
    assert shortages.met_by(frozenset()) == set()
    assert shortages.met_by({7, 8, 9}) == {8, 9}
    assert shortages.met_by({7, 5}) is None
