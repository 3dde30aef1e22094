"""Empty databases on a running server."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from stormproof.core.postgres.database import Database, connect


def create_database(server: Database, name: str) -> Database:
    """An empty database of this name, which was not there."""
    with connect(server, application_name="tests", autocommit=True) as connection:
        connection.execute(f"create database {name} template template0".encode())
    return server.with_name(name)


def drop_database(server: Database, name: str) -> None:
    """Drop it where it is there, and end the sessions that use it."""
    with connect(server, application_name="tests", autocommit=True) as connection:
        connection.execute(f"drop database if exists {name} with (force)".encode())


@contextmanager
def fresh_database(server: Database, name: str) -> Generator[Database]:
    """An empty database that is dropped in the end."""
    yield create_database(server, name)
    drop_database(server, name)
