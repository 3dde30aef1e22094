"""in-flight: several batches in flight, beside one at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.corpus import WORDS_IN_SENTENCE, sentences
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.word_count import row_wise, word_count
from benchmarks.workbench import LIMIT_BYTES, Workbench, delta_total, require_total
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkInput, SinkSpec
from stormproof.core.contract.source import Limit
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.sinks.contract.protocol import CommitResult, PreparedTransaction, SinkIdentity
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.sinks.stores.memory import MemorySession, MemorySink
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.run import driver

BATCHES = 24
"""So many that the first job, beside which nothing can be committed, weighs little."""

LARGE_MESSAGES = 50_000
MESSAGES = 10_000
SMALL_MESSAGES = 1_000
MANY = 4


@dataclass
class Pause:
    """How long a commit takes: as long as a job does where one batch is in flight, so that both are the same."""

    seconds: float = 0.3


class SlowSession(MemorySession):
    """A session whose commits take a while, in which the driver does nothing."""

    pause: Pause

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Wait, then commit."""
        time.sleep(self.pause.seconds)
        return super().commit(transaction, checked=checked)


class SlowSink(MemorySink):
    """A table in memory behind a slow connection."""

    def __init__(self, name: str, pause: Pause) -> None:
        super().__init__(name)
        self._pause = pause

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> SlowSession:
        """A slow session."""
        super().open(identity, input_, epoch, create=create)  # makes the table
        session = SlowSession(self, self._staging, identity, input_, epoch)
        session.pause = self._pause
        return session


@contextmanager
def draining(
    bench: Workbench, in_flight: int, messages: int, sinks: tuple[SinkSpec, ...], pause: Pause | None
) -> Generator[Callable[[], float]]:
    """Messages a second over batches that lie ready."""
    payloads = [line.encode() for line in sentences(messages).to_pylist()]
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = word_count(bench.unused("count"), queue, *sinks, words=row_wise)
    options = RunOptions(
        guarantee=Guarantee.EXACTLY_ONCE,
        limit=Limit(messages, LIMIT_BYTES),
        message_timeout_s=600.0,
        max_batches_in_flight=in_flight,
    )
    with driver(
        topology, Guarantee.EXACTLY_ONCE, settings=bench.settings, engine=bench.engine, options=options
    ) as coordinator:
        coordinator.recover(sweep=True)

        def run() -> float:
            for _ in range(BATCHES):
                queue.put(payloads)
            started_s = time.perf_counter()
            txids, jobs_ms = list[int](), list[float]()
            for _ in range(BATCHES):
                result = coordinator.step()
                if result is None or result.state != "committed" or result.messages != messages:
                    raise RuntimeError(f"not a whole batch: {result}")
                txids.append(result.txid)
                jobs_ms.append(result.steps_ms["job"])
            elapsed_s = time.perf_counter() - started_s
            if pause is not None and in_flight == 1:
                pause.seconds = statistics.median(jobs_ms) / 1_000
            if txids != sorted(txids):
                raise RuntimeError(f"committed out of order: {txids}")
            return BATCHES * messages / elapsed_s

        yield run


@contextmanager
def with_a_slow_sink(bench: Workbench) -> Generator[Case]:
    """A sink whose commit takes as long as its run."""
    pause = Pause()
    with (
        draining(bench, MANY, LARGE_MESSAGES, (SlowSink("many", pause),), pause) as many,
        draining(bench, 1, LARGE_MESSAGES, (SlowSink("one", pause),), pause) as one,
    ):
        yield Case(
            key="in-flight",
            title=f"{MANY} batches in flight; one: a sink whose commit takes as long as the job",
            unit=Unit.MESSAGES,
            goal=Goal(ratio=1.7),
            ours=many,
            theirs=one,
        )


@contextmanager
def with_real_sinks(bench: Workbench, messages: int) -> Generator[Case]:
    """Delta and Postgres, folded by key."""
    tables = [bench.path("counts") for _ in range(2)]
    with ExitStack() as stack:
        many, one = (
            stack.enter_context(
                draining(bench, number, messages, (DeltaSink(table), PostgresSink(bench.unused("counts"))), None)
            )
            for number, table in zip((MANY, 1), tables, strict=True)
        )
        runs = [0, 0]

        def counted(side: int, run: Callable[[], float]) -> Callable[[], float]:
            def once() -> float:
                runs[side] += 1
                return run()

            return once

        yield Case(
            key=f"in-flight-{messages:,}",
            title=f"{MANY} batches of {messages:,} messages in flight; one: Delta and Postgres",
            unit=Unit.MESSAGES,
            goal=Goal(),
            ours=counted(0, many),
            theirs=counted(1, one),
        )
    for table, number in zip(tables, runs, strict=True):
        require_total(delta_total(table), number * BATCHES * messages * WORDS_IN_SENTENCE, "the Delta table")


def in_flight(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """Batches in flight."""
    yield with_a_slow_sink(bench)
    yield with_real_sinks(bench, SMALL_MESSAGES)
    yield with_real_sinks(bench, MESSAGES)
