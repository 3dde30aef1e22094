"""Where a streaming query stands by the ledger: which micro-batch may be taken next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from stormproof.core.errors import PositionMismatch
from stormproof.trident.ledger import tables
from stormproof.trident.ledger.fence import DriverIdentity
from stormproof.trident.ledger.handed_in import HandedIn, handed_in, micro_batch, newest, read
from stormproof.trident.ledger.tx import Tx

_SHOWN_CHARACTERS: Final = 1_000
START_TOLERANCE_S: Final = 1.0
"""How far two readings of one process's start may lie apart."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the ledger has of a topology's name when Spark hands out a micro-batch."""

    last: HandedIn | None = None
    """The last micro-batch that it took. One of which nothing is fixed was not taken: it may be planned anew."""
    others: Mapping[str, HandedIn] = field(default_factory=dict[str, HandedIn])
    """Where this name took none: the last micro-batch of the same query that each other name took. At the query's first
    batch only those names count whose driver did not record its end: what they took may still be written.
    """

    @property
    def before(self) -> HandedIn | None:
        """The place that `adopt` must name to go on elsewhere: the last one taken, by this name or else by any other."""
        return self.last or max(self.others.values(), key=lambda taken: taken.batch, default=None)


def handed(
    topology: str, standing: Standing, query: str, batch: int, plans: Mapping[int, str | None], adopt: str | None
) -> HandedIn:
    """What micro-batch `batch` of `query` is by the ledger's standing of the topology: the last one that was taken, where
    Spark does not know that it is done; else one to be taken, with the place from which the user decided to go on.

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
            return last if batch == last.batch else micro_batch(query, batch, plan=plans.get(batch))
        if adopt != last.key:
            raise _planned_otherwise(topology, last, batch, str(found))
    if standing.before is None:
        return micro_batch(query, batch, plan=plans.get(batch))
    if adopt == standing.before.key:
        return micro_batch(query, batch, adopt, plans.get(batch))
    raise _elsewhere(topology, last, query, batch) if last else _another_name(topology, standing, query, batch)


def _elsewhere(topology: str, last: HandedIn, query: str, batch: int) -> PositionMismatch:
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
        f"on is not in the sinks yet (see docs/foreach_batch.md), pass adopt={last.key!r}. Inspect with: stormproof audit "
        f"verify {topology}",
        ledger_query=last.query,
        ledger_batch=last.batch,
        query=query,
        batch=batch,
        adopt=last.key,
    )


def _planned_otherwise(topology: str, last: HandedIn, batch: int, found: str) -> PositionMismatch:
    return PositionMismatch(
        f"topology {topology!r} took batch {last.batch} of streaming query {last.query}, which was planned to end at "
        f"{_ends(str(last.plan))}. Spark hands out batch {batch}, and by the query's checkpoint batch {last.batch} was "
        f"planned otherwise, to end at {_ends(found)}: the checkpoint was restored from a state before that batch, or "
        "lost it with the power. Rows that the first plan has are in the sinks; which others these are cannot be told. "
        "Nothing was written. Bring the newer checkpoint back. Or begin with a new checkpoint right behind the first plan's "
        f"end (of Kafka: startingOffsets), and pass adopt={last.key!r}; see docs/foreach_batch.md. Inspect with: "
        f"stormproof audit verify {topology}",
        query=last.query,
        batch=batch,
        ledger_batch=last.batch,
        ledger_plan=last.plan,
        plan=found,
        adopt=last.key,
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
        f"reads from here on and no more, pass adopt={before.key!r}. Inspect with: stormproof audit verify {names[0]}",
        known_as=[*names],
        ledger_query=before.query,
        ledger_batch=before.batch,
        query=query,
        batch=batch,
        adopt=before.key,
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
    return Standing(last, {} if last is not None else _others(connection, topology, query, batch))


def _others(connection: sa.Connection, topology: str, query: str, batch: int) -> dict[str, HandedIn]:
    c, row, name, mine = handed_in.c, tables.topology.c, tables.topology.c.name, DriverIdentity.mine()
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
        sa.select(name, handed_in)
        .join_from(handed_in, last, sa.and_(c.incarnation == last.c.incarnation, c.number == last.c.number))
        .join(tables.topology, tables.topology.c.incarnation == c.incarnation)
        .where(name != topology, is_left if batch == 0 else sa.true())
        .order_by(name)
    )
    return {row.name: read(row) for row in rows}
