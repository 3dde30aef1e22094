"""Further Postgres servers: one that a database is restored in, and one that follows another and is promoted."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from stormproof.core.postgres.binaries import find_binaries, run_as
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from support.databases import create_database

WAIT_S = 60


def program(*command: str) -> bytes:
    """Run one of Postgres's own programs; what it wrote to standard output."""
    folder = find_binaries().folder
    done = subprocess.run([str(folder / command[0]), *command[1:]], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def dump(database: Database, to: Path) -> Path:
    """As an operator does."""
    program("pg_dump", "--format=custom", f"--file={to}", f"--dbname={database.conninfo}")
    return to


def restore(dumped: Path, server: Database, name: str) -> Database:
    """In a new database of that server."""
    database = create_database(server.with_name("postgres"), name)
    program("pg_restore", "--exit-on-error", f"--dbname={database.conninfo}", str(dumped))
    return database


def sql(database: Database, statement: str) -> list[tuple[object, ...]]:
    """One statement, at once."""
    with connect(database, application_name="tests", autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return [] if cursor.description is None else cursor.fetchall()


def use_numbers(database: Database, transactions: int) -> None:
    """Have the server give out transaction numbers."""
    sql(
        database,
        f"do $$ begin for i in 1..{transactions} loop perform pg_current_xact_id(); commit; end loop; end $$",
    )


def standby_of(primary: Database, home: Path) -> EmbeddedPostgres:
    """A running standby that streams from the primary."""
    (home / "postgres").mkdir(parents=True, mode=0o700)
    data = home / "postgres" / "data"
    program("pg_basebackup", f"--dbname={primary.conninfo}", f"--pgdata={data}", "--checkpoint=fast", "-R")
    owner = run_as().owner
    if owner is not None:
        subprocess.run(["chown", "-R", f"{owner[0]}:{owner[1]}", str(data)], check=True)
    server = EmbeddedPostgres(home)
    server.acquire()
    return server


def promote(standby: EmbeddedPostgres, primary: Database) -> None:
    """Make it a primary of its own, once it has all that the old one wrote; returns once it is one."""
    (at,) = sql(primary, "select pg_current_wal_lsn()")[0]
    until_s = time.monotonic() + WAIT_S
    while sql(standby.database, f"select pg_last_wal_replay_lsn() >= '{at}'::pg_lsn") != [(True,)]:
        assert time.monotonic() < until_s, "the standby does not follow"
        time.sleep(0.01)
    assert sql(standby.database, "select pg_promote(true, 60)") == [(True,)]
