"""A ledger to look at: a run with a message that failed once, a dead letter, a reject and a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from stormproof.core.postgres.database import Database, connect
from support.command_line import CommandLine, command_line_in

NAME: Final = "shown"
PAYLOAD: Final = "secret-7f3a"
FILE: Final = f"""
from pathlib import Path

from stormproof import PostgresQueue, PostgresSink, Topology

def number(line: str) -> int:
    if line == "once" and not Path("tried").exists():
        Path("tried").touch()
        raise ValueError("the first time, of " + line)
    if line == "refused":
        return -1
    return 7 if line == "once" else int(line)

def topology(name: str = "{NAME}") -> Topology:
    t = Topology(name)
    source = PostgresQueue("shown", max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)
    t.stream("lines", source).map(number, "line", schema="n int").into(PostgresSink("numbers"))
    return t
"""
TARGET: Final = "shown.py:topology"


def sql(database: Database, statement: str, *values: object) -> list[tuple[Any, ...]]:
    with connect(database, application_name="tests", autocommit=True) as connection:
        found = connection.execute(statement.encode(), values or None)
        return [] if found.description is None else found.fetchall()


def shown_in(
    folder: Path, database: Database, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
) -> CommandLine:
    """Such a ledger in this database, with the command line."""
    command = command_line_in(folder, database, "shown.py", FILE, monkeypatch, capture)
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "1")
    command("ledger", "migrate")
    sql(database, "create table numbers (n int check (n >= 0))")
    (folder / "lines").write_text("\n".join(["1", "2", "once", "refused", PAYLOAD]))
    command("queue", "put", "shown", "--lines", "lines")
    command("run", TARGET, "--engine", "inline", "--until-idle")
    command("audit", "verify", NAME, "--by", "auditor")
    return command
