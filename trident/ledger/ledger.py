"""The ledger: what every topology opened, prepared, committed and replayed, in one database.

`Ledger` begins its transactions, each under the fence, one row a topology. A starting driver raises its epoch; every
transaction of a driver locks the row ``for share where epoch = mine``, and where another driver has raised the epoch, it
stops with `Fenced`. The modules beside this one read and write inside a transaction, as functions of `Tx`. The rights that
every run needs are asked for before a start, and not in the middle of the first batch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import psutil
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import Fenced, Json, MissingRight, PositionMismatch, StoreUnavailable
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.rights import quoted
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import (
    Confirmation,
    LedgerDatabase,
    LockTimeout,
    Statement,
    Tx,
    UnfencedTx,
    given,
)
from stormproof.trident.ledger.graphs import FINGERPRINT, Graph, keep_graph, keep_refusal
from stormproof.trident.ledger.tables import Event, Run
from stormproof.trident.terms.transaction_states import EventKind

LIFE_DIGITS: Final = 8
"""Hexadecimal digits of the topology's hashed name, the suffix of an incarnation that another topology has already."""


@dataclass(frozen=True, slots=True)
class DriverIdentity:
    """The process of a driver: enough to tell whether it still lives, and to end it."""

    host: str
    pid: int
    started: float

    @staticmethod
    def mine() -> DriverIdentity:
        """This process."""
        return DriverIdentity(socket.gethostname(), os.getpid(), psutil.Process().create_time())


@dataclass(frozen=True, slots=True)
class Start:
    """What the ledger records of a topology that starts."""

    topology: str
    fingerprint: str
    guarantee: Guarantee
    source: str


class MadeMeanwhile(Exception):
    """Another driver inserted the same topology, or the same incarnation, at the same instant."""


def raise_epoch(connection: sa.Connection, start: Start, clock: Clock, new_incarnation: Callable[[], str]) -> Run:
    """Raise the topology's epoch, or insert the topology with epoch 1.

    Raises:
        PositionMismatch: the topology reads another source than the one of the ledger's positions.
        MadeMeanwhile: another driver inserted it at the same instant; try again.
    """
    now, driver = clock.now(), DriverIdentity.mine()
    row = connection.execute(
        sa.select(t.topology).where(t.topology.c.name == start.topology).with_for_update()
    ).one_or_none()
    fields: dict[str, Any] = {
        "fingerprint": start.fingerprint,
        "guarantee": start.guarantee.value,
        "source": start.source,
        "started_at": now,
        "driver_host": driver.host,
        "driver_pid": driver.pid,
        "driver_started": driver.started,
        "stopped_at": None,
    }
    if row is None:
        incarnation = life_of(connection, start.topology, new_incarnation)
        first = sa.insert(t.topology).values(
            name=start.topology, incarnation=incarnation, epoch=1, created_at=now, **fields
        )
        try:
            connection.execute(first)
        except IntegrityError as error:
            if _violated(error) in _MADE_MEANWHILE:
                raise MadeMeanwhile from error
            raise
        return Run(start.topology, incarnation, 1)
    epoch = row.epoch + 1
    connection.execute(sa.update(t.topology).where(t.topology.c.name == start.topology).values(epoch=epoch, **fields))
    older = None if row.stopped_at is not None else f"{row.driver_host}:{row.driver_pid}"
    run = Run(start.topology, row.incarnation, epoch, older)
    if older is not None:
        detail = {"from": older, "epoch": row.epoch, "to_epoch": epoch}
        Tx(connection, run, clock).record([Event(EventKind.TAKE_OVER, detail=detail)])
    if row.source != start.source:
        raise PositionMismatch(
            f"topology {start.topology!r} reads source {row.source!r} by the ledger, and {start.source!r} by its code; "
            f"its positions belong to the former: give the topology a new name, or the source its old one; or, where it has "
            f"written nothing yet: stormproof forget {start.topology}",
            topology=start.topology,
            ledger=row.source,
            code=start.source,
        )
    return run


def life_now(connection: sa.Connection, topology: str) -> str | None:
    """The incarnation that a topology has now; None: it has none yet."""
    return connection.execute(sa.select(t.topology.c.incarnation).where(t.topology.c.name == topology)).scalar()


