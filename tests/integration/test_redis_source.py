"""What only a Redis stream has: a stream that is made again, entries that are trimmed, fields, other consumers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from support.brokers import running
from support.brokers.harness import ANY, opened, tuples_of
from support.brokers.redis_server import RedisHarness, RedisServer
from support.queues import prepared_database

from stormproof import RedisStreamSource
from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.contract.source import Lease
from stormproof.core.pending.continuity import Continuity, ContinuityLook, looks_in
from stormproof.core.postgres.database import Database
from stormproof.core.source.redis_streams.client import SWEEP
from stormproof.trident.audit.source import evidence_of

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.34)]

A, B, C = Lease("a", 1), Lease("b", 1), Lease("c", 1)


@pytest.fixture
def harness(request: pytest.FixtureRequest, database: Database, redis_server: RedisServer) -> Iterator[RedisHarness]:
    harness = RedisHarness(prepared_database(database), request.node.name, server=redis_server)
    yield harness
    harness.close()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis_server.client() as client:
        yield client


# ---- another stream of the same name


def test_a_stream_that_was_deleted_and_made_again_is_refused_by_name(harness: RedisHarness, client: Any) -> None:
    client.xadd(harness.name, {"v": "one"}, id="1-1")
    source = harness.view()
    assert opened(source, A) == [b"one"]
    source.confirm(A)
    client.delete(harness.name)
    client.xadd(harness.name, {"v": "one"}, id="1-1")  # its id and payload are those of one that was applied
    with pytest.raises(PositionMismatch, match=r"was deleted since .* on_new_stream='adopt'"):
        source.open(B, ANY, 7)
    with pytest.raises(PositionMismatch, match="was deleted since"):
        harness.view(epoch=2)


def test_a_group_of_the_same_name_that_somebody_made_again_is_refused(harness: RedisHarness, client: Any) -> None:
    """Negative control of the identity: the server itself sees nothing wrong."""
    harness.put([b"one"])
    source = harness.view()
    assert opened(source, A) == [b"one"]
    client.delete(harness.name)
    client.xgroup_create(harness.name, "stormproof:s", id="0", mkstream=True)
    harness.put([b"two"])
    with pytest.raises(PositionMismatch, match="was deleted since"):
        source.open(B, ANY, 7)


def test_a_new_stream_is_adopted_where_that_is_asked_for(harness: RedisHarness, client: Any) -> None:
    client.xadd(harness.name, {"v": "one"}, id="1-1")
    source = harness.view(on_new_stream="adopt")
    assert opened(source, A) == [b"one"]
    source.confirm(A)
    client.delete(harness.name)
    client.xadd(harness.name, {"v": "one"}, id="1-1")
    after = harness.view(epoch=2, on_new_stream="adopt")
    assert opened(after, Lease("b", 2)) == [b"one"], "a new message, though its id is an old one"


def test_a_group_that_alone_was_deleted_goes_on_in_the_same_stream(harness: RedisHarness, client: Any) -> None:
    harness.put([b"one", b"two"])
    source = harness.view(on_new_stream="same")
    assert sorted(opened(source, A)) == [b"one", b"two"]
    source.confirm(A)
    client.xgroup_destroy(harness.name, source._here.name)  # pyright: ignore[reportPrivateUsage]
    harness.put([b"three"])
    assert opened(source, B) == [], "it is noticed while it runs"
    assert opened(source, B) == [b"three"]
    source.confirm(B)
    client.xgroup_destroy(harness.name, source._here.name)  # pyright: ignore[reportPrivateUsage]
    harness.put([b"four"])
    after = harness.view(epoch=2, on_new_stream="same")
    assert opened(after, Lease("b", 2)) == [b"four"], "the next driver"
    assert after.journal_counts().suppressed == 5
    after.confirm(Lease("b", 2))
    client.xgroup_destroy(harness.name, source._here.name)  # pyright: ignore[reportPrivateUsage]
    control = harness.view(epoch=3, on_new_stream="adopt")
    assert len(opened(control, Lease("c", 3))) == 4, "negative control: taken for a new stream, all is applied again"


# ---- entries that are gone


def test_entries_that_were_trimmed_before_they_were_read_stop_the_run(harness: RedisHarness, client: Any) -> None:
    harness.put([b"0", b"1"])
    source = harness.view()
    assert opened(source, A) == [b"0", b"1"]
    harness.put([b"2", b"3", b"4", b"5"])
    client.xtrim(harness.name, maxlen=1, approximate=False)
    for epoch in (1, 2):  # it is still so for the next driver
        with pytest.raises(PositionMismatch, match=r"3 entries between .* on_gap='record'"):
            harness.view(epoch=epoch).open(Lease("b", epoch), ANY, 7)


def test_entries_that_were_trimmed_are_left_out_where_that_is_asked_for(
    harness: RedisHarness, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = harness.view(on_gap="record")
    harness.put([b"0", b"1", b"2"])
    client.xtrim(harness.name, maxlen=1, approximate=False)
    with caplog.at_level(logging.ERROR):
        assert opened(source, A) == [b"2"]
    assert "2 entries between 0-0 and" in caplog.text


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_new_subscription_begins_at_what_is_there(harness: RedisHarness, client: Any, start: str) -> None:
    """What was trimmed or deleted before it began is not missed; what is trimmed after that is."""
    ids = harness.server.put(harness.name, [b"0", b"1", b"2", b"3"])
    client.xdel(harness.name, ids[2])
    client.xtrim(harness.name, maxlen=2, approximate=False)
    source = harness.view(start=start)
    harness.put([b"4"])
    assert opened(source, A) == ([b"1", b"3", b"4"] if start == "earliest" else [b"4"])
    assert lost_of(source) == []
    harness.put([b"5", b"6"])
    client.xtrim(harness.name, maxlen=1, approximate=False)
    with pytest.raises(PositionMismatch, match="1 entries between"):
        source.open(B, ANY, 7)


@pytest.mark.parametrize("deleted", [[0], [1], [3], [1, 2]])
def test_entries_that_were_deleted_before_the_first_read_were_withdrawn(
    harness: RedisHarness, client: Any, deleted: list[int]
) -> None:
    ids = harness.server.put(harness.name, [b"0", b"1", b"2", b"3"])
    source = harness.view()
    client.xdel(harness.name, *(ids[one] for one in deleted))
    found = opened(source, A)
    assert found == [b"%d" % one for one in range(4) if one not in deleted]
    assert lost_of(source) == []
    assert evidence_of(source).notes() == (
        f"{len(deleted)} entries were deleted one by one (XDEL) before they were read",
    )


@pytest.mark.parametrize("deleted", [0, 1, 3])
def test_what_is_trimmed_behind_a_deleted_entry_stops_the_run(harness: RedisHarness, client: Any, deleted: int) -> None:
    """One deletion makes the server's own count of what the group has read unknown."""
    ids = harness.server.put(harness.name, [b"0", b"1"])
    source = harness.view()
    assert opened(source, A) == [b"0", b"1"]
    ids += harness.server.put(harness.name, [b"2", b"3", b"4", b"5", b"6"])
    client.xdel(harness.name, ids[deleted])
    client.xtrim(harness.name, maxlen=1, approximate=False)
    for epoch in (1, 2):
        with pytest.raises(PositionMismatch, match=r"4 entries between .* on_gap='record'"):
            harness.view(epoch=epoch).open(Lease("b", epoch), ANY, 7)
    recorded = harness.view(epoch=3, on_gap="record")
    assert opened(recorded, Lease("c", 3)) == [b"6"]
    verdict = Continuity.UNKNOWN if deleted == 3 else Continuity.REMOVED
    assert [(one.verdict, one.messages) for one in lost_of(recorded)] == [(verdict, 4)]


