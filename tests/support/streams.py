"""Streaming queries that die: what hands out micro-batches, what they go to, and a driver in a child process.

`StandInQuery` keeps a checkpoint as Spark's micro-batch engine does (offsets before a batch, a commit behind it) and hands
out Arrow tables; ledger, sinks, topology and the code under test are real. The same cells run on real Spark, too: see
`support.stream_driver`. Every row has an id that is drawn anew each time that it is computed, so that a batch that was
computed twice shows: the sinks would hold different ids.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pyarrow as pa
from deltalake import DeltaTable
from psycopg import sql

from stormproof import DeltaSink, PostgresSink, Topology, count
from stormproof.core.base.failpoint import ENV
from stormproof.core.contract.sink import SinkWriter, TaskContext
from stormproof.core.engine.frame import WrittenRows, write_part, written_of
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Engine
from stormproof.core.postgres.database import Database
from stormproof.core.source.files.micro_batches import MicroBatches
from stormproof.core.start.settings import Settings
from stormproof.core.task.router import task_numbers
from stormproof.trident.streaming.api import exactly_once, feed
from stormproof.trident.streaming.foreach_batch import ForeachBatch, StreamResult
from support.crashes import DRIVER_TIMEOUT_S, FENCED
from support.crashes import _context as context  # pyright: ignore[reportPrivateUsage]
from support.topologies import MAX_ATTEMPTS, Split

Opener: TypeAlias = Callable[..., ForeachBatch]
"""Makes the function of a cell: `opened(cell, frames=None, on_batch=None)`."""
OnBatch: TypeAlias = Callable[[StreamResult], None] | None
SCHEMA = pa.schema([("value", pa.string()), ("id", pa.string())])
REFUSED = 4
"""The exit status of a driver whose query was refused: checkpoint and ledger do not belong together."""


class Form(StrEnum):
    SINKS = "sinks"
    TOPOLOGY = "topology"


# -- what stands for Spark -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handout:
    """A micro-batch: as with a DataFrame, each use computes it anew."""

    query: str
    compute: Callable[[], pa.Table]
    schema: pa.Schema = SCHEMA
    together: tuple[str, ...] | None = None
    plans: Mapping[int, str] = field(default_factory=dict[int, str])


def handout(query: str, *values: str, plans: Mapping[int, str] | None = None) -> Handout:
    """A micro-batch of these rows, the same ones each time that it is computed; without `plans` the checkpoint has none."""
    rows = pa.table([list(values), [f"id of {v}" for v in values]], schema=SCHEMA)
    return Handout(query, lambda: rows, plans=plans or {})


class ArrowFrames:
    """Micro-batches as Arrow tables, written by two tasks."""

    def __init__(self) -> None:
        self.computed = 0

    def require(self, frame: Handout) -> None:
        pass

    def require_batch(self, frame: Handout) -> None:
        pass

    def query_id(self, frame: Handout) -> str:
        return frame.query

    def plan(self, frame: Handout, query: str, batch: int) -> str | None:
        assert query == frame.query
        return frame.plans.get(batch)

    def schema(self, frame: Handout) -> pa.Schema:
        return frame.schema

    def select(self, frame: Handout, columns: Sequence[str]) -> Handout:
        names = list(columns)
        return replace(
            frame,
            compute=lambda: frame.compute().select(names),
            schema=pa.schema([frame.schema.field(name) for name in names]),
        )

    def gathered(self, frame: Handout, columns: Sequence[str]) -> Handout:
        return replace(frame, together=tuple(columns))

    def write(
        self, frame: Handout, writers: Mapping[str, SinkWriter], context: TaskContext, schema: pa.Schema
    ) -> WrittenRows:
        self.computed += 1
        rows = frame.compute()
        half = len(rows) // 2
        parts = [rows.slice(0, half), rows.slice(half)]
        if frame.together is not None:
            whole = rows.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
            number = task_numbers(whole[0], frame.together, 2 if frame.together else 1)
            parts = [rows.filter(pa.array(number == task)) for task in range(2)]
        done = [
            write_part(iter(part.to_batches()), writers, replace(context, task=task), schema)
            for task, part in enumerate(parts)
        ]
        return written_of([row for summary in done for row in summary.to_pylist()])

    def read_in_vain(self, frame: Handout) -> None:
        frame.compute()

    def engine(self, frame: Handout, parallelism: int | None, worker_memory_mb: int | None) -> Engine:
        return InlineEngine(parallelism or 2)


def input_folder(folder: Path) -> Path:
    """One file a micro-batch."""
    made = folder / "in"
    made.mkdir(parents=True, exist_ok=True)
    return made


def put_file(folder: Path, lines: Sequence[str]) -> None:
    """Add the input of one micro-batch, whole."""
    place = input_folder(folder)
    number = len([p for p in place.iterdir() if not p.name.startswith(".")])
    new = place / ".new"
    new.write_text("".join(f"{line}\n" for line in lines))
    stamp = 1_000_000_000 + number  # Spark takes files by their age, the oldest first
    os.utime(new, (stamp, stamp))
    new.rename(place / f"{number:06}.txt")


@dataclass
class StandInQuery:
    """A query over the input folder, with a checkpoint."""

    folder: Path
    checkpoint: Path

    def batches(self) -> Iterator[tuple[int, Handout]]:
        """What is handed out, batch after batch; a batch is done when the next one is asked for."""
        for name in ("offsets", "commits"):
            (self.checkpoint / name).mkdir(parents=True, exist_ok=True)
        metadata = self.checkpoint / "metadata"
        if not metadata.exists():
            metadata.write_text(str(uuid.uuid4()))
        query = metadata.read_text()
        while True:
            batch = len(list((self.checkpoint / "commits").iterdir()))
            file = input_folder(self.folder) / f"{batch:06}.txt"
            if not file.exists():
                return
            (self.checkpoint / "offsets" / str(batch)).write_text(file.name)
            plans = {int(entry.name): entry.read_text() for entry in (self.checkpoint / "offsets").iterdir()}
            yield batch, Handout(query, partial(_read, file), plans=plans)
            (self.checkpoint / "commits" / str(batch)).write_text("")


def _read(file: Path) -> pa.Table:
    lines = file.read_text().splitlines()
    return pa.table([lines, [uuid.uuid4().hex for _ in lines]], schema=SCHEMA)


# -- what it goes to -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamCell:
    """One query into two sinks, or into a topology with four."""

    name: str
    form: Form
    folder: Path
    database: Database
    sabotage: Callable[[], None] | None = None
    adopt: str | None = None
    query: str | None = None
    """The cell whose checkpoint its query has, where it is not its own."""

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{self.query or self.name}"

    @property
    def even(self) -> StreamCell:
        """Where a second function of the same query puts the rows with a text of even length."""
        return replace(self, name=f"{self.name}-even", query=self.query or self.name)

    def settings(self) -> Settings:
        return Settings(
            database_url=self.database.sqlalchemy_url.render_as_string(hide_password=False),
            home=self.folder / "home",
            batch_messages=5,
            master="local[2,4]",
            **(json.loads(self.staging.read_text()) if self.staging.exists() else {}),
        )

    @property
    def staging(self) -> Path:
        """A file that has further settings of its driver, where a test says that staged files are elsewhere."""
        return self.folder / "staging.json"

    def table(self, store: str, what: str) -> str:
        return f"{self.name}_{store}_{what}".replace("-", "_")

    def lose_checkpoint(self) -> None:
        shutil.rmtree(self.checkpoint)


def sinks_of(cell: StreamCell, what: str) -> tuple[DeltaSink, PostgresSink]:
    return (
        DeltaSink(str(cell.folder / "lake" / cell.table("delta", what)), name=f"delta-{what}"),
        PostgresSink(cell.table("postgres", what), name=f"postgres-{what}", database=cell.database),
    )


def topology_of(cell: StreamCell) -> Topology:
    t = Topology(cell.name)
    source = MicroBatches(
        "lines", "value string, id string", max_attempts=MAX_ATTEMPTS, backoff_base_s=0.001, backoff_max_s=0.001
    )
    split = Split(cell.folder)

    def words(value: str, id_: str) -> list[tuple[str, str]]:
        return [(word, id_) for word in split(value)]

    made = t.stream("lines", source).flat_map(words, "value", "id", schema="word string, id string")
    made.into(*sinks_of(cell, "rows"))
    made.group_by("word").persistent_aggregate(n=count()).into(*sinks_of(cell, "counts"))
    return t


def function_of(cell: StreamCell, frames: ArrowFrames | None, on_batch: OnBatch = None) -> ForeachBatch:
    """What `foreachBatch` is given."""
    settings, adopt = cell.settings(), cell.adopt
    if cell.form is Form.TOPOLOGY:
        return feed(topology_of(cell), settings=settings, adopt=adopt, on_batch=on_batch, frames=frames)
    return exactly_once(
        *sinks_of(cell, "rows"), name=cell.name, settings=settings, adopt=adopt, on_batch=on_batch, frames=frames
    )


def run_stand_in(cell: StreamCell) -> list[StreamResult]:
    """Run the query over all of its input, in this process."""
    results: list[StreamResult] = []
    function = function_of(cell, ArrowFrames(), results.append)
    for batch, handout in StandInQuery(cell.folder, cell.checkpoint).batches():
        function(handout, batch)
    function.close()
    settle(cell)
    return results


def settle(cell: StreamCell) -> None:
    """Run the retries that wait, by the topology alone."""
    if cell.form is Form.TOPOLOGY:
        topology_of(cell).run(settings=cell.settings(), engine="inline", until_idle=True)


# -- a driver in a child process -------------------------------------------------------------------------------------


def clean_environment(armed: str) -> None:
    """Nothing of the environment counts but what is armed."""
    for key in [k for k in os.environ if k.startswith(("STORMPROOF_", "PG"))]:
        del os.environ[key]
    if armed:
        os.environ[ENV] = armed
    logging.getLogger("stormproof").setLevel(logging.CRITICAL)


def _drive(cell: StreamCell, armed: str) -> None:
    from stormproof.errors import Fenced, PositionMismatch

    clean_environment(armed)
    random.seed(1)
    if cell.sabotage is not None:
        cell.sabotage()
    try:
        run_stand_in(cell)
    except Fenced:
        sys.exit(FENCED)
    except PositionMismatch as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)


def run_stream_driver(cell: StreamCell, armed: str = "") -> int:
    """Run one driver to its end; its exit status, or the negative number of the signal that killed it."""
    child = context().Process(target=_drive, args=(cell, armed), daemon=True)
    child.start()
    child.join(DRIVER_TIMEOUT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise AssertionError(f"the driver of {cell.name} (armed: {armed!r}) did not end within {DRIVER_TIMEOUT_S} s")
    return child.exitcode


# -- what the tables hold --------------------------------------------------------------------------------------------


def delta_rows(cell: StreamCell, what: str) -> list[tuple[Any, ...]]:
    path = str(cell.folder / "lake" / cell.table("delta", what))
    if not DeltaTable.is_deltatable(path):
        return []
    return [tuple(row.values()) for row in DeltaTable(path).to_pyarrow_table().to_pylist()]


def postgres_rows(cell: StreamCell, what: str) -> list[tuple[Any, ...]]:
    table = cell.table("postgres", what)
    with psycopg.connect(cell.database.conninfo) as connection:
        found = connection.execute("select to_regclass(%s)", (table,)).fetchone()
        if found is None or found[0] is None:
            return []
        return connection.execute(sql.SQL("select * from {}").format(sql.Identifier(table))).fetchall()


def first_column(rows: Sequence[tuple[Any, ...]]) -> Counter[str]:
    return Counter(str(row[0]) for row in rows)
