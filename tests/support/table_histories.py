"""Random histories of sinks' tables in which all is as it should be: runs, crashes, upkeep, and operators' decisions.

A database is restored elsewhere and adopted, a ledger is lost and begun anew, another topology takes over the tables, rows
get more columns, and Spark commits to some of the tables.
"""

from __future__ import annotations

import decimal
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from stormproof import DeltaSink, PostgresSink, Topology
from stormproof.core.base.errors import PositionMismatch
from stormproof.core.postgres.database import Database, connect
from stormproof.sinks.contract.protocol import Sink
from support.crashes import Cell, run_driver
from support.operated import Operated
from support.queues import prepared_database
from support.topologies import source_of

NAME: Final = "history"
SCHEMA: Final = (
    "k string, at bigint, g string, x double, price decimal(10,2), day date, seen timestamp, yes boolean, made string"
)
MORE: Final = "more double"
"""A column that rows get in the course of a history."""
UPSERT: Final[dict[str, Any]] = {"mode": "upsert", "key": "k", "order_by": "at"}
POINTS: Final = (
    "prepare.after",
    "delta.before_commit",
    "delta.after_log_entry",
    "postgres.after_rows",
    "postgres.after_commit",
    "task.after_file",
)
POSTGRES: Final = {"postgres": "plain", "postgres-lineage": "traced", "postgres-upsert": "newest"}
"""The tables of the sinks in Postgres."""


def rows_of(line: str, *, wide: bool) -> list[tuple[Any, ...]]:
    """A few rows with values of every type, some of them NULL."""
    rng = random.Random(line)
    rows = [
        (
            f"k{rng.randrange(6)}",
            int(line) * 10 + i,
            rng.choice(["a", "b", None]),
            rng.choice([0.5, -0.0, float("nan"), 1e300, None]),
            rng.choice([decimal.Decimal("1.10"), decimal.Decimal(-3), None]),
            date(2026, 1, 1 + rng.randrange(28)),
            datetime.fromtimestamp(rng.randrange(10**9), UTC),
            rng.random() < 0.5,
            line,
        )
        for i in range(rng.randrange(4))
    ]
    return [(*row, rng.choice([0.25, None])) for row in rows] if wide else rows


def sinks_of(folder: Path, database: Database, *, by_spark: bool) -> list[Sink]:
    """Six tables; and two that Spark commits to."""
    lake = folder / "lake"
    evolve: dict[str, Any] = {"schema_contract": "evolve"}
    more: list[Sink] = [
        DeltaSink(lake / "sparks", name="delta-spark", committer="spark", content_digests=True),
        DeltaSink(lake / "sparks_newest", name="delta-spark-upsert", committer="spark", **UPSERT, lineage=True),
    ]
    return [
        DeltaSink(lake / "plain", name="delta", content_digests=True, **evolve),
        DeltaSink(lake / "parts", name="delta-parts", partition_by="g", lineage=True, content_digests=True, **evolve),
        DeltaSink(lake / "newest", name="delta-upsert", **UPSERT, lineage=True, **evolve),
        PostgresSink("plain", name="postgres", database=database, **evolve),
        PostgresSink("traced", name="postgres-lineage", database=database, lineage=True, **evolve),
        PostgresSink("newest", name="postgres-upsert", database=database, **UPSERT, lineage=True, **evolve),
        *(more if by_spark else []),
    ]


def build(cell: Cell, *, name: str = NAME, wide: bool = False, by_spark: bool = False) -> Topology:
    """Every row to every table."""
    t = Topology(name)
    lines = t.stream("lines", source_of(cell.queue, cell.database))
    schema = f"{SCHEMA}, {MORE}" if wide else SCHEMA
    rows = lines.flat_map(partial(rows_of, wide=wide), "line", schema=schema)
    rows.into(*sinks_of(cell.folder, cell.database, by_spark=by_spark))
    return t


