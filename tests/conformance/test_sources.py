"""What every pending source must do; the same suite over all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.queues import prepared_database
from support.source_harness import Harness, MemoryHarness, Message, PostgresHarness, messages_of

from stormproof.core.errors import Fenced, UsageError
from stormproof.core.source.protocol import Backlog, Expectation, Lease, Limit

SEED = 7
ANY = Limit(1_000)


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest) -> Iterator[Harness]:
    harness: Harness
    if request.param == "memory":
        harness = MemoryHarness()
    else:
        harness = PostgresHarness(prepared_database(request.getfixturevalue("database")))
    yield harness
    harness.close()


def lease(owner: str = "a", epoch: int = 1) -> Lease:
    return Lease(owner, epoch)


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"m%d" % n for n in range(start, start + count)]


def payloads(messages: list[Message]) -> list[bytes]:
    return [message.payload for message in messages]


def test_a_slice_is_read_as_it_was_opened(store: Harness) -> None:
    store.put([b"", b"\x00\xff", b"line"])
    source = store.view()
    slice_ = source.open(lease(), ANY, SEED)
    assert slice_ is not None
    messages = messages_of(source, slice_)
    assert payloads(messages) == [b"", b"\x00\xff", b"line"]
    xor = 0
    for message in messages:
        xor ^= message.token
    assert slice_.expected == Expectation(3, xor)
    assert (slice_.bytes, slice_.retry, slice_.replayed, slice_.deaths) == (6, False, (), 0)
    assert messages_of(source, slice_) == messages  # the same each time


def test_tokens_depend_on_the_seed_and_the_expectation_follows(store: Harness) -> None:
    store.put(numbered(5))
    source = store.view()
    slice_ = source.open(lease(), ANY, SEED)
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


def test_nothing_to_open(store: Harness) -> None:
    source = store.view()
    assert source.open(lease(), ANY, SEED) is None
    assert source.backlog() == Backlog(0, 0, 0, 0)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 8])
def test_parts_are_disjoint_and_whole(store: Harness, parallelism: int) -> None:
    store.put(numbered(5))
    source = store.view()
    slice_ = source.open(lease(), ANY, SEED)
    assert slice_ is not None
    assert len(source.readers(slice_, parallelism)) == parallelism
    assert sorted(payloads(messages_of(source, slice_, parallelism=parallelism))) == numbered(5)


def test_limits_by_messages_and_by_bytes(store: Harness) -> None:
    store.put([b"x" * 10] * 4 + [b"y" * 100] + [b"z"])
    source = store.view()
    sizes = list[tuple[int, int]]()
    for owner, limit in enumerate([Limit(3), Limit(3, bytes=60), Limit(3, bytes=60), Limit(3, bytes=60)]):
        slice_ = source.open(lease(str(owner)), limit, SEED)
        if slice_ is not None:
            assert len(messages_of(source, slice_)) == slice_.expected.messages
            sizes.append((slice_.expected.messages, slice_.bytes))
    assert sizes == [(3, 30), (1, 10), (1, 100), (1, 1)]


def test_confirmed_messages_do_not_come_again(store: Harness) -> None:
    store.put(numbered(4))
    source = store.view()
    assert source.open(lease("a"), Limit(3), SEED) is not None
    source.confirm(lease("a"))
    source.confirm(lease("a"))  # repeated: no effect
    source.abort(lease("a"))
    rest = source.open(lease("b"), ANY, SEED)
    assert rest is not None
    assert payloads(messages_of(source, rest)) == [b"m3"]
    source.confirm(lease("b"))
    assert source.open(lease("c"), ANY, SEED) is None
    assert source.backlog() == Backlog(0, 0, 0, 0)


def test_aborted_messages_come_first_and_whole(store: Harness) -> None:
    store.put(numbered(4))
    source = store.view()
    assert source.open(lease("a"), Limit(2), SEED) is not None
    source.abort(lease("a"))
    source.abort(lease("a"))
    again = source.open(lease("b"), ANY, SEED + 1)
    assert again is not None
    messages = messages_of(source, again, SEED + 1)
    assert payloads(messages) == [b"m0", b"m1"]
    assert again.expected == source.expect(again, SEED + 1, frozenset())
    assert (again.retry, again.deaths) == (False, 0)


def test_a_returned_slice_is_cut_to_the_limit(store: Harness) -> None:
    store.put([b"x" * 10] * 7)
    source = store.view()
    assert source.open(lease("a"), ANY, SEED) is not None
    source.abort(lease("a"))
    ids = list[int]()
    for owner, limit in (("b", Limit(3)), ("c", Limit(10, bytes=25)), ("d", ANY)):
        part = source.open(lease(owner), limit, SEED)
        assert part is not None
        messages = messages_of(source, part)
        assert len(messages) == part.expected.messages
        assert part.bytes == 10 * len(messages)
        ids += [message.id for message in messages]
    assert len(ids) == len(set(ids)) == 7


def test_several_slices_are_pending_at_once(store: Harness) -> None:
    store.put(numbered(6))
    source = store.view()
    slices = [source.open(lease(owner), Limit(2), SEED) for owner in "abc"]
    source.confirm(lease("b"))
    source.abort(lease("c"))
    assert source.backlog() == Backlog(ready=2, pending=2, waiting=0, dead=0)
    assert slices[0] is not None
    assert payloads(messages_of(source, slices[0])) == numbered(2)


def test_an_owner_holds_one_slice(store: Harness) -> None:
    store.put(numbered(4))
    source = store.view()
    assert source.open(lease("a"), Limit(2), SEED) is not None
    with pytest.raises(UsageError, match="a holds a slice already"):
        source.open(lease("a"), Limit(2), SEED)


def test_a_lease_that_ran_out_goes_to_another(store: Harness) -> None:
    store.put(numbered(3))
    source = store.view()
    assert source.open(lease("a"), ANY, SEED) is not None
    assert source.open(lease("b"), ANY, SEED) is None
    store.expire()
    with pytest.raises(Fenced):
        source.hold(lease("a"))
    with pytest.raises(Fenced):
        source.extend(lease("a"))
    again = source.open(lease("b"), ANY, SEED)
    assert again is not None
    assert len(messages_of(source, again)) == 3
    with pytest.raises(Fenced):
        source.confirm(lease("a"))
    source.abort(lease("a"))  # returns nothing: it is b's now
    assert source.open(lease("c"), ANY, SEED) is None
    source.hold(lease("b"))
    source.confirm(lease("b"))
    with pytest.raises(Fenced):
        source.confirm(lease("a"))
    assert source.backlog() == Backlog(0, 0, 0, 0)


def test_a_held_lease_never_runs_out(store: Harness) -> None:
    store.put(numbered(3))
    source = store.view()
    source.open(lease("a"), ANY, SEED)
    source.extend(lease("a"))
    source.hold(lease("a"))
    source.hold(lease("a"))
    store.expire()
    assert source.open(lease("b"), ANY, SEED) is None
    source.extend(lease("a"))
    source.confirm(lease("a"))


@pytest.mark.parametrize("verb", ["hold", "extend"])
def test_a_lease_that_is_not_there_cannot_be_kept(store: Harness, verb: str) -> None:
    store.put(numbered(1))
    source = store.view()
    source.open(lease("a"), ANY, SEED)
    source.abort(lease("a"))
    with pytest.raises(Fenced):
        getattr(source, verb)(lease("a"))


def test_a_new_epoch_takes_the_leases_and_the_old_one_can_do_nothing(store: Harness) -> None:
    store.put(numbered(6))
    old = store.view(epoch=1)
    old.open(lease("a", 1), Limit(2), SEED)
    held = old.open(lease("b", 1), Limit(2), SEED)
    old.hold(lease("b", 1))
    new = store.view(epoch=2)
    assert set(new.recover(2)) == {"a", "b"}
    assert set(new.recover(2)) == {"a", "b"}  # its own ones too, with no further death
    for call in (
        lambda: old.open(lease("c", 1), ANY, SEED),
        lambda: old.hold(lease("a", 1)),
        lambda: old.extend(lease("b", 1)),
        lambda: old.confirm(lease("b", 1)),
        lambda: old.abort(lease("a", 1)),
        lambda: old.recover(1),
        lambda: old.subscribe("s", 1),
    ):
        with pytest.raises(Fenced):
            call()
    assert held is not None
    attached = new.attach(held.position, held.expected)
    assert attached == held
    assert payloads(messages_of(new, attached)) == [b"m2", b"m3"]
    new.confirm(lease("b", 2))
    with pytest.raises(Fenced):
        old.confirm(lease("b", 1))
    new.abort(lease("a", 2))
    again = new.open(lease("d", 2), ANY, SEED)
    assert again is not None
    assert payloads(messages_of(new, again)) == [b"m0", b"m1"]
    assert again.deaths == 1


def test_a_slice_that_took_two_drivers_down_is_opened_in_halves(store: Harness) -> None:
    store.put(numbered(5))
    store.view(epoch=1).open(lease("a", 1), ANY, SEED)
    for epoch in (2, 3):
        driver = store.view(epoch=epoch)
        assert driver.recover(epoch) == ("a" if epoch == 2 else "b2",)
        driver.abort(Lease("a" if epoch == 2 else "b2", epoch))
        slice_ = driver.open(lease(f"b{epoch}", epoch), ANY, SEED)
        assert slice_ is not None
        assert (slice_.expected.messages, slice_.deaths) == ((5, 1) if epoch == 2 else (3, 1))
    last = store.view(epoch=4)
    last.recover(4)
    last.abort(Lease("b3", 4))
    halves = list[int]()
    while (slice_ := last.open(lease(f"c{len(halves)}", 4), ANY, SEED)) is not None:
        assert len(messages_of(last, slice_)) == slice_.expected.messages
        halves.append(slice_.expected.messages)
    assert sorted(halves) == [1, 2, 2]


def test_a_single_message_keeps_its_deaths(store: Harness) -> None:
    store.put(numbered(1))
    owner = "a0"
    store.view(epoch=1).open(lease(owner, 1), ANY, SEED)
    for epoch in (2, 3, 4):
        driver = store.view(epoch=epoch)
        driver.recover(epoch)
        driver.abort(Lease(owner, epoch))
        owner = f"a{epoch}"
        slice_ = driver.open(lease(owner, epoch), ANY, SEED)
        assert slice_ is not None
        assert slice_.deaths == epoch - 1


def test_a_driver_that_dies_in_recovery_has_not_died_of_the_messages(store: Harness) -> None:
    store.put(numbered(1))
    store.view(epoch=1).open(lease("a", 1), ANY, SEED)
    for epoch in (2, 3, 4):
        store.view(epoch=epoch).recover(epoch)  # and dies
    last = store.view(epoch=5)
    last.recover(5)
    last.abort(Lease("a", 5))
    slice_ = last.open(lease("b", 5), ANY, SEED)
    assert slice_ is not None
    assert slice_.deaths == 1


def test_halves_on_request(store: Harness) -> None:
    store.put(numbered(5))
    source = store.view()
    slice_ = source.open(lease("a"), ANY, SEED)
    assert slice_ is not None
    source.split(slice_, lease("a"))
    source.split(slice_, lease("a"))  # repeated: no effect
    halves = [(owner, source.open(lease(owner), ANY, SEED)) for owner in ("b", "c")]
    found = list[bytes]()
    for owner, half in halves:
        assert half is not None
        assert half.expected.messages in (2, 3)
        found += payloads(messages_of(source, half))
        if half.expected.messages == 2:
            source.split(half, lease(owner))
    assert sorted(found) == numbered(5)
    single = source.open(lease("d"), ANY, SEED)
    assert single is not None
    assert single.expected.messages == 1
    source.split(single, lease("d"))
    assert source.backlog().ready == 2


def test_failed_messages_wait_then_come_in_a_batch_of_their_own(store: Harness) -> None:
    store.put(numbered(4))
    source = store.view()
    slice_ = source.open(lease("a"), Limit(3), SEED)
    assert slice_ is not None
    messages = messages_of(source, slice_)
    resolution = source.confirm(lease("a"), [messages[0].failed(), messages[2].failed("\x00\ud800")])
    assert set(resolution.retried) == {source.shown_id(m.id, m.origin) for m in (messages[0], messages[2])}
    assert resolution.dead == ()
    assert source.confirm(lease("a"), [messages[0].failed()]).retried == ()
    backlog = source.backlog()
    assert (backlog.ready, backlog.pending, backlog.waiting) == (1, 0, 2)
    assert backlog.next_retry_in_s is not None
    assert 0 < backlog.next_retry_in_s <= 1
    new = source.open(lease("b"), ANY, SEED)
    assert new is not None
    assert not new.retry
    assert payloads(messages_of(source, new)) == [b"m3"]
    source.hold(lease("b"))
    store.wait_for_retries()
    assert source.backlog().next_retry_in_s == 0
    retry = source.open(lease("c"), ANY, SEED)
    assert retry is not None
    assert retry.retry
    retried = messages_of(source, retry)
    assert retried == [messages[0], messages[2]]
    assert retry.replayed == tuple((m.id, m.origin) for m in retried)
    assert source.attach(retry.position, retry.expected) == retry
    assert source.expect(retry, SEED, frozenset()) == retry.expected
    source.confirm(lease("c"))
    source.confirm(lease("b"))
    assert source.backlog() == Backlog(0, 0, 0, 0)


def test_a_retry_slice_is_cut_returned_and_halved_as_others(store: Harness) -> None:
    store.put(numbered(6))
    source = store.view()
    slice_ = source.open(lease("a"), ANY, SEED)
    assert slice_ is not None
    source.confirm(lease("a"), [m.failed() for m in messages_of(source, slice_)])
    store.wait_for_retries()
    first = source.open(lease("b"), Limit(4), SEED)
    assert first is not None
    assert first.expected.messages == 4
    source.split(first, lease("b"))
    seen = list[bytes]()
    for owner in ("c", "d", "e"):
        part = source.open(lease(owner), Limit(4, bytes=4), SEED)
        assert part is not None
        assert part.retry
        assert part.expected.messages == 2
        seen += payloads(messages_of(source, part))
    assert sorted(seen) == numbered(6)
    source.abort(lease("e"))
    assert source.backlog() == Backlog(0, 4, 2, 0, next_retry_in_s=0)
    store.expire()
    again = source.open(lease("f"), Limit(1), SEED)
    assert again is not None
    assert again.expected.messages == 1


def test_a_message_that_fails_too_often_is_a_dead_letter_with_its_history(store: Harness) -> None:
    store.put([b"poison", b"good"])
    source = store.view()
    for attempt in range(1, store.max_attempts + 1):
        slice_ = source.open(lease(f"a{attempt}"), ANY, SEED)
        assert slice_ is not None
        poison = next(m for m in messages_of(source, slice_) if m.payload == b"poison")
        resolution = source.confirm(lease(f"a{attempt}"), [poison.failed(f"error {attempt}")])
        shown = source.shown_id(poison.id, poison.origin)
        last = attempt == store.max_attempts
        assert (resolution.retried, resolution.dead) == (((), (shown,)) if last else ((shown,), ()))
        store.wait_for_retries()
    assert source.open(lease("b"), ANY, SEED) is None
    assert source.backlog() == Backlog(0, 0, 0, 1)
    (letter,) = source.dead_letters()
    assert (letter.payload, letter.reason, letter.error) == (b"poison", "error", f"error {store.max_attempts}")
    assert (letter.times_opened, letter.times_failed) == (store.max_attempts, store.max_attempts)
    assert [entry["error"] for entry in letter.history] == [f"error {n + 1}" for n in range(store.max_attempts)]
    assert [entry["owner"] for entry in letter.history] == [f"a{n + 1}" for n in range(store.max_attempts)]
    assert letter.disposal is None


def dead_letter(store: Harness, payload: bytes = b"poison") -> str:
    """Put a message and fail it to death; gives its shown id."""
    store.put([payload])
    source = store.view()
    dead: tuple[str, ...] = ()
    while not dead:
        store.wait_for_retries()
        slice_ = source.open(lease("k"), ANY, SEED)
        assert slice_ is not None
        dead = source.confirm(lease("k"), [m.failed() for m in messages_of(source, slice_)]).dead
    return dead[0]


def test_a_requeued_dead_letter_comes_again_with_its_failures_counted_anew(store: Harness) -> None:
    shown = dead_letter(store)
    source = store.view()
    assert source.requeue(["1-999"], by="ann", why="typo") == ()
    assert source.requeue([shown], by="ann", why="repaired") == (shown,)
    assert source.requeue([shown], by="ann", why="again") == ()
    (letter,) = source.dead_letters()
    assert (letter.disposal, letter.by, letter.why) == ("requeue", "ann", "repaired")
    assert letter.disposed_at is not None
    slice_ = source.open(lease("a"), ANY, SEED)
    assert slice_ is not None
    assert slice_.retry
    (message,) = messages_of(source, slice_)
    assert source.confirm(lease("a"), [message.failed()]).retried == (shown,)
    store.wait_for_retries()
    source.open(lease("b"), ANY, SEED)
    source.confirm(lease("b"))
    assert source.backlog() == Backlog(0, 0, 0, 0)


def test_a_dropped_dead_letter_is_recorded_and_never_comes_again(store: Harness) -> None:
    shown = dead_letter(store)
    source = store.view()
    assert source.drop([shown], by="ann", why="spam") == (shown,)
    assert source.drop([shown], by="bob", why="too") == ()
    assert source.requeue([shown], by="bob", why="no") == ()
    (letter,) = source.dead_letters()
    assert (letter.disposal, letter.by, letter.payload) == ("drop", "ann", b"poison")
    assert source.open(lease("a"), ANY, SEED) is None
    assert source.backlog() == Backlog(0, 0, 0, 0)


def test_a_failure_of_a_message_that_is_not_in_the_slice_is_refused(store: Harness) -> None:
    store.put(numbered(4))
    source = store.view()
    source.open(lease("a"), Limit(2), SEED)
    other = source.open(lease("b"), Limit(2), SEED)
    assert other is not None
    with pytest.raises(UsageError):
        source.confirm(lease("a"), [messages_of(source, other)[0].failed()])
    source.confirm(lease("a"))


def test_fan_out_each_subscription_sees_every_message(store: Harness) -> None:
    store.put(numbered(4))
    one, two = store.view("one"), store.view("two")
    first = one.open(lease("a"), Limit(3), SEED)
    second = two.open(lease("a"), ANY, SEED)
    assert first is not None
    assert second is not None
    one.confirm(lease("a"), [messages_of(one, first)[0].failed()])
    assert payloads(messages_of(two, second)) == numbered(4)
    two.abort(lease("a"))
    assert (one.backlog().ready, one.backlog().waiting) == (1, 1)
    assert (two.backlog().ready, two.backlog().waiting) == (4, 0)


def test_messages_put_later_are_opened_later(store: Harness) -> None:
    source = store.view()
    seen = list[bytes]()
    for turn in range(4):
        store.put(numbered(5, turn * 5))
        slice_ = source.open(lease(str(turn)), Limit(3), SEED)
        assert slice_ is not None
        seen += payloads(messages_of(source, slice_))
    while (slice_ := source.open(lease(f"r{len(seen)}"), Limit(3), SEED)) is not None:
        seen += payloads(messages_of(source, slice_))
    assert seen == numbered(20)


def test_calls_before_subscribe_are_refused(store: Harness) -> None:
    source = MemoryHarness().store if isinstance(store, MemoryHarness) else PostgresHarness.queue(store)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="subscribe"):
        source.backlog()
