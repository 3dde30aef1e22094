"""Maps in Postgres and Delta and a user's own store behind one topology, with real ledger and queue: crashes and audit."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from support.command_line import CommandLine

from stormproof.core.base.failpoint import ENV, FailpointError
from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres

FILE = """
import sqlite3
from collections.abc import Mapping, Sequence
from functools import partial

from stormproof import DeltaMap, PostgresMap, PostgresQueue, Topology, count
from stormproof.state import OpaqueMap, StateSink, TransactionalMap


class Sqlite:
    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path, check_same_thread=False)
        self.connection.execute("create table if not exists items (key blob primary key, value blob)")

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        found = (self.connection.execute("select value from items where key = ?", (k,)).fetchone() for k in keys)
        return [None if row is None else row[0] for row in found]

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        for item in items.items():
            with self.connection:  # each key is durable on its own
                self.connection.execute("insert or replace into items values (?, ?)", item)

    def close(self) -> None:
        self.connection.close()


def topology(lake: str, own: str = "opaque") -> Topology:
    t = Topology("words")
    store = (OpaqueMap if own == "opaque" else TransactionalMap)(partial(Sqlite, f"{lake}/own.db"), name="own.db")
    (t.stream("lines", PostgresQueue("lines")).flat_map(str.split, "line", schema="word string").group_by("word")
      .persistent_aggregate(n=count())
      .into(StateSink("delta", DeltaMap(f"{lake}/counts")), StateSink("pg", PostgresMap("counts", "transactional")),
            StateSink("own", store)))
    return t
"""
LINES = [f"a w{i % 3} m{i}" for i in range(32)]
TRUTH = Counter(word for line in LINES for word in line.split())


@dataclass
class Shell:
    """Runs commands in this process, against one database."""

    database: Database
    folder: Path
    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> tuple[int, Any]:
        code, out, _ = CommandLine(self.capture).ended(*arguments, "--json")
        assert isinstance(code, int)
        return code, json.loads(out) if out else None

    def run(self) -> int:
        target = f"{self.folder / 'state_words.py'}:topology"
        options = ("--param", f"lake={self.folder}", "--engine", "inline", "--until-idle", "--max-messages", "4")
        return self("run", target, *options)[0]

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def counts(self) -> dict[str, Counter[str]]:
        with sqlite3.connect(self.folder / "own.db") as connection:
            items = connection.execute("select key, value from items").fetchall()
        connection.close()
        return {
            "pg": Counter(dict(self.sql("select word, n from counts"))),
            "delta": Counter(
                {r["word"]: r["n"] for r in DeltaTable(self.folder / "counts").to_pyarrow_table().to_pylist()}
            ),
            "own": Counter({json.loads(k)[0]: json.loads(v)["n"] for k, v in items if k.startswith(b"[")}),
        }


@pytest.fixture
def shell(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "state_words.py").write_text(FILE)
    (tmp_path / "lines.txt").write_text("".join(f"{line}\n" for line in LINES))
    made = Shell(database, tmp_path, capsys)
    assert made("ledger", "migrate")[0] == 0
    assert made("queue", "put", "lines", "--lines", str(tmp_path / "lines.txt"))[0] == 0
    return made


def test_states_survive_a_driver_that_dies_in_each_commit(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = [
        f"state.{place}=error@{sink}" for place in ("after_begin", "after_rows", "after_commit") for sink in (1, 2, 3)
    ]
    died = 0
    for death in [*deaths, "delta.after_log_entry=error", "delta.after_check=error"]:
        monkeypatch.setenv(ENV, death)
        try:
            died += shell.run() != 0
        except FailpointError:
            died += 1
    monkeypatch.delenv(ENV)
    assert died > 8, died
    assert shell.run() == 0
    assert shell.counts() == {"pg": TRUTH, "delta": TRUTH, "own": TRUTH}
    status, report = shell("audit", "verify", "words")
    assert report["violations"] == []
    # What the user's own store took cannot be asked without its code: cannot tell.
    assert status == 4
    assert {u["sink"] for u in report["unknowns"]} == {"own"}
    assert report["checked"]["evidence"] == 2 * report["checked"]["committed"]


def test_the_audit_sees_a_guard_that_was_changed(shell: Shell) -> None:
    assert shell.run() == 0
    shell.sql("update stormproof_sink.guard set last_txid = last_txid - 1 where sink = 'pg' returning 1")
    status, report = shell("audit", "verify", "words")
    assert status == 1
    assert {v["sink"] for v in report["violations"]} == {"pg"}


def test_a_map_of_another_topology_is_refused(shell: Shell) -> None:
    assert shell.run() == 0
    other = (shell.folder / "state_words.py").read_text().replace('Topology("words")', 'Topology("others")')
    (shell.folder / "state_words.py").write_text(other)
    sys.modules.pop("state_words", None)
    assert shell.run() != 0
    assert shell.counts() == {"pg": TRUTH, "delta": TRUTH, "own": TRUTH}
