"""What only a NATS stream has: one that is made again counts from 1, limits, consumers, and messages in work."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from nats.js.api import ConsumerConfig
from support.brokers import running, until
from support.brokers.harness import ANY, opened, tuples_of
from support.brokers.nats_server import NatsHarness, NatsServer
from support.queues import prepared_database

from stormproof import NatsSource
from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.contract.source import Lease
from stormproof.core.pending.continuity import Continuity, ContinuityLook, looks_in
from stormproof.core.postgres.database import Database
from stormproof.trident.audit.source import evidence_of

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.34)]

A, B, C = Lease("a", 1), Lease("b", 1), Lease("c", 1)


@pytest.fixture
def harness(request: pytest.FixtureRequest, database: Database, nats_server: NatsServer) -> Iterator[NatsHarness]:
    harness = NatsHarness(prepared_database(database), request.node.name, server=nats_server)
    yield harness
    harness.died()
    harness.close()


def consumer(harness: NatsHarness) -> Any:
    return harness.server.ask(lambda jetstream: jetstream.consumer_info(harness.stream, "stormproof-s"))


# ---- another stream of the same name


def test_a_stream_that_was_deleted_and_made_again_is_refused_by_name(harness: NatsHarness) -> None:
    harness.put([b"one"])
    source = harness.view()
    assert opened(source, A) == [b"one"]
    source.confirm(A)
    harness.server.delete(harness.stream)
    harness.server.make(harness.stream)
    harness.put([b"one"])  # sequence 1 again, with the payload of the one that was applied
    with pytest.raises(PositionMismatch, match=r"was deleted since .* on_new_stream='adopt'"):
        source.open(B, ANY, 7)
    with pytest.raises(PositionMismatch, match="was deleted since"):
        harness.view(epoch=2)


def test_a_consumer_of_the_same_name_that_somebody_made_again_does_not_hide_it(harness: NatsHarness) -> None:
    """Negative control of the identity: the server itself sees nothing wrong."""
    harness.put([b"one"])
    source = harness.view()
    assert opened(source, A) == [b"one"]
    config = consumer(harness).config
    harness.server.delete(harness.stream)
    harness.server.make(harness.stream)
    harness.server.ask(lambda jetstream: jetstream.add_consumer(harness.stream, config))
    harness.put([b"two"])
    with pytest.raises(PositionMismatch, match="was deleted since"):
        source.open(B, ANY, 7)


def test_a_new_stream_is_adopted_where_that_is_asked_for(harness: NatsHarness) -> None:
    harness.put([b"one"])
    source = harness.view(on_new_stream="adopt")
    assert opened(source, A) == [b"one"]
    source.confirm(A)
    harness.server.delete(harness.stream)
    harness.server.make(harness.stream)
    harness.put([b"one"])
    after = harness.view(epoch=2, on_new_stream="adopt")
    assert opened(after, Lease("b", 2)) == [b"one"], "a new message, though its sequence is an old one"


def test_a_stream_that_is_not_there_is_refused(harness: NatsHarness) -> None:
    source = NatsSource("NOWHERE", url=harness.server.url, database=harness.database)
    with pytest.raises(UsageError, match="nats stream add NOWHERE"):
        source.subscribe("s", 1)
    source.close()


# ---- messages that are gone


def purge(harness: NatsHarness, keep: int) -> None:
    harness.server.ask(lambda jetstream: jetstream.purge_stream(harness.stream, keep=keep))


def test_messages_that_were_removed_before_they_were_read_stop_the_run(harness: NatsHarness) -> None:
    harness.put([b"0", b"1"])
    source = harness.view()
    assert opened(source, A) == [b"0", b"1"]
    harness.put([b"2", b"3", b"4", b"5"])
    purge(harness, keep=1)
    for epoch in (1, 2):  # it is still so for the next driver
        with pytest.raises(PositionMismatch, match=r"3 messages between 2 and 6 .* on_gap='record'"):
            harness.view(epoch=epoch).open(Lease("b", epoch), ANY, 7)


def test_messages_that_were_removed_are_left_out_where_that_is_asked_for(
    harness: NatsHarness, caplog: pytest.LogCaptureFixture
) -> None:
    source = harness.view(on_gap="record")
    harness.put([b"0", b"1", b"2"])
    purge(harness, keep=1)
    with caplog.at_level(logging.ERROR):
        assert opened(source, A) == [b"2"]
    assert "2 messages between 0 and 3 were removed" in caplog.text


def test_messages_that_are_removed_once_they_are_written_down_are_no_loss(harness: NatsHarness) -> None:
    """Negative control: no alarm."""
    harness.put([b"0", b"1"])
    source = harness.view()
    assert source.open(A, ANY, 7) is not None
    purge(harness, keep=0)
    harness.put([b"2"])
    after = harness.view(epoch=2)
    after.recover(2)
    after.abort(Lease("a", 2))
    assert opened(after, Lease("b", 2)) == [b"0", b"1"]
    assert opened(after, Lease("c", 2)) == [b"2"]


async def published(subject: str, payload: bytes, jetstream: Any) -> None:
    await jetstream.publish(subject, payload)


async def deleted(stream: str, sequence: int, jetstream: Any) -> None:
    await jetstream.delete_msg(stream, sequence)


@pytest.mark.parametrize("limits", [{}, {"max_msgs_per_subject": 1}])
def test_messages_that_were_removed_between_others_stop_the_run(harness: NatsHarness, limits: dict[str, Any]) -> None:
    """By a purge of one subject, or by a limit for each: the stream still begins where it began."""
    server, stream = harness.server, f"{harness.name}_subjects"
    stream = re.sub(r"\W", "_", stream)
    server.make(stream, **limits)
    source = NatsSource(stream, url=server.url, database=harness.database)
    source.subscribe("s", 1)
    for n, subject in enumerate("ababa" if not limits else "abbba"):
        server.ask(partial(published, f"{stream}.{subject}", b"%d" % n))
    if not limits:
        server.ask(lambda jetstream: jetstream.purge_stream(stream, subject=f"{stream}.b"))
    with pytest.raises(PositionMismatch, match=r"[23] messages between \d and \d were removed .* on_gap='record'"):
        source.open(A, ANY, 7)
    source.close()
    recorded = NatsSource(stream, url=server.url, database=harness.database, on_gap="record", ack_wait_s=1.0)
    recorded.subscribe("s", 2)
    until(
        lambda: opened(recorded, Lease("b", 2)) == ([b"3", b"4"] if limits else [b"0", b"2", b"4"]), "they do not come"
    )
    assert [one.messages for one in looks_of(recorded)] == [3 if limits else 2]
    recorded.close()


def test_what_was_removed_before_a_subscription_began_is_not_missed(harness: NatsHarness) -> None:
    """Negative control: a new subscription begins at what is there, and what is removed after that is counted apart."""
    harness.put([b"%d" % n for n in range(8)])
    for sequence in (1, 3, 4):
        harness.server.ask(partial(deleted, harness.stream, sequence))
    source = harness.view(on_gap="record")
    harness.server.ask(lambda jetstream: jetstream.delete_msg(harness.stream, 6))
    assert opened(source, A) == [b"1", b"4", b"6", b"7"]
    assert [one.messages for one in looks_of(source)] == [1]


def test_messages_that_another_driver_holds_are_not_missed(harness: NatsHarness) -> None:
    """Negative control: they come once their time is over; one that was removed meanwhile is missed then."""
    old = harness.view(on_gap="record")
    harness.put([b"%d" % n for n in range(4)])
    assert len(old.receive(3)) == 3, "and its driver dies before they are written down"
    harness.died()
    after = harness.view(epoch=2, on_gap="record")
    assert opened(after, Lease("b", 2)) == [b"3"]
    assert looks_of(after) == []
    harness.server.ask(lambda jetstream: jetstream.delete_msg(harness.stream, 2))
    found: list[bytes] = []

    def came() -> bool:
        found.extend(opened(after, Lease(f"c{len(found)}", 2)))
        return len(found) == 2

    until(came, "they do not come")
    assert found == [b"0", b"2"]
    until(lambda: opened(after, Lease("d", 2)) == [] and bool(looks_of(after)), "it is not missed")
    assert [one.messages for one in looks_of(after)] == [1]


def test_everything_that_was_not_read_is_purged(harness: NatsHarness) -> None:
    source = harness.view(on_gap="record")
    harness.put([b"0", b"1"])
    purge(harness, keep=0)
    assert opened(source, A) == []
    assert [(one.verdict, one.messages) for one in looks_of(source)] == [(Continuity.REMOVED, 2)]
    harness.put([b"2"])
    assert opened(source, A) == [b"2"]


def test_with_a_subject_what_was_removed_cannot_be_told_and_the_audit_is_not_green(harness: NatsHarness) -> None:
    source = harness.view(subject=f"{harness.stream}.a")
    harness.put([b"0"])
    assert opened(source, A) == [b"0"]
    harness.server.ask(lambda jetstream: jetstream.publish(f"{harness.stream}.b", b"another's"))
    harness.put([b"1"])
    assert opened(source, B) == [b"1"]
    assert looks_of(source) == [], "negative control: a gap that is another's message is none"
    harness.put([b"2", b"3"])
    harness.server.ask(lambda jetstream: jetstream.delete_msg(harness.stream, 4))
    assert opened(source, C) == [b"3"]
    (look,) = looks_of(source)
    assert look.verdict is Continuity.UNKNOWN
    (loss,) = evidence_of(source).losses()
    assert "cannot be told" in loss.text
    assert loss.doubt


# ---- a server that is set back, and gives sequences again


@pytest.fixture
def own(database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsHarness]:
    """Over a server of the test's own."""
    with running(NatsServer, tmp_path_factory) as server:
        harness = NatsHarness(prepared_database(database), "S", server=server)
        yield harness
        harness.died()
        harness.close()


