"""P7: what it takes to hand out messages of a Postgres queue and confirm them, without a job on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Final

import pyarrow as pa
from adbc_driver_postgresql import dbapi
from psycopg.rows import tuple_row

from benchmarks.corpus import sentences
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.workbench import Workbench
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import SliceReader
from stormproof.core.heartbeat.listener import DriverAddress
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.core.start.preflight import Probe
from stormproof.core.task.job import Job, JobKey
from stormproof.core.task.task import BATCH_ROWS
from stormproof.core.tracking.share import as_words, xor_reduce, xor_signed
from stormproof.core.tracking.verdict import JobReport
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.topology.stream import Topology

GOALS: Final = {10_000: Goal(ratio=6, own=800_000), 100_000: Goal(ratio=10, own=1_000_000)}
"""By the number of messages in a batch."""
WARM_UPS: Final = 8
"""As many as it takes until both drivers have prepared their statements, which psycopg does at the sixth time."""


class Delivery:
    """An engine that only reads: the payloads are Arrow arrays in this process, and every message is acked at once."""

    name = "delivery"

    def __init__(self, parallelism: int) -> None:
        self.parallelism = parallelism
        self.delivered: list[pa.Array] = []
        self._threads = ThreadPoolExecutor(parallelism)

    @property
    def driver_address(self) -> DriverAddress | None:
        """None: all is read in this process."""
        return None

    def run(self, job: Job) -> JobReport:
        """Read all parts at once, as executors would."""
        parts = list(self._threads.map(lambda reader: self._read(reader, job), job.readers))
        batches = [batch for part in parts for batch in part]
        self.delivered = [batch.column("payload") for batch in batches]
        xor = xor_signed(xor_reduce(as_words(batch.column("token").to_numpy())) for batch in batches)
        return JobReport(sum(batch.num_rows for batch in batches), xor, xor)

    def _read(self, reader: SliceReader, job: Job) -> list[pa.RecordBatch]:
        return list(reader.read(job.seed, job.excluded, BATCH_ROWS))

    def ask(self, probes: Sequence[Probe]) -> None:
        """There is no machine but this one."""

    def cancel(self, key: JobKey) -> None:
        """Nothing to cancel."""

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown()


@contextmanager
def leased_rows(bench: Workbench, lines: pa.Array, *, as_arrow: bool) -> Generator[Callable[[], float]]:
    """Messages/s of the usual way: lease rows by UPDATE with SKIP LOCKED, delete them by their ids when they are done.

    `as_arrow` is the best that can be had of it: the leased rows come as Arrow by ADBC, and since one client took all
    of them in order, a range deletes them. Else they come through psycopg and are made an Arrow array. An index finds
    the free rows, and dead rows are vacuumed between runs, outside the measurement.
    """
    table, number = bench.unused("leases"), len(lines)
    lease = (
        f"update {table} set owner = 'mine', lease_until = now() + interval '30 seconds' where id in"
        f" (select id from {table} where owner is null order by id limit {number} for update skip locked)"
        " returning id, payload"
    )
    with (
        bench.connect() as connection,
        closing(dbapi.connect(bench.database.adbc_uri, autocommit=True)) as arrow,
        closing(arrow.cursor()) as arrow_cursor,
    ):
        connection.execute(
            f"create table {table} (id bigint generated always as identity primary key, payload bytea not null,"
            " owner text, lease_until timestamptz)".encode()
        )
        connection.execute(f"create index on {table} (id) where owner is null".encode())

        def through_psycopg() -> int:
            with connection.cursor(binary=True, row_factory=tuple_row) as cursor:
                rows = cursor.execute(lease.encode()).fetchall()
                ids, delivered = [row[0] for row in rows], pa.array([row[1] for row in rows], pa.binary())
                cursor.execute(f"delete from {table} where id = any(%s)".encode(), (ids,))
                return min(len(delivered), cursor.rowcount)

        def through_adbc() -> int:
            arrow_cursor.execute(lease)
            rows = arrow_cursor.fetch_arrow_table()
            ids = rows.column("id").to_numpy()
            done = connection.execute(
                f"delete from {table} where id between %s and %s and owner = 'mine'".encode(),
                (int(ids.min()), int(ids.max())),
            )
            return min(int(rows.num_rows), done.rowcount)

        def run() -> float:
            with connection.cursor() as put, put.copy(f"copy {table} (payload) from stdin".encode()) as copy:
                copy.write("".join(f"\\\\x{line.encode().hex()}\n" for line in lines.to_pylist()))
            connection.execute(f"vacuum analyze {table}".encode())
            started_s = time.perf_counter()
            done = through_adbc() if as_arrow else through_psycopg()
            elapsed_s = time.perf_counter() - started_s
            if done != number:
                raise RuntimeError(f"{done} messages were leased and deleted instead of {number}")
            return number / elapsed_s

        yield run


@contextmanager
def against_leases(bench: Workbench, messages: int, goal: Goal, *, as_arrow: bool) -> Generator[Case]:
    """Both sides hand out and confirm the same payloads."""
    lines = sentences(messages)
    payloads = [line.encode() for line in lines.to_pylist()]
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = Topology(bench.unused("delivery"))
    topology.stream("lines", queue).into(MemorySink(staging=bench.path("staging")))
    with (
        closing(Delivery(bench.cores)) as engine,
        bench.stepping(topology, Guarantee.EXACTLY_ONCE, messages, engine=engine) as stepper,
        leased_rows(bench, lines, as_arrow=as_arrow) as theirs,
    ):

        def ours() -> float:
            queue.put(payloads)
            rate = messages / stepper.seconds()
            if sum(map(len, engine.delivered)) != messages:
                raise RuntimeError(f"not {messages} messages were delivered")
            return rate

        yield Case(
            key=f"P7-arrow@{messages}" if as_arrow else f"P7@{messages}",
            title=f"messages/s handed out and confirmed, {messages:,} a batch; UPDATE SKIP LOCKED and DELETE"
            + (" through ADBC" if as_arrow else ""),
            unit=Unit.MESSAGES,
            goal=goal,
            ours=ours,
            theirs=theirs,
            warm_ups=WARM_UPS,
        )


def p7(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P7."""
    for messages, goal in GOALS.items():
        yield against_leases(bench, messages, goal, as_arrow=False)
    for messages in GOALS:
        yield against_leases(bench, messages, Goal(), as_arrow=True)
