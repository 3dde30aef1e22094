"""Forgets a topology, or a queue a reader: every row of the ledger that is its own is removed, and what stays is said."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from stormproof.core.base.errors import StormproofError, UsageError
from stormproof.core.contract.source import Backlog
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.trident.audit.ledger import LedgerSnapshot, TopologyRow
from stormproof.trident.audit.source import recorded_source
from stormproof.trident.audit.status import DriverState, driver_state, sign_of
from stormproof.trident.decisions.adopt_table import release_unused
from stormproof.trident.decisions.pruning import DryRunEnds
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.ledger import other_lives
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.sink_records import SinkBinding
from stormproof.trident.terms.wording import counted

SILENT_S: Final = 600.0
"""A driver on another host that has given no sign of life for so long is taken for gone; if it lives, it is fenced."""

_SAID: Final = (
    ("txn", "batch", "batches"),
    ("dead_letter", "dead letter", None),
    ("reject", "reject", None),
    ("pending_retry", "message that waited for its retry", "messages that waited for their retry"),
    ("handed_in", "key of a job or micro-batch", "keys of jobs and micro-batches"),
)
_LEASED: Final = sa.text(
    "select max(i.expires_at at time zone 'UTC') from stormproof.pending_subscription s"
    " join stormproof.pending_slice i on i.subscription = s.id and i.state = 'open' and i.expires_at > clock_timestamp()"
    " where s.kind = 'queue' and s.source = :queue and s.subscription = :reader"
)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was forgotten, or with `dry_run` would be: the rows that were removed, by table, and what stays elsewhere."""

    what: str
    name: str
    life: str
    removed: dict[str, int]
    kept: tuple[str, ...]
    dry_run: bool
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        said = [counted(self.removed[table], one, many) for table, one, many in _SAID if table in self.removed]
        rows = ", ".join([*said, f"{counted(sum(self.removed.values()), 'row')} in all"])
        done = "would be forgotten" if self.dry_run else "is forgotten"
        return [f"{self.name} ({self.life}) {done}: {rows}", *(f"  {line}" for line in self.kept)]


def forget(stores: Stores, topology: str, *, by: str, why: str, dry_run: bool = False) -> Forgotten:
    """Remove all that the ledger has of a topology, and its claims of tables that it never wrote to.

    Messages that it had not written, and dead letters, are forgotten with it. A later topology of its name reads its source
    from the start. May be killed at any point, and repeated.

    Raises:
        UsageError: its driver may be running, or it was started meanwhile.
    """
    row = stores.topology(topology)
    with stores.audit.snapshot() as snapshot:
        _require_ended(snapshot, row)
        kept = list(_what_stays(snapshot, row))
        unused = _unused(snapshot, row)
    kept += [_released(stores, row, binding, by=by, why=why, dry_run=dry_run) for binding in unused]

    def remove(connection: sa.Connection) -> dict[str, int]:
        mine = sa.and_(t.topology.c.incarnation == row.incarnation, t.topology.c.epoch == row.epoch)
        if connection.execute(sa.select(t.topology).where(mine).with_for_update()).one_or_none() is None:
            raise UsageError(f"topology {topology!r} was started or forgotten meanwhile; nothing was removed")
        return other_lives.remove_topology(connection, row.incarnation)

    return _forgotten(stores, "topology", topology, row.incarnation, remove, kept, by=by, why=why, dry_run=dry_run)


def unsubscribe(
    stores: Stores, queue: str, subscription: str, *, by: str, why: str, dry_run: bool = False
) -> Forgotten:
    """Remove a queue's subscription, with all that is pending, waiting and dead of it: the queue keeps nothing back for it.

    Raises:
        UsageError: there is no such subscription, somebody reads under it now, or it is a topology's: `forget` that.
    """
    reader = subscription
    with closing(PostgresQueue(queue, database=stores.database)) as of:
        known = of.stats().subscriptions
    if reader not in known:
        raise UsageError(
            f"queue {queue} has no subscription {reader!r}; known: {', '.join(known) or 'none'}", queue=queue
        )
    with stores.audit.snapshot() as snapshot:
        for row in snapshot.topologies():
            if reader.partition(":")[0] == row.incarnation:
                raise UsageError(
                    f"queue {queue}: subscription {reader} is that of topology {row.name!r}, whose record would lack it; "
                    f"to have both forgotten: stormproof forget {row.name} --by NAME",
                    queue=queue,
                    topology=row.name,
                )

    def remove(connection: sa.Connection) -> dict[str, int]:
        leased = connection.execute(_LEASED, {"queue": queue, "reader": reader}).scalar_one()
        if leased is not None:
            raise UsageError(
                f"queue {queue}: somebody reads as {reader}, with a lease until {leased:%F %T} UTC", queue=queue
            )
        return other_lives.remove_subscription(connection, "queue", queue, reader)

    kept = [
        f"{_said(known[reader])}: nobody reads them as {reader} any more",
        f"queue {queue} drops what its other readers are done with; without a reader it keeps every message",
    ]
    return _forgotten(stores, "subscription", queue, reader, remove, kept, by=by, why=why, dry_run=dry_run)


