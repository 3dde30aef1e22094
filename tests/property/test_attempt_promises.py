"""Whatever jobs do, in whatever order: a batch ends, and what it confirms was complete and untouched by a failure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted import Says, Script

from stormproof.core.base.message import Guarantee
from stormproof.core.tracking import attempts, partners
from stormproof.core.tracking.attempts import JobDied
from stormproof.core.tracking.verdict import Abandoned, AllFailed, AttemptEnd, Complete, Divided, GivenUp
from stormproof.trident.terms.transaction_states import AttemptOutcome

MESSAGES = 6
ids = st.integers(0, MESSAGES - 1)
some = st.lists(ids, max_size=2).map(tuple)
says = st.builds(
    Says,
    early=some,
    late=some,
    lost=st.just(()),
    unseen=st.one_of(st.just(()), st.just(()), some),
    together=st.lists(st.tuples(ids, ids), max_size=3).map(tuple),
    violations=st.sampled_from([(), (), (), ("a row tripled",)]),
    skip_last=st.sampled_from([False, False, False, True]),
)
lines = st.lists(
    st.one_of(says, says, says, st.builds(JobDied, st.just("died"), suspects=some)), min_size=1, max_size=9
)


def hold(script: Script) -> None:
    """Run the script's batch and hold its outcome to what is promised."""
    outcome = script.run()
    assert len(script.attempts) == outcome.attempts <= 2 + attempts.RERUNS_MAX + attempts.UNVERIFIED_MAX
    if script.guarantee is Guarantee.AT_MOST_ONCE:
        assert isinstance(outcome, (Complete, Abandoned))
        assert outcome.attempts == 1
        return
    assert isinstance(outcome, (Complete, AllFailed, Divided, GivenUp))
    if not isinstance(outcome, (Complete, AllFailed)):
        return
    named = [f.failure.id for f in outcome.failed]
    assert len(named) == len(set(named)), "one failure a message"
    assert any(f.failure.counted for f in outcome.failed) or not named, "nobody is returned without one that failed"
    if isinstance(outcome, AllFailed):
        assert len(named) == MESSAGES
        return
    attempt = script.attempts[-1]
    last = script.lines[min(len(script.attempts), len(script.lines)) - 1]
    assert isinstance(last, Says)
    read = set(range(MESSAGES)) - attempt.excluded
    assert not (set(last.unseen) & read - set(last.early) - set(last.late)), "a message without its acks was confirmed"
    assert not last.violations
    assert not last.skip_last
    assert {*last.early, *last.late} & read <= {*named}, "a failed message was confirmed"
    if script.guarantee is Guarantee.EXACTLY_ONCE:
        assert not set(last.late) & read - set(last.early), "something of a message that failed late was written"
        failed = set(last.early) & read
        for a, b in last.together:
            if a != b and {a, b} <= read:
                assert (a in failed) == (b in failed), "a message whose tuple went with another's was confirmed"


@settings(max_examples=300, deadline=None)
@given(lines, st.sampled_from(Guarantee))
def test_what_is_confirmed_was_complete(script: list[Says | JobDied], guarantee: Guarantee) -> None:
    hold(Script(script, messages=MESSAGES, guarantee=guarantee))


def test_it_catches_a_touched_message_that_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(partners, "touched_by", lambda *_: {})
    with pytest.raises(AssertionError, match="went with another's"):
        hold(Script([Says(early=[1], together=[(1, 2)])], messages=MESSAGES))


def test_it_catches_a_failure_that_excuses_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(attempts, "mismatches", lambda *_, **__: ())
    with pytest.raises(AssertionError, match="without its acks"):
        hold(Script([Says(early=[1], unseen=[2])], messages=MESSAGES))


def test_every_end_of_an_attempt_is_one_that_the_ledger_knows() -> None:
    assert {AttemptOutcome(end.value) for end in AttemptEnd} == {
        AttemptOutcome.JOB_FAILED,
        AttemptOutcome.UNVERIFIED,
        AttemptOutcome.MOOT,
    }
