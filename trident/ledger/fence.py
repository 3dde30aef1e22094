"""The fence: one row a topology. A starting driver raises its epoch, and every transaction of a driver locks it first.

A driver locks the row ``for share where epoch = mine``; where another driver has raised the epoch, it stops with `Fenced`.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import psutil
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import Fenced, PositionMismatch
from stormproof.core.base.message import Guarantee
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import LedgerDatabase, Statement, Tx, given
from stormproof.trident.ledger.rows import Event, Run
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
