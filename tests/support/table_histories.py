"""Random histories of sinks' tables in which all is as it should be: runs, crashes, upkeep, and operators' decisions."""

from __future__ import annotations

import decimal
import random
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

from deltalake import DeltaTable

from stormproof import DeltaSink, PostgresSink, Topology
from stormproof.core.postgres.database import Database
from stormproof.sinks.protocol import Sink
from support.crashes import Cell, run_driver
from support.operated import Operated
from support.topologies import source_of

NAME: Final = "history"
SCHEMA: Final = "k string, at bigint, g string, x double, price decimal(10,2), day date, seen timestamp, yes boolean"
UPSERT: Final[dict[str, Any]] = {"mode": "upsert", "key": "k", "order_by": "at"}
POINTS: Final = (
    "prepare.after",
    "delta.before_commit",
    "delta.after_log_entry",
    "postgres.after_rows",
    "postgres.after_commit",
    "task.after_file",
)


def rows_of(line: str) -> list[tuple[Any, ...]]:
    """A few rows with values of every type, some of them NULL."""
    rng = random.Random(line)
    return [
        (
            f"k{rng.randrange(6)}",
            int(line) * 10 + i,
            rng.choice(["a", "b", None]),
            rng.choice([0.5, -0.0, float("nan"), 1e300, None]),
            rng.choice([decimal.Decimal("1.10"), decimal.Decimal(-3), None]),
            date(2026, 1, 1 + rng.randrange(28)),
            datetime.fromtimestamp(rng.randrange(10**9), UTC),
            rng.random() < 0.5,
        )
        for i in range(rng.randrange(4))
    ]


def sinks_of(folder: Path, database: Database) -> list[Sink]:
    lake = folder / "lake"
    return [
        DeltaSink(lake / "plain", name="delta", content_digests=True),
        DeltaSink(lake / "parts", name="delta-parts", partition_by="g", lineage=True),
        DeltaSink(lake / "newest", name="delta-upsert", **UPSERT, lineage=True),
        PostgresSink("plain", name="postgres", database=database),
        PostgresSink("traced", name="postgres-lineage", database=database, lineage=True),
        PostgresSink("newest", name="postgres-upsert", database=database, **UPSERT, lineage=True),
    ]


def build(cell: Cell) -> Topology:
    """Every row to six tables."""
    t = Topology(NAME)
    rows = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(rows_of, "line", schema=SCHEMA)
    rows.into(*sinks_of(cell.folder, cell.database))
    return t


class History:
    """One history, by its seed; `check` is called after each step."""

    def __init__(self, run: Operated, seed: int, check: Callable[[str], None]) -> None:
        self._run, self._rng, self._check = run, random.Random(seed), check
        self._next = 0
        self._begun = False

    def play(self, steps: int) -> None:
        """Play it."""
        self._runs()
        for _ in range(steps):
            upkeep = (self._compacts, self._optimizes, self._vacuums, self._prunes, self._skips, self._moves)
            step = self._rng.choice([self._runs, self._runs, self._crashes, *upkeep])
            step()
            self._check(step.__name__)
        self._runs()
        self._check("the last run")

    def _put(self) -> None:
        lines = range(self._next, self._next + self._rng.randint(1, 9))
        self._next = lines.stop
        self._run.put(*(str(i).encode() for i in lines))

    def _runs(self) -> None:
        self._put()
        self._run.run(build(self._run.cell))

    def _crashes(self) -> None:
        self._put()
        run_driver(self._run.cell, f"{self._rng.choice(POINTS)}=kill@{self._rng.randint(1, 3)}")

    def _compacts(self) -> None:
        self._run.command("compact", NAME)

    def _optimizes(self) -> None:
        for name in ("plain", "parts", "newest"):
            DeltaTable(self._run.cell.folder / "lake" / name).optimize.compact()

    def _vacuums(self) -> None:
        for name in ("plain", "parts"):
            table = DeltaTable(self._run.cell.folder / "lake" / name)
            table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def _prunes(self) -> None:
        self._run.command("ledger", "prune", NAME, "--older-than", "0s")

    def _skips(self) -> None:
        """A batch whose content is fixed is given up for one sink."""
        self._put()
        run_driver(self._run.cell, "prepare.after=kill@1")
        prepared = self._run.sql("select txid from stormproof.txn where state = 'prepared'")
        if prepared:
            self._run.command("ledger", "skip", NAME, str(prepared[0][0]), self._rng.choice(["postgres", "delta"]))

    def _moves(self) -> None:
        """A table of Postgres is restored from a dump, and adopted."""
        self._run.run(build(self._run.cell))
        name = self._rng.choice(["plain", "traced"])
        sink = {"plain": "postgres", "traced": "postgres-lineage"}[name]
        for statement in (
            f"alter table {name} rename to {name}_before",
            f"create table {name} (like {name}_before including all)",
            f"insert into {name} select * from {name}_before order by random()",
            f"drop table {name}_before",
        ):
            self._run.sql(statement)
        self._run.command("ledger", "adopt-table", NAME, sink, "--why", "restored")
