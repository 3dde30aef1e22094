"""More failed messages than are dealt with at once: the batch goes back in parts, and each message is answered for once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.jobs import FIRST_ID, run_job, source
from support.memory_run import World
from support.scripted import Says, Script, failure

from stormproof import MemorySink, Topology
from stormproof.core.base.errors import BatchUnverified
from stormproof.core.base.message import Guarantee
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.task import account, job
from stormproof.core.tracking import attempts as module
from stormproof.core.tracking.verdict import AttemptEnd, Complete, Divided, JobReport
from stormproof.trident.driver import coordinator

MESSAGES, AT_ONCE = 60, 8
TRACKED = [Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight failures are many here."""
    monkeypatch.setattr(module, "FAILED_MAX", AT_ONCE)
    monkeypatch.setattr(coordinator, "FAILED_MAX", AT_ONCE)
    monkeypatch.setattr(job, "NAMED_IN_TASK_MIN", 1)


def split(line: str) -> list[str]:
    if line.startswith("bad"):
        raise ValueError("bad line")
    return line.split()


def world_of(folder: Path, bad: set[int], in_flight: int = 1) -> World:
    payloads = [b"bad" if i in bad else b"m%d" % i for i in range(MESSAGES)]
    return World(payloads, folder, split=split, batch_messages=MESSAGES, max_attempts=2, in_flight=in_flight)


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("guarantee", TRACKED)
@pytest.mark.parametrize("every", [1, 2, 6, 30])
def test_each_message_is_applied_or_a_dead_letter(
    guarantee: Guarantee, every: int, in_flight: int, tmp_path: Path
) -> None:
    bad = set(range(0, MESSAGES, every))
    world = world_of(tmp_path, bad, in_flight)
    ends: list[int] = []
    statistics = world.run(guarantee, on_batch=lambda batch: ends.append(batch.failed))
    assert world.counts() == Counter(f"m{i}" for i in range(MESSAGES) if i not in bad)
    assert sorted(letter.id for letter in world.source.dead_letters()) == sorted(bad)
    assert {letter.times_failed for letter in world.source.dead_letters()} == {2}
    assert statistics.failed == 2 * len(bad), "a part that goes back counts no failure"
    assert max(ends) <= AT_ONCE
    assert all(world.counts()[f"m{i}"] == 1 for i in range(MESSAGES) if i not in bad)


def test_without_a_bound_all_failures_are_dealt_with_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the bound."""
    monkeypatch.setattr(coordinator, "FAILED_MAX", 10**6)
    ends: list[int] = []
    world_of(tmp_path, set(range(0, MESSAGES, 2))).run(on_batch=lambda batch: ends.append(batch.failed))
    assert max(ends) == MESSAGES // 2


def test_under_at_most_once_each_failure_is_named(tmp_path: Path) -> None:
    world = world_of(tmp_path, set(range(0, MESSAGES, 2)))
    statistics = world.run(Guarantee.AT_MOST_ONCE)
    assert (statistics.failed, statistics.batches) == (MESSAGES // 2, 1)


@pytest.mark.parametrize("guarantee", TRACKED)
def test_a_task_that_does_not_say_how_many_it_left_out_loses_no_message(
    guarantee: Guarantee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no task names or counts is not confirmed with the rest: the batch does not add up."""
    before = account.Account.name_early

    def silent(self: account.Account, passage: object, untracked: object) -> None:
        before(self, passage, untracked)  # type: ignore[arg-type]
        self.report.unnamed = 0

    monkeypatch.setattr(account.Account, "name_early", silent)
    world = world_of(tmp_path, set(range(0, MESSAGES, 2)))
    with pytest.raises(BatchUnverified, match="does not add up"):
        world.run(guarantee)
    left = world.source.backlog()
    assert left.ready + left.pending == MESSAGES


@pytest.mark.parametrize("guarantee", TRACKED)
def test_parts_are_as_many_as_the_failures_ask_for(guarantee: Guarantee) -> None:
    def many(_: object) -> JobReport:
        return JobReport(0, 0, 0, failures=tuple(failure(id_, 1) for id_ in range(8)), unnamed=12)

    script = Script([many], messages=1000, guarantee=guarantee)
    outcome = script.run()
    assert isinstance(outcome, Divided)
    assert (outcome.end, outcome.alone, outcome.parts) == (AttemptEnd.MOOT, (), 5)
    assert "20 messages" in outcome.reason
    assert "split" in outcome.reason, "the first failure is named"


def test_more_parts_are_never_made_than_the_messages_can_fill() -> None:
    def many(_: object) -> JobReport:
        return JobReport(0, 0, 0, late=(failure(0, 1),), unnamed=10**9)

    outcome = Script([many], messages=40).run()
    assert isinstance(outcome, Divided)
    assert outcome.parts == 10
    outcome = Script([many], messages=10**7).run()
    assert isinstance(outcome, Divided)
    assert outcome.parts == module.PARTS_MAX


def test_many_that_share_a_tuple_with_a_failed_message_are_not_returned_at_once() -> None:
    pairs = [(0, other) for other in range(1, 10)]
    outcome = Script([Says(late=[0], together=pairs)], messages=20).run()
    assert isinstance(outcome, Divided)
    assert outcome.parts == 3
    outcome = Script([Says(late=[0], together=pairs[:8])], messages=20).run()
    assert isinstance(outcome, Complete)


@pytest.mark.parametrize("per_message", [False, True])
def test_one_message_with_many_tuples_that_fail_late_is_one_failure(per_message: bool, tmp_path: Path) -> None:
    """Else a batch of one message would go back again and again."""
    t = Topology("words")
    lines = t.spout("lines", source())
    words = t.bolt("words", str.split, lines.shuffle(), schema="word string")
    far = t.bolt("far", split, words.fields("word"), schema="up string")
    t.sink(MemorySink("ups", staging=tmp_path), far)
    line = b" ".join(b"bad%d" % number for number in range(30))
    ran = run_job(InlineEngine(1), t, [line], tmp_path, per_message=per_message, named_max=1)
    assert ({failure.id for failure in ran.report.late}, ran.report.unnamed) == ({FIRST_ID}, 0)
    assert ran.mismatches == ()


@pytest.mark.parametrize("per_message", [False, True])
def test_late_failures_beyond_the_bound_are_counted(per_message: bool, tmp_path: Path) -> None:
    t = Topology("words")
    lines = t.spout("lines", source())
    words = t.bolt("words", lambda line: [line], lines.shuffle(), schema="word string")
    far = t.bolt("far", split, words.fields("word"), schema="up string")
    t.sink(MemorySink("ups", staging=tmp_path), far)
    ran = run_job(InlineEngine(1), t, [b"bad"] * 30 + [b"good"], tmp_path, per_message=per_message, named_max=4)
    assert len(ran.report.late) == 4
    assert ran.report.unnamed >= 26
    assert ran.rows["ups"] == [{"up": "good"}]
    whole = run_job(InlineEngine(1), t, [b"bad"] * 30 + [b"good"], tmp_path, per_message=per_message)
    assert (len(whole.report.late), whole.report.unnamed) == (30, 0)
