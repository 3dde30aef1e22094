"""What programs and streaming queries handed in: the ledger's table of keys whose content is fixed, and a name's use.

A job has the key that its program gives it; a micro-batch has the key ``QUERY:BATCH``. A key's row is written in the
transaction that fixes the content, or that registers the messages. From then on it is only rolled forward, so a key has a
row if and only if its rows are written or will be. A prune leaves the rows of jobs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import UsageError
from stormproof.core.message import storable_text
from stormproof.core.postgres.columns import key, may, must
from stormproof.trident.ledger import tables
from stormproof.trident.ledger.tx import Tx

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
    return HandedIn(
        *(
            row.key,
            row.number,
            row.query,
            row.batch or 0,
            row.txid,
            row.first_id,
            row.stop_id,
            row.adopted_from,
            row.plan,
        )
    )


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
