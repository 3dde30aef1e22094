"""The example of a source of one's own passes the suite of every source, and runs a topology exactly once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sqlite_source import SqliteSource, topology
from support.queues import prepared_database
from support.verdicts import verified

from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.start.settings import Settings
from stormproof.testing import PendingSourceHarness, SourceConformance, SourceHarness

pytestmark = pytest.mark.postgres


def put(file: Path, payloads: Sequence[bytes | str], table: str = "lines") -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"create table if not exists {table} (id integer primary key autoincrement, payload blob)")
        connection.executemany(
            f"insert into {table} (payload) values (?)",
            [(payload,) for payload in payloads],
        )


@dataclass
class SqliteHarness(PendingSourceHarness[SqliteSource]):
    """Over `SqliteSource`; its name is the table's."""

    file: Path

    def __post_init__(self) -> None:
        put(self.file, [], self.name)

    def put(self, payloads: Sequence[bytes]) -> None:
        put(self.file, payloads, self.name)

    def made(self, **options: Any) -> SqliteSource:
        return SqliteSource(
            self.file,
            self.name,
            schema="payload binary",
            database=self.database,
            max_attempts=self.max_attempts,
            rng=Random(1),
            **options,
        )


@pytest.fixture(scope="module")
def shared_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """One database for all cases, which keep apart by their table's name."""
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"create database test_sqlite_source template template0")
    yield prepared_database(postgres.database.with_name("test_sqlite_source"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute(b"drop database test_sqlite_source with (force)")


@pytest.fixture
def harness(request: pytest.FixtureRequest, shared_database: Database, tmp_path: Path) -> Iterator[SqliteHarness]:
    table = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    harness = SqliteHarness(shared_database, table, tmp_path / "messages.db")
    yield harness
    harness.close()


class TestSqliteSource(SourceConformance):
    """The rows of an SQLite table."""

    @pytest.fixture
    def harness(self, harness: SqliteHarness) -> SourceHarness:
        return harness


def test_a_topology_applies_each_row_once_while_its_drivers_die(database: Database, tmp_path: Path) -> None:
    prepared_database(database)
    put(tmp_path / "lines.db", ["to be or not", "to be", "that is"])
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(tmp_path), batch_messages=1)

    def run() -> None:
        topology(str(tmp_path / "lines.db")).run("exactly-once", engine="inline", until_idle=True, settings=settings)

    for point in ("open.after", "prepare.after", "commit.after_sink"):
        with armed(f"{point}=error"), pytest.raises(FailpointError):
            run()
    run()
    with connect(database, application_name="tests") as connection:
        found = connection.execute("select word, n from sqlite_words order by word").fetchall()
    assert found == [("be", 2), ("is", 1), ("not", 1), ("or", 1), ("that", 1), ("to", 2)]
    assert verified("sqlite-words", database).clean


def test_a_row_that_was_deleted_while_it_is_pending_is_refused_by_name(harness: SqliteHarness) -> None:
    harness.put([b"a", b"b", b"c"])
    with closing(sqlite3.connect(harness.file)) as connection, connection:
        connection.execute(f"delete from {harness.name} where id = 2")
    with pytest.raises(PositionMismatch, match="rows 1 to 3 only 2 are there"):
        harness.view().open(Lease("a", 1), Limit(9), 7)


def test_a_file_that_is_away_is_an_outage(harness: SqliteHarness) -> None:
    harness.put([b"a"])
    source = harness.view()
    harness.file.rename(harness.file.with_suffix(".away"))
    with pytest.raises(StoreUnavailable, match="unable to open"):
        source.open(Lease("a", 1), Limit(9), 7)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="use letters"):
        SqliteSource("lines.db", "lines; drop table x")
