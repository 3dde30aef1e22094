"""The database that a command works on, with its schema checked."""

from __future__ import annotations

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
    from stormproof.trident.ledger.ledger import Ledger
    from stormproof.trident.ledger.tx import Tx


@dataclass(frozen=True, slots=True)
class Stores:
    """Settings, database and SQLAlchemy engine of one command."""

    settings: Settings
    database: Database
    engine: sa.Engine
    is_empty: bool = False
    """There is no schema yet, which the command accepts."""

    @property
    def audit(self) -> AuditLedger:
        """The ledger, for reading."""
        from stormproof.trident.audit import AuditLedger

        return AuditLedger(self.engine)

    @property
    def ledger(self) -> Ledger:
        """The ledger, for an operator's decisions: it starts no topology."""
        from stormproof.core.clock import SystemClock
        from stormproof.trident.ledger.ledger import Ledger

        def no_incarnation() -> str:
            raise AssertionError("an operator's command starts no topology")

        return Ledger(self.engine, SystemClock(), no_incarnation)

    @contextmanager
    def transaction(self, topology: TopologyRow) -> Generator[Tx]:
        """A ledger transaction under the epoch that the topology had; see `Ledger.transaction`."""
        from stormproof.trident.ledger.rows import Run

        with self.ledger.transaction(Run(topology.name, topology.incarnation, topology.epoch)) as tx:
            yield tx

    def topology(self, name: str) -> TopologyRow:
        """A topology.

        Raises:
            UsageError: there is no such topology; names the known ones.
        """
        with self.audit.snapshot() as snapshot:
            return snapshot.topology(name)

    def bindings(self, topology: TopologyRow) -> dict[str, SinkBinding]:
        """The tables that the ledger knows of a topology, by their sinks' names."""
        with self.audit.snapshot() as snapshot:
            return {binding.sink: binding for binding in snapshot.sinks(topology.incarnation)}

    def binding(self, topology: TopologyRow, sink: str) -> SinkBinding:
        """The table behind a sink.

        Raises:
            UsageError: the ledger knows no table behind such a sink; names the known ones.
        """
        from stormproof.core.errors import UsageError

        found = self.bindings(topology)
        if sink not in found:
            known = ", ".join(found) or "none"
            raise UsageError(f"topology {topology.name!r} has no table behind sink {sink!r}; known: {known}", sink=sink)
        return found[sink]


@contextmanager
def opened(*, checked: bool = True, makes: bool = False, may_be_empty: bool = False) -> Generator[Stores]:
    """The database that the settings name; `checked` requires its schema.

    A missing schema is created if the command `makes` things, and reported as `Stores.is_empty` if it `may_be_empty`.

    Raises:
        SettingsError: no database is named, or its schema is missing or old (that of the embedded database is migrated).
        StoreUnavailable: it cannot be reached.
        MissingRight: its role may not read the schema, or not create it.
    """
    from stormproof.core.postgres.database import connect
    from stormproof.core.settings import Settings
    from stormproof.migrations import state
    from stormproof.trident.cli.loading import import_plugins
    from stormproof.trident.ledger.database import ledger_engine, require_schema

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
