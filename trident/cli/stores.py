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


@dataclass(frozen=True, slots=True)
class Stores:
    """Settings, database and engine of one command."""

    settings: Settings
    database: Database
    engine: sa.Engine

    @property
    def audit(self) -> AuditLedger:
        """The ledger, for reading."""
        from stormproof.trident.audit import AuditLedger

        return AuditLedger(self.engine)


@contextmanager
def opened(*, checked: bool = True) -> Generator[Stores]:
    """The settings' database; `checked` sees to its schema.

    Raises:
        SettingsError: none is named, or its schema is missing or old (the embedded one is migrated silently).
        StoreUnavailable: it cannot be reached.
    """
    from stormproof.core.postgres.database import connect
    from stormproof.core.settings import Settings
    from stormproof.trident.run import ledger_engine, require_schema

    settings = Settings()
    database = settings.resolve_database()
    # First in its own right: this error names the database and the setting, and shows no secret.
    connect(database, application_name="stormproof").close()
    engine = ledger_engine(database)
    try:
        if checked:
            require_schema(engine, database, own=settings.uses_embedded)
        yield Stores(settings, database, engine)
    finally:
        engine.dispose()


def operator() -> str:
    """Who is at the keyboard, for the records."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