def life_of(connection: sa.Connection, topology: str, new_incarnation: Callable[[], str]) -> str:
    """A new incarnation that no other topology has, nor had before it was forgotten: tables still name that one.

    Two functions of one streaming query ask for the same one, and one that was forgotten asks for its old one; the later
    one's gets a suffix from its topology's name.
    """
    made = new_incarnation()
    is_another = sa.select(t.topology.c.name).where(t.topology.c.incarnation == made)
    had = t.forgotten.c.life
    before = sa.select(sa.func.count()).where((had == made) | had.startswith(f"{made}-", autoescape=True))
    forgotten = connection.execute(before).scalar_one()
    if not forgotten and connection.execute(is_another).one_or_none() is None:
        return made
    unlike = f"{topology} {forgotten}" if forgotten else topology
    return f"{made}-{hashlib.sha256(unlike.encode()).hexdigest()[:LIFE_DIGITS]}"


_HELD: Final = Statement(
    sa.select(t.topology.c.epoch)
    .where(
        t.topology.c.name == given("topology"),
        t.topology.c.incarnation == given("incarnation"),
        t.topology.c.epoch == given("epoch"),
    )
    .with_for_update(read=True)
)


def lock_epoch(connection: sa.Connection, run: Run) -> None:
    """Lock the fence row until the transaction's end.

    Raises:
        Fenced: another driver has raised the epoch.
    """
    held = _HELD.run(
        connection, topology=run.topology, incarnation=run.incarnation, epoch=run.epoch
    ).scalar_one_or_none()
    if held is not None:
        return
    row = connection.execute(sa.select(t.topology).where(t.topology.c.name == run.topology)).one_or_none()
    by = (
        "was removed from the ledger"
        if row is None
        else f"is run by {row.driver_host}:{row.driver_pid} with epoch {row.epoch}"
    )
    raise Fenced(
        f"topology {run.topology!r} {by} now; this driver's epoch {run.epoch} is over and it stops",
        topology=run.topology,
        epoch=run.epoch,
        current=None if row is None else row.epoch,
    )


class Backends:
    """The server processes of drivers' connections. A take-over ends those of older epochs, which may hold the fence."""

    def __init__(self) -> None:
        self._recorded: set[int] = set()

    def forget(self) -> None:
        """Forget all connections, since they are gone."""
        self._recorded.clear()

    def end_older(self, database: LedgerDatabase, topology: str) -> None:
        """End the server processes of all earlier drivers of the topology."""
        if not database.is_postgres:
            return
        with database.begin() as connection:
            connection.execute(
                sa.text(
                    "select pg_terminate_backend(a.pid, 2000) from pg_stat_activity a"
                    " join stormproof.backend b on a.pid = b.pid and a.backend_start = b.started_at"
                    " join stormproof.topology t using (incarnation)"
                    " where t.name = :topology and a.pid <> pg_backend_pid()"
                ),
                {"topology": topology},
            )

    def record(self, connection: sa.Connection, run: Run) -> None:
        """Record this connection's server process; where it is new, that is committed, and another transaction begun."""
        if connection.dialect.name != "postgresql":
            return
        driver = cast(Any, connection.connection.driver_connection)
        pid: int = driver.info.backend_pid
        if pid in self._recorded:
            return
        connection.execute(
            sa.text(
                "insert into stormproof.backend (incarnation, pid, started_at, epoch)"
                " select :incarnation, pid, backend_start, :epoch from pg_stat_activity where pid = pg_backend_pid()"
                " on conflict do nothing"
            ),
            {"incarnation": run.incarnation, "epoch": run.epoch},
        )
        connection.execute(
            sa.text("delete from stormproof.backend where incarnation = :incarnation and epoch < :epoch"),
            {"incarnation": run.incarnation, "epoch": run.epoch},
        )
        connection.commit()
        connection.begin()
        self._recorded.add(pid)


_MADE_MEANWHILE: Final = ("pk_topology", "uq_topology_incarnation")
"""The constraints that an insert violates where another driver was faster. Any other violation is a fault of this driver."""


def _violated(error: IntegrityError) -> str | None:
    """The name of the constraint that a statement violated. SQLite names only its columns."""
    named = getattr(getattr(error.orig, "diag", None), "constraint_name", None)
    if named is not None:
        return str(named)
    by_columns = {"topology.name": "pk_topology", "topology.incarnation": "uq_topology_incarnation"}
    return by_columns.get(str(error.orig).removeprefix("UNIQUE constraint failed: "))


# ---- the ledger

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
                    run = raise_epoch(connection, start, self.clock, self._new_incarnation)
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
            lock_epoch(connection, run)
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
