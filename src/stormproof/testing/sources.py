"""The suite that every pending source must pass: subclass `SourceConformance` for a source of your own.

    class TestMySource(SourceConformance):
        @pytest.fixture
        def harness(self) -> Iterator[SourceHarness]:
            yield MyHarness()

Each case states one promise. A source that breaks one loses messages, doubles them, or never gets rid of a bad one.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from stormproof.core.errors import Fenced, UsageError
from stormproof.core.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.source.abilities import SupportsDeadLetters
from stormproof.core.source.protocol import (
    Backlog,
    Expectation,
    Lease,
    Limit,
    Slice,
    Source,
)

SEED = 7
ANY = Limit(1_000)


class SourceHarness(ABC):
    """One fresh, empty store, seen by the suite.

    `max_attempts` is how often a message may fail there. `several_subscriptions` is off for a source that serves one
    only, `counts_unopened` for one whose backlog cannot say how much was never opened, `exact_bytes` for one that
    estimates how many bytes a message has. The suite's leases last 30 seconds; retries must be due within a second of
    the first failure.
    """

    max_attempts: int = 3
    several_subscriptions: bool = True
    counts_unopened: bool = True
    exact_bytes: bool = True

    @abstractmethod
    def put(self, payloads: Sequence[bytes]) -> None:
        """Append messages to the store. Payloads are any bytes but newlines."""

    @abstractmethod
    def unsubscribed(self) -> SupportsDeadLetters:
        """A new source object on the store: another driver's, with nothing shared but the store."""

    def view(self, subscription: str = "s", epoch: int = 1) -> SupportsDeadLetters:
        """A new source object that is subscribed."""
        source = self.unsubscribed()
        source.subscribe(subscription, epoch)
        return source

    @abstractmethod
    def expire(self) -> None:
        """Let every open lease run out: put the store's clock on, or the leases' expiry back."""

    @abstractmethod
    def wait_for_retries(self) -> None:
        """Let every waiting retry fall due, likewise."""

    def payload_of(self, stored: bytes) -> bytes:
        """The payload that was put, of what a dead letter holds of it."""
        return stored

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Let go what the views hold; called by whoever made the harness."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a reader gave for one message."""

    id: int
    origin: int
    token: int
    payload: bytes

    def failed(self, error: str = "boom", *, counted: bool = True) -> MessageFailure:
        """This message, as one that a bolt failed, or (not counted) one that is merely returned."""
        return MessageFailure(
            MessageId(self.id),
            self.origin,
            Token(self.token),
            FailureReason.ERROR,
            "split",
            error,
            "the input",
            counted=counted,
        )


def messages_of(
    source: Source,
    slice_: Slice,
    seed: int = SEED,
    *,
    parallelism: int = 2,
    excluded: frozenset[int] = frozenset(),
    batch_rows: int = 3,
) -> list[Message]:
    """What the slice's readers give, part after part; checks the size of batches and the order within parts.

    Where a payload is a row of columns (see `Decoder`), its only column counts as the payload.
    """
    found = list[Message]()
    for reader in source.readers(slice_, parallelism):
        part = list[Message]()
        for batch in reader.read(seed, excluded, batch_rows):
            assert 0 < batch.num_rows <= batch_rows
            for row in batch.to_pylist():
                payload = row["payload"]
                if isinstance(payload, dict):
                    (payload,) = cast("dict[str, object]", payload).values()
                assert isinstance(payload, bytes)
                part.append(Message(row["id"], row["origin"], row["token"], payload))
        assert [m.id for m in part] == sorted(m.id for m in part)
        found += part
    return found


def _lease(owner: str = "a", epoch: int = 1) -> Lease:
    return Lease(owner, epoch)


def _each_slice(source: Source, limit: Limit = ANY, epoch: int = 1) -> Iterator[tuple[Lease, Slice]]:
    """Open slices until there are no more, each under a lease of its own."""
    for number in range(100):
        lease = _lease(f"each{number}", epoch)
        slice_ = source.open(lease, limit, SEED)
        if slice_ is None:
            return
        yield lease, slice_
    raise AssertionError("the source hands out slices without end")


def _numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"m%d" % n for n in range(start, start + count)]


def _payloads(messages: list[Message]) -> list[bytes]:
    return [message.payload for message in messages]


