"""Other programs write to our tables meanwhile: nothing is lost and nothing doubled, on either side.

The long form: ``FOREIGN_COMMITS=500 pytest tests/integration/test_foreign_writers.py --all -s``.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from support import foreign_writer
from support.foreign_writer import FIRST, SCHEMA, TABLES
from support.queues import prepared_database
from support.streams import ArrowFrames, Form, Handout, StreamCell
from support.verdicts import verified

from stormproof import DeltaSink, PostgresSink, exactly_once
from stormproof.core.postgres.database import Database, connect
from stormproof.sinks.delta import session

pytestmark = pytest.mark.postgres
COMMITS = int(os.environ.get("FOREIGN_COMMITS", "20"))
QUERY = str(uuid.UUID(int=12))
KEYS = 40
Row = tuple[int, int, int]


class _Calling(logging.Handler):
    """Calls a function with each record."""

    def __init__(self, function: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._function = function

    def emit(self, record: logging.LogRecord) -> None:
        """Call it."""
        self._function(record)


class Soak:
    """Four sinks of one batch each, and another program beside them."""

    def __init__(self, folder: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
        self.folder, self.database = folder, prepared_database(database)
        self.ours: list[list[Row]] = []
        self.rng = random.Random(12)
        self.lost_to_others = 0
        self.compacted = 0

    def run(self, commits: int, kind: str) -> dict[str, Any]:
        """So many batches; what the other program did meanwhile."""
        every = None if kind == "delta-rs" else 11  # the other program compacts it
        append, upsert = (self.folder / "lake" / name for name in TABLES)
        function = exactly_once(
            DeltaSink(append, compact_every=7),
            DeltaSink(upsert, mode="upsert", key="id", order_by="v", compact_every=every),
            PostgresSink("pg_append"),
            PostgresSink("pg_upsert", mode="upsert", key="id", order_by="v"),
            name="soak",
            settings=StreamCell("soak", Form.SINKS, self.folder, self.database).settings(),
            frames=ArrowFrames(),
        )
        with self._counted():
            self._put(function)  # makes the tables
            with self._beside(kind) as told:
                for _ in range(commits - 1):
                    self._put(function)
        function.close()
        return told

    def _put(self, function: Any) -> None:
        number = len(self.ours)
        rows = [(self.rng.randrange(KEYS), number, self.rng.randrange(1000)) for _ in range(20)]
        self.ours.append(rows)
        columns = [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)]
        function(Handout(QUERY, lambda: pa.table(columns, schema=SCHEMA), SCHEMA), number)

    @contextmanager
    def _beside(self, kind: str) -> Generator[dict[str, Any]]:
        told: dict[str, Any] = {}
        command = [sys.executable, foreign_writer.__file__, kind, str(self.folder), self.database.adbc_uri, "5"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                while not (self.folder / "ready").exists():
                    assert child.poll() is None
                    time.sleep(0.01)
                yield told
            finally:
                (self.folder / "stop").touch()
            out, _ = child.communicate(timeout=120)
            assert child.returncode == 0
            told.update(json.loads(out.splitlines()[-1]))

    @contextmanager
    def _counted(self) -> Generator[None]:
        def count(record: logging.LogRecord) -> None:
            text = record.getMessage()
            self.lost_to_others += "tried again" in text or "begins again" in text
            self.compacted += "in version" in text and "files are" in text

        log, handler = logging.getLogger("stormproof.sink"), _Calling(count)
        level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)

    def differences(self, told: dict[str, Any]) -> dict[str, tuple[Counter[Any], Counter[Any]]]:
        """By table, the rows that it has too many and too few, by what went in."""
        all_ours = [row for batch in self.ours for row in batch]
        last = dict[int, int]()
        for row in all_ours:
            last[row[0]] = max(row[2], last.get(row[0], 0))
        differences = dict[str, tuple[Counter[Any], Counter[Any]]]()
        for name, rows in self._tables().items():
            theirs = [(FIRST + n, FIRST + n) for n in range(told["written"][name])]
            ours = [(id_, v) for id_, _, v in all_ours] if name.endswith("append") else list(last.items())
            found, should = Counter((id_, v) for id_, _, v in rows), Counter([*ours, *theirs])
            if found != should:
                differences[name] = found - should, should - found
        return differences

    def _tables(self) -> dict[str, list[Row]]:
        found = dict[str, list[Row]]()
        for name in TABLES:
            rows = DeltaTable(self.folder / "lake" / name).to_pyarrow_table().to_pylist()
            found[name] = [(row["id"], row["day"], row["v"]) for row in rows]
        with connect(self.database, application_name="test", autocommit=True) as connection:
            for name in ("pg_append", "pg_upsert"):
                found[name] = connection.execute(f"select id, day, v from {name}".encode()).fetchall()
        return found


@pytest.fixture
def soak(tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> Soak:
    return Soak(tmp_path, database, monkeypatch)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kind", ["delta-rs", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.sampled(0.3)])]
)
def test_nothing_is_lost_or_doubled_beside_other_writers(soak: Soak, kind: str) -> None:
    began_s = time.monotonic()
    told = soak.run(COMMITS, kind)
    took_s = time.monotonic() - began_s
    print(f"\n{kind}: {COMMITS} commits x 4 sinks in {took_s:.1f} s; {told}; ours: {soak.lost_to_others} conflicts tried "
          f"again, {soak.compacted} compactions")  # fmt: skip
    assert soak.differences(told) == {}
    assert sum(told["written"].values()) > 0
    report = verified("soak", soak.database)
    assert (report.violations, report.unknowns) == ((), ())


def test_control_a_compaction_that_drops_a_file_is_noticed(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both: by the rows that went in, and by the audit."""
    dropped: list[str] = []
    real = session.DeltaSession.compact

    def dropping(self: session.DeltaSession, target_bytes: int | None = None) -> Any:
        done = real(self, target_bytes)
        if done.version is not None and not dropped:
            entry = self.log.entry(done.version)
            assert entry is not None
            dropped.append(entry.added[0].path)
            path = Path(self.log.entry_path(done.version))
            lines = [line for line in path.read_text().splitlines() if not line.startswith('{"add"')]
            path.write_text("".join(f"{line}\n" for line in lines))
        return done

    monkeypatch.setattr(session.DeltaSession, "compact", dropping)
    told = soak.run(9, "delta-rs")
    assert dropped
    assert soak.differences(told)["delta_append"][1]
    assert verified("soak", soak.database).violations