def set_back(harness: NatsHarness, new: int) -> None:
    """Five messages are received; then the server has three again, and so many new ones of the same payloads."""
    for payloads in ([b"0", b"1", b"2"], [b"3", b"4"]):
        harness.put(payloads)
        source = harness.view()
        assert opened(source, A) == payloads
        source.confirm(A)
        source.maintain()
        harness.died()
        if len(payloads) == 3:
            harness.server.save("three")
    harness.server.set_back("three")
    harness.put([b"3", b"4", b"5"][:new])


@pytest.mark.parametrize("new", [0, 1, 3])
def test_a_server_that_was_set_back_stops_the_run(own: NatsHarness, new: int) -> None:
    set_back(own, new)
    for epoch in (2, 3):
        with pytest.raises(PositionMismatch, match=r"the server was set back .* on_new_stream='same'"):
            own.view(epoch=epoch).open(Lease("b", epoch), ANY, 7)


@pytest.mark.parametrize("new", [1, 3])
def test_in_a_stream_that_was_set_back_new_messages_are_applied_and_known_ones_are_not(
    own: NatsHarness, new: int
) -> None:
    """Their sequences and payloads are those of messages that were applied."""
    set_back(own, new)
    after = own.view(epoch=2, on_new_stream="same")
    found = [one for n in range(4) for one in opened(after, Lease(f"b{n}", 2))]
    assert found == [b"3", b"4", b"5"][:new]
    assert [one.verdict for one in looks_of(after)] == [Continuity.REWOUND]
    assert any(loss.doubt for loss in evidence_of(after).losses())
    own.put([b"6"])
    assert opened(after, Lease("c", 2)) == [b"6"]
    again = own.view(epoch=3)
    assert opened(again, Lease("d", 3)) == []
    assert len(looks_of(again)) == 1