def _forgotten(
    stores: Stores,
    what: str,
    name: str,
    life: str,
    remove: Callable[[sa.Connection], dict[str, int]],
    kept: Sequence[str],
    *,
    by: str,
    why: str,
    dry_run: bool,
) -> Forgotten:
    """Remove and record it, in one transaction; a dry run rolls that back."""
    removed: dict[str, int] = {}
    with suppress(DryRunEnds), stores.ledger.unfenced() as tx:
        removed = remove(tx.connection)
        record = {"what": what, "name": name, "life": life, "at": tx.clock.now(), "by": by, "why": why}
        tx.connection.execute(sa.insert(t.forgotten).values(**record, removed=removed, kept=[*kept]))
        if dry_run:
            raise DryRunEnds
    return Forgotten(what, name, life, removed, tuple(kept), dry_run, by, why)


def _require_ended(snapshot: LedgerSnapshot, row: TopologyRow) -> None:
    sign = sign_of(snapshot, row)
    state = driver_state(row, sign)
    is_silent = sign is not None and sign.age_s > SILENT_S
    if state in (DriverState.STOPPED, DriverState.DEAD) or (state is DriverState.UNKNOWN and is_silent):
        return
    runs = "is running" if state is DriverState.RUNNING else "may be running, on another host"
    raise UsageError(
        f"topology {row.name!r}: its driver {row.driver_host}:{row.driver_pid} {runs}: nothing was forgotten. Stop it "
        f"first: stormproof stop {row.name}. One that died on another host is taken for gone {SILENT_S / 60:.0f} minutes "
        "after its last sign of life; one that never gave any: start it once more, and stop it",
        topology=row.name,
    )


def _unused(snapshot: LedgerSnapshot, row: TopologyRow) -> list[SinkBinding]:
    """The tables to which no batch wrote, nor is about to."""
    about_to = {
        one.work.sink
        for txn in snapshot.unresolved(row.incarnation)
        for one in snapshot.work(row.incarnation, txn.txid, txn.txid)
    }
    bound = snapshot.sinks(row.incarnation)
    return [b for b in bound if b.sink not in about_to and snapshot.last_held(row.incarnation, b.sink) is None]


def _released(stores: Stores, row: TopologyRow, binding: SinkBinding, *, by: str, why: str, dry_run: bool) -> str:
    text = f"table {binding.target} (sink {binding.sink}) has no row of it"
    if dry_run:
        return f"{text}, and would be free for another topology"
    try:
        release_unused(stores, row, binding, by=by, why=why)
    except StormproofError as error:  # whatever it is, the table is as it was, and the topology can be forgotten
        return f"{text} on record; its claim of the table was not taken back: {error.message}"
    return f"{text}, and is free for another topology"


def _what_stays(snapshot: LedgerSnapshot, row: TopologyRow) -> Generator[str]:
    """What is outside of the ledger, and what is lost with it, in words."""
    life = row.incarnation
    held = [(binding, snapshot.last_held(life, binding.sink)) for binding in snapshot.sinks(life)]
    for binding, txid in held:
        if txid is not None:
            yield f"table {binding.target} (sink {binding.sink}) keeps its rows, up to txid {txid}, and its record of them"
    if any(txid is not None for _, txid in held):
        yield (
            f"to write beside such rows: stormproof ledger adopt {row.name} {life}; for a topology of another name: "
            f"stormproof ledger adopt NAME {row.name}/{life}"
        )
    for txn in snapshot.unresolved(life):
        lacks = [
            one.work.sink for one in snapshot.work(row.incarnation, txn.txid, txn.txid) if one.work.committed_at is None
        ]
        where = f"; it may be missing at {', '.join(lacks)}" if lacks else ""
        yield f"txid {txn.txid} of {counted(txn.messages, 'message')} is {txn.state}, and is not finished any more{where}"
    yield from _of_source(snapshot, row)


def _of_source(snapshot: LedgerSnapshot, row: TopologyRow) -> Generator[str]:
    read = other_lives.subscriptions_of(snapshot.connection, row.incarnation)
    queries, keys = other_lives.checkpoints_of(snapshot.connection, row.incarnation)
    evidence = recorded_source(snapshot, row) if read else None
    if evidence is not None:
        yield f"source {row.source}: {_said(evidence.backlog())}: nobody reads them for this topology any more"
    for kind, source, _ in read:
        if kind == "queue":
            yield f"queue {source} stays, and keeps nothing back for it; without a reader a queue keeps every message"
        elif kind != "files":
            yield f"{kind} {source}: what the server keeps for it (a consumer, a group) stays there"
    for query in queries:
        yield f"streaming query {query}: its checkpoint stays, and goes on behind what it has; a new one begins anew"
    if keys:
        yield f"{counted(keys, 'key')} of jobs: a job of such a key would be written again"
    if not read and not queries and not keys:
        yield (
            f"source {row.source} keeps nothing for it in this database; where it is a queue in another one, there: "
            f"stormproof queue unsubscribe QUEUE {row.incarnation}"
        )


def _said(left: Backlog) -> str:
    return (
        f"{counted(left.ready, 'message')} not read, {left.pending} pending, {left.waiting} waiting for a retry, "
        f"{counted(left.dead, 'dead letter')}"
    )
