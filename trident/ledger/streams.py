"""The micro-batches of streaming queries that topologies have taken: the ledger's table, and which one may be taken next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import PositionMismatch
from stormproof.trident.ledger import tables
from stormproof.trident.ledger.fence import DriverIdentity
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction_states import TxnState

_SHOWN_CHARACTERS: Final = 1_000
START_TOLERANCE_S: Final = 1.0
"""How far two readings of one process's start may lie apart."""

stream_batch: Final = sa.Table(
    "stream_batch",
    tables.metadata,
    tables.incarnation(refers=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False, comment="from 1, as they were taken"),
    sa.Column("query", sa.Text, nullable=False, comment="the streaming query's id, which its checkpoint keeps"),
    sa.Column("batch", sa.BigInteger, nullable=False, comment="the micro-batch's id in that query, from 0"),
    sa.Column("txid", sa.BigInteger, comment="the transaction that it is, where it goes to sinks without a topology"),
    sa.Column("first_id", sa.BigInteger, comment="the first of its messages, where it feeds a topology"),
    sa.Column("stop_id", sa.BigInteger, comment="the message behind its last one"),
    sa.Column("adopted_from", sa.Text, comment="the place that it follows by a person's word: query:batch"),
    sa.Column(
        "plan", sa.Text, comment="from what Spark planned it: its times, then the offset at which each source ends"
    ),
    sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False, comment="when it was taken"),
    comment="micro-batches of streaming queries; the highest number is where the query stands",
)


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """One micro-batch as the ledger knows it."""

    number: int
    query: str
    batch: int
    txid: int | None = None
    first: int | None = None
    stop: int | None = None
    adopted_from: str | None = None
    plan: str | None = None
    """From what Spark planned it, as `Frames.plan` tells; None where that does not count."""

    @property
    def place(self) -> str:
        """``QUERY:BATCH``: how `adopt` names it."""
        return f"{self.query}:{self.batch}"


@dataclass(frozen=True, slots=True)
class Standing:
    """What the ledger has of a topology's name when Spark hands out a micro-batch."""

    last: StreamBatch | None = None
    """The last micro-batch that it took; without its plan while nothing of it is fixed, so that it may be planned anew."""
    others: Mapping[str, StreamBatch] = field(default_factory=dict[str, StreamBatch])
    """Where this name took none: the last micro-batch of the same query that each other name took. At the query's first
    batch only those names count whose driver did not record its end: what they took may still be written.
    """

    @property
    def before(self) -> StreamBatch | None:
        """The place that `adopt` must name to go on elsewhere: the last one taken, by this name or else by any other."""
        return self.last or max(self.others.values(), key=lambda taken: taken.batch, default=None)


class Handed(StrEnum):
    """How a micro-batch that Spark hands out relates to the ledger."""

    NEW = "new"
    AGAIN = "again"
    """The last one that was taken: Spark does not know that it is done."""
    ADOPTED = "adopted"
    """Another one than the next, from which the user decided to go on."""


def handed(
    topology: str, standing: Standing, query: str, batch: int, plans: Mapping[int, str | None], adopt: str | None
) -> Handed:
    """How micro-batch `batch` of `query` relates to the ledger's standing of the topology.

    Spark hands out the batches of a query one after the other, and after a restart the last one again if it does not know
    that it is done. Anything else means that checkpoint and ledger do not belong together. A name that took nothing yet
    begins with its query's first batch; or with any batch, if the ledger does not know the query: then it ran without this
    name so far.

    `plans` has what the checkpoint says of batches of the query. A checkpoint that is one batch old hands out the last
    number again, with further rows: its plan is another one than that of the batch that was taken.

    Raises:
        PositionMismatch: names both places, and the argument with which to go on all the same.
    """
    last = standing.last
    if last is not None and last.query == query and batch in (last.batch, last.batch + 1):
        found = plans.get(last.batch)
        if None in (last.plan, found) or last.plan == found:
            return Handed.AGAIN if batch == last.batch else Handed.NEW
        if adopt != last.place:
            raise _planned_otherwise(topology, last, batch, str(found))
    if standing.before is None:
        return Handed.NEW
    if adopt == standing.before.place:
        return Handed.ADOPTED
    raise _elsewhere(topology, last, query, batch) if last else _another_name(topology, standing, query, batch)


def _elsewhere(topology: str, last: StreamBatch, query: str, batch: int) -> PositionMismatch:
    anew = "begin anew with a new checkpoint, another name and other tables"
    if last.query != query:
        what = "the query's checkpoint was lost or replaced, or another query has the same name here"
        way = "Bring the checkpoint back; or, for another query, take another name and other tables"
    elif batch < last.batch:
        what = "the query's checkpoint was restored from an older state"
        way = f"Bring the newer checkpoint back; or {anew}"
    else:
        what = "the ledger was restored from an older state, or the query ran on without this function"
        way = f"Bring the ledger's newer state back; or {anew}"
    return PositionMismatch(
        f"topology {topology!r} stands at batch {last.batch} of streaming query {last.query} by the ledger, and Spark hands "
        f"out batch {batch} of query {query}: {what}. Nothing was written. {way}; or, where what this query reads from here "
        f"on is not in the sinks yet (see docs/foreach_batch.md), pass adopt={last.place!r}. Inspect with: stormproof audit "
        f"verify {topology}",
        ledger_query=last.query,
        ledger_batch=last.batch,
        query=query,
        batch=batch,
        adopt=last.place,
    )


