"""Which server a queue is in now, once ledger, sinks and queue agree on what was read from it.

After a dump and restore, a fail-over or `pg_upgrade` a queue's database agrees with itself: messages, positions and slices
were copied at one instant. A fault can only lie outside: a sink or the ledger may be ahead of the copy, so that messages
would be read twice, or behind it, so that some would never be read. `audit verify` compares just that.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import psycopg
import sqlalchemy as sa

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.store import StoreConnection
from stormproof.core.source.postgres_queue import PostgresQueue, message_table
from stormproof.core.source.postgres_queue.message_table import (
    MessageTable,
    Numbering,
    QueueStanding,
    index_ranges_only,
)
from stormproof.core.source.spouts import sources_in
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.ledger import LedgerSnapshot, TopologyRow
from stormproof.trident.audit.report import ViolationKind
from stormproof.trident.audit.source import PendingEvidence, spout_sources, stored_source
from stormproof.trident.audit.status import DriverState, driver_state
from stormproof.trident.audit.verify import verify
from stormproof.trident.decisions.adopt_table import NOT_PROVABLE, PROVES
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.ledger.tables import Run
from stormproof.trident.terms.transaction_states import OperatorAction


@dataclass(frozen=True, slots=True)
class NewestMessage:
    """The message that was put last."""

    id: str
    put_at: datetime


@dataclass(frozen=True, slots=True)
class QueueAdoption:
    """What was found of a queue, and what was done.

    `unproven` says what speaks against an adoption, or could not be compared. `adopted`: the queue is bound to this server
    now; `changed`: this call has bound it.
    """

    queue: str
    adopted: bool
    changed: bool
    was: Numbering
    now: Numbering
    subscriptions: Mapping[str, str | None]
    """The topology of each subscription; None where the ledger knows none."""
    unreachable: int
    newest: NewestMessage | None
    unproven: tuple[str, ...]
    by: str
    why: str
    proves: str = PROVES
    not_provable: str = NOT_PROVABLE

    def lines(self) -> list[str]:
        """The answer for people, line by line."""
        if self.adopted and not self.changed:
            return [f"{self.queue}: it is of this server ({self.now}) already; there was nothing to adopt"]
        newest = self.newest
        lines = [
            f"{self.queue}: was of {self.was}; this is {self.now}",
            *(
                f"  read by {topology or 'no topology of this ledger'} ({s})"
                for s, topology in self.subscriptions.items()
            ),
            f"  {self.unreachable} messages lie above this server's transaction numbers",
            "  it is empty"
            if newest is None
            else f"  newest message: {newest.id}, put at {newest.put_at.isoformat(sep=' ', timespec='seconds')}",
            *(f"NOT PROVEN {text}" for text in self.unproven),
        ]
        if not self.unproven:
            lines.append(f"proven: {self.proves}")
        lines.append(f"not provable by anybody: {self.not_provable}")
        if self.changed:
            return [*lines, f"{self.queue}: adopted by {self.by}; readers and producers may go on"]
        return [
            *lines,
            f"{self.queue}: nothing was changed. Mend what is named, or accept it, on record: stormproof queue adopt "
            f"{self.queue} --accept-unproven --why REASON",
        ]

    @property
    def exit_status(self) -> int:
        """0: adopted, or there was nothing to adopt; 4: something is neither proven nor accepted."""
        return 0 if self.adopted else 4


@dataclass(frozen=True, slots=True)
class _Store:
    """One queue in the ledger's database."""

    database: Database
    table: MessageTable

    @contextmanager
    def cursor(self, connection: sa.Connection | None = None) -> Generator[psycopg.Cursor[Any]]:
        """In the ledger's transaction, or in one of its own."""
        store = StoreConnection(
            "queue", self.table.queue, application="adopt", missing="run: stormproof ledger migrate"
        )
        tx = None if connection is None else connection.connection.driver_connection
        try:
            with store.transaction(lambda: self.database, tx) as cursor, index_ranges_only(cursor):
                yield cursor
        finally:
            store.close()


