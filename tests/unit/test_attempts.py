"""One batch from its slice to its outcome: which messages fail, which are merely returned, and when a batch stops."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.scripted import Says, Script, failure

from stormproof.core.base.errors import BatchUnverified
from stormproof.core.base.message import FailureReason, Guarantee, MessageId
from stormproof.core.tracking import attempts as module
from stormproof.core.tracking import partners
from stormproof.core.tracking.attempts import Attempt, JobDied
from stormproof.core.tracking.partners import touched_by
from stormproof.core.tracking.verdict import (
    Abandoned,
    AllFailed,
    AttemptEnd,
    Complete,
    Divided,
    FailedIn,
    GivenUp,
    JobReport,
    Outcome,
)

EXACTLY, AT_LEAST, AT_MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE
TRACKED = [AT_LEAST, EXACTLY]
DIED = JobDied("a worker died")


def named(outcome: Outcome) -> dict[int, tuple[str, int]]:
    """Of each message that failed or was returned: the reason, or "returned", and the attempt."""
    assert isinstance(outcome, (Complete, AllFailed))
    return {
        f.failure.id: (f.failure.reason.value if f.failure.counted else "returned", f.attempt) for f in outcome.failed
    }


# -- going well, and early failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", Guarantee)
def test_a_batch_that_adds_up_is_complete_at_once(guarantee: Guarantee) -> None:
    script = Script([Says()], guarantee=guarantee)
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert (outcome.failed, outcome.attempts, script.ends) == ((), 1, [])


@pytest.mark.parametrize("guarantee", TRACKED)
def test_an_early_failure_is_named_and_the_rest_goes_on(guarantee: Guarantee) -> None:
    outcome = Script([Says(early=[2])], guarantee=guarantee).run()
    assert isinstance(outcome, Complete)
    assert named(outcome) == {2: ("error", 1)}


@pytest.mark.parametrize("guarantee", TRACKED)
def test_where_every_message_failed_nothing_is_to_be_written(guarantee: Guarantee) -> None:
    outcome = Script([Says(early=[0, 1, 2, 3])], guarantee=guarantee).run()
    assert isinstance(outcome, AllFailed)
    assert len(named(outcome)) == 4


@pytest.mark.parametrize("guarantee", TRACKED)
def test_an_early_failure_named_twice_is_a_report_counted_twice(guarantee: Guarantee) -> None:
    def twice(attempt: Attempt) -> JobReport:
        report = Says(early=[2]).report(range(4), attempt)
        return replace(report, failures=report.failures * 2, ack_xor=report.ack_xor ^ report.failures[0].token)

    script = Script([twice, Says()], guarantee=guarantee)
    assert isinstance(script.run(), Complete)
    assert script.ends == [AttemptEnd.UNVERIFIED]


# -- late failures -----------------------------------------------------------------------------------------------------


def test_exactly_once_runs_again_without_a_message_that_failed_late() -> None:
    script = Script([Says(early=[0], late=[2, 2])])
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert named(outcome) == {0: ("error", 1), 2: ("error", 1)}
    assert script.ends == [AttemptEnd.MOOT]
    assert [a.excluded for a in script.attempts] == [frozenset(), {0, 2}]
    assert script.attempts[0].seed != script.attempts[1].seed
    assert outcome.report.read_messages == 2
    (late,) = [f.failure for f in outcome.failed if f.failure.id == 2]
    assert late.error == "late 0", "the first of several tasks' reports stands"


def test_failures_of_several_reruns_are_carried_with_their_attempt() -> None:
    outcome = Script([Says(late=[0]), Says(late=[1]), Says(early=[2])]).run()
    assert isinstance(outcome, Complete)
    assert named(outcome) == {0: ("error", 1), 1: ("error", 2), 2: ("error", 3)}


def test_at_least_once_keeps_what_was_written_and_names_those_that_failed_late() -> None:
    script = Script([Says(early=[0], late=[2, 2], together=[(1, 2)])], guarantee=AT_LEAST)
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert named(outcome) == {0: ("error", 1), 2: ("error", 1)}, "1 is confirmed: every share of it was acked"
    assert outcome.attempts == 1


def test_at_most_once_records_late_failures_and_goes_on() -> None:
    outcome = Script([Says(early=[0], late=[2], together=[(1, 2)])], guarantee=AT_MOST).run()
    assert isinstance(outcome, Complete)
    assert sorted(named(outcome)) == [0, 2]


def test_a_batch_that_fails_late_again_and_again_is_halved() -> None:
    script = Script([Says(late=[n]) for n in range(5)], messages=6)
    outcome = script.run()
    assert isinstance(outcome, Divided)
    assert (len(script.attempts), outcome.alone) == (1 + module.RERUNS_MAX, ())
    assert outcome.reason.startswith("halved after moot: 1 messages failed, 0 are returned with them; the first: split")


def test_where_nothing_is_left_to_run_again_all_have_failed() -> None:
    script = Script([Says(late=[0, 1], together=[(1, 2), (2, 3)])])
    outcome = script.run()
    assert isinstance(outcome, AllFailed)
    assert named(outcome) == {0: ("error", 1), 1: ("error", 1), 2: ("returned", 1), 3: ("returned", 1)}
    assert len(script.attempts) == 1


# -- messages that share a tuple ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_failure_takes_along_whom_it_shares_tuples_with_and_those_are_not_counted(when: str) -> None:
    says = Says(early=[1], together=[(1, 3), (3, 5)]) if when == "early" else Says(late=[1], together=[(5, 3), (3, 1)])
    script = Script([says], messages=8)
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert named(outcome) == {1: ("error", 1), 3: ("returned", 1), 5: ("returned", 1)}
    assert script.attempts[1].excluded == {1, 3, 5}
    by_id = {f.failure.id: f.failure for f in outcome.failed}
    returned = by_id[MessageId(5)]
    assert returned.error.startswith("returned with message 1, with which it shares a tuple: ")
    assert returned.token == failure(5, script.attempts[0].seed).token


def test_tuples_of_messages_that_did_not_fail_force_nothing() -> None:
    script = Script([Says(early=[0], together=[(1, 2), (2, 3)])])
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert (sorted(named(outcome)), outcome.attempts) == ([0], 1)


def test_a_tuple_anchored_to_a_message_that_was_never_opened_does_not_add_up() -> None:
    def stranger(attempt: Attempt) -> JobReport:
        return replace(Says(early=[0]).report(range(4), attempt), together=np.array([[0, 99]]))

    script = Script([stranger, Says()])
    assert isinstance(script.run(), Complete)
    assert script.ends == [AttemptEnd.UNVERIFIED]


def test_components_are_the_same_as_those_of_a_plain_search() -> None:
    rng = random.Random(5)
    for _ in range(200):
        size = rng.randint(2, 30)
        pairs = [(rng.randrange(size), rng.randrange(size)) for _ in range(rng.randint(0, 25))]
        failed = {MessageId(i) for i in rng.sample(range(size), rng.randint(0, 3))}
        assert touched_by(failed, np.array(pairs, np.int64).reshape(-1, 2)) == searched(failed, pairs)


def searched(failed: set[MessageId], pairs: list[tuple[int, int]]) -> dict[int, int]:
    """Whom a failed message reaches, step by step, the lowest first."""
    found: dict[int, int] = {}
    for culprit in sorted(failed):
        reached, todo = {int(culprit)}, [int(culprit)]
        while todo:
            one = todo.pop()
            for a, b in pairs:
                for near, far in ((a, b), (b, a)):
                    if near == one and far not in reached:
                        reached.add(far)
                        todo.append(far)
        for id_ in reached - {int(f) for f in failed}:
            found.setdefault(id_, int(culprit))
    return found


def test_a_chain_of_a_hundred_thousand_messages_takes_few_rounds() -> None:
    ids = np.random.default_rng(1).permutation(100_000)
    found = touched_by({MessageId(int(ids[500]))}, np.stack([ids[:-1], ids[1:]], axis=1))
    assert len(found) == 99_999
    assert set(found.values()) == {int(ids[500])}


# -- verdicts that do not add up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", TRACKED)
@pytest.mark.parametrize("says", [Says(unseen=[1]), Says(violations=("a row tripled",)), Says(skip_last=True)])
def test_a_mismatch_is_met_in_per_message_mode(guarantee: Guarantee, says: Says) -> None:
    script = Script([says, Says()], guarantee=guarantee)
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert script.ends == [AttemptEnd.UNVERIFIED]
    assert [a.per_message for a in script.attempts] == [False, True]


@pytest.mark.parametrize("guarantee", TRACKED)
@pytest.mark.parametrize("says", [Says(unseen=[1, 4]), Says(violations=("a row tripled",)), Says(skip_last=True)])
def test_a_mismatch_that_stays_halves_the_batch_and_the_third_stops(guarantee: Guarantee, says: Says) -> None:
    script = Script([says], guarantee=guarantee)
    assert isinstance(script.run(), Divided)
    script.source.put([b"more", b"still more"])
    outcome = script.run()
    assert isinstance(outcome, GivenUp)
    assert (outcome.attempts, len(script.attempts)) == (1, 3)


def test_exactly_once_runs_again_in_batch_mode_without_a_message_that_its_acker_calls_lost() -> None:
    script = Script([Says(unseen=[1]), Says(lost=[1], together=[(1, 2)], violations=("a row lost",)), Says()])
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert named(outcome) == {1: ("lost", 2), 2: ("returned", 2)}
    assert script.ends == [AttemptEnd.UNVERIFIED, AttemptEnd.MOOT]
    assert [(a.per_message, a.excluded) for a in script.attempts] == [
        (False, frozenset()),
        (True, frozenset()),
        (False, {1, 2}),
    ]


def test_at_least_once_fails_a_lost_message_and_confirms_the_rest() -> None:
    script = Script([Says(unseen=[1]), Says(lost=[1], late=[3])], guarantee=AT_LEAST)
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert named(outcome) == {1: ("lost", 2), 3: ("error", 2)}
    assert outcome.attempts == 2


def test_at_least_once_has_a_run_say_whether_a_lost_message_explains_lost_rows() -> None:
    script = Script([Says(unseen=[1]), Says(lost=[1], violations=("a row lost",)), Says()], guarantee=AT_LEAST)
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert named(outcome) == {1: ("lost", 2)}
    assert [a.excluded for a in script.attempts] == [frozenset(), frozenset(), {1}]
    stays = Script([Says(unseen=[1]), Says(lost=[1], violations=("a row lost",)), Says(unseen=[2])], guarantee=AT_LEAST)
    assert isinstance(stays.run(), Divided)


@pytest.mark.parametrize("says", [Says(lost=[1], skip_last=True), Says(late=[1], skip_last=True)], ids=["lost", "late"])
@pytest.mark.parametrize("guarantee", TRACKED)
def test_a_message_that_was_lost_or_failed_late_explains_no_wrong_read(guarantee: Guarantee, says: Says) -> None:
    """What read other messages than those that were opened may have named others, too: then all would have failed."""
    script = Script([says], guarantee=guarantee)
    assert isinstance(script.run(), Divided)
    assert script.ends == [AttemptEnd.UNVERIFIED]


@pytest.mark.parametrize("guarantee", TRACKED)
def test_a_store_that_loses_everything_stops_the_run_and_fails_nobody(guarantee: Guarantee) -> None:
    script = Script([Says(lost=[0, 1, 2, 3])], guarantee=guarantee)
    assert isinstance(script.run(), Divided)
    script.source.put([b"more", b"still more"])
    script.lines = [Says(lost=[4, 5])]
    assert isinstance(script.run(), GivenUp)


@pytest.mark.parametrize("guarantee", TRACKED)
def test_messages_that_are_lost_whenever_they_come_fail_by_name(guarantee: Guarantee) -> None:
    script = Script([Says(unseen=[0, 1]), Says(lost=[0, 1])], messages=2, guarantee=guarantee, retry=True)
    outcome = script.run()
    assert isinstance(outcome, AllFailed)
    assert {reason for reason, _ in named(outcome).values()} == {"lost"}


def test_a_complete_batch_in_between_lets_the_count_begin_anew() -> None:
    script = Script([Says(unseen=[1]), Says(unseen=[1]), Says(), Says(unseen=[4]), Says()])
    assert isinstance(script.run(), Divided)
    script.source.put([b"more"])
    assert isinstance(script.run(), Complete)
    script.source.put([b"more"])
    assert isinstance(script.run(), Complete)


# -- jobs that die -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", TRACKED)
def test_a_job_that_dies_is_tried_again_with_care(guarantee: Guarantee) -> None:
    script = Script([DIED, Says(early=[1])], guarantee=guarantee)
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert named(outcome) == {1: ("error", 2)}
    assert script.ends == [AttemptEnd.JOB_FAILED]
    assert [a.careful for a in script.attempts] == [False, True]


@pytest.mark.parametrize("guarantee", TRACKED)
def test_a_job_that_dies_twice_comes_in_halves_or_with_its_suspects_alone(guarantee: Guarantee) -> None:
    outcome = Script([DIED], guarantee=guarantee).run()
    assert outcome == Divided(AttemptEnd.JOB_FAILED, "halved after job_failed: a worker died", (), 2)
    outcome = Script([DIED, replace(DIED, suspects=(2, 0))], guarantee=guarantee).run()
    assert outcome == Divided(AttemptEnd.JOB_FAILED, "2 suspects set apart after job_failed: a worker died", (0, 2), 2)


@pytest.mark.parametrize("guarantee", TRACKED)
@pytest.mark.parametrize("timed_out", [False, True])
def test_a_message_that_stands_alone_has_failed_by_name(guarantee: Guarantee, timed_out: bool) -> None:
    script = Script([replace(DIED, timed_out=timed_out)], messages=1, guarantee=guarantee)
    outcome = script.run()
    assert isinstance(outcome, AllFailed)
    (found,) = outcome.failed
    assert found.attempt == 2
    assert found.failure.reason is (FailureReason.TIMEOUT if timed_out else FailureReason.WORKER_LOST)
    assert (found.failure.error, found.failure.input, found.failure.counted) == ("a worker died", "b'm0'", True)
    assert found.failure.token == failure(0, script.attempts[-1].seed).token


def test_the_last_message_that_did_not_fail_stands_alone_too() -> None:
    outcome = Script([Says(late=[0, 1, 2]), DIED]).run()
    assert isinstance(outcome, AllFailed)
    assert named(outcome) == {**dict.fromkeys(range(3), ("error", 1)), 3: ("worker_lost", 3)}


def test_a_message_alone_that_cannot_be_read_again_stops_the_run() -> None:
    script = Script([DIED], messages=1)

    def dies(attempt: Attempt) -> JobDied:
        script.source.readers = lambda *_: ()  # type: ignore[method-assign]
        return DIED

    script.lines = [dies]
    with pytest.raises(BatchUnverified, match="txid 1: its one message cannot be read again"):
        script.run()


@pytest.mark.parametrize("line", [DIED, Says(skip_last=True), Says(violations=("a row tripled",))])
def test_at_most_once_has_one_attempt(line: Says | JobDied) -> None:
    script = Script([line], guarantee=AT_MOST)
    outcome = script.run()
    assert isinstance(outcome, Abandoned)
    assert (outcome.attempts, script.ends) == (1, [])


# -- negative controls: each of these is wrong, and a test above must say so -------------------------------------------


def a_failure_explains_the_loss_of_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "mismatches", lambda report, *_, **__: () if report.failures else ("not zero",))


def a_late_failure_is_ignored(patch: pytest.MonkeyPatch) -> None:
    judge = module.BatchRunner._judge  # pyright: ignore[reportPrivateUsage]

    def deaf(runner: module.BatchRunner, batch: object, report: JobReport) -> Outcome | None:
        quiet = replace(report, late=(), late_xor=0, ack_xor=report.ack_xor ^ report.late_xor)
        return judge(runner, batch, quiet)  # type: ignore[arg-type]

    patch.setattr(module.BatchRunner, "_judge", deaf)


def a_failed_message_is_confirmed(patch: pytest.MonkeyPatch) -> None:
    def forgets(batch: module._InHand, report: JobReport) -> Complete:  # pyright: ignore[reportPrivateUsage]
        return Complete(report, tuple(batch.failed.values())[1:], batch.attempt.number)

    patch.setattr(module, "_complete", forgets)


def a_touched_message_is_confirmed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partners, "touched_by", lambda *_: {})


def a_touched_message_counts_a_failure(patch: pytest.MonkeyPatch) -> None:
    def blames(batch: module._InHand, report: JobReport) -> Complete:  # pyright: ignore[reportPrivateUsage]
        failed = [FailedIn(replace(f.failure, counted=True), f.attempt) for f in batch.failed.values()]
        return Complete(report, tuple(failed), batch.attempt.number)

    patch.setattr(module, "_complete", blames)


def a_loss_of_another_beside_a_failure() -> None:
    script = Script([Says(early=[0], unseen=[1]), Says(early=[0])])
    outcome = script.run()
    assert isinstance(outcome, Complete)
    assert script.ends == [AttemptEnd.UNVERIFIED]


CONTROLS: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], None]] = {
    a_failure_explains_the_loss_of_another: a_loss_of_another_beside_a_failure,
    a_late_failure_is_ignored: test_exactly_once_runs_again_without_a_message_that_failed_late,
    a_failed_message_is_confirmed: lambda: test_an_early_failure_is_named_and_the_rest_goes_on(EXACTLY),
    a_touched_message_is_confirmed: lambda: (
        test_a_failure_takes_along_whom_it_shares_tuples_with_and_those_are_not_counted("late")
    ),
    a_touched_message_counts_a_failure: lambda: (
        test_a_failure_takes_along_whom_it_shares_tuples_with_and_those_are_not_counted("early")
    ),
}


@pytest.mark.parametrize("broken", CONTROLS)
def test_each_broken_variant_is_caught(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    CONTROLS[broken]()
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        CONTROLS[broken]()
