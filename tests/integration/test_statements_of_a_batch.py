"""What a batch of a queue asks of Postgres: each statement costs a round trip, however few messages the batch has."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.queues import prepared_database

from stormproof import MemorySink, PostgresQueue, Topology
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.run import driver

pytestmark = pytest.mark.postgres

OPEN, PREPARE, FINISH = 8, 3, 3


def test_a_batch_takes_three_transactions_and_fourteen_statements(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared_database(database)
    queue = PostgresQueue("lines", "line string", database=database)
    topology = Topology("few")
    topology.stream("lines", queue).into(MemorySink(staging=tmp_path))
    statements, commits = list[object](), list[psycopg.Connection]()
    execute, commit = psycopg.Cursor.execute, psycopg.Connection.commit

    def counted(cursor: Any, statement: Any, *arguments: Any, **options: Any) -> Any:
        statements.append(statement)
        return execute(cursor, statement, *arguments, **options)

    def committed(connection: psycopg.Connection) -> None:
        commits.append(connection)
        commit(connection)

    settings = Settings(database_url=database.adbc_uri, staging_dir=str(tmp_path))
    with closing(queue), driver(topology, settings=settings, engine="inline") as coordinator:
        coordinator.recover(sweep=True)
        queue.put([b"first"])
        assert coordinator.step() is not None  # the first one also does the housekeeping
        queue.put([b"second"])
        monkeypatch.setattr(psycopg.Cursor, "execute", counted)
        monkeypatch.setattr(psycopg.Connection, "commit", committed)
        assert coordinator.step() is not None
        monkeypatch.undo()
    assert len(commits) == 3
    assert len(statements) == OPEN + PREPARE + FINISH, "\n".join(map(str, statements))