def test_entries_that_somebody_set_the_group_behind_stop_the_run(harness: RedisHarness, client: Any) -> None:
    source = harness.view()
    harness.put([b"0"])
    assert opened(source, A) == [b"0"]
    harness.put([b"1", b"2"])
    client.xgroup_setid(harness.name, "stormproof:s", "$")
    with pytest.raises(PositionMismatch, match="2 entries between"):
        source.open(B, ANY, 7)
    recorded = harness.view(epoch=2, on_gap="record")
    assert opened(recorded, Lease("b", 2)) == []
    harness.put([b"3"])
    assert opened(recorded, Lease("c", 2)) == [b"3"]


@pytest.mark.parametrize("new", [0, 1, 4])
def test_a_server_that_was_set_back_stops_the_run_or_is_read_on(
    database: Database, tmp_path_factory: pytest.TempPathFactory, new: int
) -> None:
    with running(RedisServer, tmp_path_factory) as server:
        harness = RedisHarness(prepared_database(database), "s", server=server)
        harness.put([b"0", b"1", b"2"])
        source = harness.view()
        assert opened(source, A) == [b"0", b"1", b"2"]
        source.confirm(A)
        source.maintain()
        server.save("three")
        harness.put([b"3", b"4"])
        after = harness.view(epoch=2)
        assert opened(after, Lease("b", 2)) == [b"3", b"4"]
        server.set_back("three")
        harness.put([b"3", b"4", b"5", b"6"][:new])
        for epoch in (3, 4):
            with pytest.raises(PositionMismatch, match=r"the server was set back .* on_new_stream='same'"):
                harness.view(epoch=epoch).open(Lease("c", epoch), ANY, 7)
        later = harness.view(epoch=5, on_new_stream="same")
        found = [one for n in range(3) for one in opened(later, Lease(f"d{n}", 5))]
        assert found == [b"3", b"4", b"5", b"6"][:new]
        assert [one.verdict for one in lost_of(later)] == [Continuity.REWOUND]
        harness.put([b"7"])
        assert opened(later, Lease("e", 5)) == [b"7"]
        harness.close()


