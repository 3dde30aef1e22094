"""The database that a command works on, with its schema checked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stormproof.trident.stores import Stores


@contextmanager
def opened(*, checked: bool = True, makes: bool = False, may_be_empty: bool = False) -> Generator[Stores]:
    """The database that the settings name; `checked` requires its schema.

    A missing schema is created if the command `makes` things, and reported as `Stores.is_empty` if it `may_be_empty`.

    Raises:
        SettingsError: no database is named, or its schema is missing or another version's.
        StoreUnavailable: it cannot be reached.
        MissingRight: its role may not read the schema, or not create it.
    """
    from stormproof.core.postgres.database import connect
    from stormproof.core.settings import Settings
    from stormproof.migrations import state
    from stormproof.trident.cli.loading import import_plugins
    from stormproof.trident.ledger.database import ledger_engine, require_schema
    from stormproof.trident.stores import Stores

    settings = Settings()
    import_plugins(settings.plugins)
    database = settings.resolve_database()
    # Connect without SQLAlchemy first: this error names the database and the setting, and shows no secret.
    connect(database, application_name="stormproof").close()
    engine = ledger_engine(database)
    try:
        is_empty = may_be_empty and state(engine).current is None
        if checked and not is_empty:
            require_schema(engine, database, own=settings.uses_embedded, makes=makes)
        yield Stores(settings, database, engine, is_empty)
    finally:
        engine.dispose()