def _dead_letter(harness: SourceHarness, payload: bytes = b"poison") -> str:
    """Put a message and fail it to death; gives its shown id."""
    harness.put([payload])
    source = harness.view()
    for _ in range(harness.max_attempts):
        harness.wait_for_retries()
        slice_ = source.open(_lease("k"), ANY, SEED)
        assert slice_ is not None
        dead = source.confirm(_lease("k"), [m.failed() for m in messages_of(source, slice_)]).dead
        if dead:
            return dead[0]
    raise AssertionError(f"the message failed {harness.max_attempts} times and is no dead letter")


class SourceConformance:
    """What every pending source must do. A subclass gives the fixture `harness`, fresh for each case."""

    @pytest.fixture
    def harness(self, *args: Any, **kwargs: Any) -> Any:
        """A fresh, empty store; a subclass returns one, or yields one and closes it."""
        raise NotImplementedError("a subclass of SourceConformance has a fixture `harness`")

    def test_a_slice_is_read_as_it_was_opened(self, harness: SourceHarness) -> None:
        """Readers give each message once, byte for byte, the same each time; number and XOR are as expected."""
        harness.put([b"", b"\x00\xff", b"line"])
        source = harness.view()
        slice_ = source.open(_lease(), ANY, SEED)
        assert slice_ is not None
        messages = messages_of(source, slice_)
        assert _payloads(messages) == [b"", b"\x00\xff", b"line"]
        xor = 0
        for message in messages:
            xor ^= message.token
        assert slice_.expected == Expectation(3, xor)
        assert (slice_.retry, slice_.replayed, slice_.deaths) == (False, (), 0)
        assert slice_.bytes == 6 or not harness.exact_bytes
        assert messages_of(source, slice_) == messages  # the same each time

    def test_tokens_depend_on_the_seed_and_the_expectation_follows(self, harness: SourceHarness) -> None:
        """Another seed makes other tokens, `excluded` leaves messages out, and `expect` says what is found then."""
        harness.put(_numbered(5))
        source = harness.view()
        slice_ = source.open(_lease(), ANY, SEED)
        assert slice_ is not None
        out = frozenset({messages_of(source, slice_)[1].id})
        for seed, excluded in ((SEED, frozenset[int]()), (2**63 - 1, frozenset[int]()), (-5, out)):
            messages = messages_of(source, slice_, seed, excluded=excluded)
            xor = 0
            for message in messages:
                xor ^= message.token
            assert source.expect(slice_, seed, excluded) == Expectation(5 - len(excluded), xor)
        assert source.expect(slice_, SEED, frozenset()) == slice_.expected
        assert source.expect(slice_, SEED + 1, frozenset()) != slice_.expected

    def test_nothing_to_open(self, harness: SourceHarness) -> None:
        """`open` gives None where there is nothing."""
        source = harness.view()
        assert source.open(_lease(), ANY, SEED) is None
        assert source.backlog() == Backlog(0, 0, 0, 0)

    @pytest.mark.parametrize("parallelism", [1, 2, 3, 8])
    def test_parts_are_disjoint_and_whole(self, harness: SourceHarness, parallelism: int) -> None:
        """`readers` cuts a slice into as many parts as asked for; each message is in one of them."""
        harness.put(_numbered(5))
        source = harness.view()
        slice_ = source.open(_lease(), ANY, SEED)
        assert slice_ is not None
        assert len(source.readers(slice_, parallelism)) == parallelism
        assert sorted(_payloads(messages_of(source, slice_, parallelism=parallelism))) == _numbered(5)

    def test_limits_by_messages_and_by_bytes(self, harness: SourceHarness) -> None:
        """A slice stays within its limit, but for one message that is above it alone."""
        if not harness.exact_bytes:
            pytest.skip("this source estimates its messages' bytes")
        harness.put([b"x" * 10] * 4 + [b"y" * 100] + [b"z"])
        source = harness.view()
        sizes = list[tuple[int, int]]()
        for owner, limit in enumerate([Limit(3), Limit(3, bytes=60), Limit(3, bytes=60), Limit(3, bytes=60)]):
            slice_ = source.open(_lease(str(owner)), limit, SEED)
            if slice_ is not None:
                assert len(messages_of(source, slice_)) == slice_.expected.messages
                sizes.append((slice_.expected.messages, slice_.bytes))
        assert sizes == [(3, 30), (1, 10), (1, 100), (1, 1)]

    def test_confirmed_messages_do_not_come_again(self, harness: SourceHarness) -> None:
        """What was confirmed is never handed out again; a repeated confirm or a late abort changes nothing."""
        harness.put(_numbered(4))
        source = harness.view()
        assert source.open(_lease("a"), Limit(3), SEED) is not None
        source.confirm(_lease("a"))
        source.confirm(_lease("a"))  # repeated: no effect
        source.abort(_lease("a"))
        rest = source.open(_lease("b"), ANY, SEED)
        assert rest is not None
        assert _payloads(messages_of(source, rest)) == [b"m3"]
        source.confirm(_lease("b"))
        assert source.open(_lease("c"), ANY, SEED) is None
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_aborted_messages_come_first_and_whole(self, harness: SourceHarness) -> None:
        """What was aborted is handed out next, all of it, with no failure or death counted."""
        harness.put(_numbered(4))
        source = harness.view()
        assert source.open(_lease("a"), Limit(2), SEED) is not None
        source.abort(_lease("a"))
        source.abort(_lease("a"))
        again = source.open(_lease("b"), ANY, SEED + 1)
        assert again is not None
        messages = messages_of(source, again, SEED + 1)
        assert _payloads(messages) == [b"m0", b"m1"]
        assert again.expected == source.expect(again, SEED + 1, frozenset())
        assert (again.retry, again.deaths) == (False, 0)

    def test_a_returned_slice_is_cut_to_the_limit(self, harness: SourceHarness) -> None:
        """A smaller limit holds for returned messages too; none is lost or doubled by the cut."""
        harness.put([b"x" * 10] * 7)
        source = harness.view()
        assert source.open(_lease("a"), ANY, SEED) is not None
        source.abort(_lease("a"))
        ids = list[int]()
        for owner, limit in (("b", Limit(3)), ("c", Limit(10, bytes=25)), ("d", ANY)):
            part = source.open(_lease(owner), limit, SEED)
            assert part is not None
            messages = messages_of(source, part)
            assert len(messages) == part.expected.messages
            assert part.bytes == 10 * len(messages) or not harness.exact_bytes
            ids += [message.id for message in messages]
        assert len(ids) == len(set(ids)) == 7

    def test_several_slices_are_pending_at_once(self, harness: SourceHarness) -> None:
        """Slices are independent of each other; `backlog` counts what is ready and what is pending."""
        harness.put(_numbered(6))
        source = harness.view()
        slices = [source.open(_lease(owner), Limit(2), SEED) for owner in "abc"]
        source.confirm(_lease("b"))
        source.abort(_lease("c"))
        assert source.backlog() == Backlog(ready=2, pending=2, waiting=0, dead=0)
        assert slices[0] is not None
        assert _payloads(messages_of(source, slices[0])) == _numbered(2)

    def test_an_owner_holds_one_slice(self, harness: SourceHarness) -> None:
        """An owner key names one slice: a second open under it is refused."""
        harness.put(_numbered(4))
        source = harness.view()
        assert source.open(_lease("a"), Limit(2), SEED) is not None
        with pytest.raises(UsageError, match="a holds a slice already"):
            source.open(_lease("a"), Limit(2), SEED)

    def test_a_lease_that_ran_out_goes_to_another(self, harness: SourceHarness) -> None:
        """A lease that ran out is opened by another, and its first owner can neither keep nor confirm it."""
        harness.put(_numbered(3))
        source = harness.view()
        assert source.open(_lease("a"), ANY, SEED) is not None
        assert source.open(_lease("b"), ANY, SEED) is None
        harness.expire()
        with pytest.raises(Fenced):
            source.hold(_lease("a"))
        with pytest.raises(Fenced):
            source.extend(_lease("a"))
        again = source.open(_lease("b"), ANY, SEED)
        assert again is not None
        assert len(messages_of(source, again)) == 3
        with pytest.raises(Fenced):
            source.confirm(_lease("a"))
        source.abort(_lease("a"))  # returns nothing: it is b's now
        assert source.open(_lease("c"), ANY, SEED) is None
        source.hold(_lease("b"))
        source.confirm(_lease("b"))
        with pytest.raises(Fenced):
            source.confirm(_lease("a"))
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_a_held_lease_never_runs_out(self, harness: SourceHarness) -> None:
        """After `hold` a lease lasts until it is confirmed or aborted; hold may be repeated."""
        harness.put(_numbered(3))
        source = harness.view()
        source.open(_lease("a"), ANY, SEED)
        source.extend(_lease("a"))
        source.hold(_lease("a"))
        source.hold(_lease("a"))
        harness.expire()
        assert source.open(_lease("b"), ANY, SEED) is None
        source.extend(_lease("a"))
        source.confirm(_lease("a"))

    @pytest.mark.parametrize("verb", ["hold", "extend"])
    def test_a_lease_that_is_not_there_cannot_be_kept(self, harness: SourceHarness, verb: str) -> None:
        """`hold` and `extend` of a returned lease are Fenced."""
        harness.put(_numbered(1))
        source = harness.view()
        source.open(_lease("a"), ANY, SEED)
        source.abort(_lease("a"))
        with pytest.raises(Fenced):
            getattr(source, verb)(_lease("a"))

    def test_a_new_epoch_takes_the_leases_and_the_old_one_can_do_nothing(self, harness: SourceHarness) -> None:
        """`recover` takes all leases over and counts deaths of open ones; the older epoch is Fenced everywhere."""
        harness.put(_numbered(6))
        old = harness.view(epoch=1)
        old.open(_lease("a", 1), Limit(2), SEED)
        held = old.open(_lease("b", 1), Limit(2), SEED)
        old.hold(_lease("b", 1))
        new = harness.view(epoch=2)
        assert set(new.recover(2)) == {"a", "b"}
        assert set(new.recover(2)) == {"a", "b"}  # its own ones too, with no further death
        for call in (
            lambda: old.open(_lease("c", 1), ANY, SEED),
            lambda: old.hold(_lease("a", 1)),
            lambda: old.extend(_lease("b", 1)),
            lambda: old.confirm(_lease("b", 1)),
            lambda: old.abort(_lease("a", 1)),
            lambda: old.recover(1),
            lambda: old.subscribe("s", 1),
        ):
            with pytest.raises(Fenced):
                call()
        assert held is not None
        attached = new.attach(held.position, held.expected)
        assert attached == held
        assert _payloads(messages_of(new, attached)) == [b"m2", b"m3"]
        new.confirm(_lease("b", 2))
        with pytest.raises(Fenced):
            old.confirm(_lease("b", 1))
        new.abort(_lease("a", 2))
        again = new.open(_lease("d", 2), ANY, SEED)
        assert again is not None
        assert _payloads(messages_of(new, again)) == [b"m0", b"m1"]
        assert again.deaths == 1

    def test_a_slice_that_took_two_drivers_down_is_opened_in_halves(self, harness: SourceHarness) -> None:
        """A slice on which two drivers died comes in halves, a half on which one more dies in quarters."""
        harness.put(_numbered(5))
        harness.view(epoch=1).open(_lease("a", 1), ANY, SEED)
        for epoch in (2, 3):
            driver = harness.view(epoch=epoch)
            assert driver.recover(epoch) == ("a" if epoch == 2 else "b2",)
            driver.abort(Lease("a" if epoch == 2 else "b2", epoch))
            slice_ = driver.open(_lease(f"b{epoch}", epoch), ANY, SEED)
            assert slice_ is not None
            assert (slice_.expected.messages, slice_.deaths) == ((5, 1) if epoch == 2 else (3, 1))
        last = harness.view(epoch=4)
        last.recover(4)
        last.abort(Lease("b3", 4))
        halves = list[int]()
        for _, slice_ in _each_slice(last, epoch=4):
            assert len(messages_of(last, slice_)) == slice_.expected.messages
            halves.append(slice_.expected.messages)
        assert sorted(halves) == [1, 2, 2]

    def test_a_single_message_keeps_its_deaths(self, harness: SourceHarness) -> None:
        """Deaths of a message that stands alone are counted on, so that it can be given up."""
        harness.put(_numbered(1))
        owner = "a0"
        harness.view(epoch=1).open(_lease(owner, 1), ANY, SEED)
        for epoch in (2, 3, 4):
            driver = harness.view(epoch=epoch)
            driver.recover(epoch)
            driver.abort(Lease(owner, epoch))
            owner = f"a{epoch}"
            slice_ = driver.open(_lease(owner, epoch), ANY, SEED)
            assert slice_ is not None
            assert slice_.deaths == epoch - 1

    def test_a_driver_that_dies_in_recovery_has_not_died_of_the_messages(self, harness: SourceHarness) -> None:
        """One opening counts one death, however many drivers die before it is opened again."""
        harness.put(_numbered(1))
        harness.view(epoch=1).open(_lease("a", 1), ANY, SEED)
        for epoch in (2, 3, 4):
            harness.view(epoch=epoch).recover(epoch)  # and dies
        last = harness.view(epoch=5)
        last.recover(5)
        last.abort(Lease("a", 5))
        slice_ = last.open(_lease("b", 5), ANY, SEED)
        assert slice_ is not None
        assert slice_.deaths == 1

    def test_halves_on_request(self, harness: SourceHarness) -> None:
        """`split` returns a slice in two halves, a single message whole; a repetition changes nothing."""
        harness.put(_numbered(5))
        source = harness.view()
        slice_ = source.open(_lease("a"), ANY, SEED)
        assert slice_ is not None
        source.split(slice_, _lease("a"))
        source.split(slice_, _lease("a"))  # repeated: no effect
        halves = [(owner, source.open(_lease(owner), ANY, SEED)) for owner in ("b", "c")]
        found = list[bytes]()
        for owner, half in halves:
            assert half is not None
            assert half.expected.messages in (2, 3)
            found += _payloads(messages_of(source, half))
            if half.expected.messages == 2:
                source.split(half, _lease(owner))
        assert sorted(found) == _numbered(5)
        single = source.open(_lease("d"), ANY, SEED)
        assert single is not None
        assert single.expected.messages == 1
        source.split(single, _lease("d"))
        assert source.backlog().ready == 2

    @pytest.mark.parametrize(
        ("suspects", "parts"),
        [
            ([2], [[0, 1], [2], [3, 4, 5]]),
            ([0], [[0], [1, 2, 3, 4, 5]]),
            ([5, 2, 3], [[0, 1], [2], [3], [4], [5]]),
            ([], [[0, 1, 2], [3, 4, 5]]),
            (None, [[0, 1, 2], [3, 4, 5]]),
        ],
    )
    def test_suspects_are_set_apart(
        self, harness: SourceHarness, suspects: list[int] | None, parts: list[list[int]]
    ) -> None:
        """`split` sets suspects apart, and what lies between them; where none is in the slice, it comes in halves."""
        harness.put(_numbered(6))
        source = harness.view()
        slice_ = source.open(_lease("a"), ANY, SEED)
        assert slice_ is not None
        messages = messages_of(source, slice_)
        stranger = max(m.id for m in messages) + 1
        alone = [stranger] if suspects is None else [messages[place].id for place in suspects]
        source.split(slice_, _lease("a"), alone)
        source.split(slice_, _lease("a"), alone)  # repeated: no effect
        found = list[list[bytes]]()
        for _, part in _each_slice(source):
            read = messages_of(source, part)
            assert part.expected.messages == len(read)
            found.append(_payloads(read))
        assert sorted(found) == [[_numbered(6)[place] for place in places] for places in parts]

    def test_suspects_in_a_retry_slice_are_set_apart_and_keep_their_count(self, harness: SourceHarness) -> None:
        """A retry slice is split as others; being split off counts no failure."""
        harness.put(_numbered(3))
        source = harness.view()
        slice_ = source.open(_lease("a"), ANY, SEED)
        assert slice_ is not None
        source.confirm(_lease("a"), [m.failed() for m in messages_of(source, slice_)])
        harness.wait_for_retries()
        retry = source.open(_lease("b"), ANY, SEED)
        assert retry is not None
        suspect = messages_of(source, retry)[1]
        source.split(retry, _lease("b"), [suspect.id])
        sizes = list[int]()
        for lease, part in _each_slice(source):
            assert part.retry
            sizes.append(part.expected.messages)
            source.confirm(lease, [m.failed() for m in messages_of(source, part)])
        assert sizes == [1, 1, 1]
        assert len(source.dead_letters()) == (3 if harness.max_attempts == 2 else 0), "each has failed twice by now"

    def test_failed_messages_wait_then_come_in_a_batch_of_their_own(self, harness: SourceHarness) -> None:
        """Failed messages wait out their backoff, then come as a retry slice; the others are confirmed."""
        harness.put(_numbered(4))
        source = harness.view()
        slice_ = source.open(_lease("a"), Limit(3), SEED)
        assert slice_ is not None
        messages = messages_of(source, slice_)
        resolution = source.confirm(_lease("a"), [messages[0].failed(), messages[2].failed("\x00\ud800")])
        assert set(resolution.retried) == {source.shown_id(m.id, m.origin) for m in (messages[0], messages[2])}
        assert resolution.dead == ()
        assert source.confirm(_lease("a"), [messages[0].failed()]).retried == ()
        backlog = source.backlog()
        assert (backlog.pending, backlog.waiting) == (0, 2)
        assert backlog.ready == 1 or not harness.counts_unopened
        assert backlog.next_retry_in_s is not None
        assert 0 < backlog.next_retry_in_s <= 1
        new = source.open(_lease("b"), ANY, SEED)
        assert new is not None
        assert not new.retry
        assert _payloads(messages_of(source, new)) == [b"m3"]
        source.hold(_lease("b"))
        harness.wait_for_retries()
        assert source.backlog().next_retry_in_s == 0
        retry = source.open(_lease("c"), ANY, SEED)
        assert retry is not None
        assert retry.retry
        retried = messages_of(source, retry)
        assert [(m.id, m.origin, m.payload) for m in retried] == [
            (m.id, m.origin, m.payload) for m in (messages[0], messages[2])
        ]
        assert retry.replayed == tuple((m.id, m.origin) for m in retried)
        assert source.attach(retry.position, retry.expected) == retry
        assert source.expect(retry, SEED, frozenset()) == retry.expected
        source.confirm(_lease("c"))
        source.confirm(_lease("b"))
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_due_retries_are_left_for_later_where_the_limit_says_so(self, harness: SourceHarness) -> None:
        """`Limit(retries=False)` hands out new messages and leaves the due retries as they are."""
        harness.put(_numbered(2))
        source = harness.view()
        slice_ = source.open(_lease("a"), ANY, SEED)
        assert slice_ is not None
        source.confirm(_lease("a"), [m.failed() for m in messages_of(source, slice_)])
        harness.put([b"new"])
        harness.wait_for_retries()
        fresh = source.open(_lease("b"), Limit(retries=False), SEED)
        assert fresh is not None
        assert _payloads(messages_of(source, fresh)) == [b"new"]
        assert source.open(_lease("c"), Limit(retries=False), SEED) is None
        late = source.open(_lease("c"), ANY, SEED)
        assert late is not None
        assert late.retry
        assert sorted(_payloads(messages_of(source, late))) == _numbered(2)

    def test_a_retry_slice_is_cut_returned_and_halved_as_others(self, harness: SourceHarness) -> None:
        """Limits, abort, split and expiry hold for retry slices too."""
        harness.put(_numbered(6))
        source = harness.view()
        slice_ = source.open(_lease("a"), ANY, SEED)
        assert slice_ is not None
        source.confirm(_lease("a"), [m.failed() for m in messages_of(source, slice_)])
        harness.wait_for_retries()
        first = source.open(_lease("b"), Limit(4), SEED)
        assert first is not None
        assert first.expected.messages == 4
        source.split(first, _lease("b"))
        seen = list[bytes]()
        for owner in ("c", "d", "e"):
            part = source.open(_lease(owner), Limit(4, bytes=4) if harness.exact_bytes else Limit(2), SEED)
            assert part is not None
            assert part.retry
            assert part.expected.messages == 2
            seen += _payloads(messages_of(source, part))
        assert sorted(seen) == _numbered(6)
        source.abort(_lease("e"))
        assert source.backlog() == Backlog(0, 4, 2, 0, next_retry_in_s=0)
        harness.expire()
        again = source.open(_lease("f"), Limit(1), SEED)
        assert again is not None
        assert again.expected.messages == 1

    def test_a_message_that_fails_too_often_is_a_dead_letter_with_its_history(self, harness: SourceHarness) -> None:
        """After `max_attempts` failures a message is a dead letter with payload, counts and every failure."""
        harness.put([b"poison", b"good"])
        source = harness.view()
        for attempt in range(1, harness.max_attempts + 1):
            slice_ = source.open(_lease(f"a{attempt}"), ANY, SEED)
            assert slice_ is not None
            poison = next(m for m in messages_of(source, slice_) if m.payload == b"poison")
            resolution = source.confirm(_lease(f"a{attempt}"), [poison.failed(f"error {attempt}")])
            shown = source.shown_id(poison.id, poison.origin)
            last = attempt == harness.max_attempts
            assert (resolution.retried, resolution.dead) == (((), (shown,)) if last else ((shown,), ()))
            harness.wait_for_retries()
        assert source.open(_lease("b"), ANY, SEED) is None
        assert source.backlog() == Backlog(0, 0, 0, 1)
        (letter,) = source.dead_letters()
        assert harness.payload_of(letter.payload) == b"poison"
        assert (letter.reason, letter.error) == ("error", f"error {harness.max_attempts}")
        assert (letter.times_opened, letter.times_failed) == (harness.max_attempts, harness.max_attempts)
        assert [entry["error"] for entry in letter.history] == [f"error {n + 1}" for n in range(harness.max_attempts)]
        assert [entry["owner"] for entry in letter.history] == [f"a{n + 1}" for n in range(harness.max_attempts)]
        assert letter.disposal is None

    def test_a_message_that_is_merely_returned_waits_with_the_failed_ones_and_is_never_counted(
        self, harness: SourceHarness
    ) -> None:
        """However often it goes back with a message that fails, it is due with that one, and never a dead letter."""
        harness.put([b"poison", b"innocent", b"good"])
        source = harness.view()
        for attempt in range(1, harness.max_attempts + 1):
            slice_ = source.open(_lease(f"a{attempt}"), ANY, SEED)
            assert slice_ is not None
            poison, innocent, *_ = messages_of(source, slice_)
            named = [innocent.failed("returned with poison", counted=False), poison.failed()]
            resolution = source.confirm(_lease(f"a{attempt}"), named)
            assert source.shown_id(innocent.id, innocent.origin) in resolution.retried
            backlog = source.backlog()
            if backlog.waiting == 2:
                assert source.open(_lease("early"), ANY, SEED) is None, "not due before the one that it goes with"
            harness.wait_for_retries()
        assert source.backlog().dead == 1
        last = source.open(_lease("last"), ANY, SEED)
        assert last is not None
        assert last.retry
        (innocent,) = messages_of(source, last)
        assert innocent.payload == b"innocent"
        source.confirm(_lease("last"), [innocent.failed()])
        assert source.backlog().dead == 1, "its first failure that counts"
        for attempt in range(2, harness.max_attempts + 1):
            harness.wait_for_retries()
            assert source.open(_lease(f"b{attempt}"), ANY, SEED) is not None
            source.confirm(_lease(f"b{attempt}"), [innocent.failed()])
        letter = source.dead_letters()[-1]
        assert letter.times_failed == harness.max_attempts
        returned = [entry for entry in letter.history if entry.get("returned")]
        assert [entry["error"] for entry in returned] == ["returned with poison"] * harness.max_attempts
        assert len(letter.history) == 2 * harness.max_attempts

    def test_a_requeued_dead_letter_comes_again_with_its_failures_counted_anew(self, harness: SourceHarness) -> None:
        """`requeue` is recorded with who and why, works once, and counts failures from 0."""
        shown = _dead_letter(harness)
        source = harness.view()
        assert source.requeue(["1-999"], by="ann", why="typo") == ()
        assert source.requeue([shown], by="ann", why="repaired") == (shown,)
        assert source.requeue([shown], by="ann", why="again") == ()
        (letter,) = source.dead_letters()
        assert (letter.disposal, letter.by, letter.why) == ("requeue", "ann", "repaired")
        assert letter.disposed_at is not None
        slice_ = source.open(_lease("a"), ANY, SEED)
        assert slice_ is not None
        assert slice_.retry
        (message,) = messages_of(source, slice_)
        assert source.confirm(_lease("a"), [message.failed()]).retried == (shown,)
        harness.wait_for_retries()
        source.open(_lease("b"), ANY, SEED)
        source.confirm(_lease("b"))
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_an_edited_dead_letter_comes_again_with_its_new_payload_and_its_old_id(
        self, harness: SourceHarness
    ) -> None:
        """`edit` works once; what is read then is the new payload, also after it failed; the old one stays on record."""
        shown = _dead_letter(harness)
        source = harness.view()
        (dead,) = source.dead_letters()
        assert not source.edit("1-999", b"mended", by="ann", why="no such message")
        assert source.edit(shown, b"mended", by="ann", why="a typo")
        assert not source.edit(shown, b"again", by="bob", why="too late")
        assert source.requeue([shown], by="bob", why="too late") == ()
        (letter,) = source.dead_letters()
        assert letter.new_payload is not None
        assert (letter.disposal, letter.by, letter.why) == ("edit", "ann", "a typo")
        assert (letter.payload, harness.payload_of(letter.new_payload)) == (dead.payload, b"mended")
        for attempt in range(harness.max_attempts):
            slice_ = source.open(_lease(f"e{attempt}"), ANY, SEED)
            assert slice_ is not None
            (message,) = messages_of(source, slice_)
            assert message.payload == b"mended"
            assert source.shown_id(message.id, message.origin) == shown
            assert slice_.expected == source.expect(slice_, SEED, frozenset())
            source.confirm(_lease(f"e{attempt}"), [message.failed("still")])
            harness.wait_for_retries()
        first, second = source.dead_letters()
        assert (first, second.payload, second.new_payload) == (letter, letter.new_payload, None)
        assert [entry["reason"] for entry in second.history].count("edit") == 1
        (entry,) = [entry for entry in second.history if entry["reason"] == "edit"]
        assert entry["payload_sha256"] == hashlib.sha256(letter.payload).hexdigest()
        assert entry["new_payload_sha256"] == hashlib.sha256(letter.new_payload).hexdigest()
        assert source.edit(shown, b"at last", by="ann", why="")
        slice_ = source.open(_lease("last"), ANY, SEED)
        assert slice_ is not None
        assert _payloads(messages_of(source, slice_)) == [b"at last"]
        source.confirm(_lease("last"))
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_a_dropped_dead_letter_is_recorded_and_never_comes_again(self, harness: SourceHarness) -> None:
        """`drop` is recorded with who and why; the letter stays on record and is never handed out."""
        shown = _dead_letter(harness)
        source = harness.view()
        assert source.drop([shown], by="ann", why="spam") == (shown,)
        assert source.drop([shown], by="bob", why="too") == ()
        assert source.requeue([shown], by="bob", why="no") == ()
        (letter,) = source.dead_letters()
        assert (letter.disposal, letter.by, harness.payload_of(letter.payload)) == ("drop", "ann", b"poison")
        assert source.open(_lease("a"), ANY, SEED) is None
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_a_failure_of_a_message_that_is_not_in_the_slice_is_refused(self, harness: SourceHarness) -> None:
        """A confirm that names a message of another slice is refused and changes nothing."""
        harness.put(_numbered(4))
        source = harness.view()
        source.open(_lease("a"), Limit(2), SEED)
        other = source.open(_lease("b"), Limit(2), SEED)
        assert other is not None
        with pytest.raises(UsageError):
            source.confirm(_lease("a"), [messages_of(source, other)[0].failed()])
        source.confirm(_lease("a"))

    def test_fan_out_each_subscription_sees_every_message(self, harness: SourceHarness) -> None:
        """Each subscription has its own place in the same messages."""
        if not harness.several_subscriptions:
            pytest.skip("this source has one subscription")
        harness.put(_numbered(4))
        one, two = harness.view("one"), harness.view("two")
        first = one.open(_lease("a"), Limit(3), SEED)
        second = two.open(_lease("a"), ANY, SEED)
        assert first is not None
        assert second is not None
        one.confirm(_lease("a"), [messages_of(one, first)[0].failed()])
        assert _payloads(messages_of(two, second)) == _numbered(4)
        two.abort(_lease("a"))
        assert (one.backlog().ready, one.backlog().waiting) == (1, 1)
        assert (two.backlog().ready, two.backlog().waiting) == (4, 0)

    def test_messages_put_later_are_opened_later(self, harness: SourceHarness) -> None:
        """Messages that arrive while slices are pending are opened later, each once, in order."""
        source = harness.view()
        seen = list[bytes]()
        for turn in range(4):
            harness.put(_numbered(5, turn * 5))
            slice_ = source.open(_lease(str(turn)), Limit(3), SEED)
            assert slice_ is not None
            seen += _payloads(messages_of(source, slice_))
        for _, slice_ in _each_slice(source, Limit(3)):
            seen += _payloads(messages_of(source, slice_))
        assert seen == _numbered(20)

    def test_calls_before_subscribe_are_refused(self, harness: SourceHarness) -> None:
        """A source that nobody subscribed to says so."""
        source = harness.unsubscribed()
        with pytest.raises(UsageError, match="subscribe"):
            source.backlog()
