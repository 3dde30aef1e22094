"""The cases about messages that fail: retries, dead letters, what an operator decides, and the messages of one batch.

Messages that were in one batch come again in one batch, so that no partner of a join lacks another. A source whose
`keeps_mates` is false is left out of these; behind it, a topology with a join is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from stormproof.core.base.errors import Fenced, UsageError
from stormproof.core.contract.source import Backlog, Limit, Slice, Source
from stormproof.testing.sources.harness import (
    ANY,
    SEED,
    SourceHarness,
    SubscribedSource,
    dead_letter,
    each_slice,
    lease_of,
    messages_of,
    numbered,
    open_slice,
    payloads_of,
)


class FailureCases:
    """A failed message waits and comes again; one that fails too often is a dead letter with its history."""

    def test_failed_messages_wait_then_come_in_a_batch_of_their_own(self, harness: SourceHarness) -> None:
        """Failed messages wait out their backoff, then come as a retry slice; the others are confirmed."""
        harness.put(numbered(4))
        source = harness.view()
        slice_ = open_slice(source, "a", Limit(3))
        messages = messages_of(source, slice_)
        resolution = source.confirm(lease_of("a"), [messages[0].failed(), messages[2].failed("\x00\ud800")])
        assert set(resolution.retried) == {source.shown_id(m.id, m.origin) for m in (messages[0], messages[2])}
        assert resolution.dead == ()
        assert source.confirm(lease_of("a"), [messages[0].failed()]).retried == ()
        backlog = source.backlog()
        assert (backlog.pending, backlog.waiting) == (0, 2)
        assert backlog.ready == 1 or not harness.counts_unopened
        assert backlog.next_retry_in_s is not None
        assert 0 < backlog.next_retry_in_s <= 1
        new = open_slice(source, "b")
        assert not new.retry
        assert payloads_of(messages_of(source, new)) == [b"m3"]
        source.pin(lease_of("b"))
        harness.wait_for_retries()
        assert source.backlog().next_retry_in_s == 0
        retry = open_slice(source, "c")
        assert retry.retry
        retried = messages_of(source, retry)
        assert [(m.id, m.origin, m.payload) for m in retried] == [
            (m.id, m.origin, m.payload) for m in (messages[0], messages[2])
        ]
        assert retry.replayed == tuple((m.id, m.origin) for m in retried)
        assert source.attach(retry.position, retry.expected) == retry
        assert source.expect(retry, SEED, frozenset()) == retry.expected
        source.confirm(lease_of("c"))
        source.confirm(lease_of("b"))
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_due_retries_are_left_for_later_where_the_limit_says_so(self, harness: SourceHarness) -> None:
        """`Limit(retries=False)` hands out new messages and leaves the due retries as they are."""
        harness.put(numbered(2))
        source = harness.view()
        slice_ = open_slice(source, "a")
        source.confirm(lease_of("a"), [m.failed() for m in messages_of(source, slice_)])
        harness.put([b"new"])
        harness.wait_for_retries()
        fresh = open_slice(source, "b", Limit(retries=False))
        assert payloads_of(messages_of(source, fresh)) == [b"new"]
        assert source.open(lease_of("c"), Limit(retries=False), SEED) is None
        late = open_slice(source, "c")
        assert late.retry
        assert sorted(payloads_of(messages_of(source, late))) == numbered(2)

    def test_a_retry_slice_is_cut_returned_and_halved_as_others(self, harness: SourceHarness) -> None:
        """Limits, abort, split and expiry hold for retry slices too."""
        harness.put(numbered(6))
        source = harness.view()
        slice_ = open_slice(source, "a")
        source.confirm(lease_of("a"), [m.failed() for m in messages_of(source, slice_)])
        harness.wait_for_retries()
        first = open_slice(source, "b", Limit(4))
        assert first.expected.messages == 4
        source.split(first, lease_of("b"))
        seen = list[bytes]()
        for owner in ("c", "d", "e"):
            part = open_slice(source, owner, Limit(4, bytes=4) if harness.exact_bytes else Limit(2))
            assert part.retry
            assert part.expected.messages == 2
            seen += payloads_of(messages_of(source, part))
        assert sorted(seen) == numbered(6)
        source.abort(lease_of("e"))
        assert source.backlog() == Backlog(0, 4, 2, 0, next_retry_in_s=0)
        harness.expire()
        again = open_slice(source, "f", Limit(1))
        assert again.expected.messages == 1

    def test_suspects_in_a_retry_slice_are_set_apart_and_keep_their_count(self, harness: SourceHarness) -> None:
        """A retry slice is split as others; being split off counts no failure."""
        harness.put(numbered(3))
        source = harness.view()
        slice_ = open_slice(source, "a")
        source.confirm(lease_of("a"), [m.failed() for m in messages_of(source, slice_)])
        harness.wait_for_retries()
        retry = open_slice(source, "b")
        suspect = messages_of(source, retry)[1]
        source.split(retry, lease_of("b"), [suspect.id])
        parts = list(each_slice(source))  # all of them, before a failure that is confirmed may come due again
        assert [(part.retry, part.expected.messages) for _, part in parts] == [(True, 1)] * 3
        for lease, part in parts:
            source.confirm(lease, [m.failed() for m in messages_of(source, part)])
        assert len(source.dead_letters()) == (3 if harness.max_attempts == 2 else 0), "each has failed twice by now"

    def test_a_failure_of_a_message_that_is_not_in_the_slice_is_refused(self, harness: SourceHarness) -> None:
        """A confirm that names a message of another slice is refused and changes nothing."""
        harness.put(numbered(4))
        source = harness.view()
        source.open(lease_of("a"), Limit(2), SEED)
        other = open_slice(source, "b", Limit(2))
        with pytest.raises(UsageError):
            source.confirm(lease_of("a"), [messages_of(source, other)[0].failed()])
        source.confirm(lease_of("a"))

    def test_a_message_that_fails_too_often_is_a_dead_letter_with_its_history(self, harness: SourceHarness) -> None:
        """After `max_attempts` failures a message is a dead letter with payload, counts and every failure."""
        harness.put([b"poison", b"good"])
        source = harness.view()
        for attempt in range(1, harness.max_attempts + 1):
            slice_ = open_slice(source, f"a{attempt}")
            poison = next(m for m in messages_of(source, slice_) if m.payload == b"poison")
            resolution = source.confirm(lease_of(f"a{attempt}"), [poison.failed(f"error {attempt}")])
            shown = source.shown_id(poison.id, poison.origin)
            last = attempt == harness.max_attempts
            assert (resolution.retried, resolution.dead) == (((), (shown,)) if last else ((shown,), ()))
            harness.wait_for_retries()
        assert source.open(lease_of("b"), ANY, SEED) is None
        assert source.backlog() == Backlog(0, 0, 0, 1)
        (letter,) = source.dead_letters()
        assert harness.payload_of(letter.payload) == b"poison"
        assert (letter.reason, letter.error) == ("error", f"error {harness.max_attempts}")
        assert (letter.times_opened, letter.times_failed) == (harness.max_attempts, harness.max_attempts)
        assert [entry["error"] for entry in letter.history] == [f"error {n + 1}" for n in range(harness.max_attempts)]
        assert [entry["owner"] for entry in letter.history] == [f"a{n + 1}" for n in range(harness.max_attempts)]
        assert letter.disposal is None
        assert source.undecided_among([letter.shown_id, "another"]) == {letter.shown_id}
        assert source.undecided_among([]) == frozenset()
        source.drop([letter.shown_id], by="ann", why="poison")
        assert source.undecided_among([letter.shown_id]) == frozenset()

    def test_a_message_that_is_merely_returned_waits_with_the_failed_ones_and_is_never_counted(
        self, harness: SourceHarness
    ) -> None:
        """However often it goes back with a message that fails, it is due with that one, and never a dead letter."""
        harness.put([b"poison", b"innocent", b"good"])
        source = harness.view()
        for attempt in range(1, harness.max_attempts + 1):
            slice_ = open_slice(source, f"a{attempt}")
            poison, innocent, *_ = messages_of(source, slice_)
            named = [innocent.failed("returned with poison", counted=False), poison.failed()]
            resolution = source.confirm(lease_of(f"a{attempt}"), named)
            assert source.shown_id(innocent.id, innocent.origin) in resolution.retried
            backlog = source.backlog()
            if backlog.waiting == 2:
                assert source.open(lease_of("early"), ANY, SEED) is None, "not due before the one that it goes with"
            harness.wait_for_retries()
        assert source.backlog().dead == 1
        last = open_slice(source, "last")
        assert last.retry
        (innocent,) = messages_of(source, last)
        assert innocent.payload == b"innocent"
        source.confirm(lease_of("last"), [innocent.failed()])
        assert source.backlog().dead == 1, "its first failure that counts"
        for attempt in range(2, harness.max_attempts + 1):
            harness.wait_for_retries()
            open_slice(source, f"b{attempt}")
            source.confirm(lease_of(f"b{attempt}"), [innocent.failed()])
        letter = source.dead_letters()[-1]
        assert letter.times_failed == harness.max_attempts
        returned = [entry for entry in letter.history if entry.get("returned")]
        assert [entry["error"] for entry in returned] == ["returned with poison"] * harness.max_attempts
        assert len(letter.history) == 2 * harness.max_attempts

    def test_a_requeued_dead_letter_comes_again_with_its_failures_counted_anew(self, harness: SourceHarness) -> None:
        """`requeue` is recorded with who and why, works once, and counts failures from 0."""
        shown = dead_letter(harness)
        source = harness.view()
        assert source.requeue(["1-999"], by="ann", why="typo") == ()
        assert source.requeue([shown], by="ann", why="repaired") == (shown,)
        assert source.requeue([shown], by="ann", why="again") == ()
        (letter,) = source.dead_letters()
        assert (letter.disposal, letter.by, letter.why) == ("requeue", "ann", "repaired")
        assert letter.disposed_at is not None
        slice_ = open_slice(source, "a")
        assert slice_.retry
        (message,) = messages_of(source, slice_)
        assert source.confirm(lease_of("a"), [message.failed()]).retried == (shown,)
        harness.wait_for_retries()
        source.open(lease_of("b"), ANY, SEED)
        source.confirm(lease_of("b"))
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_an_edited_dead_letter_comes_again_with_its_new_payload_and_its_old_id(
        self, harness: SourceHarness
    ) -> None:
        """`edit` works once; what is read then is the new payload, also after it failed; the old one stays on record."""
        shown = dead_letter(harness)
        source = harness.view()
        (dead,) = source.dead_letters()
        assert not source.edit("1-999", b"mended", by="ann", why="no such message")
        assert source.edit(shown, harness.edited(b"mended"), by="ann", why="a typo")
        assert not source.edit(shown, harness.edited(b"again"), by="bob", why="too late")
        assert source.requeue([shown], by="bob", why="too late") == ()
        (letter,) = source.dead_letters()
        assert letter.new_payload is not None
        assert (letter.disposal, letter.by, letter.why) == ("edit", "ann", "a typo")
        assert (letter.payload, harness.payload_of(letter.new_payload)) == (dead.payload, b"mended")
        for attempt in range(harness.max_attempts):
            slice_ = open_slice(source, f"e{attempt}")
            (message,) = messages_of(source, slice_)
            assert message.payload == b"mended"
            assert source.shown_id(message.id, message.origin) == shown
            assert slice_.expected == source.expect(slice_, SEED, frozenset())
            source.confirm(lease_of(f"e{attempt}"), [message.failed("still")])
            harness.wait_for_retries()
        first, second = source.dead_letters()
        assert (first, second.payload, second.new_payload) == (letter, letter.new_payload, None)
        assert [entry["reason"] for entry in second.history].count("edit") == 1
        (entry,) = [entry for entry in second.history if entry["reason"] == "edit"]
        assert entry["payload_sha256"] == hashlib.sha256(letter.payload).hexdigest()
        assert entry["new_payload_sha256"] == hashlib.sha256(letter.new_payload).hexdigest()
        assert source.edit(shown, harness.edited(b"at last"), by="ann", why="")
        slice_ = open_slice(source, "last")
        assert payloads_of(messages_of(source, slice_)) == [b"at last"]
        source.confirm(lease_of("last"))
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_a_dropped_dead_letter_is_recorded_and_never_comes_again(self, harness: SourceHarness) -> None:
        """`drop` is recorded with who and why; the letter stays on record and is never handed out."""
        shown = dead_letter(harness)
        source = harness.view()
        assert source.drop([shown], by="ann", why="spam") == (shown,)
        assert source.drop([shown], by="bob", why="too") == ()
        assert source.requeue([shown], by="bob", why="no") == ()
        (letter,) = source.dead_letters()
        assert (letter.disposal, letter.by, harness.payload_of(letter.payload)) == ("drop", "ann", b"poison")
        assert source.open(lease_of("a"), ANY, SEED) is None
        assert source.backlog() == Backlog(0, 0, 0, 0)


WHOLE = Limit(1_000, whole=True)
ONE = Limit(1, bytes=1, whole=True)


def _payloads(source: Source, slice_: Slice) -> list[bytes]:
    return sorted(payloads_of(messages_of(source, slice_)))


def _keeper(harness: SourceHarness) -> SubscribedSource:
    """A source that keeps mates together, with four messages."""
    source = harness.view()
    if not source.keeps_mates:
        pytest.skip("this source does not keep mates together, and says so")
    harness.put(numbered(4))
    return source


# ---- messages of one batch


class MateCases:
    """What was in one batch is opened again in one batch, all of it, wherever a batch asks for it by its name."""

    def test_a_returned_batch_is_whole_again(self, harness: SourceHarness) -> None:
        """With `whole`, the limit does not cut what was one batch; it has a name, which messages of others may share."""
        keeper = _keeper(harness)
        assert not open_slice(keeper, "a", WHOLE).mates, "messages that were never opened have no mates"
        keeper.abort(lease_of("a"))
        again = open_slice(keeper, "b", ONE)
        assert _payloads(keeper, again) == numbered(4)
        assert again.mates

    def test_mates_are_retried_together_and_asked_for_by_name(self, harness: SourceHarness) -> None:
        """What failed in one confirm comes in one slice. With names only that is opened, with none only what never was."""
        keeper = _keeper(harness)
        slice_ = open_slice(keeper, "a", WHOLE)
        failed = [replace(m.failed(), mates=2) for m in messages_of(keeper, slice_)[:2]]
        keeper.confirm(lease_of("a"), failed)
        harness.wait_for_retries()
        again = open_slice(keeper, "b", ONE)
        assert again.retry
        assert _payloads(keeper, again) == numbered(2)
        keeper.abort(lease_of("b"))
        harness.put(numbered(2, 4))
        assert _payloads(keeper, open_slice(keeper, "c", replace(WHOLE, mates=frozenset()))) == numbered(2, 4)
        keeper.confirm(lease_of("c"))
        other = Limit(9, whole=True, mates=frozenset({"another"}))
        assert keeper.open(lease_of("d"), other, 1) is None
        assert _payloads(keeper, open_slice(keeper, "d", replace(ONE, mates=again.mates))) == numbered(2)

    def test_mates_come_though_their_own_lease_has_not_run_out(self, harness: SourceHarness) -> None:
        """The lease of a mate in another source has run out before. What is held is not handed out."""
        keeper = _keeper(harness)
        open_slice(keeper, "a", WHOLE)
        keeper.abort(lease_of("a"))
        names = open_slice(keeper, "b", WHOLE).mates
        assert _payloads(keeper, open_slice(keeper, "c", replace(ONE, mates=names))) == numbered(4)
        with pytest.raises(Fenced):
            keeper.pin(lease_of("b"))
        keeper.pin(lease_of("c"))
        assert keeper.open(lease_of("d"), replace(ONE, mates=names), 1) is None