@pytest.mark.parametrize("how", ["trim", "delete"])
@pytest.mark.parametrize("left", [0, 2])
def test_a_server_that_was_set_back_below_what_was_removed_unread_stops_the_run(
    database: Database, tmp_path_factory: pytest.TempPathFactory, how: str, left: int
) -> None:
    """`left` of the entries that were read are still in the copy."""
    with running(RedisServer, tmp_path_factory) as server, server.client() as client:
        harness = RedisHarness(prepared_database(database), "s", server=server)
        harness.put([b"0", b"1"])
        source = harness.view()
        assert opened(source, A) == [b"0", b"1"]
        source.confirm(A)
        source.maintain()
        client.xtrim("s", maxlen=left, approximate=False)
        server.save("two")
        (unread,) = server.put("s", [b"unread"])
        if how == "trim":
            client.xtrim("s", maxlen=0, approximate=False)
        else:
            client.xdel("s", unread)
        recorded = harness.view(epoch=2, on_gap="record")
        assert opened(recorded, Lease("b", 2)) == []
        assert [one.messages for one in lost_of(recorded)] == [1] * (how == "trim")
        server.set_back("two")
        for epoch in (3, 4):
            with pytest.raises(PositionMismatch, match=r"the server was set back .* on_new_stream='same'"):
                harness.view(epoch=epoch, on_gap="record").open(Lease("c", epoch), ANY, 7)
            server.put("s", [b"new", b"newer"])
        later = harness.view(epoch=5, on_new_stream="same")
        found = [one for n in range(3) for one in opened(later, Lease(f"d{n}", 5))]
        assert found == [b"new", b"newer"] * 2
        harness.close()


def test_an_entry_that_a_driver_was_given_and_that_was_removed_since_is_on_record(
    harness: RedisHarness, client: Any
) -> None:
    old = harness.view(on_gap="record")
    harness.put([b"0", b"1"])
    assert len(old.receive(10)) == 2, "and its driver dies before they are written down"
    client.xtrim(harness.name, maxlen=1, approximate=False)
    after = harness.view(epoch=2, on_gap="record")
    assert opened(after, Lease("b", 2)) == [b"1"]
    assert [one.messages for one in lost_of(after)] == [1]


def test_a_gap_is_refused_also_where_a_new_stream_would_be_adopted(harness: RedisHarness, client: Any) -> None:
    harness.put([b"0", b"1"])
    old = harness.view()
    assert len(old.receive(10)) == 2
    client.xtrim(harness.name, maxlen=1, approximate=False)
    with pytest.raises(PositionMismatch, match="1 entries between"):
        harness.view(epoch=2, on_new_stream="adopt").open(Lease("b", 2), ANY, 7)


