"""What a commit has to know of its table, by one statement: asked in each, while the rows that were written lock the table.

Until then a commit goes by the facts that the one before it found. Where the table was changed since, the commit is undone,
and begun anew by what is true now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg

from stormproof.core.sink import SinkInput
from stormproof.sinks.postgres.durable import TREE, VOLATILE
from stormproof.sinks.postgres.refusals import RIVALS, TRIGGERS
from stormproof.sinks.postgres.table import TABLE, Table, TableName, table_of

_OID: Final = "to_regclass(%(name)s::text)::oid"


def _listed(query: str) -> str:
    """The rows of a query as a JSON array of objects, whose values stand in the order of its columns."""
    return f"(select json_agg(row_to_json(listed)) from ({query}) as listed)"


_FACTS: Final = f"""{TREE}
    select {_listed(VOLATILE)}, row_security_active({{oid}}), {_listed(TRIGGERS)}, {_listed(RIVALS)}, t.*
    from ({TABLE}) as t
""".replace("{oid}", _OID)


class Rival(NamedTuple):
    """A constraint by which rows of several keys exclude each other."""

    name: str
    at_once: bool
    """Whether it holds at any moment; one that is deferrable holds at the end of a statement."""
    columns: tuple[str, ...] | None
    """Where rows exclude each other only if they are equal in some columns: these."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A table as the catalog shows it to this role, at one moment."""

    table: Table
    volatile: tuple[tuple[str, str], ...]
    """The relations that lose rows in a crash; see `durable`."""
    row_security: bool
    """Whether row-level security is active for this role, which COPY does not admit."""
    dropping: tuple[str, ...]
    """The triggers that may drop a row without an error."""
    changing: tuple[str, ...]
    """The triggers that may change what is inserted."""
    reaching: tuple[str, ...]
    """The triggers that, behind an update, may change other rows."""
    rivals: tuple[Rival, ...]
    """The unique and exclusion constraints by which rows of several keys exclude each other."""


def ask_facts(connection: psycopg.Connection, name: TableName, input_: SinkInput) -> psycopg.Cursor[tuple[Any, ...]]:
    """Ask for the facts of the table that has the name now; `facts_of` reads the answer, also behind a pipeline."""
    known = {"name": name.identifier.as_string(connection), "updates": input_.is_by_key, "keys": [*input_.keys]}
    return connection.execute(_FACTS.encode(), known)


def facts_of(asked: psycopg.Cursor[tuple[Any, ...]]) -> Facts | None:
    """The facts; None where no table has the name."""
    row = asked.fetchone()
    if row is None:
        return None
    volatile, row_security, triggers, rivals, *table = row
    rules = [tuple(one.values()) for one in triggers or ()]
    dropping, changing, reaching = (
        tuple(dict.fromkeys(str(rule[0]) for rule in rules if rule[what])) for what in (1, 2, 3)
    )
    return Facts(
        table_of(table),
        tuple((str(name), str(what)) for name, what in map(dict.values, volatile or ())),
        bool(row_security),
        dropping,
        changing,
        reaching,
        tuple(
            Rival(str(name), bool(at_once), None if columns is None else tuple(columns))
            for name, at_once, columns in map(dict.values, rivals or ())
        ),
    )
