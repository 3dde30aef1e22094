"""Roles of a Postgres server with the least rights of each kind, as `ledger sql --grants` prints them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pytest

from stormproof.core.postgres.database import Database
from stormproof.core.postgres.role import RoleKind
from stormproof.trident.cli.ledger import grants_sql
from support.operated import Operated
from support.servers import sql

NOBODY: Final = "nobody"
_numbers = itertools.count(1)


def role_of(kind: str) -> str:
    """A role of this run's own: roles are of the server, which other tests use at the same time."""
    return f"test_{kind}_{os.getpid()}_{next(_numbers)}"


@contextmanager
def roles(database: Database) -> Generator[dict[str, str]]:
    """A role of each kind, and one without any right."""
    made = {kind: role_of(kind) for kind in (*RoleKind, NOBODY)}
    try:
        for role in made.values():
            sql(database, f"create role {role} login")
        yield made
    finally:
        for role in made.values():
            sql(database, f"reassign owned by {role} to postgres")
            sql(database, f"drop owned by {role}")
            sql(database, f"drop role {role}")


def as_role(database: Database, role: str) -> Database:
    return Database.of({**dict(database.parameters), "user": role})


def grant(database: Database, kind: RoleKind, role: str, driver: str) -> None:
    """As an owner does with what the command prints."""
    for line in grants_sql(role, kind, driver):
        if not line.startswith("--"):
            sql(database, line)


def used(operated: Operated, role: str, monkeypatch: pytest.MonkeyPatch) -> Operated:
    """The same under a role."""
    database = as_role(operated.cell.database, role)
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return replace(operated, cell=replace(operated.cell, database=database))
