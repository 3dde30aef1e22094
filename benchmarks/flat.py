"""P9: whether a batch costs the same with a long past behind it, and with many messages before it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial

from benchmarks.corpus import sentences
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.word_count import row_wise
from benchmarks.workbench import LIMIT_BYTES, Workbench
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Limit
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.run import driver
from stormproof.trident.topology.stream import Topology

FLAT = Goal(ratio=1.2)
AFTER_MANY = Goal(ratio=1.1)
BATCH = 1_000
TXIDS = (1_000, 10_000)
BACKLOG_BATCH = 10_000
BACKLOGS = (100_000, 1_000_000, 10_000_000)
PUT_AT_ONCE = 1_000_000


def words(bench: Workbench, queue: PostgresQueue) -> Topology:
    """Lines to words, appended to a Delta table."""
    topology = Topology(bench.unused("flat"))
    row_wise(topology.stream("lines", queue)).into(DeltaSink(bench.path("words")))
    return topology


def live_through(bench: Workbench, topology: Topology, queue: PostgresQueue, txids: int) -> None:
    """Have the topology commit so many batches of one message each."""
    options = RunOptions(guarantee=Guarantee.EXACTLY_ONCE, limit=Limit(1, LIMIT_BYTES), until_idle=True)
    with (
        closing(InlineEngine(1)) as engine,
        driver(topology, settings=bench.settings, engine=engine, options=options, until_idle=True) as coordinator,
    ):
        queue.put([b"a word"] * txids)  # now that its tables are there
        done = coordinator.run().batches
    if done != txids:
        raise RuntimeError(f"{done} batches, not {txids}")


@contextmanager
def seconds_a_batch(bench: Workbench, past: int) -> Generator[Callable[[], float]]:
    """Seconds of one batch, after so many others in ledger and Delta log."""
    payloads = [line.encode() for line in sentences(BATCH).to_pylist()]
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = words(bench, queue)
    live_through(bench, topology, queue, past)
    with bench.stepping(topology, Guarantee.EXACTLY_ONCE, BATCH) as stepper:

        def run() -> float:
            queue.put(payloads)
            return stepper.seconds()

        yield run


@contextmanager
def after_many_txids(bench: Workbench, past: int) -> Generator[Case]:
    """A batch after `past` others, beside one after a single other."""
    with seconds_a_batch(bench, past) as long, seconds_a_batch(bench, 1) as short:
        yield Case(
            key=f"P9-txids-{past:,}",
            title=f"a batch with {past:,} txids in ledger and Delta log; one with few",
            unit=Unit.SECONDS,
            goal=AFTER_MANY,
            ours=long,
            theirs=short,
        )


@contextmanager
def seconds_with_backlog(bench: Workbench, messages: int) -> Generator[Callable[[], float]]:
    """Seconds of one batch, with so many messages in the queue before it; what is taken is put again."""
    payloads = [line.encode() for line in sentences(BACKLOG_BATCH).to_pylist()]
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    with bench.stepping(words(bench, queue), Guarantee.EXACTLY_ONCE, BACKLOG_BATCH) as stepper:
        for _ in range(max(1, messages // PUT_AT_ONCE)):
            queue.put(payloads * (min(messages, PUT_AT_ONCE) // BACKLOG_BATCH))

        def run() -> float:
            seconds = stepper.seconds()
            queue.put(payloads)
            return seconds

        yield run


@contextmanager
def with_backlog(bench: Workbench, messages: int) -> Generator[Case]:
    """A batch with many messages in the queue, beside one with few."""
    with ExitStack() as stack:
        many, few = (stack.enter_context(seconds_with_backlog(bench, n)) for n in (messages, BACKLOG_BATCH))
        yield Case(
            key=f"P9-backlog-{messages:,}",
            title=f"{BACKLOG_BATCH:,} messages of a queue that holds {messages:,}; of one that holds {BACKLOG_BATCH:,}",
            unit=Unit.SECONDS,
            goal=FLAT,
            ours=many,
            theirs=few,
        )


def p9(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """Flat cost."""
    yield from map(partial(with_backlog, bench), BACKLOGS)
    yield from map(partial(after_many_txids, bench), TXIDS)
