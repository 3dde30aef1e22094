"""What a store of pending messages promises of its rows: one suite over memory and Postgres."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import pytest
from support.pending_stores import MemoryStoreHarness, PostgresStoreHarness, StoreHarness
from support.queues import prepared_database

from stormproof.core.base.errors import UsageError
from stormproof.core.contract.dead_letter import Disposal, LetterHead
from stormproof.core.contract.source import Lease
from stormproof.core.pending.rows import Counts, Failed, LeaseFate, PendingRows, SliceRow
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres

A, B, C = Lease("a", 1), Lease("b", 1), Lease("c", 1)


@pytest.fixture(scope="module")
def shared_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """One database for all cases, which keep apart by their kind."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create database test_pending_rows template template0")
    yield prepared_database(postgres.database.with_name("test_pending_rows"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"drop database test_pending_rows with (force)")


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest) -> Iterator[StoreHarness]:
    if request.param == "memory":
        yield MemoryStoreHarness()
        return
    harness = PostgresStoreHarness(request.getfixturevalue("shared_database"), request.node.name)
    yield harness
    harness.store.close()


def advanced(
    rows: PendingRows, lease: Lease, first: int = 0, stop: int = 4, *, epoch: int = 1, bytes_: int = 40
) -> SliceRow:
    row = SliceRow(0, {"range": [first, stop]}, stop - first, bytes_, lease.owner, epoch, opened=1)
    return rows.advance(row, lease, {"next": stop})


def failed(
    id_: int, *, delay_s: float | None = 1.0, counted: bool = True, payload: bytes | None = b"payload", error: str = "e"
) -> Failed:
    entry = {"owner": "a", "reason": "error", "error": error}
    return Failed(id_, id_ + 1_000, payload, "error", error, {**entry}, counted=counted, delay_s=delay_s)


def waiting(store: StoreHarness, ids: Sequence[int] = (0, 1, 2), delay_s: float = 1.0) -> None:
    """Have messages fail once; the slice is gone afterwards."""
    store.start()
    with store.rows() as rows:
        advanced(rows, A)
    with store.rows() as rows:
        row = rows.take(A, delete=True)
        assert row is not None
        rows.fail(row, [failed(id_, delay_s=delay_s + id_) for id_ in ids])


def retry_slice(rows: PendingRows, ids: Sequence[int], lease: Lease = B) -> SliceRow:
    return rows.open(rows.insert(SliceRow(0, None, len(ids), 7 * len(ids)), ids), lease)


# ---- the subscription


def test_a_subscription_is_made_once_at_its_start(store: StoreHarness) -> None:
    with store.rows() as rows:
        assert rows.lock() is None
        assert rows.position() is None
        rows.subscribe(3, lambda: {"next": 7})
    with store.rows() as rows:
        rows.subscribe(9, lambda: pytest.fail("it is there already"))
        assert rows.lock() == (3, {"next": 7})
        assert rows.position() == {"next": 7}
    assert list(store.store.subscriptions(store.kind, "lines")) == ["s"]
    assert list(store.store.subscriptions(store.kind, "others")) == []


def test_an_epoch_only_rises(store: StoreHarness) -> None:
    store.start(epoch=2)
    with store.rows() as rows:
        rows.raise_epoch(5)
        rows.raise_epoch(4)
        assert rows.lock() == (5, {"next": 0})


def test_subscriptions_and_sources_are_kept_apart(store: StoreHarness) -> None:
    waiting(store, [0])
    store.start("t")
    with store.rows() as rows:
        advanced(rows, B)
    with store.store.rows(store.who(source="other")) as rows:
        rows.subscribe(1, lambda: {"next": 0})
    for who in (store.who("t"), store.who(source="other")):
        with store.store.rows(who) as rows:
            assert rows.counts() == Counts(0, 0, 0, 0, 0, None)
            assert (rows.free(), list(rows.unresolved()), list(rows.due(9))) == (None, [], [])
            assert rows.take(B, delete=True) is None
            assert rows.recover(9) == ()
            assert not rows.give_back(B)


