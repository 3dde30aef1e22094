"""The keys of batch jobs: the ledger's table of those whose content is fixed, and by what a name is used.

A key's row is written in the transaction that fixes the content of its batch. From then on the batch is only rolled
forward, so a key has a row if and only if its rows are written or will be. A prune leaves the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import sqlalchemy as sa

from stormproof.core.errors import UsageError
from stormproof.core.message import storable_text
from stormproof.trident.ledger import tables
from stormproof.trident.ledger.tx import Tx

KEY_BYTES_MAX: Final = 2_000
"""An entry of the table's index holds about 2,700."""

job_key: Final = sa.Table(
    "job_key",
    tables.metadata,
    tables.incarnation(refers=True),
    sa.Column("key", sa.Text, primary_key=True, comment="what the program calls the job, as it is given"),
    sa.Column(
        "txid",
        sa.BigInteger,
        nullable=False,
        autoincrement=False,
        comment="the transaction that wrote, or is to write, its rows",
    ),
    sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False, comment="when its content was fixed"),
    sa.UniqueConstraint("incarnation", "txid", name="uq_job_key_txid"),
    comment="jobs that are written, or will be: a key that is here is never written again",
)


def checked_key(name: str, key: object) -> str:
    """A key as it is given.

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


def txid_of(tx: Tx, key: str) -> int | None:
    """The txid that wrote, or is to write, the rows of a key; None where its content is not fixed."""
    return find(tx.connection, tx.run.incarnation, key)


def find(connection: sa.Connection, incarnation: str, key: str) -> int | None:
    """The same, for a reader."""
    c = job_key.c
    found: int | None = connection.execute(
        sa.select(c.txid).where(c.incarnation == incarnation, c.key == key)
    ).scalar_one_or_none()
    return found


def take(tx: Tx, key: str, txid: int) -> None:
    """Record that a key's rows are those of this txid."""
    tx.connection.execute(
        sa.insert(job_key).values(incarnation=tx.run.incarnation, key=key, txid=txid, taken_at=tx.clock.now())
    )


@dataclass(frozen=True, slots=True)
class JobKeys:
    """How many keys were taken, and the last one."""

    count: int
    last: str
    last_txid: int
    last_at: datetime


def summary(connection: sa.Connection, incarnation: str) -> JobKeys | None:
    """What was taken so far; None where nothing was."""
    if not has_table(connection):
        return None
    c = job_key.c
    row = connection.execute(
        sa.select(c.key, c.txid, c.taken_at).where(c.incarnation == incarnation).order_by(c.txid.desc()).limit(1)
    ).one_or_none()
    if row is None:
        return None
    count = connection.execute(
        sa.select(sa.func.count()).select_from(job_key).where(c.incarnation == incarnation)
    ).scalar_one()
    return JobKeys(count, row.key, row.txid, row.taken_at)


def all_taken(connection: sa.Connection, incarnation: str) -> dict[str, int]:
    """Each key with its txid."""
    c = job_key.c
    rows = connection.execute(sa.select(c.key, c.txid).where(c.incarnation == incarnation))
    return {row.key: row.txid for row in rows}


def has_table(connection: sa.Connection) -> bool:
    """Whether the ledger's revision has the table of keys."""
    if connection.dialect.name != "postgresql":
        return False
    return connection.execute(sa.text("select to_regclass('stormproof.job_key')")).scalar_one() is not None