def adopt_queue(stores: Stores, queue: str, *, accept_unproven: bool = False, by: str, why: str) -> QueueAdoption:
    """Bind a queue to this server, with all its subscriptions; where something is unproven, only if that is accepted.

    Guarantee:
        Nothing is changed unless `adopted` and `changed` are both true in the answer. No message is touched. The
        transaction that adopts records the decision, who took it and what was not proven: in `stormproof.queue_adoption`,
        and as an event of each topology that reads the queue.

    Not guaranteed:
        What `NOT_PROVABLE` says, and that nobody uses the old server any more.

    Raises:
        UsageError: no such queue; a proof is waived without a reason; the queue changed meanwhile.
        StoreUnavailable: the database does not answer.
    """
    if accept_unproven and not why:
        raise UsageError("what is accepted without a proof needs a reason: give --why", argument="why")
    store = _Store(stores.database, MessageTable(queue))
    with store.cursor() as cursor:
        found = message_table.standing(cursor, queue, store.table.sql)
    with stores.audit.snapshot() as snapshot:
        readers = _readers(snapshot, queue)
    by_subscription = {name: row.name if (row := readers.get(name)) else None for name in found.subscriptions}
    answer = _answer(found, by_subscription, by, why)
    if found.is_adopted:
        return answer
    unproven = tuple(_unproven(stores, found, readers))
    if unproven and not accept_unproven:
        return replace(answer, unproven=unproven)
    with stores.ledger.unfenced() as tx:
        with store.cursor(tx.connection) as cursor:
            now = message_table.standing(cursor, queue, store.table.sql, locked=True)
            if (now.was, now.subscriptions) != (found.was, found.subscriptions):
                raise UsageError(f"queue {queue} was changed meanwhile by somebody else: run this again", queue=queue)
            message_table.adopt(cursor, store.table.sql, now, by=by, why=why, unproven=unproven)
        detail: dict[str, Json] = {
            "queue": queue,
            "was": now.was.to_json(),
            "now": now.now.to_json(),
            "unproven": list(unproven),
        }
        for row in {row.name: row for row in readers.values()}.values():
            of_topology = tx.of(Run(row.name, row.incarnation, row.epoch))
            of_topology.decided(OperatorAction.ADOPT_QUEUE, by=by, why=why, about=queue, detail=detail)
    return replace(_answer(now, by_subscription, by, why), unproven=unproven, adopted=True, changed=True)


def _answer(found: QueueStanding, subscriptions: Mapping[str, str | None], by: str, why: str) -> QueueAdoption:
    newest = found.newest
    return QueueAdoption(
        queue=found.queue,
        adopted=found.is_adopted,
        changed=False,
        was=found.was,
        now=found.now,
        subscriptions=subscriptions,
        unreachable=found.above,
        newest=None if newest is None else NewestMessage(PostgresQueue.shown_id(newest.id, newest.xid), newest.put_at),
        unproven=(),
        by=by,
        why=why,
    )


def _readers(snapshot: LedgerSnapshot, queue: str) -> dict[str, TopologyRow]:
    """The topologies that read the queue, by subscription."""
    readers: dict[str, TopologyRow] = {}
    for row in snapshot.topologies():
        if sources_in(row.source):
            found = list(spout_sources(snapshot, row).values())
        else:
            source = stored_source(snapshot, row)
            found = [source] if isinstance(source, PendingEvidence) else []
        whose = [one.who for one in found]
        readers |= {who.subscription: row for who in whose if (who.kind, who.source) == (PostgresQueue.KIND, queue)}
    return readers


def _unproven(stores: Stores, found: QueueStanding, readers: Mapping[str, TopologyRow]) -> Generator[str]:
    """What speaks against the adoption, or could not be compared, one by one."""
    for subscription in found.subscriptions:
        if subscription not in readers:
            yield (
                f"subscription {subscription} is of no topology in this ledger: what it has read cannot be compared with "
                "anything"
            )
    for row in {row.name: row for row in readers.values()}.values():
        if found.was.server != found.now.server and driver_state(row) is DriverState.RUNNING:
            yield (
                f"topology {row.name}: its driver {row.driver_host}:{row.driver_pid} runs, and may still work on the old "
                "server: stop it first"
            )
        report = verify(stores.audit, row.name, opener_for(stores.database))
        for violation in report.violations:
            if violation.kind is not ViolationKind.UNREACHABLE:  # which is what the adoption mends
                yield f"topology {row.name}: {violation.text}{_way_on(row.name, violation.kind, violation.sink)}"
        for unknown in report.unknowns:
            yield f"topology {row.name}: cannot tell: {unknown.text}"


def _way_on(topology: str, kind: ViolationKind, sink: str | None) -> str:
    replaced = kind is ViolationKind.TABLE_REPLACED
    return f"; first run: stormproof ledger adopt-table {topology} {sink}" if replaced else ""
