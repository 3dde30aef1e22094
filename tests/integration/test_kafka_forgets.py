"""A Kafka partition that lost its end, and was filled again: what was opened is not what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from support.brokers import until
from support.brokers.kafka import KafkaBroker
from support.kafka_source import KafkaHarness
from support.queues import prepared_database
from support.source_harness import messages_of
from support.verdicts import verified

from stormproof import KafkaSource, PostgresSink, Topology
from stormproof.core.base.errors import PositionMismatch, StoreUnavailable
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.pending.continuity import Continuity, looks_in
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.kafka.client import Cluster
from stormproof.core.source.kafka.lookahead import SAMPLE
from stormproof.core.source.kafka.position import OffsetRange
from stormproof.core.source.kafka.reader import messages_in
from stormproof.core.start.settings import Settings

pytestmark = [pytest.mark.postgres, pytest.mark.broker("kafka"), pytest.mark.sampled(0.05), pytest.mark.timeout(300)]

ANY = Limit(10_000)
EPOCHS = count(1)


@pytest.fixture
def harness(database: Database, own_kafka: KafkaBroker) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(prepared_database(database), own_kafka)
    yield harness
    harness.close()


def everything(source: KafkaSource, epoch: int) -> list[bytes]:
    """Open, read and confirm all there is."""
    found: list[bytes] = []
    for number in range(100):
        slice_ = source.open(lease := Lease(f"l{number}", epoch), ANY, 7)
        if slice_ is None:
            break
        found += [message.payload for message in messages_of(source, slice_)]
        source.confirm(lease)
    return found


def filled(harness: KafkaHarness, messages: int) -> list[bytes]:
    payloads = [b"%d" % number for number in range(messages)]
    harness.put(payloads)
    return payloads


@pytest.mark.parametrize("is_whole", [False, True], ids=["log", "whole"])
@pytest.mark.parametrize(("messages", "lost", "new"), [(5, 3, 0), (5, 3, 3), (5, 3, 9), (SAMPLE + 500, 9, 30)])
def test_a_partition_that_lost_its_end_and_was_filled_again_is_refused(
    harness: KafkaHarness, messages: int, lost: int, new: int, is_whole: bool
) -> None:
    """Its log alone, as after an unclean election; or the whole broker, from a copy."""
    broker = harness.broker
    before = filled(harness, messages)
    broker.save(harness.name)
    harness.put([b"the same"] * lost)
    source = harness.view()
    assert everything(source, 1) == [*before, *[b"the same"] * lost]
    source.close()
    broker.set_back(harness.name, "" if is_whole else f"data/{harness.name}-0")
    harness.put([b"the same"] * new)
    for epoch in (2, 3):
        with pytest.raises(PositionMismatch, match=r"the cluster lost messages that it had given out.* another name"):
            everything(harness.view(epoch=epoch), epoch)


def removed_unread(harness: KafkaHarness) -> None:
    assert len(driven(harness)) == 5
    harness.put([b"unread"])
    harness.broker.remove_below(harness.name, 0, 6)


def aborted(harness: KafkaHarness) -> None:
    with harness.broker.transaction(commit=False) as producer:
        producer.produce(harness.name, b"aborted", partition=0)
    harness.broker.until_stable(harness.name, 1)
    assert len(driven(harness)) == 5
    # As where the markers are counted with the messages before them, which they are if they come soon enough.
    harness.execute("update stormproof.pending_subscription set position = jsonb_set(position, '{places,0,3}', '7')")


def driven(harness: KafkaHarness) -> list[bytes]:
    """What a driver of its own finds."""
    harness.views.clear()
    epoch = next(EPOCHS)
    source = harness.view(epoch=epoch, on_gap="record")
    try:
        return everything(source, epoch)
    finally:
        source.close()


@pytest.mark.parametrize(("end", "is_whole"), [(removed_unread, False), (removed_unread, True), (aborted, False)])
def test_an_end_without_a_message_that_was_opened_is_not_filled_again_unseen(
    harness: KafkaHarness, end: Callable[[KafkaHarness], None], is_whole: bool
) -> None:
    """The last message that was opened is still the same then."""
    filled(harness, 5)
    harness.broker.save(harness.name)
    end(harness)
    driven(harness)
    harness.broker.set_back(harness.name, "" if is_whole else f"data/{harness.name}-0")
    harness.put([b"new"] * 9)
    with pytest.raises(PositionMismatch, match="the cluster lost messages that it had given out"):
        driven(harness)


@pytest.mark.parametrize("end", [removed_unread, aborted])
def test_a_restart_behind_an_end_without_a_message_that_was_opened_is_no_alarm(
    harness: KafkaHarness, end: Callable[[KafkaHarness], None]
) -> None:
    """Negative control."""
    filled(harness, 5)
    end(harness)
    driven(harness)
    harness.broker.restart()
    harness.put([b"new"])
    assert driven(harness) == [b"new"]
    ((position,),) = harness.execute("select position from stormproof.pending_subscription")
    assert {one.verdict for one in looks_in(position)} <= {Continuity.REMOVED}


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_end_of_transactions_without_a_message_is_no_loss_where_retention_takes_it(
    harness: KafkaHarness, tmp_path: Path, is_committed: bool
) -> None:
    """A transaction's marker, or one that was aborted: it was looked at, and has no message."""
    topology, settings = Topology("ends"), Settings(database_url=harness.database.adbc_uri, home=tmp_path)
    source = harness.unsubscribed()
    topology.stream("lines", source).into(PostgresSink("ends", database=harness.database))

    def run() -> None:
        topology.run(engine="inline", until_idle=True, settings=settings)

    with harness.broker.transaction(commit=is_committed) as producer:
        producer.produce(harness.name, b"in a transaction", partition=0)
    harness.broker.until_stable(harness.name, 1)
    run()
    run()
    harness.broker.remove_below(harness.name, 0, harness.broker.end(harness.name))
    run()
    harness.put([b"later"])
    run()
    assert verified("ends", harness.database).violations == ()
    with connect(harness.database, application_name="tests") as connection:
        rows = connection.execute("select line from ends order by 1").fetchall()
    assert rows == [("in a transaction",)] * is_committed + [("later",)]


