"""The schema of ledger and queues, versioned with Alembic.

Every function takes an SQLAlchemy engine of the database that holds them; the schema's name is ``stormproof``.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from stormproof.core.errors import SettingsError

if TYPE_CHECKING:  # every driver reads the revision; only a migration needs Alembic, whose import takes 0.2 s
    from alembic.config import Config

SCHEMA: Final = "stormproof"
_HERE: Final = Path(__file__).parent
_LOCK_KEY: Final = 7_308_332_045_718_122_101
"""Key of the advisory lock under which one migration runs at a time."""
_HAS_VERSIONS: Final = sa.text(
    "select exists (select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
    f" where n.nspname = '{SCHEMA}' and c.relname = 'alembic_version')"
)
_VERSION: Final = sa.text(f"select version_num from {SCHEMA}.alembic_version")


@dataclass(frozen=True, slots=True)
class SchemaState:
    """The revision of a database, and the one that this version of Stormproof needs."""

    current: str | None
    head: str
    is_known: bool = True
    """False where this version does not know the revision: a newer one made it."""

    @property
    def up_to_date(self) -> bool:
        """Whether there is nothing to migrate."""
        return self.current == self.head

    @property
    def advice(self) -> str:
        """The next step where it is not up to date."""
        if self.is_known:
            return "run: stormproof ledger migrate (stormproof ledger sql prints what it would do)"
        return (
            "a newer Stormproof made it, and there is no way back: install that version or a newer one here (pip install "
            "--upgrade stormproof)"
        )


def state(engine: sa.Engine) -> SchemaState:
    """Read the revision of the database; changes nothing."""
    known = revisions()
    with engine.connect() as connection:
        there = connection.execute(_HAS_VERSIONS).scalar_one()
        current = connection.execute(_VERSION).scalar_one_or_none() if there else None
    return SchemaState(current, known[-1], current is None or current in known)


@functools.cache
def revisions() -> tuple[str, ...]:
    """All revisions, the oldest first: each is one file, whose name begins with it."""
    return tuple(sorted(path.name.partition("_")[0] for path in _HERE.glob("versions/[0-9]*.py")))


def migrate(engine: sa.Engine) -> SchemaState:
    """Bring the database to the newest revision, in one transaction; two at once wait for each other.

    Raises:
        SettingsError: a newer version's schema is there already.
    """
    found = state(engine)
    if not found.is_known:
        raise SettingsError(
            f"the database has schema revision {found.current}, which this version does not know (it needs {found.head}): "
            f"{found.advice}",
            current=found.current,
            head=found.head,
        )
    import alembic.command

    with engine.begin() as connection:
        connection.execute(sa.text(f"select pg_advisory_xact_lock({_LOCK_KEY})"))
        # `create schema if not exists` needs the right to make schemas even where there is nothing to make.
        if connection.execute(sa.text(f"select to_regnamespace('{SCHEMA}') is null")).scalar_one():
            connection.execute(sa.text(f"create schema {SCHEMA}"))
        config = _config()
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")
    return state(engine)


def sql(echo: Callable[[str], None], start: str | None = None) -> None:
    """Print the SQL that `migrate` would run, from revision `start` (default: from nothing), for a person to run."""
    import alembic.command

    buffer = io.StringIO()
    config = _config(buffer)
    echo(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA};")
    alembic.command.upgrade(config, f"{start}:head" if start else "head", sql=True)
    echo(buffer.getvalue())


def _config(output: io.StringIO | None = None) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(_HERE).replace("%", "%%"))
    return config