def test_a_block_that_raises_leaves_everything_as_it_was(store: StoreHarness) -> None:
    waiting(store)
    store.advance(10)
    with store.rows() as rows:
        advanced(rows, A, 4, 9)
        retry_slice(rows, [0, 1])

    def seen() -> list[object]:
        with store.rows() as rows:
            letters = rows.dead_letters(lambda id_, origin: f"{origin}/{id_}")
            retries = [(one.id, one.times_failed, one.owner) for one in rows.waiting()]
            return [rows.lock(), rows.unresolved(), rows.due(9), dict(rows.retries_by_slice()), letters, retries]

    before = seen()
    with pytest.raises(LookupError), store.rows() as rows:  # noqa: PT012 - every change is made before it
        rows.subscribe(1, lambda: {"next": 1})
        advanced(rows, C, 9, 12)
        row = rows.take(A, delete=True)
        assert row is not None
        rows.fail(row, [failed(5), failed(6, delay_s=None)])
        taken = rows.take(B, delete=True)
        assert taken is not None
        rows.fail(taken, [failed(0, delay_s=None, payload=None)])
        rows.finish(taken)
        rows.raise_epoch(7)
        rows.recover(7)
        rows.dispose([(6, 1_006)], Disposal.DROP, by="ann", why="spam")
        raise LookupError
    assert seen() == before


# ---- slices


