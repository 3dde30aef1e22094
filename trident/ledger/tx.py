"""One open transaction in the ledger's database."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from stormproof.core.clock import Clock
from stormproof.trident.ledger.confirmations import Confirmation
from stormproof.trident.ledger.rows import Run


@dataclass(frozen=True, slots=True)
class Tx:
    """One open ledger transaction of one run, under the fence; `Ledger.transaction` opens it."""

    connection: sa.Connection
    run: Run
    clock: Clock
    confirmation: Confirmation | None = None
    """The page's form that was confirmed, where a decision on the page opened it."""

    def confirm(self) -> None:
        """Record that the form was acted on; every function that records a decision calls it, in its transaction.

        Raises:
            ConfirmedBefore: it was acted on before.
        """
        if self.confirmation is not None:
            self.confirmation.take(self.connection, self.run.incarnation, self.clock.now())

    @property
    def raw(self) -> object:
        """The driver's own connection (psycopg's on Postgres), for a source that joins the transaction."""
        return self.connection.connection.driver_connection


@dataclass(frozen=True, slots=True)
class UnfencedTx:
    """One open ledger transaction without the fence, for an operator's decision on several topologies."""

    connection: sa.Connection
    clock: Clock

    def of(self, run: Run) -> Tx:
        """The same transaction, for one topology."""
        return Tx(self.connection, run, self.clock)
