"""What programs and streaming queries handed in: the ledger's table of keys whose content is fixed, and a name's use.

A job has the key that its program gives it; a micro-batch has the key ``QUERY:BATCH``. A key's row is written in the
transaction that fixes the content, or that registers the messages. From then on it is only rolled forward, so a key has a
row if and only if its rows are written or will be. A prune leaves the rows of jobs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.base.errors import PositionMismatch, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.postgres.columns import key, may, must
from stormproof.trident.ledger import tables
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.ledger import DriverIdentity
from stormproof.trident.ledger.tables import record_of

KEY_BYTES_MAX: Final = 2_000
"""An entry of the table's index holds about 2,700."""

_IS_JOB: Final = sa.text("query is null")

handed_in: Final = sa.Table(
    "handed_in",
    tables.metadata,
    tables.incarnation(refers=True),
    key("number", sa.BigInteger, "the txid; where micro-batches feed a topology, from 1, as they were taken"),
    must("key", sa.Text, "a job's, as its program gives it; a micro-batch's is query:batch"),
    may("query", sa.Text, "the streaming query's id, which its checkpoint keeps; null: it is a job"),
    may("batch", sa.BigInteger, "the micro-batch's id in that query, from 0"),
    may("txid", sa.BigInteger, "the transaction that wrote, or is to write, its rows to the sinks"),
    may("first_id", sa.BigInteger, "the first of its messages, where it feeds a topology"),
    may("stop_id", sa.BigInteger, "the message behind its last one"),
    may("adopted_from", sa.Text, "the place that it follows by a person's word: query:batch"),
    may("plan", sa.Text, "from what Spark planned it: its times, then the offset at which each source ends"),
    must("taken_at", sa.DateTime(timezone=True), "when its content was fixed"),
    sa.Index("uq_handed_in_key", "incarnation", "key", unique=True, postgresql_where=_IS_JOB, sqlite_where=_IS_JOB),
    sa.CheckConstraint("(query is null) = (batch is null)", name="batch_of_query"),
    sa.CheckConstraint("query is not null or txid is not null", name="job_has_txid"),
    comment="jobs and micro-batches that are written, or will be: a job's key that is here is never written again; the "
    "highest number is where a query stands",
)


@dataclass(frozen=True, slots=True)
class HandedIn:
    """One job, or one micro-batch, as the ledger knows it; without a number it is not taken yet."""

    key: str
    number: int | None = None
    query: str | None = None
    """The streaming query's id; None: it is a job."""
    batch: int = 0
    txid: int | None = None
    first: int | None = None
    stop: int | None = None
    adopted_from: str | None = None
    plan: str | None = None
    """From what Spark planned it, as `Frames.plan` tells; None where that does not count."""

    def __str__(self) -> str:
        return f"key {self.key!r}" if self.query is None else f"batch {self.batch} of query {self.query}"


def micro_batch(query: str, batch: int, adopted_from: str | None = None, plan: str | None = None) -> HandedIn:
    """A micro-batch that is not taken yet. Its key is its place, as `adopt` names it."""
    return HandedIn(f"{query}:{batch}", query=query, batch=batch, adopted_from=adopted_from, plan=plan)


def checked_key(name: str, key: object) -> str:
    """A job's key as it is given.

    Raises:
        UsageError: it is no text, empty, too long, or text that Postgres cannot store.
    """
    if not isinstance(key, str) or not key:
        raise UsageError(f"{name!r}: once(key=...) takes non-empty text, such as key='2026-11-22', not {key!r}")
    if storable_text(key) != key:
        raise UsageError(f"{name!r}: once(key={key!r}) has a character that Postgres cannot store (NUL or half a pair)")
    size = len(key.encode())
    if size > KEY_BYTES_MAX:
        raise UsageError(f"{name!r}: once(key=...) takes up to {KEY_BYTES_MAX} bytes of UTF-8; this key has {size}")
    return key


def source_of(name: str) -> str:
    """The source of a name whose jobs are written by key, as the ledger has it; a streaming query's is the name itself."""
    return f"jobs of {name}"


