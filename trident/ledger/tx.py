"""One open transaction in the ledger's database, and statements that every batch runs, made into SQL once.

Making one costs the driver more than Postgres takes to run it.

A form of the page is good for one decision, whichever process gets it, and however often it is sent: its secret is recorded,
as a digest, in the transaction of the decision itself. Either both are there or neither is. So a page that was started anew,
or another one that serves the same ledger, can tell whether a form was acted on.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import UsageError
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.rows import Run


class ConfirmedBefore(UsageError):
    """The form was confirmed before, and acted on; nothing was done now."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A form that was acted on: which decision, by whom, when."""

    action: str
    by: str
    at: datetime

    def __str__(self) -> str:
        return (
            f"It was confirmed before, by {self.by} at {self.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, and done then"
        )


@dataclass(frozen=True, slots=True)
class Confirmation:
    """One sending of a form. A decision that takes several transactions records it in the first that changes something."""

    digest: str
    action: str
    by: str
    click: str = field(default_factory=lambda: secrets.token_hex(16))

    @staticmethod
    def of(secret: str, action: str, by: str) -> Confirmation:
        """By the form's secret."""
        return Confirmation(digest_of(secret), action, by)

    def take(self, connection: sa.Connection, incarnation: str, now: datetime) -> None:
        """Record it in this transaction, which holds up another one that does the same until it has ended.

        Raises:
            ConfirmedBefore: another sending of the form was recorded.
        """
        values = {**asdict(self), "incarnation": incarnation, "at": now}
        connection.execute(postgresql.insert(t.confirmation).values(values).on_conflict_do_nothing())
        row = connection.execute(sa.select(t.confirmation).where(t.confirmation.c.digest == self.digest)).one()
        if row.click != self.click:
            raise ConfirmedBefore(f"{Confirmed(row.action, row.by, row.at)}: nothing was done now")


def digest_of(secret: str) -> str:
    """Under which a form is known; nobody can confirm a form by what the ledger holds."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def confirmed(connection: sa.Connection, secret: str) -> Confirmed | None:
    """What is recorded of a form; None: it was never acted on, or the record was pruned."""
    row = connection.execute(
        sa.select(t.confirmation).where(t.confirmation.c.digest == digest_of(secret))
    ).one_or_none()
    return None if row is None else Confirmed(row.action, row.by, row.at)


@dataclass(frozen=True, slots=True)
class Tx:
    """One open ledger transaction of one run, under the fence; `Ledger.transaction` opens it."""

    connection: sa.Connection
    run: Run
    clock: Clock
    confirmation: Confirmation | None = None
    """The page's form that was confirmed, where a decision on the page opened it."""

    def confirm(self) -> None:
        """Record that the form was acted on; every function that records a decision calls it, in its transaction.

        Raises:
            ConfirmedBefore: it was acted on before.
        """
        if self.confirmation is not None:
            self.confirmation.take(self.connection, self.run.incarnation, self.clock.now())

    @property
    def raw(self) -> object:
        """The driver's own connection (psycopg's on Postgres), for a source that joins the transaction."""
        return self.connection.connection.driver_connection


@dataclass(frozen=True, slots=True)
class UnfencedTx:
    """One open ledger transaction without the fence, for an operator's decision on several topologies."""

    connection: sa.Connection
    clock: Clock

    def of(self, run: Run) -> Tx:
        """The same transaction, for one topology."""
        return Tx(self.connection, run, self.clock)


class _Text(NamedTuple):
    """A statement's SQL, the values that are part of it, and how others are given to the driver."""

    sql: str
    fixed: Mapping[str, Any]
    processors: Mapping[str, Callable[[Any], Any] | None]


def given(name: str) -> sa.BindParameter[Any]:
    """A value that `Statement.run` is given under this name, which may be a column's."""
    return sa.bindparam(f"given_{name}")


class Statement:
    """A query, or changes of which none needs another's.

    On Postgres several changes are one statement, and one round trip; elsewhere one follows the other.
    """

    def __init__(self, *parts: sa.Select[Any] | sa.Insert | sa.Update) -> None:
        self._parts = parts
        self._text: _Text | None = None

    def run(self, connection: sa.Connection, **values: Any) -> sa.CursorResult[Any]:
        """Run it with values for all that is `given`; returns the result of the last part."""
        if connection.dialect.name != "postgresql":
            named = {f"given_{name}": value for name, value in values.items()}
            return [connection.execute(part, named) for part in self._parts][-1]
        if self._text is None:
            self._text = self._made(connection.dialect)
        sql, fixed, processors = self._text
        parameters = dict(fixed)
        for name, value in values.items():
            process = processors[f"given_{name}"]
            parameters[f"given_{name}"] = value if process is None else process(value)
        return connection.exec_driver_sql(sql, parameters)

    def _made(self, dialect: sa.Dialect) -> _Text:
        *others, last = self._parts
        for number, part in enumerate(others):
            last = last.add_cte(part.cte(f"part_{number}"))
        compiled = last.compile(dialect=dialect)
        processors = {
            name: bind.type.dialect_impl(dialect).bind_processor(dialect) for bind, name in compiled.bind_names.items()
        }
        fixed = {name: bind.value for bind, name in compiled.bind_names.items() if not bind.required}
        return _Text(str(compiled), fixed, processors)