def _planned_otherwise(topology: str, last: StreamBatch, batch: int, found: str) -> PositionMismatch:
    return PositionMismatch(
        f"topology {topology!r} took batch {last.batch} of streaming query {last.query}, which was planned to end at "
        f"{_ends(str(last.plan))}. Spark hands out batch {batch}, and by the query's checkpoint batch {last.batch} was "
        f"planned otherwise, to end at {_ends(found)}: the checkpoint was restored from a state before that batch, or "
        "lost it with the power. Rows that the first plan has are in the sinks; which others these are cannot be told. "
        "Nothing was written. Bring the newer checkpoint back. Or begin with a new checkpoint right behind the first plan's "
        f"end (of Kafka: startingOffsets), and pass adopt={last.place!r}; see docs/foreach_batch.md. Inspect with: "
        f"stormproof audit verify {topology}",
        query=last.query,
        batch=batch,
        ledger_batch=last.batch,
        ledger_plan=last.plan,
        plan=found,
        adopt=last.place,
    )


def _ends(plan: str) -> str:
    """The offsets of a plan, shortened; with its times, by which two plans differ whose offsets are the same."""
    times, *ends = plan.split("\n")
    return f"{', '.join(ends)[:_SHOWN_CHARACTERS]} (planned with {times})"


def _another_name(topology: str, standing: Standing, query: str, batch: int) -> PositionMismatch:
    names = sorted(standing.others, key=lambda name: -standing.others[name].batch)
    stand = ", ".join(f"{name!r} stands at batch {standing.others[name].batch} of it" for name in names)
    before = standing.others[names[0]]
    lacks = (
        f"{missing(batch)} not in its sinks"
        if batch
        else f"what {names[0]!r} left may be on its way to the same tables"
    )
    return PositionMismatch(
        f"topology {topology!r} has taken nothing yet, and Spark hands out batch {batch} of streaming query {query}, which "
        f"the ledger knows by another name: {stand}. Either {names[0]!r} was renamed to {topology!r}, or {topology!r} was "
        f"added to a query that had begun without it; {lacks}. Nothing was written. Keep the name {names[0]!r}; or begin "
        f"anew with a new checkpoint, another name and other tables; or, where {topology!r} is to have what this query "
        f"reads from here on and no more, pass adopt={before.place!r}. Inspect with: stormproof audit verify {names[0]}",
        known_as=[*names],
        ledger_query=before.query,
        ledger_batch=before.batch,
        query=query,
        batch=batch,
        adopt=before.place,
    )


def missing(first: int) -> str:
    """The batches before a name's first one, as the subject of a sentence with its verb."""
    return "batch 0 is" if first == 1 else f"batches 0 to {first - 1} are"


def stands(tx: Tx, query: str, batch: int) -> Standing:
    """The topology's standing for a micro-batch of this query."""
    return _standing(tx.connection, tx.run.topology, tx.run.incarnation, query, batch)


def stands_by_name(connection: sa.Connection, topology: str, query: str, batch: int) -> Standing:
    """The same by the topology's name, without the fence: for a check before an epoch is raised."""
    incarnation: str | None = connection.execute(
        sa.text("select incarnation from stormproof.topology where name = :name"), {"name": topology}
    ).scalar_one_or_none()
    return _standing(connection, topology, incarnation, query, batch)


def _standing(connection: sa.Connection, topology: str, incarnation: str | None, query: str, batch: int) -> Standing:
    last = None if incarnation is None else newest(connection, incarnation)
    if last is not None and last.txid is not None:
        own = tables.txn.c
        state = connection.execute(
            sa.select(own.state).where(own.incarnation == incarnation, own.txid == last.txid)
        ).scalar_one_or_none()
        last = replace(last, plan=None) if state == TxnState.OPEN else last
    return Standing(last, {} if last is not None else _others(connection, topology, query, batch))


def _others(connection: sa.Connection, topology: str, query: str, batch: int) -> dict[str, StreamBatch]:
    c, row, name, mine = stream_batch.c, tables.topology.c, tables.topology.c.name, DriverIdentity.mine()
    is_mine = sa.and_(
        row.driver_host == mine.host,
        row.driver_pid == mine.pid,
        sa.func.abs(row.driver_started - mine.started) <= START_TOLERANCE_S,
    )
    is_left = sa.and_(row.stopped_at.is_(None), sa.not_(is_mine))
    last = (
        sa.select(c.incarnation, sa.func.max(c.number).label("number"))
        .where(c.query == query)
        .group_by(c.incarnation)
        .subquery()
    )
    rows = connection.execute(
        sa.select(name, stream_batch)
        .join_from(stream_batch, last, sa.and_(c.incarnation == last.c.incarnation, c.number == last.c.number))
        .join(tables.topology, tables.topology.c.incarnation == c.incarnation)
        .where(name != topology, is_left if batch == 0 else sa.true())
        .order_by(name)
    )
    return {row.name: _read(row) for row in rows}


