"""The ledger's database, as an operator's decision and a reader of the ledger use it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlalchemy as sa

    from stormproof.core.postgres.database import Database
    from stormproof.core.start.settings import Settings
    from stormproof.trident.audit.ledger import AuditLedger, TopologyRow
    from stormproof.trident.ledger.database import Confirmation, Tx
    from stormproof.trident.ledger.ledger import Ledger
    from stormproof.trident.ledger.sink_records import SinkBinding


@dataclass(frozen=True, slots=True)
class Stores:
    """Settings, database and SQLAlchemy engine: of one command, or of a page for as long as it is served."""

    settings: Settings
    database: Database
    engine: sa.Engine
    is_empty: bool = False
    """There is no schema yet, which the caller accepts."""
    confirmation: Confirmation | None = None
    """The page's form that is acted on; see `Tx.confirm`."""

    @property
    def audit(self) -> AuditLedger:
        """The ledger, for reading."""
        from stormproof.trident.audit.ledger import AuditLedger

        return AuditLedger(self.engine)

    @property
    def ledger(self) -> Ledger:
        """The ledger, for an operator's decisions: it starts no topology."""
        from stormproof.core.base.clock import SystemClock
        from stormproof.trident.ledger.ledger import Ledger

        def no_incarnation() -> str:
            raise AssertionError("an operator's command starts no topology")

        return Ledger(self.engine, SystemClock(), no_incarnation, confirmation=self.confirmation)

    @contextmanager
    def transaction(self, topology: TopologyRow) -> Generator[Tx]:
        """A ledger transaction under the epoch that the topology had; see `Ledger.transaction`."""
        from stormproof.trident.ledger.tables import Run

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
        from stormproof.core.base.errors import UsageError

        found = self.bindings(topology)
        if sink not in found:
            known = ", ".join(found) or "none"
            raise UsageError(f"topology {topology.name!r} has no table behind sink {sink!r}; known: {known}", sink=sink)
        return found[sink]
