"""A compacted topic whose last opened message is gone, at a broker that was set back to the same leader epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.brokers import until
from support.brokers.kafka import KafkaBroker
from support.kafka_source import KafkaHarness
from support.queues import prepared_database
from support.source_harness import messages_of

from stormproof import KafkaSource
from stormproof.core.base.errors import PositionMismatch
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.pending.continuity import Continuity, looks_in
from stormproof.core.postgres.database import Database

pytestmark = [pytest.mark.postgres, pytest.mark.broker("kafka"), pytest.mark.sampled(0.2), pytest.mark.timeout(300)]

COMPACTED = {
    "cleanup_policy": "compact",
    "min_cleanable_dirty_ratio": "0.01",
    "max_compaction_lag_ms": "100",
    "min_compaction_lag_ms": "0",
}
LONG_AGO_MS = 1_000_000_000_000


@pytest.fixture
def harness(database: Database, own_kafka: KafkaBroker) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(prepared_database(database), own_kafka)
    own_kafka.configure(harness.name, retention_ms="-1")  # also of messages with old times
    yield harness
    harness.close()


def put(harness: KafkaHarness, *keys: str, **message: Any) -> None:
    for key in keys:
        harness.broker.put(harness.name, [key.encode()], key=key.encode(), **message)


def compact(harness: KafkaHarness, *left: int) -> None:
    """Have the broker roll the segment and compact it, until these offsets alone are left, and the newest message's."""
    harness.broker.configure(harness.name, segment_ms="100", **COMPACTED)
    put(harness, "end")
    until(lambda: offsets(harness)[:-1] == [*left], "nothing is compacted")
    harness.broker.configure(harness.name, segment_ms="604800000", cleanup_policy="delete")


def offsets(harness: KafkaHarness) -> list[int]:
    from confluent_kafka import Consumer, TopicPartition

    put(harness, "end")  # a segment is rolled as the next message comes
    consumer = Consumer(
        {"bootstrap.servers": harness.broker.servers, "group.id": "looks", "enable.partition.eof": True}
    )
    consumer.assign([TopicPartition(harness.name, 0, 0)])
    found = list[int]()
    while (message := consumer.poll(30)) is not None and message.error() is None:
        found += [message.offset() or 0] * (message.key() != b"end")
    consumer.close()
    return [*found, -1]


def driven(harness: KafkaHarness, epoch: int, **options: Any) -> list[bytes]:
    """What a driver of its own finds, and how it ends when all is applied."""
    harness.views.clear()
    source: KafkaSource = harness.view(epoch=epoch, **options)
    found: list[bytes] = []
    try:
        source.recover(epoch)
        while (slice_ := source.open(lease := Lease(f"l{epoch} {len(found)}", epoch), Limit(10_000), 7)) is not None:
            found += [message.payload for message in messages_of(source, slice_)]
            source.confirm(lease)
        source.maintain()
    finally:
        source.close()
    return found


def verdicts(harness: KafkaHarness) -> list[Continuity]:
    ((position,),) = harness.execute("select position from stormproof.pending_subscription")
    return [one.verdict for one in looks_in(position)]


def set_back(harness: KafkaHarness, **message: Any) -> None:
    """Read six, lose the last three, and have others in their place: `lost` at offset 4 is below the position."""
    put(harness, "a", "b", "c")
    harness.broker.save(harness.name)
    put(harness, "d", "e", "f", **message)
    assert len(driven(harness, 1)) == 6
    harness.broker.set_back(harness.name)
    put(harness, "x", "lost", "x", "x", **message)
    compact(harness, 0, 1, 2, 4, 6)


def test_a_message_below_the_position_of_a_broker_that_was_set_back_is_not_lost_unseen(harness: KafkaHarness) -> None:
    set_back(harness)
    with pytest.raises(PositionMismatch, match="the cluster lost messages that it had given out"):
        driven(harness, 2)


def test_where_its_producers_give_old_times_it_cannot_be_told(harness: KafkaHarness) -> None:
    put(harness, "b", timestamp=LONG_AGO_MS + 10)
    set_back_to_old_times(harness)
    assert b"lost" not in driven(harness, 2)
    assert verdicts(harness) == [Continuity.UNKNOWN]


def set_back_to_old_times(harness: KafkaHarness) -> None:
    harness.broker.save(harness.name)
    put(harness, "d", "e", "f", timestamp=LONG_AGO_MS)
    assert len(driven(harness, 1)) == 4
    harness.broker.set_back(harness.name)
    put(harness, "x", "lost", "x", "x", timestamp=LONG_AGO_MS)
    compact(harness, 0, 2, 4)


@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
def test_a_compaction_that_just_compacts_is_no_alarm(harness: KafkaHarness, kind: str) -> None:
    """Negative control: also where the times that producers give go up and down."""
    harness.broker.configure(harness.name, message_timestamp_type=kind)
    for key, time_ms in (("a", 5_000), ("b", 9_000), ("c", 1_000), ("x", 3_000)):
        put(harness, key, timestamp=LONG_AGO_MS + time_ms)
    assert len(driven(harness, 1)) == 4
    put(harness, "y", "x", timestamp=LONG_AGO_MS + 2_000)
    compact(harness, 0, 1, 2, 4, 5)
    harness.broker.restart()
    assert {b"y", b"x"} <= set(driven(harness, 2))
    assert verdicts(harness) == []


def test_without_a_consumer_group_such_a_compaction_leaves_what_cannot_be_told(harness: KafkaHarness) -> None:
    put(harness, "a", "x")
    assert len(driven(harness, 1, group=None)) == 2
    put(harness, "x")
    compact(harness, 0, 2)
    assert b"x" in driven(harness, 2, group=None)
    assert verdicts(harness) == [Continuity.UNKNOWN]
