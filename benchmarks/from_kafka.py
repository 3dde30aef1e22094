"""P15: messages of 100 bytes from a Kafka broker into a Delta table exactly once, beside Spark's own Kafka source."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltalake import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from benchmarks.figures import Goal, Unit
from benchmarks.harness import WARM_UPS, Case
from benchmarks.maven_jars import ROOT, kafka_jars
from benchmarks.workbench import Workbench, require_total
from stormproof.core.base.message import Guarantee
from stormproof.core.source.kafka import KafkaSource
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.trident.topology.stream import Topology

if TYPE_CHECKING:
    from support.brokers.kafka import KafkaBroker

PARTITIONS: Final = 4
MESSAGE_BYTES: Final = 100
POLLING_MS: Final = 500


@contextmanager
def broker_in(folder: Path) -> Generator[KafkaBroker]:
    """The broker that the tests start, too."""
    broker = _kind()(folder)
    broker.prepare()
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


def _kind() -> type[KafkaBroker]:
    if (tests := str(ROOT / "tests")) not in sys.path:
        sys.path.append(tests)
    from support.brokers.kafka import KafkaBroker

    return KafkaBroker


class Supply:
    """A topic of one side's own, and what was put into it."""

    def __init__(self, broker: KafkaBroker, messages: int) -> None:
        self.broker = broker
        self.messages = messages
        self.topic = broker.topic(PARTITIONS)
        self.put = 0
        self._producer: Any = broker.producer(linger_ms=20, batch_size=1_000_000, queue_buffering_max_messages=200_000)

    def more(self) -> None:
        """As many messages more; they are there when this returns."""
        for number in range(self.put, self.put + self.messages):
            payload = b"%09d " % number + b"x" * (MESSAGE_BYTES - 10)
            while True:
                try:
                    self._producer.produce(self.topic, payload, partition=number % PARTITIONS)
                    break
                except BufferError:
                    self._producer.poll(0.1)
        self._producer.flush()
        self.put += self.messages


def lines_of(name: str, supply: Supply, table: Path) -> Topology:
    """Each message a row."""
    topology = Topology(name)
    source = KafkaSource(supply.topic, servers=supply.broker.servers)
    topology.stream("lines", source).into(DeltaSink(table, name=name))
    return topology


@contextmanager
def micro_batches(bench: Workbench, supply: Supply, table: Path) -> Generator[Iterator[float]]:
    """A streaming query that appends each micro-batch under txnAppId and txnVersion; gives each one's own seconds."""
    session = bench.rival_session
    session.conf.set("spark.sql.streaming.pollingDelay", str(POLLING_MS))

    def write(batch: DataFrame, number: int) -> None:
        out = batch.write.format("delta").mode("append").option("txnAppId", "rival").option("txnVersion", number)
        out.save(str(table))

    options = {
        "kafka.bootstrap.servers": supply.broker.servers,
        "subscribe": supply.topic,
        "startingOffsets": "earliest",
        "kafka.isolation.level": "read_committed",
    }
    stream = session.readStream.format("kafka").options(**options).load()
    lines = stream.select(F.col("value").cast("string").alias("line"))
    supply.more()
    query = lines.writeStream.foreachBatch(write).option("checkpointLocation", str(bench.path("checkpoint"))).start()
    query.processAllAvailable()

    def batches() -> Iterator[float]:
        while True:
            supply.more()
            known = {progress["batchId"] for progress in query.recentProgress}
            query.processAllAvailable()
            worked = [p for p in query.recentProgress if p["batchId"] not in known and p["numInputRows"]]
            yield sum(progress["durationMs"]["triggerExecution"] for progress in worked) / 1_000

    try:
        yield batches()
    finally:
        query.stop()


@contextmanager
def against_spark(bench: Workbench, messages: int, name: str) -> Generator[Case]:
    """Each side reads a topic of its own, with the same messages."""
    table, plain = bench.path("lines"), bench.path("plain")
    with broker_in(_made(bench.path("broker"))) as broker:
        supply, rival_supply = Supply(broker, messages), Supply(broker, messages)
        topology = lines_of(bench.unused("main"), supply, table)
        with (
            bench.stepping(topology, Guarantee.EXACTLY_ONCE, messages) as stepper,
            micro_batches(bench, rival_supply, plain) as theirs,
        ):

            def ours() -> float:
                supply.more()
                started_s = time.perf_counter()
                require_total(stepper.all_of(), messages, "what was committed")
                return time.perf_counter() - started_s

            is_small = messages <= 1_000
            as_unit = (lambda seconds: seconds) if is_small else partial(_rate, messages)
            yield Case(
                key=f"P15@{name}",
                title=f"{name} messages of 100 bytes from Kafka into a Delta table, exactly-once; Spark's Kafka source and "
                "foreachBatch with txnAppId",
                unit=Unit.SECONDS if is_small else Unit.MESSAGES,
                goal=Goal(ratio=0.25 if is_small else 1.0),
                ours=lambda: as_unit(ours()),
                theirs=lambda: as_unit(next(theirs)),
                pairs_factor=4 if is_small else 1,
                warm_ups=WARM_UPS if is_small else 1,
                shows_p99=is_small,
            )
    for path, given in ((table, supply), (plain, rival_supply)):
        require_total(DeltaTable(path).to_pyarrow_dataset().count_rows(), given.put, path.name)


def _rate(messages: int, seconds: float) -> float:
    return messages / seconds


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def p15(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P15; none where a broker or its rival cannot be had."""
    missing = _kind().missing() or (None if kafka_jars() else "Spark's Kafka source (Maven copies it)")
    if missing is not None:
        sys.stderr.write(f"P15 is left out: {missing} is not installed; install it with: {_kind().INSTALL}\n")
        return
    yield against_spark(bench, 1_000, "1k")
    yield against_spark(bench, 1_000_000, "1M")