def lost_of(source: RedisStreamSource) -> list[ContinuityLook]:
    with source.rows() as rows:
        return looks_in(rows.position() or {})


# ---- the consumer group


def test_a_group_that_another_topology_reads_is_refused_by_name(harness: RedisHarness) -> None:
    harness.put([b"one"])
    first = harness.view(group="billing")
    other = harness.unsubscribed(group="billing")
    with pytest.raises(UsageError, match=r"the consumer group billing is read by the topology 's' already.* group="):
        other.subscribe("another", 1)
    apart = harness.unsubscribed(group="billing", name="another name")
    with pytest.raises(UsageError, match="the consumer group billing is read by the topology 's' already"):
        apart.subscribe("s", 1)
    assert opened(first, A) == [b"one"]
    second = harness.unsubscribed(group="shipping")
    second.subscribe("another", 1)
    assert opened(second, A) == [b"one"], "a group of its own reads every entry"
    for source in (other, apart, second):
        source.close()


# ---- what is known of an entry


def test_metadata_stands_behind_the_fields_and_a_failed_entry_keeps_it(harness: RedisHarness, client: Any) -> None:
    harness.options = {"metadata": ("id", "timestamp", "fields"), "max_attempts": 1, "field": "line"}
    client.xadd(harness.name, {"line": "a", "trace": b"\xff"}, id="1700000000123-7")
    client.xadd(harness.name, {"line": "b"}, id=f"{2**63}-1")
    source = harness.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    first, second = tuples_of(source, slice_)
    assert first == {
        "line": "a",
        "id": "1700000000123-7",
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC),
        "fields": [{"name": "line", "value": b"a"}, {"name": "trace", "value": b"\xff"}],
    }
    assert (second["line"], second["timestamp"]) == ("b", None), "an id of the producer's own that is no time"
    failure = MessageFailure(MessageId(0), 0, Token(0), FailureReason.ERROR, "b", "boom", "x", counted=True)
    assert source.confirm(A, [failure]).dead == ("0-0",)
    with pytest.raises(UsageError, match="a JSON object of its fields"):
        source.edit("0-0", b"new", by="me", why="test")
    assert source.edit("0-0", b'{"line": "new", "more": "1"}', by="me", why="test")
    again = source.open(B, ANY, 7)
    assert again is not None
    fields = [{"name": "line", "value": b"new"}, {"name": "more", "value": b"1"}]
    assert tuples_of(source, again) == [{**first, "line": "new", "fields": fields}]


def test_entries_that_are_trimmed_once_they_are_written_down_are_no_loss(harness: RedisHarness, client: Any) -> None:
    """Negative control: no alarm."""
    harness.put([b"0", b"1"])
    source = harness.view()
    assert source.open(A, ANY, 7) is not None
    client.xtrim(harness.name, maxlen=0, approximate=False)
    harness.put([b"2"])
    after = harness.view(epoch=2)
    after.recover(2)
    after.abort(Lease("a", 2))
    assert opened(after, Lease("b", 2)) == [b"0", b"1"]
    assert opened(after, Lease("c", 2)) == [b"2"]
    after.confirm(Lease("b", 2))
    after.confirm(Lease("c", 2))
    after.maintain()
    assert harness.left() == 0


def test_entries_that_a_dead_driver_was_given_and_that_are_trimmed_stop_the_run(
    harness: RedisHarness, client: Any
) -> None:
    harness.put([b"0", b"1"])
    harness.view()
    client.xreadgroup("stormproof:s", "stormproof-driver:dead", {harness.name: ">"}, count=1)
    client.xtrim(harness.name, maxlen=1, approximate=False)
    with pytest.raises(PositionMismatch, match=r"1 entries between .* \(given to a driver\) and"):
        harness.view().open(A, ANY, 7)


# ---- other consumers