def test_a_subscription_that_began_at_an_end_that_was_lost_since_is_refused(harness: KafkaHarness) -> None:
    filled(harness, 5)
    harness.broker.save(harness.name)
    harness.put([b"old"] * 3)
    source = harness.view(start="latest")
    assert everything(source, 1) == []
    source.close()
    harness.broker.set_back(harness.name, f"data/{harness.name}-0")
    harness.put([b"new"] * 9)
    with pytest.raises(PositionMismatch, match="the cluster lost messages that it had given out"):
        everything(harness.view(epoch=2, start="latest"), 2)


@pytest.mark.parametrize("restarts", [0, 2], ids=["same leader epochs", "fewer"])
def test_it_is_seen_while_a_driver_runs(harness: KafkaHarness, restarts: int) -> None:
    broker = harness.broker
    before = filled(harness, 5)
    broker.save(harness.name)
    harness.put([b"old"] * 3)
    for _ in range(restarts):
        broker.restart()
    source = harness.view()
    assert everything(source, 1) == [*before, b"old", b"old", b"old"]
    broker.set_back(harness.name)
    harness.put([b"new"] * 9)
    with pytest.raises(PositionMismatch, match="the cluster lost messages that it had given out"):
        until(lambda: bool(waited(source)), "it is never seen")


def test_a_topic_that_was_made_again_is_read_where_the_one_before_was(harness: KafkaHarness) -> None:
    """It has fewer leader epochs: a client that knows of later ones takes none of its, as long as it lives."""
    broker, cluster = harness.broker, Cluster(harness.broker.servers, answer_s=5.0)
    broker.restart()
    for payloads in ([b"a", b"b"], [b"c", b"d"]):
        harness.put(payloads)
        (found,) = messages_in(cluster, [OffsetRange(harness.name, 0, 0, 0, 2, 2, 0)]).values()
        assert [message.value() for message in found] == payloads
        broker.delete(harness.name)
        broker.topic(name=harness.name)


def waited(source: KafkaSource) -> list[bytes]:
    """As a run does, which waits for a cluster that is away."""
    with suppress(StoreUnavailable):
        return everything(source, 1)
    return []


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_broker_that_was_restarted_is_no_alarm(harness: KafkaHarness, is_removed: bool) -> None:
    """Negative control: also where retention took all that was read; leader epochs tell then."""
    filled(harness, 5)
    assert len(everything(harness.view(), 1)) == 5
    if is_removed:
        harness.broker.remove_below(harness.name, 0, 5)
    harness.broker.restart()
    harness.put([b"new"])
    after = harness.view(epoch=2)
    assert everything(after, 2) == [b"new"]
    with after.rows() as rows:
        assert looks_in(rows.position() or {}) == []
