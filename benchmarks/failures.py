"""P10, verdicts: what bad messages cost, and what a verdict message by message costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from benchmarks.batches import SMALL, counting, size_name
from benchmarks.corpus import WORDS_IN_SENTENCE, sentences
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.word_count import split, word_count
from benchmarks.workbench import LIMIT_BYTES, Workbench, delta_total, require_total
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Limit
from stormproof.core.engine.protocol import Engine
from stormproof.core.heartbeat.listener import DriverAddress
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.core.start.preflight import Probe
from stormproof.core.task.job import Job, JobKey
from stormproof.core.tracking.verdict import JobReport
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.run import driver
from stormproof.trident.topology.stream import Stream

BAD_ONE_IN = 10_000
BATCHES = 5
BAD = "!"


def checked_split(line: str) -> list[str]:
    """The words of a line; a bad one raises."""
    if line.startswith(BAD):
        raise ValueError("a bad line")
    return split(line)


def checked_words(stream: Stream) -> Stream:
    """Lines to words by a function that raises for bad ones."""
    return stream.flat_map(checked_split, "line", schema="word string")


@contextmanager
def draining(bench: Workbench, bad_one_in: int | None) -> Generator[Callable[[], float]]:
    """Messages a second of five batches, with whatever retries fall due while they run."""
    payloads = [line.encode() for line in sentences(SMALL).to_pylist()]
    if bad_one_in is not None:
        payloads = [BAD.encode() + p if i % bad_one_in == 0 else p for i, p in enumerate(payloads)]
    table = bench.path("counts")
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database, max_attempts=3)
    topology = word_count(bench.unused("count"), queue, DeltaSink(table), words=checked_words, folds=False)
    options = RunOptions(guarantee=Guarantee.EXACTLY_ONCE, limit=Limit(SMALL, LIMIT_BYTES), message_timeout_s=600.0)
    good = sum(not p.startswith(BAD.encode()) for p in payloads)
    runs = 0
    with driver(
        topology, Guarantee.EXACTLY_ONCE, settings=bench.settings, engine=bench.engine, options=options
    ) as coordinator:
        coordinator.recover(sweep=True)

        def run() -> float:
            nonlocal runs
            runs += 1
            for _ in range(BATCHES):
                queue.put(payloads)
            whole = 0
            started_s = time.perf_counter()
            while whole < BATCHES:
                result = coordinator.step()
                if result is None:
                    raise RuntimeError(f"{whole} of {BATCHES} batches were there")
                whole += not result.retry
            return BATCHES * SMALL / (time.perf_counter() - started_s)

        yield run
        while (result := coordinator.step()) is not None:  # retries that are due; what waits is bad
            if not result.retry:
                raise RuntimeError("a batch was left")
    require_total(delta_total(table), runs * BATCHES * good * WORDS_IN_SENTENCE, f"the Delta table of {topology.name}")


@contextmanager
def bad_beside_good(bench: Workbench, goal: Goal) -> Generator[Case]:
    """P10."""
    with draining(bench, BAD_ONE_IN) as bad, draining(bench, None) as good:
        yield Case(
            key="P10",
            title=f"messages/s from a queue with one bad in {BAD_ONE_IN:,}, due retries among them; the same with none",
            unit=Unit.MESSAGES,
            goal=goal,
            ours=bad,
            theirs=good,
        )


class PerMessage:
    """Takes every batch's verdict message by message, as is done after one that did not add up."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self._engine = engine

    @property
    def parallelism(self) -> int:
        """As the engine's own."""
        return self._engine.parallelism

    @property
    def driver_address(self) -> DriverAddress | None:
        """As the engine's own."""
        return self._engine.driver_address

    def run(self, job: Job) -> JobReport:
        """Run with ackers."""
        report = self._engine.run(replace(job, per_message=True))
        if report.lost:
            raise RuntimeError(f"{len(report.lost)} messages were lost")
        return report

    def ask(self, probes: Sequence[Probe]) -> None:
        """Pass on."""
        self._engine.ask(probes)

    def cancel(self, key: JobKey) -> None:
        """Pass on."""
        self._engine.cancel(key)

    def close(self) -> None:
        """Pass on."""
        self._engine.close()


@contextmanager
def per_message_beside_batch(bench: Workbench) -> Generator[Case]:
    """The verdict of each message, beside that of the whole batch."""
    corpus = bench.corpus(SMALL)
    with (
        counting(bench, corpus, folds=False, engine=PerMessage(bench.engine)) as each,
        counting(bench, corpus, folds=False) as whole,
    ):
        yield Case(
            key="verdicts",
            title=f"word count to Delta, {size_name(SMALL)} words: a verdict a message (nothing combined); one a batch",
            unit=Unit.SECONDS,
            goal=Goal(),
            ours=each.seconds,
            theirs=whole.seconds,
        )


def p10(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The case of P10."""
    yield bad_beside_good(bench, Goal(ratio=0.8))


def verdicts(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cost of per-message mode."""
    yield per_message_beside_batch(bench)
