"""Which micro-batches of which streaming query a topology has taken: the ledger's table of them, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import PositionMismatch
from stormproof.trident.ledger.ledger import Tx

SCHEMA: Final = "stormproof"
metadata: Final = sa.MetaData(schema=SCHEMA)

stream_batch: Final = sa.Table(
    "stream_batch",
    metadata,
    sa.Column("incarnation", sa.Text, nullable=False),
    sa.Column("number", sa.BigInteger, nullable=False, autoincrement=False, comment="from 1, as they were taken"),
    sa.Column("query", sa.Text, nullable=False, comment="the streaming query's id, which its checkpoint keeps"),
    sa.Column("batch", sa.BigInteger, nullable=False, comment="the micro-batch's id in that query, from 0"),
    sa.Column("txid", sa.BigInteger, comment="the transaction that it is, where it goes to sinks without a topology"),
    sa.Column("first_id", sa.BigInteger, comment="the first of its messages, where it feeds a topology"),
    sa.Column("stop_id", sa.BigInteger, comment="the message behind its last one"),
    sa.Column("adopted_from", sa.Text, comment="the place that it follows by a person's word: query:batch"),
    sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint("incarnation", "number", name="pk_stream_batch"),
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

    @property
    def place(self) -> str:
        """``QUERY:BATCH``: how `adopt` names it."""
        return f"{self.query}:{self.batch}"


class Handed(StrEnum):
    """What a micro-batch that Spark hands out is, seen from the ledger."""

    NEW = "new"
    AGAIN = "again"
    """The last one that was taken: Spark was not told that it is done."""
    ADOPTED = "adopted"
    """Another place than the next, which the user said to go on from."""


def handed(topology: str, last: StreamBatch | None, query: str, batch: int, adopt: str | None) -> Handed:
    """What micro-batch `batch` of `query` is, after `last`.

    Spark hands out batch after batch of one query, and after a restart the last one again that it does not know to be
    done. All else means that checkpoint and ledger do not belong together.

    Raises:
        PositionMismatch: names both places, and the argument that goes on all the same.
    """
    if last is None:
        return Handed.NEW
    if last.query == query and batch in (last.batch, last.batch + 1):
        return Handed.AGAIN if batch == last.batch else Handed.NEW
    if adopt == last.place:
        return Handed.ADOPTED
    if last.query != query:
        what = "the query's checkpoint was lost or replaced, or another query has the same name here"
    elif batch < last.batch:
        what = "the query's checkpoint was restored from an older state"
    else:
        what = "the ledger was restored from an older state, or the query ran on without this function"
    raise PositionMismatch(
        f"topology {topology!r} stands at batch {last.batch} of streaming query {last.query} by the ledger, and Spark hands "
        f"out batch {batch} of query {query}: {what}. Nothing was written. Bring the checkpoint back, or use another name; "
        f"or, where what this query reads from here on is not in the sinks yet (see docs/foreach_batch.md), pass "
        f"adopt={last.place!r}. Inspect with: stormproof audit verify {topology}",
        ledger_query=last.query,
        ledger_batch=last.batch,
        query=query,
        batch=batch,
        adopt=last.place,
    )


def last_taken(tx: Tx) -> StreamBatch | None:
    """Where the topology's query stands."""
    return _last(tx.connection, tx.run.incarnation)


def last_taken_of(connection: sa.Connection, topology: str) -> StreamBatch | None:
    """The same by the topology's name, without its fence: for a look before an epoch is raised."""
    incarnation = connection.execute(
        sa.text("select incarnation from stormproof.topology where name = :name"), {"name": topology}
    ).scalar_one_or_none()
    return None if incarnation is None else _last(connection, incarnation)


def all_taken(connection: sa.Connection, incarnation: str) -> list[StreamBatch]:
    """Every one, in the order in which they were taken."""
    rows = connection.execute(
        sa.select(stream_batch).where(stream_batch.c.incarnation == incarnation).order_by(stream_batch.c.number)
    )
    return [_read(row) for row in rows]


def _last(connection: sa.Connection, incarnation: str) -> StreamBatch | None:
    row = connection.execute(
        sa.select(stream_batch)
        .where(stream_batch.c.incarnation == incarnation)
        .order_by(stream_batch.c.number.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else _read(row)


def _read(row: Any) -> StreamBatch:
    return StreamBatch(row.number, row.query, row.batch, row.txid, row.first_id, row.stop_id, row.adopted_from)


def take(tx: Tx, taken: StreamBatch) -> None:
    """Record one."""
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
            taken_at=sa.func.now(),
        )
    )