def test_what_a_replaced_driver_reads_is_taken_over_by_the_one_that_runs(harness: RedisHarness, client: Any) -> None:
    harness.put([b"0"])
    source = harness.view()
    assert opened(source, A) == [b"0"]
    harness.put([b"1"])
    client.xreadgroup("stormproof:s", "stormproof-driver:replaced", {harness.name: ">"})
    source._looked_s = float("-inf")
    assert opened(source, B) == [b"1"]
    source.confirm(A)
    source.confirm(B)
    source.maintain()
    assert harness.left() == 0


def test_what_a_consumer_holds_that_works_is_left_to_it(harness: RedisHarness, client: Any) -> None:
    client.xgroup_create(harness.name, "mine", id="0", mkstream=True)
    harness.put([b"0", b"1"])
    client.xreadgroup("mine", "another", {harness.name: ">"}, count=1)
    assert opened(harness.view(group="mine", claim_idle_s=60), A) == [b"1"]


def test_consumers_of_dead_drivers_are_removed_and_what_they_hold_is_not(harness: RedisHarness, client: Any) -> None:
    harness.put([b"0"])
    source = harness.view()
    client.xgroup_createconsumer(harness.name, "stormproof:s", "stormproof-driver:empty")
    client.xreadgroup("stormproof:s", "stormproof-driver:full", {harness.name: ">"})
    source._here._client.eval(SWEEP, 1, harness.name, "stormproof:s", "stormproof-driver:", -1)
    names = {one["name"].decode() for one in client.xinfo_consumers(harness.name, "stormproof:s")}
    assert "stormproof-driver:full" in names
    assert "stormproof-driver:empty" not in names
    assert len(names) == 2, "and the identity"


# ---- payloads


@pytest.mark.parametrize(
    ("options", "fields", "payload"),
    [
        ({}, {"any": "a"}, b"a"),
        ({}, {"line": "a", "other": "b"}, b"a"),
        ({"field": "other"}, {"line": "a", "other": "b"}, b"b"),
        ({"schema": "n long, w string"}, {"n": "1", "w": "2", "x": "3"}, b'{"n": 1, "w": "2"}'),
        ({"schema": "n long, w string"}, {"doc": '{"n": 1}'}, b'{"n": 1}'),
    ],
)
def test_the_fields_of_an_entry_become_a_payload(
    harness: RedisHarness, client: Any, options: dict[str, Any], fields: dict[str, str], payload: bytes
) -> None:
    client.xadd(harness.name, fields)
    assert opened(harness.view(**options), A) == [payload]


# ---- the server and its answers


def test_a_server_that_is_away_is_waited_for_and_its_password_is_not_shown(database: Database) -> None:
    url = "redis://user:secret@127.0.0.1:1"
    source = RedisStreamSource("s", url=url, database=prepared_database(database))
    with pytest.raises(StoreUnavailable) as raised:
        source.subscribe("s", 1)
    source.drop_connections()
    assert "secret" not in f"{raised.value} {raised.value.details} {source!r}"
    source = RedisStreamSource("s", url="http://user:secret@h", database=prepared_database(database))
    with pytest.raises(UsageError) as wrong:
        source.subscribe("s", 1)
    source.drop_connections()
    assert "secret" not in str(wrong.value)


def test_a_key_that_is_no_stream_is_refused(harness: RedisHarness, client: Any) -> None:
    client.set(harness.name, "text")
    with pytest.raises(UsageError, match="is not a stream"):
        harness.view()


# ---- messages' ids


def test_a_message_is_found_by_its_entry_and_no_other_id_is_taken_for_one(harness: RedisHarness, client: Any) -> None:
    for entry in ("1700000000000-0", "1700000000000-1", "1700000000000-2"):
        client.xadd(harness.name, {"v": entry}, id=entry)
    source = harness.view()
    assert len(opened(source, A)) == 3
    evidence = evidence_of(source)
    known = [evidence.named(f"1700000000000-{at}") for at in range(3)]
    assert known == [evidence.named(shown) for shown in known], "the record's own ids are taken as well"
    assert len(set(known)) == 3
    for never in ("1700000000000-3", "1-1", "5-2", "0-99"):
        with pytest.raises(UsageError, match=f"message {never}: there is none on record"):
            evidence.named(never)
