"""P14: the driver's memory for one batch, beside that for a batch of a tenth of the size."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.workbench import Workbench
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import PreparedFile, SinkInput, SinkMode, SinkWriter, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import PreparedTransaction, Sink, SinkIdentity
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink

ROWS: Final = 10_000_000
ROWS_AT_ONCE: Final = 64 * 1024
SCHEMA: Final = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("word", pa.string())])
INPUTS: Final = {
    SinkMode.APPEND: SinkInput(SCHEMA),
    SinkMode.UPSERT: SinkInput.for_upsert(SCHEMA, ("id",), ("v",)),
    SinkMode.FOLD: SinkInput.for_fold(SCHEMA, ("id",), {"v": Fold.SUM, "word": Fold.MAX}),
}
_SPAWNED: Final = multiprocessing.get_context("spawn")


def prepare(writer: SinkWriter, txid: int, task: int, first: int, last: int) -> list[PreparedFile]:
    """What a task does: rows with such ids."""
    opened = writer.open_task(TaskContext("life", txid, 1, task), SCHEMA)
    for at in range(first, last, ROWS_AT_ONCE):
        ids = np.arange(at, min(at + ROWS_AT_ONCE, last))
        words = np.char.add("word-", (ids % 50_000).astype(str))
        opened.write(pa.record_batch([ids, np.full(len(ids), txid), words], schema=SCHEMA))
    return list(opened.close())


def peak_of_commits(sink: Sink, mode: SinkMode, rows: int, tasks: int) -> float:
    """The peak of this process's memory, in bytes, when it commits two batches of so many rows with the same ids."""
    with closing(sink.open(SinkIdentity("bench", "life", sink.name), INPUTS[mode], 1)) as session:
        for txid in (1, 2):
            parts = [(task, rows * task // tasks, rows * (task + 1) // tasks) for task in range(tasks)]
            files: list[PreparedFile] = []
            with ProcessPoolExecutor(1, _SPAWNED) as executor:
                for part in parts:
                    files += executor.submit(prepare, session.writer(), txid, *part).result()
            digest = transaction_digest(files)
            transaction = PreparedTransaction(txid, txid - 1 or None, digest, rows, tuple(files))
            session.commit(transaction, checked=True)
            session.finished(transaction)
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


@contextmanager
def of_size(bench: Workbench, store: str, mode: SinkMode) -> Generator[Case]:
    """A sink in one mode, in a process of its own for each size."""

    def peak(rows: int) -> float:
        sink = _sink(store, bench.unused("rows"), bench.path("place"), bench.database)
        with ProcessPoolExecutor(1, _SPAWNED) as executor:
            return executor.submit(peak_of_commits, sink, mode, rows, bench.cores).result()

    yield Case(
        key=f"P14-{store}-{mode}@10M",
        title=f"the driver's memory at its peak, with batches of 10 M rows, {mode}, {store}; with batches of 1 M rows",
        unit=Unit.BYTES,
        goal=Goal(ratio=2.0),
        ours=partial(peak, ROWS),
        theirs=partial(peak, ROWS // 10),
        warm_ups=0,
        pairs_most=1,
    )


def _sink(store: str, table: str, place: Path, database: Database) -> Sink:
    if store == "delta":
        return DeltaSink(place / table)
    return PostgresSink(table, database=database, staging=place)


def p14(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P14."""
    for store in ("delta", "postgres"):
        for mode in SinkMode:
            yield of_size(bench, store, mode)
