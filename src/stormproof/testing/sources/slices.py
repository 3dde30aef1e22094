"""The cases about slices: how they are opened, read, limited, confirmed, returned and split."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stormproof.core.base.errors import UsageError
from stormproof.core.contract.source import Backlog, Expectation, Limit
from stormproof.testing.sources.harness import (
    ANY,
    SEED,
    SourceHarness,
    each_slice,
    lease_of,
    messages_of,
    numbered,
    open_slice,
    payloads_of,
)


class SliceCases:
    """Each message is handed out once, as it was put, until its slice is confirmed or returned."""

    def test_a_slice_is_read_as_it_was_opened(self, harness: SourceHarness) -> None:
        """Readers give each message once, byte for byte, the same each time; number and XOR are as expected."""
        harness.put([b"", b"\x00\xff", b"line"])
        source = harness.view()
        slice_ = open_slice(source)
        messages = messages_of(source, slice_)
        assert payloads_of(messages) == [b"", b"\x00\xff", b"line"]
        xor = 0
        for message in messages:
            xor ^= message.token
        assert slice_.expected == Expectation(3, xor)
        assert (slice_.retry, slice_.replayed, slice_.deaths) == (False, (), 0)
        assert slice_.bytes == 6 or not harness.exact_bytes
        assert messages_of(source, slice_) == messages  # the same each time

    def test_shown_ids_of_a_column_are_those_of_each_message(self, harness: SourceHarness) -> None:
        """`shown_ids`, where the source has it, gives the id that `shown_id` gives, and NULL for no number."""
        harness.put(numbered(3))
        source = harness.view()
        messages = messages_of(source, open_slice(source))
        ids = source.shown_ids()
        if ids is None:
            return
        numbers = pa.array([None, *(int(message.id) for message in messages)], pa.int64())
        origins = pa.array([0, *(message.origin for message in messages)], pa.int64())
        shown = [source.shown_id(message.id, message.origin) for message in messages]
        assert ids.shown(numbers, origins).to_pylist() == [None, *shown]

    def test_a_preview_takes_nothing(self, harness: SourceHarness) -> None:
        """`preview`, where the source has it, reads the messages that `open` gives then, and `open` gives them all."""
        harness.put([b"a", b"", b"c"])
        source = harness.view()
        found = source.preview(None, ANY)
        if found.why:
            assert not found.readers
            return
        read = [
            id_ for one in found.readers for rows in one.read(SEED, frozenset(), 10) for id_ in rows["id"].to_pylist()
        ]
        messages = messages_of(source, open_slice(source))
        assert payloads_of(messages) == [b"a", b"", b"c"]
        assert (found.messages, read) == (3, [message.id for message in messages])

    def test_tokens_depend_on_the_seed_and_the_expectation_follows(self, harness: SourceHarness) -> None:
        """Another seed makes other tokens, `excluded` leaves messages out, and `expect` says what is found then."""
        harness.put(numbered(5))
        source = harness.view()
        slice_ = open_slice(source)
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
        assert source.open(lease_of(), ANY, SEED) is None
        assert source.backlog() == Backlog(0, 0, 0, 0)

    @pytest.mark.parametrize("parallelism", [1, 2, 3, 8])
    def test_parts_are_disjoint_and_whole(self, harness: SourceHarness, parallelism: int) -> None:
        """`readers` cuts a slice into as many parts as asked for; each message is in one of them."""
        harness.put(numbered(5))
        source = harness.view()
        slice_ = open_slice(source)
        assert len(source.readers(slice_, parallelism)) == parallelism
        assert sorted(payloads_of(messages_of(source, slice_, parallelism=parallelism))) == numbered(5)

    def test_limits_by_messages_and_by_bytes(self, harness: SourceHarness) -> None:
        """A slice stays within its limit, but for one message that is above it alone."""
        if not harness.exact_bytes:
            pytest.skip("this source estimates its messages' bytes")
        harness.put([b"x" * 10] * 4 + [b"y" * 100] + [b"z"])
        source = harness.view()
        sizes = list[tuple[int, int]]()
        for owner, limit in enumerate([Limit(3), Limit(3, bytes=60), Limit(3, bytes=60), Limit(3, bytes=60)]):
            slice_ = source.open(lease_of(str(owner)), limit, SEED)
            if slice_ is not None:
                assert len(messages_of(source, slice_)) == slice_.expected.messages
                sizes.append((slice_.expected.messages, slice_.bytes))
        assert sizes == [(3, 30), (1, 10), (1, 100), (1, 1)]

    def test_confirmed_messages_do_not_come_again(self, harness: SourceHarness) -> None:
        """What was confirmed is never handed out again; a repeated confirm or a late abort changes nothing."""
        harness.put(numbered(4))
        source = harness.view()
        open_slice(source, "a", Limit(3))
        source.confirm(lease_of("a"))
        source.confirm(lease_of("a"))  # repeated: no effect
        source.abort(lease_of("a"))
        rest = open_slice(source, "b")
        assert payloads_of(messages_of(source, rest)) == [b"m3"]
        source.confirm(lease_of("b"))
        assert source.open(lease_of("c"), ANY, SEED) is None
        assert source.backlog() == Backlog(0, 0, 0, 0)

    def test_aborted_messages_come_first_and_whole(self, harness: SourceHarness) -> None:
        """What was aborted is handed out next, all of it, with no failure or death counted."""
        harness.put(numbered(4))
        source = harness.view()
        open_slice(source, "a", Limit(2))
        source.abort(lease_of("a"))
        source.abort(lease_of("a"))
        again = open_slice(source, "b", seed=SEED + 1)
        messages = messages_of(source, again, SEED + 1)
        assert payloads_of(messages) == [b"m0", b"m1"]
        assert again.expected == source.expect(again, SEED + 1, frozenset())
        assert (again.retry, again.deaths) == (False, 0)

    def test_a_returned_slice_is_cut_to_the_limit(self, harness: SourceHarness) -> None:
        """A smaller limit holds for returned messages too; none is lost or doubled by the cut."""
        harness.put([b"x" * 10] * 7)
        source = harness.view()
        open_slice(source, "a")
        source.abort(lease_of("a"))
        ids = list[int]()
        for owner, limit in (("b", Limit(3)), ("c", Limit(10, bytes=25)), ("d", ANY)):
            part = open_slice(source, owner, limit)
            messages = messages_of(source, part)
            assert len(messages) == part.expected.messages
            assert part.bytes == 10 * len(messages) or not harness.exact_bytes
            ids += [message.id for message in messages]
        assert len(ids) == len(set(ids)) == 7

    def test_several_slices_are_pending_at_once(self, harness: SourceHarness) -> None:
        """Slices are independent of each other; `backlog` counts what is ready and what is pending."""
        harness.put(numbered(6))
        source = harness.view()
        first, _, _ = [open_slice(source, owner, Limit(2)) for owner in "abc"]
        source.confirm(lease_of("b"))
        source.abort(lease_of("c"))
        assert source.backlog() == Backlog(ready=2, pending=2, waiting=0, dead=0)
        assert payloads_of(messages_of(source, first)) == numbered(2)

    def test_fan_out_each_subscription_sees_every_message(self, harness: SourceHarness) -> None:
        """Each subscription has its own place in the same messages."""
        if not harness.several_subscriptions:
            pytest.skip("this source has one subscription")
        harness.put(numbered(4))
        one, two = harness.view("one"), harness.view("two")
        first, second = open_slice(one, "a", Limit(3)), open_slice(two, "a")
        one.confirm(lease_of("a"), [messages_of(one, first)[0].failed()])
        assert payloads_of(messages_of(two, second)) == numbered(4)
        two.abort(lease_of("a"))
        assert (one.backlog().ready, one.backlog().waiting) == (1, 1)
        assert (two.backlog().ready, two.backlog().waiting) == (4, 0)

    def test_messages_put_later_are_opened_later(self, harness: SourceHarness) -> None:
        """Messages that arrive while slices are pending are opened later, each once, in order."""
        source = harness.view()
        seen = list[bytes]()
        for turn in range(4):
            harness.put(numbered(5, turn * 5))
            seen += payloads_of(messages_of(source, open_slice(source, str(turn), Limit(3))))
        for _, slice_ in each_slice(source, Limit(3)):
            seen += payloads_of(messages_of(source, slice_))
        assert seen == numbered(20)

    def test_calls_before_subscribe_are_refused(self, harness: SourceHarness) -> None:
        """A source that nobody subscribed to says so."""
        source = harness.unsubscribed()
        with pytest.raises(UsageError, match="subscribe"):
            source.backlog()

    def test_halves_on_request(self, harness: SourceHarness) -> None:
        """`split` returns a slice in two halves, a single message whole; a repetition changes nothing."""
        harness.put(numbered(5))
        source = harness.view()
        slice_ = open_slice(source, "a")
        source.split(slice_, lease_of("a"))
        source.split(slice_, lease_of("a"))  # repeated: no effect
        halves = [(owner, open_slice(source, owner)) for owner in ("b", "c")]
        found = list[bytes]()
        for owner, half in halves:
            assert half.expected.messages in (2, 3)
            found += payloads_of(messages_of(source, half))
            if half.expected.messages == 2:
                source.split(half, lease_of(owner))
        assert sorted(found) == numbered(5)
        single = open_slice(source, "d")
        assert single.expected.messages == 1
        source.split(single, lease_of("d"))
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
        harness.put(numbered(6))
        source = harness.view()
        slice_ = open_slice(source, "a")
        messages = messages_of(source, slice_)
        stranger = max(m.id for m in messages) + 1
        alone = [stranger] if suspects is None else [messages[place].id for place in suspects]
        source.split(slice_, lease_of("a"), alone)
        source.split(slice_, lease_of("a"), alone)  # repeated: no effect
        found = list[list[bytes]]()
        for _, part in each_slice(source):
            read = messages_of(source, part)
            assert part.expected.messages == len(read)
            found.append(payloads_of(read))
        assert sorted(found) == [[numbered(6)[place] for place in places] for places in parts]

    @pytest.mark.parametrize(("parts", "sizes"), [(3, [2, 2, 3]), (7, [1] * 7), (50, [1] * 7)])
    def test_parts_of_one_size(self, harness: SourceHarness, parts: int, sizes: list[int]) -> None:
        """`split` returns as many parts as it is asked for, of about one size, and no more than there are messages."""
        harness.put(numbered(7))
        source = harness.view()
        slice_ = open_slice(source, "a")
        source.split(slice_, lease_of("a"), parts=parts)
        source.split(slice_, lease_of("a"), parts=parts)  # repeated: no effect
        found = list[list[bytes]]()
        for _, part in each_slice(source):
            read = messages_of(source, part)
            assert part.expected.messages == len(read)
            found.append(payloads_of(read))
        assert sorted(map(len, found)) == sizes
        assert sorted(payload for of_part in found for payload in of_part) == numbered(7)