def newest(connection: sa.Connection, incarnation: str) -> StreamBatch | None:
    """The last micro-batch that was taken."""
    return _end(connection, incarnation, stream_batch.c.number.desc())


def oldest(connection: sa.Connection, incarnation: str) -> StreamBatch | None:
    """The first micro-batch that was taken. A prune keeps it, since it says which ones before it are not in the sinks."""
    return _end(connection, incarnation, stream_batch.c.number.asc())


def _end(connection: sa.Connection, incarnation: str, order: sa.UnaryExpression[int]) -> StreamBatch | None:
    row = connection.execute(
        sa.select(stream_batch).where(stream_batch.c.incarnation == incarnation).order_by(order).limit(1)
    ).one_or_none()
    return None if row is None else _read(row)


def all_taken(connection: sa.Connection, incarnation: str) -> list[StreamBatch]:
    """All micro-batches that the ledger still has, in the order in which they were taken."""
    rows = connection.execute(
        sa.select(stream_batch).where(stream_batch.c.incarnation == incarnation).order_by(stream_batch.c.number)
    )
    return [_read(row) for row in rows]


def has_table(connection: sa.Connection) -> bool:
    """Whether the ledger's revision has the table of micro-batches."""
    return connection.execute(sa.text("select to_regclass('stormproof.stream_batch')")).scalar_one() is not None


def _read(row: Any) -> StreamBatch:
    return StreamBatch(
        *(row.number, row.query, row.batch, row.txid, row.first_id, row.stop_id, row.adopted_from, row.plan)
    )


def take(tx: Tx, taken: StreamBatch) -> None:
    """Record a micro-batch as taken."""
    tx.connection.execute(
        sa.insert(stream_batch).values(
            incarnation=tx.run.incarnation,
            number=taken.number,
            query=taken.query,
            batch=taken.batch,
            txid=taken.txid,
            first_id=taken.first,
            stop_id=taken.stop,
            adopted_from=taken.adopted_from,
            plan=taken.plan,
            taken_at=sa.func.now(),
        )
    )


def planned(tx: Tx, taken: StreamBatch, plan: str | None) -> None:
    """Record the plan by which a micro-batch is computed anew, as nothing of it was fixed."""
    c = stream_batch.c
    tx.connection.execute(
        sa.update(stream_batch).where(c.incarnation == tx.run.incarnation, c.number == taken.number).values(plan=plan)
    )


@dataclass(frozen=True, slots=True)
class Forgettable:
    """Which micro-batches a prune may remove.

    Where each is a transaction: those below `upto`, up to which the ledger is pruned. Where their rows are messages: those
    taken before `taken_before` whose messages are all below `stop_id` and have no events left (`with_events`).

    The first one of all stays, since it says what is not in the sinks; and the last one of each query, since the next one
    must follow it, and a wrong checkpoint or another name is recognised by it.
    """

    upto: int
    taken_before: datetime
    stop_id: int
    with_events: Sequence[int] = ()
    """The numbers of the messages that still have events, in rising order."""

    def find(self, tx: Tx, after: int, limit: int) -> tuple[list[StreamBatch], int | None]:
        """Up to `limit` micro-batches that may be removed, from behind number `after`; and the number after which to go on,
        or None at the end.
        """
        c, later = stream_batch.c, stream_batch.alias()
        rows = tx.connection.execute(
            sa.select(stream_batch)
            .where(
                c.incarnation == tx.run.incarnation,
                c.number > max(after, 1),
                sa.or_(
                    c.txid < self.upto,
                    sa.and_(c.txid.is_(None), c.taken_at < self.taken_before, c.stop_id <= self.stop_id),
                ),
                sa.exists().where(
                    later.c.incarnation == c.incarnation, later.c.number > c.number, later.c.query == c.query
                ),
            )
            .order_by(c.number)
            .limit(limit)
        ).all()
        found = [_read(row) for row in rows if row.first_id is None or not self._has_events(row.first_id, row.stop_id)]
        return found, rows[-1].number if len(rows) == limit else None

    def _has_events(self, first: int, stop: int) -> bool:
        place = bisect_left(self.with_events, first)
        return place < len(self.with_events) and self.with_events[place] < stop


def forget(tx: Tx, taken: Sequence[StreamBatch]) -> None:
    """Remove the rows of these micro-batches."""
    tx.connection.execute(
        sa.delete(stream_batch).where(
            stream_batch.c.incarnation == tx.run.incarnation, stream_batch.c.number.in_([one.number for one in taken])
        )
    )
