"""The database that a command works on, with its schema checked."""

from __future__ import annotations

import getpass
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlalchemy as sa

    from stormproof.core.postgres.database import Database
    from stormproof.core.settings import Settings
    from stormproof.trident.audit import AuditLedger
    from stormproof.trident.audit.ledger import SinkBinding, TopologyRow


@dataclass(frozen=True, slots=True)
class Stores:
    """Settings, database and engine of one command."""

    settings: Settings
    database: Database
    engine: sa.Engine
    is_empty: bool = False
    """There is no schema yet, and the command was content with that."""

    @property
    def audit(self) -> AuditLedger:
        """The ledger, for reading."""
        from stormproof.trident.audit import AuditLedger

        return AuditLedger(self.engine)

    def bound(self, topology: str) -> tuple[TopologyRow, dict[str, SinkBinding]]:
        """A topology, and the tables that the ledger knows, by their sinks' names.

        Raises:
            UsageError: there is no such topology; names the known ones.
        """
        with self.audit.snapshot() as snapshot:
            row = snapshot.topology(topology)
            return row, {binding.sink: binding for binding in snapshot.sinks(row.incarnation)}


@contextmanager
def opened(*, checked: bool = True, makes: bool = False, may_be_empty: bool = False) -> Generator[Stores]:
    """The settings' database; `checked` requires its schema, which is made only where the command `makes` things.
    Where there is none, and it `may_be_empty`, the command is told.

    Raises:
        SettingsError: none is named, or its schema is missing or old (an old one of the embedded database is migrated).
        StoreUnavailable: it cannot be reached.
        MissingRight: its role may not read the schema, or not make it.
    """
    from stormproof.core.postgres.database import connect
    from stormproof.core.settings import Settings
    from stormproof.migrations import state
    from stormproof.trident.cli.loading import import_plugins
    from stormproof.trident.ledger.database import ledger_engine, require_schema

    settings = Settings()
    import_plugins(settings.plugins)
    database = settings.resolve_database()
    # First in its own right: this error names the database and the setting, and shows no secret.
    connect(database, application_name="stormproof").close()
    engine = ledger_engine(database)
    try:
        is_empty = may_be_empty and state(engine).current is None
        if checked and not is_empty:
            require_schema(engine, database, own=settings.uses_embedded, makes=makes)
        yield Stores(settings, database, engine, is_empty)
    finally:
        engine.dispose()


def operator() -> str:
    """Who is at the keyboard, for the records."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