@pytest.mark.parametrize("only", ["", "jetstream/$G/streams/S/msgs"], ids=["whole", "messages"])
@pytest.mark.parametrize("how", ["purge", "delete"])
def test_a_stream_that_was_set_back_below_what_is_on_record_as_removed_loses_nothing(
    own: NatsHarness, how: str, only: str
) -> None:
    """The server gives the removed message's sequence again, to a new one. Its consumer may be newer than it is."""
    own.put([b"0", b"1"])
    source = own.view()
    assert opened(source, A) == [b"0", b"1"]
    source.confirm(A)
    source.maintain()
    own.died()
    own.server.save("two")
    own.put([b"unread"])
    own.server.ask(lambda j: j.purge_stream("S") if how == "purge" else j.delete_msg("S", 3))
    recorded = own.view(epoch=2, on_gap="record")
    assert opened(recorded, Lease("b", 2)) == []
    assert [one.messages for one in looks_of(recorded) if one.verdict is Continuity.REMOVED] == [1]
    own.died()
    own.server.set_back("two", only)
    with pytest.raises(PositionMismatch, match="the server was set back"):
        own.view(epoch=3).open(Lease("c", 3), ANY, 7)
    own.died()
    own.put([b"new", b"newer"])
    after = own.view(epoch=4)
    assert [one for n in range(3) for one in opened(after, Lease(f"d{n}", 4))] == [b"new", b"newer"]


