"""`KafkaSource` on a real broker: transactions, compaction, retention, new partitions, topics made again, metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from support.brokers import until
from support.brokers.kafka import READY_S, KafkaBroker
from support.brokers.lives import Life, kill_at
from support.kafka_source import KafkaHarness
from support.queues import prepared_database
from support.source_harness import messages_of
from support.verdicts import verified

from stormproof import KafkaSource, PostgresSink, Topology
from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.contract.payload import payload_in
from stormproof.core.contract.source import Lease, Limit, Slice
from stormproof.core.pending.continuity import looks_in
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.kafka.client import Cluster, GapsFound
from stormproof.core.source.kafka.lookahead import SAMPLE
from stormproof.core.source.kafka.position import OffsetRange, ranges_of
from stormproof.core.source.kafka.reader import KafkaSliceReader
from stormproof.core.source.metadata import Metadata
from stormproof.core.start.settings import Settings
from stormproof.testing.sources.harness import each_slice, lease_of, open_slice
from stormproof.trident.audit.source import evidence_of

pytestmark = [pytest.mark.postgres, pytest.mark.broker("kafka"), pytest.mark.sampled(0.34)]

ANY = Limit(1_000)
EXAMPLE = Path(__file__).parents[2] / "examples" / "brokers" / "kafka.py"
NOTHING = Metadata()


@pytest.fixture(scope="module")
def shared_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """One database for all cases that keep apart by their source's name."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create database test_kafka template template0")
    yield prepared_database(postgres.database.with_name("test_kafka"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"drop database test_kafka with (force)")


@pytest.fixture
def harness(shared_database: Database, kafka: KafkaBroker) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(shared_database, kafka)
    yield harness
    harness.close()


def payloads(source: KafkaSource, slice_: Slice | None) -> list[bytes]:
    return [] if slice_ is None else [message.payload for message in messages_of(source, slice_)]


def everything(source: KafkaSource, limit: Limit = ANY, epoch: int = 1) -> list[bytes]:
    """Open, read and confirm all there is."""
    found: list[bytes] = []
    for lease, slice_ in each_slice(source, limit, epoch):
        found += payloads(source, slice_)
        source.confirm(lease)
    return found


# ---- transactions


def test_an_aborted_transaction_never_shows_and_an_open_one_holds_up_its_own_partition_alone(
    harness: KafkaHarness, kafka: KafkaBroker
) -> None:
    topic = harness.name = kafka.topic(2)
    with kafka.transaction(commit=False) as producer:
        producer.produce(topic, b"aborted", partition=0)
        producer.produce(topic, b"aborted", partition=1)
    kafka.until_stable(topic, 2)
    source = harness.view()
    with kafka.transaction() as producer:
        producer.produce(topic, b"open", partition=0)
        producer.flush(READY_S)
        kafka.put(topic, [b"behind it"], 0)
        kafka.put(topic, [b"beside it"], 1)
        assert everything(source) == [b"beside it"]
        assert source.backlog().ready == 0
    kafka.until_stable(topic, 2)
    assert everything(source) == [b"open", b"behind it"]
    assert source.backlog().ready == 0


def test_a_partition_that_waits_behind_an_open_transaction_is_logged_and_in_the_status(
    harness: KafkaHarness, kafka: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    clock = harness.options["clock"] = ManualClock()
    source = harness.view()
    with kafka.transaction() as producer:
        producer.produce(harness.name, b"open", partition=0)
        producer.flush(READY_S)
        for _ in range(3):
            assert source.open(lease_of("a"), ANY, 7) is None
            assert "transaction" not in caplog.text
            clock.advance(4)
        assert source.open(lease_of("a"), ANY, 7) is None
        assert "partition 0 has waited at offset 0 for 12 seconds, with 1 offsets behind it" in caplog.text
        (note,) = evidence_of(source).notes()
        assert note.startswith(f"topic {harness.name}, partition 0 waits at offset 0 since 20")
    kafka.until_stable(harness.name, 1)
    assert everything(source) == [b"open"]
    assert "partition 0 goes on" in caplog.text
    assert evidence_of(source).notes() == ()


def test_every_message_once_from_partitions_whose_slices_are_cut_returned_and_halved(
    harness: KafkaHarness, kafka: KafkaBroker, seed: int
) -> None:
    """Offsets with gaps, in four partitions; any order of opening, confirming, returning, splitting and dying."""
    rng = np.random.default_rng(seed)
    topic = harness.name = kafka.topic(4)
    put: list[bytes] = []
    for turn in range(5):
        with kafka.transaction(commit=turn != 2) as producer:
            lines = [b"%d-%d" % (turn, number) for number in range(40)]
            for line in lines:
                producer.produce(topic, line, partition=int(rng.integers(4)))
        put += lines if turn != 2 else []
    kafka.until_stable(topic, 4)
    epoch, seen = 1, list[bytes]()
    source = harness.view(epoch=epoch)
    for number in range(400):
        lease = Lease(f"o{number}", epoch)
        slice_ = source.open(lease, Limit(int(rng.integers(1, 30)), int(rng.integers(20, 200))), number)
        if slice_ is None:
            break
        found = messages_of(source, slice_, number, parallelism=int(rng.integers(1, 4)))
        xor = int(np.bitwise_xor.reduce(np.array([message.token for message in found], np.int64)))
        assert (slice_.expected.messages, slice_.expected.xor) == (len(found), xor)
        assert slice_.bytes == sum(len(message.payload) for message in found)
        match int(rng.integers(5)) if number < 300 else 0:
            case 1:
                source.abort(lease)
            case 2:
                source.split(slice_, lease, [found[int(rng.integers(len(found)))].id])
            case 3:  # the driver dies
                epoch += 1
                source = harness.view(epoch=epoch)
                for owner in source.recover(epoch):
                    source.abort(Lease(owner, epoch))
            case _:
                source.confirm(lease)
                seen += [message.payload for message in found]
    assert sorted(seen) == sorted(put)


# ---- compaction


def test_a_compacted_topic_is_read_with_its_gaps_and_what_compaction_takes_later_is_no_loss(
    harness: KafkaHarness, kafka: KafkaBroker
) -> None:
    topic = harness.name = kafka.topic(
        cleanup_policy="compact",
        segment_ms="50",
        min_cleanable_dirty_ratio="0.001",
        max_compaction_lag_ms="100",
        delete_retention_ms="0",
    )
    kafka.put(topic, [b"old %d" % n for n in range(5)], key=b"a")
    source = harness.view()
    slice_ = open_slice(source, "a")
    assert len(payloads(source, slice_)) == slice_.expected.messages
    source.abort(lease_of("a"))
    reads = KafkaSliceReader(Cluster(kafka.servers), (OffsetRange(topic, 0, 0, 0, 6, 6, 0),), NOTHING)

    def is_compacted() -> bool:
        kafka.put(topic, [b"x"], key=b"roll")  # a segment is closed by the next message
        return sum(int(rows.num_rows) for rows in reads.read(0, frozenset(), 100)) < 5

    until(is_compacted, "nothing was compacted")
    again = open_slice(source, "b")
    left = payloads(source, again)
    assert 0 < len(left) == again.expected.messages < slice_.expected.messages
    source.confirm(lease_of("b"))
    rest = everything(source)
    assert (left + rest)[-1] == b"x"
    assert b"old 4" in left + rest, "the newest of a key stays"
    assert source.backlog().ready == 0


# ---- retention


def test_messages_that_retention_took_before_they_were_read_are_refused_by_name(
    harness: KafkaHarness, kafka: KafkaBroker
) -> None:
    harness.put([b"a", b"b", b"c"])
    source = harness.view()
    assert payloads(source, open_slice(source, "a", Limit(1))) == [b"a"]
    source.confirm(lease_of("a"))
    source.close()
    kafka.remove_below(harness.name, 0, 2)
    with pytest.raises(PositionMismatch, match=r"partition 0: at least offsets 1 to 1 were removed .* on_gap='record'"):
        source.open(lease_of("b"), ANY, 7)
    harness.options["on_gap"] = "record"
    after = harness.view(epoch=2)
    assert payloads(after, after.open(Lease("c", 2), ANY, 7)) == [b"c"]
    ((position,),) = harness.execute(
        f"select position from stormproof.pending_subscription where source = '{harness.name}'"
    )
    assert [(one.place, one.behind, one.before) for one in looks_in(position)] == [(0, "0", "2")]


def test_a_slice_whose_messages_retention_took_is_refused_by_name(harness: KafkaHarness, kafka: KafkaBroker) -> None:
    harness.put([b"a", b"b"])
    source = harness.view()
    slice_ = open_slice(source)
    kafka.remove_below(harness.name, 0, 1)
    with pytest.raises(PositionMismatch, match="offsets 0 to 0 were opened and cannot be read any more"):
        messages_of(source, slice_)


# ---- topics and partitions


def test_a_new_partition_is_read_from_its_first_message(harness: KafkaHarness, kafka: KafkaBroker) -> None:
    harness.options["start"] = "latest"
    harness.put([b"before"])
    source = harness.view()
    assert everything(source) == []
    kafka.grow(harness.name, 2)
    kafka.put(harness.name, [b"new"], 1)
    harness.put([b"old"])
    until(lambda: source.backlog().ready == 1, "the message does not show")
    assert everything(source) == [b"old", b"new"]


def test_topics_by_a_pattern_and_those_that_appear_later(
    harness: KafkaHarness, kafka: KafkaBroker, shared_database: Database
) -> None:
    first = kafka.topic()
    kafka.topic(name=f"other-{first}")
    kafka.put(f"other-{first}", [b"never"])
    kafka.put(first, [b"a"])
    source = KafkaSource(f"^{first}", servers=kafka.servers, database=shared_database, look_interval_s=0)
    harness.views.append(source)
    source.subscribe("s", 1)
    assert everything(source) == [b"a"]
    second = kafka.topic(name=f"{first}-second")
    kafka.put(second, [b"b"])
    found = list[bytes]()

    def is_read() -> bool:
        found.extend(everything(source))
        return bool(found)

    until(is_read, "the new topic is not read")
    assert found == [b"b"]
    kafka.delete(second)
    with pytest.raises(PositionMismatch, match=f"topic {second} is gone; what was not read of it is lost"):
        source.open(lease_of("z"), ANY, 7)


def test_a_topic_that_was_deleted_and_made_again_is_refused_by_name(harness: KafkaHarness, kafka: KafkaBroker) -> None:
    harness.put([b"a", b"b"])
    source = harness.view()
    assert everything(source) == [b"a", b"b"]
    kafka.delete(harness.name)
    kafka.topic(name=harness.name)
    harness.put([b"c", b"d", b"e"])
    with pytest.raises(PositionMismatch, match=f"topic {harness.name} was deleted and made again"):
        source.open(lease_of("z"), ANY, 7)
    with pytest.raises(PositionMismatch, match="give the topology another name"):
        harness.view(epoch=2)


def test_another_cluster_under_the_same_name_is_refused(harness: KafkaHarness) -> None:
    harness.view()
    harness.execute("update stormproof.pending_subscription set position = position || '{\"cluster\": \"another\"}'"
                    f" where source = '{harness.name}'")  # fmt: skip
    with pytest.raises(PositionMismatch, match="its position is of cluster another"):
        harness.view(epoch=2)


def test_a_topic_that_is_not_there_is_named_with_the_command_that_makes_it(harness: KafkaHarness) -> None:
    harness.name = "nowhere"
    with pytest.raises(UsageError, match=r"no topic nowhere at .*; make it first: kafka-topics.sh --create"):
        harness.view()


STARTS: dict[str, tuple[Callable[[datetime], Any], list[bytes]]] = {
    "earliest": (lambda _: "earliest", [b"a", b"b", b"c", b"d"]),
    "latest": (lambda _: "latest", [b"d"]),
    "time": (lambda middle: middle, [b"c", b"d"]),
    "later": (lambda middle: middle + timedelta(days=1), [b"d"]),
    "offsets": (lambda _: {0: 1}, [b"b", b"c", b"d"]),
}


@pytest.mark.parametrize("start", STARTS)
def test_where_a_new_subscription_begins(harness: KafkaHarness, kafka: KafkaBroker, start: str) -> None:
    harness.name = kafka.topic(retention_ms="-1")
    at = datetime(2026, 1, 1, tzinfo=UTC)
    for minutes, payload in enumerate([b"a", b"b", b"c"]):
        kafka.put(harness.name, [payload], timestamp=int((at + timedelta(minutes=minutes)).timestamp() * 1_000))
    made, found = STARTS[start]
    harness.options["start"] = made(at + timedelta(seconds=90))
    source = harness.view()
    kafka.put(harness.name, [b"d"], timestamp=int((at + timedelta(days=2)).timestamp() * 1_000))
    assert everything(source) == found
    assert everything(harness.view(epoch=2), epoch=2) == [], "a subscription that is there goes on from where it is"


# ---- metadata


def test_metadata_as_fields_and_tombstones(harness: KafkaHarness, kafka: KafkaBroker) -> None:
    harness.name = kafka.topic(retention_ms="-1")  # the messages say that they are old
    harness.options |= {
        "schema": "n int",
        "metadata": {"key": "key", "offset": "at", "partition": "p", "timestamp": "time", "headers": "headers",
                     "tombstone": "gone", "topic": "topic"},
    }  # fmt: skip
    kafka.put(harness.name, [b'{"n": 1}'], key=b"k", headers=[("h", b"\xff"), ("h", None)], timestamp=1_000)
    kafka.put(harness.name, [None, b"{", b'{"n": 2}'], timestamp=2_000)  # type: ignore[list-item]
    source = harness.view()
    slice_ = open_slice(source, "a")
    (batch,) = source.readers(slice_, 1)[0].read(7, frozenset(), 100)
    made = source.decoder.decode(batch.column("payload"))
    assert [row for row, _ in made.failed] == [2]
    rows = made.rows.to_pylist()
    at = datetime.fromtimestamp(1, UTC)
    assert rows[0] == {"n": 1, "key": b"k", "at": 0, "p": 0, "time": at, "gone": False, "topic": harness.name,
                       "headers": [{"name": "h", "value": b"\xff"}, {"name": "h", "value": None}]}  # fmt: skip
    assert (rows[1]["n"], rows[1]["gone"], rows[1]["key"]) == (None, True, None)
    assert rows[3]["n"] == 2
    assert made.rows.schema == source.decoder.schema


def test_a_failed_message_keeps_its_metadata_and_is_edited_by_its_payload_alone(
    harness: KafkaHarness, kafka: KafkaBroker
) -> None:
    harness.options["metadata"] = ("key", "offset")
    harness.max_attempts = 1
    kafka.put(harness.name, [b"fine", b"poison"], key=b"k")
    source = harness.view()
    slice_ = open_slice(source, "a")
    (batch,) = source.readers(slice_, 1)[0].read(7, frozenset(), 100)
    number = batch.column("id")[1].as_py()
    failure = MessageFailure(MessageId(number), 0, Token(0), FailureReason.ERROR, "b", "boom", "x", counted=True)
    assert source.confirm(lease_of("a"), [failure]).dead == ("0-1",)
    assert source.edit("0-1", b"mended", by="ann", why="typo")
    retry = open_slice(source, "b")
    (batch,) = source.readers(retry, 1)[0].read(7, frozenset(), 100)
    assert source.decoder.decode(batch.column("payload")).rows.to_pylist() == [
        {"line": "mended", "key": b"k", "offset": 1}
    ]
    source.confirm(lease_of("b"))


# ---- what others see


def test_offsets_are_told_to_the_consumer_group_once_they_are_applied(
    harness: KafkaHarness, kafka: KafkaBroker
) -> None:
    harness.options["group"] = f"lag-{harness.name}"
    harness.put([b"a", b"b", b"c"])
    source = harness.view()
    open_slice(source, "a", Limit(2))
    open_slice(source, "b", Limit(2))
    source.confirm(lease_of("b"))
    source.maintain()
    source.confirm(lease_of("a"))
    source.maintain()
    source.close()
    assert kafka.committed(f"lag-{harness.name}", harness.name) == [3]


def test_lag_stands_in_the_backlog_and_with_the_position(harness: KafkaHarness) -> None:
    harness.put([b"m"] * 5)
    source = harness.view()
    assert source.backlog().ready == 5
    open_slice(source, "a", Limit(2))
    assert (source.backlog().ready, source.backlog().pending) == (3, 2)
    with source.rows() as rows:
        position = rows.position()
        assert position is not None
        assert source.AUDIT(source.subscriber, rows.cursor).unopened(position) == (3, None)


def test_no_secret_is_shown(harness: KafkaHarness, kafka: KafkaBroker) -> None:
    client = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "ann",
              "sasl.password": "hunter2"}  # fmt: skip
    source = KafkaSource("t", servers=kafka.servers, client=client, database=harness.database, answer_s=1)
    harness.views.append(source)
    with pytest.raises((StoreUnavailable, UsageError)) as error:
        source.subscribe("s", 1)
    assert "hunter2" not in f"{error.value} {error.value.details} {source!r} {vars(source)}"
    (probe,) = source.probes()
    assert "hunter2" not in repr(probe)
    assert "hunter2" in str(getattr(probe, "cluster").settings), "it is passed on"  # noqa: B009


# ---- negative controls


class Skips(KafkaSliceReader):
    """Reads the last message of a part twice, and the first never."""

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for rows in super().read(seed, excluded, batch_rows):
            yield rows.take(pa.array([*range(1, rows.num_rows), rows.num_rows - 1]))


def test_a_reader_that_gives_one_message_twice_and_skips_another_is_noticed(harness: KafkaHarness) -> None:
    harness.put([b"a", b"b", b"c"])
    source = harness.view()
    slice_ = open_slice(source)
    (good,) = source.readers(slice_, 1)
    assert isinstance(good, KafkaSliceReader)
    for reads, is_right in ((good, True), (Skips(good.cluster, good.ranges, good.metadata), False)):
        (rows,) = reads.read(7, frozenset(), 100)
        tokens = rows.column("token").to_numpy()
        assert rows.num_rows == slice_.expected.messages
        assert (int(np.bitwise_xor.reduce(tokens)) == slice_.expected.xor) is is_right


def test_a_gap_that_is_taken_for_messages_would_be_noticed(harness: KafkaHarness, kafka: KafkaBroker) -> None:
    """What a source that subtracts offsets would expect is not what is there."""
    for commit in (False, True):
        with kafka.transaction(commit=commit) as producer:
            producer.produce(harness.name, b"a", partition=0)
    kafka.until_stable(harness.name, 1)
    source = harness.view()
    slice_ = open_slice(source)
    (one,) = ranges_of(slice_.position)
    assert one.stop - one.start > one.messages == 1


# ---- ranges that nobody counts

MANY = 2 * SAMPLE
LONG = Limit(100_000)


def test_a_long_partition_is_not_counted_and_a_bad_reader_is_noticed_there_too(harness: KafkaHarness) -> None:
    harness.put([b"%d" % number for number in range(MANY)])
    source = harness.view()
    slice_ = open_slice(source, "a", LONG)
    (one,) = ranges_of(slice_.position)
    assert (one.assumed, one.messages, slice_.bytes) == (True, MANY, sum(len(b"%d" % n) for n in range(MANY)))
    (good,) = source.readers(slice_, 1)
    assert isinstance(good, KafkaSliceReader)
    for reads, is_right in ((good, True), (Skips(good.cluster, good.ranges, good.metadata), False)):
        tokens = np.concatenate([rows.column("token").to_numpy() for rows in reads.read(7, frozenset(), 100_000)])
        assert len(tokens) == slice_.expected.messages == MANY
        assert (int(np.bitwise_xor.reduce(tokens)) == slice_.expected.xor) is is_right
    halves = source.readers(slice_, 2)
    assert [sum(rows.num_rows for rows in half.read(7, frozenset(), 500)) for half in halves] == [MANY // 2] * 2


def test_a_gap_in_a_range_that_nobody_counted_has_it_counted(harness: KafkaHarness, kafka: KafkaBroker) -> None:
    harness.put([b"%d" % number for number in range(MANY)])
    source = harness.view()
    assert len(payloads(source, open_slice(source, "a", LONG))) == MANY
    source.confirm(lease_of("a"))
    with kafka.transaction(commit=False) as producer:
        producer.produce(harness.name, b"aborted", partition=0)
    kafka.until_stable(harness.name, 1)
    harness.put([b"behind"])
    slice_ = open_slice(source, "b", LONG)
    assert slice_.expected.messages == 3, "an aborted message and a marker are taken for messages"
    with pytest.raises(GapsFound, match=r"some offsets from .* have no message"):
        payloads(source, slice_)
    source.abort(lease_of("b"))
    again = open_slice(source, "c", LONG)
    assert (again.expected.messages, payloads(source, again)) == (1, [b"behind"])
    source.confirm(lease_of("c"))
    harness.put([b"x" * 10] * MANY)
    (one,) = ranges_of(open_slice(source, "d", LONG).position)
    assert not one.assumed, "the partition is counted from then on"


def test_a_slice_that_is_confirmed_before_it_is_read_is_counted(harness: KafkaHarness) -> None:
    harness.put([b"m"] * MANY)
    (one,) = ranges_of(open_slice(harness.view(), "a", replace(LONG, certain=True)).position)
    assert not one.assumed


def test_what_retention_took_of_a_partition_that_nobody_counts_is_noticed(
    harness: KafkaHarness, kafka: KafkaBroker
) -> None:
    harness.put([b"m"] * MANY)
    source = harness.view()
    open_slice(source, "a", LONG)
    source.confirm(lease_of("a"))
    harness.put([b"a", b"b"])
    kafka.remove_below(harness.name, 0, MANY + 1)
    with pytest.raises(PositionMismatch, match=f"offsets {MANY} to {MANY} were removed"):
        source.open(lease_of("b"), LONG, 7)


@pytest.mark.parametrize("guarantee", ["at-most-once", "at-least-once", "exactly-once"])
def test_a_gap_far_behind_the_sample_loses_and_doubles_nothing(
    database: Database, tmp_path: Path, kafka: KafkaBroker, caplog: pytest.LogCaptureFixture, guarantee: str
) -> None:
    prepared_database(database)
    topic = kafka.topic()
    words = [f"{number}" for number in range(12_000)]  # more than the lookahead takes at once
    kafka.put(topic, map(str.encode, words))
    with kafka.transaction(commit=False) as producer:
        producer.produce(topic, b"never", partition=0)
    kafka.until_stable(topic, 1)
    kafka.put(topic, [b"last"])
    source = KafkaSource(topic, servers=kafka.servers, database=database)
    run(source, database, tmp_path, guarantee, batch_messages=20_000)
    assert applied(database) == sorted([*words, "last"])
    assert verified("kafka", database).clean
    assert ("have no message" in caplog.text) is (guarantee != "at-most-once")


def test_a_batch_of_which_no_message_is_left_ends_empty(
    database: Database, tmp_path: Path, kafka: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The second range is all of an aborted transaction; it is taken for messages first."""
    prepared_database(database)
    topic = kafka.topic()
    words = [f"{number}" for number in range(12_000)]
    kafka.put(topic, map(str.encode, words))
    with kafka.transaction(commit=False) as producer:
        producer.produce(topic, b"never", partition=0)
    kafka.until_stable(topic, 1)
    source = KafkaSource(topic, servers=kafka.servers, database=database)
    run(source, database, tmp_path, batch_messages=len(words))
    assert applied(database) == sorted(words)
    assert not verified("kafka", database).violations
    assert "have no message" in caplog.text


# ---- whole topologies


def checked(line: str) -> list[str]:
    if line.startswith("bad"):
        raise ValueError(line)
    return [line]


def run(
    source: KafkaSource,
    database: Database,
    folder: Path,
    guarantee: Any = "exactly-once",
    batch_messages: int = 5,
    **more: Any,
) -> None:
    topology = Topology("kafka")
    words = topology.stream("lines", source).flat_map(checked, "line", schema="word string")
    words.into(PostgresSink("applied", database=database))
    settings = Settings(
        database_url=database.adbc_uri, staging_dir=str(folder), batch_messages=batch_messages, poll_interval_s=0.001
    )
    topology.run(guarantee, engine="inline", until_idle=True, settings=settings, **more)


def applied(database: Database) -> Sequence[str]:
    with connect(database, application_name="tests") as connection:
        return sorted(word for (word,) in connection.execute("select word from applied").fetchall())


@pytest.mark.parametrize("guarantee", ["at-most-once", "at-least-once", "exactly-once"])
def test_poison_and_garbage_are_dead_letters_and_nothing_else_is(
    database: Database, tmp_path: Path, kafka: KafkaBroker, guarantee: str
) -> None:
    prepared_database(database)
    topic = kafka.topic(2)
    kafka.put(topic, [b"a", b"bad 1", b"b", b"\xff\xfe", b"c"], 0)
    kafka.put(topic, [b"d", b"e", b"f"], 1)
    source = KafkaSource(
        topic, servers=kafka.servers, database=database, max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001
    )
    run(source, database, tmp_path, guarantee)
    assert applied(database) == list("abcdef")
    with connect(database, application_name="tests") as connection:
        found = connection.execute("select payload, reason from stormproof.dead_letter").fetchall()
    dead = sorted((payload_in(bytes(stored)), reason) for stored, reason in found)
    letters = [(b"bad 1", "error"), (b"\xff\xfe", "bad_message")]
    assert dead == ([] if guarantee == "at-most-once" else letters), "at-most-once keeps no failed message"
    assert verified("kafka", database).clean


@pytest.mark.parametrize(
    ("guarantee", "point"), [("at-most-once", "open.after"), ("at-least-once", "commit.after_sink")]
)
def test_a_weaker_guarantee_shows_its_own_fault_when_a_driver_is_killed(
    database: Database, tmp_path: Path, kafka: KafkaBroker, guarantee: str, point: str
) -> None:
    prepared_database(database)
    topic = kafka.topic()
    words = [f"w{number}" for number in range(12)]
    kafka.put(topic, map(str.encode, words))

    def source() -> KafkaSource:
        return KafkaSource(topic, servers=kafka.servers, database=database)

    life = Life("weaker", database, tmp_path, source, KafkaSource.drop_connections, guarantee, ("postgres",))
    life.live([kill_at(point)])
    found = life.applied()["postgres"]
    if guarantee == "at-most-once":
        assert found == Counter(words[5:]), "the batch of 5 that was open is lost, and nothing is doubled"
    else:
        assert found == Counter([*words, *words[:5]]), (
            "the batch of 5 that was written comes twice, and nothing is lost"
        )


def test_verify_shows_what_retention_took_and_that_nothing_else_is_missing(
    database: Database, tmp_path: Path, kafka: KafkaBroker
) -> None:
    prepared_database(database)
    topic = kafka.topic(2)

    def source() -> KafkaSource:
        return KafkaSource(topic, servers=kafka.servers, database=database, on_gap="record", look_interval_s=0)

    kafka.put(topic, [b"a", b"b"], 0)
    run(source(), database, tmp_path)
    kafka.put(topic, [b"lost", b"c"], 0)
    kafka.put(topic, [b"d"], 1)
    kafka.remove_below(topic, 0, 3)
    assert verified("kafka", database).clean
    run(source(), database, tmp_path)
    assert applied(database) == list("abcd")
    report = verified("kafka", database)
    (violation,) = report.violations
    assert f"topic {topic}, partition 0: at least offsets 2 to 2 were removed" in violation.text
    with psycopg.connect(database.conninfo) as connection:  # a range that nobody was given is another thing
        connection.execute(
            "update stormproof.pending_subscription set position = jsonb_set(position, '{breaks}', '[]')"
        )
    (violation,) = verified("kafka", database).violations
    assert "offsets 2 to 2 of" in violation.text
    assert "were handed out to no batch" in violation.text


def test_a_dry_run_takes_nothing(database: Database, kafka: KafkaBroker) -> None:
    prepared_database(database)
    topic = kafka.topic()
    kafka.put(topic, [b"a", b"b"])
    source = KafkaSource(topic, servers=kafka.servers, database=database)
    found = source.preview(None, ANY)
    assert found.messages == 2
    with connect(database, application_name="tests") as connection:
        assert connection.execute("select count(*) from stormproof.pending_subscription").fetchone() == (0,)
    source.close()


def test_the_example_does_what_its_text_says(database: Database, tmp_path: Path, kafka: KafkaBroker) -> None:
    url = prepared_database(database).sqlalchemy_url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--servers", kafka.servers, "--inline"],
        env={**os.environ, "STORMPROOF_DATABASE_URL": url},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1:] == [
        "{'number': 1, 'cents': 500, 'offset': 0, 'customer': 'customer-1'}",
        "{'number': 2, 'cents': 300, 'offset': 1, 'customer': 'customer-2'}",
        "{'number': 5, 'cents': 250, 'offset': 6, 'customer': 'customer-5'}",
    ]
    assert "1 dead letter" in done.stdout
