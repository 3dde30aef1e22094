"""One open transaction in the ledger's database, and statements that every batch runs, made into SQL once.

Making one costs the driver more than Postgres takes to run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from stormproof.core.clock import Clock
from stormproof.trident.ledger.confirmations import Confirmation
from stormproof.trident.ledger.rows import Run


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