def test_a_stream_that_was_set_back_is_read_as_a_new_one_where_that_is_asked_for(own: NatsHarness) -> None:
    set_back(own, 3)
    after = own.view(epoch=2, on_new_stream="adopt")
    found = [one for n in range(4) for one in opened(after, Lease(f"b{n}", 2))]
    assert found == [b"0", b"1", b"2", b"3", b"4", b"5"]
    again = own.view(epoch=3)
    assert opened(again, Lease("c", 3)) == []


def test_a_consumer_that_alone_was_deleted_goes_on_in_the_same_stream(harness: NatsHarness) -> None:
    harness.put([b"0", b"1"])
    source = harness.view(on_new_stream="same")
    assert opened(source, A) == [b"0", b"1"]
    source.confirm(A)
    harness.server.ask(lambda jetstream: jetstream.delete_consumer(harness.stream, "stormproof-s"))
    harness.put([b"2"])
    after = harness.view(epoch=2, on_new_stream="same")
    assert opened(after, Lease("b", 2)) == [b"2"]
    assert looks_of(after) == [], "all is known by its id"


def looks_of(source: NatsSource) -> list[ContinuityLook]:
    with source.rows() as rows:
        return looks_in(rows.position() or {})


# ---- the consumer


def test_what_is_in_work_is_not_delivered_again(harness: NatsHarness) -> None:
    harness.put([b"0"])
    source = harness.view(ack_wait_s=1.0)
    assert opened(source, A) == [b"0"]

    async def witness(jetstream: Any) -> list[int]:
        """Nobody keeps what this consumer pulled: it is delivered again, after the same time."""
        mine = ConsumerConfig(ack_wait=2.0)
        pulled = await jetstream.pull_subscribe(f"{harness.stream}.a", "witness", config=mine)
        return [(await pulled.fetch(1, timeout=30))[0].metadata.num_delivered for _ in range(2)]

    assert harness.server.ask(witness) == [1, 2]
    assert consumer(harness).num_redelivered == 0
    source.confirm(A)
    source.maintain()
    assert consumer(harness).num_ack_pending == 0


