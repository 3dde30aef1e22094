"""P12: rows appended exactly once, to Postgres beside plain binary COPY and Spark's JDBC writer, to Delta beside Spark's."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Final
from unittest import mock

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pgpq import ArrowToPostgresBinaryEncoder
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from benchmarks.corpus import WORDS_IN_SENTENCE
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.parquet_source import RepeatedParquet
from benchmarks.word_count import words_as_rows
from benchmarks.workbench import Workbench, require_total, timed
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import PreparedFile, SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres import embedded
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import PreparedTransaction, SinkIdentity
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink

JDBC: Final = "org.postgresql:postgresql:42.7.8"
"""Postgres's driver for Spark's JDBC writer, by its Maven name."""
HOST: Final = f"127.12.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}"
"""JDBC needs TCP, and the embedded server is behind a socket: another server listens on a loopback address of its own."""
SCHEMA: Final = pa.schema(
    [("id", pa.int64()), ("word", pa.string()), ("x", pa.float64()), ("at", pa.timestamp("us", "UTC"))]
)
COLUMNS: Final = "id bigint, word text, x double precision, at timestamptz"
ROWS_AT_ONCE: Final = 64 * 1024


@contextmanager
def serving(bench: Workbench) -> Generator[Database]:
    """A Postgres that JDBC reaches, too; both sides go by TCP."""
    server = embedded.EmbeddedPostgres(bench.path("tcp"))
    with mock.patch.dict(embedded._SERVER_SETTINGS, listen_addresses=HOST):  # pyright: ignore[reportPrivateUsage]
        server.acquire()
    try:
        with psycopg.connect(server.database.conninfo, autocommit=True) as connection:
            (hba,) = connection.execute("show hba_file").fetchone() or ("",)
            with open(hba, "a") as file:
                file.write(f"host all all {HOST}/32 trust\n")
            connection.execute("select pg_reload_conf()")
        yield Database.of({**dict(server.database.parameters), "host": HOST})
    finally:
        server.release()


_KEPT: Final[dict[str, psycopg.Connection]] = {}


def copy_files(conninfo: str, table: str, paths: Sequence[str]) -> None:
    """What a program writes that wants rows in a table fast: binary COPY, over a connection that it keeps."""
    encoder = ArrowToPostgresBinaryEncoder(SCHEMA)
    statement = f"copy {table} from stdin with (format binary)".encode()
    if (connection := _KEPT.get(conninfo)) is None:
        connection = _KEPT[conninfo] = psycopg.connect(conninfo)
    with connection.transaction(), connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(encoder.write_header())
        for path in paths:
            for batch in pq.ParquetFile(path).iter_batches(ROWS_AT_ONCE):
                copy.write(encoder.write_batch(batch.cast(SCHEMA)))
        copy.write(encoder.finish())


def rows_between(first: int, last: int) -> Iterator[pa.RecordBatch]:
    """Rows with such ids."""
    for at in range(first, last, ROWS_AT_ONCE):
        ids = np.arange(at, min(at + ROWS_AT_ONCE, last))
        words = np.char.add("word-", (ids % 50_000).astype(str))
        moments = pa.array(ids * 1_000_000, pa.timestamp("us", "UTC"))
        yield pa.record_batch([pa.array(ids), pa.array(words), pa.array(ids * 0.5), moments], schema=SCHEMA)


@contextmanager
def against_copy(bench: Workbench, database: Database, rows: int, name: str, processes: int) -> Generator[Case]:
    """The sink's commit of prepared files, beside COPY of the same files by so many processes without any guarantee."""
    table, folder = bench.unused("rows"), bench.path("staged")
    sink = PostgresSink(table, database=database, staging=folder)
    with closing(sink.open(SinkIdentity("bench", "life", table), SinkInput(SCHEMA), 1)) as session:
        files: list[PreparedFile] = []
        for task in range(bench.cores):
            writer = session.writer().open_task(TaskContext("life", 1, 1, task), SCHEMA)
            for batch in rows_between(rows * task // bench.cores, rows * (task + 1) // bench.cores):
                writer.write(batch)
            files += writer.close()
        paths, digest, txid = [str(folder / file.path) for file in files], transaction_digest(files), 0
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            connection.execute(f"create table plain_{table} ({COLUMNS})".encode())

            def emptied(what: str, load: Callable[[], object]) -> float:
                connection.execute(f"truncate {what}".encode())
                connection.execute("checkpoint")
                took_s = timed(load)
                (found,) = connection.execute(f"select count(*) from {what}".encode()).fetchone() or (0,)
                require_total(found, rows, what)
                return took_s

            def commit() -> None:
                nonlocal txid
                txid += 1
                session.commit(PreparedTransaction(txid, txid - 1 or None, digest, rows, tuple(files)), checked=True)

            with multiprocessing.get_context("spawn").Pool(processes) as pool:
                pool.map(time.sleep, [0.1] * processes)
                parts = [paths] if processes == 1 else [paths[number::processes] for number in range(processes)]

                def plain() -> None:
                    pool.starmap(copy_files, [(database.conninfo, f"plain_{table}", part) for part in parts])

                yield Case(
                    key=f"P12-copy{'' if processes == 1 else f'-{processes}'}@{name}",
                    title=f"{name} rows, from prepared files into Postgres, exactly-once by the driver's COPY; plain binary "
                    f"COPY of the same files by {processes} process{'es' if processes > 1 else ''}",
                    unit=Unit.SECONDS,
                    goal=Goal(ratio=1.25),
                    ours=lambda: emptied(table, commit),
                    theirs=lambda: emptied(f"plain_{table}", plain),
                )


@contextmanager
def against_jdbc(
    bench: Workbench, database: Database, sentences: int, name: str, *, tuned: bool = False
) -> Generator[Case]:
    """A whole batch, from Parquet files to committed rows, beside Spark's JDBC writer: as it is, or as its users tune it."""
    corpus, table = bench.corpus(sentences), bench.unused("words")
    topology = words_as_rows(
        bench.unused("main"), RepeatedParquet(bench.unused("parquet"), corpus), PostgresSink(table, database=database)
    )
    known = dict(database.parameters)
    url = f"jdbc:postgresql://{HOST}:{known['port']}/{known['dbname']}?user={known['user']}"
    if tuned:
        url += "&reWriteBatchedInserts=true"
    rows = sentences * WORDS_IN_SENTENCE
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute(f"create table plain_{table} (word text)".encode())

        def emptied(what: str, load: Callable[[], float]) -> float:
            connection.execute(f"truncate {what}".encode())
            connection.execute("checkpoint")
            took_s = load()
            (found,) = connection.execute(f"select count(*) from {what}".encode()).fetchone() or (0,)
            require_total(found, rows, what)
            return took_s

        def write() -> None:
            lines = bench.rival_session.read.schema("line string").parquet(str(corpus.folder))
            words = lines.select(F.explode(F.split("line", " ")).alias("word"))
            options = {"driver": "org.postgresql.Driver", **({"batchsize": "10000"} if tuned else {})}
            words.write.jdbc(url, f"plain_{table}", mode="append", properties=options)

        with bench.stepping(topology, Guarantee.EXACTLY_ONCE, corpus.messages) as stepper:
            yield Case(
                key=f"P12-jdbc{'-tuned' if tuned else ''}@{name}",
                title=f"{name} words, each a row, from Parquet files into Postgres, exactly-once; Spark's JDBC writer"
                + (", batchsize 10,000 and reWriteBatchedInserts" if tuned else ""),
                unit=Unit.SECONDS,
                goal=Goal() if tuned else Goal(ratio=1 / 3),
                ours=lambda: emptied(table, stepper.seconds),
                theirs=lambda: emptied(f"plain_{table}", lambda: timed(write)),
            )


@contextmanager
def against_delta_writer(bench: Workbench, sentences: int, name: str) -> Generator[Case]:
    """A whole batch, from Parquet files to a committed version, beside Spark's own append to a Delta table."""
    corpus, table, plain = bench.corpus(sentences), bench.path("words"), bench.path("plain")
    topology = words_as_rows(
        bench.unused("main"), RepeatedParquet(bench.unused("parquet"), corpus), DeltaSink(table, name="words")
    )
    batches = dict.fromkeys((table, plain), 0)

    def counted(path: Path, run: Callable[[], float]) -> float:
        batches[path] += 1
        return run()

    def write() -> None:
        lines = bench.rival_session.read.schema("line string").parquet(str(corpus.folder))
        words = lines.select(F.explode(F.split("line", " ")).alias("word"))
        words.write.format("delta").mode("append").save(str(plain))

    with bench.stepping(topology, Guarantee.EXACTLY_ONCE, corpus.messages) as stepper:
        yield Case(
            key=f"P12-delta@{name}",
            title=f"{name} words, each a row, from Parquet files into a Delta table, exactly-once; df.write.format('delta')",
            unit=Unit.SECONDS,
            goal=Goal(ratio=0.6),
            ours=lambda: counted(table, stepper.seconds),
            theirs=lambda: counted(plain, lambda: timed(write)),
        )
    for path, times in batches.items():
        held = DeltaTable(path).to_pyarrow_dataset().count_rows()
        require_total(held, times * sentences * WORDS_IN_SENTENCE, str(path.name))


def p12(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P12."""
    for sentences, name in ((100, "1k"), (10_000, "100k"), (500_000, "5M")):
        yield against_delta_writer(bench, sentences, name)
    with serving(bench) as database:
        for rows, name in ((1_000, "1k"), (100_000, "100k"), (5_000_000, "5M")):
            yield against_copy(bench, database, rows, name, 1)
        yield against_copy(bench, database, 5_000_000, "5M", bench.cores)
        for sentences, name in ((100, "1k"), (10_000, "100k"), (500_000, "5M")):
            yield against_jdbc(bench, database, sentences, name)
        yield against_jdbc(bench, database, 500_000, "5M", tuned=True)
