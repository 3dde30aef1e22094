"""The adapter for a user's own client: what it confirms, what it gives back, what it takes no second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from support.source_harness import IteratorHarness, messages_of

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import FatalError, StoreUnavailable, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Expectation, Lease, Limit
from stormproof.core.source.iterator import Item, IteratorSource

ANY = Limit(100)
A, B, C = Lease("a", 1), Lease("b", 1), Lease("c", 1)


def started(source: IteratorSource) -> IteratorSource:
    source.subscribe("s", 1)
    return source


def source_of(*items: Item, **options: object) -> IteratorSource:
    return started(IteratorSource("mine", items, clock=ManualClock(), rng=Random(1), **options))  # type: ignore[arg-type]


def test_the_client_confirms_what_was_applied_and_gets_back_the_rest() -> None:
    harness = IteratorHarness()
    harness.put([b"good", b"bad", b"late"])
    source = harness.view()
    slice_ = source.open(A, Limit(2), 7)
    assert slice_ is not None
    assert harness.confirmed == []
    bad = messages_of(source, slice_)[1]
    source.confirm(A, [bad.failed()])
    assert harness.confirmed == [("id", 0, b"good")]
    assert source.open(B, ANY, 7) is not None
    source.close()
    assert harness.confirmed == [("id", 0, b"good")]
    assert harness.returned == [("id", 1, b"bad"), ("id", 2, b"late")]


def test_text_and_bare_payloads_are_messages_too() -> None:
    source = source_of("zoë", b"\xff", ("k", "v"))
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    assert [m.payload for m in messages_of(source, slice_)] == ["zoë".encode(), b"\xff", b"v"]


def test_an_id_of_none_is_not_tracked_and_never_replayed() -> None:
    confirmed = list[object]()
    source = source_of(("k", "tracked"), (None, "untracked"), confirm=confirmed.extend)
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    tracked, untracked = messages_of(source, slice_)
    tokens: list[object] = [tracked.token, untracked.token]
    assert tokens[1] is None
    assert slice_.expected == Expectation(2, tracked.token) == source.expect(slice_, 7, frozenset())
    assert source.expect(slice_, 7, frozenset({tracked.id})) == Expectation(1, 0)
    source.abort(A)
    again = source.open(B, ANY, 7)
    assert again is not None
    assert messages_of(source, again) == [tracked]
    assert again.expected == Expectation(1, tracked.token)
    source.confirm(B)
    assert confirmed == ["k"]
    assert source.backlog().ready == source.backlog().waiting == 0


def test_an_untracked_message_cannot_fail() -> None:
    source = source_of((None, "untracked"))
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    (message,) = messages_of(source, slice_)
    resolution = source.confirm(A, [message.failed()])
    assert (resolution.retried, resolution.dead) == ((), ())
    assert source.open(B, ANY, 7) is None


def test_a_slice_of_untracked_messages_alone_is_gone_when_it_comes_back() -> None:
    source = source_of((None, "one"), (None, "two"))
    assert source.open(A, ANY, 7) is not None
    source.abort(A)
    assert source.open(B, ANY, 7) is None


def test_an_id_that_comes_again_while_it_is_unresolved_is_not_taken_twice() -> None:
    source = source_of(("k", "first"), ("k", "again"), None, ("k", "once more"))
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    assert [m.payload for m in messages_of(source, slice_)] == [b"first"]
    source.confirm(A)
    later = source.open(B, ANY, 7)  # it was resolved: the client's own business again
    assert later is not None
    assert [m.payload for m in messages_of(source, later)] == [b"once more"]


def test_a_dead_letter_stays_unconfirmed_until_it_is_dropped() -> None:
    confirmed = list[object]()
    source = source_of(("k", "poison"), confirm=confirmed.extend, max_attempts=1)
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    (dead,) = source.confirm(A, [m.failed() for m in messages_of(source, slice_)]).dead
    assert confirmed == []
    assert source.drop([dead], by="ann", why="spam") == (dead,)
    assert confirmed == ["k"]


def test_a_confirmation_that_raises_is_owed_and_paid_later() -> None:
    calls = list[tuple[object, ...]]()

    def confirm(ids: Sequence[object]) -> None:
        calls.append(tuple(ids))
        if len(calls) == 1:
            raise ConnectionError("gone")

    source = source_of(("k", "v"), confirm=confirm)
    source.open(A, ANY, 7)
    with pytest.raises(StoreUnavailable, match="confirm=confirm raised ConnectionError: gone"):
        source.confirm(A)
    source.confirm(A)  # a repetition, as after any lost answer
    source.maintain()
    assert calls == [("k",), ("k",)]


def test_a_slice_that_is_confirmed_before_it_is_read_can_be_read() -> None:
    source = source_of(("k", "one"), (None, "two"))
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    source.confirm(A)
    assert [m.payload for m in messages_of(source, slice_)] == [b"one", b"two"]
    assert source.open(B, ANY, 7) is None
    with pytest.raises(KeyError):  # nobody needs it any more
        messages_of(source, slice_)


def test_it_is_advanced_only_as_far_as_the_next_slice_needs() -> None:
    taken = list[int]()

    def items() -> Iterator[str]:
        for number in range(100):
            taken.append(number)
            yield "x" * 10

    source = started(IteratorSource("mine", items, clock=ManualClock()))
    assert taken == []
    source.open(A, Limit(3), 7)
    assert len(taken) == 3
    source.open(B, Limit(100, bytes=25), 7)
    assert len(taken) == 6
    source.abort(A)
    source.open(C, Limit(100), 7)  # what was returned comes first
    assert len(taken) == 6


def test_an_iterator_that_raises_is_made_anew_where_there_is_a_function() -> None:
    made = list[int]()

    def items() -> Iterator[str]:
        made.append(len(made))
        yield f"message {len(made)}"
        if len(made) == 1:
            raise ConnectionError("gone")

    source = started(IteratorSource("mine", items, clock=ManualClock()))
    with pytest.raises(StoreUnavailable, match="ConnectionError: gone; a new one is made"):
        source.open(A, ANY, 7)
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    assert [m.payload for m in messages_of(source, slice_)] == [b"message 1", b"message 2"]


def test_a_function_that_finds_nothing_to_iterate_never_looks_like_the_end() -> None:
    clients = list[Iterator[str]]()

    def items() -> Iterator[str]:
        return next(iter(clients))

    source = started(IteratorSource("mine", items, clock=ManualClock()))
    with pytest.raises(StoreUnavailable, match="the function that makes it raised StopIteration; a new one is made"):
        source.open(A, Limit(1), 7)
    clients.append(iter(["message"]))
    assert source.open(A, Limit(1), 7) is not None


def test_an_iterator_that_raises_never_looks_like_the_end() -> None:
    def items() -> Iterator[str]:
        yield "one"
        raise ConnectionError("gone")

    source = started(IteratorSource("mine", items(), clock=ManualClock()))
    for _ in range(2):
        with pytest.raises(FatalError, match="ConnectionError: gone; give the source a function"):
            source.open(A, ANY, 7)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (7, "payload of type int"),
        (("k", "v", 1), "tuple of 3"),
        (("k", None), "payload of type NoneType"),
        ((["k"], "v"), "id of type list"),
    ],
)
def test_what_is_no_message_is_refused(item: Item, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        source_of(item).open(A, ANY, 7)


def test_guarantees_that_it_serves() -> None:
    plain, confirming = source_of(), source_of(confirm=print)
    assert plain.serves(Guarantee.AT_MOST_ONCE) is None
    assert "confirm=" in str(plain.serves(Guarantee.AT_LEAST_ONCE))
    assert confirming.serves(Guarantee.AT_LEAST_ONCE) is None
    assert "applied twice" in str(confirming.serves(Guarantee.EXACTLY_ONCE))


def test_it_has_one_subscription_and_no_put() -> None:
    source = source_of()
    with pytest.raises(UsageError, match="'t' needs a source of its own"):
        source.subscribe("t", 1)
    assert not hasattr(source, "view")
    assert not hasattr(source, "put")


def test_what_is_resolved_takes_no_memory_and_numbers_never_come_again() -> None:
    clock = ManualClock()
    source = started(IteratorSource("mine", map(str, range(1_000)), clock=clock))
    ids = list[int]()
    for turn in range(10):
        slice_ = source.open(Lease(str(turn), 1), Limit(100), 7)
        assert slice_ is not None
        ids += [m.id for m in messages_of(source, slice_, batch_rows=50)]
        source.confirm(Lease(str(turn), 1))
    assert len(set(ids)) == 1_000
    assert source.unresolved_messages == 0
    clock.advance(1)
    later = started(IteratorSource("mine", ["x"], clock=clock))
    slice_ = later.open(A, ANY, 7)
    assert slice_ is not None
    assert messages_of(later, slice_)[0].id > max(ids)


def test_untracked_messages_are_left_out_of_every_part_of_a_slice_that_comes_back() -> None:
    source = source_of("a", (None, "b"), "c", "d", (None, "e"))
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    messages = messages_of(source, slice_, batch_rows=9)
    assert [m.payload for m in messages] == [b"a", b"b", b"c", b"d", b"e"]
    source.split(slice_, A, [messages[2].id])
    parts = [source.open(Lease(owner, 1), ANY, 7) for owner in "bcd"]
    assert [[m.payload for m in messages_of(source, part)] for part in parts if part] == [[b"a"], [b"c"], [b"d"]]
    source.abort(B)
    again = source.open(A, Limit(1), 7)
    assert again is not None
    assert [m.payload for m in messages_of(source, again)] == [b"a"]
    for owner in "acd":
        source.confirm(Lease(owner, 1))
    assert source.unresolved_messages == 0
