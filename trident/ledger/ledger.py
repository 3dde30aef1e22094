"""The ledger: what every topology opened, prepared, committed and replayed, in one database.

`Ledger` begins its transactions. The modules beside this one read and write inside them, as functions of `Tx`:
`txns` (batches and attempts), `events`, `bindings` (the tables behind sinks), `other_lives`, `graphs`, `streams`
(micro-batches) and `repair`. The rights that every run needs are asked for before a start, and not in the middle of the
first batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import Json, MissingRight, PositionMismatch, StoreUnavailable
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.rights import quoted
from stormproof.trident.ledger import fence
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import Confirmation, LedgerDatabase, LockTimeout, Tx, UnfencedTx
from stormproof.trident.ledger.fence import Backends, MadeMeanwhile, Start
from stormproof.trident.ledger.graphs import FINGERPRINT, Graph, keep_graph, keep_refusal
from stormproof.trident.ledger.rows import Run

_NEEDED: Final[tuple[tuple[sa.Table, tuple[str, ...]], ...]] = (
    (t.topology, ("INSERT", "UPDATE")),
    (t.topology_sink, ("INSERT",)),
    (t.txn, ("INSERT", "UPDATE")),
    (t.attempt, ("INSERT", "UPDATE")),
    (t.txn_sink, ("INSERT", "UPDATE")),
    (t.txn_component, ("INSERT",)),
    (t.txn_edge, ("INSERT",)),
    (t.event, ("INSERT",)),
    (t.reject, ("INSERT",)),
)
"""Without these no batch gets through. A table that is added is not granted by itself: see `grants`."""

_LACKING: Final = sa.text(
    "select current_user::text as role, r.name, r.privilege"
    " from unnest(cast(:names as text[]), cast(:privileges as text[])) with ordinality as r (name, privilege, place)"
    " where not has_table_privilege(r.name, r.privilege) order by r.place"
)


@dataclass(frozen=True, slots=True)
class LackingRights:
    """What a role lacks in the ledger: (table, right), in order."""

    role: str
    found: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lacks = ", ".join(f"{right} on {table}" for table, right in self.found)
        return f"it lacks {lacks}. As their owner run: {self.grants}"

    @property
    def grants(self) -> str:
        """The statements that the tables' owner runs."""
        by_right: dict[str, list[str]] = {}
        for table, right in self.found:
            by_right.setdefault(right, []).append(table)
        return " ".join(
            f"GRANT {right} ON TABLE {', '.join(tables)} TO {quoted(self.role)};" for right, tables in by_right.items()
        )


def lacking_rights(connection: sa.Connection, more: Iterable[tuple[sa.Table, str]] = ()) -> LackingRights | None:
    """What the connection's role lacks to run a topology, and `more`; None where it lacks nothing."""
    if connection.dialect.name != "postgresql":
        return None
    needed = [*((table, right) for table, rights in _NEEDED for right in rights), *more]
    asked = {"names": [f"{t.SCHEMA}.{table.name}" for table, _ in needed], "privileges": [right for _, right in needed]}
    rows = connection.execute(_LACKING, asked).all()
    return LackingRights(str(rows[0].role), tuple((row.name, row.privilege) for row in rows)) if rows else None


def require_rights(connection: sa.Connection, topology: str) -> None:
    """Raise MissingRight where this role could start the topology, and then not record its first batch."""
    lacking = lacking_rights(connection)
    if lacking is None:
        return
    grants: list[Json] = [f"{right} on table {table}" for table, right in lacking.found]
    raise MissingRight(
        f"topology {topology!r} was not started: role {quoted(lacking.role)} cannot write to the ledger: {lacking} "
        "(stormproof ledger sql --grants ROLE prints all that a role needs)",
        role=lacking.role,
        rights=grants,
        grant=lacking.grants,
    )


log = logging.getLogger("stormproof.ledger")

TAKE_OVER_LOCK_TIMEOUT_MS: Final = 500
TAKE_OVER_TRIES: Final = 20


