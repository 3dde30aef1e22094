"""P20: a function that waits for a service, several calls at a time, beside a thread pool in `mapInArrow`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable

from benchmarks.corpus import write_corpus
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.parquet_source import RepeatedParquet
from benchmarks.workbench import Workbench, require_total, timed
from stormproof import Topology
from stormproof.core.base.message import Guarantee
from stormproof.core.engine.spark import SparkEngine
from stormproof.sinks.delta.sink import DeltaSink

MESSAGES: Final = 600
WAIT_S: Final = 0.05
AT_A_TIME: Final = 16


def _ask(line: str) -> str:
    time.sleep(WAIT_S)
    return line


async def _ask_later(line: str) -> str:
    await asyncio.sleep(WAIT_S)
    return line


def _by_hand(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for batch in batches:
            lines = list(pool.map(_ask, batch.column(0).to_pylist()))
            yield pa.RecordBatch.from_arrays([pa.array(lines)], names=["line"])


@contextmanager
def _waiting(bench: Workbench, *, is_async: bool) -> Generator[Case]:
    name = "async" if is_async else "threads"
    corpus = write_corpus(bench.path(f"asked-{name}"), MESSAGES, 1)
    table, out = bench.path(f"answers-{name}"), bench.path(f"by-hand-{name}")
    topology = Topology(bench.unused("asking"))
    lines = topology.stream("lines", RepeatedParquet("asked", corpus))
    function = _ask_later if is_async else _ask
    lines.map(function, "line", schema="line string", concurrency=AT_A_TIME).into(DeltaSink(table))
    asked = bench.rival_session.read.schema("line string").parquet(str(corpus.folder)).coalesce(1)
    writes = 0

    def by_hand() -> float:
        nonlocal writes
        answers = asked.mapInArrow(_by_hand, "line string")
        writes += 1
        return MESSAGES / timed(lambda: answers.write.format("delta").mode("append").save(str(out)))

    engine = SparkEngine(bench.session, 1)
    with bench.stepping(topology, Guarantee.EXACTLY_ONCE, MESSAGES, engine=engine) as stepper:
        yield Case(
            key=f"P20-{name}@{MESSAGES}",
            title=f"{MESSAGES} calls that wait {WAIT_S * 1_000:.0f} ms, {AT_A_TIME} at a time in one task "
            f"({'async' if is_async else 'blocking'}), exactly-once to Delta; a thread pool in mapInArrow, appended",
            unit=Unit.MESSAGES,
            goal=Goal(ratio=0.9),
            ours=lambda: MESSAGES / stepper.seconds(),
            theirs=by_hand,
        )
    for path, number in ((table, stepper.batches), (out, writes)):
        require_total(DeltaTable(path).to_pyarrow_dataset().count_rows(), number * MESSAGES, path.name)


def p20(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """Blocking functions, and `async` ones."""
    yield _waiting(bench, is_async=False)
    yield _waiting(bench, is_async=True)