def test_a_slice_advances_the_position_and_an_owner_holds_one(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        row = advanced(rows, A)
        assert rows.position() == {"next": 4}
        assert row == SliceRow(row.id, {"range": [0, 4]}, 4, 40, "a", 1, opened=1)
        assert rows.unresolved() == [row]
        assert rows.counts() == Counts(0, 0, 4, 0, 0, None)
    with pytest.raises(UsageError, match="a holds a slice already"), store.rows() as rows:
        advanced(rows, A, 4, 6)
    with store.rows() as rows:
        assert rows.position() == {"next": 4}
        other = advanced(rows, B, 4, 6)
        rows.give_back(B)
    with pytest.raises(UsageError, match="a holds a slice already"), store.rows() as rows:
        rows.open(other, A)


def test_the_first_free_slice_is_that_which_was_made_first(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        first, second = advanced(rows, A), advanced(rows, B, 4, 8)
        assert rows.free() is None
        assert rows.give_back(B)
        found = rows.free()
        assert found is not None
        assert (found.id, found.owner) == (second.id, None)
        assert rows.give_back(A)
        assert not rows.give_back(A), "a repetition"
        found = rows.free()
        assert found is not None
        assert (found.id, found.at, found.opened) == (first.id, {"range": [0, 4]}, 1)
        assert rows.counts() == Counts(8, 0, 0, 0, 0, None)


def test_a_lease_that_ran_out_is_free_and_its_lapse_is_kept_once_another_opens(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        advanced(rows, A)
        advanced(rows, B, 4, 6)
        assert rows.touch(B, pin=True)
    store.advance(31)
    with store.rows() as rows:
        assert rows.counts() == Counts(4, 0, 2, 0, 0, None), "a held lease never runs out"
        assert not rows.touch(A, pin=True)
        assert not rows.touch(A, pin=False)
        assert rows.touch(B, pin=False)
        found = rows.free()
        assert found is not None
        assert (found.owner, found.epoch) == ("a", 1)
        assert rows.fate(A) == LeaseFate(1, lapsed=False)
        opened = rows.open(found, C)
        assert (opened.owner, opened.epoch, opened.opened) == ("c", 1, 2)
        assert rows.fate(A) == LeaseFate(1, lapsed=True)
        assert rows.fate(C) == LeaseFate(1, lapsed=False)
        assert rows.take(A, delete=True) is None
        assert rows.free() is None
    with store.rows() as rows:
        rows.forget_lapses()
        assert rows.fate(A).lapsed
    store.advance(8 * 24 * 3600)
    with store.rows() as rows:
        rows.forget_lapses()
        assert not rows.fate(A).lapsed


def test_a_lease_is_extended_to_so_many_seconds_from_now(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        advanced(rows, A)
    store.advance(20)
    with store.rows() as rows:
        assert rows.touch(A, pin=False)
    store.advance(20)
    with store.rows() as rows:
        assert rows.free() is None
        assert rows.touch(A, pin=True)
        assert rows.touch(A, pin=True), "it may be repeated"


def test_a_slice_is_taken_by_its_owner_in_its_epoch_alone(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        row = advanced(rows, A)
        assert rows.take(Lease("a", 2), delete=True) is None
        assert rows.take(B, delete=True) is None
        assert rows.take(A, delete=False) == row
        assert rows.take(A, delete=True) == row
        assert rows.take(A, delete=True) is None
        assert rows.unresolved() == []


def test_a_slice_is_shrunk_and_its_rest_comes_behind_what_is_there(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        row = advanced(rows, A)
        advanced(rows, B, 4, 6)
        rest = rows.insert(SliceRow(0, {"range": [1, 4]}, 3, 30, opened=1, deaths=2))
        rows.shrink(SliceRow(row.id, {"range": [0, 1]}, 1, 10, deaths=1))
        assert rows.give_back(B)
        found = list(rows.unresolved())
        assert [(one.at, one.messages, one.bytes, one.deaths, one.owner) for one in found] == [
            ({"range": [0, 1]}, 1, 10, 1, None),
            ({"range": [4, 6]}, 2, 40, 0, None),
            ({"range": [1, 4]}, 3, 30, 2, None),
        ]
        assert found[-1].id == rest.id
        assert rows.take(A, delete=True) is None, "it is returned"
        opened = rows.open(found[0], C)
        assert (opened.deaths, opened.opened) == (1, 2)


def test_recovery_takes_every_lease_and_counts_one_death_for_each_opening(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        row, _, returned = advanced(rows, A), advanced(rows, B, 4, 6), advanced(rows, C, 6, 7)
        rows.touch(B, pin=True)
        rows.give_back(C)
    for epoch in (2, 3):
        with store.rows() as rows:
            rows.raise_epoch(epoch)
            assert rows.recover(epoch) == ("a", "b")
            assert rows.recover(epoch) == ("a", "b"), "its own ones, too"
            assert {one.id: one.deaths for one in rows.unresolved()}[row.id] == 1
            assert sum(one.deaths for one in rows.unresolved()) == 1, "held and returned ones killed nobody"
            assert rows.fate(A).newest_epoch == epoch
            assert rows.take(A, delete=False) is None
    with store.rows() as rows:
        assert rows.give_back(Lease("a", 3))
        found = rows.free()
        assert found is not None
        rows.open(found, Lease("d", 3))
        rows.raise_epoch(4)
        assert rows.recover(4) == ("d", "b")
        assert {one.id: one.deaths for one in rows.unresolved()} == {found.id: 2, found.id + 1: 0, returned.id: 0}


# ---- failed messages


def test_failed_messages_wait_for_their_time_and_come_by_number(store: StoreHarness) -> None:
    waiting(store, [2, 0, 1])
    with store.rows() as rows:
        assert list(rows.due(9)) == []
        counts = rows.counts()
        assert (counts.pending, counts.waiting, counts.dead) == (0, 3, 0)
        assert counts.next_retry_in_s is not None
        assert 0 < counts.next_retry_in_s <= 1
        found = list(rows.waiting())
        assert [(one.id, one.origin, one.times_failed, one.owner) for one in found] == [
            (id_, id_ + 1_000, 1, None) for id_ in range(3)
        ]
    store.advance(2.5)
    with store.rows() as rows:
        assert [tuple(retry) for retry in rows.due(9)] == [(0, 1_000, 7, ""), (1, 1_001, 7, "")]
        assert [retry.id for retry in rows.due(1)] == [0], "the longest due is taken first"
        assert rows.counts().next_retry_in_s == 0


def test_no_message_waits_longer_than_is_said(store: StoreHarness) -> None:
    waiting(store, delay_s=86_400.0)  # they failed while the clock was a day ahead
    with store.rows() as rows:
        assert rows.wait_at_most(60.0) == 3
        assert rows.wait_at_most(60.0) == 0
    store.advance(50.0)
    with store.rows() as rows:
        assert list(rows.due(9)) == []
        assert rows.wait_at_most(0.0, {"reason": "retry_now", "by": "ann", "why": "now"}) == 3
    store.advance(0.001)
    with store.rows() as rows:
        assert [retry.id for retry in rows.due(9)] == [0, 1, 2]
        assert retry_slice(rows, [0, 1, 2]).is_retry
        assert rows.wait_at_most(0.0) == 0, "they do not wait"


def test_mates_come_all_or_not_at_all(store: StoreHarness) -> None:
    """`a` has 3 members, one of them elsewhere, `b` 4, three of them elsewhere; message 3 has no mates."""
    store.start()
    with store.rows() as rows:
        advanced(rows, A)
    with store.rows() as rows:
        row = rows.take(A, delete=True)
        assert row is not None
        mates = [(0, 1.0, "a", 3), (1, 50.0, "a", 3), (2, 2.0, "b", 4), (3, 3.0, "", 1)]
        named = [
            replace(failed(id_, delay_s=delay_s), mates=name, mates_messages=number)
            for id_, delay_s, name, number in mates
        ]
        rows.fail(row, named)
    store.advance(10)
    with store.rows() as rows:

        def due(messages: int, names: Collection[str] | None = None) -> list[int]:
            return [retry.id for retry in rows.due(messages, names)]

        assert rows.free() is None
        assert due(9) == [0, 1, 2, 3], "1 comes with 0, though it is not due"
        assert due(7) == [0, 1, 2]
        assert due(6) == [0, 1], "b has 4, of every source: they do not fit any more"
        assert due(1) == [0, 1], "mates are not cut"
        assert due(9, {"a"}) == [0, 1]
        assert due(9, {"a", ""}) == [0, 1, 3]
        assert due(1, {"b", "c"}) == [2]
        assert due(9, {"c"}) == []
        assert [retry.mates for retry in rows.due(9)] == ["a", "a", "b", ""]


def test_a_free_slice_is_found_by_its_mates(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        rows.advance(SliceRow(0, {"range": [0, 4]}, 4, 40, "a", 1, opened=1, mates="x"), A, {"next": 4})
        advanced(rows, B, 4, 6)
        assert rows.give_back(A)
        assert rows.give_back(B)
        for names, found in (({"x"}, "x"), ({"y"}, None), ({""}, ""), (None, "x")):
            row = rows.free(names)
            assert (None if row is None else row.mates) == found


def test_retries_belong_to_one_slice_and_move_with_its_parts(store: StoreHarness) -> None:
    waiting(store)
    store.advance(10)
    with store.rows() as rows:
        row = retry_slice(rows, [0, 1, 2])
        assert row.is_retry
        assert list(rows.due(9)) == []
        assert [retry.id for retry in rows.retries(row.id)] == [0, 1, 2]
        assert rows.counts() == Counts(0, 0, 3, 0, 0, None)
        assert [one.owner for one in rows.waiting()] == ["b"] * 3
        rest = rows.insert(SliceRow(0, None, 2, 14), [1, 2])
        rows.shrink(SliceRow(row.id, None, 1, 7))
        assert dict(rows.retries_by_slice()) == {row.id: 1, rest.id: 2}
        assert rows.counts() == Counts(0, 3, 0, 0, 0, None)
        assert dict(rows.failures(rest.id, [0, 1, 2, 99])) == {1: (1, 1), 2: (1, 1)}


def test_a_retry_that_fails_again_keeps_its_history_and_payload(store: StoreHarness) -> None:
    waiting(store)
    store.advance(10)
    with store.rows() as rows:
        retry_slice(rows, [0, 1, 2])
    with store.rows() as rows:
        row = rows.take(B, delete=True)
        assert row is not None
        rows.fail(
            row,
            [
                failed(0, payload=None, delay_s=5, error="again"),
                failed(1, payload=None, delay_s=None, error="at last"),
            ],
        )
        rows.finish(row)
        assert [(one.id, one.times_failed) for one in rows.waiting()] == [(0, 2)]
        counts = rows.counts()
        assert (counts.waiting, counts.dead, counts.pending) == (1, 1, 0)
        (letter,) = rows.dead_letters(lambda id_, origin: f"{origin}/{id_}")
        assert (letter.id, letter.origin, letter.shown_id, letter.subscription) == (1, 1_001, "1001/1", "s")
        assert (letter.payload, letter.reason, letter.error) == (b"payload", "error", "at last")
        assert (letter.times_opened, letter.times_failed) == (2, 2)
        assert [entry["error"] for entry in letter.history] == ["e", "at last"]
        assert all("at" in entry for entry in letter.history)


def test_one_that_is_merely_returned_counts_no_failure(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        advanced(rows, A)
        row = rows.take(A, delete=True)
        assert row is not None
        rows.fail(row, [failed(0, counted=False), failed(1)])
        assert [one.times_failed for one in rows.waiting()] == [0, 1]


@pytest.mark.parametrize("unpack", [False, True])
def test_retries_are_read_with_their_payloads_in_parts(store: StoreHarness, unpack: bool) -> None:
    waiting(store)
    store.advance(10)
    with store.rows() as rows:
        row = retry_slice(rows, [0, 1, 2])
    parts = [[0, 1], [], [2]]
    readers = store.store.readers(store.who(), row.id, parts, _halves if unpack else None)
    assert len(readers) == 3
    read = [[one for batch in reader.read(7, frozenset({1}), 1) for one in batch.to_pylist()] for reader in readers]
    assert [[(one["id"], one["origin"]) for one in part] for part in read] == [[(0, 1_000)], [], [(2, 1_002)]]
    assert {one["payload"] for part in read for one in part} == {"payload" if unpack else b"payload"}


def _halves(payloads: Sequence[bytes]) -> list[object]:
    import pyarrow as pa

    return [pa.array([payload.decode()]) for payload in payloads]


# ---- dead letters


def dead(store: StoreHarness) -> None:
    store.start()
    with store.rows() as rows:
        advanced(rows, A)
        row = rows.take(A, delete=True)
        assert row is not None
        rows.fail(row, [failed(id_, delay_s=None, payload=b"old%d" % id_) for id_ in (2, 0, 1)])


def test_dead_letters_are_read_in_parts_alike(store: StoreHarness) -> None:
    """What filters need is what the whole letter says, whatever the errors look like."""
    store.start()
    errors = ["KeyError: 'a'", "a.b.Error2: x", "no class", "A sentence: with a colon", "Größe: x", "", "x:y", "E: \n"]
    places = [["a"], [], [""], ["a", ""], ["", "b"], ["a", "b"], ["ü"], ["\U0001f600"]]
    with store.rows() as rows:
        advanced(rows, A, stop=len(errors))
    with store.rows() as rows:
        row = rows.take(A, delete=True)
        assert row is not None
        rows.fail(row, [failed(id_, delay_s=1.0, error=error) for id_, error in enumerate(errors)])
    for id_, components in enumerate(places):
        for place, component in enumerate(components):
            with store.rows() as rows:
                store.advance(10.0)
                retry_slice(rows, [id_])
                again = rows.take(B, delete=True)
                assert again is not None
                dies = place == len(components) - 1
                one = failed(id_, payload=None, delay_s=None if dies else 1.0, error=errors[id_])
                reason = "timeout" if id_ == 2 else one.reason
                rows.fail(again, [replace(one, reason=reason, entry={**one.entry, "component": component})])
                rows.finish(again)
    shown = "{}/{}".format
    with store.rows() as rows:
        rows.dispose([(0, 1_000), (5, 1_005)], Disposal.DROP, by="ann", why="")
        letters = rows.dead_letters(shown)
        assert len(letters) == sum(map(bool, places))
        assert list(rows.each_dead_letter(shown)) == list(letters)
        assert list(rows.letter_heads(shown, undecided=False)) == [LetterHead.of(letter) for letter in letters]
        undecided = [LetterHead.of(letter) for letter in letters if letter.disposal is None]
        assert list(rows.letter_heads(shown, undecided=True)) == undecided
        assert rows.letter_classes() == Counter((head.error_class, head.reason) for head in undecided)
        for letter in letters:
            assert rows.dead_letters(shown, of=(letter.id, letter.origin)) == (letter,)
        assert rows.dead_letters(shown, of=(0, 7)) == ()


def test_dead_letters_are_disposed_of_once(store: StoreHarness) -> None:
    dead(store)
    with store.rows() as rows:
        assert rows.counts().dead == 3
        assert list(rows.dispose([(0, 7), (9, 1_009)], Disposal.DROP, by="ann", why="")) == [], "not with this origin"
        assert list(rows.dispose([(0, 1_000)], Disposal.DROP, by="ann", why="spam")) == [(0, 1_000)]
        assert list(rows.dispose([(2, 1_002), (0, 1_000)], Disposal.REQUEUE, by="bob", why="mended")) == [(2, 1_002)]
        assert list(rows.dispose([(2, 1_002)], Disposal.DROP, by="bob", why="too late")) == []
        assert rows.counts().dead == 1
        letters = rows.dead_letters(lambda id_, _: str(id_))
        assert [(one.id, one.disposal, one.by, one.why) for one in letters] == [
            (2, Disposal.REQUEUE, "bob", "mended"),
            (0, Disposal.DROP, "ann", "spam"),
            (1, None, None, None),
        ]
        assert [tuple(retry) for retry in rows.due(9)] == [(2, 1_002, 4, "")], "due at once"
        assert [one.times_failed for one in rows.waiting()] == [0]


def test_an_edit_puts_a_payload_in_the_place_of_the_old_one(store: StoreHarness) -> None:
    dead(store)
    with store.rows() as rows:
        assert rows.undecided(1, 1_001) == b"old1"
        assert rows.undecided(1, 7) is None
        assert list(rows.dispose([(1, 1_001)], Disposal.EDIT, by="ann", why="typo", payload=b"new"))
        assert rows.undecided(1, 1_001) is None
        row = retry_slice(rows, [1])
    (reader,) = store.store.readers(store.who(), row.id, [[1]], None)
    assert [one["payload"] for batch in reader.read(7, frozenset(), 9) for one in batch.to_pylist()] == [b"new"]
    with store.rows() as rows:
        taken = rows.take(B, delete=True)
        assert taken is not None
        rows.fail(taken, [failed(1, payload=None, delay_s=None, error="still")])
        letters = [one for one in rows.dead_letters(lambda id_, _: str(id_)) if one.id == 1]
        assert [(one.payload, one.new_payload) for one in letters] == [(b"old1", b"new"), (b"new", None)]
        _, edit, _ = letters[1].history
        assert (edit["reason"], edit["by"], edit["why"]) == ("edit", "ann", "typo")
        assert edit["payload_sha256"] == hashlib.sha256(b"old1").hexdigest()
        assert edit["new_payload_sha256"] == hashlib.sha256(b"new").hexdigest()


# ---- several at once


def test_blocks_on_several_threads_lose_nothing(store: StoreHarness) -> None:
    """Each opens behind where the one before it came to: the lock comes before the position is read."""
    store.start()

    def run(worker: int) -> None:
        for turn in range(5):
            with store.rows() as rows:
                found = rows.lock()
                assert found is not None
                first = found[1]["next"]
                assert isinstance(first, int)
                advanced(rows, Lease(f"{worker}/{turn}", 1), first, first + 2)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.rows() as rows:
        assert [row.at for row in rows.unresolved()] == [{"range": [first, first + 2]} for first in range(0, 30, 2)]
        assert rows.position() == {"next": 30}