def require_use(connection: sa.Connection, name: str, *, by_key: bool) -> None:
    """Refuse a name that streaming queries use where jobs are to use it, and the other way round.

    Raises:
        UsageError: it is used otherwise by the ledger.
    """
    source: str | None = connection.execute(
        sa.select(tables.topology.c.source).where(tables.topology.c.name == name)
    ).scalar_one_or_none()
    if source is None or (source == source_of(name)) is by_key:
        return
    used = "jobs, by once(frame, key=...)" if not by_key else "a streaming query or a topology"
    asked = "jobs, by once(frame, key=...)" if by_key else "a streaming query"
    raise UsageError(
        f"{name!r} is used by {used}, and now by {asked}: txids of both in one name cannot be told apart. Nothing was "
        "written. Give each a name and tables of its own",
        name=name,
        source=source,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def job_of(connection: sa.Connection, incarnation: str, key: str) -> HandedIn | None:
    """The job of a key; None where its content is not fixed."""
    c = handed_in.c
    return _one(connection, _of(incarnation).where(c.key == key, c.query.is_(None)))


def newest(connection: sa.Connection, incarnation: str) -> HandedIn | None:
    """The last one that was taken."""
    return _one(connection, _of(incarnation).order_by(handed_in.c.number.desc()).limit(1))


def oldest(connection: sa.Connection, incarnation: str) -> HandedIn | None:
    """The first one that was taken. A prune keeps it, since it says which micro-batches before it are not in the sinks."""
    return _one(connection, _of(incarnation).order_by(handed_in.c.number).limit(1))


def all_taken(connection: sa.Connection, incarnation: str) -> list[HandedIn]:
    """All that the ledger still has, in the order in which they were taken."""
    return [read(row) for row in connection.execute(_of(incarnation).order_by(handed_in.c.number))]


@dataclass(frozen=True, slots=True)
class JobKeys:
    """How many keys of jobs were taken, and the last one."""

    count: int
    last: str
    last_txid: int
    last_at: datetime


def summary(connection: sa.Connection, incarnation: str) -> JobKeys | None:
    """The jobs that were taken so far; None where there are none."""
    c = handed_in.c
    mine = (c.incarnation == incarnation, c.query.is_(None))
    row = connection.execute(
        sa.select(c.key, c.txid, c.taken_at).where(*mine).order_by(c.number.desc()).limit(1)
    ).one_or_none()
    if row is None:
        return None
    count = connection.execute(sa.select(sa.func.count()).select_from(handed_in).where(*mine)).scalar_one()
    return JobKeys(count, row.key, row.txid, row.taken_at)


def has_table(connection: sa.Connection) -> bool:
    """Whether the database has a ledger."""
    return connection.execute(sa.text("select to_regclass('stormproof.handed_in')")).scalar_one() is not None


def read(row: Any) -> HandedIn:
    """A row of the table."""
    return record_of(HandedIn, row, batch=row.batch or 0, first=row.first_id, stop=row.stop_id)


def _of(incarnation: str) -> sa.Select[Any]:
    return sa.select(handed_in).where(handed_in.c.incarnation == incarnation)


def _one(connection: sa.Connection, query: sa.Select[Any]) -> HandedIn | None:
    row = connection.execute(query).one_or_none()
    return None if row is None else read(row)


# -- writing ---------------------------------------------------------------------------------------------------------


def take(tx: Tx, taken: HandedIn) -> None:
    """Record that the content of a job or a micro-batch is fixed."""
    tx.connection.execute(
        sa.insert(handed_in).values(
            incarnation=tx.run.incarnation,
            number=taken.number,
            key=taken.key,
            query=taken.query,
            batch=None if taken.query is None else taken.batch,
            txid=taken.txid,
            first_id=taken.first,
            stop_id=taken.stop,
            adopted_from=taken.adopted_from,
            plan=taken.plan,
            taken_at=tx.clock.now(),
        )
    )


@dataclass(frozen=True, slots=True)
class Forgettable:
    """Which micro-batches a prune may remove.

    Where each is a transaction: those below `upto`, up to which the ledger is pruned. Where their rows are messages: those
    taken before `taken_before` whose messages are all below `stop_id` and have no events left (`with_events`).

    The first one of all stays, since it says what is not in the sinks; and the last one of each query, since the next one
    must follow it, and a wrong checkpoint or another name is recognised by it. Every job stays.
    """

    upto: int
    taken_before: datetime
    stop_id: int
    with_events: Sequence[int] = ()
    """The numbers of the messages that still have events, in rising order."""

    def find(self, tx: Tx, after: int, limit: int) -> tuple[list[HandedIn], int | None]:
        """Up to `limit` micro-batches that may be removed, from behind number `after`; and the number after which to go on,
        or None at the end.
        """
        c, later, other = handed_in.c, handed_in.alias(), handed_in.alias()
        rows = tx.connection.execute(
            _of(tx.run.incarnation)
            .where(
                c.number > after,
                sa.exists().where(other.c.incarnation == c.incarnation, other.c.number < c.number),
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
        found = [read(row) for row in rows if row.first_id is None or not self._has_events(row.first_id, row.stop_id)]
        return found, rows[-1].number if len(rows) == limit else None

    def _has_events(self, first: int, stop: int) -> bool:
        place = bisect_left(self.with_events, first)
        return place < len(self.with_events) and self.with_events[place] < stop


def forget(tx: Tx, taken: Sequence[HandedIn]) -> None:
    """Remove the rows of these micro-batches."""
    c = handed_in.c
    tx.connection.execute(
        sa.delete(handed_in).where(c.incarnation == tx.run.incarnation, c.number.in_([one.number for one in taken]))
    )


_SHOWN_CHARACTERS: Final = 1_000
START_TOLERANCE_S: Final = 1.0
"""How far two readings of one process's start may lie apart."""


@dataclass(frozen=True, slots=True)
class HandoutStanding:
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
    topology: str, standing: HandoutStanding, query: str, batch: int, plans: Mapping[int, str | None], adopt: str | None
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


def _another_name(topology: str, standing: HandoutStanding, query: str, batch: int) -> PositionMismatch:
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


def stands(tx: Tx, query: str, batch: int) -> HandoutStanding:
    """The topology's standing for a micro-batch of this query."""
    return _standing(tx.connection, tx.run.topology, tx.run.incarnation, query, batch)


def stands_by_name(connection: sa.Connection, topology: str, query: str, batch: int) -> HandoutStanding:
    """The same by the topology's name, without the fence: for a check before an epoch is raised."""
    incarnation: str | None = connection.execute(
        sa.text("select incarnation from stormproof.topology where name = :name"), {"name": topology}
    ).scalar_one_or_none()
    return _standing(connection, topology, incarnation, query, batch)


def _standing(
    connection: sa.Connection, topology: str, incarnation: str | None, query: str, batch: int
) -> HandoutStanding:
    last = None if incarnation is None else newest(connection, incarnation)
    return HandoutStanding(last, {} if last is not None else _others(connection, topology, query, batch))


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