@pytest.mark.parametrize(
    ("config", "said"),
    [({"max_deliver": 3}, "gives messages up"), ({"filter_subject": "x"}, "reads other subjects")],
)
def test_a_consumer_that_would_lose_messages_is_refused(
    harness: NatsHarness, config: dict[str, Any], said: str
) -> None:
    if "filter_subject" in config:
        config = {"filter_subject": f"{harness.stream}.other"}
    made = ConsumerConfig(durable_name="mine", ack_policy="explicit", **config)  # type: ignore[arg-type]
    harness.server.ask(lambda jetstream: jetstream.add_consumer(harness.stream, made))
    with pytest.raises(UsageError, match=said):
        harness.view(consumer="mine")


def test_a_consumer_that_was_edited_since_and_another_subject_are_refused_at_the_next_start(
    harness: NatsHarness,
) -> None:
    first = harness.view(consumer="mine")
    first.close()

    async def edited(jetstream: Any) -> None:
        config = (await jetstream.consumer_info(harness.stream, "mine")).config
        await jetstream.add_consumer(harness.stream, config.evolve(max_deliver=3))

    with pytest.raises(UsageError, match="reads other subjects"):
        harness.view(epoch=2, consumer="mine", subject=f"{harness.stream}.other")
    harness.server.ask(edited)
    with pytest.raises(UsageError, match="gives messages up"):
        harness.view(epoch=3, consumer="mine")


def test_a_consumer_that_another_topology_reads_by_is_refused_by_name(harness: NatsHarness) -> None:
    harness.put([b"one"])
    first = harness.view(consumer="billing")
    other = harness.unsubscribed(consumer="billing")
    with pytest.raises(UsageError, match=r"the consumer billing is read by the topology 's' already.* consumer="):
        other.subscribe("another", 1)
    assert opened(first, A) == [b"one"]
    second = harness.unsubscribed(consumer="shipping")
    second.subscribe("another", 1)
    assert opened(second, A) == [b"one"], "a consumer of its own reads every message"
    for source in (other, second):
        source.close()


def test_metadata_stands_behind_the_fields_and_a_failed_message_keeps_it(harness: NatsHarness) -> None:
    names = ("subject", "sequence", "timestamp", "headers", "delivered")
    harness.options = {"metadata": names, "max_attempts": 1}
    started = datetime.now(UTC)
    subject = f"{harness.stream}.b"
    harness.server.ask(lambda jetstream: jetstream.publish(subject, b"a", headers={"trace": "7"}))
    source = harness.view()
    slice_ = source.open(A, ANY, 7)
    assert slice_ is not None
    (row,) = tuples_of(source, slice_)
    assert started - timedelta(seconds=1) < row.pop("timestamp") < datetime.now(UTC) + timedelta(seconds=1)
    known = {"subject": subject, "sequence": 1, "headers": [{"name": "trace", "value": "7"}], "delivered": 1}
    assert row == {"line": "a", **known}
    failure = MessageFailure(MessageId(0), 0, Token(0), FailureReason.ERROR, "b", "boom", "x", counted=True)
    assert source.confirm(A, [failure]).dead == ("0-0",)
    assert source.edit("0-0", b"new", by="me", why="test")
    again = source.open(B, ANY, 7)
    assert again is not None
    (edited,) = tuples_of(source, again)
    assert (edited["line"], edited["subject"], edited["sequence"]) == ("new", subject, 1)


def test_one_subject_of_several_is_read(harness: NatsHarness) -> None:
    harness.put([b"0"])
    harness.server.ask(lambda jetstream: jetstream.publish(f"{harness.stream}.b", b"1"))
    assert opened(harness.view(subject=f"{harness.stream}.b"), A) == [b"1"]


def test_a_server_that_is_away_is_waited_for_and_its_password_is_not_shown(database: Database) -> None:
    url = "nats://user:secret@127.0.0.1:1"
    source = NatsSource("s", url=url, database=prepared_database(database))
    with pytest.raises(StoreUnavailable) as raised:
        source.subscribe("s", 1)
    source.close()
    assert "secret" not in f"{raised.value} {raised.value.details} {source!r}"
