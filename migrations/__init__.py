"""The schema of ledger and queues: `schemas.sql`, `tables.sql` and `views.sql`, which make it in an empty database.

Nothing was released so far, so there is one schema and no way from another one to it. `tables.sql` is made from the tables
that the code declares (`tools/schema_sql.py`); the other two are written by hand. Every function takes an SQLAlchemy
engine of the database.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from stormproof.core.base.errors import SettingsError

SCHEMA: Final = "stormproof"
_FILES: Final = ("schemas.sql", "tables.sql", "views.sql")
_LOCK_KEY: Final = 7_308_332_045_718_122_101
"""Key of the advisory lock under which one process at a time makes the schema."""
_HAS_VERSION: Final = sa.text(f"select to_regclass('{SCHEMA}.alembic_version') is not null")
_VERSION: Final = sa.text(f"select version_num from {SCHEMA}.alembic_version")


@dataclass(frozen=True, slots=True)
class SchemaState:
    """The revision of a database's schema, None where there is none, and the one that this version needs."""

    current: str | None
    head: str

    @property
    def up_to_date(self) -> bool:
        """Whether the schema is the one that this version needs."""
        return self.current == self.head

    @property
    def advice(self) -> str:
        """The next step where it is not."""
        if self.current is None:
            return "run: stormproof ledger migrate (stormproof ledger sql prints what it would do)"
        return (
            "another version of Stormproof made it, and before the first release none is turned into another: go on with "
            "that version, or begin anew, in another database (STORMPROOF_DATABASE_URL), or in this one after DROP SCHEMA "
            f"{SCHEMA}, {SCHEMA}_queue CASCADE, which removes all queues with their messages and all records"
        )


def state(engine: sa.Engine) -> SchemaState:
    """Read the revision of the database; changes nothing."""
    with engine.connect() as connection:
        return _state(connection)


def _state(connection: sa.Connection) -> SchemaState:
    there = connection.execute(_HAS_VERSION).scalar_one()
    return SchemaState(connection.execute(_VERSION).scalar_one_or_none() if there else None, revision())


def migrate(engine: sa.Engine) -> SchemaState:
    """Make the schema where there is none, in one transaction; two at once wait for each other.

    Raises:
        SettingsError: another version's schema is there already.
    """
    with engine.begin() as connection:
        connection.execute(sa.text(f"select pg_advisory_xact_lock({_LOCK_KEY})"))
        found = _state(connection)
        if found.current is None:
            # No parameters: so the driver takes a script of many statements, and "%" as it is.
            connection.execution_options(no_parameters=True).exec_driver_sql(sql())
        elif not found.up_to_date:
            raise SettingsError(
                f"the database has schema revision {found.current}, this version needs {found.head}: {found.advice}",
                current=found.current,
                head=found.head,
            )
    return SchemaState(found.head, found.head)


def sql() -> str:
    """What `migrate` runs, for a person to read or to run."""
    return f"{_text()}\ninsert into {SCHEMA}.alembic_version values ('{revision()}');\n"


@functools.cache
def revision() -> str:
    """The revision that this version needs: a digest of its schema, so that any change of it has another name.

    Lines that only explain something to a reader do not count.
    """
    text = "".join(line for line in _text().splitlines(keepends=True) if not line.startswith("--"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _text() -> str:
    here = Path(__file__).parent
    return "\n".join((here / name).read_text(encoding="utf-8") for name in _FILES)