class History:
    """One history, by its seed; `check` is called after each step, with the names of the topologies that are to be clean."""

    def __init__(
        self, run: Operated, seed: int, check: Callable[[str, list[str]], None], *, by_spark: bool = False
    ) -> None:
        self._given, self._rng, self._check = run, random.Random(seed), check
        self._next = 0
        self._by_spark = by_spark
        self._wide = False
        self.names = [NAME]
        """The topologies; the last one runs, the others did before."""

    def play(self, steps: int) -> None:
        """Play it."""
        self.runs()
        for _ in range(steps):
            upkeep = (self._compacts, self._optimizes, self._vacuums, self._prunes, self._skips, self._moves)
            decided = (self.is_restored_elsewhere, self.is_taken_over, self.begins_anew, self.gets_wider)
            step = self._rng.choice([self.runs, self.runs, self.crashes, self.crashes, *upkeep, *decided])
            step()
            self._check(step.__name__, self.names)
        self.runs()
        self._check("the last run", self.names)

    @property
    def run(self) -> Operated:
        """The topology that runs now."""
        built = partial(build, name=self.names[-1], wide=self._wide, by_spark=self._by_spark)
        return replace(self._given, cell=replace(self._given.cell, build=built))

    # -- runs --------------------------------------------------------------------------------------------------------

    def runs(self) -> None:
        """New messages, and a run until nothing is left of them."""
        self._put()
        self._run()

    def crashes(self) -> None:
        """A run is killed."""
        self._put()
        run_driver(self.run.cell, f"{self._rng.choice(POINTS)}=kill@{self._rng.randint(1, 3)}")

    def _put(self) -> None:
        lines = range(self._next, self._next + self._rng.randint(1, 9))
        self._next = lines.stop
        self._given.put(*(str(i).encode() for i in lines))

    def _run(self) -> None:
        """A run; each refusal is answered as its text says, which a person decides."""
        for _ in range(20):
            run = self.run
            assert run.cell.build is not None
            try:
                run.run(run.cell.build(run.cell))
            except PositionMismatch as refused:
                *_, command, name, about = str(refused).split(" ")
                if command not in ("adopt", "accept-change"):
                    raise
                self._given.command("ledger", command, name, about, "--why", "as it should be")
            else:
                return
        raise AssertionError("the run is refused whatever is decided")

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def _compacts(self) -> None:
        self._given.command("compact", self.names[-1])

    def _optimizes(self) -> None:
        for name in ("plain", "parts", "newest", *(["sparks"] if self._by_spark else [])):
            DeltaTable(self._given.cell.folder / "lake" / name).optimize.compact()

    def _vacuums(self) -> None:
        for name in ("plain", "parts"):
            table = DeltaTable(self._given.cell.folder / "lake" / name)
            table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def _prunes(self) -> None:
        for name in self.names:
            self._given.command("ledger", "prune", name, "--older-than", "0s")

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _skips(self) -> None:
        """A batch whose content is fixed is given up for one sink."""
        self._put()
        run_driver(self.run.cell, "prepare.after=kill@1")
        prepared = self._given.sql("select txid from stormproof.txn where state = 'prepared'")
        if prepared:
            sink = self._rng.choice(["postgres", "delta"])
            self._given.command("ledger", "skip", self.names[-1], str(prepared[0][0]), sink)

    def _moves(self) -> None:
        """A table of Postgres is restored from a dump, and adopted."""
        self._run()
        sink = self._rng.choice(["postgres", "postgres-lineage"])
        name = POSTGRES[sink]
        for statement in (
            f"alter table {name} rename to {name}_before",
            f"create table {name} (like {name}_before including all)",
            f"insert into {name} select * from {name}_before order by random()",
            f"drop table {name}_before",
        ):
            self._given.sql(statement)
        for topology in self.names:
            self._given.command("ledger", "adopt-table", topology, sink, "--why", "restored")

    def is_restored_elsewhere(self) -> None:
        """The whole database is restored on another server, beside the same Delta tables; tables and queue are adopted."""
        database = self._given.cell.database
        name = dict(database.parameters)["dbname"]
        with connect(database.with_name("postgres"), application_name="tests", autocommit=True) as server:
            for statement in (
                f"select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = '{name}'",
                f"create database {name}_moved template {name}",
                f"drop database {name} with (force)",
                f"alter database {name}_moved rename to {name}",
            ):
                server.execute(statement.encode())
        self._given.sql("update stormproof.queue set server = '4711'")
        self._given.sql(
            "update stormproof.pending_subscription set position = jsonb_set(position, '{server}', '\"4711\"')"
            " where position ? 'server'"
        )
        for topology in self.names:
            for sink in POSTGRES:
                self._given.command("ledger", "adopt-table", topology, sink, "--why", "restored")
        self._given.command("queue", "adopt", self._given.cell.queue, "--why", "restored on another server")

    def is_taken_over(self) -> None:
        """A topology of another name reads the queue from its start, beside the rows of the one before."""
        self._run()  # which leaves nothing prepared
        self.names.append(f"{NAME}-{len(self.names)}")
        self._run()

    def begins_anew(self) -> None:
        """The ledger is lost; a new life of the topology reads the queue from its start, beside the rows of the old one."""
        self._given.sql("drop schema stormproof cascade")
        prepared_database(self._given.cell.database)
        del self.names[:-1]
        self.runs()

    def gets_wider(self) -> None:
        """Rows get a column, and so do the tables: to those that Spark commits to a person adds it."""
        self._run()  # which leaves nothing prepared: a batch of the narrower rows would refuse the start
        if self._by_spark and not self._wide:
            for name in ("sparks", "sparks_newest"):
                table = DeltaTable(self._given.cell.folder / "lake" / name)
                table.alter.add_columns(Field(MORE.partition(" ")[0], PrimitiveType("double")))
        self._wide = True
        self.runs()
