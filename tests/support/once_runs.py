"""A program that writes jobs by key into a Delta and a Postgres table, in a process of its own; and what must be there.

``python once_runs.py CELL KEYS`` runs it on Spark, with cell and keys as JSON. Every row has an id that is drawn anew each
time that it is computed, so that a job that was computed twice shows: the sinks would hold different ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stormproof import exactly_once
from stormproof.core.base.failpoint import ENV
from stormproof.core.postgres.database import Database
from stormproof.errors import Fenced
from stormproof.topology import OnceResult
from support.crashes import DRIVER_TIMEOUT_S, FENCED
from support.crashes import _context as context  # pyright: ignore[reportPrivateUsage]
from support.streams import (
    SCHEMA,
    ArrowFrames,
    Form,
    Handout,
    StreamCell,
    clean_environment,
    delta_rows,
    first_column,
    postgres_rows,
    sinks_of,
)
from support.verdicts import verified

TIMEOUT_S = 240
ROWS = 3


def values_of(key: str) -> list[str]:
    """The rows of a key; the last one is in every job."""
    return [*(f"{key}/{number}" for number in range(ROWS - 1)), "common"]


def frame_of(key: str, *more: str) -> Handout:
    """A job's rows, with fresh ids each time that they are computed."""
    values = [*values_of(key), *more]
    return Handout("", lambda: pa.table([values, [uuid.uuid4().hex for _ in values]], schema=SCHEMA))


def run_keys(cell: StreamCell, keys: Sequence[str], frames: ArrowFrames | None = None) -> list[OnceResult]:
    """Run these jobs, in this process."""
    with exactly_once(
        *sinks_of(cell, "rows"), name=cell.name, settings=cell.settings(), frames=frames or ArrowFrames()
    ) as write:
        return [write.once(frame_of(key), key) for key in keys]


def _drive(cell: StreamCell, keys: Sequence[str], armed: str) -> None:
    clean_environment(armed)
    if cell.sabotage is not None:
        cell.sabotage()
    try:
        run_keys(cell, keys)
    except Fenced:
        sys.exit(FENCED)


def run_program(cell: StreamCell, keys: Sequence[str], armed: str = "") -> int:
    """Run the program to its end; its exit status, or the negative number of the signal that killed it."""
    child = context().Process(target=_drive, args=(cell, keys, armed), daemon=True)
    child.start()
    child.join(DRIVER_TIMEOUT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise AssertionError(f"the program of {cell.name} (armed: {armed!r}) did not end within {DRIVER_TIMEOUT_S} s")
    return child.exitcode


def run_on_spark(cell: StreamCell, keys: Sequence[str], armed: str = "") -> int:
    """The same on Spark."""
    url = cell.database.sqlalchemy_url.render_as_string(hide_password=False)
    fields = {"name": cell.name, "folder": str(cell.folder), "database": url}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(fields), json.dumps([*keys])],
        env={**os.environ, ENV: armed, "PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=TIMEOUT_S,
        start_new_session=True,
        check=False,
        capture_output=True,
    )
    if done.returncode > 0:
        print(done.stderr.decode(errors="replace")[-3000:], file=sys.stderr)
    return done.returncode


def main() -> None:
    from stormproof.core.engine.spark import spark_session

    fields = json.loads(sys.argv[1])
    cell = StreamCell(fields["name"], Form.SINKS, Path(fields["folder"]), Database.from_url(fields["database"]))
    clean_environment(os.environ.get(ENV, ""))
    session = spark_session(cell.settings())
    with exactly_once(*sinks_of(cell, "rows"), name=cell.name, settings=cell.settings()) as write:
        for key in json.loads(sys.argv[2]):
            rows = session.createDataFrame([(value,) for value in values_of(key)], "value string")
            print(write.once(rows.selectExpr("value", "uuid() as id"), key))


@dataclass(slots=True)
class Program:
    """One program, started again and again with all keys so far, and killed."""

    cell: StreamCell
    start: Callable[[StreamCell, Sequence[str], str], int]
    starts: int = 0

    @property
    def keys(self) -> list[str]:
        """The keys of every start so far, the newest first: they come in any order."""
        return [f"day {number}{half}" for number in range(self.starts, 0, -1) for half in "ba"]

    def killed_at(self, armed: str) -> int:
        """Start it with two new keys and all old ones; then check tables and audit. Its exit status."""
        self.starts += 1
        code = self.start(self.cell, self.keys, armed)
        require_not_too_many(self.cell, self.keys)
        if self.starts > 1:  # the first start may end before there is anything in the ledger
            report = verified(self.cell.name, self.cell.database)
            assert report.clean, (armed, report.violations, report.unknowns)
        return code


def expected(keys: Sequence[str]) -> Counter[str]:
    """What the tables must hold, from the input alone."""
    return Counter(value for key in set(keys) for value in values_of(key))


def require_not_too_many(cell: StreamCell, keys: Sequence[str]) -> None:
    """No job is there twice, at any time."""
    for rows in (delta_rows(cell, "rows"), postgres_rows(cell, "rows")):
        extra = first_column(rows) - expected(keys)
        assert not extra, f"too many of {dict(extra)}"


def require_exact(cell: StreamCell, keys: Sequence[str]) -> None:
    """Both tables hold each job once, and rows of one and the same computation."""
    delta, postgres = delta_rows(cell, "rows"), postgres_rows(cell, "rows")
    assert first_column(delta) == expected(keys)
    assert sorted(delta) == sorted(postgres), "the sinks hold rows of different computations"


if __name__ == "__main__":
    main()