class Ledger:
    """One driver's transactions in the ledger's database.

    Parameters:
        engine: SQLAlchemy engine; its pool should hold one connection.
        clock: for the times in rows.
        new_incarnation: makes the id of a new life of a topology's name.
        confirmation: the page's form that its transactions act on; see `Tx.confirm`.
    """

    def __init__(
        self,
        engine: sa.Engine,
        clock: Clock,
        new_incarnation: Callable[[], str],
        *,
        confirmation: Confirmation | None = None,
    ) -> None:
        self.clock = clock
        self._confirmation = confirmation
        self._new_incarnation = new_incarnation
        self._backends = Backends()
        self._database = LedgerDatabase(engine, self._backends.forget)

    def start(
        self,
        topology: str,
        *,
        fingerprint: str,
        guarantee: Guarantee,
        source: str,
        graph: Graph,
        accept_change: str | None = None,
    ) -> Run:
        """Raise the topology's epoch, which fences every older driver; insert the topology where it is new.

        The older epochs' server processes are ended first, since a suspended driver may hold the fence's lock. `graph` is
        compared with the last one by which a batch was prepared: a change is recorded, or refused before any driver is
        fenced. `accept_change` is the fingerprint with which such a refusal showed it.

        Raises:
            UsageError: `accept_change` is the fingerprint of no change.
            StoreUnavailable: the database cannot be reached, or the fence's lock could not be had.
            MissingRight: the role could not record a batch; no driver was fenced.
            PositionMismatch: the topology reads another source than the one of the ledger's positions; or its graph changed
                so that an operator must accept it, or a batch is prepared for a sink that is gone or changed.
        """
        with self._database.begin() as connection:  # before any older driver is fenced
            require_rights(connection, topology)
        start = Start(topology, fingerprint, guarantee, source)
        for _ in range(TAKE_OVER_TRIES):
            self._backends.end_older(self._database, topology)
            run: Run | None = None
            try:
                with self._database.begin() as connection:
                    if self._database.is_postgres:
                        connection.execute(sa.text(f"set local lock_timeout = {TAKE_OVER_LOCK_TIMEOUT_MS}"))
                    run = fence.raise_epoch(connection, start, self.clock, self._new_incarnation)
                    found = keep_graph(Tx(connection, run, self.clock), graph, accept_change)
            except (LockTimeout, MadeMeanwhile):
                continue
            except PositionMismatch as refusal:
                if run is not None and FINGERPRINT in refusal.details:
                    with self._database.begin() as connection:
                        keep_refusal(Tx(connection, run, self.clock), refusal)
                raise
            self._backends.forget()
            for change in found:
                if change.is_loud:
                    log.warning("topology %s: %s", topology, change.text)
            return run
        raise StoreUnavailable(
            f"the fence row of topology {topology!r} stays locked by a session that could not be ended; see "
            f"pg_stat_activity and pg_locks for stormproof.topology",
            topology=topology,
        )

    def stop(self, run: Run) -> None:
        """Record that the driver has ended in an orderly way."""
        with self.transaction(run) as tx:
            tx.connection.execute(
                sa.update(t.topology)
                .where(t.topology.c.name == run.topology, t.topology.c.epoch == run.epoch)
                .values(stopped_at=self.clock.now())
            )

    @contextmanager
    def transaction(self, run: Run) -> Generator[Tx]:
        """One database transaction that holds the fence row ``for share`` until its end.

        Raises:
            Fenced: another driver has raised the epoch.
            StoreUnavailable: the connection was lost; after a lost answer to COMMIT the outcome is unknown: read again.
        """
        with self._database.begin() as connection:
            self._backends.record(connection, run)
            fence.lock_epoch(connection, run)
            yield Tx(connection, run, self.clock, self._confirmation)

    @contextmanager
    def unfenced(self) -> Generator[UnfencedTx]:
        """One database transaction without the fence: for an operator's decision on a store that several topologies read.

        Raises:
            StoreUnavailable: the connection was lost, or a lock could not be had.
        """
        with self._database.begin() as connection:
            yield UnfencedTx(connection, self.clock)

    def drop_connections(self) -> None:
        """Close the connections; the next transaction opens a new one."""
        self._database.drop_connections()

    def close(self) -> None:
        """Close the connections."""
        self._database.close()
